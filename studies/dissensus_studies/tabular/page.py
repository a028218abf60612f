"""The page of the study `tabular`, made from its records and nothing else."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import rankdata

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


MEASURES: Mapping[str, Sequence[tuple[str, str]]] = {
    "classes": (
        ("error", "error rate"),
        ("nll", "NLL, nats"),
        ("ece", "ECE"),
        ("auroc", "OOD AUROC"),
        ("seconds", "CPU s"),
    ),
    "numbers": (
        ("error", "RMSE / sd"),
        ("nll", "NLL, nats"),
        ("covered", "covered of 90 %"),
        ("width", "width / sd"),
        ("auroc", "OOD AUROC"),
        ("seconds", "CPU s"),
    ),
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
        methods, ranks = _ranked(task, lines)
        repeats = len({line["repeat"] for line in lines})
        for key, name in MEASURES[task]:
            if key in ranks:
                order = sorted(methods, key=ranks[key].__getitem__)
                verdict = "**first**" if order[0] == OURS else f"{order.index(OURS) + 1}. behind {order[0]}"
                rows.append([f"{title}, {name}", verdict, f"{ranks[key][OURS]:.2f} of {len(methods)}", str(repeats)])
    return _markdown(["the ensemble by", "place", "mean rank", "seeds"], rows)


def _ranked(task: str, lines: Sequence[Record]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Return the methods, and each one's mean rank by each measure that has a better end."""
    methods = sorted(dict.fromkeys(line["method"] for line in lines), key=lambda method: method != OURS)
    return methods, {key: _ranks(lines, methods, key) for key, _ in MEASURES[task] if key not in ("covered", "seconds")}


def ranks_figure(records: Sequence[Record]) -> "matplotlib.figure.Figure":
    """Draw the mean ranks of all methods by each measure; the ensemble stands out."""
    from dissensus import plots

    figure, axes = plots.panels(columns=2, width=4.6, height=2.9)
    for ax, (title, task) in zip(axes, TASKS.items(), strict=True):
        methods, ranks = _ranked(task, [line for line in records if line["task"] == task])
        names = [name.split(",")[0] for key, name in MEASURES[task] if key in ranks]
        for place, method in enumerate(methods):
            own = method == OURS
            colour = plots.COLOURS[1] if own else "#555555"
            values = [ranks[key][method] for key in ranks]
            ax.plot(
                values,
                range(len(names)),
                "o" if own else "osD^v"[place % 5],
                color=colour,
                alpha=1 if own else 0.6,
                markersize=9 if own else 5,
                label=method,
            )
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set(title=title, xlabel="mean rank, 1 is best", xlim=(0.8, len(methods) + 0.2))
        ax.legend(frameon=False, fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    return figure


def _task(title: str, task: str, lines: Sequence[Record]) -> str:
    methods, ranks = _ranked(task, lines)
    rows = [[method, *(_rank_text(ranks, key, method, lines) for key, _ in MEASURES[task])] for method in methods]
    overview = _markdown(["mean rank, 1 is best", *(name for _, name in MEASURES[task])], rows)
    tables = []
    for key, name in MEASURES[task]:
        body = [
            [table, *(str(_summary(lines, table, method, key)) for method in methods)]
            for table in dict.fromkeys(line["table"] for line in lines)
        ]
        tables.append(f"### {name}\n\n{_markdown(['', *methods], body)}")
    return "\n\n".join([f"## {title}", overview, _verdict(task, lines, methods, ranks), *tables])


def _rank_text(ranks: Mapping[str, Mapping[str, float]], key: str, method: str, lines: Sequence[Record]) -> str:
    if key in ranks:
        return f"{ranks[key][method]:.2f}"
    values = [line[key] for line in lines if line["method"] == method]
    return f"{np.mean(values):.2f} (mean)"


def _ranks(lines: Sequence[Record], methods: Sequence[str], key: str) -> dict[str, float]:
    """Return each method's mean rank over tables, by its mean over repeats."""
    sign = -1 if key == "auroc" else 1
    tables = dict.fromkeys(line["table"] for line in lines)
    ranks = [rankdata([sign * _summary(lines, table, method, key).mean for method in methods]) for table in tables]
    return dict(zip(methods, np.mean(ranks, 0).tolist(), strict=True))


def _summary(lines: Sequence[Record], table: str, method: str, key: str) -> Summary:
    found = [line[key] for line in lines if line["table"] == table and line["method"] == method]
    return Summary(tuple(float(np.mean(list(v.values()))) if isinstance(v, dict) else float(v) for v in found))


def _verdict(
    task: str, lines: Sequence[Record], methods: Sequence[str], ranks: Mapping[str, Mapping[str, float]]
) -> str:
    """Say in words where the ensemble stands, and where boosting is the better choice."""
    places = []
    for key, name in MEASURES[task]:
        if key in ranks:
            place = sorted(methods, key=ranks[key].__getitem__).index(OURS) + 1
            first = min(methods, key=ranks[key].__getitem__)
            leader = "" if first == OURS else f" (first: {first})"
            places.append(f"{place}. in {name.split(',')[0]}{leader}")
    tables = list(dict.fromkeys(line["table"] for line in lines))
    better = {
        key: [
            table
            for table in tables
            if _summary(lines, table, "boosting", key).mean < _summary(lines, table, OURS, key).mean
        ]
        for key in ("error", "nll")
    }
    error = MEASURES[task][0][1]
    likewise = ": where a table of yours is like those, take `HistGradientBoosting`" if any(better.values()) else ""
    return (
        f"By mean rank of {len(methods)} the ensemble is {', '.join(places)}. Boosting has the lower {error} on "
        f"{_listed(better['error'], tables)}, and the lower NLL on {_listed(better['nll'], tables)}{likewise}. It trains faster, and "
        f"is the usual first choice for tables of many more rows than the {TRAINING_ROWS} here, which were not measured. Ranks "
        "within the standard errors below mean little."
    )


def _listed(some: Sequence[str], tables: Sequence[str]) -> str:
    return f"{len(some)} of {len(tables)} tables" + (f" ({', '.join(some)})" if some else "")


def _detection(records: Sequence[Record]) -> str:
    """Say where the AUROC comes from: the distance to the training rows, or members that disagree."""
    of_method = {
        m: [line for line in records if line["method"] == m] for m in dict.fromkeys(r["method"] for r in records)
    }
    ours = of_method.pop(OURS)
    rows = [_aurocs(name, ours, key) for key, name in DETECTED.items()]
    rows += [_aurocs(f"{method}'s own", lines, "auroc") for method, lines in of_method.items()]
    return _markdown(["AUROC, mean over tables and repeats", *ours[0]["auroc"]], rows)


def _aurocs(name: str, lines: Sequence[Record], key: str) -> list[str]:
    """Return a row of the table: the mean over lines for each set of unlike rows."""
    return [name, *(str(Summary(tuple(line[key][kind] for line in lines))) for kind in lines[0][key])]


def compared(trials: Sequence[Record]) -> list[tuple[str, float, float, float]]:
    """Return for each change of the settings the mean change of the NLL over tables, its standard error, and the ratio of times."""
    values = {(t["method"], t["table"], t["seed"]): (t["nll"], t["seconds"]) for t in trials}
    rows = []
    for change in dict.fromkeys(own for own, _, _ in values):
        of_table: dict[str, list[float]] = {}
        seconds = np.zeros(2)
        for table, seed in ((table, seed) for own, table, seed in values if own == change):
            (nll, time), (without, time_without) = values[change, table, seed], values["{}", table, seed]
            of_table.setdefault(table, []).append(nll - without)
            seconds += time, time_without
        summary = Summary(tuple(float(np.mean(each)) for each in of_table.values()))
        rows.append((change, summary.mean, summary.error, float(seconds[0] / seconds[1])))
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
