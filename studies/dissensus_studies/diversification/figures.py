"""Records of `diversification` in, its figures out."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dissensus import plots
from dissensus.html import Table
from dissensus.scores import bma, predictive_diversity
from dissensus_studies.diversification.reading import (
    GUARDED,
    PUBLISHED,
    SCORES,
    SHOWN,
    USUAL,
    Found,
    auroc,
    estimate,
    label,
    plain_rows,
    pooled_parts,
    worst_member,
)
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.image_pages import over_seeds, sweep
from dissensus_studies.harness.image_sets import ImageSets
from dissensus_studies.harness.statistics import Estimate

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SPREAD: tuple[str, Callable[[Record], float]] = (
    "mean PDS on C-5 (sum)",
    lambda record: float(record["pds"]["C-5"][0]),
)
# Predictions of three members for three classes: all unsure in the same way, or each sure of another class.
EXAMPLE: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "all unsure": ((0.34, 0.33, 0.33), (0.34, 0.33, 0.33), (0.34, 0.33, 0.33)),
    "in conflict": ((0.98, 0.01, 0.01), (0.01, 0.98, 0.01), (0.03, 0.01, 0.96)),
}


def example_scores() -> dict[str, tuple[float, float]]:
    """Return BMA (as a confidence, as the document has it) and PDS of the worked example.

    Example:
        >>> {name: tuple(round(value, 2) for value in values) for name, values in example_scores().items()}
        {'all unsure': (0.34, 0.33), 'in conflict': (0.34, 0.97)}
    """
    found = {}
    for name, probs in EXAMPLE.items():
        logits = Tensor(probs).log()[:, None]
        found[name] = (1 - bma(logits).item(), predictive_diversity(logits).item())
    return found


def example_figure() -> "matplotlib.figure.Figure":
    """Draw figure 2: the same average, and very different members."""
    figure, axes = plots.panels(len(EXAMPLE), width=4.0, height=2.6)
    for ax, (name, probs) in zip(axes, EXAMPLE.items(), strict=True):
        for member, values in enumerate(probs):
            places = [c + (member - 1) * 0.25 for c in range(len(values))]
            ax.bar(places, values, 0.22, color=plots.COLOURS[member], label=f"member {member + 1}")
        means = torch.tensor(probs).mean(0).tolist()
        classes = range(len(means))
        ax.hlines(means, [c - 0.36 for c in classes], [c + 0.36 for c in classes], colors="k", label="average")
        confidence, diversity = example_scores()[name]
        ax.set(title=f"{name}: BMA {confidence:.2f}, PDS {diversity:.2f}", ylim=(0, 1.05), xlabel="class")
        ax.set_xticks(range(len(means)), ["a", "b", "c"])
    axes[0].set_ylabel("probability")
    axes[0].legend(frameon=False, fontsize="x-small")
    return figure


def _in_rows(count: int) -> tuple["matplotlib.figure.Figure", list["matplotlib.axes.Axes"]]:
    """Return a figure of so many panels, three a row: more side by side cannot be read on a page."""
    columns = min(count, 3)
    figure, axes = plots.panels(columns, ceil(count / columns), width=3.2, height=2.8)
    for ax in axes[count:]:
        ax.axis("off")
    return figure, axes[:count]


def strength_figure(found: Found, family: str) -> "matplotlib.figure.Figure | None":
    """Draw figure 5's first half: diversity, AUROC and members' accuracy against the strength."""
    rows = found.where(family=family, method="ldr", num_members=5, **USUAL)
    if len({setting.strength for setting in rows}) < 3:
        return None
    parts = pooled_parts(found.records.values())
    figure, axes = _in_rows(len(parts) + 2)
    panels: list[tuple[str, Callable[[Record], float]]] = [
        _SPREAD,
        ("worst member's accuracy", lambda record: float(min(record["members"]))),
        *((f"AUROC of PDS, {part}", _value(part, SCORES["PDS"])) for part in parts),
    ]
    kinds = (("published", PUBLISHED, plots.COLOURS[1]), ("guarded", GUARDED, plots.COLOURS[0]))
    for name, guard, colour in kinds:
        pairs = [
            (setting.strength, record)
            for setting, records in rows.items()
            for record in records
            if setting.guard == guard or setting.strength == 0
        ]
        if len({strength for strength, _ in pairs}) < 2:
            continue
        for ax, (_, read) in zip(axes, panels, strict=True):
            sweep(over_seeds(pairs, read), ax, label=name, colour=colour)
    deep = found.one(family, "deep M=5")
    for ax, (title, read) in zip(axes, panels, strict=True):
        if deep:
            mean = sum(map(read, deep)) / len(deep)
            ax.axhline(mean, color=plots.NOTE_COLOUR, linestyle="--", linewidth=1, label="deep ensemble")
        strengths = sorted({setting.strength for setting in rows})
        ax.set_xscale("symlog", linthresh=0.1)
        ax.set_xticks(strengths, [f"{strength:g}" for strength in strengths])
        ax.set_xticks([], minor=True)
        ax.set(xlabel="strength", title=title, xlim=(-0.03, 1.2 * strengths[-1]))
    axes[0].legend(frameon=False, fontsize="x-small")
    return figure


def size_figure(found: Found, family: str) -> "matplotlib.figure.Figure | None":
    """Draw figure 5's second half: diversity, and AUROC of PDS, against the number of members."""
    guided = {"family": family, "method": "ldr", "strength": SHOWN, **USUAL}
    kinds = {
        "deep ensemble": (found.where(family=family, method="deep", layers=2, fixed=False), plots.COLOURS[2]),
        "published": (found.where(guard=PUBLISHED, **guided), plots.COLOURS[1]),
        "guarded": (found.where(guard=GUARDED, **guided), plots.COLOURS[0]),
    }
    parts = pooled_parts(found.records.values())
    panels = [_SPREAD, *((f"AUROC of PDS, {part}", _value(part, SCORES["PDS"])) for part in parts)]
    figure, axes = _in_rows(len(panels))
    sizes: set[int] = set()
    for name, (rows, colour) in kinds.items():
        pairs = [(setting.num_members, record) for setting, records in rows.items() for record in records]
        if len({size for size, _ in pairs}) < 2:
            continue
        sizes |= {size for size, _ in pairs}
        for ax, (_, read) in zip(axes, panels, strict=True):
            sweep(over_seeds(pairs, read), ax, label=name, colour=colour)
    if not sizes:
        return None
    for ax, (title, _) in zip(axes, panels, strict=True):
        ax.set_xscale("log")
        ax.set_xticks(sorted(sizes), [str(size) for size in sorted(sizes)])
        ax.set_xticks([], minor=True)
        ax.set(xlabel="members", title=title)
    axes[0].legend(frameon=False, fontsize="x-small")
    return figure


def _value(part: str, score: str) -> Callable[[Record], float]:
    return lambda record: float(record["auroc"][part][score][0])


def baseline_bars(found: Found, family: str) -> list[tuple[str, Estimate]]:
    """Return figure 4's bars: each method's better one of BMA and PDS, loss-guided ones' PDS, detectors and energy.

    Returns:
        Name and AUROC, lowest first.
    """
    bars: list[tuple[str, Estimate]] = []

    def add(name: str, records: Sequence[Record], scores: Sequence[str]) -> None:
        values = [value for score in scores if (value := estimate(records, auroc("C-5", score))) is not None]
        if values:
            bars.append((name, max(values, key=lambda value: value.value)))

    for setting, records in plain_rows(found, family).items():
        guided = setting.method == "ldr"
        if guided and setting.strength not in (0.1, SHOWN, 5.0):
            continue
        add(label(setting), records, [SCORES["PDS"]] if guided else list(SCORES.values()))
        if setting.method == "deep":
            add("deep ensemble, energy", records, ["mean_energy"])
    for record in found.records.values():
        if "detectors" in record and record["family"] in (family, family.replace("heads", "backbone")):
            for name, value in record["detectors"].get("C-5", {}).items():
                words = name.replace("_", " ").replace("mahalanobis", "Mahalanobis")
                bars.append((words, Estimate.of([value], share=True)))
    return sorted(bars, key=lambda bar: bar[1].value)


def baseline_figure(bars: Sequence[tuple[str, Estimate]]) -> "matplotlib.figure.Figure":
    """Draw figure 4: every method we have, by AUROC."""
    figure, (ax,) = plots.panels(width=6.5, height=0.28 * len(bars) + 1.2)
    colours = [plots.COLOURS[1] if name.startswith("LDR") else plots.COLOURS[0] for name, _ in bars]
    places, values = range(len(bars)), [bar.value for _, bar in bars]
    ends = [bar.ends or (bar.value, bar.value) for _, bar in bars]
    # Bars begin at chance: what is left of it orders images the wrong way round.
    ax.barh(
        places,
        [value - 0.5 for value in values],
        left=0.5,
        color=colours,
        xerr=[
            [value - low for value, (low, _) in zip(values, ends, strict=True)],
            [high - value for value, (_, high) in zip(values, ends, strict=True)],
        ],
    )
    ax.axvline(0.5, color=plots.NOTE_COLOUR, linewidth=1)
    ax.set_yticks(places, [name for name, _ in bars])
    ax.set(xlim=(min(0.48, *values) - 0.03, max(values) + 0.04), xlabel="AUROC, C-5 (0.5: chance)")
    return figure


def trade_figure(found: Found, family: str) -> "matplotlib.figure.Figure | None":
    """Draw what members lose against what detection gains, one point for each loss-guided ensemble."""
    guided = found.where(family=family, method="ldr", num_members=5, **USUAL)
    rows = [(setting, records) for setting, records in guided.items() if setting.guard != "inverse probability"]
    if len(rows) < 3:
        return None
    guards = list(dict.fromkeys(setting.guard for setting, _ in rows))
    figure, (ax,) = plots.panels(width=5.6, height=4.0)
    for index, guard in enumerate(guards):
        points = [
            (worst.value, value.value, setting.strength)
            for setting, records in rows
            if setting.guard == guard
            and (worst := estimate(records, worst_member)) is not None
            and (value := estimate(records, auroc("C-5", SCORES["PDS"]))) is not None
        ]
        colour = plots.COLOURS[index % len(plots.COLOURS)]
        name = {PUBLISHED: "published (none)", GUARDED: "default"}.get(guard, guard)
        ax.plot([p[0] for p in points], [p[1] for p in points], "osD^"[index % 4], color=colour, label=name)
        # Other guards were tried at one strength or two, the default beside them: names would lie on each other.
        for (across, up), words in _together(points if guard in (PUBLISHED, GUARDED) else []).items():
            # Guarded points stand close together at the right: their names go where there is room.
            left = guard != PUBLISHED
            offset, across_by, up_by = ((-7, 0), "right", "center") if left else ((5, 4), "left", "bottom")
            ax.annotate(
                words, (across, up), offset, textcoords="offset points", fontsize="x-small", ha=across_by, va=up_by
            )
    ax.margins(0.12)
    ax.set(xlabel="worst member's accuracy", ylabel="AUROC of PDS, C-5")
    ax.legend(frameon=False, fontsize="x-small", title="guard")
    return figure


def _together(points: Sequence[tuple[float, float, float]]) -> dict[tuple[float, float], str]:
    """Name points by their strength, those at one place together.

    Example:
        >>> _together([(0.7, 0.61, 5.0), (0.7, 0.6101, 10.0), (0.5, 0.65, 0.5)])
        {(0.7, 0.61): '5, 10', (0.5, 0.65): '0.5'}
    """
    found: dict[tuple[float, float], list[str]] = {}
    for across, up, strength in points:
        near = (place for place in found if abs(place[0] - across) < 0.01 and abs(place[1] - up) < 0.001)
        found.setdefault(next(near, (across, up)), []).append(f"{strength:g}")
    return {place: ", ".join(words) for place, words in found.items()}


def gallery_figure(record: Record, sets: ImageSets) -> "matplotlib.figure.Figure | None":
    """Draw figure 3: the test images that members differ most on, and least: the truth, the ensemble's answer, other members'."""
    found = record.get("gallery", {})
    count = len(found.get("most", ()))
    if not count:
        return None
    figure, axes = plots.panels(count, 2, width=1.8, height=2.2)
    for ax, (name, each) in zip(axes, ((n, e) for n in ("most", "least") for e in found[n]), strict=True):
        ax.imshow(sets.test.x[each["image"]].permute(1, 2, 0).numpy())
        ax.set_axis_off()
        votes: list[int] = each["answers"]
        # Of records that lack the ensemble's answer, what most members say.
        truth, answer = int(sets.test.y[each["image"]]), each.get("ensemble", max(votes, key=votes.count))
        others = sorted({_class_name(sets, one) for one in votes if one != answer})
        ax.set_title(
            f"{name}, truth: {_class_name(sets, truth)}\nensemble: {_class_name(sets, answer)}\n{', '.join(others)}",
            fontsize="xx-small",
        )
    return figure


def _class_name(sets: ImageSets, number: int) -> str:
    return CIFAR10[number] if sets.name == "cifar10" and sets.num_classes == len(CIFAR10) else str(number)


def example_table() -> Table:
    """Return the worked example as a table."""
    rows = [(name, *(round(value, 3) for value in values)) for name, values in example_scores().items()]
    return Table(("three members", "BMA (confidence)", "PDS"), rows, "Figure 2's point in numbers.")
