import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from markdown_blocks import ROOT, python_blocks, run_blocks
from test_html import contrast

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
    "own-loop",
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
    "recipes",
]
JOURNEYS = sorted((DOCS / "journeys").glob("*.md"))
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


PUBLIC = [
    *(("dissensus", name) for name in dissensus.__all__),
    *(("dissensus.objectives", name) for name in objectives.__all__),
    *(("dissensus.metrics", name) for name in metrics.__all__),
    *(("dissensus.scores", name) for name in (*scores.SCORES, *scores.REGRESSION_SCORES)),
]


@pytest.mark.parametrize(("module", "name"), PUBLIC)
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
    assert missing == [], f"show dissensus.{missing[0]} on a page of docs/api, and put that page into mkdocs.yml"


@pytest.mark.parametrize("path", SHOWN)
def test_what_an_api_page_shows_exists(path):
    parent, _, name = path.rpartition(".")
    if module_at(path) is None:
        try:
            assert hasattr(importlib.import_module(parent), name)
        except ModuleNotFoundError as missing:
            if missing.name.startswith("dissensus"):
                raise
            pytest.skip(f"{missing.name} is not installed")


def test_the_navigation_has_every_page_and_no_other():
    # Pages of results are put in by docs/hooks/results.py.
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent.name != "results"}
    assert pages == set(NAV)


@pytest.mark.parametrize("name", WHOLE)
def test_the_examples_of_a_page_run_in_order(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(f"docs/{name}.md", python_blocks(f"docs/{name}.md"))


@pytest.mark.slow
def test_the_examples_of_coming_from_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks("docs/coming-from.md", python_blocks("docs/coming-from.md"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package as its wheel installs it; what it depends on comes from this environment."""
    pytest.importorskip("hatchling", reason="building the wheel takes hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run([*pip, *map(str, build)], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


# Runs the blocks of a journey as they are pasted one after the other, and keeps what each printed.
FOLLOW = """
import importlib.util, json, pathlib, sys
import dissensus
assert dissensus.__file__.startswith(sys.argv[3]), dissensus.__file__
spec = importlib.util.spec_from_file_location("notebooks", sys.argv[1])
hook = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hook)
printed = hook.run(pathlib.Path(sys.argv[2]).read_text(encoding="utf-8"))
pathlib.Path("printed.json").write_text(json.dumps(printed), encoding="utf-8")
"""
MINUTES = 5  # for the machine, of the fifteen that a page promises


def numbers_of(texts):
    return [float(number) for number in re.findall(r"-?\d+\.\d+(?:e[+-]?\d+)?", "\n".join(texts))]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", JOURNEYS, ids=lambda path: path.stem)
def test_a_journey_works_as_written_from_an_empty_folder_with_the_wheel(path, installed, tmp_path):
    text = path.read_text(encoding="utf-8")
    if "import onnxruntime" in text:
        for extra in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(extra, reason="export is an extra")
    env = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    follow = [sys.executable, "-c", FOLLOW, str(DOCS / "hooks" / "notebooks.py"), str(path), str(installed)]
    before = os.times()
    subprocess.run(follow, cwd=tmp_path, env=env, check=True)
    # Commands of ours, but for the server, which does not end by itself.
    shell = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    for command in re.findall(r"^dissensus ((?!serve).+?)(?: +#.*)?$", shell, re.MULTILINE):
        call = [sys.executable, "-m", "dissensus", *shlex.split(command)]
        subprocess.run(call, cwd=tmp_path, env=env, check=True, stdin=subprocess.DEVNULL)
    after = os.times()
    assert after.children_user - before.children_user < 60 * MINUTES
    # The page shows what is printed, up to rounding and engines.
    shown = json.loads((DOCS / "journeys" / "outputs.json").read_text(encoding="utf-8"))[path.stem]
    printed = json.loads((tmp_path / "printed.json").read_text(encoding="utf-8"))
    assert [text.count("\n") for text in printed] == [text.count("\n") for text in shown]
    close = [abs(a - b) <= 0.05 + 0.1 * abs(b) for a, b in zip(numbers_of(printed), numbers_of(shown), strict=True)]
    assert sum(close) >= 0.8 * len(close), "python docs/hooks/notebooks.py stores them anew"


@pytest.mark.parametrize("path", JOURNEYS, ids=lambda path: path.stem)
def test_a_journey_is_a_notebook_too(path):
    spec = importlib.util.spec_from_file_location("notebooks", DOCS / "hooks" / "notebooks.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    outputs = hook.printed(path.stem)
    cells = hook.notebook(path.read_text(encoding="utf-8"), outputs)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code == [block.strip() for block in python_blocks(f"docs/journeys/{path.name}")]
    assert not any("```python" in "".join(cell["source"]) for cell in cells)
    # What was printed is stored, and small.
    assert len(outputs) == len(code)
    shown = ["".join(out["text"]) for cell in cells if cell["cell_type"] == "code" for out in cell["outputs"]]
    assert shown == [text for text in outputs if text]
    assert 0 < sum(map(len, shown)) < 20_000


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


GUIDES = sorted(DOCS.glob("*.md"))
PROSE = [*GUIDES, *JOURNEYS]
# Lists to look things up in.
LISTS = {"coming-from", "corruption-table", "glossary", "models-table", "recipe-keys"}
FOLD = re.compile(r"^<details.*?^</details>", re.MULTILINE | re.DOTALL)


def unfolded(text):
    """What a page shows before anything on it is opened."""
    before = None
    while text != before:
        before, text = text, FOLD.sub("", text)
    return text


@pytest.mark.parametrize("page", [p for p in GUIDES if p.stem not in LISTS], ids=lambda p: p.stem)
def test_a_guide_is_short(page):
    text = page.read_text(encoding="utf-8")
    words = [word for line in text.splitlines() if not line.startswith("|") for word in line.split()]
    assert len(words) <= 1000, "code included, tables not; what the API page says need not be said again"
    assert text.count("<details") == text.count("</details>")
    assert text.count("<details") == text.count("<summary>")


# What benchmarks write for one machine has no claims to judge.
RESULTS = [page for page in sorted((DOCS / "results").glob("*.md")) if page.stem != "scaling"]


@pytest.mark.parametrize("page", RESULTS, ids=lambda p: p.stem)
def test_a_page_of_results_opens_with_a_table_and_a_figure(page):
    top = page.read_text(encoding="utf-8").split("<summary>How it was done")[0]
    shown = unfolded(top.split("\n## ")[0] if page.stem != "claims" else top)
    table = re.search(r"^\| (claim|promise|aim|the ensemble by) \|.*\n\| ?-", shown, re.MULTILINE)
    assert table is not None
    assert re.search(r"^!\[[^\]]{20,}\]\(\S+\.svg\)$", shown, re.MULTILINE)


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_every_public_name_has_an_example_and_is_in_a_guide(module, name):
    guides = "\n".join(page.read_text(encoding="utf-8") for page in PROSE)
    examples = "\n".join(re.findall(r"^```python.*?\n(.*?)^```", guides, re.MULTILINE | re.DOTALL))
    value = getattr(importlib.import_module(module), name)
    own = f"{value.__doc__ or ''}{getattr(value, '__init__', value).__doc__ or ''}"
    assert ">>>" in own or re.search(rf"\b{name}\b", examples), "show it in its docstring or in a guide"
    assert re.search(rf"\b{name}\b", guides), "no guide speaks of it"


def anchor(heading):
    """The identifier that Markdown's table of contents gives a heading."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def headings(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    seen, found = Counter(), set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        name = anchor(heading)
        found.add(f"{name}_{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: str(p.relative_to(DOCS)))
def test_links_and_images_lead_somewhere(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, place = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        if place and target.suffix == ".md" and target.parent.name != "api":
            assert place in headings(target), link


# How we write, and what is often mistyped: wrong=right, a line each.
SPELLINGS = dict(line.split("=") for line in (ROOT / "tests" / "words.txt").read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_words_are_spelled_as_we_spell_them(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]+>|https?://\S+", " … ", text)
    words = re.findall(r"[A-Za-z]+", text)
    found = {word: SPELLINGS[word.lower()] for word in words if word.lower() in SPELLINGS}
    assert found == {}
    twice = re.findall(r"(?<![\w|])(the|a|an|of|to|in|is|and) +\1\b(?!\.)", text)
    assert twice == []


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_colours_of_the_site_can_be_read(scheme):
    style = (DOCS / "extra.css").read_text(encoding="utf-8")
    (block,) = re.findall(rf'^\[data-md-color-scheme="{scheme}"\] \{{(.*?)^\}}', style, re.MULTILINE | re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", block))
    papers = [colours["md-default-bg-color"], colours["card"], colours["md-code-bg-color"]]
    inks = [colours[name] for name in ("md-default-fg-color", "md-default-fg-color--light", "md-typeset-a-color")]
    for ink in inks:
        assert all(contrast(ink, paper) >= 4.5 for paper in papers)
    code = [value for name, value in colours.items() if name.startswith("md-code-hl")]
    assert all(contrast(ink, colours["md-code-bg-color"]) >= 4.5 for ink in code)
    assert contrast("#ffffff", "#0b4a6f") >= 4.5  # the bar at the top, in both


def test_the_landing_page_says_what_the_records_say():
    landing = (DOCS / "index.md").read_text(encoding="utf-8")
    lines = (ROOT / "studies" / "records" / "claims.jsonl").read_text(encoding="utf-8").splitlines()
    claims = [claim for claim in map(json.loads, lines) if "claim" in claim and "regime" not in claim]
    verdicts = Counter(claim["verdict"] for claim in claims)
    long = verdicts["reproduced"] + verdicts["not reproduced"] + verdicts["within noise"]
    assert f"\n{verdicts['reproduced']} of {long}\n" in landing
    assert f"; {sum(verdicts.values()) - long} more have shorter runs at best" in landing
    promises = (DOCS / "results" / "guarantees.md").read_text(encoding="utf-8")
    (rate,) = re.findall(r"16 scores ring at the promised rate, 0.1 \| \*\*held\*\* \| (.+?) \|", promises)
    assert f"\n{rate}\n" in landing
    stored = json.loads((ROOT / "benchmarks" / "records" / "h200.json").read_text(encoding="utf-8"))
    (resnets,) = [each["sides"] for each in stored["results"] if each["case"] == "resnet"]
    assert f"\n{resnets['ds.fit, compiled']['ms'] / resnets['one eager model']['ms']:.2f} ×\n" in landing


def test_the_page_on_the_inside_shows_the_contributors_map():
    spec = importlib.util.spec_from_file_location("inside", DOCS / "hooks" / "inside.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    (title,) = re.findall(r"<!-- CONTRIBUTING\.md: (.+?) -->", (DOCS / "inside.md").read_text(encoding="utf-8"))
    shown = hook.section((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), title)
    assert "The walk of `ds.fit`" in shown
    assert "](docs/" not in shown
    with pytest.raises(ValueError, match="has no section 'Nothing'"):
        hook.section("# A\n\n## B\n", "Nothing")


@pytest.mark.slow
def test_the_examples_about_transformers_run(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is an extra")
    monkeypatch.chdir(tmp_path)
    run_blocks("docs/huggingface.md", python_blocks("docs/huggingface.md"))
