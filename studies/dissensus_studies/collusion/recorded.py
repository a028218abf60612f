"""Rows of the record in; what the page of joint training shows of its arms, and verdicts on claims, out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import sqrt
from statistics import fmean

import pandas as pd

from dissensus_studies.collusion.images import (
    BETAS,
    EPOCHS,
    Family,
    compare_members,
    estimates,
    interval_of,
    least_accurate,
    most_wrong,
)
from dissensus_studies.collusion.uci import DROP_SHARES, SHOWN_BETAS, SOURCES, STATEMENTS, Runs, Settings, by_set
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.claims import Case, over_cases, verdict_over
from dissensus_studies.harness.statistics import Comparison, Estimate, Summary
from dissensus_studies.recorded import as_floats, made, markdown, span, whole_runs, with_half


def shown(rows: Sequence[Record]) -> list[Record]:
    """Return the record as the page shows it: lines of tables and figures that runs make, and what was read off an earlier page."""
    return [*images_shown(rows), *tabular_lines(by_set(tabular(rows)))]


def judged_claims(rows: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Return what replaces a claim's line, by table and text, for the claims that runs speak of."""
    return {"collusion/images": judged_images(rows), TABULAR: judged_tabular(rows)}


TABULAR = "collusion/tabular-regression"
_UCI = {
    "setting": "four UCI sets, ten runs, nothing reduced",
    "command": "dissensus study collusion-uci --data DIR --setting train+validation",
}


def tabular_rows(rows: Sequence[Record]) -> list[Record]:
    """Return the runs on tables as the document has them, set by set; of each ensemble they have both ways to train it."""
    asked = as_floats(asdict(Settings(on_validation_too=True)) | {"betas": [*Settings().betas]})
    own = [row for row in rows if row["table"] == "collusion/runs" and as_floats(row["setting"]) == asked]
    return sorted(own, key=lambda row: [*SOURCES].index(row["numbers"]["set"]))


def tabular(rows: Sequence[Record]) -> list[Record]:
    """Return what those runs measured."""
    return [as_floats(row["numbers"]) for row in tabular_rows(rows)]


def judged_tabular(rows: Sequence[Record]) -> dict[str, Record]:
    """Judge the claims on tables; a claim has a text for each set that it speaks of."""
    sets = by_set(tabular(rows))
    found: dict[str, Record] = {}
    for statement in STATEMENTS:
        if cases := statement.cases(sets):
            holds = {name: each for name, (_, each) in cases.items()}
            found[statement.claim] = {
                "cases": list(cases),
                "measured": [text for text, _ in cases.values()],
                "verdict": verdict_over(holds.values(), statement.most),
                "note": in_words(holds),
                "seeds": min(sets[name].index.get_level_values("run").nunique() for name in cases),
                **_UCI,
            } | ({} if statement.regime is None else {"regime": statement.regime})
    return found


def in_words(holds: Mapping[str, bool | None]) -> str:
    """Return for which cases a claim holds, in the words of verdicts."""
    return over_cases(holds).replace("unresolved", "within noise")


def again_table(rows: Sequence[Record]) -> str:
    """Return the claims on tables as judged by the ensembles that were trained again with the validation rows."""
    sets = by_set(tabular(rows), again=True)
    lines = []
    for statement in STATEMENTS:
        cases = statement.cases(sets)
        texts = [cases[name][0] if name in cases else "" for name in sets]
        lines.append([statement.claim, *texts, in_words({name: each for name, (_, each) in cases.items()})])
    return markdown(["the document says", *sets, "verdict"], lines)


def tabular_sentence(rows: Sequence[Record]) -> str:
    """Say on what the runs on tables were made, and how long they took."""
    return f"{made(tabular_rows(rows))}, one thread."


def apart_sentence(rows: Sequence[Record]) -> str:
    """Say at which beta each set's error is told apart from that of independent training, run by run."""
    found = []
    for name, runs in by_set(tabular(rows)).items():
        for side in ("higher", "lower"):
            errors = {beta: runs["mse"].xs(beta, level="beta") for beta in Settings().betas}
            told = [beta for beta, own in errors.items() if Comparison.of([*errors[0.0]], [*own]).verdict == side]
            if told:
                found.append(f"{side} at {', '.join(f'{beta:g}' for beta in told)} on {name}")
    return f"Told apart from the error at β = 0, by sign tests over runs: {'; '.join(found) or 'none'}."


def tabular_lines(sets: Mapping[str, Runs]) -> Iterator[Record]:
    """Yield the lines of the table of errors, and those of the figures: a panel a set."""
    names = {
        "MSE": "mse",
        "diversity": "diversity",
        "members' MSE": "member_mse",
        "best member's MSE": "best_member_mse",
    }
    line: Record = {"study": "collusion", "source": "run"}
    for name, runs in sets.items():
        for beta in SHOWN_BETAS:
            own = runs.xs(beta, level="beta")
            errors = {title: [f"{own[key].mean():.3f}", f"{own[key].std(ddof=0):.3f}"] for title, key in names.items()}
            table = "collusion/diversity-explosion-figure-2"
            yield line | {"table": table, "arm": [name, f"{beta:g}"], "numbers": errors}
    for (figure, name, title), (colour, style), numbers in _drawn(sets):
        drawn = {"arm": [figure, name, title], "line": {"colour": colour, "style": style}, "numbers": numbers}
        yield line | {"table": "collusion/figures", **drawn}


_Line = tuple[tuple[str, str, str], tuple[int, str], dict[str, list[float]]]


def _drawn(sets: Mapping[str, Runs]) -> Iterator[_Line]:
    """Yield figure, panel and name of each line, its look, and its numbers."""
    for name, runs in sets.items():
        yield ("collusion_diversity", name, "ensemble MSE"), (0, "o-"), _mean_band(runs["mse"])
        yield ("collusion_diversity", name, "diversity"), (1, "o-"), _mean_band(runs["diversity"])
        change = 100 * (runs["mse"] / runs["mse"].xs(0.0, level="beta") - 1)
        yield (
            ("collusion_change", name, ""),
            (0, "o-"),
            _band(*(change.groupby("beta").quantile(q) for q in (0.5, 0.25, 0.75))),
        )
        yield ("collusion_bias", name, ""), (0, "o-"), _mean_band(100 * runs["bias_share"])
        for colour, share in enumerate(DROP_SHARES):
            risen = f"drop_{share:g}"
            yield ("collusion_drop", name, f"{100 * share:.0f} % dropped"), (colour, "o-"), _mean_band(runs[risen])
            expected = runs[f"{risen}_expected"].groupby("beta").mean()
            yield ("collusion_drop", name, ""), (colour, "x"), _band(expected)


def _mean_band(values: "pd.Series[float]") -> dict[str, list[float]]:
    """Return means over runs and one standard deviation to both sides, below no further than the least run: axes are logarithmic."""
    by_beta = values.groupby("beta")
    mean, spread = by_beta.mean(), by_beta.std(ddof=0)
    return _band(mean, (mean - spread).clip(lower=by_beta.min()), mean + spread)


def _band(middle: "pd.Series[float]", *ends: "pd.Series[float]") -> dict[str, list[float]]:
    return {
        "x": [*middle.index],
        "y": [*middle],
        **{key: [*end] for key, end in zip(("low", "high"), ends, strict=False)},
    }


# Images. The arms that were trained longest count; where there are none at beta 0 and 1, the page keeps what it had of shorter runs.
MAIN = ("cifar10", "resnet18 M=5")
TABLE = "collusion/between-independent-and-joint-figures-6-13-to-17"
CNN = ("cifar10", "cnn M=5"), ("cifar10", "cnn M=10")
# What runs take the place of: a table, a figure of the first family, and the families by how their rows begin.
SHOWN = (
    (TABLE, "collusion-images", {"": MAIN}),
    (f"{TABLE}-2", "collusion-cnn", {"five members, ": CNN[0], "ten members, ": CNN[1]}),
)
# Lines of the figure: panel, name, what a record has, colour.
DRAWN = (
    ("test accuracy", "ensemble", "accuracy", 0),
    ("test accuracy", "mean member", "member_accuracy", 2),
    ("test error of the ensemble, nats", "", "ensemble_error", 0),
    ("test diversity, nats", "", "diversity", 1),
)
DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN"}


def asked_epochs(row: Record) -> int:
    """Return how long an arm of the record was to train at most; small networks stop before."""
    return int(row["setting"]["epochs"] or EPOCHS)


def sweep_of(rows: Sequence[Record], data: str, family: str) -> Family:
    """Return the arms of a family by beta, without members left out; empty without both ends."""
    found: dict[float, list[Record]] = {}
    own = [{**as_floats(row["numbers"]), "row": row} for row in whole_runs(rows, "collusion", data)]
    own = [arm for arm in own if arm["family"] == family and not arm["setting"]["member_dropout"]]
    longest = max((asked_epochs(arm["row"]) for arm in own), default=0)
    for arm in own:
        if asked_epochs(arm["row"]) == longest:
            found.setdefault(arm["setting"]["beta"], []).append(arm)
    return dict(sorted(found.items())) if {0.0, 1.0} <= set(found) else {}


def images_shown(rows: Sequence[Record]) -> list[Record]:
    """Return the record as the page shows it: runs in place of what was read off an earlier page."""
    found = list(rows)
    for table, figure, families in SHOWN:
        sweeps = {name: family for name, key in families.items() if (family := sweep_of(rows, *key))}
        if sweeps:
            found = [row for row in found if row["table"] != table and row["arm"][0] != figure]
        for name, family in sweeps.items():
            for beta, arms in family.items():
                arm = f"{name if beta == 0.0 else ''}{beta:g}" + (f" ({len(arms)} seeds)" if len(arms) > 1 else "")
                found.append({"study": "collusion", "table": table, "arm": [arm], "numbers": _numbers(arms)})
        for family in list(sweeps.values())[:1]:
            for panel, line, key, colour in DRAWN:
                points = {"x": list(family), "y": [fmean(arm[key] for arm in arms) for arms in family.values()]}
                drawn = {"arm": [figure, panel, line], "line": {"colour": colour, "style": "o-"}, "numbers": points}
                found.append({"study": "collusion", "table": "collusion/figures", **drawn})
    return found


def _numbers(arms: Sequence[Record]) -> dict[str, str]:
    """Return means over seeds, with half the width of their interval where there are several."""
    accuracy, member, error, diversity = (with_half(Summary.of(arm[key] for arm in arms)) for _, _, key, _ in DRAWN)
    least, best = min(min(arm["members"]) for arm in arms), max(max(arm["members"]) for arm in arms)
    return {
        "accuracy": accuracy,
        "mean member (least to best)": f"{member} ({least:.3f} to {best:.3f})",
        "ERR, nats": error,
        "diversity, nats": diversity,
        "ECE": with_half(Summary.of(interval_of(arm, "ece")[0] for arm in arms)),
    }


def sentence(rows: Sequence[Record], table: str = TABLE) -> str:
    """Say what a table rests on, and which beta are not told apart from independent training."""
    (families,) = (families for name, _, families in SHOWN if name == table)
    sweeps = [family for key in families.values() if (family := sweep_of(rows, *key))]
    if not sweeps:
        row = next(row for row in rows if row["table"] == table)
        return f"{row['setting']} of the document's {EPOCHS}, one seed, {row['machine']}, torch {row['versions']['torch']}, {row['date']}."
    arms = [arm for family in sweeps for each in family.values() for arm in each]
    took, accuracy = span(int(arm["training"]["epochs"]) for arm in arms), estimates(sweeps[0], "accuracy")
    asked, run = asked_epochs(arms[0]["row"]), made([arm["row"] for arm in arms])
    early = "" if took == str(asked) else f", stopped after {took}"
    same = [f"{beta:g}" for beta, each in accuracy.items() if beta and each.above(accuracy[0.0]) is None]
    counts = {len(each) for family in sweeps for each in family.values()}
    spread = "One seed each; errors are over test images." if counts == {1} else "± is half a 95 % interval over seeds."
    return (
        f"CIFAR-10, {asked} epochs (the document's {EPOCHS}){early}: {run}. {spread} Accuracy within two standard errors of that at "
        f"beta = 0: {', '.join(same) or 'none'}."
    )


def diagnosis_sentence(rows: Sequence[Record]) -> str:
    """Say how many arms of the document's length the diagnosis of their test outputs suspects."""
    arms = [
        as_floats(row["numbers"]) for row in whole_runs(rows, "collusion", "cifar10") if asked_epochs(row) >= EPOCHS
    ]
    own = [arm for arm in arms if "diagnosis" in arm]
    joint, less = ([arm for arm in own if (arm["setting"]["beta"] == 1.0) == ends] for ends in (True, False))
    seen, false = (sum(arm["diagnosis"]["verdict"] != "no sign" for arm in arms) for arms in (joint, less))
    return (
        f"Trained to the end, test outputs alone raise suspicion in {false} of {len(less)} arms below beta = 1 and in {seen} of "
        f"{len(joint)} at 1, though members of all of these are worse alone: held out, averaged probabilities hide most of it."
    )


def _worse(family: Family) -> Case:
    (accuracy, poorer), (error, more_wrong) = least_accurate(family), most_wrong(family)
    unresolved = None in (poorer, more_wrong) and False not in (poorer, more_wrong)
    return f"accuracy {accuracy}; ERR {error}", None if unresolved else poorer and more_wrong


def _lowest_between(family: Family) -> Case:
    """Whether an ensemble between the ends has the lowest error, by more than noise."""
    errors = estimates(family, "ensemble_error")
    best = min(errors, key=lambda beta: errors[beta].value)
    text = f"lowest {errors[best].value:.3f} at {best:g}, {errors[0.0].value:.3f} at 0, {errors[1.0].value:.3f} at 1"
    above = [errors[end].above(errors[best]) for end in (0.0, 1.0) if end != best]
    return text, best not in (0.0, 1.0) and (True if all(above) else None)


def _most_near_one(family: Family) -> Case:
    """Whether diversity rises by more from 0.8 to 1 than from 0 to 0.8, beyond two standard errors where they are known."""
    spread, near = estimates(family, "diversity"), BETAS[-2]
    numbers, betas = (f"{each.value:.3f}" for each in spread.values()), (f"{beta:g}" for beta in spread)
    text = f"{', '.join(numbers)} nats at {', '.join(betas)}"
    if near not in family:
        return text, None
    # Both rises share the middle: the larger one is larger if the ends' mean is above it.
    low, middle, high = spread[0.0], spread[near], spread[1.0]
    ends = Estimate((low.value + high.value) / 2, sqrt(low.error**2 + high.error**2) / 2)
    return text, ends.above(middle)


_ALL = (MAIN[1], CNN[0][1], CNN[1][1])
# The claims that families of arms on one set of images speak of; each has to hold in all of them.
_JUDGES: Mapping[str, tuple[str, Sequence[str], Callable[[Family], Case]]] = {
    "Joint training has the lowest accuracy (figure 6) and the highest test error (17) of all beta: ResNet-18.": (
        "cifar10",
        _ALL[:1],
        _worse,
    ),
    "… ResNet-34 (figures 6, 17).": ("cifar10", ["resnet34 M=5"], _worse),
    "… CIFAR-100 (figures 6, 14).": ("cifar100", ["resnet18 M=5"], _worse),
    "… ten ResNet-18 (figure 13).": ("cifar10", ["resnet18 M=10"], _worse),
    "Joint training is worse with averaged scores too (figure 14).": ("cifar10", ["resnet18 M=5 scores"], _worse),
    "Collusion emerges as beta goes to 1: most of the rise of diversity is above 0.8.": (
        "cifar10",
        _ALL[:2],
        _most_near_one,
    ),
    "Members of a jointly trained ensemble are poor alone.": ("cifar10", _ALL, compare_members),
    "Joint training is poor for the CNN, five members (figure 15).": ("cifar10", _ALL[1:2], _worse),
    "… ten members (figure 15).": ("cifar10", _ALL[2:], _worse),
    "The CNN has its lowest test error between the ends (figure 15).": ("cifar10", _ALL[1:2], _lowest_between),
}


def judged_images(rows: Sequence[Record]) -> dict[str, Record]:
    """Return what replaces a claim's line, by text, for the claims on images that runs speak of."""
    found = {}
    for claim, (data, names, judge) in _JUDGES.items():
        families = {name: family for name in names if (family := sweep_of(rows, data, name))}
        if not families:
            continue
        cases = {name: judge(family) for name, family in families.items()}
        holds = {name: each for name, (_, each) in cases.items()}
        words = in_words(holds)
        epochs = min(asked_epochs(family[0.0][0]["row"]) for family in families.values())
        betas = sorted(set.intersection(*map(set, families.values())))
        missing = [f"{beta:g}" for beta in BETAS if beta not in betas] if judge is _worse else []
        chosen = ",".join(f"{name} beta" for name in families)
        notes = [words if len(cases) > 1 else "", f"beta {', '.join(missing)} not run" if missing else ""]
        found[claim] = {
            "measured": ["; ".join(text if len(cases) == 1 else f"{n}: {text}" for n, (text, _) in cases.items())],
            "verdict": verdict_over(holds.values()) if epochs >= EPOCHS else "not tested at the document's length",
            "note": "; ".join(filter(None, notes)) or words,
            "seeds": min(len(arms) for family in families.values() for arms in family.values()),
            "setting": f"{DATA[data]}, {', '.join(families)}, beta {', '.join(f'{beta:g}' for beta in betas)}, {epochs} of {EPOCHS} epochs",
            "command": f'dissensus study collusion-images --data DIR --known {data} --arms "{chosen}"',
        }
    return found
