"""Arms of runs as the record has them in, tables and verdicts over seeds out: heads on a pretrained backbone, and kinds beside each other.

Intervals are 95 % ones over seeds, by Student's law; where there is one seed there is none, and the text says so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import matplotlib.figure

Record = dict[str, Any]
Read = Callable[[Record], float]

# Ends of a 95 % interval of Student's law with n - 1 degrees of freedom, in standard errors.
STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
PRETRAINED = "CIFAR-100, heads 1280-256-100 on a frozen EfficientNet-Lite0 (ImageNet), AdamW, 10 epochs"
COMMAND = "dissensus study diversification --setting pretrained --backbone MODULE:FUNCTION --data DIR"
SCORES = {"BMA": "bma", "PDS": "predictive_diversity", "MI": "mutual_information", "energy": "mean_energy"}
GROUPS = ("near", "far")
_GUIDED, _GUARDED, _INDEPENDENT = "ldr=0.5 none A=2 M=5", "ldr=0.5 share A=2 M=5", "deep M=5"


class Over:
    """A number over seeds.

    Args:
        values: One for each seed.
    """

    def __init__(self, values: Iterable[float]) -> None:
        self.values = list(values)

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return fmean(self.values)

    @property
    def half(self) -> float:
        """Half the width of its interval; infinite for one seed."""
        count = len(self.values)
        return STUDENT_95[count] * stdev(self.values) / sqrt(count) if count > 1 else inf

    @property
    def sign(self) -> int:
        """1 or -1 where the interval lies on one side of 0, else 0."""
        return 0 if abs(self.mean) <= self.half else (1 if self.mean > 0 else -1)

    def text(self, digits: int = 3, signed: bool = False) -> str:
        """Return the mean and half the interval's width, without zeros before the point.

        Example:
            >>> Over([0.71, 0.72, 0.73]).text(), Over([0.5]).text()
            ('.720 ± .025', '.500')
        """
        middle = _bare(f"{self.mean:{'+' if signed else ''}.{digits}f}")
        return middle if len(self.values) == 1 else f"{middle} ± {_bare(f'{self.half:.{digits}f}')}"


def _bare(number: str) -> str:
    return number.replace("0.", ".", 1) if number.lstrip("+-").startswith("0.") else number


def runs(rows: Iterable[Record], study: str) -> list[Record]:
    """Return what the arms of a study's runs measured, with numbers as floats."""
    return [_floats(row["numbers"]) for row in rows if row["table"] == f"{study}/runs"]


def _floats(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _floats(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_floats(each) for each in value]
    return float(value) if not isinstance(value, str | bool | None.__class__) else value


def _by_seed(records: Iterable[Record], classes: int, row: str) -> dict[int, Record]:
    family = f"pretrained C={classes}"
    return {
        int(record["setting"]["seed"]): record
        for record in records
        if record["setting"]["backbone"] == family and record["row"] == row
    }


def paired(first: Mapping[int, Record], second: Mapping[int, Record], read: Read, other: Read | None = None) -> Over:
    """Return by how much the first arm's number is above the second's, over the seeds that both have."""
    return Over(read(first[seed]) - (other or read)(second[seed]) for seed in first if seed in second)


def worst(record: Record) -> float:
    """Accuracy of the least accurate member."""
    return float(min(record["members"]))


def auroc(group: str, score: str) -> Read:
    """Return what reads the AUROC of a score on a group of sets."""
    return lambda record: float(record["auroc"][group][score])


def _table(lines: Sequence[Sequence[str]]) -> str:
    rows = [f"|{'|'.join(line)}|" for line in lines]
    return "\n".join([rows[0], "|" + "---|" * len(lines[0]), *rows[1:]])


def _name(setting: Mapping[str, Any]) -> str:
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
    found: dict[str, dict[int, Record]] = {}
    for record in records:
        setting = record["setting"]
        if setting["backbone"] == f"pretrained C={classes}" and setting["num_members"] == size:
            found.setdefault(record["row"], {})[int(setting["seed"])] = record
    lines = [["heads", "seeds", "accuracy", "worst member, points", "NLL", "ECE", "different answers"]]
    lines[0] += [f"{group}: {' / '.join(SCORES)}" for group in GROUPS]
    plain = found[f"deep M={size}"]
    for row, own in found.items():
        seeds = list(own.values())
        lost = "" if row.startswith("deep") else _points(paired(own, plain, worst))
        lines.append(
            [
                _name(seeds[0]["setting"]),
                str(len(seeds)),
                Over(each["test"]["accuracy"] for each in seeds).text(),
                lost,
                Over(each["test"]["nll"] for each in seeds).text(),
                Over(each["test"]["ece"] for each in seeds).text(),
                Over(each["unique"]["test"] for each in seeds).text(2),
                *(
                    " / ".join(
                        _bare(f"{fmean(each['auroc'][group][score] for each in seeds):.3f}")
                        for score in SCORES.values()
                    )
                    for group in GROUPS
                ),
            ]
        )
    return _table(lines)


def _points(lost: Over) -> str:
    return Over(100 * value for value in lost.values).text(1, signed=True)


def ece_sentence(records: Sequence[Record]) -> str:
    """Say how large the calibration error of a calibrated model of these confidences is."""
    floors = [record["test"]["ece_floor"] for record in records if record["auroc"]]
    return (
        f"A perfectly calibrated model with these confidences has an ECE of {_bare(f'{min(floors):.3f}')} to "
        f"{_bare(f'{max(floors):.3f}')}: differences below that are no findings."
    )


def guard_table(records: Sequence[Record]) -> str:
    """Return what loss-guided disagreement costs the worst of five members, by number of classes, with and without the guard."""
    lines = [
        [
            "classes",
            "strength",
            "independent, worst",
            "published, points",
            "guarded, points",
            "guarded: seed by seed",
            "",
        ]
    ]
    for classes in (10, 100, 1000):
        plain = _by_seed(records, classes, _INDEPENDENT)
        for strength in ("0.5", "5"):
            forms = [_by_seed(records, classes, f"ldr={strength} {form} A=2 M=5") for form in ("none", "share")]
            free, held = (paired(form, plain, worst) for form in forms)
            lines.append(
                [
                    str(classes),
                    strength,
                    Over(map(worst, plain.values())).text(),
                    _points(free),
                    _points(held),
                    ", ".join(f"{100 * value:+.2f}" for value in held.values),
                    "a cost" if held.sign < 0 else "within noise",
                ]
            )
    return _table(lines)


def guard_figure(records: Sequence[Record]) -> "matplotlib.figure.Figure":
    """Draw what the worst of five members loses, seed by seed, by number of classes, with and without the guard."""
    from dissensus import plots

    figure, axes = plots.panels(columns=2, width=4.2, height=3.2)
    for ax, strength in zip(axes, ("0.5", "5"), strict=True):
        for form, label, colour in (("none", "published", 0), ("share", "guarded", 1)):
            for place, classes in enumerate((10, 100, 1000)):
                own = _by_seed(records, classes, f"ldr={strength} {form} A=2 M=5")
                lost = paired(own, _by_seed(records, classes, _INDEPENDENT), worst).values
                shift = [place + 0.08 * (seed - 1) for seed in range(len(lost))]
                heights = [100 * value for value in lost]
                marker = "os"[colour]
                ax.plot(
                    shift,
                    heights,
                    marker,
                    color=plots.COLOURS[colour],
                    markersize=5,
                    label=label if place == 0 else None,
                )
        ax.axhline(0, color=plots.NOTE_COLOUR, linewidth=0.8)
        ax.set_xticks(range(3), ["10", "100", "1000"])
        ax.set(title=f"strength {strength}", xlabel="classes", ylim=(-64, 5), xlim=(-0.5, 2.5))
    axes[0].set(ylabel="worst member − independent, points")
    axes[0].legend(frameon=False, fontsize="small", loc="lower right")
    return figure


def sizes_table(records: Sequence[Record]) -> str:
    """Return two, five and ten heads at strength 0.5 beside each other."""
    lines = [
        ["heads", "form", "seeds", "worst member, points", "different answers", *(f"{g}: PDS / energy" for g in GROUPS)]
    ]
    for size in (2, 5, 10, 50):
        drawn = " A=2" if size > 2 else ""
        plain = _by_seed(records, 100, f"deep M={size}")
        for name, row in (
            ("independent", f"deep M={size}"),
            ("published", f"ldr=0.5 none{drawn} M={size}"),
            ("guarded", f"ldr=0.5 share{drawn} M={size}"),
        ):
            own = _by_seed(records, 100, row)
            if own:
                seeds = list(own.values())
                lines.append(
                    [
                        str(size),
                        name,
                        str(len(seeds)),
                        "" if name == "independent" else _points(paired(own, plain, worst)),
                        Over(each["unique"]["test"] for each in seeds).text(2),
                        *(
                            " / ".join(Over(map(auroc(g, SCORES[s]), seeds)).text() for s in ("PDS", "energy"))
                            for g in GROUPS
                        ),
                    ]
                )
    return _table(lines)


def judged(cases: Mapping[str, Over]) -> tuple[str, str]:
    """Return verdict and note of a claim that something is larger in every case."""
    higher = [name for name, case in cases.items() if case.sign > 0]
    lower = [name for name, case in cases.items() if case.sign < 0]
    if len(higher) == len(cases):
        return "reproduced", "reproduced"
    if not lower:
        return (
            "within noise",
            "within noise" if not higher else f"holds for {', '.join(higher)}, elsewhere within noise",
        )
    if len(cases) == 1:
        return "not reproduced", "not reproduced"
    parts = [f"{word} for {', '.join(names)}" for word, names in (("holds", higher), ("the opposite", lower)) if names]
    return "not reproduced", "; ".join(parts)


def pretrained_claims(records: Sequence[Record]) -> dict[str, Record]:
    """Judge the document's claims on heads at its own ten epochs; return what replaces a claim's line, by its text."""
    guided, guarded, plain = (_by_seed(records, 100, row) for row in (_GUIDED, _GUARDED, _INDEPENDENT))
    if not (guided and guarded and plain):
        return {}
    pds, bma = SCORES["PDS"], SCORES["BMA"]
    sets = list(next(iter(plain.values()))["unique"])
    found: dict[str, tuple[dict[str, Over], str]] = {}

    def mean(own: Mapping[int, Record], read: Read) -> str:
        return _bare(f"{fmean(map(read, own.values())):.3f}")

    def both(
        first: Mapping[int, Record], second: Mapping[int, Record], one: str, two: str
    ) -> tuple[dict[str, Over], str]:
        cases = {g: paired(first, second, auroc(g, one), auroc(g, two)) for g in GROUPS}
        text = ", ".join(f"{g} {mean(first, auroc(g, one))} against {mean(second, auroc(g, two))}" for g in GROUPS)
        return cases, text

    def unique(name: str) -> Read:
        return lambda record: float(record["unique"][name])

    found["Loss-guided members give more different answers on every set."] = (
        {name: paired(guided, plain, unique(name)) for name in sets},
        f"{mean(guided, unique('test'))} against {mean(plain, unique('test'))} on known, {mean(guided, unique('cifar10'))} against "
        f"{mean(plain, unique('cifar10'))} on CIFAR-10 images; guarded {mean(guarded, unique('test'))} and "
        f"{mean(guarded, unique('cifar10'))}",
    )
    strengths = {s: _by_seed(records, 100, f"ldr={s} none A=2 M=5") for s in ("0.1", "0.5", "1", "5")}
    steps = list(strengths)
    found["Diversity rises with the strength."] = (
        {f"{b} against {a}": paired(strengths[b], strengths[a], unique("test")) for a, b in pairwise(steps)},
        "different answers "
        + ", ".join(mean(own, unique("test")) for own in strengths.values())
        + " at "
        + ", ".join(steps),
    )
    best = {g: max(steps, key=lambda s: fmean(map(auroc(g, pds), strengths[s].values()))) for g in GROUPS}
    found["Some strength detects better with PDS than none."] = (
        {g: paired(strengths[best[g]], plain, auroc(g, pds)) for g in GROUPS},
        ", ".join(
            f"{g} {mean(strengths[best[g]], auroc(g, pds))} at {best[g]} against {mean(plain, auroc(g, pds))}"
            for g in GROUPS
        ),
    )
    cases, text = both(plain, plain, bma, pds)
    found["PDS is poor without diversity."] = cases, f"independent heads, BMA against PDS: {text}"
    found["PDS of loss-guided ensembles detects better than BMA."] = both(guided, guided, pds, bma)
    others = [score for score in next(iter(guided.values()))["auroc"]["near"] if score != pds]
    top = {g: max(others, key=lambda s: fmean(map(auroc(g, s), guided.values()))) for g in GROUPS}
    found["PDS is the best of all scores for them."] = (
        {g: paired(guided, guided, auroc(g, pds), auroc(g, top[g])) for g in GROUPS},
        ", ".join(
            f"{g} {mean(guided, auroc(g, pds))} against {mean(guided, auroc(g, top[g]))} ({top[g]})" for g in GROUPS
        ),
    )
    rivals = {
        (row, score): _by_seed(records, 100, row)
        for row in (_INDEPENDENT, "a2d=0.1 M=5", "divdis=1 M=5", "two-stage=0.5 A=2 M=5", "joint=0.4 M=5")
        for score in (bma, pds)
    }
    first = {g: max(rivals, key=lambda key: fmean(map(auroc(g, key[1]), rivals[key].values()))) for g in GROUPS}
    found["Loss-guided training with PDS detects better than any other method with BMA or PDS."] = (
        {g: paired(guided, rivals[first[g]], auroc(g, pds), auroc(g, first[g][1])) for g in GROUPS},
        ", ".join(
            f"{g} {mean(guided, auroc(g, pds))} against {mean(rivals[first[g]], auroc(g, first[g][1]))} "
            f"({_name(next(iter(rivals[first[g]].values()))['setting'])})"
            for g in GROUPS
        ),
    )
    lost, held = (paired(own, plain, worst) for own in (guided, guarded))
    found["Members differ without harm to what they learn."] = (
        {"the worst member": Over(value + 0.02 for value in lost.values)},
        f"the worst member {_points(lost)} points; guarded {_points(held)}",
    )
    two = _by_seed(records, 100, "ldr=0.5 none M=2")
    cases, text = both(guided, two, pds, pds)
    found["More members detect better (PDS)."] = cases, f"5 against 2: {text}"
    found["Loss-guided weights detect better than two stages (PDS)."] = both(
        guided, _by_seed(records, 100, "two-stage=0.5 A=2 M=5"), pds, pds
    )
    return {claim: _judgement(cases, text, len(guided)) for claim, (cases, text) in found.items()}


def _judgement(cases: Mapping[str, Over], text: str, seeds: int) -> Record:
    verdict, note = judged(cases)
    return {
        "measured": [text],
        "verdict": verdict,
        "note": note,
        "seeds": seeds,
        "setting": PRETRAINED,
        "command": COMMAND,
    }


def with_runs(claims: Sequence[Record], rows: Sequence[Record]) -> list[Record]:
    """Return the claims, those on heads as runs on a pretrained backbone judge them."""
    measured = pretrained_claims(pretrained(rows))
    return [
        claim | measured[claim["claim"]]
        if claim["table"] == "diversification/claims-heads" and claim.get("claim") in measured
        else claim
        for claim in claims
    ]


def pretrained(rows: Sequence[Record]) -> list[Record]:
    """Return the arms of heads on a pretrained backbone."""
    return [
        record
        for record in runs(rows, "diversification")
        if record["setting"].get("backbone", "").startswith("pretrained")
    ]


TABLES: Mapping[str, Callable[[Sequence[Record]], str]] = {
    "pretrained-methods": lambda rows: methods_table(pretrained(rows)),
    "pretrained-ece": lambda rows: ece_sentence(pretrained(rows)),
    "pretrained-guard": lambda rows: guard_table(pretrained(rows)),
    "pretrained-sizes": lambda rows: sizes_table(pretrained(rows)),
}


def kinds_table(rows: Sequence[Record]) -> str:
    """Return kinds and objectives that trained for the same seconds, the lowest NLL first."""
    lines = [
        [
            "kind, objective",
            "epochs",
            "accuracy",
            "worst member",
            "NLL",
            "ECE",
            "corrupted",
            "near / far, best score",
            "images a second",
        ]
    ]
    for record in sorted(runs(rows, "choosing"), key=lambda each: each["test"]["nll"]):
        test, best = record["test"], [max(record["auroc"][group].values()) for group in GROUPS]
        lines.append(
            [
                record["family"],
                f"{record['training']['epochs']:.0f}",
                _bare(f"{test['accuracy']:.3f}"),
                _bare(f"{worst(record):.3f}"),
                _bare(f"{test['nll']:.3f}"),
                _bare(f"{test['ece']:.3f}"),
                _bare(f"{record['corrupted']['all']['accuracy']:.3f}"),
                " / ".join(_bare(f"{value:.3f}") for value in best),
                f"{record['images_a_second'] / 1000:.0f} 000",
            ]
        )
    return _table(lines)


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
    lines = [["score", "kinds: near / far", "their lowest set", "pretrained heads: near / far", "their lowest set"]]
    found: dict[str, tuple[float, ...]] = {}
    for score in tabled[0]["auroc"]["near"]:
        cells = []
        for group in (tabled, kept):
            means = [fmean(map(auroc(name, score), group)) for name in GROUPS]
            lowest = min(record["auroc"][part][score] for record in group for part in record["auroc"])
            cells += [" / ".join(_bare(f"{mean:.3f}") for mean in means), _bare(f"{lowest:.2f}")]
            found[score] = (*found.get(score, ()), *means)
        lines.append([f"`{score}`", *cells])
    order = sorted(lines[1:], key=lambda line: -fmean(found[line[0].strip("`")]))
    return _table([lines[0], *order])


def pareto_figure(records: Sequence[Record]) -> "matplotlib.figure.Figure":
    """Draw NLL against the time of a prediction, every point with its name; what nothing beats in both is joined by a line."""
    from dissensus import plots

    figure, (ax,) = plots.panels(width=7.2, height=4.2)
    points = {record["family"]: (1e6 / record["images_a_second"], record["test"]["nll"]) for record in records}
    front = sorted(
        p for p in points.values() if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points.values())
    )
    ax.plot(*zip(*front, strict=True), "--", color=plots.NOTE_COLOUR, linewidth=1)
    for family, (cost, loss) in points.items():
        colour = plots.COLOURS[1 if (cost, loss) in front else 0]
        ax.plot(cost, loss, "o", color=colour, markersize=5)
        name = family.removesuffix(", independent")
        place = _BESIDE.get(name, (6, -3))
        side = "right" if place[0] < 0 else "left"
        ax.annotate(name, (cost, loss), place, textcoords="offset points", fontsize=8, ha=side)
    ax.set(xlabel="microseconds an image, all members", ylabel="NLL on test images, nats", xlim=(0, 56))
    return figure


# Where a name stands beside its point, in points; to the right of most.
_BESIDE = {
    "packed, loss-guided 0.5": (6, 4),
    "packed": (6, -9),
    "deep, joint 0.4": (-6, 4),
    "deep": (-6, -9),
    "mc dropout": (6, -9),
    "heads, loss-guided 0.5": (6, -5),
    "heads": (6, 4),
}
