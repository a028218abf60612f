"""Study `collusion-images`: what becomes of image classifiers between independent and joint training.

ResNets, a VGG and a small network, five or ten members, probability and score averaging: test accuracy, errors and diversity for
beta from 0 to 1; generalisation gaps over training; members left out at random. Records in, claims, figures and tables out.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from statistics import fmean

from dissensus.html import Section, Table
from dissensus_studies.collusion.image_arms import EPOCHS, GAP_EPOCHS, JointSetting, arms_of
from dissensus_studies.harness.arm_log import Arms, Record
from dissensus_studies.harness.claims import Claim
from dissensus_studies.harness.figures import sweep
from dissensus_studies.harness.image_arms import file_name
from dissensus_studies.harness.image_pages import arms_table, auroc_columns, with_interval
from dissensus_studies.harness.image_study import ImageStudy, Page, Work
from dissensus_studies.harness.statistics import Estimate

Family = Mapping[float, Sequence[Record]]
Case = tuple[str, bool | None]

_JUDGED = (
    "A difference within two standard errors (over runs; for a single run over test images) counts as unresolved. Diversity and gaps "
    "of single runs are compared as they are."
)
# Which of the document's figures shows what a family of arms does.
_FIGURES = {
    "resnet18 M=5": "6 (left) and 17",
    "resnet34 M=5": "6 (left) and 17",
    "resnet18 M=10": "13",
    "resnet18 M=5 scores": "14",
    "cnn M=5": "15",
    "cnn M=10": "15",
    "vgg M=5": "16",
}
# Which entry of a record's "test" has the interval of a quantity that was measured once.
_INTERVAL_OF = {"accuracy": "accuracy", "member_accuracy": "member_accuracy", "ensemble_error": "nll"}
_NUMBERS: Mapping[str, Callable[[Record], float]] = {
    "accuracy": itemgetter("accuracy"),
    "mean member": itemgetter("member_accuracy"),
    "ERR": itemgetter("ensemble_error"),
    "diversity": itemgetter("diversity"),
}
_VERDICTS = {"reproduced": True, "unresolved": None, "not reproduced": False}


def estimate(records: Sequence[Record], name: str) -> Estimate:
    """Return a number of `joint_numbers` over runs; of one run, with its error over test images."""
    none = [None, None, None]
    return Estimate.of(
        [[float(record[name]), *record["test"].get(_INTERVAL_OF.get(name), none)[1:]] for record in records]
    )


def image_claims(families: Mapping[str, Family], gaps: Mapping[str, Family], dropped: Family) -> list[Claim]:
    """Judge the document's statements about images, as far as there are arms for them.

    Args:
        families: For each architecture, size and average, beta to the records of its runs.
        gaps: The same for arms that were trained to the end.
        dropped: Share of dropped members to the records of joint training with it.
    """
    ends, gap_ends = (
        {name: found for name, found in each.items() if {0.0, 1.0} <= set(found)} for each in (families, gaps)
    )
    small = {name: found for name, found in ends.items() if name.startswith("cnn") and len(found) > 2}
    lowest = partial(_worst, name="accuracy", larger_is_worse=False)
    highest = partial(_worst, name="ensemble_error", larger_is_worse=True)
    statements: tuple[tuple[str, Mapping[str, Family], Callable[[Family], Case]], ...] = (
        ("Joint training has the lowest test accuracy of all beta.", ends, lowest),
        ("It has the highest ensemble error, the very quantity that it minimises.", ends, highest),
        ("Its members are far worse than independent ones.", ends, _members),
        ("Diversity is larger in joint than in independent training.", ends, _diversity),
        ("Joint training has the larger generalisation gap.", gap_ends, _gap),
        ("The small network has its lowest test error between 0 and 1.", small, _between),
    )
    return [
        *(
            _over_cases(statement, {name: judge(found) for name, found in cases.items()})
            for statement, cases, judge in statements
            if cases
        ),
        *_dropout_claims(dropped),
    ]


def _over_cases(statement: str, cases: Mapping[str, Case]) -> Claim:
    measured = "; ".join(f"{name}: {text}" for name, (text, _) in cases.items())
    parts = {word: [name for name, (_, own) in cases.items() if own is holds] for word, holds in _VERDICTS.items()}
    parts = {word: names for word, names in parts.items() if names}
    if len(parts) == 1:
        return Claim(statement, measured, *parts)
    return Claim(statement, measured, "; ".join(f"{word} for {', '.join(names)}" for word, names in parts.items()))


def _worst(family: Family, name: str, *, larger_is_worse: bool) -> Case:
    """Compare beta = 1 with the worst of the others."""
    joint = estimate(family[1.0], name)
    others = {beta: estimate(records, name) for beta, records in family.items() if beta != 1.0}
    choose = max if larger_is_worse else min
    beta = choose(others, key=lambda each: others[each].value)
    above = joint.above(others[beta])
    text = (
        f"{joint.value:.4f} at beta = 1, next worst {others[beta].value:.4f} at {beta:g}, {others[0.0].value:.4f} at 0"
    )
    return text, None if above is None else above == larger_is_worse


def _members(family: Family) -> Case:
    independent, joint = (estimate(family[beta], "member_accuracy") for beta in (0.0, 1.0))
    return f"mean accuracy {independent.value:.4f} at 0, {joint.value:.4f} at 1", independent.above(joint)


def _diversity(family: Family) -> Case:
    independent, joint = (estimate(family[beta], "diversity") for beta in (0.0, 1.0))
    times = joint.value / max(independent.value, 1e-12)
    text = f"{independent.value:.4f} at 0, {joint.value:.4f} at 1 ({times:.1f} times)"
    return text, joint.above(independent)


def _gap(family: Family) -> Case:
    independent, joint = (Estimate.of([[final_gap(record)] for record in family[beta]]) for beta in (0.0, 1.0))
    text = f"{independent.value:.4f} nats at 0, {joint.value:.4f} at 1 over the last tenth of epochs"
    return text, joint.above(independent)


def _between(family: Family) -> Case:
    errors = {beta: estimate(records, "ensemble_error").value for beta, records in family.items()}
    best = min(errors, key=lambda beta: errors[beta])
    return f"lowest {errors[best]:.4f} at {best:g}, {errors[0.0]:.4f} at 0", best not in (0.0, 1.0)


def _dropout_claims(dropped: Family) -> list[Claim]:
    if 0.0 not in dropped or len(dropped) < 2:
        return []
    shares = sorted(dropped)
    diversity = {share: estimate(dropped[share], "diversity").value for share in shares}
    accuracy = {share: estimate(dropped[share], "accuracy") for share in shares}
    best = max(shares[1:], key=lambda share: accuracy[share].value)
    gains = accuracy[best].above(accuracy[0.0])
    return [
        Claim.checked(
            "Leaving out members of every batch lowers the diversity of joint training.",
            "; ".join(f"{diversity[share]:.4f} at p = {share:g}" for share in shares),
            diversity[shares[-1]] < diversity[0.0],
        ),
        Claim(
            "It does not make the ensemble better.",
            "; ".join(f"accuracy {accuracy[share].value:.4f} at p = {share:g}" for share in shares),
            "not reproduced" if gains else "reproduced",
        ),
    ]


def gap_curves(record: Record) -> dict[str, list[float]]:
    """Return errors of a gap arm by epoch."""
    clean, history = record["training"]["clean"], record["training"]["history"]
    train, test = clean["ensemble_error"], history["ensemble_loss"]
    curves = {"gap": [after - before for before, after in zip(train, test, strict=True)], "training error": train}
    curves |= {"test error": test, "members on training images": clean.get("member_error", [])}
    curves["members on test images"] = history.get("validation_loss", [])
    return {name: values for name, values in curves.items() if values}


def final_gap(record: Record) -> float:
    """Return test minus training error of a gap arm, averaged over the last tenth of its epochs."""
    gap = gap_curves(record)["gap"]
    return fmean(gap[-max(1, len(gap) // 10) :])


def page(work: Work, found: Arms) -> Page:
    """Return what the study makes of its records."""
    sweeps, gaps, dropped = _sorted_out(found)
    drawings = [
        sweep(
            f"collusion_{file_name(name).lower()}",
            name,
            [("", beta, record) for beta, runs in records.items() for record in runs],
            _NUMBERS,
            "β",
            caption=f"As the document's figure {_FIGURES.get(name, '15')}.",
            xticks=sorted(records),
        )
        for name, records in sweeps.items()
        if len(records) > 1
    ]
    for name, records in gaps.items():
        points = [
            (f"β = {beta:g}", float(epoch), {key: values[epoch - 1] for key, values in curves.items()})
            for beta, runs in records.items()
            for curves in map(gap_curves, runs)
            for epoch in range(1, len(curves["gap"]) + 1)
        ]
        title, columns = name.replace("gap", "Generalisation gap,", 1), {key: itemgetter(key) for key in points[0][2]}
        caption = "As the document's figures 5 and 10 to 12: in nats, training images looked at as test images after every epoch."
        drawings.append(sweep(f"collusion_{file_name(name).lower()}", title, points, columns, "epoch", caption=caption))
    if len(dropped) > 1:
        points = [("", share, record) for share, runs in dropped.items() for record in runs]
        title = "Leaving members out of training batches"
        caption = "As the document's figure 18: β = 1; int(p M) members, drawn anew, are left out of every batch."
        drawings.append(sweep("collusion_dropout", title, points, _NUMBERS, "share left out", caption=caption))
    return Page(
        image_claims(sweeps, gaps, dropped),
        _JUDGED,
        lambda outputs: [*(each.section(outputs) for each in drawings), Section("All arms", *_tables(found))],
        (
            ("arm", *_NUMBERS),
            [[name, *(read(record) for read in _NUMBERS.values())] for name, record in found.done.items()],
        ),
        _remarks(found, work),
    )


def _sorted_out(found: Arms) -> tuple[dict[str, Family], dict[str, Family], Family]:
    """Return sweeps over beta, gap arms, and joint training by share of dropped members."""
    sweeps: dict[str, dict[float, list[Record]]] = {}
    gaps: dict[str, dict[float, list[Record]]] = {}
    dropped: dict[float, list[Record]] = {}
    with_dropout = {r["family"] for r in found.done.values() if r["setting"]["member_dropout"] > 0.0}
    for record in found.done.values():
        setting = JointSetting(**record["setting"])
        if setting.member_dropout == 0.0:
            kind = gaps if setting.experiment == "gap" else sweeps
            kind.setdefault(setting.family, {}).setdefault(setting.beta, []).append(record)
        if setting.family in with_dropout and setting.beta == 1.0:
            dropped.setdefault(setting.member_dropout, []).append(record)
    return dict(sweeps), dict(gaps), dropped


def _tables(found: Arms) -> list[Table]:
    columns: dict[str, Callable[[Record], object]] = {
        "accuracy": lambda record: with_interval(record["test"]["accuracy"]),
        "mean member": lambda record: with_interval(record["test"].get("member_accuracy")),
        "ERR": itemgetter("ensemble_error"),
        "member error": itemgetter("member_error"),
        "diversity": itemgetter("diversity"),
        "ECE": lambda record: with_interval(record["test"]["ece"]),
        "diagnosis": lambda record: record.get("diagnosis", {}).get("verdict"),
        "epochs": lambda record: record["training"]["epochs"],
        "s": lambda record: round(record["training"]["seconds"], 1),
    }
    caption = (
        "Test images; intervals are 95 % over images. Accuracy and ECE are of averaged probabilities, ERR and diversity of what each "
        "arm averages; the diagnosis is that of the test outputs alone."
    )
    scored = {score: auroc_columns(found.done, score) for score in ("bma", "mutual_information")}
    return [
        arms_table(found.done, columns, caption),
        *(arms_table(found.done, own, f"AUROC of {score} for unknown images") for score, own in scored.items() if own),
    ]


def _remarks(found: Arms, work: Work) -> list[str]:
    """Say in what the run differs from the document's."""
    settings = [JointSetting(**record["setting"]) for record in found.done.values()]
    runs = Counter((each.family, each.beta, each.member_dropout) for each in settings)
    repeats: dict[str, int] = {}
    for (family, _, dropped), count in runs.items():
        name = f"{family} with dropped members" if dropped else family
        repeats[name] = min(repeats.get(name, count), count)
    length = f"Shorter than the document's {EPOCHS} epochs ({GAP_EPOCHS} for gaps); rate drops stand at the same shares of the run."
    shorter = work.quick or work.epochs not in (None, EPOCHS)
    return [
        "Learning rates: the document averages its loss over members and takes 0.1; here losses are summed, so 0.1 divided by the "
        "number of members, with the decay of weights multiplied by it, takes the same steps.",
        *([length] if shorter else []),
        "Runs: the document has six of its main figures, five of dropped members and three of the others; here "
        + ", ".join(f"{count} of {name}" for name, count in repeats.items())
        + ".",
    ]


run = ImageStudy(
    "Learner collusion on images",
    "Members are trained between each for itself (beta = 0) and all as one model (beta = 1). What does that do to the ensemble, "
    "to its members, and to the difference between training and test error?",
    arms_of,
    page,
).run
