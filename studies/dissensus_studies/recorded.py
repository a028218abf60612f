"""Arms of runs as the record has them in, tables and verdicts over seeds out: heads on a pretrained backbone, and kinds beside each other.

Intervals are 95 % ones over seeds, by Student's law; where there is one seed there is none, and the text says so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd

from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.statistics import Summary, ece_floor, typical_confidence

if TYPE_CHECKING:
    import matplotlib.figure

# What pages say around their tables.
TEMPLATES = Path(__file__).parents[1] / "pages"
PRETRAINED = "CIFAR-100, heads 1280-256-100 on a frozen EfficientNet-Lite0 (ImageNet), AdamW, 10 epochs"
COMMAND = "dissensus study diversification --setting pretrained --backbone MODULE:FUNCTION --data DIR"
SCORES = {"BMA": "bma", "PDS": "predictive_diversity", "MI": "mutual_information", "energy": "mean_energy"}
BMA, PDS = SCORES["BMA"], SCORES["PDS"]
# Sets to disagree on, as pages call them.
SETS = {"isun": "iSUN", "textures": "textures", "scenes": "scenes"}
# Mean numbers of different answers, on test images and on CIFAR-10.
KNOWN, OTHER = "unique.test", "unique.cifar10"
GROUPS = ("near", "far")
# Of networks that were trained to the end; and the best near and far AUROC of OpenOOD's CIFAR-10 board, of detectors after training.
ENDED_EPOCHS, OPEN_OOD = 200, (".911", ".947")
# What detection is judged on: corrupted images by severity, and averages over unknown sets.
PARTS = {"C-1": "severity 1", "C-5": "severity 5", "near": "near", "far": "far"}
_GUIDED, _INDEPENDENT = "ldr=0.5 none A=2 M=5", "deep M=5"


def template(name: str) -> str:
    """Return a file of `studies/pages`."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]], rule: str = "", wide: bool = False) -> str:
    """Return a table in Markdown; a rule with spaces is for cells that are all as wide as that, `wide` the usual one of these.

    Example:
        >>> print(markdown(["a", "b"], [["1", ""]]))
        | a | b |
        |---|---|
        | 1 | |
    """
    rule = rule or ("| " + " | ".join(["---"] * len(header)) + " |" if wide else "|" + "---|" * len(header))
    wide = " --- " in rule
    rows = ["|" + "".join(f" {cell} |" if cell or wide else " |" for cell in line) for line in (header, *lines)]
    return "\n".join([rows[0], rule, *rows[1:]])


def fold(summary: str, text: str) -> str:
    """Return a text in Markdown that a page shows when it is asked for."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>'


def noise_sentence(arms: Mapping[str, Mapping[str, float]], images: int) -> str:
    """Say how large a calibration error is by chance, and which arms are not told apart from the best one.

    Of each arm `"accuracy"`, `"ECE"` and, where it is known, the `"floor"` of a calibrated model of its confidences.
    """
    floors = {
        name: own.get("floor") or ece_floor(typical_confidence(own["accuracy"], images)) for name, own in arms.items()
    }
    best = min(arms, key=lambda name: arms[name]["ECE"])
    noise = [name for name, own in arms.items() if name != best and own["ECE"] - arms[best]["ECE"] < floors[name]]
    return (
        f"A perfectly calibrated model of these accuracies has an ECE of {min(floors.values()):.3f} to {max(floors.values()):.3f} on "
        f"{images} images, by chance alone. Within that noise of the least ({best}): {', '.join(noise) or 'none'}."
    )


def over(values: Iterable[float]) -> Summary:
    """Return a number over seeds."""
    return Summary(tuple(values))


def mean_text(found: Summary, digits: int = 3, signed: bool = False) -> str:
    """Return a mean over seeds and half its interval's width, without zeros before the point.

    Example:
        >>> mean_text(over([0.71, 0.72, 0.73])), mean_text(over([0.5]))
        ('.720 ± .025', '.500')
    """
    middle = bare(found.mean, digits, "+" if signed else "")
    return middle if len(found.values) == 1 else f"{middle} ± {bare(found.half, digits)}"


def bare(value: float, digits: int = 3, sign: str = "") -> str:
    """Return a number without a zero before the point."""
    number = f"{value:{sign}.{digits}f}"
    return number.replace("0.", ".", 1) if number.lstrip("+-").startswith("0.") else number


def runs(rows: Iterable[Record], study: str) -> list[Record]:
    """Return what the arms of a study's runs measured, with numbers as floats."""
    return [as_floats(row["numbers"]) for row in rows if row["table"] == f"{study}/runs"]


def made(rows: Sequence[Record]) -> str:
    """Say on what arms were run, how many and when."""
    machines, versions = ({row["machine"]: None for row in rows}, {row["versions"]["torch"]: None for row in rows})
    dates = sorted({row["date"] for row in rows})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"{len(rows)} arms; {', '.join(machines)}; torch {', '.join(versions)}; {when}."


def as_floats(value: Any) -> Any:
    """Return what the record has with its numbers as floats."""
    if isinstance(value, Mapping):
        return {key: as_floats(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_floats(each) for each in value]
    return value if isinstance(value, str | bool | None) else float(value)


def value_of(value: Any) -> float:
    """Return a number of an arm's record, which has it with the ends of its interval, or alone where these are not known.

    Example:
        >>> value_of([0.9, 0.88, 0.92]), value_of(0.9)
        (0.9, 0.9)
    """
    return float(value[0] if isinstance(value, list) else value)


def framed(records: Sequence[Record]) -> pd.DataFrame:
    """Return records as rows, their numbers as columns such as `"auroc.near.bma"`; `"worst"` is the least accurate member's accuracy."""
    return pd.json_normalize(records).assign(worst=lambda frame: frame["members"].map(min))


def pretrained(rows: Sequence[Record]) -> pd.DataFrame:
    """Return the arms of heads on a pretrained backbone, by seed."""
    found = runs(rows, "diversification")
    own = [record for record in found if record["setting"].get("backbone", "").startswith("pretrained")]
    return framed(own).set_index("setting.seed")


def _arms(frame: pd.DataFrame, classes: int, row: str) -> pd.DataFrame:
    """Return the seeds of one arm."""
    return frame[(frame["setting.backbone"] == f"pretrained C={classes}") & (frame["row"] == row)]


def paired(first: pd.DataFrame, second: pd.DataFrame, name: str, other: str = "") -> Summary:
    """Return by how much the first arm's number is above the second's, over the seeds that both have."""
    return over((first[name] - second[other or name]).dropna())


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


def _five(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[(frame["setting.backbone"] == "pretrained C=100") & (frame["setting.num_members"] == 5)]


def _usual(own: pd.DataFrame) -> "pd.Series[bool]":
    published = own["setting.guard"].isin(["none", "share"])
    return published & (own["setting.layers"] == 2) & (own["setting.source"] == 0) & (own["setting.active"] < 3)


def _heads_table(own: pd.DataFrame, lined: pd.DataFrame) -> str:
    """Return a line for each arm of `lined`; its worst member is against that of independent heads in `own`."""
    parts = [part for part in PARTS if f"auroc.{part}.{BMA}" in own]
    header = ["heads", "seeds", "accuracy", "worst member, points", "ECE", "different answers"]
    lines = []
    for row, seeds in lined.groupby("row", sort=False):
        accuracy, ece = (mean_text(over(seeds[f"test.{m}"])) for m in ("accuracy", "ece"))
        lost = "" if row == _INDEPENDENT else _points(paired(seeds, _arms(own, 100, _INDEPENDENT), "worst"))
        head = [_name(seeds), str(len(seeds)), accuracy, lost, ece, mean_text(over(seeds[KNOWN]), 2)]
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
        texts = [mean_text(over(seeds[f"accuracy.{part}.{way}"])) for part in ("C-1", "C-5") for way in ways]
        lines.append([_name(seeds), str(len(seeds)), *texts])
    return markdown(["heads", "seeds", *(f"{PARTS[p]}: {n}" for p in ("C-1", "C-5") for n in ways.values())], lines)


def _points(lost: Summary) -> str:
    return mean_text(over(100 * value for value in lost.values), 1, signed=True)


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
        alone = mean_text(over(_arms(frame, classes, _INDEPENDENT)["worst"]))
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
    """Return two, five and ten heads at strength 0.5 beside each other."""
    lines = []
    names = {"independent": "deep{} M={}", "published": "ldr=0.5 none{} M={}", "guarded": "ldr=0.5 share{} M={}"}
    for size, (name, row) in product((2, 5, 10, 50), names.items()):
        plain = _arms(frame, 100, f"deep M={size}")
        drawn = " A=2" if size > 2 and name != "independent" else ""
        own = _arms(frame, 100, row.format(drawn, size))
        if len(own):
            lost = "" if name == "independent" else _points(paired(own, plain, "worst"))
            aurocs = [[over(own[f"auroc.{group}.{SCORES[s]}"]) for s in ("PDS", "energy")] for group in GROUPS]
            cells = [" / ".join(map(mean_text, each)) for each in aurocs]
            lines.append([str(size), name, str(len(own)), lost, mean_text(over(own[KNOWN]), 2), *cells])
    header = ["heads", "form", "seeds", "worst member, points", "different answers"]
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


# Arms by seed, the score by which they detect, and what they are called.
Detector = tuple[pd.DataFrame, str, str]


def _detects(first: Iterable[Detector], second: Iterable[Detector], prefix: str = "") -> tuple[dict[str, Summary], str]:
    """Return by how much the best of the first detects better than the best of the second in each group, and both numbers as text."""
    cases, texts, own, others = {}, [], _best(first), _best(second)
    for part, called in ((part, called) for part, called in PARTS.items() if part in own and part in others):
        (frame, score, name), (other, rival, of_other) = own[part], others[part]
        score, rival = f"auroc.{part}.{score}", f"auroc.{part}.{rival}"
        cases[called] = paired(frame, other, score, rival)
        texts.append(f"{called} {_mean(frame, score)}{name} against {_mean(other, rival)}{of_other}")
    return cases, prefix + ", ".join(texts)


def _best(candidates: Iterable[Detector]) -> dict[str, Detector]:
    """Return the candidate that detects best of each of `PARTS`; none where no candidate was run or has it."""
    found = [each for each in candidates if len(each[0])]
    places = {
        p: [each for each in found if (name := f"auroc.{p}.{each[1]}") in each[0] and each[0][name].notna().all()]
        for p in PARTS
    }
    return {
        part: max(own, key=lambda each: fmean(each[0][f"auroc.{part}.{each[1]}"]))
        for part, own in places.items()
        if own
    }


def guided_claims(frame: pd.DataFrame) -> dict[str, tuple[dict[str, Summary], str]]:
    """Return what the document says of loss-guided members, by its text: by how much each case holds, seed by seed, and the numbers.

    The arms are those of one family (one backbone, or networks from scratch), by seed; claims whose arms are not there are left out.
    """
    arms = dict(iter(frame.groupby(frame["row"].str.replace(" A=2", ""))))
    guided, guarded, plain, two, staged, diverse, shallow, shallow_plain, other_weights = (
        arms.get(row, frame[:0])
        for row in (
            *("ldr=0.5 none M=5", "ldr=0.5 share M=5", "deep M=5", "ldr=0.5 none M=2", "two-stage=0.5 M=5"),
            *("diverse M=5", "ldr=0.5 none layers=1 M=5", "deep layers=1 M=5", "ldr=0.5 inverse probability M=5"),
        )
    )
    lost, held = (paired(own, plain, "worst") for own in (guided, guarded))
    if not (lost.values and held.values):
        return {}
    strengths = {s: arms[row] for s in ("0.1", "0.5", "1", "5") if (row := f"ldr={s} none M=5") in arms}
    others = ("deep M=5", "diverse M=5", "a2d=0.1 M=5", "divdis=1 M=5", "two-stage=0.5 M=5", "joint=0.4 M=5")
    rivals = [arms[row] for row in others if row in arms]
    sets = [name for name in plain if name.startswith("unique.") and plain[name].notna().all()]
    other = OTHER if OTHER in sets else sets[-1]
    images = "CIFAR-10" if other == OTHER else other.removeprefix("unique.")
    scores = dict.fromkeys(name.split(".")[-1] for name in guided if name.startswith("auroc."))
    own_pds = [(guided, PDS, "")]

    found: dict[str, tuple[dict[str, Summary], str]] = {
        "Loss-guided members give more different answers on every set.": (
            {name.removeprefix("unique."): paired(guided, plain, name) for name in sets},
            f"{_mean(guided, KNOWN)} against {_mean(plain, KNOWN)} on known, {_mean(guided, other)} against "
            f"{_mean(plain, other)} on {images} images; guarded {_mean(guarded, KNOWN)} and {_mean(guarded, other)}",
        ),
        "Diversity rises with the strength.": (
            {f"{b} against {a}": paired(strengths[b], strengths[a], KNOWN) for a, b in pairwise(strengths)},
            f"different answers {', '.join(_mean(own, KNOWN) for own in strengths.values())} at {', '.join(strengths)}",
        ),
        "Some strength detects better with PDS than none.": _detects(
            ((own, PDS, f" at {s}") for s, own in strengths.items()), [(plain, PDS, "")]
        ),
        "PDS is poor without diversity.": _detects(
            [(plain, BMA, "")], [(plain, PDS, "")], "independent heads, BMA against PDS: "
        ),
        "PDS of loss-guided ensembles detects better than BMA.": _detects(own_pds, [(guided, BMA, "")]),
        "PDS is the best of all scores for them.": _detects(
            own_pds, ((guided, score, f" ({score})") for score in scores if score != PDS)
        ),
        "Loss-guided training with PDS detects better than any other method with BMA or PDS.": _detects(
            own_pds, ((own, score, f" ({_name(own)})") for own in rivals for score in (BMA, PDS))
        ),
        "Members differ without harm to what they learn.": (
            {"the worst member": over(value + 0.02 for value in lost.values)},
            f"the worst member {_points(lost)} points; guarded {_points(held)}",
        ),
        "More members detect better (PDS).": _detects(own_pds, [(two, PDS, "")], "5 against 2: "),
        "Loss-guided weights detect better than two stages (PDS).": _detects(own_pds, [(staged, PDS, "")]),
        "By BMA, diverse hyperparameters detect best of all ensembles.": _detects(
            [(diverse, BMA, "")], ((own, BMA, f" ({_name(own)})") for own in (*rivals, guided) if own is not diverse)
        ),
        "Heads of two layers detect better than heads of one (PDS).": _detects(own_pds, [(shallow, PDS, "")]),
        "Also with one layer, loss-guided heads beat independent ones (PDS).": _detects(
            [(shallow, PDS, "")], [(shallow_plain, PDS, "")]
        ),
        "One layer is convex, so members end in one place.": _differ(
            guided, shallow, "{} with two layers, {} with one"
        ),
        "Weights by the loss diversify more than weights by one over the probability.": _differ(
            guided, other_weights, "{} by the loss, {} by the probability"
        ),
        "Averaged logits do better under corruption than the deep ensemble's.": _right(guided, plain, "mean_logits"),
        "Averaged weights (soup) do better under corruption.": _right(guided, plain, "soup"),
        "Where the images to disagree on come from matters little (0.01).": same_elsewhere(arms),
    }
    return {claim: each for claim, each in found.items() if each[0] and all(case.values for case in each[0].values())}


def _differ(first: pd.DataFrame, second: pd.DataFrame, text: str) -> tuple[dict[str, Summary], str]:
    """Return by how many more answers members of the first differ, on known, corrupted and other images."""
    names = {KNOWN: "known", "unique.C-5": "severity 5", OTHER: "CIFAR-10"}
    there = [name for name in names if name in first and not (first[name].isna().any() or second[name].isna().any())]
    if not (len(first) and len(second)):
        return {}, ""
    texts = [f"{names[name]} {text.format(_mean(first, name), _mean(second, name))}" for name in there]
    return {names[name]: paired(first, second, name) for name in there}, f"different answers: {'; '.join(texts)}"


def _right(first: pd.DataFrame, second: pd.DataFrame, way: str) -> tuple[dict[str, Summary], str]:
    """Return by how much the first's one answer, made of all members' in this way, is right more often under corruption."""
    names = {part: f"accuracy.{part}.{way}" for part in ("C-1", "C-5") if f"accuracy.{part}.{way}" in first}
    texts = []
    for part, name in names.items():
        logits = f" (averaged logits {_mean(first, f'accuracy.{part}.mean_logits')})" if way == "soup" else ""
        texts.append(f"{PARTS[part]} {_mean(first, name)} against {_mean(second, name)}{logits}")
    return {PARTS[part]: paired(first, second, name) for part, name in names.items()}, ", ".join(texts)


def same_elsewhere(arms: Mapping[str, pd.DataFrame]) -> tuple[dict[str, Summary], str]:
    """Return how far below 0.01 the AUROC of PDS stays from that of members that disagree on other images, where it differs most."""
    cases, texts = {}, []
    for method, row in (("A2D", "a2d=0.1"), ("DivDis", "divdis=1")):
        first, second = (arms.get(f"{row}{source} M=5") for source in ("", " source=2"))
        if first is None or second is None or "elsewhere" not in second:
            continue
        used = second["elsewhere"].iloc[0]
        sets = [name for name in first if name.startswith("auroc.") and name.endswith(f".{PDS}")]
        # Averages hold sets again, one of them that which was disagreed on.
        sets = [name for name in sets if name.split(".")[1] not in (used, *GROUPS) and first[name].notna().all()]
        gaps = {name: over(abs(value) for value in paired(first, second, name).values) for name in sets}
        most = max(gaps, key=lambda name: gaps[name].mean)
        cases[method] = over(0.01 - value for value in gaps[most].values)
        texts.append(f"{method} {bare(gaps[most].mean)} ({most.split('.')[1]})")
    return cases, f"AUROC of PDS differs by up to {', '.join(texts)}"


def judged_claims(rows: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Return what replaces a claim's line, by table and text: heads on a pretrained backbone, at the document's own ten epochs."""
    return {"diversification/claims-heads": pretrained_claims(pretrained(rows))}


def pretrained_claims(frame: pd.DataFrame) -> dict[str, Record]:
    """Judge the document's claims on heads at its own ten epochs; return what replaces a claim's line, by its text."""
    own = frame[frame["setting.backbone"] == "pretrained C=100"]
    common = {"seeds": len(_arms(own, 100, _GUIDED)), "setting": PRETRAINED, "command": COMMAND}
    return {
        claim: {"measured": [text], **dict(zip(("verdict", "note"), judged(cases), strict=True)), **common}
        for claim, (cases, text) in guided_claims(own).items()
    }


TEST_IMAGES = 10_000
# Columns of the table of kinds: means over seeds with half their interval's width; then costs, which have none.
_MEASURED = {
    "accuracy": "test.accuracy",
    "worst member": "worst",
    "NLL": "test.nll",
    "ECE": "test.ece",
    "smooth ECE": "test.smooth_ece",
    "corrupted": "corrupted.all.accuracy",
}
_COSTS = {"1000 images a second": ("images_a_second", 1e3, 0), "GB": ("bytes", 1e9, 1)}


def budgets(rows: Sequence[Record]) -> dict[int, list[Record]]:
    """Return the lines of kinds beside each other by the seconds that each was trained for, the longest first."""
    found: dict[int, list[Record]] = {}
    for row in rows:
        setting = row["setting"]
        full = not setting["quick"] and (setting["epochs"], setting["limit"]) == (None, None)
        if row["table"] == "choosing/runs" and setting["data"] == "cifar10" and full:
            found.setdefault(int(setting["seconds"]), []).append(row)
    return dict(sorted(found.items(), reverse=True))


def kinds(rows: Iterable[Record]) -> dict[str, pd.DataFrame]:
    """Return the seeds of each kind and objective, the lowest NLL first."""
    frame = framed([as_floats(row["numbers"]) for row in rows])
    families = dict(iter(frame.groupby(frame["family"].str.removesuffix(", independent"), sort=False)))
    return dict(sorted(families.items(), key=lambda each: each[1]["test.nll"].mean()))


def kinds_table(rows: Sequence[Record]) -> str:
    """Return kinds and objectives that trained for the same seconds, and whose calibration is not told apart; shorter budgets folded."""
    (_, longest), *shorter = ((seconds, kinds(own)) for seconds, own in budgets(rows).items())
    # Within a list of names a comma stands between two.
    arms = {
        name.replace(",", ""): {"accuracy": seeds["test.accuracy"].mean(), "ECE": seeds["test.ece"].mean()}
        for name, seeds in longest.items()
    }
    folded = (fold(f"The same in {seconds} seconds", _one_budget(families)) for seconds, families in shorter)
    return "\n\n".join([_one_budget(longest), noise_sentence(arms, TEST_IMAGES), *folded])


def _one_budget(families: Mapping[str, pd.DataFrame]) -> str:
    lines = []
    for name, seeds in families.items():
        numbers = [_over_seeds(seeds, column) for column in _MEASURED.values()]
        best = [_over_seeds(seeds, seeds.filter(like=f"auroc.{group}.").mean().idxmax()) for group in GROUPS]
        costs = [f"{seeds[n].mean() / unit:.{digits}f}" if n in seeds else "" for n, unit, digits in _COSTS.values()]
        head = [name, str(len(seeds)), f"{seeds['training.epochs'].mean():.0f}"]
        lines.append([*head, *numbers, " / ".join(best), *costs])
    return markdown(["kind, objective", "seeds", "epochs", *_MEASURED, "near / far, best score", *_COSTS], lines)


def _over_seeds(seeds: pd.DataFrame, column: str) -> str:
    """Return a column's mean over seeds; nothing where the record has none."""
    found = seeds[column].dropna() if column in seeds else ()
    return mean_text(over(found)) if len(found) else ""


def kinds_points(rows: Sequence[Record]) -> dict[str, tuple[float, float]]:
    """Return microseconds an image and NLL of what was trained for the longest budget."""
    frame = framed([as_floats(row["numbers"]) for row in next(iter(budgets(rows).values()))])
    frame["cost"] = 1e6 / frame["images_a_second"]
    points = frame.groupby("family", sort=False)[["cost", "test.nll"]].mean()
    return {str(family): (cost, nll) for family, cost, nll in points.itertuples()}


def kinds_texts(rows: Sequence[Record], combinations: Sequence[str]) -> dict[str, str]:
    """Return what the guide says around the table of kinds, by name, as far as it follows from the record.

    `combinations` are all families of the study.
    """
    found = budgets(rows)
    longest, *shorter = found
    families = kinds(found[longest])
    machines = " and ".join(sorted({row["machine"].removeprefix("NVIDIA ") for row in found[longest]}))
    counts = sorted({len(seeds) for seeds in families.values()})
    several = (
        f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds; ± is half a 95 % interval over them."
    )
    repeats = "One seed: an anecdote." if counts == [1] else several
    folded = f" ({', '.join(map(str, shorter))} in what is folded)" if shorter else ""
    absent = [each for each in combinations if each.removesuffix(", independent") not in families]
    names = list(families)
    return {
        "setting": f"CIFAR-10, ResNet-18, four members, one {machines}, bf16: **every arm trained for the same {longest} "
        f"seconds**{folded}, in as many epochs as fit. {repeats}",
        "figure": f"NLL on test images against the microseconds that a prediction of all members takes, after {longest} seconds of "
        f"training; the lowest NLL have {'; '.join(names[:3])}, the highest {'; '.join(names[-3:])}",
        "absent": f"In the study, but not in the table: {'; '.join(absent).replace(', independent', '') or 'nothing'}.",
        "command": f"dissensus study choosing --seconds {longest} --repeats {counts[-1]}",
        "compared": "; ".join(filter(None, (_compared(seconds, kinds(own)) for seconds, own in found.items()))),
    }


def _compared(seconds: int, families: Mapping[str, pd.DataFrame]) -> str:
    """Say what one network, and four that share the time, are worth after so many seconds; nothing before both were run."""
    if not families.keys() >= {"single", "deep"}:
        return ""
    both = [[_over_seeds(families[n], f"test.{m}") for m in ("accuracy", "nll", "ece")] for n in ("single", "deep")]
    (accuracy, nll, ece), others = both
    return f"in {seconds} seconds accuracy {accuracy}, NLL {nll}, ECE {ece}, and {', '.join(others)}"


def ended(rows: Iterable[Record]) -> pd.DataFrame:
    """Return the networks of `anchoring` that were trained on CIFAR-10 for the 200 epochs of its document, and each row's together."""
    own = (row for row in rows if row["table"] == "anchoring/runs" and row["setting"]["data"] == "cifar10")
    records = [as_floats(row["numbers"]) for row in own if not row["setting"]["quick"]]
    records = [
        r for r in records if r["training"]["epochs"] >= ENDED_EPOCHS and r["setting"]["architecture"] == "resnet18"
    ]
    # Values alone, without the ends of their intervals.
    return pd.json_normalize(records).map(lambda each: each[0] if isinstance(each, list) else each)


def ended_table(frame: pd.DataFrame) -> str:
    """Return networks trained to the end, alone (means over seeds) and together as one ensemble."""
    lines = []
    for name, own in frame.groupby("row", sort=False) if len(frame) else ():
        row, together, _ = str(name).partition(" together")
        count = f"{own['together.nets'].iloc[0]:.0f} together" if together else "one network"
        names = ("test.accuracy", "test.nll", "test.ece", "test.smooth_ece", "corrupted.all.accuracy")
        numbers = [_over_seeds(own, each) for each in names]
        found = " / ".join(_over_seeds(own, f"auroc.{group}.mean_energy") for group in GROUPS)
        lines.append([f"{row}, {count}", str(len(own)), *numbers, found])
    header = ["ResNet-18", "runs", "accuracy", "NLL", "ECE", "smooth ECE", "corrupted", "near / far, energy"]
    return markdown(header, lines)


def ended_sentence(frame: pd.DataFrame) -> str:
    """Say what the table of networks trained to the end rests on, and what is published of detectors of one network."""
    near, far = OPEN_OOD
    sets = [name.split(".")[1] for name in frame if name.startswith("auroc.") and name.endswith(".mean_energy")]
    return (
        f"CIFAR-10, all 50 000 training images, {ENDED_EPOCHS} epochs of SGD; corrupted: 19 corruptions at five severities. The best "
        f"detector after training on OpenOOD's CIFAR-10 board has near {near} and far {far}, of one network and on its sets; ours are "
        f"{', '.join(name for name in sets if name not in GROUPS)}."
    )


def scores_table(rows: Sequence[Record], heads: Sequence[Record], long: pd.DataFrame) -> str:
    """Return how each score detects on average: in kinds of the longest budget, in heads that keep members, and in `long`."""
    tabled, kept = pd.concat(kinds(next(iter(budgets(rows).values()))).values()), _five(pretrained(heads))
    guarded = kept["row"].str.startswith("ldr") & kept["row"].str.contains("share")
    kept = kept[_usual(kept) & (kept["setting.method"].isin(["deep", "joint"]) | guarded)]
    groups = {"kinds": tabled[tabled["auroc.near.mutual_information"].notna()], "heads": kept}
    if "together.nets" in long:
        groups["to the end"] = long[long["together.nets"].notna()]
    found = []
    for score in (name.removeprefix("auroc.near.") for name in tabled if name.startswith("auroc.near.")):
        cells, values = [], []
        for group in groups.values():
            means = [fmean(group[f"auroc.{name}.{score}"]) for name in GROUPS]
            sets = [name for name in group if name.startswith("auroc.") and name.endswith(f".{score}")]
            lowest = group[[name for name in sets if name.split(".")[1] not in PARTS]].min().min()
            cells += [" / ".join(map(bare, means)), bare(lowest, 2)]
            values += means
        found.append((fmean(values), [f"`{score}`", *cells]))
    header = [each for name in groups for each in (f"{name}: near / far", "lowest set")]
    return markdown(["score", *header], [line for _, line in sorted(found, key=lambda each: -each[0])])
