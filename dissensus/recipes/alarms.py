"""A run's alarm and the coverage of its sets and intervals: calibrated once on held-out rows, kept as JSON in its folder."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from dissensus._checks import largest_value
from dissensus._files import read_state, replace_file, write_state
from dissensus.conformal import Alarm, DriftMonitor, intervals
from dissensus.conformal.alarm import Score
from dissensus.detectors import RowDistance
from dissensus.evaluation.results import ID, AlarmCheck, floats
from dissensus.predictions import mixture, predict
from dissensus.recipes.data import Sets, stored_digests
from dissensus.scores import REGRESSION_SCORES, SCORES

if TYPE_CHECKING:
    from dissensus.recipes.recipe import LoadedRun

ALARM = "alarm.json"
COVERAGE = "coverage.json"
BANK = "bank.safetensors"
_FORMAT = "dissensus coverage 1"
_SHOWN = 1000
# Training rows that distances are measured to.
_BANK_ROWS = 4096


@dataclass(frozen=True)
class AlarmSettings:
    """The table `[alarm]` of a recipe.

    Attributes:
        score: Which score raises the alarm; "auto" is the distance to the training rows of a table, and else
            `mutual_information`, for regression `knowledge_variance`.
        false_alarms: How often ordinary inputs may raise it.
        coverage: How often prediction sets and intervals are to hold the truth.
    """

    score: str = "auto"
    false_alarms: float = 0.01
    coverage: float = 0.9

    def __post_init__(self) -> None:
        self.check(None)
        for name in ("false_alarms", "coverage"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} in [alarm] must lie between 0 and 1; got {getattr(self, name)}.")

    def check(self, regression: bool | None) -> None:
        """Refuse a score that the run does not have; None where its targets are not known yet."""
        known = {None: [*SCORES, *REGRESSION_SCORES], True: REGRESSION_SCORES, False: SCORES}[regression]
        if self.score not in ("auto", *known):
            raise ValueError(f"score in [alarm] must be one of auto, {', '.join(known)}; got {self.score!r}.")


@dataclass(frozen=True)
class Calibration:
    """What a run knows about held-out rows."""

    alarm: Alarm  # ranks scores among theirs
    # How far the truth was from the prediction, `(targets, rows)`: 1 - its probability, or the error in standard deviations.
    misses: Sequence[Sequence[float]]
    coverage: float  # how often sets and intervals are to hold the truth
    # Of a stream: ranks scores among all earlier ones, those of held-out rows first.
    monitor: DriftMonitor | None = None

    def for_a_stream(self) -> "Calibration":
        """Return the same with a new monitor, if there are held-out rows enough for one."""
        return replace(self, monitor=DriftMonitor.of_alarm(self.alarm))

    @property
    def reach(self) -> list[float]:
        """How far the truth may be from a prediction, target by target, so that it is covered as often as wanted."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # too few rows for the coverage: everything is covered
            return [
                float(intervals((np.zeros(len(own)), np.ones(len(own))), own, ([0.0], [1.0]), self.coverage)[0, 1])
                for own in self.misses
            ]


def calibrate_run(run: "LoadedRun", sets: Sets, settings: AlarmSettings, folder: Path) -> list[str]:
    """Calibrate a run on rows held out for that, or else to validate, into its folder; return what there is to say about it."""
    held_out = sets.calibration or sets.validation
    if held_out is None:
        return ["No alarm was calibrated, as no rows were held out for it: set calibration under [data]."]
    x, y = run.preprocessing(held_out.x), run.preprocessing.targets_in_units(held_out)
    fine = scorable(x, predict(run.ensemble, x))
    x, y = x[fine], y[fine.to(y.device)]
    score = _score(run, sets, settings, folder)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        alarm = Alarm.calibrate(
            run.ensemble,
            (x, y),
            score=score,
            false_alarms=settings.false_alarms,
            loss=run.recipe.likelihood.name if run.preprocessing.classes is None else "cross_entropy",
        )
    write_state(folder / COVERAGE, _FORMAT, {"coverage": settings.coverage, "misses": _misses(run, x, y).tolist()})
    alarm.save(folder / ALARM)
    notes = [f"{warning.message}" for warning in said if warning.category is UserWarning]
    if left := int((~fine).sum()):
        notes.append(f"{left} held-out rows are so far out that they cannot be scored, and do not calibrate the alarm.")
    if sets.calibration is None:
        notes.append(
            "The alarm was calibrated on the validation rows, which also chose the weights, so its rate is approximate; "
            "calibration = 0.1 under [data] keeps rows for it alone."
        )
    return notes


def scorable(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return which rows can be scored, `(batch,)`: their inputs, and all outputs `(members, batch, ...)`, are not too large for it."""
    # Not `>`: NaN, for which every comparison is false, cannot be scored either.
    fine = (outputs.abs() <= largest_value(outputs)).transpose(0, 1).flatten(1).all(1).to(inputs.device)
    return fine & (inputs.abs() <= largest_value(inputs)).flatten(1).all(1) if inputs.is_floating_point() else fine


def _score(run: "LoadedRun", sets: Sets, settings: AlarmSettings, folder: Path) -> Score:
    """Return the score that the alarm ranks; where that is the distance to training rows, these go into the folder."""
    table = run.preprocessing.columns is not None and run.preprocessing.mean is not None
    if settings.score != "auto" or not table:
        (folder / BANK).unlink(missing_ok=True)
        return settings.score
    distance = RowDistance(run.preprocessing(_some(sets.train.x, _BANK_ROWS)))
    replace_file(folder / BANK, save({"bank": distance.bank}))
    return distance


def load_calibration(
    folder: Path, run: "LoadedRun", false_alarms: float | None = None, coverage: float | None = None
) -> Calibration | None:
    """Read a run's alarm and coverage, at its own rates or others; None where nothing was held out to calibrate on."""
    if not (folder / ALARM).exists():
        if any(stored_digests(folder, part) is not None for part in ("calibration", "validation")):
            raise ValueError(
                f"{folder / ALARM} is missing, although rows were held out for it. Make it again: dissensus train {folder} --resume"
            )
        return None
    state = read_state(folder / COVERAGE, _FORMAT)
    score = RowDistance(load_file(folder / BANK)["bank"]) if (folder / BANK).exists() else None
    alarm = Alarm.load(folder / ALARM, run.ensemble, score=score)
    alarm = alarm if false_alarms is None else alarm.at(false_alarms)
    return Calibration(alarm, state["misses"], state["coverage"] if coverage is None else coverage)


def check_alarm(
    run: "LoadedRun", calibration: Calibration, known: tuple[Tensor, Tensor], unknown: Mapping[str, Tensor]
) -> AlarmCheck:
    """Look how the alarm, and sets or intervals, do on inputs that it was not calibrated on: raw ones, known with their targets."""
    alarm = calibration.alarm
    scores = {name: alarm.scorer(run.ensemble, run.preprocessing(x)) for name, x in {ID: known[0], **unknown}.items()}
    p_values = {name: alarm.p_values_of(own) for name, own in scores.items()}
    monitor = calibration.for_a_stream().monitor
    drift = np.zeros(1) if monitor is None else monitor.log_path(scores[ID])
    misses = _misses(run, run.preprocessing(known[0]), known[1])
    inside = misses <= torch.tensor(calibration.reach, dtype=torch.float64)[:, None]
    return AlarmCheck(
        score=alarm.scorer.name,
        false_alarms=alarm.false_alarms,
        calibrated_on=len(alarm.calibration[None]),
        flagged={name: float((own <= alarm.false_alarms).mean()) for name, own in p_values.items()},
        p_values={name: floats(np.sort(_some(own, _SHOWN))) for name, own in p_values.items()},
        coverage=calibration.coverage,
        covered=float(inside.double().mean()),
        drift=floats(_some(drift, _SHOWN)),
    )


def _some(values: Any, most: int) -> Any:
    """Return at most so many values, spread evenly."""
    return values[np.linspace(0, len(values) - 1, min(len(values), most)).round().astype(int)]


def _misses(run: "LoadedRun", x: Tensor, y: Tensor) -> Tensor:
    outputs = predict(run.ensemble, x)
    if run.preprocessing.classes is not None:
        probs = outputs.softmax(-1).mean(0)
        return 1 - probs[torch.arange(len(y)), y][None].double()
    mean, deviation = _moments(run, outputs)
    return ((y - mean).abs() / deviation).T.double()


def _moments(run: "LoadedRun", outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of a regression's mixture, `(batch, targets)` each; 1 where points have none."""
    likelihood = run.recipe.likelihood
    if likelihood.kind != "density":
        return outputs.mean(0), torch.ones_like(outputs[0])
    return mixture(*likelihood.mean_and_scale(outputs), family=likelihood.family)


def calibrated_columns(
    run: "LoadedRun", calibration: Calibration, x: Tensor, outputs: Tensor, scores: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return p-value, flag, and prediction set or interval of inputs as members see them; the monitor sees them in this order."""
    scorer = calibration.alarm.scorer
    columns: dict[str, Any] = {}
    if scorer.of_inputs:
        score = columns[scorer.name] = scorer(run.ensemble, x)
    else:
        own = scores[scorer.name].cpu()
        score = (own if own.ndim == 1 else own.mean(-1)).numpy()
    p = calibration.alarm.p_values_of(score)
    if calibration.monitor is not None:
        calibration.monitor.update_scores(score)
    columns |= {"p_value": p, "flag": p <= calibration.alarm.false_alarms}
    reach = calibration.reach
    if run.preprocessing.classes is not None:
        inside = 1 - outputs.softmax(-1).mean(0).double() <= reach[0]
        names = np.asarray(run.preprocessing.classes)
        return columns | {"set": ["|".join(names[row]) for row in inside.cpu().numpy()]}
    mean, deviation = _moments(run, outputs)
    half = torch.tensor(reach).to(mean) * deviation
    return columns | by_target({"low": mean - half, "high": mean + half})


def by_target(columns: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return columns `(batch, targets)` one a target, whose number ends their names where there are several."""
    targets = next(iter(columns.values())).shape[1]
    return {
        name if targets == 1 else f"{name}_{target}": values[:, target].cpu().numpy()
        for target in range(targets)
        for name, values in columns.items()
    }
