"""Records of `anchoring` in, sections of its page out."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite

from dissensus.html import Picture, Section, Table, Text
from dissensus_studies.anchoring.adaptation import Tasks
from dissensus_studies.anchoring.arms import ANCHORS, SCORES, AnchorSetting
from dissensus_studies.anchoring.figures import (
    BANDS,
    QUALITIES,
    TAIL_QUALITIES,
    alpha_figure,
    not_drawn,
    radar_figure,
    tail_figure,
)
from dissensus_studies.anchoring.qualities import mean_adaptation, mean_auroc
from dissensus_studies.anchoring.tables import Row, Rows
from dissensus_studies.harness.arm_log import Arms, Record
from dissensus_studies.harness.image_pages import arms_table, auroc_columns, with_interval
from dissensus_studies.harness.outputs import Outputs


def by_row(found: Arms) -> dict[Row, list[Record]]:
    """Return the records of all seeds of each architecture and row."""
    rows: dict[Row, list[Record]] = {}
    for record in found.done.values():
        setting = AnchorSetting(**record["setting"])
        rows.setdefault((setting.architecture, setting.row), []).append(record)
    return rows


def alpha_sections(outputs: Outputs, records: Rows) -> list[Section]:
    """Show every quality against the masking probability, and improvements over the plain network as a radar."""
    sections = []
    for architecture in dict.fromkeys(architecture for architecture, _ in records):
        plain = records.get((architecture, "plain"), ())
        alphas = {
            found[0]["setting"]["alpha"]: found
            for (other, row), found in records.items()
            if other == architecture and " " not in row and row != "plain"
        }
        blocks = _alpha_blocks(outputs, architecture, plain, alphas)
        sections.append(Section(f"How much to mask, {architecture}", *blocks))
    return sections


def _alpha_blocks(
    outputs: Outputs, architecture: str, plain: Sequence[Record], alphas: Mapping[float, Sequence[Record]]
) -> list[Text | Picture]:
    if not plain or not alphas:
        lacking = "no anchored network in its usual form" if plain else "no plain network"
        return [Text(f"Not drawn: what anchoring and masking change, because {lacking} is among the arms.")]
    left_out = not_drawn(QUALITIES, plain, *alphas.values())
    blocks: list[Text | Picture] = []
    if len(alphas) > 1:
        alt = "clean and corruption accuracy, calibration, adaptation and detection against the masking probability"
        blocks.append(outputs.picture(f"anchoring_alpha_{architecture}", alpha_figure(plain, alphas), alt, BANDS))
    else:
        left_out.append(
            "Not drawn: qualities against the masking probability, because the arms have one such probability only."
        )
    named = {f"alpha = {alpha:g}" if alpha else "anchored": found for alpha, found in sorted(alphas.items())}
    radar = radar_figure(plain, named)
    if radar is None:
        left_out.append("Not drawn: the radar of improvements, because fewer than three qualities compare.")
    else:
        caption = "Improvement over the plain network, in per cent of its value; what is 0 there is left out."
        alt = "improvement over the plain network in several qualities"
        blocks.append(outputs.picture(f"anchoring_radar_{architecture}", radar, alt, caption))
    return [*_said(left_out), *blocks]


def _said(sentences: Sequence[str]) -> list[Text]:
    return [Text(*sentences)] if sentences else []


def tail_sections(outputs: Outputs, records: Rows) -> list[Section]:
    """Show what hard-delta mining changes, by its weight and by how tails are found."""
    mined: dict[str, dict[float, list[Record]]] = {}
    for found in records.values():
        for record in found:
            setting = AnchorSetting(**record["setting"])
            if setting.tail_weight:
                mined.setdefault(setting.tails, {}).setdefault(setting.tail_weight, []).append(record)
    masked = records.get(("resnet18", "alpha=0.25"), ())
    if not mined:
        return []
    if not masked:
        lacking = "no network of masking probability 1/4 without it"
        text = Text(f"Not drawn: what mining changes, because {lacking} is among the arms.")
        return [Section("Hard-delta mining", text)]
    groups = [each for by_weight in mined.values() for each in by_weight.values()]
    figure = tail_figure(masked, mined)
    alt = "mean AUROC and corruption accuracy against the weight of the tail term"
    caption = f"Masking probability 1/4; the dashed line is without mining. {BANDS}"
    drawn = [] if figure is None else [outputs.picture("anchoring_tails", figure, alt, caption)]
    return [Section("Hard-delta mining", *_said(not_drawn(TAIL_QUALITIES, masked, *groups)), *drawn)]


def arms_tables(found: Arms, compared: Arms) -> list[Table]:
    """Return a table of all arms, and one for each score.

    Args:
        found: The arms.
        compared: The same with the sets only that all have; means are over these.
    """
    columns: dict[str, Callable[[Record], object]] = {
        "accuracy": lambda record: with_interval(record["test"]["accuracy"]),
        "smooth ECE": lambda record: with_interval(record["test"].get("smooth_ece")),
        "corrupted accuracy": lambda record: with_interval(record["corrupted"]["all"]["accuracy"]),
        "corrupted smooth ECE": lambda record: with_interval(record["corrupted"]["all"]["smooth_ece"]),
        "mean AUROC": lambda record: _number(mean_auroc(record)),
        f"mean AUROC, {ANCHORS} references": _several,
        "adaptation": lambda record: _number(mean_adaptation(record)),
        "s": lambda record: round(record["training"]["seconds"], 1),
    }
    tables = [arms_table(compared.done, columns, "Intervals are 95 % over images.")]
    for score in SCORES:
        scored = auroc_columns(found.done, score)
        if scored:
            tables.append(arms_table(found.done, scored, f"AUROC of {score}, one reference"))
    return tables


def _number(value: float) -> str | None:
    return with_interval([value if isfinite(value) else None])


def _several(record: Record) -> str | None:
    return _number(mean_auroc(record["anchors"])) if "anchors" in record else None


def tasks_table(tasks: Tasks, found: Arms) -> Table:
    """Return which sets networks were adapted to, and which of the suite were not there; records may be of another machine."""
    used = [name for record in found.done.values() for name in record["adaptation"]]
    rows: list[tuple[object, ...]] = []
    for name in dict.fromkeys([*used, *tasks.found]):
        task, count = tasks.found.get(name), used.count(name)
        of_arms = f"{count} of {len(found.done)}"
        if task is None:
            rows.append((name, of_arms, None, None, None, "not in the folder any more"))
            continue
        notes = task.notes if count else (*task.notes, "in the folder, but these arms were run without it")
        classes = int(task.train.y.max()) + 1
        rows.append((name, of_arms, len(task.train.x), len(task.test.x), classes, ", ".join(notes)))
    rows += [(name, "none", None, None, None, reason) for name, reason in tasks.missing.items() if name not in used]
    return Table(
        ("set", "used by arms", "training images", "test images", "classes", "remark"), rows, "Sets to adapt to"
    )


def task_section(tasks: Tasks, found: Arms) -> Section:
    """Say how networks were adapted, to which sets, and which could not be used."""
    used = dict.fromkeys(name for record in found.done.values() for name in record["adaptation"])
    without = [name for name in dict.fromkeys([*tasks.found, *tasks.missing]) if name not in used]
    skipped = [
        (arm, name, reason)
        for arm, record in found.done.items()
        for name, reason in record.get("adaptation_skipped", {}).items()
    ]
    blocks = [Table(("arm", "set", "why"), skipped, "Sets that an arm skipped")] if skipped else []
    return Section(
        "Sets to adapt to",
        Text(
            "A linear classifier on the features before the last layer, by L-BFGS, its regularisation chosen on a fifth of the "
            "training images; ECE with 15 bins. The document does not give its own way.",
            f"Used: {', '.join(used) or 'none'}. Not used: {', '.join(without) or 'none'}.",
        ),
        tasks_table(tasks, found),
        *blocks,
    )
