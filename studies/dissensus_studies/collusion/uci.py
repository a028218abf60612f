"""Study `collusion-uci`: what becomes of small regression ensembles between independent and joint training.

Four tables, ten runs each: a fresh split, a search for the network, then the same network trained for eleven values of beta, as
one program. Each run is stored as it ends; a study that was ended goes on where it was.
"""

import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dissensus.html import Section, Table, Text
from dissensus_studies.collusion import uci_figures as figures
from dissensus_studies.collusion.uci_claims import uci_claims
from dissensus_studies.collusion.uci_data import (
    SMALL_SETS,
    Preparation,
    Problem,
    built_in_problem,
    find_sources,
    load_problem,
)
from dissensus_studies.collusion.uci_figures import Sets, by_set, over_beta
from dissensus_studies.collusion.uci_protocol import SEARCH_SPACE, Found, Settings, import_optuna, measure_all
from dissensus_studies.collusion.uci_training import DROP_REPEATS, DROP_SHARES, population_sd
from dissensus_studies.harness.claims import claims_table
from dissensus_studies.harness.outputs import Outputs, print_table

NUM_RUNS = 10
QUICK_RUNS = 3
QUICK: dict[str, Any] = {"trials": 6, "most_epochs": 60}
SHOWN_BETAS = (0.0, 0.5, 0.8, 0.9, 1.0)


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
    workers: int | None = None,
) -> Path:
    """Run the study; see `dissensus_studies.Study.run`.

    Args:
        output: Folder for the results. A study that was ended goes on from the runs that it holds.
        quick: Three runs with a short search on data that comes with scikit-learn, or on the small sets of `data`.
        seed: Decides splits, searches, weights and batches.
        data: Folder with the four tables; `../shared/data` by default.
        runs: Runs of each set.
        setting: "tangos" prepares the sets as the same author's other work did: at most 1000 rows, no logarithms.
            "train+validation" trains the chosen networks again on both parts, each beta for its own best number of epochs.
        search_beta: The beta with which configurations are searched.
        epochs: Longest training.
        minutes: Begin no run after this time.
        workers: Runs measured side by side, each in a process with one thread; as many as there are cores by default.
    """
    import_optuna()
    if setting not in (None, "tangos", "train+validation"):
        raise ValueError(f"`setting` must be 'tangos', 'train+validation' or left out; got {setting!r}.")
    preparation: Preparation = "tangos" if setting == "tangos" else "document"
    settings = Settings(
        preparation=preparation, search_beta=search_beta, seed=seed, on_validation_too=setting == "train+validation"
    )
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
        workers=1 if quick else workers or os.cpu_count() or 1,
        minutes=minutes,
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


def _report(outputs: Outputs, found: Sequence[Found], settings: Settings, quick: bool) -> Path:
    """Write tables, figures and the page."""
    sets = by_set(found)
    claims = uci_claims(sets)
    rows = _beta_rows(sets)
    columns = ("set", "β", "MSE", "diversity", "members' MSE", "removed by debiasing", "rise if 60 % are dropped")
    outputs.sections += [
        Section("What the document says", claims_table(claims), Text(JUDGED)),
        Section(
            "Diversity explosion",
            outputs.picture(
                "collusion_diversity",
                over_beta(sets, "on test rows", figures.errors),
                "error and diversity over beta, set by set",
                "Figure 2. Mean over runs and one standard deviation; logarithmic.",
            ),
            outputs.picture(
                "collusion_change",
                over_beta(sets, "change of MSE, %", figures.change),
                "change of the test error against beta = 0, set by set",
                "Test error against that of β = 0 in the same run: median and quartiles.",
            ),
            Table(columns, rows, "Mean over runs ± standard deviation, on standardised targets"),
        ),
        Section(
            "Debiased diversity",
            outputs.picture(
                "collusion_bias",
                over_beta(sets, "diversity removed, %", figures.bias),
                "percentage of diversity that debiasing removes, over beta",
                "Figure 3. Offsets are means over the test rows, as in the document; they use no targets.",
            ),
        ),
        Section(
            "Codependence",
            outputs.picture(
                "collusion_drop",
                over_beta(sets, "increase of MSE", figures.drop),
                "increase of the error when members are dropped, over beta",
                "Figure 4. Crosses are the closed form DIV (M − m) / (m (M − 1)) with m of M members left.",
            ),
        ),
        Section("How it was done", Text(*_protocol(settings)), _chosen_table(sets), _sets_table(sets)),
    ]
    table = _save_table(outputs.folder, found)
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
    print_table(columns, rows)
    print(f"All numbers: {table}")
    return outputs.page(
        "Between independent and joint training: tabular regression",
        "Members trained to be right together become wrong apart: how soon, by how much, and what it costs.",
    )


JUDGED = (
    "Verdicts of comparisons are those of an exact sign test at 5 % over paired runs; others follow from the condition in "
    "brackets, or from means over runs. Runs of one set share most of their rows, so p is too small."
)


def _protocol(settings: Settings) -> list[str]:
    also = ", then once more with the validation rows for as many epochs" if settings.on_validation_too else ""
    space = "; ".join(
        f"{name.replace('_', ' ')} {', '.join(f'{choice:g}' for choice in choices)}"
        for name, choices in SEARCH_SPACE.items()
    )
    logs = (
        "features with a skewness above 1 on the training rows are replaced by log(1 + x − min), then all features and the target "
        "are standardised on the training rows"
        if settings.preparation == "document"
        else "at most 1000 rows, features and the target standardised on the training rows, no logarithms"
    )
    return [
        f"Every run draws 20 % of the rows for testing and 20 % of the rest for validation; {logs}. {settings.trials} configurations "
        f"are tried by Bayesian optimisation (optuna's Gaussian process, five random ones first): {space}. ReLU networks, Adam with "
        "the decay added to the gradient, squared error, all members on the same batches.",
        "What the document leaves open, and what was chosen: "
        f"the search trains with β = {settings.search_beta:g} and takes the configuration with the lowest ensemble error on the "
        "validation rows. The best one is trained anew on the training rows for every β, from the same initial weights and on the same "
        f"batches{also}. Each β stops "
        "by itself, after 5 epochs without a lower ensemble error on the validation rows, and keeps the weights "
        f"of its best epoch; none goes beyond {settings.most_epochs} epochs. The loss is summed over members, so that rate and decay "
        "mean for each what they would mean for one network alone.",
        f"Members are dropped row by row, {DROP_REPEATS} times; {', '.join(f'{100 * share:.0f} %' for share in DROP_SHARES)} of them, "
        "rounded down. The increase is absolute.",
    ]


def _beta_rows(sets: Sets) -> list[list[object]]:
    columns = ("mse", "diversity", "member_mse", "bias_share", f"drop_{DROP_SHARES[-1]:g}")
    return [
        [name, f"{beta:g}", *(_with_sd(runs.at(column, beta)) for column in columns)]
        for name, runs in sets.items()
        for beta in SHOWN_BETAS
    ]


def _with_sd(values: Sequence[float]) -> str:
    mean, deviation = sum(values) / len(values), population_sd(values)
    decimals = 3 if max(abs(mean), deviation) >= 0.01 else 5
    return f"{mean:.{decimals}f}\u00a0±\u00a0{deviation:.{decimals}f}"


def _chosen_table(sets: Sets) -> Table:
    """How often each value of the search space was chosen."""
    rows: list[list[object]] = []
    for name, runs in sets.items():
        counts = [Counter(result["configuration"][key] for result in runs.found) for key in SEARCH_SPACE]
        rows.append([name, *(", ".join(f"{v:g} × {count[v]}" for v in sorted(count)) for count in counts)])
    columns = ("set", *(name.replace("_", " ") for name in SEARCH_SPACE))
    return Table(columns, rows, "What the searches chose: value × runs")


def _sets_table(sets: Sets) -> Table:
    rows = [
        [
            name,
            len(runs),
            float(runs["epochs"].mean()),
            int(runs["epochs"].max()),
            sum(result["search_seconds"] for result in runs.found) / len(runs),
            sum(result["retrain_seconds"] for result in runs.found) / len(runs),
        ]
        for name, runs in sets.items()
    ]
    columns = ("set", "runs", "best epoch, mean", "latest", "search, s", "retraining, s")
    return Table(columns, rows, "Seconds are processor time a run: what it takes on a core of its own")


def _save_table(folder: Path, found: Sequence[Found]) -> Path:
    """Write one row for each set, run and beta: as parquet where pyarrow is there, else as CSV."""
    import pandas

    rows = [
        {"set": result["set"], "run": result["run"], **result["configuration"], **row}
        for result in found
        for row in result["betas"]
    ]
    frame = pandas.DataFrame(rows)
    if find_spec("pyarrow") is None:
        frame.to_csv(folder / "results.csv", index=False)
        return folder / "results.csv"
    frame.to_parquet(folder / "results.parquet", index=False)
    return folder / "results.parquet"
