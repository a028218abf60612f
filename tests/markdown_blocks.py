"""Python examples of Markdown pages, cut out so that they can be run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def python_blocks(page):
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def run_blocks(page, blocks, **given):
    """Run blocks one after the other in one namespace, with the page's name in tracebacks."""
    namespace = {"__name__": "example", **given}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{page}, example {number}", "exec"), namespace)
