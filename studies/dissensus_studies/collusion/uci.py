"""Study `collusion-uci`: what becomes of small regression ensembles between independent and joint training.

Four tables, ten runs each: a fresh split, a search for the network, then the same network trained for eleven values of beta.
Each run is stored as it ends; a study that was ended goes on where it was.
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dissensus.html import Section, Table, Text
from dissensus_studies.collusion.uci_data import (
    SMALL_SETS,
    Preparation,
    Problem,
    built_in_problem,
    find_sources,
    load_problem,
)
from dissensus_studies.collusion.uci_protocol import DROP_SHARES, Settings, import_optuna, measure_all
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.claims import Claim, claims_table, over_cases
from dissensus_studies.harness.figures import sweep
from dissensus_studies.harness.outputs import Outputs, print_table
from dissensus_studies.harness.statistics import Comparison

NUM_RUNS = 10
QUICK_RUNS = 3
QUICK: dict[str, Any] = {"trials": 6, "most_epochs": 60}
SHOWN_BETAS = (0.0, 0.5, 0.8, 0.9, 1.0)
# What counts as harmful: the error rises by more than this share of itself.
HARM = 0.1
# "Around half", in shares of the diversity.
HALF = (1 / 3, 2 / 3)
# "Elsewhere", as against near 1.
ELSEWHERE = 0.8
JUDGED = (
    "Verdicts of comparisons are those of an exact sign test at 5 % over paired runs; others follow from the condition in "
    "brackets, or from means over runs. Runs of one set share most of their rows, so p is too small."
)


def run(
    output: Path,
    *,
    quick: bool = False,
    seed: int = 0,
    data: Path | None = None,
    runs: int | None = None,
    setting: str | None = None,
    search_beta: float = 0.5,
    epochs: int | None = None,
    minutes: float | None = None,
    arms: Sequence[str] | None = None,
) -> Path:
    """Run the study; see `dissensus_studies.Study.run`. One that was ended goes on from the runs that the folder holds.

    Args:
        output: Folder for the results.
        quick: Three runs with a short search on data that comes with scikit-learn, or on the small sets of `data`.
        seed: Decides splits, searches, weights and batches.
        data: Folder with the four tables; `../shared/data` by default.
        runs: Runs of each set.
        setting: "tangos" prepares the sets as the same author's other work did: at most 1000 rows, no logarithms.
            "train+validation" trains the chosen networks again on both parts, each beta for its own best number of epochs.
        search_beta: The beta with which configurations are searched.
        epochs: Longest training.
        minutes: Begin no run after this time.
        arms: Only these runs, such as "weather": one command for each set, with the same folder, uses as many cores.
    """
    import_optuna()
    if setting not in (None, "tangos", "train+validation"):
        raise ValueError(f"`setting` must be 'tangos', 'train+validation' or left out; got {setting!r}.")
    preparation: Preparation = "tangos" if setting == "tangos" else "document"
    again = setting == "train+validation"
    settings = Settings(preparation=preparation, search_beta=search_beta, seed=seed, on_validation_too=again)
    if quick:
        settings = replace(settings, **QUICK)
    if epochs is not None:
        settings = replace(settings, most_epochs=epochs)
    outputs = Outputs(output)
    found = measure_all(
        _problems(data, quick, preparation),
        runs or (QUICK_RUNS if quick else NUM_RUNS),
        settings,
        outputs.folder,
        minutes=minutes,
        only=arms,
    )
    if not found:
        raise ValueError("No run ended in the time given. Run it again for longer, or with quick.")
    return _report(outputs, found, settings, quick)


def _problems(data: Path | None, quick: bool, preparation: Preparation) -> dict[str, Problem]:
    if quick and data is None:
        return {"diabetes": built_in_problem()}
    files = find_sources(data)
    if quick:
        files = {name: path for name, path in files.items() if name in SMALL_SETS} or files
    return {name: load_problem(name, path, preparation) for name, path in files.items()}


class SetRuns:
    """All runs of one set as columns: `runs["mse"]` is `(runs, betas)`."""

    def __init__(self, found: Sequence[Mapping[str, Any]]) -> None:
        self.found = found
        self.betas = [row["beta"] for row in found[0]["betas"]]

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return np.array([[row[name] for row in result["betas"]] for result in self.found], dtype=np.float64)

    def at(self, name: str, beta: float) -> list[float]:
        """Return a quantity at one beta, run by run."""
        values: list[float] = self[name][:, self.betas.index(beta)].tolist()
        return values

    def ratio(self, name: str, beta: float) -> float:
        """Return a quantity over the MSE at one beta, the median over runs."""
        return median(np.divide(self.at(name, beta), self.at("mse", beta)).tolist())


Sets = Mapping[str, SetRuns]


def by_set(found: Sequence[Mapping[str, Any]]) -> dict[str, SetRuns]:
    """Return runs by the set they belong to."""
    names = dict.fromkeys(result["set"] for result in found)
    return {name: SetRuns([result for result in found if result["set"] == name]) for name in names}


# What a condition finds on one set: in numbers, and whether the claim holds (None where runs cannot tell).
Case = tuple[str, bool | None]


def uci_claims(sets: Sets) -> list[Claim]:
    """Judge the document's statements on figures 2 to 4."""
    dropped = f"{100 * DROP_SHARES[-1]:.0f} % dropped raise the MSE by over {100 * HARM:.0f} % there"
    joint = "Joint training"
    judged: Mapping[str, Callable[[SetRuns], Case]] = {
        f"{joint} (β = 1) has a larger test error than independent training": lambda runs: _higher(runs["mse"]),
        "Diversity at β = 1 is far above the ensemble's error (its median is above the MSE)": _above,
        f"It stays low for most β (below the MSE for all β ≤ {ELSEWHERE:g})": _low_elsewhere,
        "Debiasing removes around half of the diversity at β = 1 (a third to two thirds)": _half_is_bias,
        "Debiasing removes more at β = 1 than at β = 0": lambda runs: _higher(runs["bias_share"]),
        f"Dropping members harms only near β = 1 ({dropped}, by less up to {ELSEWHERE:g})": _drop,
        f"{joint} has the larger generalisation gap (test minus training error)": lambda runs: _higher(
            runs["mse"] - runs["train_mse"]
        ),
    }
    claims = [_each(statement, sets, judge) for statement, judge in judged.items()]
    return [claims[0], _worst(sets), *claims[1:]]


def _each(statement: str, sets: Sets, judge: Callable[[SetRuns], Case]) -> Claim:
    """Judge a claim on every set."""
    found = {name: judge(runs) for name, runs in sets.items()}
    measured = "; ".join(f"{name} {text}" for name, (text, _) in found.items())
    return Claim(statement, measured, over_cases({name: holds for name, (_, holds) in found.items()}))


def _higher(values: NDArray[np.float64]) -> Case:
    """Judge that a quantity, `(runs, betas)`, is higher at the last beta, 1, than at the first, 0."""
    compared = Comparison.of(values[:, 0].tolist(), values[:, -1].tolist())
    return str(compared), None if compared.verdict == "unresolved" else compared.verdict == "higher"


def _worst(sets: Sets) -> Claim:
    worst = {name: runs.betas[int(runs["mse"].mean(0).argmax())] for name, runs in sets.items()}
    held = sum(beta == 1.0 for beta in worst.values())
    measured = "; ".join(f"{name} is worst at β = {beta:g}" for name, beta in worst.items())
    return Claim.checked(
        "β = 1 has the largest mean test error of all β, for most sets", measured, 2 * held > len(worst)
    )


def _above(runs: SetRuns) -> Case:
    ratio = runs.ratio("diversity", 1.0)
    growth = median(np.divide(runs.at("diversity", 1.0), runs.at("diversity", 0.0)).tolist())
    return f"{ratio:.1f} × the MSE, {growth:.0f} × that of β = 0", ratio > 1


def _low_elsewhere(runs: SetRuns) -> Case:
    most = max(runs.ratio("diversity", beta) for beta in runs.betas if beta <= ELSEWHERE)
    return f"{most:.2f} × the MSE", most < 1


def _half_is_bias(runs: SetRuns) -> Case:
    shares = runs.at("bias_share", 1.0)
    text = f"{100 * fmean(shares):.0f} ± {100 * float(np.std(shares)):.0f} %"
    return text, HALF[0] <= fmean(shares) <= HALF[1]


def _drop(runs: SetRuns) -> Case:
    column = f"drop_{DROP_SHARES[-1]:g}"
    near, far = runs.ratio(column, 1.0), max(runs.ratio(column, beta) for beta in runs.betas if beta <= ELSEWHERE)
    text = f"+{100 * near:.0f} % at β = 1, at most +{100 * far:.1f} % up to {ELSEWHERE:g}"
    return text, near > HARM > far


def _report(outputs: Outputs, found: Sequence[Record], settings: Settings, quick: bool) -> Path:
    """Write tables, figures and the page."""
    sets = by_set(found)
    claims = uci_claims(sets)
    points = [(result["set"], row["beta"], row) for result in found for row in result["betas"]]
    names = ("mse", "diversity", "member_mse", "bias_share", f"drop_{DROP_SHARES[-1]:g}")
    read = {name.replace("_", " "): itemgetter(name) for name in names}
    drawing = sweep("collusion_uci", "Over β", points, read, "β")
    columns = ("set", "β", "MSE", "diversity", "members' MSE", "removed by debiasing", "rise if 60 % are dropped")
    rows = [
        [name, f"{beta:g}", *(_with_sd(runs.at(column, beta)) for column in names)]
        for name, runs in sets.items()
        for beta in SHOWN_BETAS
    ]
    caption = "Mean over runs ± standard deviation, on standardised targets"
    outputs.results(
        {
            "claims": claims,
            "settings": settings.as_json(),
            "quick": quick,
            "optuna": version("optuna"),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "runs": found,
        }
    )
    outputs.sections += [
        Section("What the document says", claims_table(claims), Text(JUDGED)),
        drawing.section(outputs),
        Section("By β", Table(columns, rows, caption)),
    ]
    print_table(columns, rows)
    return outputs.page(
        "Between independent and joint training: tabular regression",
        "Members trained to be right together become wrong apart: how soon, by how much, and what it costs.",
    )


def _with_sd(values: Sequence[float]) -> str:
    mean, deviation = fmean(values), float(np.std(values))
    decimals = 3 if max(abs(mean), deviation) >= 0.01 else 5
    return f"{mean:.{decimals}f}\u00a0±\u00a0{deviation:.{decimals}f}"
