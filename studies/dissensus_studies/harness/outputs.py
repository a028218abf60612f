"""Where a study's results go: figures, `results.json`, the page, and a short table on the screen."""

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dissensus import plots
from dissensus.html import Picture, Section, Table, cell_text, write_page
from dissensus_studies.harness.arm_log import keep

if TYPE_CHECKING:
    import matplotlib.figure


@dataclass
class Outputs:
    """A folder that fills with what a study finds."""

    folder: Path
    sections: list[Section] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def picture(self, name: str, figure: "matplotlib.figure.Figure", alt: str, caption: str = "") -> Picture:
        """Save a figure as SVG and PNG; return it as a block of the page."""
        plots.save(figure, self.folder / name)
        return Picture(figure, alt, caption)

    def results(self, values: Mapping[str, Any]) -> None:
        """Write `results.json`, with what it was measured on."""
        measured_on = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        }
        text = json.dumps({**values, "measured_on": measured_on}, indent=1, default=_as_json)
        (self.folder / "results.json").write_text(text + "\n", encoding="utf-8")

    def arms(self, records: Mapping[str, dict[str, Any]], settings: Mapping[str, Any]) -> None:
        """Write `arms.jsonl`, which `python -m dissensus_studies.results add` reads, for arms that were trained in one go."""
        path = self.folder / "arms.jsonl"
        path.unlink(missing_ok=True)
        for name, record in records.items():
            keep(path, name, settings, {**record, "arm_seconds": (time.monotonic() - self.begun) / len(records)})

    def page(self, title: str, lead: str) -> Path:
        """Write the page; return its path."""
        return write_page(self.folder / "report.html", title, self.sections, lead)


def print_table(table: Table) -> None:
    """Print a table with aligned columns."""
    cells = [list(table.columns), *([cell_text(value) for value in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        print("  ".join([first.ljust(widths[0]), *(map(str.rjust, others, widths[1:]))]))


def _as_json(value: Any) -> Any:
    """Return a dataclass, a summary as it says itself, or a tensor's numbers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value.as_json() if hasattr(value, "as_json") else asdict(value)
