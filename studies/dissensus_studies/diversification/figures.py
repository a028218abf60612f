"""Numbers of `diversification`, of a run or of the record, in; its figures out."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dissensus import plots
from dissensus_studies.diversification.reading import (
    GUARDED,
    PDS,
    PUBLISHED,
    SCORES,
    SHOWN,
    USUAL,
    Found,
    auroc,
    estimate,
    label,
    pooled_parts,
    worst_member,
)
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.figures import sweeps
from dissensus_studies.harness.image_pages import over_seeds
from dissensus_studies.harness.image_sets import ImageSets
from dissensus_studies.harness.statistics import Estimate, Summary

if TYPE_CHECKING:
    import matplotlib.figure

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FORMS = {"published": PUBLISHED, "guarded": GUARDED}
# Name to worst member's accuracy, AUROC and strength.
Points = Mapping[str, Sequence[tuple[float, float, float]]]


def strength_figure(found: Found, family: str) -> "matplotlib.figure.Figure | None":
    """Draw figure 5's first half: diversity, members' accuracy and AUROC against the strength."""
    rows = found.where(family=family, method="ldr", num_members=5, **USUAL)
    if len({setting.strength for setting in rows}) < 3:
        return None
    lines = {
        name: [(s.strength, r) for s, records in rows.items() if s.guard == guard or s.strength == 0 for r in records]
        for name, guard in FORMS.items()
    }
    deep = found.one(family, "deep M=5")
    return _sweep(found, lines | ({"deep ensemble": [(0.0, record) for record in deep]} if deep else {}), "strength")


def size_figure(found: Found, family: str) -> "matplotlib.figure.Figure | None":
    """Draw figure 5's second half: the same against the number of members."""
    rows = {
        name: found.where(family=family, method="ldr", strength=SHOWN, guard=guard, **USUAL)
        for name, guard in FORMS.items()
    }
    rows["deep ensembles"] = found.where(family=family, method="deep", layers=2, fixed=False)
    lines = {n: [(s.num_members, r) for s, records in own.items() for r in records] for n, own in rows.items()}
    return _sweep(found, lines, "members")


def _sweep(
    found: Found, lines: Mapping[str, Sequence[tuple[float, Record]]], along: str
) -> "matplotlib.figure.Figure | None":
    """Draw lines of several places, with two standard errors where all of them have several runs."""
    level = "deep ensemble" if along == "strength" else ""
    kept = {name: pairs for name, pairs in lines.items() if name == level or len({place for place, _ in pairs}) > 1}
    reads: dict[str, Callable[[Record], float]] = {
        "mean PDS on C-5 (sum)": lambda record: float(record["pds"]["C-5"][0]),
        "worst member's accuracy": lambda record: float(min(record["members"])),
        **{f"AUROC of PDS, {part}": _value(part) for part in pooled_parts(found.records.values())},
    }
    if not kept.keys() - {level}:
        return None
    panels = {
        title: {
            name: {x: (own.mean, _two_errors(own)) for x, own in over_seeds(pairs, read).items()}
            for name, pairs in kept.items()
        }
        for title, read in reads.items()
    }
    return sweeps(panels, along, level=level)


def _value(part: str) -> Callable[[Record], float]:
    return lambda record: float(record["auroc"][part][PDS][0])


def _two_errors(own: Summary) -> float:
    return 2 * own.error if len(own.values) > 1 else 0.0


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

    for setting, records in found.plain(family).items():
        if setting.method != "ldr":
            add(label(setting), records, list(SCORES.values()))
        elif setting.strength in (0.1, SHOWN, 5.0):
            add(label(setting), records, [PDS])
        if setting.method == "deep":
            add("deep ensemble, energy", records, ["mean_energy"])
    for record in found.records.values():
        if "detectors" in record and record["family"] in (family, family.replace("heads", "backbone")):
            for name, value in record["detectors"].get("C-5", {}).items():
                words = name.replace("_", " ").replace("mahalanobis", "Mahalanobis")
                bars.append((words, Estimate.of([value], share=True)))
    return sorted(bars, key=lambda bar: bar[1].value)


def baseline_figure(bars: Sequence[tuple[str, Estimate]]) -> "matplotlib.figure.Figure":
    """Draw figure 4: every method we have, by AUROC, with its 95 % interval; loss-guided ones stand out."""
    figure, (ax,) = plots.panels(width=6.5, height=0.25 * len(bars) + 0.8)
    for place, (name, bar) in enumerate(bars):
        colour = plots.COLOURS[1] if name.startswith("LDR") else plots.COLOURS[0]
        ax.plot(bar.ends or (bar.value, bar.value), (place, place), color=colour, linewidth=1.5, alpha=0.5)
        ax.plot(bar.value, place, "o", color=colour, markersize=6)
        low, high = bar.ends or (bar.value, bar.value)
        # On the far side of the line of chance.
        place_of, side = ((low, -5), "right") if bar.value < 0.5 else ((high, 5), "left")
        style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8, "ha": side}
        ax.annotate(f"{bar.value:.3f}", (place_of[0], place), (place_of[1], 0), **style)
    ax.set_yticks(range(len(bars)), [name for name, _ in bars])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    values = [bar.value for _, bar in bars]
    if min(values) < 0.55:
        # What is left of chance orders images the wrong way round.
        ax.axvline(0.5, color=plots.NOTE_COLOUR, linestyle="--", linewidth=1)
        ax.annotate(
            "chance", (0.5, len(bars) - 0.4), (4, 0), textcoords="offset points", fontsize=8, color=plots.NOTE_COLOUR
        )
    ax.set(xlim=(min(values) - 0.07, max(values) + 0.04), xlabel="AUROC at severity 5")
    return figure


def trade_points(found: Found, family: str) -> Points:
    """Return what each loss-guided ensemble's worst member and its PDS are worth, by guard."""
    points: dict[str, list[tuple[float, float, float]]] = {}
    for setting, records in found.where(family=family, method="ldr", num_members=5, **USUAL).items():
        worst, value = estimate(records, worst_member), estimate(records, auroc("C-5", PDS))
        if setting.guard != "inverse probability" and worst is not None and value is not None:
            name = {PUBLISHED: "published", GUARDED: "guarded"}.get(setting.guard, setting.guard)
            points.setdefault(name, []).append((worst.value, value.value, setting.strength))
    return points


def trade_figure(points: Points) -> "matplotlib.figure.Figure":
    """Draw what members lose against what detection gains, one point for each loss-guided ensemble, named by its strength."""
    figure, (ax,) = plots.panels(width=6.2, height=3.6)
    for index, (name, own) in enumerate(points.items()):
        colour = plots.COLOURS[index % len(plots.COLOURS)]
        order = sorted(own, key=lambda point: point[2])
        ax.plot([p[0] for p in order], [p[1] for p in order], "o-", color=colour, markersize=5, linewidth=0.8)
        style: dict[str, Any] = {"textcoords": "offset points", "color": colour}
        if name == "published":
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            named: dict[tuple[float, float], list[str]] = {}
            for across, up, strength in order:
                # Weak ones are at one place.
                named.setdefault((round(across, 2), round(up, 3)), []).append(f"{strength:g}")
            for place, words in named.items():
                ax.annotate(", ".join(words), place, (-4, 5), ha="right", fontsize=8, bbox=paper, **style)
        ax.annotate(name, own[-1][:2], (8, -11), fontsize=9, **style)
    ax.margins(0.1)
    ax.set(xlabel="worst member's accuracy", ylabel="AUROC of PDS, severity 5")
    return figure


def gallery_figure(record: Record, sets: ImageSets) -> "matplotlib.figure.Figure | None":
    """Draw figure 3: the test images that members differ most on, and least: the truth, the ensemble's answer, other members'."""
    found = record.get("gallery", {})
    count = len(found.get("most", ()))
    if not count:
        return None
    figure, axes = plots.panels(count, 2, width=1.8, height=2.2)
    names = CIFAR10 if sets.name == "cifar10" and sets.num_classes == len(CIFAR10) else range(sets.num_classes)
    for ax, (name, each) in zip(axes, ((n, e) for n in ("most", "least") for e in found[n]), strict=True):
        ax.imshow(sets.test.x[each["image"]].permute(1, 2, 0).numpy())
        ax.set_axis_off()
        truth, answer = int(sets.test.y[each["image"]]), each["ensemble"]
        others = sorted({str(names[one]) for one in each["answers"] if one != answer})
        ax.set_title(
            f"{name}, truth: {names[truth]}\nensemble: {names[answer]}\n{', '.join(others)}", fontsize="xx-small"
        )
    return figure
