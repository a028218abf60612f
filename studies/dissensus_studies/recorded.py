"""Arms of runs as the record has them in, tables and verdicts over seeds out: heads on a pretrained backbone, and kinds beside each other.

Intervals are 95 % ones over seeds, by Student's law; where there is one seed there is none, and the text says so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dissensus_studies.harness.statistics import Summary

if TYPE_CHECKING:
    import matplotlib.figure

Record = dict[str, Any]
Read = Callable[[Record], float]
BySeed = Mapping[int, Record]

# What pages say around their tables.
TEMPLATES = Path(__file__).parents[1] / "pages"
PRETRAINED = "CIFAR-100, heads 1280-256-100 on a frozen EfficientNet-Lite0 (ImageNet), AdamW, 10 epochs"
COMMAND = "dissensus study diversification --setting pretrained --backbone MODULE:FUNCTION --data DIR"
SCORES = {"BMA": "bma", "PDS": "predictive_diversity", "MI": "mutual_information", "energy": "mean_energy"}
BMA, PDS = SCORES["BMA"], SCORES["PDS"]
GROUPS = ("near", "far")
_GUIDED, _GUARDED, _INDEPENDENT = "ldr=0.5 none A=2 M=5", "ldr=0.5 share A=2 M=5", "deep M=5"


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]], rule: str = "") -> str:
    """Return a table in Markdown; a rule with spaces is for cells that are all as wide as that.

    Example:
        >>> print(markdown(["a", "b"], [["1", ""]]))
        | a | b |
        |---|---|
        | 1 | |
    """
    rule = rule or "|" + "---|" * len(header)
    wide = " --- " in rule
    rows = ["|" + "".join(f" {cell} |" if cell or wide else " |" for cell in line) for line in (header, *lines)]
    return "\n".join([rows[0], rule, *rows[1:]])


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


def as_floats(value: Any) -> Any:
    """Return what the record has with its numbers as floats."""
    if isinstance(value, Mapping):
        return {key: as_floats(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_floats(each) for each in value]
    return float(value) if not isinstance(value, str | bool | None.__class__) else value


def pretrained(rows: Sequence[Record]) -> list[Record]:
    """Return the arms of heads on a pretrained backbone."""
    found = runs(rows, "diversification")
    return [record for record in found if record["setting"].get("backbone", "").startswith("pretrained")]


def _by_seed(records: Iterable[Record], classes: int, row: str) -> dict[int, Record]:
    return {
        int(record["setting"]["seed"]): record
        for record in records
        if record["setting"]["backbone"] == f"pretrained C={classes}" and record["row"] == row
    }


def paired(first: BySeed, second: BySeed, read: Read, other: Read | None = None) -> Summary:
    """Return by how much the first arm's number is above the second's, over the seeds that both have."""
    return over(read(first[seed]) - (other or read)(second[seed]) for seed in first if seed in second)


def worst(record: Record) -> float:
    """Accuracy of the least accurate member."""
    return float(min(record["members"]))


def auroc(group: str, score: str) -> Read:
    """Return what reads the AUROC of a score on a group of sets."""
    return lambda record: float(record["auroc"][group][score])


def unique(name: str) -> Read:
    """Return what reads the mean number of different answers on a set."""
    return lambda record: float(record["unique"][name])


def _name(own: BySeed) -> str:
    setting = next(iter(own.values()))["setting"]
    names = {
        "deep": "independent",
        "a2d": "A2D {:g}, on iSUN",
        "divdis": "DivDis {:g}, on iSUN",
        "two-stage": "two stages {:g}",
        "joint": "joint β = {:g}",
        "ldr": "loss-guided {:g}, " + ("published" if setting["guard"] == "none" else "guarded"),
    }
    return names[setting["method"]].format(setting["strength"])


def methods_table(records: Sequence[Record], classes: int = 100, size: int = 5) -> str:
    """Return all methods with so many heads, one line each."""
    family = f"pretrained C={classes}"
    own = [r for r in records if (r["setting"]["backbone"], r["setting"]["num_members"]) == (family, size)]
    found = {row: _by_seed(own, classes, row) for row in dict.fromkeys(record["row"] for record in own)}
    header = ["heads", "seeds", "accuracy", "worst member, points", "NLL", "ECE", "different answers"]
    lines = []
    for row, seeds in found.items():
        numbers = {m: mean_text(over(each["test"][m] for each in seeds.values())) for m in ("accuracy", "nll", "ece")}
        lost = "" if row.startswith("deep") else _points(paired(seeds, found[f"deep M={size}"], worst))
        answers = mean_text(over(map(unique("test"), seeds.values())), 2)
        head = [_name(seeds), str(len(seeds)), numbers["accuracy"], lost, numbers["nll"], numbers["ece"], answers]
        aurocs = [" / ".join(_mean(seeds, auroc(group, score)) for score in SCORES.values()) for group in GROUPS]
        lines.append([*head, *aurocs])
    return markdown([*header, *(f"{group}: {' / '.join(SCORES)}" for group in GROUPS)], lines)


def _mean(own: BySeed, read: Read) -> str:
    return bare(fmean(map(read, own.values())))


def _points(lost: Summary) -> str:
    return mean_text(over(100 * value for value in lost.values), 1, signed=True)


def ece_sentence(records: Sequence[Record]) -> str:
    """Say how large the calibration error of a calibrated model of these confidences is."""
    floors = [record["test"]["ece_floor"] for record in records if record["auroc"]]
    return (
        f"A perfectly calibrated model with these confidences has an ECE of {bare(min(floors))} to "
        f"{bare(max(floors))}: differences below that are no findings."
    )


def _lost(records: Sequence[Record], classes: int, strength: str, form: str) -> Summary:
    """Return what the worst of five loss-guided members loses, seed by seed."""
    own = _by_seed(records, classes, f"ldr={strength} {form} A=2 M=5")
    return paired(own, _by_seed(records, classes, _INDEPENDENT), worst)


def guard_table(records: Sequence[Record]) -> str:
    """Return what loss-guided disagreement costs the worst of five members, by number of classes, with and without the guard."""
    lines = []
    for classes in (10, 100, 1000):
        alone = mean_text(over(map(worst, _by_seed(records, classes, _INDEPENDENT).values())))
        for strength in ("0.5", "5"):
            free, held = (_lost(records, classes, strength, form) for form in ("none", "share"))
            seeds = ", ".join(f"{100 * value:+.2f}" for value in held.values)
            verdict = "a cost" if held.sign < 0 else "within noise"
            lines.append([str(classes), strength, alone, _points(free), _points(held), seeds, verdict])
    header = ["classes", "strength", "independent, worst", "published, points", "guarded, points"]
    return markdown([*header, "guarded: seed by seed", ""], lines)


def guard_figure(records: Sequence[Record]) -> "matplotlib.figure.Figure":
    """Draw what the worst of five members loses, seed by seed, by number of classes, with and without the guard."""
    from dissensus import plots

    figure, axes = plots.panels(columns=2, width=4.2, height=3.2)
    for ax, strength in zip(axes, ("0.5", "5"), strict=True):
        for form, name, index in (("none", "published", 0), ("share", "guarded", 1)):
            for place, classes in enumerate((10, 100, 1000)):
                heights = [100 * value for value in _lost(records, classes, strength, form).values]
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


def sizes_table(records: Sequence[Record]) -> str:
    """Return two, five and ten heads at strength 0.5 beside each other."""
    lines = []
    for size in (2, 5, 10, 50):
        drawn = " A=2" if size > 2 else ""
        plain = _by_seed(records, 100, f"deep M={size}")
        forms = {"published": f"ldr=0.5 none{drawn} M={size}", "guarded": f"ldr=0.5 share{drawn} M={size}"}
        for name, own in {"independent": plain, **{f: _by_seed(records, 100, row) for f, row in forms.items()}}.items():
            if own:
                lost = "" if name == "independent" else _points(paired(own, plain, worst))
                seeds = list(own.values())
                aurocs = [
                    " / ".join(mean_text(over(map(auroc(group, SCORES[s]), seeds))) for s in ("PDS", "energy"))
                    for group in GROUPS
                ]
                answers = mean_text(over(map(unique("test"), seeds)), 2)
                lines.append([str(size), name, str(len(seeds)), lost, answers, *aurocs])
    header = ["heads", "form", "seeds", "worst member, points", "different answers"]
    return markdown([*header, *(f"{group}: PDS / energy" for group in GROUPS)], lines)


TABLES: Mapping[str, Callable[[Sequence[Record]], str]] = {
    "pretrained-methods": lambda rows: methods_table(pretrained(rows)),
    "pretrained-ece": lambda rows: ece_sentence(pretrained(rows)),
    "pretrained-guard": lambda rows: guard_table(pretrained(rows)),
    "pretrained-sizes": lambda rows: sizes_table(pretrained(rows)),
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


# Arms by seed and the score by which they detect.
Detector = tuple[BySeed, str]


def _detects(
    sides: Mapping[str, tuple[Detector, Detector]], notes: Mapping[str, str] | None = None
) -> tuple[dict[str, Summary], str]:
    """Return by how much the first detects better than the second in each group, and both numbers as text."""
    cases, texts = {}, []
    for group, ((first, one), (second, two)) in sides.items():
        cases[group] = paired(first, second, auroc(group, one), auroc(group, two))
        numbers = f"{_mean(first, auroc(group, one))} against {_mean(second, auroc(group, two))}"
        texts.append(f"{group} {numbers}" + (f" ({notes[group]})" if notes else ""))
    return cases, ", ".join(texts)


def _best(group: str, candidates: Mapping[Any, Detector]) -> Any:
    """Return the name of the candidate that detects best."""

    def value(name: Any) -> float:
        own, score = candidates[name]
        return fmean(map(auroc(group, score), own.values()))

    return max(candidates, key=value)


def pretrained_claims(records: Sequence[Record]) -> dict[str, Record]:
    """Judge the document's claims on heads at its own ten epochs; return what replaces a claim's line, by its text."""
    guided, guarded, plain = (_by_seed(records, 100, row) for row in (_GUIDED, _GUARDED, _INDEPENDENT))
    if not (guided and guarded and plain):
        return {}
    strengths = {s: _by_seed(records, 100, f"ldr={s} none A=2 M=5") for s in ("0.1", "0.5", "1", "5")}
    two, staged = (_by_seed(records, 100, row) for row in ("ldr=0.5 none M=2", "two-stage=0.5 A=2 M=5"))
    known, other = unique("test"), unique("cifar10")
    lost, held = (paired(own, plain, worst) for own in (guided, guarded))

    def same(first: Detector, second: Detector) -> tuple[dict[str, Summary], str]:
        return _detects(dict.fromkeys(GROUPS, (first, second)))

    best = {g: _best(g, {s: (own, PDS) for s, own in strengths.items()}) for g in GROUPS}
    at_best = {g: ((strengths[best[g]], PDS), (plain, PDS)) for g in GROUPS}
    _, poor = same((plain, BMA), (plain, PDS))
    scores = {s: (guided, s) for s in next(iter(guided.values()))["auroc"]["near"] if s != PDS}
    top = {g: _best(g, scores) for g in GROUPS}
    others = ("a2d=0.1 M=5", "divdis=1 M=5", "two-stage=0.5 A=2 M=5", "joint=0.4 M=5")
    rivals = {
        (row, score): (_by_seed(records, 100, row), score) for row in (_INDEPENDENT, *others) for score in (BMA, PDS)
    }
    first = {g: rivals[_best(g, rivals)] for g in GROUPS}
    found: dict[str, tuple[dict[str, Summary], str]] = {
        "Loss-guided members give more different answers on every set.": (
            {name: paired(guided, plain, unique(name)) for name in next(iter(plain.values()))["unique"]},
            f"{_mean(guided, known)} against {_mean(plain, known)} on known, {_mean(guided, other)} against "
            f"{_mean(plain, other)} on CIFAR-10 images; guarded {_mean(guarded, known)} and {_mean(guarded, other)}",
        ),
        "Diversity rises with the strength.": (
            {f"{b} against {a}": paired(strengths[b], strengths[a], known) for a, b in pairwise(strengths)},
            f"different answers {', '.join(_mean(own, known) for own in strengths.values())} at {', '.join(strengths)}",
        ),
        "Some strength detects better with PDS than none.": (
            _detects(at_best)[0],
            ", ".join(
                f"{g} {_mean(own, auroc(g, PDS))} at {best[g]} against {_mean(plain, auroc(g, PDS))}"
                for g, ((own, _), _) in at_best.items()
            ),
        ),
        "PDS is poor without diversity.": (
            same((plain, BMA), (plain, PDS))[0],
            f"independent heads, BMA against PDS: {poor}",
        ),
        "PDS of loss-guided ensembles detects better than BMA.": same((guided, PDS), (guided, BMA)),
        "PDS is the best of all scores for them.": _detects({g: ((guided, PDS), scores[top[g]]) for g in GROUPS}, top),
        "Loss-guided training with PDS detects better than any other method with BMA or PDS.": _detects(
            {g: ((guided, PDS), first[g]) for g in GROUPS}, {g: _name(own) for g, (own, _) in first.items()}
        ),
        "Members differ without harm to what they learn.": (
            {"the worst member": over(value + 0.02 for value in lost.values)},
            f"the worst member {_points(lost)} points; guarded {_points(held)}",
        ),
        "More members detect better (PDS).": (
            same((guided, PDS), (two, PDS))[0],
            f"5 against 2: {same((guided, PDS), (two, PDS))[1]}",
        ),
        "Loss-guided weights detect better than two stages (PDS).": same((guided, PDS), (staged, PDS)),
    }
    common = {"seeds": len(guided), "setting": PRETRAINED, "command": COMMAND}
    return {
        claim: {"measured": [text], **dict(zip(("verdict", "note"), judged(cases), strict=True)), **common}
        for claim, (cases, text) in found.items()
    }


def kinds_table(rows: Sequence[Record]) -> str:
    """Return kinds and objectives that trained for the same seconds, the lowest NLL first."""
    lines = []
    for record in sorted(runs(rows, "choosing"), key=lambda each: each["test"]["nll"]):
        test, best = record["test"], [max(record["auroc"][group].values()) for group in GROUPS]
        numbers = (test["accuracy"], worst(record), test["nll"], test["ece"], record["corrupted"]["all"]["accuracy"])
        epochs, speed = f"{record['training']['epochs']:.0f}", f"{record['images_a_second'] / 1000:.0f} 000"
        lines.append([record["family"], epochs, *map(bare, numbers), " / ".join(map(bare, best)), speed])
    header = ["kind, objective", "epochs", "accuracy", "worst member", "NLL", "ECE", "corrupted"]
    return markdown([*header, "near / far, best score", "images a second"], lines)


def scores_table(kinds: Sequence[Record], heads: Sequence[Record]) -> str:
    """Return how each score detects on average: in all ensembles of the table, and in heads on a pretrained backbone that keep members."""
    tabled = [record for record in runs(kinds, "choosing") if "mutual_information" in record["auroc"]["near"]]
    kept = [
        record
        for record in pretrained(heads)
        if record["auroc"]
        and (
            record["setting"]["method"] in ("deep", "joint")
            or (record["row"].startswith("ldr") and "share" in record["row"])
        )
    ]
    found = []
    for score in tabled[0]["auroc"]["near"]:
        cells, values = [], []
        for group in (tabled, kept):
            means = [fmean(map(auroc(name, score), group)) for name in GROUPS]
            lowest = min(record["auroc"][part][score] for record in group for part in record["auroc"])
            cells += [" / ".join(map(bare, means)), bare(lowest, 2)]
            values += means
        found.append((fmean(values), [f"`{score}`", *cells]))
    header = ["score", "kinds: near / far", "their lowest set", "pretrained heads: near / far", "their lowest set"]
    return markdown(header, [line for _, line in sorted(found, key=lambda each: -each[0])])
