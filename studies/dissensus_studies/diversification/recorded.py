"""Rows of the record in; what the page of diversification shows of heads on a pretrained backbone, and verdicts on claims, out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise, product
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd

from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.claims import over_cases, verdict_over
from dissensus_studies.harness.statistics import Summary
from dissensus_studies.recorded import (
    GROUPS,
    as_floats,
    bare,
    framed,
    made,
    markdown,
    mean_text,
    paired,
    runs,
    whole_runs,
)

if TYPE_CHECKING:
    import matplotlib.figure

PRETRAINED = "CIFAR-100, heads 1280-256-100 on a frozen EfficientNet-Lite0 (ImageNet), AdamW, 10 epochs"
COMMAND = "dissensus study diversification --setting pretrained --backbone MODULE:FUNCTION --data DIR"
SCORES = {"BMA": "bma", "PDS": "predictive_diversity", "MI": "mutual_information", "energy": "mean_energy"}
BMA, PDS = SCORES["BMA"], SCORES["PDS"]
# Sets to disagree on, as pages call them.
SETS = {"isun": "iSUN", "textures": "textures", "scenes": "scenes"}
# Mean numbers of different answers, on test images and on CIFAR-10.
KNOWN, OTHER = "unique.test", "unique.cifar10"
# What detection is judged on: corrupted images by severity, and averages over unknown sets.
PARTS = {"C-1": "severity 1", "C-5": "severity 5", "near": "near", "far": "far"}
_GUIDED, _INDEPENDENT = "ldr=0.5 none A=2 M=5", "deep M=5"
# Loss-guided members as published, and the methods that they are compared with.
_LOSS_GUIDED, _RIVALS = "ldr=0.5 none", ("deep", "diverse", "a2d=0.1", "divdis=1", "two-stage=0.5", "joint=0.4")
# The document says "not much" of an AUROC; the limit is ours.
LITTLE = 0.01


def pretrained(rows: Sequence[Record]) -> pd.DataFrame:
    """Return the arms of heads on a pretrained backbone, by seed."""
    found = runs(rows, "diversification")
    own = [record for record in found if record["setting"].get("backbone", "").startswith("pretrained")]
    return framed(own).set_index("setting.seed")


def _arms(frame: pd.DataFrame, classes: int, row: str) -> pd.DataFrame:
    """Return the seeds of one arm."""
    return frame[(frame["setting.backbone"] == f"pretrained C={classes}") & (frame["row"] == row)]


def _name(own: pd.DataFrame) -> str:
    first = own.iloc[0]
    active, form = first["setting.active"], {"none": "published", "share": "guarded"}
    names = {
        "deep": "independent",
        "diverse": "diverse hyperparameters",
        "a2d": "A2D {:g}, on {}",
        "divdis": "DivDis {:g}, on {}",
        "two-stage": "two stages {:g}",
        "joint": "joint β = {:g}",
        "ldr": "loss-guided {:g}, " + form.get(first["setting.guard"], first["setting.guard"]),
    }
    name = names[first["setting.method"]].format(first["setting.strength"], SETS.get(first.get("elsewhere"), "iSUN"))
    if first["setting.method"] == "ldr" and not first["setting.strength"]:
        name = f"{active:.0f} of {first['setting.num_members']:.0f} drawn, strength 0"
    elif active > 2:
        name += f", {active:.0f} drawn"
    layers = {1: ", one layer", 3: ", three layers"}
    return name + layers.get(first["setting.layers"], "")


def methods_table(frame: pd.DataFrame) -> str:
    """Return all methods with five heads of two layers for a hundred classes, one line each."""
    own = _five(frame)
    return _heads_table(own, own[_usual(own)])


def variants_table(frame: pd.DataFrame) -> str:
    """Return what the methods become with other layers, weights, images to disagree on and numbers of members drawn."""
    own = _five(frame)
    return _heads_table(own, own[~_usual(own)])


def as_the_document(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the arms without those that were trained longer than the document's, where there are some of its length: see `fixed`."""
    families = frame.get("family", pd.Series("", frame.index)).str.cat(frame["row"], sep=" ")
    fixed = families.str.contains(" fixed")
    found = frame.assign(row=frame["row"].str.replace(" fixed", ""))
    return found[fixed | ~families.isin(families[fixed].str.replace(" fixed", ""))]


def _five(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[(frame["setting.backbone"] == "pretrained C=100") & (frame["setting.num_members"] == 5)]


def kept_heads(rows: Sequence[Record]) -> pd.DataFrame:
    """Return five heads for a hundred classes by methods that keep their members: independent, joint and guarded."""
    own = _five(as_the_document(pretrained(rows)))
    guarded = own["row"].str.startswith("ldr") & own["row"].str.contains("share")
    return own[_usual(own) & (own["setting.method"].isin(["deep", "joint"]) | guarded)]


def _usual(own: pd.DataFrame) -> "pd.Series[bool]":
    published = own["setting.guard"].isin(["none", "share"])
    return published & (own["setting.layers"] == 2) & (own["setting.source"] == 0) & (own["setting.active"] < 3)


def _heads_table(own: pd.DataFrame, lined: pd.DataFrame) -> str:
    """Return a line for each arm of `lined`; its worst member is against that of independent heads in `own`."""
    parts = [part for part in PARTS if f"auroc.{part}.{BMA}" in own]
    header = ["heads", "epochs", "seeds", "accuracy", "worst member, points", "ECE", "different answers"]
    lines = []
    for row, seeds in lined.groupby("row", sort=False):
        accuracy, ece = (mean_text(Summary.of(seeds[f"test.{m}"])) for m in ("accuracy", "ece"))
        lost = "" if row == _INDEPENDENT else _points(paired(seeds, _arms(own, 100, _INDEPENDENT), "worst"))
        epochs = f"{seeds['training.epochs'].mean():.0f}"
        head = [_name(seeds), epochs, str(len(seeds)), accuracy, lost, ece, mean_text(Summary.of(seeds[KNOWN]), 2)]
        aurocs = [" / ".join(_mean(seeds, f"auroc.{part}.{score}") for score in SCORES.values()) for part in parts]
        lines.append([*head, *aurocs])
    return markdown([*header, *(f"{PARTS[part]}: {' / '.join(SCORES)}" for part in parts)], lines)


def _mean(own: pd.DataFrame, name: str) -> str:
    return bare(fmean(own[name]))


def corruption_table(frame: pd.DataFrame) -> str:
    """Return accuracy under corruption by each way to make one answer of five heads."""
    ways = {"mean_logits": "averaged logits", "soup": "averaged weights", "oracle": "best member, by hindsight"}
    own = _five(frame)
    lines = []
    for _, seeds in own[_usual(own)].groupby("row", sort=False):
        texts = [mean_text(Summary.of(seeds[f"accuracy.{part}.{way}"])) for part in ("C-1", "C-5") for way in ways]
        lines.append([_name(seeds), str(len(seeds)), *texts])
    return markdown(["heads", "seeds", *(f"{PARTS[p]}: {n}" for p in ("C-1", "C-5") for n in ways.values())], lines)


def _points(lost: Summary) -> str:
    return mean_text(Summary.of(100 * value for value in lost.values), 1, signed=True)


def ece_sentence(frame: pd.DataFrame) -> str:
    """Say how large the calibration error of a calibrated model of these confidences is."""
    floors = frame[frame[f"auroc.near.{BMA}"].notna()]["test.ece_floor"]
    return (
        f"A perfectly calibrated model with these confidences has an ECE of {bare(floors.min())} to "
        f"{bare(floors.max())}: differences below that are no findings."
    )


def _lost(frame: pd.DataFrame, classes: int, strength: str, form: str) -> Summary:
    """Return what the worst of five loss-guided members loses, seed by seed."""
    own = _arms(frame, classes, f"ldr={strength} {form} A=2 M=5")
    return paired(own, _arms(frame, classes, _INDEPENDENT), "worst")


def guard_table(frame: pd.DataFrame) -> str:
    """Return what loss-guided disagreement costs the worst of five members, by number of classes, with and without the guard."""
    lines = []
    for classes, strength in product((10, 100, 1000), ("0.5", "5")):
        alone = mean_text(Summary.of(_arms(frame, classes, _INDEPENDENT)["worst"]))
        free, held = (_lost(frame, classes, strength, form) for form in ("none", "share"))
        seeds = ", ".join(f"{100 * value:+.2f}" for value in held.values)
        verdict = "a cost" if held.sign < 0 else "within noise"
        lines.append([str(classes), strength, alone, _points(free), _points(held), seeds, verdict])
    header = ["classes", "strength", "independent, worst", "published, points", "guarded, points"]
    return markdown([*header, "guarded: seed by seed", ""], lines)


def drawing_sentence(frame: pd.DataFrame) -> str:
    """Say what drawing two of five heads costs the worst of them without any disagreement, and what guarded heads lose beside that."""
    drawn = _arms(frame, 100, "ldr=0 none A=2 M=5")
    alone = _points(paired(drawn, _arms(frame, 100, _INDEPENDENT), "worst"))
    texts = []
    for strength in ("0.5", "5"):
        lost = paired(_arms(frame, 100, f"ldr={strength} share A=2 M=5"), drawn, "worst")
        texts.append(f"{_points(lost)} at strength {strength} ({'a cost' if lost.sign < 0 else 'within noise'})")
    return (
        f"With a hundred classes, drawing two of five heads a step costs the worst of them {alone} points without any disagreement; "
        f"guarded heads beside those: {', '.join(texts)}."
    )


def guard_figure(frame: pd.DataFrame) -> "matplotlib.figure.Figure":
    """Draw what the worst of five members loses, seed by seed, by number of classes, with and without the guard."""
    from dissensus import plots

    figure, axes = plots.panels(columns=2, width=4.2, height=3.2)
    for ax, strength in zip(axes, ("0.5", "5"), strict=True):
        for form, name, index in (("none", "published", 0), ("share", "guarded", 1)):
            for place, classes in enumerate((10, 100, 1000)):
                heights = [100 * value for value in _lost(frame, classes, strength, form).values]
                shift = [place + 0.08 * (seed - 1) for seed in range(len(heights))]
                ax.plot(shift, heights, "os"[index], color=plots.COLOURS[index], markersize=5)
            ink: dict[str, Any] = {"color": plots.COLOURS[index], "fontsize": 9, "va": "center"}
            ax.annotate(name, (shift[-1], heights[-1]), (8, 7 * index), textcoords="offset points", **ink)
        ax.axhline(0, color=plots.NOTE_COLOUR, linewidth=0.8)
        ax.set_xticks(range(3), ["10", "100", "1000"])
        ax.set(xlabel="classes", ylim=(-64, 5), xlim=(-0.5, 3.0))
        ax.set_title(f"strength {strength}", fontsize=10, loc="left")
    axes[0].set(ylabel="worst member − independent, points")
    return figure


def sizes_table(frame: pd.DataFrame) -> str:
    """Return two to fifty heads by each method beside each other."""
    lines = []
    names = {
        "independent": "deep M={size}",
        "loss-guided 0.5, published": "ldr=0.5 none{drawn} M={size}",
        "loss-guided 0.5, guarded": "ldr=0.5 share{drawn} M={size}",
        "two stages": "two-stage=0.5{drawn} M={size}",
        "joint β = 0.4": "joint=0.4 M={size}",
        "A2D 0.1": "a2d=0.1 M={size}",
        "DivDis 1": "divdis=1 M={size}",
    }
    for size, (name, row) in product((2, 5, 10, 50), names.items()):
        plain = _arms(frame, 100, f"deep M={size}")
        own = _arms(frame, 100, row.format(drawn=" A=2" if size > 2 else "", size=size))
        if len(own):
            lost = "" if name == "independent" else _points(paired(own, plain, "worst"))
            aurocs = [[Summary.of(own[f"auroc.{group}.{SCORES[s]}"]) for s in ("PDS", "energy")] for group in GROUPS]
            cells = [" / ".join(map(mean_text, each)) for each in aurocs]
            lines.append([str(size), name, str(len(own)), lost, mean_text(Summary.of(own[KNOWN]), 2), *cells])
    header = ["heads", "method", "seeds", "worst member, points", "different answers"]
    return markdown([*header, *(f"{group}: PDS / energy" for group in GROUPS)], lines)


TABLES: Mapping[str, Callable[[pd.DataFrame], str]] = {
    "pretrained-methods": methods_table,
    "pretrained-variants": variants_table,
    "pretrained-corruption": corruption_table,
    "pretrained-ece": ece_sentence,
    "pretrained-guard": guard_table,
    "pretrained-drawn": drawing_sentence,
    "pretrained-sizes": sizes_table,
}


def judged(cases: Mapping[str, Summary]) -> tuple[str, str]:
    """Return verdict and note of a claim that something is larger in every case."""
    higher = [name for name, case in cases.items() if case.sign > 0]
    lower = [name for name, case in cases.items() if case.sign < 0]
    if len(higher) == len(cases):
        return "reproduced", "reproduced"
    if not lower:
        some = f"holds for {', '.join(higher)}, elsewhere within noise"
        return "within noise", some if higher else "within noise"
    if len(cases) == 1:
        return "not reproduced", "not reproduced"
    parts = [f"{word} for {', '.join(names)}" for word, names in (("holds", higher), ("the opposite", lower)) if names]
    return "not reproduced", "; ".join(parts)


@dataclass(frozen=True)
class Detector:
    """Arms, by seed, and a score."""

    arms: pd.DataFrame
    score: str
    name: str = ""  # What a text calls them.

    def column(self, part: str) -> str:
        """Name the column of its AUROC on one of `PARTS`."""
        return f"auroc.{part}.{self.score}"

    def measured(self, part: str) -> bool:
        """Say whether all seeds have it."""
        column = self.column(part)
        return len(self.arms) > 0 and column in self.arms and bool(self.arms[column].notna().all())

    def text(self, part: str) -> str:
        """Return the mean over seeds."""
        return _mean(self.arms, self.column(part)) + (f" ({self.name})" if self.name else "")


Finding = tuple[dict[str, Summary], str]


def _apart(case: Summary) -> str:
    """Return a difference with its interval over seeds, where there are several."""
    return f" ({mean_text(case, signed=True)})" if len(case.values) > 1 else ""


def _detects(first: Sequence[Detector], second: Sequence[Detector], prefix: str = "") -> Finding:
    """Return by how much the best of the first detects better than the best of the second on each part, and both numbers as text."""
    cases, texts = {}, []
    for part, called in PARTS.items():
        own, others = ([each for each in side if each.measured(part)] for side in (first, second))
        if own and others:
            best, rival = (max(side, key=lambda each: fmean(each.arms[each.column(part)])) for side in (own, others))
            cases[called] = paired(best.arms, rival.arms, best.column(part), rival.column(part))
            texts.append(f"{called} {best.text(part)} against {rival.text(part)}{_apart(cases[called])}")
    return cases, prefix + ", ".join(texts)


def guided_claims(frame: pd.DataFrame) -> dict[str, Finding]:
    """Return what the document says of loss-guided members, by its text: by how much each case holds, seed by seed, and the numbers.

    The arms are those of one family (one backbone, or networks from scratch), by seed; claims whose arms are not there are left out.
    """
    frame = as_the_document(frame)
    arms = dict(iter(frame.groupby(frame["row"].str.replace(" A=2", ""))))

    def arm(row: str) -> pd.DataFrame:
        return arms.get(f"{row} M=5", frame[:0])

    def by(score: str, row: str) -> list[Detector]:
        return [Detector(arm(row), score)]

    guided, guarded, plain = arm(_LOSS_GUIDED), arm("ldr=0.5 share"), arm("deep")
    lost, held = (paired(own, plain, "worst") for own in (guided, guarded))
    if not lost.values:
        return {}
    strengths = {s: arm(f"ldr={s} none") for s in ("0.1", "0.5", "1", "5") if len(arm(f"ldr={s} none"))}
    rivals = {_name(own): own for row in _RIVALS if len(own := arm(row))}
    sets = [name for name in plain if name.startswith("unique.") and plain[name].notna().all()]
    unknown = [name for name in sets if name not in (KNOWN, "unique.C-1", "unique.C-5")]
    other = OTHER if OTHER in sets else sets[-1]
    images = "CIFAR-10" if other == OTHER else other.removeprefix("unique.")
    scores = dict.fromkeys(name.split(".")[-1] for name in guided if name.startswith("auroc."))
    own_pds = by(PDS, _LOSS_GUIDED)

    found: dict[str, Finding] = {
        "Loss-guided members give more different answers on every set.": (
            {name.removeprefix("unique."): paired(guided, plain, name) for name in sets},
            f"{_mean(guided, KNOWN)} against {_mean(plain, KNOWN)}{_apart(paired(guided, plain, KNOWN))} on known, "
            f"{_mean(guided, other)} against {_mean(plain, other)}{_apart(paired(guided, plain, other))} on {images} images"
            + (f"; guarded {_mean(guarded, KNOWN)} and {_mean(guarded, other)}" if len(guarded) else ""),
        ),
        "Diversity rises with the strength.": (
            {f"{b} against {a}": paired(strengths[b], strengths[a], KNOWN) for a, b in pairwise(strengths)},
            f"different answers {', '.join(mean_text(Summary.of(own[KNOWN])) for own in strengths.values())} at {', '.join(strengths)}",
        ),
        "Some strength detects better with PDS than none.": _detects(
            [Detector(own, PDS, f"at {s}") for s, own in strengths.items()], by(PDS, "deep")
        ),
        "PDS is poor without diversity.": _detects(
            by(BMA, "deep"), by(PDS, "deep"), "independent heads, BMA against PDS: "
        ),
        "PDS of loss-guided ensembles detects better than BMA.": _detects(own_pds, by(BMA, _LOSS_GUIDED)),
        "PDS is the best of all scores for them.": _detects(
            own_pds, [Detector(guided, score, score) for score in scores if score != PDS]
        ),
        "Loss-guided training with PDS detects better than any other method with BMA or PDS.": _detects(
            own_pds, [Detector(own, score, name) for name, own in rivals.items() for score in (BMA, PDS)]
        ),
        "Members differ without harm to what they learn.": (
            {"the worst member": Summary.of(value + 0.02 for value in lost.values)},
            f"the worst member {_points(lost)} points" + (f"; guarded {_points(held)}" if held.values else ""),
        ),
        "More members detect better (PDS).": _detects(
            own_pds, [Detector(arms.get(f"{_LOSS_GUIDED} M=2", frame[:0]), PDS)], "5 against 2: "
        ),
        f"Beyond five, more members help only marginally ({LITTLE:g}), but at severity 1 (PDS, figure 5).": _little_more(
            arms.get(f"{_LOSS_GUIDED} M=10", frame[:0]), guided
        ),
        "Loss-guided weights detect better than two stages (PDS).": _detects(own_pds, by(PDS, "two-stage=0.5")),
        "By BMA, diverse hyperparameters detect best of all ensembles.": _detects(
            by(BMA, "diverse"),
            [
                Detector(own, BMA, name)
                for name, own in (rivals | {_name(guided): guided}).items()
                if "diverse" not in name
            ],
        ),
        "Heads of two layers detect better than heads of one (PDS).": _detects(
            own_pds, by(PDS, f"{_LOSS_GUIDED} layers=1")
        ),
        "Also with one layer, loss-guided heads beat independent ones (PDS).": _detects(
            by(PDS, f"{_LOSS_GUIDED} layers=1"), by(PDS, "deep layers=1")
        ),
        "On unknown images heads of two layers disagree more than heads of one, whose loss is convex.": _differ(
            guided, arm(f"{_LOSS_GUIDED} layers=1"), ("with two layers", "with one"), unknown
        ),
        "Weights by the loss diversify more than weights by one over the probability.": _differ(
            guided, arm("ldr=0.5 inverse probability"), ("by the loss", "by the probability"), sets
        ),
        "Averaged logits do better under corruption than those of any other method.": _right(
            guided, rivals, "mean_logits"
        ),
        "Averaged weights (soup) do better under corruption than those of any other method.": _right(
            guided, rivals, "soup"
        ),
        "Drawing pairs without disagreement (strength 0) does best under corruption, by averaged logits.": _right(
            arm("ldr=0 none"), rivals | {_name(guided): guided}, "mean_logits"
        ),
        "By the best member, chosen by hindsight, diverse hyperparameters beat dedicated methods under corruption.": _right(
            arm("diverse"), {name: own for name, own in _dedicated(rivals, guided).items() if len(own)}, "oracle"
        ),
        f"Where the images to disagree on come from matters little ({LITTLE:g}).": same_elsewhere(arms),
    }
    return {claim: each for claim, each in found.items() if each[0] and all(case.values for case in each[0].values())}


def _dedicated(rivals: Mapping[str, pd.DataFrame], guided: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the arms of methods made for diversity."""
    made_for_it = ("a2d", "divdis", "two-stage")
    return {name: own for name, own in rivals.items() if own.iloc[0]["setting.method"] in made_for_it} | {
        _name(guided): guided
    }


def _little_more(more: pd.DataFrame, five: pd.DataFrame) -> Finding:
    """Return how far below `LITTLE` it stays by how much more members detect better than five, but at severity 1."""
    cases, texts = {}, []
    for part, called in PARTS.items():
        column = f"auroc.{part}.{PDS}"
        gain = paired(more, five, column) if column in five else Summary(())
        if part != "C-1" and gain.values:
            cases[called] = Summary.of(LITTLE - value for value in gain.values)
            texts.append(f"{called} {mean_text(gain, signed=True)}")
    return cases, f"10 against 5: {', '.join(texts)}"


def _differ(first: pd.DataFrame, second: pd.DataFrame, names: tuple[str, str], sets: Sequence[str]) -> Finding:
    """Return by how many more answers members of the first differ, the mean over sets such as `"unique.cifar10"`."""
    if not (len(first) and len(second)):
        return {}, ""
    whole = [name for name in sets if name in first and not (first[name].isna().any() or second[name].isna().any())]
    one, other = (own.assign(answers=own[whole].mean(axis=1)) for own in (first, second))
    case = paired(one, other, "answers")
    texts = (f"{_mean(own, 'answers')} {name}" for own, name in zip((one, other), names, strict=True))
    return {"all": case}, f"different answers, mean over {len(whole)} sets: {', '.join(texts)}{_apart(case)}"


def _right(first: pd.DataFrame, others: Mapping[str, pd.DataFrame], way: str) -> Finding:
    """Return by how much the first's one answer, made of all members' in this way, is right more often than the best of others."""
    cases, texts = {}, []
    for part in ("C-1", "C-5"):
        name = f"accuracy.{part}.{way}"
        found = {called: own for called, own in others.items() if name in own and own[name].notna().all()}
        if len(first) and name in first and found:
            best = max(found, key=lambda called: fmean(found[called][name]))
            cases[PARTS[part]] = paired(first, found[best], name)
            logits = f", averaged logits {_mean(first, f'accuracy.{part}.mean_logits')}" if way == "soup" else ""
            against = f"{_mean(found[best], name)} ({best}){_apart(cases[PARTS[part]])}"
            texts.append(f"{PARTS[part]} {_mean(first, name)}{logits}, against {against}")
    return cases, "; ".join(texts)


def same_elsewhere(arms: Mapping[str, pd.DataFrame]) -> Finding:
    """Return how far below `LITTLE` the AUROC of PDS stays from that of members that disagree on other images, where that is least so."""
    cases, texts = {}, []
    for method, row in (("A2D", "a2d=0.1"), ("DivDis", "divdis=1")):
        first, second = (arms.get(f"{row}{source} M=5") for source in ("", " source=2"))
        if first is None or second is None or "elsewhere" not in second:
            continue
        used = second["elsewhere"].iloc[0]
        sets = [name for name in first if name.startswith("auroc.") and name.endswith(f".{PDS}")]
        # Averages hold sets again, one of them that which was disagreed on.
        sets = [name for name in sets if name.split(".")[1] not in (used, *GROUPS) and first[name].notna().all()]
        gaps = {name: Summary.of(abs(value) for value in paired(first, second, name).values) for name in sets}
        most = max(gaps, key=lambda name: gaps[name].mean - (gaps[name].half if len(first) > 1 else 0.0))
        cases[method] = Summary.of(LITTLE - value for value in gaps[most].values)
        texts.append(f"{mean_text(gaps[most])} with {method} ({most.split('.')[1]})")
    return cases, f"the AUROC of PDS differs most surely by {', '.join(texts)}"


BACKGROUNDS = "diversification/backgrounds-that-mislead"


def spurious(rows: Sequence[Record]) -> dict[str, Record]:
    """Return the arms on backgrounds that mislead, as their table calls them."""
    whole = (as_floats(row["numbers"]) for row in whole_runs(rows, "diversification", "cifar10"))
    own = [record for record in whole if record["family"] == "spurious"]
    return {f"{_name(pd.json_normalize(r))}, {r['training']['epochs']:.0f} epochs": r for r in own}


def shown(rows: Sequence[Record]) -> list[Record]:
    """Return the record as the page shows it: runs on backgrounds that mislead below what an earlier page had of shorter ones."""
    found = list(rows)
    for name, record in spurious(rows).items():
        worst = record["worst_group"]
        values = {
            "all images": [record["group_accuracy"]["ensemble"]],
            "worst group: ensemble": worst["ensemble"],
            "its members": sorted(min(each.values()) for each in record["groups"]["members"]),
            "best member by hindsight": worst["oracle"],
        }
        numbers = {title: [Decimal(f"{value:.3f}") for value in each] for title, each in values.items()}
        found.append({"study": "diversification", "table": BACKGROUNDS, "arm": [name], "numbers": numbers})
    return found


def judged_backgrounds(rows: Sequence[Record]) -> dict[str, Record]:
    """Say how the worst group fares that loss-guided members serve; of one seed, so never a verdict."""
    worst = {name: record["worst_group"]["ensemble"][0] for name, record in spurious(rows).items()}
    guided, others = ({n: v for n, v in worst.items() if n.startswith("loss-guided") is own} for own in (True, False))
    if not (guided and others):
        return {}
    (best, served), (rival, most) = (max(each.items(), key=lambda item: item[1]) for each in (guided, others))
    note = f"one seed, other data than the document's: {'reproduced' if served > most else 'not reproduced'}"
    measured = f"{bare(served)} ({best}) against {bare(most)} ({rival})"
    setting = "animals and vehicles of CIFAR-10 on scenes, four ResNet-18; one seed"
    return {
        "The loss-guided ensemble serves the worst group best.": {
            **{"measured": [measured], "note": note, "seeds": 1, "setting": setting},
            "command": 'dissensus study diversification --data DIR --arms "spurious"',
        }
    }


# So much longer is longer, and so much is as long; that a step with one member more is faster is noise up to as much as is longer.
LONGER, AS_LONG = 1.1, 1.25


def judged_times(rows: Sequence[Record]) -> dict[str, Record]:
    """Judge what drawing members costs, by the time of a step of heads of ImageNet's size; nothing before all arms are there.

    Of several seeds the fastest counts, as of epochs.
    """
    own = [row for row in rows if row["table"] == "diversification/runs" and row["numbers"].get("family") == "timed"]
    found: dict[tuple[int, int], list[float]] = {}
    for row in own:
        setting = row["numbers"]["setting"]
        found.setdefault((int(setting["active"]), int(setting["num_members"])), []).append(float(row["numbers"]["ms"]))
    ms = {drawn: min(times) for drawn, times in found.items()}
    drawn = [ms[count, 5] for count in (2, 3, 4, 5) if (count, 5) in ms]
    pairs = [ms[2, members] for members in (2, 5, 50) if (2, members) in ms]
    if len(drawn) < 4 or len(pairs) < 3:
        return {}
    holds = {
        "the more are drawn": all(LONGER * after > before for before, after in pairwise(drawn))
        and min(drawn[-1] / drawn[0], ms[10, 50] / ms[2, 50]) > LONGER,
        "pairs": max(pairs) <= AS_LONG * min(pairs),
    }
    of_many = ms[10, 50] / ms[2, 50]
    return {
        "An epoch takes longer the more members a step draws; with pairs its cost does not depend on M.": {
            "cases": list(holds),
            "measured": [
                f"(3, 4 and 5 of 5 take {', '.join(f'{each / drawn[0]:.2f}' for each in drawn[1:])} times as long as 2, 10 of 50 "
                f"{of_many:.1f} times)",
                f"(2 of 5 and of 50 take {', '.join(f'{each / pairs[0]:.2f}' for each in pairs[1:])} times as long as 2 of 2)",
            ],
            "verdict": verdict_over(holds.values()),
            "note": over_cases(holds),
            "seeds": min(map(len, found.values())),
            "setting": f"heads 768-768-1000, batch 256, AdamW; {made(own)}",
            "command": 'dissensus study diversification --data DIR --arms "timed"',
        }
    }


def judged_claims(rows: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Return what replaces a claim's line, by table and text; verdicts are of heads on a pretrained backbone."""
    return {
        "diversification/claims-heads": pretrained_claims(pretrained(rows)) | judged_times(rows),
        f"{BACKGROUNDS}-2": judged_backgrounds(rows),
    }


def pretrained_claims(frame: pd.DataFrame) -> dict[str, Record]:
    """Judge the document's claims on heads at its own ten epochs; return what replaces a claim's line, by its text."""
    own = frame[frame["setting.backbone"] == "pretrained C=100"]
    common = {"seeds": len(_arms(own, 100, _GUIDED)), "setting": PRETRAINED, "command": COMMAND, "data": "other"}
    return {
        claim: {"measured": [text], **dict(zip(("verdict", "note"), judged(cases), strict=True)), **common}
        for claim, (cases, text) in guided_claims(own).items()
    }
