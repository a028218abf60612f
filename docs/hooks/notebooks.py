"""Journeys as notebooks: a page's prose and Python blocks become the cells of a file beside it."""

import json
import re
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"^```python\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)


def cells_of(page: str) -> list[dict[str, Any]]:
    """Return the cells of a page: text and code in turn."""
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(_BLOCK.split(page)):
        if not part.strip():
            continue
        cell: dict[str, Any] = {
            "id": f"cell-{number}",
            "metadata": {},
            "source": part.strip().splitlines(True),
        }
        if number % 2:
            cells.append({"cell_type": "code", "execution_count": None, "outputs": [], **cell})
        else:
            cells.append({"cell_type": "markdown", **cell})
    return cells


def notebook(page: str) -> dict[str, Any]:
    """Return a page as a notebook (format 4.5), without outputs."""
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": cells_of(page), "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Put a link to the notebook under a journey's title."""
    if not page.file.src_uri.startswith("journeys/"):
        return html
    name = Path(page.file.src_uri).stem
    return html.replace(
        "</h1>", f'</h1>\n<p><a href="../{name}.ipynb" download>This page as a notebook</a></p>', 1
    )


def on_post_build(config: Any, **_: Any) -> None:
    """Write the notebooks beside the built pages."""
    for source in sorted(Path(config["docs_dir"]).glob("journeys/*.md")):
        target = Path(config["site_dir"]) / "journeys" / f"{source.stem}.ipynb"
        target.write_text(
            json.dumps(notebook(source.read_text(encoding="utf-8")), indent=1), encoding="utf-8"
        )
