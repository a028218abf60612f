"""Models that people have train, answer and are saved as ensembles, or are refused in a sentence; the docs list them."""

import re

import pytest
from markdown_blocks import ROOT, run_blocks
from models_table import (
    PAGE,
    REFUSED,
    TORCH,
    declare_torchvision,
    timm_models,
    torchvision_models,
    transformers_models,
    try_out,
)

import dissensus as ds

QUICK = ("linear", "tied weights", "dictionary out")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TORCH])
def test_a_model_trains_answers_and_is_saved(name):
    try_out(*TORCH[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", ["transformers", "timm", "torchvision"])
def test_models_of_other_packages(package):
    models = {"transformers": transformers_models, "timm": timm_models, "torchvision": torchvision_models}
    found = models[package]()
    if not found:
        pytest.skip(f"{package} is not installed")
    failed = {}
    for name, case in found.items():
        try:
            try_out(*case)
        except Exception as problem:
            failed[name] = str(problem)[:200]
    assert failed == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_documented_examples_with_other_packages(package):
    declare_torchvision()
    pytest.importorskip(package)
    text = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
    blocks = re.findall(rf"^```python needs {package}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    run_blocks("docs/huggingface.md", blocks)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_refused_in_a_sentence(name):
    make, (x, y), words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        ds.fit(ds.DeepEnsemble(make, 2), (x, y), epochs=1, device="cpu")


def test_the_page_lists_the_models():
    page = PAGE.read_text(encoding="utf-8")
    missing = [name for name in TORCH if f"| {name} |" not in page]
    assert missing == [], "write it anew: python tests/models_table.py"
