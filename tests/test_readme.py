import re

import pytest
from markdown_blocks import ROOT, python_blocks, run_blocks

BLOCKS = python_blocks("README.md")


@pytest.mark.parametrize("block", BLOCKS, ids=["out of its depth"])
def test_each_example_of_the_readme_runs_by_itself(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks("README.md", [block])


def test_links_into_the_repository_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert local
    assert [link for link in local if not (ROOT / link).exists()] == []
