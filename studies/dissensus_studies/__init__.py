"""The documents' experiments, each runnable by name: `dissensus study NAME`.

A paper each: `masksembles`, `collusion`, `anchoring`, `diversification`, `deep_ensembles`; `tabular`, `choosing`, `alarms` and
`guarantees` are our own. `results` writes the pages of docs/results from the record, by the `recorded` of each paper and `guide`. All
stand on `harness`: `arm_log` (arms in order, one record each, interrupted runs go on), `statistics` (repeats, intervals, estimates),
`claims` (a statement, what was measured, a verdict), `figures` (lines in panels), `outputs` (`results.json`, the page), and for images
`labelled` and `image_sets` (what is read), `image_arms` (trained and measured) and `image_study` (a study is its arms and what it
makes of them).

Each study's module has `run(output, *, quick=False, seed=0, data=None, ...)`, which writes `results.json`, figures (SVG and PNG) and a
page into `output` and returns the page's path. A module is imported only when its study runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Study:
    """An experiment by name: what it answers in one line, the module of its `run`, and whether it can read real data."""

    name: str
    summary: str
    module: str
    reads_data: bool = True

    def run(
        self, output: Path, *, quick: bool = False, seed: int = 0, data: Path | None = None, **options: Any
    ) -> Path:
        """Run the experiment into a folder; return the path of its page.

        `data` is the folder with real data; `options` are further ones of the study, which refuses those that it does not have.
        """
        run = import_module(self.module).run
        taken = signature(run).parameters
        further = Parameter.VAR_KEYWORD in {each.kind for each in taken.values()}
        lacking = [name for name in options if name not in taken and not further]
        if data is not None and not self.reads_data:
            lacking.append("data")
        if lacking:
            raise ValueError(f"The study {self.name} has no option {lacking[0]}. Leave it out.")
        page: Path = run(Path(output), quick=quick, seed=seed, data=data, **options)
        return page


_LISTED = (
    ("practical-regression", "a noisy cubic: what adversarial training, an ensemble and more members change"),
    ("practical-classification", "spirals: where an ensemble is sure, where it is not, and where its members differ"),
    ("uci-deep-ensembles", "tabular regression: one net against a mixture of five, each also trained adversarially"),
    ("tabular", "the estimators' defaults on fifteen tables beside forests, boosting, one MLP and Gaussian processes"),
    ("masksembles", "one network with masks as an ensemble: overlap, diversity, calibration by a dial"),
    ("collusion-theory", "joint training drawn: what beta means, where it must end, why collusion goes unnoticed"),
    ("collusion-uci", "tabular regression between independent and joint training: diversity, bias, codependence"),
    ("anchoring", "plain, anchored and masked networks: corruption, calibration, unknown images, adaptation"),
    ("collusion-images", "image classifiers between independent and joint training: accuracy, diversity, gaps"),
    ("diversification", "members that disagree on hard examples: diversity, detection, and what becomes of members"),
    ("alarms", "which score an alarm should go by: what rings of classes that were not shown, and of other sets"),
    ("choosing", "kinds, objectives and scores beside each other, for the same seconds of training"),
)
# Modules that are not called as their study is.
_MODULES = {
    "practical-regression": "deep_ensembles.regression",
    "practical-classification": "deep_ensembles.spirals",
    "uci-deep-ensembles": "deep_ensembles.uci",
}
_WITHOUT_DATA = ("practical-regression", "practical-classification", "collusion-theory")

STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        name: Study(
            name, summary, f"dissensus_studies.{_MODULES.get(name, name.replace('-', '.'))}", name not in _WITHOUT_DATA
        )
        for name, summary in _LISTED
    }
)

__all__ = ["STUDIES", "Study"]
