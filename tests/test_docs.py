import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from markdown_blocks import ROOT, python_blocks, run_blocks

import dissensus
from dissensus import metrics, objectives, scores

DOCS = ROOT / "docs"
API = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
SHOWN = re.findall(r"^::: (\S+)", API, re.MULTILINE)
NAV = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
# What the command line is made of, documented by its own help and in docs/recipes.md; how steps run and networks change, inside.
NOT_API = {"engines", "nets", "cli", "commands", "demo"}
# Pages whose examples need nothing from outside, and pages that speak of outputs and scores at hand.
WHOLE = [
    "index",
    "getting-started",
    "shapes_and_signs",
    "members",
    "models",
    "heads",
    "masksembles",
    "objectives",
    "training",
    "studies",
    "loss_guided",
    "anchoring",
    "diagnosis",
    "estimators",
    "evaluation",
    "alarm",
]
# Pages that train more than a quick test may: run by `make test-all`.
LONG = ["journeys/student", "journeys/researcher", "journeys/engineer", "journeys/table", "coming-from"]
FROM_OUTPUTS = ["scores", "metrics", "masks", "joint_terms"]


def is_shown(module, name):
    """Whether the API pages name it, or show a module that gives it."""
    if re.search(rf"`(ds\.)?{name}`", API) is not None:
        return True
    value = getattr(importlib.import_module(module), name)
    return any(shown.endswith(f".{name}") or gives(shown, name, value) for shown in SHOWN)


def gives(path, name, value):
    """Whether the page of a module shows this: a value with a docstring, unless a file beside it has its name."""
    module = module_at(path)
    if module is None or not callable(value) or getattr(module, name, None) is not value:
        return False
    return not (Path(module.__file__).parent / f"{name}.py").exists()


def module_at(path):
    """The module, or None if the path is that of something in a module."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return None


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("dissensus", name) for name in dissensus.__all__),
        *(("dissensus.objectives", name) for name in objectives.__all__),
        *(("dissensus.metrics", name) for name in metrics.__all__),
        *(("dissensus.scores", name) for name in (*scores.SCORES, *scores.REGRESSION_SCORES)),
    ],
)
def test_every_public_name_is_in_the_api_pages(module, name):
    assert is_shown(module, name)


def test_the_training_loop_is_shown():
    assert "dissensus.training.fitting.fit" in SHOWN


def test_every_public_module_has_an_api_page():
    names = {path.stem for path in (ROOT / "dissensus").glob("[!_]*.py")}
    names |= {path.parent.name for path in (ROOT / "dissensus").glob("[!_]*/__init__.py")}
    missing = [
        name
        for name in sorted(names - NOT_API)
        if not any(shown == f"dissensus.{name}" or shown.startswith(f"dissensus.{name}.") for shown in SHOWN)
    ]
    assert missing == [], (
        f"show dissensus.{missing[0]} on a page of docs/api, and put that page into mkdocs.yml"
    )


@pytest.mark.parametrize("path", SHOWN)
def test_what_an_api_page_shows_exists(path):
    parent, _, name = path.rpartition(".")
    assert module_at(path) is not None or hasattr(module_at(parent), name)


def test_the_navigation_has_every_page_and_no_other():
    # Pages of results are put in by docs/hooks/results.py.
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent.name != "results"}
    assert pages == set(NAV)


@pytest.mark.parametrize("name", WHOLE)
def test_the_examples_of_a_page_run_in_order(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(f"docs/{name}.md", python_blocks(f"docs/{name}.md"))


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_the_examples_of_a_long_page_run_in_order(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(f"docs/{name}.md", python_blocks(f"docs/{name}.md"))


@pytest.mark.parametrize("path", sorted((DOCS / "journeys").glob("*.md")), ids=lambda path: path.stem)
def test_a_journey_is_a_notebook_too(path):
    spec = importlib.util.spec_from_file_location("notebooks", DOCS / "hooks" / "notebooks.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    cells = hook.notebook(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code == [block.strip() for block in python_blocks(f"docs/journeys/{path.name}")]
    assert not any("```python" in "".join(cell["source"]) for cell in cells)


@pytest.mark.parametrize("name", FROM_OUTPUTS)
def test_the_examples_of_a_page_about_outputs_run_on_outputs(name):
    given = {
        "logits": torch.randn(5, 8, 10),
        "labels": torch.randint(0, 10, (8,)),
        "ood_scores": torch.randn(20),
        "id_scores": torch.randn(30),
    }
    run_blocks(f"docs/{name}.md", python_blocks(f"docs/{name}.md"), **given)


def test_the_examples_about_corruptions_run_on_images(tmp_path, monkeypatch, capsys):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my" / "frost" / "pictures"
    folder.mkdir(parents=True)
    Image.new("RGB", (200, 200), (200, 220, 250)).save(folder / "frost.png")
    images = torch.randint(0, 256, (500, 3, 32, 32), dtype=torch.uint8)
    run_blocks("docs/corruptions.md", python_blocks("docs/corruptions.md"), images=images)
    assert "speckle_noise" in capsys.readouterr().out
