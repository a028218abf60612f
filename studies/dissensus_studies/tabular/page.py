"""The page of the study `tabular`, made from its records and nothing else."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from dissensus_studies.harness.statistics import Summary
from dissensus_studies.recorded import TEMPLATES, markdown

if TYPE_CHECKING:
    import matplotlib.figure

Record = dict[str, Any]
TRAINING_ROWS, TEST_ROWS = 600, 300
LEAST_PROBABILITY = 1e-3
OURS = "ensemble"


def read_records(path: Path) -> list[Record]:
    """Return the lines of a record, flat; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [flat(json.loads(line)) for line in lines]


def flat(line: Record) -> Record:
    """Return a line with its numbers beside what they are of."""
    return {**line, **line["numbers"], "method": line["arm"][0]}


_OF_BOTH = {"auroc": "OOD AUROC", "seconds": "CPU s"}
MEASURES: Mapping[str, Mapping[str, str]] = {
    "classes": {"error": "error rate", "nll": "NLL, nats", "ece": "ECE", **_OF_BOTH},
    "numbers": {
        **{"error": "RMSE / sd", "nll": "NLL, nats", "covered": "covered of 90 %", "width": "width / sd"},
        **_OF_BOTH,
    },
}


def write_report(records: Sequence[Record], trials: Sequence[Record] = ()) -> str:
    """Return the page, in Markdown, made from records alone: those of the study, and those that chose the defaults."""
    first, days = records[0], sorted({line["date"] for line in records})
    ours = [line for line in records if line["method"] == OURS]
    values = {
        "tables": len({line["table"] for line in records}),
        "repeats": len({line["repeat"] for line in records}),
        "days": " to ".join(dict.fromkeys((days[0], days[-1]))),
        "machine": first["machine"],
        "versions": ", ".join(f"{name} {number}" for name, number in first["versions"].items()),
        "first_seed": first["seed"],
        "last_seed": max(line["seed"] for line in records),
        "training_rows": TRAINING_ROWS,
        "test_rows": TEST_ROWS,
        "least": LEAST_PROBABILITY,
        "detection": _detection(records),
        "alarms": Summary(tuple(line["false_alarms"] for line in ours)),
        "trial_tables": len({trial["table"] for trial in trials}),
        "trial_seeds": len({trial["seed"] for trial in trials}),
        "changes": _changes(trials),
    }
    for key in DETECTED:
        values[key] = np.mean([list(line[key].values()) for line in ours])
    for title, task in TASKS.items():
        lines = [line for line in records if line["task"] == task]
        values[title] = _task(title.capitalize(), task, lines) if lines else ""
    template = (TEMPLATES / "tabular.md").read_text(encoding="utf-8")
    if not trials:
        template = template.partition("## How the defaults")[0].rstrip() + "\n"
    return template.format(**values)


TASKS = {"classification": "classes", "regression": "numbers"}
DETECTED = {"auroc": "distance to training rows (the alarm)", "auroc_knowledge": "knowledge", "auroc_total": "total"}
RANKS_FIGURE = "![Mean rank of each method over the tables, for every measure; the tables of ranks below have the numbers](tabular.svg)"


def standing(records: Sequence[Record]) -> str:
    """Return where the ensemble stands by each measure, task by task."""
    rows = []
    for title, task in TASKS.items():
        lines = [line for line in records if line["task"] == task]
        repeats = len({line["repeat"] for line in lines})
        for name, ranks in _ranks(task, lines).items():
            place, first = _place(ranks)
            verdict = "**first**" if first == OURS else f"{place}. behind {first}"
            rows.append([f"{title}, {name}", verdict, f"{ranks[OURS]:.2f} of {len(ranks)}", str(repeats)])
    return _markdown(["the ensemble by", "place", "mean rank", "seeds"], rows)


def _summaries(lines: Sequence[Record], key: str) -> pd.DataFrame:
    """Return a measure over repeats: a row for each table, a column for each method, the ensemble first."""
    values: dict[str, dict[str, list[float]]] = {}
    for line in sorted(lines, key=lambda line: line["method"] != OURS):
        value = np.mean(list(line[key].values())) if isinstance(line[key], dict) else line[key]
        values.setdefault(line["method"], {}).setdefault(line["table"], []).append(float(value))
    tables = list(dict.fromkeys(line["table"] for line in lines))
    return pd.DataFrame(values).loc[tables].map(lambda own: Summary(tuple(own)))


def _ranks(task: str, lines: Sequence[Record]) -> dict[str, pd.Series]:
    """Return each method's mean rank over tables, by its mean over repeats, for each measure that has a better end."""
    return {
        name: _summaries(lines, key).map(lambda own: own.mean).rank(axis=1, ascending=key != "auroc").mean()
        for key, name in MEASURES[task].items()
        if key not in ("covered", "seconds")
    }


def _place(ranks: pd.Series) -> tuple[int, str]:
    """Return the place of the ensemble, and who is first."""
    order = sorted(ranks.index, key=ranks.__getitem__)
    return order.index(OURS) + 1, order[0]


def ranks_figure(records: Sequence[Record]) -> "matplotlib.figure.Figure":
    """Draw the mean ranks of all methods by each measure; the ensemble stands out."""
    from dissensus import plots

    figure, axes = plots.panels(columns=2, width=4.6, height=2.9)
    for ax, (title, task) in zip(axes, TASKS.items(), strict=True):
        ranks = pd.DataFrame(_ranks(task, [line for line in records if line["task"] == task])).T
        for place, method in enumerate(ranks):
            own = method == OURS
            look: dict[str, Any] = {"color": plots.COLOURS[1] if own else "#555555", "alpha": 1 if own else 0.6}
            marker, size = ("o", 9) if own else ("osD^v"[place % 5], 5)
            ax.plot(ranks[method], range(len(ranks)), marker, markersize=size, label=method, **look)
        ax.set_yticks(range(len(ranks)), [name.split(",")[0] for name in ranks.index])
        ax.invert_yaxis()
        ax.set(title=title, xlabel="mean rank, 1 is best", xlim=(0.8, ranks.shape[1] + 0.2))
        ax.legend(frameon=False, fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    return figure


def _task(title: str, task: str, lines: Sequence[Record]) -> str:
    found = {name: _summaries(lines, key) for key, name in MEASURES[task].items()}
    ranks = _ranks(task, lines)

    def cell(name: str, method: str) -> str:
        if name in ranks:
            return f"{ranks[name][method]:.2f}"
        return f"{np.mean([value for own in found[name][method] for value in own.values]):.2f} (mean)"

    methods = list(next(iter(found.values())))
    rows = [[method, *(cell(name, method) for name in found)] for method in methods]
    tables = [
        f"### {name}\n\n{_markdown(['', *methods], [[table, *map(str, own)] for table, own in each.iterrows()])}"
        for name, each in found.items()
    ]
    overview = _markdown(["mean rank, 1 is best", *found], rows)
    return "\n\n".join([f"## {title}", overview, _verdict(task, lines, ranks), *tables])


def _verdict(task: str, lines: Sequence[Record], ranks: Mapping[str, pd.Series]) -> str:
    """Say in words where the ensemble stands, and where boosting is the better choice."""
    places, better = [], {}
    for name, own in ranks.items():
        place, first = _place(own)
        places.append(f"{place}. in {name.split(',')[0]}" + ("" if first == OURS else f" (first: {first})"))
    for key in ("error", "nll"):
        means = _summaries(lines, key).map(lambda own: own.mean)
        some = means.index[means["boosting"] < means[OURS]]
        better[key] = f"{len(some)} of {len(means)} tables" + (f" ({', '.join(some)})" if len(some) else "")
    alike = ": where a table of yours is like those, take `HistGradientBoosting`"
    return (
        f"By mean rank of {len(own)} the ensemble is {', '.join(places)}. Boosting has the lower {MEASURES[task]['error']} on "
        f"{better['error']}, and the lower NLL on {better['nll']}{alike if '(' in ''.join(better.values()) else ''}. It trains faster, and "
        f"is the usual first choice for tables of many more rows than the {TRAINING_ROWS} here, which were not measured. Ranks "
        "within the standard errors below mean little."
    )


def _detection(records: Sequence[Record]) -> str:
    """Say where the AUROC comes from: the distance to the training rows, or members that disagree."""

    def row(name: str, method: str, key: str) -> list[str]:
        lines = [line[key] for line in records if line["method"] == method]
        return [name, *(str(Summary(tuple(line[kind] for line in lines))) for kind in lines[0])]

    others = [method for method in dict.fromkeys(line["method"] for line in records) if method != OURS]
    rows = [row(name, OURS, key) for key, name in DETECTED.items()]
    rows += [row(f"{method}'s own", method, "auroc") for method in others]
    return _markdown(["AUROC, mean over tables and repeats", *records[0]["auroc"]], rows)


def compared(trials: Sequence[Record]) -> list[tuple[str, float, float, float]]:
    """Return for each change of the settings the mean change of the NLL over tables, its standard error, and the ratio of times."""
    frame = pd.DataFrame(trials, columns=["method", "table", "seed", "nll", "seconds"]).set_index(["table", "seed"])
    without, rows = frame[frame["method"] == "{}"], []
    for change, own in frame.groupby("method", sort=False):
        beside = without.loc[own.index]
        summary = Summary(tuple((own["nll"] - beside["nll"]).groupby("table", sort=False).mean()))
        rows.append((change, summary.mean, summary.error, float(own["seconds"].sum() / beside["seconds"].sum())))
    return rows


def _changes(trials: Sequence[Record]) -> str:
    rows = [
        [f"`{change}`", f"{mean:+.4f} ± {error:.4f}", f"{ratio:.2f}"]
        for change, mean, error, ratio in compared(trials)
        if change != "{}"
    ]
    return _markdown(["change", "NLL, mean over tables ± standard error", "time, ratio"], rows)


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return markdown(columns, rows, "| " + " | ".join(["---"] * len(columns)) + " |")
