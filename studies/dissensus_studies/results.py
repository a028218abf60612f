"""The record in, the pages of `docs/results` out: every table, verdict and claim on them is written from `studies/records`.

`studies/records/NAME.jsonl` has a line for each arm that was ever reported: its setting, seeds, machine, versions, seconds and all
numbers; `"source"` is `"run"`, or `"page"` where the raw record is lost and only the page had the number. `claims.jsonl` has a line for
each claim of the documents; those with a `"regime"` say what one that is not the document's says of it. `studies/pages` has the words
around them and how tables and figures are laid out.

    python -m dissensus_studies.results                           # write the pages; `make results`
    python -m dissensus_studies.results add runs/masksembles      # add the arms of a run to the record of that name, and write

A folder's name begins with that of its record: `runs/collusion-images` and `runs/collusion-cifar100` go to `collusion.jsonl`.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dissensus_studies import masksembles
from dissensus_studies.alarms import SHOWN_RATE, mean_shares
from dissensus_studies.anchoring import recorded as anchoring
from dissensus_studies.collusion import recorded as collusion
from dissensus_studies.collusion import theory
from dissensus_studies.deep_ensembles import recorded as deep_ensembles
from dissensus_studies.deep_ensembles.regression import DRAWN, count_figure
from dissensus_studies.deep_ensembles.uci import change_figure
from dissensus_studies.diversification import recorded as diversification
from dissensus_studies.guide import guide, kinds_points, regimes
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.figures import (
    Line,
    Panel,
    baseline_figure,
    draw,
    pareto,
    save_figure,
    shares_figure,
    sweeps,
    trade_figure,
)
from dissensus_studies.recorded import TEMPLATES, as_floats, fold, made, markdown, noise_sentence, template
from dissensus_studies.tabular import RANKS_FIGURE, ranks_figure, read_records, standing, write_report

if TYPE_CHECKING:
    import matplotlib.figure

RECORDS, PAGES = TEMPLATES.parent / "records", TEMPLATES.parents[1] / "docs" / "results"

VERDICTS = ("reproduced", "not reproduced", "within noise", "not tested at the document's length")

# Of an arm's record: what is on the line itself, curves, examples, and what is too long for what it says.
_LEFT_OUT = ("line", "made", "arm_seconds", "history", "corruption", "pds", "trials")

# The figure of each page that shows its verdicts; it stands at the top, the others where the text speaks of them.
FIGURES = {
    "anchoring": "anchoring-alpha.svg",
    "collusion": "collusion_diversity.svg",
    "deep-ensembles": "../images/practical_regression_members.svg",
    "diversification": "diversification-guard.svg",
    "masksembles": "masksembles-diversity.svg",
}
# So many claims stand at the top of a page; the others are folded.
SHOWN = 8

DOCUMENTS = {
    "004": "Deep ensembles",
    "001": "Joint training and collusion",
    "000": "Masksembles",
    "002": "Loss-guided diversification",
    "003": "Masked anchoring",
}


def load(name: str, folder: Path = RECORDS) -> list[Record]:
    """Return the lines of one record; numbers keep the digits that they were written with."""
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_float=Decimal, parse_int=Decimal) for line in lines]


# What runs say in place of lines of the record that only a page had, by study; and which claims they judge: by table, then by text.
SHOWN_BY_RUNS: Mapping[str, Callable[[Sequence[Record]], list[Record]]] = {
    "anchoring": anchoring.shown,
    "collusion": collusion.shown,
    "deep-ensembles": deep_ensembles.shown,
    "diversification": diversification.shown,
    "masksembles": masksembles.shown,
}
JUDGED_BY_RUNS: Mapping[str, Callable[[Sequence[Record]], Mapping[str, Mapping[str, Record]]]] = {
    "anchoring": anchoring.judged_claims,
    "collusion": collusion.judged_claims,
    "deep-ensembles": deep_ensembles.judged_claims,
    "diversification": diversification.judged_claims,
    "masksembles": masksembles.judged_claims,
}
# Sentences of pages that say what a table rests on, by the name in a template.
SENTENCES: Mapping[str, Callable[[Sequence[Record]], str]] = {
    "anchoring": anchoring.sentence,
    "collusion-resnet18": collusion.sentence,
    "collusion-cnn": partial(collusion.sentence, table=f"{collusion.TABLE}-2"),
    "collusion-diagnosis": collusion.diagnosis_sentence,
    "collusion-uci": collusion.tabular_sentence,
    "collusion-uci-again": collusion.again_table,
    "collusion-uci-apart": collusion.apart_sentence,
    "masksembles": masksembles.sentence,
    "masksembles-batches": masksembles.batches_sentence,
}


def shown(name: str, records: Path = RECORDS) -> list[Record]:
    """Return the lines of one record as its page shows them: arms of runs in place of numbers that only a page had."""
    rows = load(name, records)
    return SHOWN_BY_RUNS[name](rows) if name in SHOWN_BY_RUNS else rows


def judged_claims(records: Path = RECORDS) -> str:
    """Return the lines of `claims.jsonl`, with the verdicts that the arms of runs give."""
    by_runs: dict[str, Mapping[str, Record]] = {}
    for name, judge in JUDGED_BY_RUNS.items():
        by_runs |= judge(load(name, records))
    lines = map(json.loads, (records / "claims.jsonl").read_text(encoding="utf-8").splitlines())
    found: list[Record] = []
    for table, group in groupby(lines, itemgetter("table")):
        own, judged = list(group), by_runs.get(table, {})
        known = [line.get("claim", "") for line in own]
        found += [line | judged.get(claim, {}) for line, claim in zip(own, known, strict=True)]
        # What runs judge for the first time gets a line below those of its table.
        new = {"document": own[-1]["document"], "table": table}
        found += [new | {"claim": claim} | each for claim, each in judged.items() if claim not in known]
    return "\n".join(json.dumps(claim, ensure_ascii=False) for claim in found) + "\n"


def pages(records: Path = RECORDS) -> dict[str, str]:
    """Return the text of every page by its file name."""
    layouts, lines = json.loads(template("tables.json")), load("claims", records)
    claims = documents_claims(lines)
    found = {}
    for name, figure in FIGURES.items():
        rows, own = shown(name, records), [claim for claim in claims if claim["table"].startswith(f"{name}/")]
        text = "\n".join(_filled(line, rows, lines, layouts) for line in template(f"{name}.md").split("\n"))
        found[f"{name}.md"] = folded(text, verdicts(own), figure)
    measured, trials = (read_records(records / f"{name}.jsonl") for name in ("tabular", "tabular-defaults"))
    found["claims.md"] = claims_page(claims)
    found["tabular.md"] = folded(write_report(measured, trials), f"{standing(measured)}\n\n{RANKS_FIGURE}")
    short = sum(claim["verdict"] == VERDICTS[-1] for claim in claims)
    ours = guide({path.stem: load(path.stem, records) for path in records.glob("*.jsonl")})
    ours = ours.replace("<!-- claims -->", f"{short} of {len(claims)}")
    landing = (PAGES.parent / "index.md").read_text(encoding="utf-8")
    held = f"{sum(claim['verdict'] == VERDICTS[0] for claim in claims)} of {len(claims) - short}"
    for words, number in (
        (r"\d+ of \d+(?=\n\nclaims of five papers)", held),
        (r"\d+(?= of them on other data)", str(sum(claim.get("data") == "other" for claim in claims))),
        (r"\d+(?= more have shorter runs)", str(short)),
    ):
        landing, times = re.subn(words, number, landing)
        assert times == 1, f"the landing page has {times} places for {words}"
    return found | {"../choosing.md": ours, "../index.md": landing}


def documents_claims(lines: Iterable[Record]) -> list[Record]:
    """Return the lines of `claims.jsonl` that are a document's claims in its own regime; others, which name theirs, repeat some in ours."""
    return [line for line in lines if "claim" in line and "regime" not in line]


def folded(page: str, opening: str = "", figure: str = "") -> str:
    """Return a page that opens with its first paragraph, an opening and one of its figures; every section (`## `) of it is folded."""
    title, _, rest = page.strip().partition("\n")
    shown = next((line for line in rest.splitlines() if figure and line.endswith(f"]({figure})")), "")
    head, *sections = ("\n" + rest.replace(f"{shown}\n\n" if shown else "\0", "", 1)).split("\n## ")
    first, _, others = head.strip().partition("\n\n")
    parts = [title, first, opening, shown]
    if others.strip():
        parts.append(fold("How it was done", others.strip()))
    for section in sections:
        name = section.partition("\n")[0].strip()
        parts.append(fold(name, f"## {section.strip()}"))
    return "\n\n".join(part for part in parts if part) + "\n"


def verdicts(claims: Sequence[Record]) -> str:
    """Return the claims of a page with verdict, one number and seeds: those tested at full length first, many of them folded."""
    ordered = sorted(claims, key=lambda claim: claim["verdict"] == VERDICTS[-1])
    parts = [f"**{len(claims)} claims: {_counted(claims)}.**", _short_table(ordered[:SHOWN])]
    if len(ordered) > SHOWN:
        parts.append(fold(f"The other {len(ordered) - SHOWN} claims", _short_table(ordered[SHOWN:])))
    return "\n\n".join(parts)


def measured_of(claim: Record) -> list[str]:
    """Return what was measured, each case with its name where there are several."""
    names = claim.get("cases", ("",) * len(claim["measured"]))
    return [f"{name} {text}".strip() for name, text in zip(names, claim["measured"], strict=True) if text]


def _verdict(claim: Record) -> str:
    """Return a claim's verdict, and whether other data stood in for the document's."""
    return f"**{claim['verdict']}**{' on other data' if claim.get('data') == 'other' else ''}"


def _short_table(claims: Sequence[Record]) -> str:
    """Return claims with verdict, what was measured and seeds."""
    lines = []
    for claim in claims:
        verdict, measured = _verdict(claim), measured_of(claim)
        if claim["verdict"] == VERDICTS[-1]:
            said = claim["note"].startswith(("not tested", "other data", "void"))
            verdict = claim["note"] if said else f"short runs only: {claim['note']}"
        elif claim["note"] not in ("", claim["verdict"]):
            verdict += f" ({claim['note']})"
        lines.append([claim["claim"], verdict, "; ".join(measured), str(claim["seeds"] or "")])
    return markdown(("claim", "verdict", "measured", "seeds"), lines)


def _filled(line: str, rows: Sequence[Record], claims: Sequence[Record], layouts: Mapping[str, Any]) -> str:
    """Return a line of a template with its numbers, or what a comment asks for.

    `table ID`, `claims ID`, `floor ID images`, `runs NAME`, and `made ID ARMS`: on what arms that begin so were run, and when.
    """
    words = line.split()
    if words[:1] != ["<!--"] or words[1] not in ("table", "claims", "floor", "runs", "made"):
        return _NUMBER.sub(lambda found: _number(rows, *found.groups()), line)
    kind, name = words[1:3]
    if kind == "runs":
        return (
            SENTENCES[name](rows)
            if name in SENTENCES
            else diversification.TABLES[name](diversification.pretrained(rows))
        )
    if kind == "made":
        beginning = " ".join(words[3:-1])
        return f"{made([row for row in _of_table(rows, name) if row['arm'][0].startswith(beginning)])}."
    if kind == "floor":
        own = _of_table(rows, name)
        return noise_sentence(
            {row["arm"][0]: row.get("means") or as_floats(row["numbers"]) for row in own}, int(words[3])
        )
    return table_of(_of_table(claims if kind == "claims" else rows, name), layouts[name])


# A number of the record within a sentence: `<<TABLE; ARM; NAME>>`, the table without its page.
_NUMBER = re.compile(r"<<([^;>]+); ([^;>]+); ([^;>]+)>>")


def _number(rows: Sequence[Record], table: str, arm: str, name: str) -> str:
    """Return what the record has in a cell of a table; of a mean with its error, the mean."""
    own = _of_table(rows, f"{rows[0]['study']}/{table}")
    value = next(row["numbers"][name] for row in own if ", ".join(row["arm"]) == arm)
    return str(value[0] if isinstance(value, list) else value)


def table_of(rows: Sequence[Record], layout: Mapping[str, Any]) -> str:
    """Return a table: of claims, or of arms, with a line for each of them or, transposed, a column."""
    lines: list[list[str]] = []
    if layout["kind"] == "claims":
        header = [*layout["columns"][:-1], "verdict", "in words"]
        for row in rows:
            group = [row["group"], *("" for _ in header[1:])] if "group" in row else []
            # What a claim says of some cases only stands in their columns.
            found = dict(zip(row["cases"], row["measured"], strict=True)) if "cases" in row else {}
            names, measured = layout["columns"][1:-1], row.get("measured", [])
            if found.keys() & {*names}:
                measured = [found.get(name, "") for name in names]
            elif len(names) == 1:
                measured = ["; ".join(measured)]
            lines.append(group or [row["claim"], *measured, row["verdict"], row["note"]])
        return markdown(header, lines)
    if layout["kind"] == "transposed":
        for line in layout["rows"]:
            spec = None if "group" in line else (line["key"], line["pattern"], line["style"])
            cells = ["" if spec is None else _cell(row, *spec) for row in rows]
            lines.append([line["group" if spec is None else "label"], *cells])
        return markdown([layout["corner"], *(row["arm"][0] for row in rows)], lines, layout["rule"])
    patterns, styles = layout["patterns"], layout["style"]
    for row, before in zip(rows, [None, *rows], strict=False):
        first, *others = row["arm"]
        again = layout["fill"] and before is not None and before["arm"][0] == first
        cells = [_cell(row, name, patterns.get(name, "{}"), styles.get(name, "full")) for name in layout["names"]]
        lines.append(["" if again else first, *others, *cells])
    return markdown(layout["header"], lines, layout["rule"])


def _cell(row: Record, name: str, pattern: str, style: str) -> str:
    """Return what a record has under a name: nothing, words, one number or several."""
    value = row["numbers"].get(name)
    if value is None or isinstance(value, str):
        return value or ""
    numbers = value if isinstance(value, list) else [value]
    texts = [str(n).replace("0.", ".", 1) if style == "bare" and abs(n) < 1 else str(n) for n in numbers]
    text = pattern.format(*texts) if pattern.count("{}") == len(texts) else " / ".join(texts)
    return f"**{text}**" if name in row.get("best", ()) else text


def diversity_figure(rows: Sequence[Record], num_classes: int = 10) -> "matplotlib.figure.Figure":
    """Draw the arms of the Masksembles study, diversity against accuracy, below two members that err independently."""
    from dissensus import metrics

    # Those on whole batches are rows of the table only.
    own = (row for row in rows if not row["arm"][0].endswith(masksembles.WHOLE))
    arms = {row["arm"][0].split(",")[0]: row.get("means") or row["numbers"] for row in own}
    points = {name: (float(own["mean member"]), float(own["diversity"])) for name, own in arms.items()}
    grid = np.linspace(min(points.values())[0], max(points.values())[0], 51).tolist()
    upper = [metrics.diversity_bounds(place, place, num_classes).upper for place in grid]
    lines = [Line("", [x], [y], colour=place, style="o") for place, (x, y) in enumerate(points.values())]
    axes = {"ylabel": "diversity: disagreement / error rate", "ylim": (-0.05, None), "xmargin": 0.12}
    independent = Line("independent errors", grid, upper, colour=None, style="--")
    figure = draw([Panel("", "mean accuracy of members", [independent, *lines], axes)], width=6.4, height=4.0)
    for name, point in points.items():
        figure.axes[0].annotate(name, point, (0, 7), textcoords="offset points", ha="center", fontsize=8)
    return figure


def claims_page(claims: Sequence[Record]) -> str:
    """Return the page of all claims from its template: the main ones of each document, then one row each."""
    lines = []
    for claim in claims:
        name = claim["table"].split("/")[0]
        note = f": {claim['note']}" if claim["note"] not in ("", claim["verdict"]) else ""
        # A note may point to a place of its own page.
        verdict = _verdict(claim) + note.replace("](#", f"]({name}.md#")
        numbers, seeds = "; ".join(measured_of(claim)), str(claim["seeds"] or "")
        start, command = (
            [claim["document"], claim["claim"], verdict],
            f"`{claim['command']}`" if claim["command"] else "",
        )
        end = [command, f"`{name}.jsonl`"]
        lines.append([*start, numbers, seeds, claim["setting"], *end])
    header = ["document", "claim", "verdict", "numbers", "seeds", "setting", "command", "record"]
    of_each = {title: [c for c in claims if c["document"] == number] for number, title in DOCUMENTS.items()}

    def main_ones(asked: re.Match[str]) -> str:
        """Return the claims of a document by how they begin."""
        own = [claim for claim in claims if claim["document"] == asked[1]]
        chosen = [next(c for c in own if c["claim"].startswith(start)) for start in asked[2].split("; ")]
        return _short_table(chosen).replace("](#", f"]({chosen[0]['table'].split('/')[0]}.md#")

    return re.sub(r"^<!-- main (\S+) (.*) -->$", main_ones, template("claims.md"), flags=re.MULTILINE).format(
        count=len(claims),
        said=_counted(claims, VERDICTS),
        elsewhere=sum(claim.get("data") == "other" for claim in claims),
        drawn="; ".join(f"{title}: {_counted(own)}" for title, own in of_each.items()),
        every_claim=markdown(header, lines),
    )


def _counted(claims: Sequence[Record], always: Sequence[str] = ()) -> str:
    counts = Counter(claim["verdict"] for claim in claims)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict] or verdict in always)


def verdict_figure(claims: Sequence[Record]) -> "matplotlib.figure.Figure":
    """Draw how many claims of each document had which verdict, end to end, with their numbers on the bars."""
    from dissensus import plots

    figure, (ax,) = plots.panels(width=8.0, height=2.7)
    colours = (plots.COLOURS[0], plots.COLOURS[1], "#56B4E9", "#CCCCCC")
    counts, names = Counter((claim["document"], claim["verdict"]) for claim in claims), list(DOCUMENTS.values())
    starts = [0] * len(names)
    for verdict, colour, ink in zip(VERDICTS, colours, ("white", "white", "black", "black"), strict=True):
        sizes = [counts[number, verdict] for number in DOCUMENTS]
        bars = ax.barh(names, sizes, left=starts, color=colour, height=0.66, label=verdict)
        ax.bar_label(bars, [str(size or "") for size in sizes], label_type="center", color=ink, fontsize=9)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.set(xlabel="claims")
    figure.legend(*ax.get_legend_handles_labels(), frameon=False, fontsize="small", loc="outside upper center", ncols=4)
    return figure


def figures() -> "dict[str, matplotlib.figure.Figure]":
    """Draw the figures of the pages from the record, by file name."""
    heads, masks, deep = load("diversification"), shown("masksembles"), shown("deep-ensembles")
    layouts = json.loads(template("figures.json"))
    strengths = drawn_lines(heads, "diversification/figure-strength")
    worst, detected = (strengths[title] for title in ("worst member's accuracy", "AUROC of PDS, severity 5"))
    changes = _of_table(deep, "deep-ensembles/figure-uci")
    found = {
        "claims": verdict_figure(documents_claims(load("claims"))),
        "tabular": ranks_figure(read_records(RECORDS / "tabular.jsonl")),
        "alarms": shares_figure(
            {name: mean_shares(arms) for name, arms in regimes(load("alarms")).items()},
            "share that rings",
            float(SHOWN_RATE),
        ),
        "choosing": pareto(kinds_points(load("choosing")), layouts["names beside points"]),
        "masksembles-diversity": diversity_figure(_of_table(masks, "masksembles/diversity-and-calibration")),
        "diversification-guard": diversification.guard_figure(diversification.pretrained(heads)),
        "diversification-strength": sweeps(strengths, "strength", level="deep ensemble"),
        "diversification-size": sweeps(drawn_lines(heads, "diversification/figure-size"), "members"),
        "diversification-trade": trade_figure(
            {
                form: [(y, detected[form][s][0], s) for s, (y, _) in worst[form].items()]
                for form in ("published", "guarded")
            }
        ),
        "../images/practical_regression_members": count_figure(_by_members(deep)),
        "../images/uci_nll": change_figure(
            {tuple(row["arm"]): as_floats(row["numbers"]["change of NLL, quartiles"]) for row in changes}
        ),
    }
    for kind in ("heads", "nets"):
        rows = _of_table(heads, f"diversification/figure-bars-{kind}")
        bars = {row["arm"][0]: as_floats(row["numbers"]["AUROC at severity 5"]) for row in rows}
        found[f"diversification-bars-{kind}"] = baseline_figure(bars)
    for study in ("anchoring", "collusion", "masksembles"):
        found |= page_figures(shown(study))
    return found | {drawing.name: draw(drawing.panels) for drawing in theory.drawings()}


def page_figures(rows: Iterable[Record]) -> dict[str, "matplotlib.figure.Figure"]:
    """Return the figures that one study's record has as lines, by name.

    A row of the table `NAME/figures` is one line: its arm is the figure, the panel and the line's name, its numbers are x, y and the ends
    of a band. They were read off the figures that were drawn when the runs ended; of their values the record has only some.
    """
    found: dict[str, dict[str, list[Line]]] = {}
    for row in rows:
        if row["table"] == f"{row['study']}/figures":
            figure, panel, name = row["arm"]
            colour = row["line"]["colour"]
            look = {"colour": None if colour is None else int(colour), "style": row["line"]["style"]}
            found.setdefault(figure, {}).setdefault(panel, []).append(Line(name, **as_floats(row["numbers"]), **look))
    figures, layouts = {}, json.loads(template("figures.json"))["lines"]
    for figure, lines in found.items():
        layout = layouts[figure]
        xlabel, axes = layout.pop("xlabel"), layout.pop("axes", {})
        figures[figure] = draw([Panel(title, xlabel, own, axes) for title, own in lines.items()], **layout)
    return figures


def _by_members(rows: Sequence[Record]) -> dict[str, dict[str, dict[float, tuple[float, float]]]]:
    """Return what ensembles of the practical's regression are worth by number of members, as `count_figure` draws it."""
    found: dict[str, dict[str, dict[float, tuple[float, float]]]] = {}
    columns = tuple(zip(DRAWN.values(), ("NLL", "RMSE (median)", "covered inside", "outside"), strict=True))
    for row in _of_table(rows, "deep-ensembles/adversarial-training-ensembles-number-of-members"):
        arm, count = row["arm"]
        for title, name in columns:
            mean, error, *median = map(float, row["numbers"][name])
            found.setdefault(title, {}).setdefault(arm, {})[float(count)] = (
                (median[0], 0.0) if median else (mean, error)
            )
    return found


def _of_table(rows: Sequence[Record], table: str) -> list[Record]:
    return [row for row in rows if row["table"] == table]


def drawn_lines(rows: Sequence[Record], table: str) -> dict[str, dict[str, dict[float, tuple[float, float]]]]:
    """Return the lines of a figure, without bands, as `sweeps` takes them."""
    found: dict[str, dict[str, dict[float, tuple[float, float]]]] = {}
    for row in _of_table(rows, table):
        name, place = row["arm"]
        for title, value in row["numbers"].items():
            found.setdefault(title, {}).setdefault(name, {})[float(place)] = float(value), 0.0
    return found


def write(folder: Path = PAGES) -> list[str]:
    """Judge the claims that runs speak of and write all pages; return the names of those that changed."""
    (RECORDS / "claims.jsonl").write_text(judged_claims(), encoding="utf-8")
    changed = []
    for name, text in pages().items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(name)
    for name, figure in figures().items():
        save_figure(figure, folder / f"{name}.svg")
    return changed


def add(run: Path, records: Path = RECORDS) -> int:
    """Add the arms of a run's folder to the record of its study; arms that it has with the same settings are replaced."""
    fitting = [path.stem for path in records.glob("*.jsonl") if run.name.startswith(path.stem)]
    study = max(fitting, key=len, default=run.name)
    path = records / f"{study}.jsonl"
    kept = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [
        as_record(study, json.loads(line)) for line in (run / "arms.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    # Of an arm that was done twice, the later record.
    new = {_name_of(row): json.dumps(row, ensure_ascii=False) for row in rows}
    lines = [*(line for line in kept if _name_of(json.loads(line)) not in new), *new.values()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(new)


def _name_of(row: Record) -> tuple[tuple[str, ...], str]:
    return tuple(row["arm"]), json.dumps(row["setting"], sort_keys=True) if row["source"] == "run" else "page"


def as_record(study: str, arm: Record) -> Record:
    """Return a line of `arms.jsonl` as a line of the record: the same numbers, without curves and lists of examples."""
    made = arm["record"]["made"]
    numbers = {key: value for key, value in compact(arm["record"]).items() if value is not None}
    return {
        "study": study,
        "table": f"{study}/runs",
        "arm": [arm["arm"]],
        "machine": made["device"],
        "versions": {"torch": made["torch"]},
        "date": made["date"],
        "seeds": 1,
        "setting": arm.get("settings", {}),
        "seconds": arm["record"].get("arm_seconds"),
        "source": "run",
        "numbers": numbers,
    }


def compact(value: Any) -> Any:
    """Return numbers with five digits, and values alone where their interval is not known; without curves over epochs.

    Example:
        >>> compact({"nll": [0.1234567, None, None], "history": [1, 2], "members": [0.9, 0.8]})
        {'nll': 0.12346, 'members': [0.9, 0.8]}
    """
    if isinstance(value, dict):
        return {key: compact(each) for key, each in value.items() if key not in _LEFT_OUT}
    if isinstance(value, list):
        return compact(value[0]) if value[1:] == [None, None] else [compact(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main(words: Sequence[str]) -> None:
    """Write the pages, after adding the arms of runs: `add DIR ...`."""
    if words and (words[0] != "add" or len(words) < 2):
        raise SystemExit("Say nothing to write the pages, or: add RUN_FOLDER ...")
    for folder in words[1:]:
        print(f"{add(Path(folder))} arms of {folder} are in the record")
    print("Written anew:", ", ".join(write()) or "nothing; all pages are as the record says")


if __name__ == "__main__":
    main(sys.argv[1:])
