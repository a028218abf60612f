"""The documents' experiments, each runnable by name: `dissensus study NAME`.

Each module has `run(output, *, quick=False, seed=0, data=None)`, which writes `results.json`, figures (SVG
and PNG) and a page into `output` and returns the page's path. A module is imported only when its study runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True)
class Study:
    """An experiment by name.

    Attributes:
        name: As the command line takes it.
        summary: What it answers, in one line.
        module: Where its `run` is.
    """

    name: str
    summary: str
    module: str

    def run(self, output: Path, *, quick: bool = False, seed: int = 0, data: Path | None = None) -> Path:
        """Run the experiment; return the path of its page.

        Args:
            output: Folder for results, figures and the page; made if it is not there.
            quick: A smaller version, to see that it runs; its numbers are noisier.
            seed: Decides initial weights, data order and fresh samples.
            data: Folder with real data, where the study needs it.
        """
        page: Path = import_module(self.module).run(Path(output), quick=quick, seed=seed, data=data)
        return page


STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        study.name: study
        for study in (
            Study(
                "practical-regression",
                "a noisy cubic: what adversarial training, an ensemble and more members change",
                "dissensus.studies.practical_regression",
            ),
            Study(
                "practical-classification",
                "spirals: where an ensemble is sure, where it is not, and where its members differ",
                "dissensus.studies.practical_classification",
            ),
            Study(
                "uci-deep-ensembles",
                "tabular regression: one net against a mixture of five, each also trained adversarially",
                "dissensus.studies.uci_deep_ensembles",
            ),
        )
    }
)

__all__ = ["STUDIES", "Study"]
