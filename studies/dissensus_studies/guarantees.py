"""Do the promises of `ds.conformal` hold? 1 000 repetitions of each, and the delay of the drift monitor.

`python -m dissensus_studies.guarantees` writes docs/results/guarantees.json and the page beside it (about six minutes).
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import dissensus as ds
from dissensus import conformal
from dissensus.conformal.coverage import IntervalMethod, SetMethod
from dissensus.objectives.likelihoods import mean_and_scale
from dissensus.scores import REGRESSION_SCORES, all_scores
from dissensus_studies.harness.arm_log import processor
from dissensus_studies.harness.figures import save_figure
from dissensus_studies.recorded import markdown, template
from dissensus_studies.results import folded

if TYPE_CHECKING:
    import matplotlib.figure

REPETITIONS = 1000
HELD_OUT = 99  # with rates of 0.1, (n + 1) times the rate is whole, so the rate is met exactly where there are no ties
RATE = 0.1
LABELS = np.repeat(np.arange(4), HELD_OUT)
SET_METHODS: tuple[SetMethod, ...] = ("lac", "aps", "raps")
INTERVAL_METHODS: tuple[IntervalMethod, ...] = ("normalised", "cqr")
DISCRETE = ("num_unique", "variation_ratio")
UNKNOWN_CLASS = "total_entropy, class not known"
STREAM = 10_000
THRESHOLDS = (5, 20, 100)
SHIFTS: dict[str, tuple[float, float]] = {
    "mean +0.5 sd": (0.5, 1),
    "mean +1 sd": (1, 1),
    "mean +2 sd": (2, 1),
    "mean −1 sd": (-1, 1),
    "sd × 2": (0, 2),
}
Floats: TypeAlias = NDArray[np.float64]
Places: TypeAlias = NDArray[np.intp]
Pools: TypeAlias = Mapping[str, Floats]


def pools(num: int) -> tuple[Pools, NDArray[np.int64], Floats]:
    """Return scores of fresh inputs by name, their classes, and mean probabilities, from one trained classifier."""
    x, y = _classes(400, seed=0)
    ens = ds.DeepEnsemble(_network(4), num_members=5)
    ds.fit(ens, (x, y), epochs=10, lr=1e-2, batch_size=64)
    x, y = _classes(num, seed=1)
    logits = ds.predict(ens, x)
    scores = {name: own.double().numpy() for name, own in all_scores(logits).items()}
    return scores, y.numpy(), logits.double().softmax(-1).mean(0).numpy()


def regression_pool(num: int) -> tuple[Pools, Floats, Floats, Floats]:
    """Return variances of fresh inputs by name, and mean, standard deviation and target of each, from one regressor."""
    x, y = _targets(400, seed=0)
    ens = ds.DeepEnsemble(_network(2), num_members=5)
    ds.fit(ens, (x, y), objective=ds.objectives.Independent("gaussian_nll"), epochs=10, lr=1e-2, batch_size=64)
    x, y = _targets(num, seed=1)
    mean, scale = mean_and_scale(ds.predict(ens, x).double())
    scores = {name: score(mean, scale)[:, 0].numpy() for name, score in REGRESSION_SCORES.items()}
    centre, sd = ds.mixture(mean, scale)
    return scores, centre[:, 0].numpy(), sd[:, 0].numpy(), y.double().numpy()


def false_alarms(repetitions: int = REPETITIONS) -> dict[str, float]:
    """Return how often one new input rings, for every score; each repetition has held-out inputs of its own."""
    size = HELD_OUT + 1
    (classes, *_), (regression, *_) = pools(repetitions * size), regression_pool(repetitions * size)

    def rings(row: Floats) -> bool:
        return conformal.Alarm.of_scores(row[:-1], false_alarms=RATE).p_values_of(row[-1:])[0] <= RATE

    rows = {name: own.reshape(repetitions, size) for name, own in {**classes, **regression}.items()}
    return {name: float(np.mean([rings(row) for row in own])) for name, own in rows.items()}


def false_alarms_of_a_chosen_score(repetitions: int = REPETITIONS) -> dict[str, float]:
    """Return how often one new input rings where examples choose the score, all from scratch in each repetition."""
    ens = ds.DeepEnsemble(_network(4), num_members=3)
    ds.fit(ens, _classes(400, seed=0), epochs=5, lr=1e-2, batch_size=64)
    between = 0.3 * _classes(20, seed=1)[0]  # the classes, where scores can tell them
    rings = []
    for repetition in range(repetitions):
        x, _ = _classes(133, seed=2 + repetition)  # of 132, a quarter chooses and 99 are ranked among
        alarm = ds.Alarm.calibrate(ens, x[:-1], examples=between, false_alarms=RATE, seed=repetition)
        rings.append(bool(alarm(x[-1:])))
    return {"chosen by examples": float(np.mean(rings))}


def _by_class(repetitions: int) -> tuple[Pools, Floats, Places]:
    """Return scores and mean probabilities of fresh inputs, and the places of those of each class, `(repetitions, classes, inputs)`."""
    per_class = HELD_OUT + 1
    scores, y, probs = pools(repetitions * per_class * 8)
    places = [np.flatnonzero(y == c)[: repetitions * per_class].reshape(repetitions, -1) for c in range(4)]
    return scores, probs, np.stack(places, 1)


def _named(shares: Sequence[NDArray[np.bool_]]) -> dict[str, float]:
    return {f"class {c}": float(share) for c, share in enumerate(np.mean(shares, 0))}


def false_alarms_by_class(repetitions: int = REPETITIONS) -> dict[str, dict[str, float]]:
    """Return how often one new input of each class rings, for every score; for one also where its class is not known."""
    scores, _, places = _by_class(repetitions)

    def ring(rows: Floats, of: NDArray[np.int64] | None) -> NDArray[np.bool_]:
        alarm = conformal.Alarm.of_scores(rows[:, :-1].ravel(), labels=LABELS, false_alarms=RATE)
        return alarm.p_values_of(rows[:, -1], of) <= RATE

    known: dict[str, tuple[Floats, NDArray[np.int64] | None]] = {n: (own, np.arange(4)) for n, own in scores.items()}
    known[UNKNOWN_CLASS] = scores["total_entropy"], None
    return {name: _named([ring(rows, of) for rows in own[places]]) for name, (own, of) in known.items()}


def coverage(repetitions: int = REPETITIONS) -> dict[str, float]:
    """Return how often sets and intervals for one new input hold the truth."""
    rows = np.arange(repetitions * (HELD_OUT + 1)).reshape(repetitions, HELD_OUT + 1)
    _, y, probs = pools(rows.size)
    _, mean, sd, target = regression_pool(rows.size)

    def set_holds(cal: Places, new: Places, method: SetMethod) -> bool:
        return conformal.sets(probs[cal], y[cal], probs[new], 1 - RATE, method=method)[0, y[new[0]]]

    def interval_holds(cal: Places, new: Places, method: IntervalMethod) -> bool:
        # To CQR, quantiles that are lopsided and too narrow.
        first, second = (mean, sd) if method == "normalised" else (mean - sd, mean + 0.5 * sd)
        given, asked = (first[cal], second[cal]), (first[new], second[new])
        low, high = conformal.intervals(given, target[cal], asked, 1 - RATE, method=method)[0]
        return low <= target[new[0]] <= high

    cases: dict[str, Callable[[Places, Places], bool]] = {
        **{f"sets, {method}": partial(set_holds, method=method) for method in SET_METHODS},
        **{f"intervals, {method}": partial(interval_holds, method=method) for method in INTERVAL_METHODS},
    }
    return {name: float(np.mean([holds(i[:-1], i[-1:]) for i in rows])) for name, holds in cases.items()}


def coverage_by_class(repetitions: int = REPETITIONS) -> dict[str, dict[str, float]]:
    """Return how often sets hold the truth of a new input of each class, by method."""
    _, probs, places = _by_class(repetitions)

    def hold(rows: Places, method: SetMethod) -> NDArray[np.bool_]:
        cal, new = probs[rows[:, :-1].ravel()], probs[rows[:, -1]]
        return np.diagonal(conformal.sets(cal, LABELS, new, 1 - RATE, method=method, per_class=True))

    return {f"sets, {method}": _named([hold(rows, method) for rows in places]) for method in SET_METHODS}


def quiet_streams(repetitions: int = REPETITIONS) -> dict[str, dict[str, float]]:
    """Return the share of streams without a change in which a martingale ever reaches each threshold."""
    rng = np.random.default_rng(0)

    def monitored(draw: Callable[[int], Floats], seed: int) -> float:
        monitor = conformal.DriftMonitor.of_scores(draw(500), seed=seed)
        monitor.update_scores(draw(STREAM))
        return monitor.martingale.log_peak

    def ranked(seed: int) -> float:
        """Rank each input, ties broken at random, among one fixed set of 200."""
        p = conformal.p_values(rng.normal(size=200), rng.normal(size=STREAM)) - rng.uniform(size=STREAM) / 201
        martingale = conformal.Martingale()
        martingale.update(p)
        return martingale.log_peak

    streams: dict[str, Callable[[int], float]] = {
        "monitor, 500 held out": partial(monitored, lambda n: rng.normal(size=n)),
        "monitor, scores with many ties": partial(monitored, lambda n: rng.integers(0, 4, n).astype(float)),
        "not valid: p-values against 200 fixed inputs": ranked,
    }
    peaks = {name: np.array([stream(seed) for seed in range(repetitions)]) for name, stream in streams.items()}
    return {name: {str(c): float(np.mean(own >= np.log(c))) for c in THRESHOLDS} for name, own in peaks.items()}


def delays(repetitions: int = 200) -> dict[str, dict[str, dict[str, float]]]:
    """Return how many inputs after a change the monitor rings, by when it came and what it was: median and 90 %, 1000 for later."""
    rng = np.random.default_rng(1)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for before, (name, (shift, spread)) in product((0, 1000, 10_000), SHIFTS.items()):
        paths = []
        for seed in range(repetitions):
            monitor = conformal.DriftMonitor.of_scores(rng.normal(size=500), seed=seed)
            if before:
                monitor.update_scores(rng.normal(size=before))
            paths.append(monitor.log_path(rng.normal(shift, spread, size=1000)))
        own = found.setdefault(f"after {before}", {}).setdefault(name, {})
        for threshold in (20, 100):
            reached = np.array(paths) >= np.log(threshold)
            waits = np.where(reached.any(1), reached.argmax(1) + 1.0, 1000.0)
            for part, share in (("median", 0.5), ("90 %", 0.9)):
                own[f"{part} at {threshold}"] = float(np.quantile(waits, share, method="inverted_cdf"))
    return found


def band(rate: float, repetitions: int) -> tuple[float, float]:
    """Return where 99.9 % of measured rates lie if the true one is `rate`: 3.3 standard deviations of a binomial share."""
    reach = 3.3 * sqrt(rate * (1 - rate) / repetitions)
    return rate - reach, rate + reach


def page(record: Mapping[str, Any]) -> str:
    """Return the page about a record: the words of its template, and tables."""
    low, high = band(record["rate"], record["repetitions"])
    low_cover, high_cover = band(1 - record["rate"], record["repetitions"])
    alarms = {_starred(name): {"false alarms": value} for name, value in record["false_alarms"].items()}
    delays = [f"Change {when} inputs:\n\n{_table(own, '{:.0f}', 'change')}" for when, own in record["delays"].items()]
    tables = {
        "false_alarms": _table(alarms, corner="score"),
        "coverage": _table({name: {"coverage": value} for name, value in record["coverage"].items()}),
        **{name: _table(record[name]) for name in ("false_alarms_by_class", "coverage_by_class")},
        "quiet_streams": _table(record["quiet_streams"], corner="c ="),
        "delays": "\n\n".join(delays),
    }
    bands = {"low": low, "high": high, "low_cover": low_cover, "high_cover": high_cover, "cover": 1 - record["rate"]}
    return folded(template("guarantees.md").format(**{**record, **tables, **bands}), promises(record))


def _starred(name: str) -> str:
    return f"{name} *" if name in DISCRETE else name


def promises(record: Mapping[str, Any]) -> str:
    """Return what is promised, whether it held, and the numbers; and the figure."""
    rate, cautious = record["rate"], (*DISCRETE, UNKNOWN_CLASS)
    continuous = [value for name, value in record["false_alarms"].items() if name not in cautious]
    by_class = [one for name, one in record["false_alarms_by_class"].items() if name not in cautious]
    known = [value for one in by_class for value in one.values()]
    in_classes = [value for one in record["coverage_by_class"].values() for value in one.values()]
    quiet = [one for name, one in record["quiet_streams"].items() if not name.startswith("not valid")]
    # What is promised, what was measured, at which rate, and whether less is as good.
    cases = [
        (f"{len(continuous)} scores ring at the promised rate, {rate:g}", continuous, rate, False),
        (f"the same within each class, {rate:g}", known, rate, False),
        (f"sets and intervals hold the truth, {1 - rate:g}", [*record["coverage"].values()], 1 - rate, False),
        (f"sets within each class, {1 - rate:g}", in_classes, 1 - rate, False),
    ]
    cases += [
        (f"without a change, at most 1/{c} of streams ever reach {c}", [one[str(c)] for one in quiet], 1 / c, True)
        for c in THRESHOLDS
    ]
    rows = []
    for claim, values, promised, at_most in cases:
        low, high = band(promised, record["repetitions"])
        held = max(values) <= high and (at_most or min(values) >= low)
        measured = f"{min(values):.3f} to {max(values):.3f}"
        rows.append([claim, "**held**" if held else "**not held**", measured, str(record["repetitions"])])
    table = markdown(["promise", "verdict", "measured", "repetitions"], rows, "| --- |" + " ---: |" * 3)
    return f"{table}\n\n![Measured false-alarm rate of every score beside the band around the promised one](guarantees.svg)"


def figure(record: Mapping[str, Any]) -> "matplotlib.figure.Figure":
    """Draw the measured false-alarm rate of every score, and the band in which it lies if the promise holds."""
    from dissensus import plots

    drawing, (ax,) = plots.panels(width=6.4, height=4.0)
    low, high = band(record["rate"], record["repetitions"])
    names = list(record["false_alarms"])
    ax.axvspan(low, high, color="#CCCCCC", alpha=0.5, linewidth=0)
    ax.axvline(record["rate"], color=plots.NOTE_COLOUR, linestyle="--", linewidth=1)
    ax.plot(list(record["false_alarms"].values()), range(len(names)), "o", color=plots.COLOURS[0])
    ax.set_yticks(range(len(names)), [_starred(name).replace("_", " ") for name in names])
    ax.invert_yaxis()
    ax.set(xlabel="false alarms; grey: chance around the promised rate", xlim=(0, None))
    return drawing


def main() -> None:
    """Simulate everything; write record and page."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    torch.set_num_threads(1)
    record = {
        **{"repetitions": REPETITIONS, "held_out": HELD_OUT, "rate": RATE, "stream": STREAM},
        **{"machine": processor(), "torch": torch.__version__, "date": date.today().isoformat()},
        "false_alarms": {**false_alarms(), **false_alarms_of_a_chosen_score()},
        "false_alarms_by_class": false_alarms_by_class(),
        "coverage": coverage(),
        "coverage_by_class": coverage_by_class(),
        "quiet_streams": quiet_streams(),
        "delays": delays(),
    }
    (folder / "guarantees.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "guarantees.md").write_text(page(record), encoding="utf-8")
    save_figure(figure(record), folder / "guarantees.svg")


def _network(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, outputs))


def _classes(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return four overlapping clouds, the later ones wider."""
    noise = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (num,), generator=noise)
    centre = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0], [3.0, 3.0]])[y]
    return centre + torch.randn(num, 2, generator=noise) * (0.5 + 0.3 * y[:, None]), y


def _targets(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a curve whose noise grows."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 2, generator=noise)
    return x, torch.sin(2 * x[:, 0]) + x[:, 1].abs() * torch.randn(num, generator=noise) / 2


def _table(rows: Mapping[str, Mapping[str, float]], form: str = "{:.3f}", corner: str = "") -> str:
    columns = list(next(iter(rows.values())))
    lines = [[name, *(form.format(own[column]) for column in columns)] for name, own in rows.items()]
    return markdown([corner, *columns], lines, "| --- |" + " ---: |" * len(columns))


if __name__ == "__main__":
    main()
