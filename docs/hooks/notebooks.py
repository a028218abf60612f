"""Journeys as notebooks: a page's prose and Python blocks become the cells of a file beside it, with what they printed.

`python docs/hooks/notebooks.py` runs every journey in a folder of its own and writes docs/journeys/outputs.json anew.
"""

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"^```python\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
JOURNEYS = Path(__file__).parents[1] / "journeys"
OUTPUTS = JOURNEYS / "outputs.json"


def printed(name: str) -> list[str]:
    """Return what the blocks of a journey printed when they were last run; nothing where they were not."""
    stored = json.loads(OUTPUTS.read_text(encoding="utf-8")) if OUTPUTS.exists() else {}
    return list(stored.get(name, []))


def cells_of(page: str, outputs: list[str]) -> list[dict[str, Any]]:
    """Return the cells of a page: text and code in turn."""
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(_BLOCK.split(page)):
        if not part.strip():
            continue
        cell: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}, "source": part.strip().splitlines(True)}
        if number % 2:
            text = outputs[number // 2] if number // 2 < len(outputs) else ""
            shown = [{"output_type": "stream", "name": "stdout", "text": text.splitlines(True)}] if text else []
            cells.append({"cell_type": "code", "execution_count": None, "outputs": shown, **cell})
        else:
            cells.append({"cell_type": "markdown", **cell})
    return cells


def notebook(page: str, outputs: list[str]) -> dict[str, Any]:
    """Return a page as a notebook (format 4.5)."""
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": cells_of(page, outputs), "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put what a block printed under it."""
    if not page.file.src_uri.startswith("journeys/"):
        return markdown
    outputs = iter(printed(Path(page.file.src_uri).stem))

    def with_output(block: re.Match[str]) -> str:
        text = next(outputs, "")
        return block[0].rstrip("\n") + (f'\n\n```text title="prints"\n{text.rstrip()}\n```\n' if text else "\n")

    return _BLOCK.sub(with_output, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Put a link to the notebook under a journey's title."""
    if not page.file.src_uri.startswith("journeys/"):
        return html
    name = Path(page.file.src_uri).stem
    return html.replace("</h1>", f'</h1>\n<p><a href="../{name}.ipynb" download>This page as a notebook</a></p>', 1)


def on_post_build(config: Any, **_: Any) -> None:
    """Write the notebooks beside the built pages."""
    for source in sorted(Path(config["docs_dir"]).glob("journeys/*.md")):
        target = Path(config["site_dir"]) / "journeys" / f"{source.stem}.ipynb"
        whole = notebook(source.read_text(encoding="utf-8"), printed(source.stem))
        target.write_text(json.dumps(whole, indent=1), encoding="utf-8")


def run(page: str, most: int = 1500) -> list[str]:
    """Run the blocks of a page in order; return what each printed, cut where it is long."""
    namespace: dict[str, Any] = {"__name__": "journey"}
    found = []
    for block in _BLOCK.findall(page):
        said = StringIO()
        with redirect_stdout(said):
            exec(compile(block, "a journey", "exec"), namespace)
        text = said.getvalue()
        found.append(text if len(text) <= most else text[:most] + "…\n")
    return found


if __name__ == "__main__":
    import os
    import tempfile

    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(JOURNEYS.glob("*.md"))}
    stored = {}
    for journey, text in texts.items():
        os.chdir(tempfile.mkdtemp())
        stored[journey] = run(text)
    OUTPUTS.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
