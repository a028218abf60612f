import subprocess
import sys

import pytest
from markdown_blocks import ROOT

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_example_runs_and_says_what_it_did(script, tmp_path):
    command = [sys.executable, "-W", "error", str(script), "--smoke"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert list(tmp_path.iterdir()) == []  # a smoke run leaves nothing where it was started


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_example_says_how_to_run_it(script):
    assert f"python examples/{script.name}" in script.read_text(encoding="utf-8")
