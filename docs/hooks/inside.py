"""Puts the map of the package and its walks, which contributors keep, into the page on how it works inside."""

import re
from pathlib import Path
from typing import Any

_ASKED = re.compile(r"<!-- CONTRIBUTING\.md: (.+?) -->")


def section(text: str, title: str) -> str:
    """Return what stands under a heading of the second level, with links as a page of `docs` has them."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"CONTRIBUTING.md has no section {title!r}; docs/inside.md shows it.")
    return found[1].strip().replace("](docs/", "](")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Fill in what a page asks for."""
    source = Path(config.docs_dir).parent / "CONTRIBUTING.md"
    return _ASKED.sub(lambda asked: section(source.read_text(encoding="utf-8"), asked[1]), markdown)
