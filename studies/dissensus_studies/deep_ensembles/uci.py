"""Study `uci-deep-ensembles`: the usual regression benchmark, one net against a mixture of five.

All splits of a set and all members train as one ensemble. The learning rate is a tenth of the usual 0.1, and each member's gradient is
clipped: without that nets run away.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dissensus import plots
from dissensus.architectures import mlp
from dissensus.html import Section, Table
from dissensus.members import DeepEnsemble
from dissensus.objectives import Adversarial, Independent, gaussian_nll, mean_and_scale
from dissensus.predictions import mixture
from dissensus_studies.deep_ensembles.networks import fit_own_sets
from dissensus_studies.harness.outputs import Outputs, print_table
from dissensus_studies.harness.statistics import Comparison, Summary

if TYPE_CHECKING:
    import matplotlib.figure

NUM_MEMBERS = 5
RECIPE: Mapping[str, Any] = {"epochs": 40, "batch_size": 100, "optimizer": "adam", "lr": 0.01, "clip_norm": 5.0}
# The rate usually given; the small sets are also run at it and without clipping, to show what that does here.
USUAL_RATE = 0.1
# The attack moves each input by this share of its range in the training data.
EPSILON = 0.01

FILES: Mapping[str, str] = {
    "boston": "bostonHousing.npz",
    "concrete": "concrete.npz",
    "energy": "energy.npz",
    "kin8nm": "kin8nm.npz",
    "naval": "naval-propulsion-plant.npz",
    "power": "power-plant.npz",
    "protein": "protein-tertiary-structure.npz",
    "wine": "wine-quality-red.npz",
    "yacht": "yacht.npz",
}
PLACES = ("uci/dropout_splits", "dropout_splits", "")
SMALL_SETS = ("boston", "concrete", "wine")
QUICK_SPLITS = 4

ARMS = ("single", "single + adversarial", "mixture", "mixture + adversarial")
METRICS = ("rmse", "nll")

SetResult = dict[str, dict[str, Summary]]


class Splits(NamedTuple):
    """All splits of a set, standardised on their training parts; test targets are in their own units, as `centre` and `spread` are."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    centre: Tensor
    spread: Tensor

    @classmethod
    def load(cls, path: Path, num_splits: int | None = None) -> "Splits":
        """Read a file with X, y, train_idx and test_idx."""
        with np.load(path) as stored:
            inputs, targets = (torch.from_numpy(stored[name].astype(np.float64)) for name in ("X", "y"))
            train, test = (torch.from_numpy(stored[n].astype(np.int64))[:num_splits] for n in ("train_idx", "test_idx"))
        x, y = inputs[train], targets[train]
        x_mean, x_std = x.mean(1, keepdim=True), x.std(1, keepdim=True, correction=0)
        # A constant input (naval has two) carries nothing; divided by its deviation it would be NaN.
        x_std = torch.where(x_std > 0, x_std, 1.0)
        centre, spread = y.mean(1, keepdim=True), y.std(1, keepdim=True, correction=0)
        own_x, test_x = (((part - x_mean) / x_std).float() for part in (x, inputs[test]))
        return cls(own_x, ((y - centre) / spread).float().unsqueeze(-1), test_x, targets[test], centre, spread)


def run(output: Path, *, quick: bool = False, seed: int = 0, data: Path | None = None) -> Path:
    """Run the study; see `dissensus_studies.Study.run`. `data` is the folder with the sets and their splits."""
    files = find_sets(data)
    small = {name: file for name, file in files.items() if name in SMALL_SETS}
    outputs = Outputs(output)
    results: dict[str, SetResult] = {}
    fast: dict[str, SetResult] = {}
    set_rows = []
    for name, file in (small or files if quick else files).items():
        start = time.monotonic()
        splits = Splits.load(file, QUICK_SPLITS if quick else None)
        hidden, rows = 100 if name == "protein" else 50, splits.x.shape[1] + splits.test_x.shape[1]
        results[name] = measure_set(splits, hidden, seed=seed)
        set_rows.append((name, rows, splits.x.shape[2], len(splits.x), time.monotonic() - start))
        if name in small:
            fast[name] = measure_set(splits, hidden, lr=USUAL_RATE, clip_norm=None, seed=seed)
    fast_rows = [
        [name, statistic, *(getattr(found[arm]["rmse"], statistic) for arm in ARMS)]
        for name, found in fast.items()
        for statistic in ("mean", "median")
    ]
    tables = [
        Table((m.upper(), *ARMS), [[n, *(str(found[arm][m]) for arm in ARMS)] for n, found in results.items()])
        for m in METRICS
    ]
    drawn = outputs.picture(
        "uci_nll", change_figure(_changes(results)), "change of NLL against a single net, set by set"
    )
    judged = "Paired over splits, by an exact sign test at 5 %; lower is better"
    compared = Table(("set", "what", "RMSE", "NLL"), _comparisons(results), judged)
    away = f"RMSE, Adam at {USUAL_RATE:g}, no clipping: nets run away"
    outputs.sections += [
        Section("Error and likelihood", *tables),
        Section("Does it help?", compared, drawn),
        Section("The usual learning rate", Table(("set", "statistic", *ARMS), fast_rows, away)),
        Section("The sets", Table(("set", "rows", "inputs", "splits", "seconds"), set_rows)),
    ]
    seconds = {name: taken for name, *_, taken in set_rows}
    outputs.results({"sets": results, "usual_rate": fast, "seconds": seconds, "quick": quick, "seed": seed})
    for table in tables:
        print_table(table)
    return outputs.page(
        "Deep ensembles on tabular regression", "How much do averaging and adversarial training change?"
    )


def find_sets(data: Path | None, files: Mapping[str, str] = FILES, places: Sequence[str] = PLACES) -> dict[str, Path]:
    """Return the files of sets that are in the first of a folder's places that has any; `../shared/data` by default."""
    folder = Path("../shared/data") if data is None else Path(data)
    for place in places:
        found = {name: path for name, file in files.items() if (path := folder / place / file).is_file()}
        if found:
            return found
    raise ValueError(
        f"This study needs files such as {next(iter(files.values()))}; there are none in {folder}. Name their folder with `data`."
    )


def measure_set(splits: Splits, hidden: int, seed: int = 0, **changes: Any) -> SetResult:
    """Train plain and adversarial ensembles on all splits of a set, by the recipe with changes; return RMSE and NLL of every arm."""
    found: SetResult = {}
    owner = [split for split in range(len(splits.x)) for _ in range(NUM_MEMBERS)]
    ranges = splits.x.amax(1, keepdim=True) - splits.x.amin(1, keepdim=True)
    plain = Independent("gaussian_nll")
    attack = Adversarial(plain, epsilon=EPSILON, of_range=True, ranges=ranges[owner])
    for suffix, objective in (("", plain), (" + adversarial", attack)):
        ensemble = DeepEnsemble(lambda: mlp(splits.x.shape[2], [hidden], 2), len(owner), seed)
        fit_own_sets(ensemble, splits.x, splits.y, owner, objective, **{**RECIPE, "seed": seed, **changes})
        with torch.no_grad():
            outputs = ensemble.eval().each(splits.test_x[owner]).double()
        mean, scale = (part[..., 0].unflatten(0, (-1, NUM_MEMBERS)).movedim(1, 0) for part in mean_and_scale(outputs))
        # In original units.
        mean, scale = mean * splits.spread + splits.centre, scale * splits.spread
        single = [_judge(mean[[m]], scale[[m]], splits.test_y) for m in range(NUM_MEMBERS)]
        average = {k: torch.stack([s[k] for s in single]).mean(0) for k in single[0]}
        for kind, judged in (("single", average), ("mixture", _judge(mean, scale, splits.test_y))):
            found[f"{kind}{suffix}"] = {k: Summary(tuple(own.tolist())) for k, own in judged.items()}
    return {arm: found[arm] for arm in ARMS}


def _judge(mean: Tensor, scale: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return RMSE and NLL of the mixture of the given members, `(splits,)` each."""
    centre, std = mixture(mean, scale)
    return {"rmse": (centre - target).square().mean(-1).sqrt(), "nll": gaussian_nll(centre, std, target).mean(-1)}


def _comparisons(results: Mapping[str, SetResult]) -> list[list[object]]:
    single, attacked, mixed, both = ARMS
    pairs = {
        "five members": (single, mixed),
        "adversarial training, single": (single, attacked),
        "adversarial training, mixture": (mixed, both),
    }
    return [
        [name, what, *(str(Comparison.of(found[a][m].values, found[b][m].values)) for m in METRICS)]
        for name, found in results.items()
        for what, (a, b) in pairs.items()
    ]


def _changes(results: Mapping[str, SetResult]) -> dict[tuple[str, str], Sequence[float]]:
    """Return the quartiles over splits of each arm's change of NLL against the single net, by arm and set."""
    values = {name: {arm: np.array(own["nll"].values) for arm, own in found.items()} for name, found in results.items()}
    moved = {(arm, name): own[arm] - own[ARMS[0]] for arm in ARMS[1:] for name, own in values.items()}
    return {key: np.quantile(change, (0.25, 0.5, 0.75)).tolist() for key, change in moved.items()}


def change_figure(changes: Mapping[tuple[str, str], Sequence[float]]) -> "matplotlib.figure.Figure":
    """Draw each arm's median change of NLL against the single net, with quartiles over splits; by arm and set."""
    arms, sets = (list(dict.fromkeys(key[place] for key in changes)) for place in (0, 1))
    figure, (ax,) = plots.panels(width=7.5, height=0.42 * len(sets) + 1.0)
    for (arm, name), (low, middle, high) in changes.items():
        colour, height = plots.COLOURS[arms.index(arm)], sets.index(name) + 0.22 * (arms.index(arm) - 1)
        ax.plot([low, high], [height, height], color=colour, linewidth=2, alpha=0.6)
        ax.plot([middle], [height], "o", color=colour, markersize=5)
        if name == sets[0]:
            ax.annotate(arm, (high, height), (8, 0), textcoords="offset points", va="center", color=colour, fontsize=8)
    ax.axvline(0, color=plots.NOTE_COLOUR, linestyle="--", linewidth=1)
    ax.set_yticks(range(len(sets)), sets)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    # Logarithmic beyond a tenth of a nat: sets differ by an order of magnitude.
    ax.set_xscale("symlog", linthresh=0.1, linscale=0.7)
    ticks = (-1, -0.5, -0.2, -0.1, 0, 0.1, 0.2, 0.5, 1, 2)
    shown = [tick for tick in ticks if ax.get_xlim()[0] <= tick <= ax.get_xlim()[1]]
    ax.set_xticks(shown, [f"{tick:g}" for tick in shown], minor=False)
    ax.minorticks_off()
    ax.set_xlabel("NLL minus that of a single net, nats (median and quartiles over splits)")
    return figure
