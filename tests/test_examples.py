import runpy
import sys

import pytest
from markdown_blocks import ROOT

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_example_runs_and_says_what_it_did(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--smoke"])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert list(tmp_path.iterdir()) == []  # a smoke run leaves nothing where it was started


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_example_says_how_to_run_it(script):
    assert f"python examples/{script.name}" in script.read_text(encoding="utf-8")
