"""Arms of `collusion-images` that the record has, in; what the page shows of them out: rows of its table, lines of its figure, verdicts.

The arms that were trained longest count. Where there are none at beta 0 and 1, the page keeps what it had of shorter runs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from dissensus_studies.collusion.images import (
    BETAS,
    EPOCHS,
    Case,
    Family,
    compare_diversity,
    compare_members,
    estimate,
    interval_of,
    least_accurate,
    most_wrong,
)
from dissensus_studies.harness.statistics import Summary
from dissensus_studies.recorded import Record, as_floats

MAIN = ("cifar10", "resnet18 M=5")
TABLE = "collusion/between-independent-and-joint-figures-6-13-to-17"
FIGURE = "collusion-images"
# Lines of the figure: panel, name, what a record has, colour.
DRAWN = (
    ("test accuracy", "ensemble", "accuracy", 0),
    ("test accuracy", "mean member", "member_accuracy", 2),
    ("test error of the ensemble, nats", "", "ensemble_error", 0),
    ("test diversity, nats", "", "diversity", 1),
)
# So many times as large is called an explosion; tables rise by more.
EXPLOSION = 10
DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN"}


def sweep_of(rows: Sequence[Record], data: str, family: str) -> Family:
    """Return the arms of a family by beta, without members left out; empty without both ends."""
    found: dict[float, list[Record]] = {}
    own = [
        {**as_floats(row["numbers"]), "row": row}
        for row in rows
        if row["table"] == "collusion/runs" and row["setting"]["data"] == data and not row["setting"]["quick"]
    ]
    own = [arm for arm in own if arm["family"] == family and not arm["setting"]["member_dropout"]]
    longest = max((arm["training"]["epochs"] for arm in own), default=0)
    for arm in own:
        if arm["training"]["epochs"] == longest:
            found.setdefault(arm["setting"]["beta"], []).append(arm)
    return dict(sorted(found.items())) if {0.0, 1.0} <= set(found) else {}


def shown(rows: Sequence[Record]) -> list[Record]:
    """Return the record as the page shows it: of the five ResNet-18, runs in place of what was read off an earlier page."""
    family = sweep_of(rows, *MAIN)
    if not family:
        return list(rows)
    kept = [row for row in rows if row["table"] != TABLE and row["arm"][0] != FIGURE]
    tabled = [
        {
            "study": "collusion",
            "table": TABLE,
            "arm": [f"{beta:g}" if len(arms) == 1 else f"{beta:g} ({len(arms)} seeds)"],
            "numbers": _numbers(arms),
        }
        for beta, arms in family.items()
    ]
    drawn = [
        {
            "study": "collusion",
            "table": "collusion/figures",
            "arm": [FIGURE, panel, name],
            "line": {"colour": colour, "style": "o-"},
            "numbers": {"x": list(family), "y": [fmean(arm[key] for arm in arms) for arms in family.values()]},
        }
        for panel, name, key, colour in DRAWN
    ]
    return [*kept, *tabled, *drawn]


def _numbers(arms: Sequence[Record]) -> dict[str, str]:
    """Return means over seeds, with half the width of their interval where there are several."""

    def text(values: Iterable[float]) -> str:
        found = Summary(tuple(values))
        return f"{found.mean:.3f}" + (f" ± {found.half:.3f}" if len(arms) > 1 else "")

    accuracy, member, error, diversity = (text(arm[key] for arm in arms) for _, _, key, _ in DRAWN)
    least, best = min(min(arm["members"]) for arm in arms), max(max(arm["members"]) for arm in arms)
    return {
        "accuracy": accuracy,
        "mean member (least to best)": f"{member} ({least:.3f} to {best:.3f})",
        "ERR, nats": error,
        "diversity, nats": diversity,
        "ECE": text(interval_of(arm, "ece")[0] for arm in arms),
    }


def sentence(rows: Sequence[Record]) -> str:
    """Say what the table of the five ResNet-18 rests on, and which beta are not told apart from independent training."""
    family = sweep_of(rows, *MAIN)
    if not family:
        row = next(row for row in rows if row["table"] == TABLE)
        return f"{row['setting']} of the document's {EPOCHS}, one seed, {row['machine']}, torch {row['versions']['torch']}, {row['date']}."
    arms = [arm for each in family.values() for arm in each]
    epochs, dates = int(arms[0]["training"]["epochs"]), sorted({arm["row"]["date"] for arm in arms})
    machine, torch = arms[0]["row"]["machine"], arms[0]["row"]["versions"]["torch"]
    accuracy = {beta: estimate(each, "accuracy") for beta, each in family.items()}
    same = [f"{beta:g}" for beta, each in accuracy.items() if beta and each.above(accuracy[0.0]) is None]
    return (
        f"CIFAR-10, {epochs} epochs (the document's {EPOCHS}), {len(arms)} arms in {sum(a['row']['seconds'] for a in arms) / 60:.0f} "
        f"minutes, {machine}, torch {torch}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. ± is half a 95 % interval over seeds. "
        f"Accuracy within two standard errors of that at beta = 0: {', '.join(same) or 'none'}."
    )


def _worse(family: Family) -> Case:
    (accuracy, poorer), (error, more_wrong) = least_accurate(family), most_wrong(family)
    unresolved = None in (poorer, more_wrong) and False not in (poorer, more_wrong)
    return f"accuracy {accuracy}; ERR {error}", None if unresolved else poorer and more_wrong


def _explodes(family: Family) -> Case:
    """Whether diversity is ten times as large at 1 as at 0; a smaller rise is a rise."""
    text, more = compare_diversity(family)
    low, high = (estimate(family[beta], "diversity").value for beta in (0.0, 1.0))
    return f"{text}; the limit was {EXPLOSION}", more and high >= EXPLOSION * low


def _only_near_one(family: Family) -> Case:
    """Whether diversity rises by more from 0.8 to 1 than from 0 to 0.8."""
    ratios = [
        f"{estimate(arms, 'diversity').value / estimate(arms, 'ensemble_error').value:.2f}" for arms in family.values()
    ]
    text = f"DIV / ERR {', '.join(ratios)} at {', '.join(f'{beta:g}' for beta in family)}"
    if BETAS[-2] not in family:
        return text, None
    low, middle, high = (estimate(family[beta], "diversity").value for beta in (0.0, BETAS[-2], 1.0))
    return text, high - middle > middle - low


_VERDICTS = {True: "reproduced", False: "not reproduced", None: "within noise"}
# The claims that a family of arms speaks of.
_JUDGES: Mapping[str, tuple[str, str, Callable[[Family], Case]]] = {
    "Joint training has the lowest accuracy (figure 6) and the highest test error (17) of all beta: ResNet-18.": (
        *MAIN,
        _worse,
    ),
    "… ResNet-34 (figures 6, 17).": ("cifar10", "resnet34 M=5", _worse),
    "… CIFAR-100 (figures 6, 14).": ("cifar100", "resnet18 M=5", _worse),
    "… ten ResNet-18 (figure 13).": ("cifar10", "resnet18 M=10", _worse),
    "Joint training is worse with averaged scores too (figure 14).": ("cifar10", "resnet18 M=5 scores", _worse),
    "Diversity explodes as beta goes to 1.": (*MAIN, _explodes),
    "It does so only near 1.": (*MAIN, _only_near_one),
    "Members of a jointly trained ensemble are poor alone.": (*MAIN, compare_members),
}


def judged_claims(rows: Sequence[Record]) -> dict[str, Record]:
    """Return what replaces a claim's line, by its text, for the claims on images that runs speak of."""
    found = {}
    for claim, (data, name, judge) in _JUDGES.items():
        if family := sweep_of(rows, data, name):
            text, holds = judge(family)
            verdict = _VERDICTS[holds]
            epochs = int(family[0.0][0]["training"]["epochs"])
            long = epochs >= EPOCHS
            found[claim] = {
                "measured": [text],
                "verdict": verdict if long else "not tested at the document's length",
                "note": verdict,
                "seeds": min(len(family[0.0]), len(family[1.0])),
                "setting": f"{DATA[data]}, {name}, beta {', '.join(f'{beta:g}' for beta in family)}, {epochs} of {EPOCHS} epochs",
                "command": f'dissensus study collusion-images --data DIR --known {data} --arms "{name} beta"',
            }
    return found
