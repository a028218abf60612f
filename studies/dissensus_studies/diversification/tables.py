"""Records of `diversification` in, the document's tables in our setting out."""

from collections.abc import Callable, Mapping, Sequence

from dissensus.html import Table
from dissensus.scores import SCORES as ALL_SCORES
from dissensus_studies.diversification.reading import (
    GUARDED,
    PDS,
    PUBLISHED,
    SCORES,
    SHOWN,
    Found,
    Read,
    Rows,
    aggregated,
    auroc,
    counted,
    epoch,
    label,
    on_test,
    parts_of,
    pooled_parts,
    text_of,
    worst_group,
    worst_member,
)
from dissensus_studies.diversification.settings import Setting
from dissensus_studies.harness.arm_log import Record

ANSWERS = {"mean logits": "mean_logits", "vote": "majority_vote", "soup": "soup", "oracle": "oracle"}


def family_tables(found: Found, family: str, sources: Sequence[str]) -> list[Table]:
    """Return tables 1 to 7, 9 and 10 of a family of ensembles, as far as there are arms for them."""
    plain = found.plain(family)
    several = {setting: records for setting, records in plain.items() if setting.num_members > 1}
    counts = list(dict.fromkeys(part for records in plain.values() for part in records[0]["unique"]))
    every, pooled = parts_of(r[0] for r in plain.values()), pooled_parts(found.records.values())
    shown = {
        s: r for s, r in plain.items() if s.method in ("single", "deep") or (s.method, s.strength) == ("ldr", SHOWN)
    }
    accuracies = {f"{word} {p}": aggregated(p, way) for word, way in ANSWERS.items() for p in ("test", "C-1", "C-5")}
    where = [*sources, *sources]
    tables = [
        _table(
            "Table 1: mean number of different answers of five members (#unique), and mean of PDS as a sum over classes.",
            several,
            {f"{w} {p}": counted(what, p) for w, what in (("#unique", "unique"), ("PDS", "pds")) for p in counts},
        ),
        _by_score(
            "Table 2: AUROC for corrupted and unknown images, M = 5. C-1 and C-5 are means over corruptions.",
            [(records, word, score, s) for word, score in SCORES.items() for s, records in plain.items()],
            every,
        ),
        _table(
            "Table 3: accuracy of averaged logits, of a vote, of averaged weights (soup), and of the best member by hindsight "
            "(oracle: never a result).",
            plain | found.plain(family, 50),
            {**accuracies, "worst member test": worst_member, "ECE": on_test("ece")},
            lambda s: f"{label(s)}, M = {s.num_members}",
        ),
        _ablation(
            "Tables 4 and 5: layers of each head.", _layers(found, family), lambda s: f"{s.layers} layers, {label(s)}"
        ),
        _by_score(
            "Table 6: AUROC of every score.",
            [(records, score, score, s) for s, records in shown.items() for score in ALL_SCORES],
            pooled,
        ),
        _ablation("Table 7: two stages against joint weights.", _two_stages(found, family)),
        _ablation(
            "Table 9: images to disagree on (the first half of the named set; the second is judged by).",
            found.where(family=family, method=("a2d", "divdis")),
            lambda s: f"{label(s).removesuffix(', other source')}, {where[s.source]}",
        ),
        _drawn(found, family),
    ]
    return [table for table in tables if table.rows]


def spurious_table(found: Found) -> Table:
    """Table 8: worst-group accuracy."""
    return _table(
        "Table 8: accuracy on the worst of four groups. Averages of logits; the best member by hindsight.",
        found.where(kind="spurious"),
        {"oracle selection": worst_group("oracle"), **{way: worst_group(way) for way in ("ensemble", "mean member")}},
        lambda s: "ERM" if s.method == "deep" else label(s),
    )


def _table(caption: str, rows: Rows, columns: Mapping[str, Read], name: Callable[[Setting], str] = label) -> Table:
    cells = [
        (name(setting), *(text_of(records, read) for read in columns.values())) for setting, records in rows.items()
    ]
    return Table(("ensemble", *columns), cells, caption)


def _by_score(caption: str, rows: Sequence[tuple[Sequence[Record], str, str, Setting]], parts: Sequence[str]) -> Table:
    """Return a line for each ensemble and score that it has."""
    cells = [
        (label(setting), word, *(text_of(records, auroc(part, score)) for part in parts))
        for records, word, score, setting in rows
        if text_of(records, auroc(parts[0], score)) is not None
    ]
    return Table(("ensemble", "score", *parts), cells, caption)


def _ablation(caption: str, rows: Rows, name: Callable[[Setting], str] = label) -> Table:
    parts = pooled_parts(record for records in rows.values() for record in records)
    columns = {
        "test": aggregated("test", "mean_logits"),
        "C-1 accuracy": aggregated("C-1", "mean_logits"),
        "C-5 accuracy": aggregated("C-5", "mean_logits"),
        "worst member": worst_member,
        **{f"{word} {part}": auroc(part, score) for part in parts for word, score in SCORES.items()},
    }
    return _table(f"{caption} Accuracy of averaged logits, and AUROC of BMA and PDS.", rows, columns, name)


def _layers(found: Found, family: str) -> Rows:
    """Return heads of one, two and three layers; none where all have as many."""
    rows = {
        setting: records
        for setting, records in found.where(family=family, num_members=5, active=(0, 2), fixed=False).items()
        if setting.method == "deep"
        or ((setting.method, setting.strength) == ("ldr", SHOWN) and setting.guard in (PUBLISHED, GUARDED))
    }
    several = len({setting.layers for setting in rows}) > 1
    return dict(sorted(rows.items(), key=lambda row: row[0].layers)) if several else {}


def _two_stages(found: Found, family: str) -> Rows:
    pairs = {"num_members": 5, "active": 2, "layers": 2, "strength": SHOWN, "guard": (PUBLISHED, GUARDED)}
    rows = found.where(family=family, method=("ldr", "two-stage"), **pairs)
    return rows if any(setting.method == "two-stage" for setting in rows) else {}


def _drawn(found: Found, family: str) -> Table:
    """Table 10: members drawn a step, and the seconds of an epoch."""
    rows = found.where(family=family, layers=2, method="ldr", guard=PUBLISHED, strength=SHOWN)
    ordered = sorted((s for s in rows if s.active), key=lambda s: (s.num_members, s.active, s.fixed))
    parts = pooled_parts(record for records in rows.values() for record in records)
    columns = {
        "seconds an epoch": epoch("seconds"),
        "± over epochs": epoch("deviation"),
        "test": aggregated("test", "mean_logits"),
        "C-5 accuracy": aggregated("C-5", "mean_logits"),
        "worst member": worst_member,
        **{f"PDS {part}": auroc(part, PDS) for part in parts},
    }
    return _table(
        "Table 10: published form, strength 0.5. Epochs are scaled so that each member takes as many steps as alone, but for 'fixed'.",
        {setting: rows[setting] for setting in ordered} if len(ordered) > 1 else {},
        columns,
        lambda s: f"M = {s.num_members}, {s.active} drawn{', fixed epochs' if s.fixed else ''}",
    )
