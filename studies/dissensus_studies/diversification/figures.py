"""Numbers of `diversification`, of a run or of the record, in; its figures out."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import nan
from typing import TYPE_CHECKING, Any

from dissensus import plots
from dissensus.html import Picture
from dissensus_studies.diversification import report
from dissensus_studies.diversification.measures import PDS
from dissensus_studies.diversification.report import Family, Place, auroc, estimate, where
from dissensus_studies.diversification.settings import FORMS, GUARDED, PUBLISHED
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.figures import Drawing, draw, sweep
from dissensus_studies.harness.image_sets import ImageSets
from dissensus_studies.harness.outputs import Outputs
from dissensus_studies.harness.statistics import Estimate

if TYPE_CHECKING:
    import matplotlib.figure

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Name to worst member's accuracy, AUROC and strength.
Points = Mapping[str, Sequence[tuple[float, float, float]]]


def family_pictures(outputs: Outputs, family: Family, detectors: Mapping[str, Any], sets: ImageSets) -> list[Picture]:
    """Return the figures of a family of ensembles, as far as there are arms for them."""
    found: list[tuple[str, matplotlib.figure.Figure, str, str]] = []
    if bars := baseline_bars(family, detectors):
        caption = (
            "The better one of BMA and PDS, PDS alone for LDR, as the document's figure 4; detectors look at features."
        )
        found.append(("bars", baseline_figure(bars), "AUROC at severity 5 of every method", caption))
    found += [(each.name, draw(each.panels), each.title, each.caption) for each in sweeps_of(family)]
    points: dict[str, list[tuple[float, float, float]]] = {}
    for setting, records in family.usual(method="ldr").items():
        worst, value = estimate(records, report.WORST_MEMBER), estimate(records, auroc("C-5", PDS))
        if setting.guard != "inverse probability" and worst is not None and value is not None:
            points.setdefault(setting.guard, []).append((worst.value, value.value, setting.strength))
    if sum(map(len, points.values())) > 2:
        caption = "Numbers are strengths. To the left, members are of no use by themselves."
        alt = "AUROC of PDS against the worst member's accuracy, by guard"
        found.append(("trade", trade_figure(points), alt, caption))
    guided = family.guided(guard=GUARDED)
    if guided and guided[0].get("gallery", {}).get("most"):
        caption = "As the document's figure 3: most and least different by PDS; strength 0.5, guarded. Last line: other members."
        alt = "test images that guarded members differ most and least on"
        found.append(("gallery", gallery_figure(guided[0]["gallery"], sets), alt, caption))
    start = f"diversification_{family.name.replace(' ', '_')}"
    return [
        outputs.picture(f"{start}_{kind}", figure, f"{alt}, {family.name}", caption)
        for kind, figure, alt, caption in found
    ]


def sweeps_of(family: Family) -> list[Drawing]:
    """Return figure 5: diversity, members' accuracy and AUROC of PDS against the strength, and against the number of members."""
    places = {
        "mean PDS (sum)": ("pds", "C-5" if "C-5" in family.parts else "test"),
        "worst member's accuracy": report.WORST_MEMBER,
        **{f"AUROC of PDS, {part}": auroc(part, PDS) for part in family.pooled},
    }
    columns = {title: partial(_read, place) for title, place in places.items()}
    sizes = {"num_members": (2, 5, 10, 50)}
    guided, alone = family.usual(method="ldr", guard=FORMS, **sizes), family.usual(method="deep", **sizes)
    strengths = [
        (setting.guard, setting.strength, record)
        for setting, own in where(guided, num_members=5).items()
        for record in own
        if setting.strength
    ]
    members = [
        (setting.guard if setting.method == "ldr" else "deep", float(setting.num_members), record)
        for setting, own in (where(guided, strength=report.SHOWN) | alone).items()
        for record in own
    ]
    levels = {name: own for name, own in {"deep": family.one(), "strength 0": family.guided(0.0)}.items() if own}
    found = []
    for kind, points, along, levelled, title, caption in (
        (
            *("strength", strengths, "strength", levels, "diversity, members' accuracy and AUROC against the strength"),
            "As the document's figure 5. Means over runs.",
        ),
        (
            *("size", members, "members", None, "the same against the number of members"),
            "As the document's figure 5, strength 0.5; each member takes as many steps as it would alone.",
        ),
    ):
        if len({place for _, place, _ in points}) > 1:
            found.append(sweep(kind, title, points, columns, along, levels=levelled, caption=caption, xscale="log"))
    return found


def _read(place: Place, record: Record) -> float:
    value = report.value_at(record, place)
    return nan if value is None or value[0] is None else float(value[0])


def baseline_bars(family: Family, detectors: Mapping[str, Any]) -> list[tuple[str, Estimate]]:
    """Return figure 4's bars, lowest first: each method's better one of BMA and PDS, loss-guided ones' PDS, detectors, energy."""
    bars = {
        name.replace("_", " ").replace("mahalanobis", "Mahalanobis"): Estimate.of([value], share=True)
        for name, value in detectors.items()
    }
    usual = family.usual(num_members=(1, 5), guard=FORMS, strength=(0, 0.1, report.SHOWN, 1, 5))
    judged = {s.row: (own, [PDS] if s.method == "ldr" else list(report.SCORES.values())) for s, own in usual.items()}
    for name, (records, scores) in {**judged, "deep, energy": (family.one(), ["mean_energy"])}.items():
        values = [value for score in scores if (value := estimate(records, auroc("C-5", score))) is not None]
        if values:
            bars[name] = max(values, key=lambda value: value.value)
    return sorted(bars.items(), key=lambda bar: bar[1].value)


def baseline_figure(bars: Sequence[tuple[str, Estimate]]) -> "matplotlib.figure.Figure":
    """Draw figure 4: every method we have, by AUROC, with its 95 % interval; loss-guided ones stand out."""
    figure, (ax,) = plots.panels(width=6.5, height=0.25 * len(bars) + 0.8)
    for place, (name, bar) in enumerate(bars):
        colour = plots.COLOURS[1] if name.lower().startswith("ldr") else plots.COLOURS[0]
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


def trade_figure(points: Points) -> "matplotlib.figure.Figure":
    """Draw what members lose against what detection gains, one point for each loss-guided ensemble, named by its strength."""
    figure, (ax,) = plots.panels(width=6.2, height=3.6)
    for index, (name, own) in enumerate(points.items()):
        colour = plots.COLOURS[index % len(plots.COLOURS)]
        order = sorted(own, key=lambda point: point[2])
        ax.plot([p[0] for p in order], [p[1] for p in order], "o-", color=colour, markersize=5, linewidth=0.8)
        style: dict[str, Any] = {"textcoords": "offset points", "color": colour}
        if name in ("published", PUBLISHED):
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


def gallery_figure(gallery: Mapping[str, Sequence[Record]], sets: ImageSets) -> "matplotlib.figure.Figure":
    """Draw figure 3: the test images that members differ most on, and least: the truth, the ensemble's answer, other members'."""
    figure, axes = plots.panels(len(gallery["most"]), 2, width=1.8, height=2.2)
    names = CIFAR10 if sets.name == "cifar10" and sets.num_classes == len(CIFAR10) else range(sets.num_classes)
    for ax, (name, each) in zip(axes, ((n, e) for n in ("most", "least") for e in gallery[n]), strict=True):
        ax.imshow(sets.test.x[each["image"]].permute(1, 2, 0).numpy())
        ax.set_axis_off()
        truth, answer = int(sets.test.y[each["image"]]), each["ensemble"]
        others = ", ".join(sorted({str(names[one]) for one in each["answers"] if one != answer}))
        title = f"{name}, truth: {names[truth]}\nensemble: {names[answer]}\n{others}"
        ax.set_title(title, fontsize="xx-small")
    return figure
