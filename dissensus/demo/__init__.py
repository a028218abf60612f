"""The main job on real data: an ensemble learns some handwritten digits and is asked about others too.

The data comes with scikit-learn, so nothing is downloaded. The digits 0 to 6 are known; 7, 8 and 9 are never
shown in training, and known digits are corrupted by noise, shifts and covers. Tables and page show how good
the predictions are, and whether the ensemble notices what it does not know.
"""

import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dissensus.demo.answers import KNOWN, Numbers, ask, detection, load, quality, uncertainty
from dissensus.html import Table, cell_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["DemoResult", "run"]

# Module to the package that brings it.
_NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


@dataclass(frozen=True)
class DemoResult:
    """Numbers of the demo, and where its page is.

    Attributes:
        page: The HTML page.
        quality: One member (mean of all) and the ensemble: accuracy, NLL, Brier and ECE on known digits.
        uncertainty: For each set of digits the ensemble's accuracy (None where it has no right answer to give) and
            its mean total, data and knowledge uncertainty, in nats.
        detection: For each score its AUROC, known digits against each kind of unknown ones.
        seconds: Time that it took, training and page together.
    """

    page: Path
    quality: Numbers
    uncertainty: Numbers
    detection: Numbers
    seconds: float


def run(
    output: Path | str = "demo-report", *, num_members: int = 5, epochs: int = 40, seed: int = 0
) -> DemoResult:
    """Train the ensemble, measure it, print the tables and write the page.

    Args:
        output: Folder for the page, `report.html`.
        num_members: Members of the ensemble; at least two, or nobody can disagree.
        epochs: How often each member goes through the training digits.
        seed: Decides everything.

    Returns:
        The numbers of the tables, and where the page is.
    """
    _check_installed()
    if num_members < 2:
        raise ValueError(f"The demo needs at least 2 members, or nobody can disagree; got {num_members}.")
    folder = Path(output)
    # Before training, so that a folder which cannot be made costs no time.
    folder.mkdir(parents=True, exist_ok=True)
    from rich.console import Console

    from dissensus.demo import page

    console, start = Console(), time.perf_counter()
    digits = load(seed)
    console.print(
        f"Training {num_members} networks on {len(digits.train.x)} images of the digits 0 to {KNOWN - 1} …"
    )
    answers = ask(digits, num_members=num_members, epochs=epochs, seed=seed)
    console.print(f"Trained in {answers.run.seconds:.1f} s.\n")
    results = quality(answers), uncertainty(answers), detection(answers)
    _show(page.quality_table(results[0], num_members), console)
    _show(page.uncertainty_table(results[1]), console)
    _show(page.detection_table(results[2]), console)
    path = page.write_demo_page(folder / "report.html", answers, *results, seed=seed)
    seconds = time.perf_counter() - start
    console.print(
        f"Page with pictures: {path} ({seconds:.1f} s in all)", soft_wrap=True, markup=False, highlight=False
    )
    return DemoResult(path, *results, seconds)


def _check_installed() -> None:
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(
            f"The demo needs {' and '.join(missing)}, which this environment lacks. "
            "Install with: pip install 'dissensus[demo]'"
        )


def _show(table: Table, console: "Console") -> None:
    """Print a table to the terminal."""
    from rich import box
    from rich.table import Table as Printed

    printed = Printed(title=table.caption, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, name in enumerate(table.columns):
        printed.add_column(name, justify="right" if number else "left")
    for row in table.rows:
        printed.add_row(*map(cell_text, row))
    console.print(printed)
