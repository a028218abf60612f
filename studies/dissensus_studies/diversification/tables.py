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
    aggregated,
    auroc,
    counted,
    epoch,
    estimate,
    label,
    on_test,
    parts_of,
    plain_rows,
    pooled_parts,
    worst_group,
    worst_member,
)
from dissensus_studies.diversification.settings import Setting
from dissensus_studies.harness.arm_log import Record

Rows = Mapping[Setting, Sequence[Record]]


def _cell(records: Sequence[Record], read: Read) -> str | None:
    value = estimate(records, read)
    return None if value is None else value.text


def _table(rows: Rows, columns: Mapping[str, Read], caption: str, name: Callable[[Setting], str] = label) -> Table:
    cells = [(name(setting), *(_cell(records, read) for read in columns.values())) for setting, records in rows.items()]
    return Table(("ensemble", *columns), cells, caption)


def diversity_table(found: Found, family: str) -> Table:
    """Table 1: mean number of different answers, and mean PDS."""
    rows = plain_rows(found, family)
    parts = list(dict.fromkeys(p for records in rows.values() for p in records[0]["unique"]))
    return _table(
        {setting: records for setting, records in rows.items() if setting.num_members > 1},
        {
            f"{word} {part}": counted(what, part)
            for word, what in (("#unique", "unique"), ("PDS", "pds"))
            for part in parts
        },
        "Table 1: mean number of different answers of five members (#unique), and mean of PDS as a sum over classes.",
    )


def detection_table(found: Found, family: str) -> Table:
    """Table 2: AUROC of BMA and PDS for every method."""
    rows = plain_rows(found, family)
    parts = parts_of(records[0] for records in rows.values())
    cells = [
        (label(setting), word, *(_cell(records, auroc(part, score)) for part in parts))
        for word, score in SCORES.items()
        for setting, records in rows.items()
        if estimate(records, auroc(parts[0], score)) is not None
    ]
    return Table(
        ("ensemble", "score", *parts),
        cells,
        "Table 2: AUROC for corrupted and unknown images, M = 5. C-1 and C-5 are means over corruptions.",
    )


def generalisation_table(found: Found, family: str) -> Table:
    """Table 3: accuracy by every way to make one answer."""
    ways = {"mean logits": "mean_logits", "vote": "majority_vote", "soup": "soup", "oracle": "oracle"}
    columns = {f"{word} {part}": aggregated(part, way) for word, way in ways.items() for part in ("test", "C-1", "C-5")}
    rows = dict(plain_rows(found, family)) | dict(plain_rows(found, family, 50))
    return _table(
        rows,
        {**columns, "worst member test": worst_member, "ECE": on_test("ece")},
        "Table 3: accuracy of averaged logits, of a vote, of averaged weights (soup), and of the best member by hindsight "
        "(oracle: never a result).",
        lambda setting: f"{label(setting)}, M = {setting.num_members}",
    )


def score_table(found: Found, family: str) -> Table:
    """Table 6: AUROC of every score."""
    rows: list[tuple[object, ...]] = []
    parts = pooled_parts(found.records.values())
    for setting, records in plain_rows(found, family).items():
        if setting.method in ("single", "deep") or (setting.method == "ldr" and setting.strength == SHOWN):
            rows += [
                (label(setting), score, *(_cell(records, auroc(part, score)) for part in parts))
                for score in ALL_SCORES
                if estimate(records, auroc(parts[0], score)) is not None
            ]
    return Table(("ensemble", "score", *parts), rows, "Table 6: AUROC of every score.")


def layers_table(found: Found, family: str) -> Table | None:
    """Tables 4 and 5: heads of one, two and three layers."""
    five = {"family": family, "num_members": 5, "active": (0, 2), "fixed": False}
    guided = found.where(method="ldr", strength=SHOWN, guard=(PUBLISHED, GUARDED), **five)
    rows = found.where(method="deep", **five) | guided
    if len({setting.layers for setting in rows}) < 2:
        return None
    order = [setting for setting in found.where(**five) if setting in rows]
    return _ablation(
        {setting: rows[setting] for setting in sorted(order, key=lambda setting: setting.layers)},
        "Tables 4 and 5: layers of each head.",
        lambda setting: f"{setting.layers} layers, {label(setting)}",
    )


def two_stage_table(found: Found, family: str) -> Table | None:
    """Table 7: examples chosen beforehand against loss-guided weights."""
    pairs = {"num_members": 5, "active": 2, "layers": 2, "strength": SHOWN, "guard": (PUBLISHED, GUARDED)}
    rows = found.where(family=family, method=("ldr", "two-stage"), **pairs)
    if not any(setting.method == "two-stage" for setting in rows):
        return None
    return _ablation(rows, "Table 7: two stages against joint weights.")


def source_table(found: Found, family: str, names: Sequence[str]) -> Table | None:
    """Table 9: where the images to disagree on come from."""
    rows = found.where(family=family, method=("a2d", "divdis"))
    if not rows:
        return None
    where = [*names, *names]
    return _ablation(
        rows,
        "Table 9: images to disagree on (the first half of the named set; the second is judged by).",
        lambda setting: f"{label(setting).removesuffix(', other source')}, {where[setting.source]}",
    )


def _ablation(rows: Rows, caption: str, name: Callable[[Setting], str] = label) -> Table:
    parts = pooled_parts(record for records in rows.values() for record in records)
    columns: dict[str, Read] = {
        "test": aggregated("test", "mean_logits"),
        "C-1 accuracy": aggregated("C-1", "mean_logits"),
        "C-5 accuracy": aggregated("C-5", "mean_logits"),
        "worst member": worst_member,
    }
    columns |= {f"{word} {part}": auroc(part, score) for part in parts for word, score in SCORES.items()}
    return _table(rows, columns, f"{caption} Accuracy of averaged logits, and AUROC of BMA and PDS.", name)


def stochastic_table(found: Found, family: str) -> Table | None:
    """Table 10: members drawn a step, and the seconds of an epoch."""
    rows = found.where(family=family, layers=2, method="ldr", guard=PUBLISHED, strength=SHOWN)
    rows = {setting: records for setting, records in rows.items() if setting.active}
    if len(rows) < 2:
        return None
    parts = pooled_parts(record for records in rows.values() for record in records)
    columns: dict[str, Read] = {
        "seconds an epoch": epoch("seconds"),
        "± over epochs": epoch("deviation"),
        "test": aggregated("test", "mean_logits"),
        "C-5 accuracy": aggregated("C-5", "mean_logits"),
        "worst member": worst_member,
        **{f"PDS {part}": auroc(part, PDS) for part in parts},
    }
    ordered = dict(sorted(rows.items(), key=lambda item: (item[0].num_members, item[0].active, item[0].fixed)))
    return _table(
        ordered,
        columns,
        "Table 10: published form, strength 0.5. Epochs are scaled so that each member takes as many steps as alone, but for 'fixed'.",
        lambda s: f"M = {s.num_members}, {s.active} drawn{', fixed epochs' if s.fixed else ''}",
    )


def spurious_table(found: Found) -> Table | None:
    """Table 8: worst-group accuracy."""
    rows = found.where(kind="spurious")
    if not rows:
        return None
    columns = {
        "oracle selection": worst_group("oracle"),
        "ensemble": worst_group("ensemble"),
        "mean member": worst_group("mean member"),
    }
    return _table(
        rows,
        columns,
        "Table 8: accuracy on the worst of four groups. Averages of logits; the best member by hindsight.",
        lambda s: "ERM" if s.method == "deep" else label(s),
    )
