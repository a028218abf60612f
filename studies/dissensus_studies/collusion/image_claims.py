"""Records of `collusion-images` in, what the document says beside what they show out."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dissensus_studies.collusion.image_figures import final_gap
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.claims import Claim
from dissensus_studies.harness.statistics import Estimate

# Which entry of a record's "test" has the interval of a quantity that was measured once.
_INTERVAL_OF = {"accuracy": "accuracy", "member_accuracy": "member_accuracy", "ensemble_error": "nll"}


def estimate(records: Sequence[Record], name: str) -> Estimate:
    """Return a number of `joint_numbers` over runs; of one run, with its error over test images."""
    none = [None, None, None]
    return Estimate.of(
        [[float(record[name]), *record["test"].get(_INTERVAL_OF.get(name), none)[1:]] for record in records]
    )


Family = Mapping[float, Sequence[Record]]
Case = tuple[str, bool | None]
_VERDICTS = {"reproduced": True, "unresolved": None, "not reproduced": False}


def image_claims(
    families: Mapping[str, Family], gaps: Mapping[str, Family], dropped: Mapping[float, Sequence[Record]]
) -> list[Claim]:
    """Judge the document's statements about images, as far as there are arms for them.

    Args:
        families: For each architecture, size and average, beta to the records of its runs.
        gaps: The same for arms that were trained to the end.
        dropped: Share of dropped members to the records of joint training with it.
    """
    ends = {name: found for name, found in families.items() if {0.0, 1.0} <= set(found)}
    small = {name: found for name, found in ends.items() if name.startswith("cnn") and len(found) > 2}
    gap_ends = {name: found for name, found in gaps.items() if {0.0, 1.0} <= set(found)}
    statements: tuple[tuple[str, Mapping[str, Family], Callable[[Family], Case]], ...] = (
        (
            "Joint training has the lowest test accuracy of all beta.",
            ends,
            partial(_worst, name="accuracy", larger_is_worse=False),
        ),
        (
            "It has the highest ensemble error, the very quantity that it minimises.",
            ends,
            partial(_worst, name="ensemble_error", larger_is_worse=True),
        ),
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
    found: dict[bool | None, list[str]] = {}
    for name, (_, holds) in cases.items():
        found.setdefault(holds, []).append(name)
    parts = {word: found[holds] for word, holds in _VERDICTS.items() if holds in found}
    if len(parts) == 1:
        return Claim(statement, measured, *parts)
    verdict = "; ".join(f"{word} for {', '.join(names)}" for word, names in parts.items())
    return Claim(statement, measured, verdict)


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


def _dropout_claims(dropped: Mapping[float, Sequence[Record]]) -> list[Claim]:
    if 0.0 not in dropped or len(dropped) < 2:
        return []
    shares = sorted(dropped)
    diversity = {share: estimate(dropped[share], "diversity").value for share in shares}
    accuracy = {share: estimate(dropped[share], "accuracy") for share in shares}
    most = shares[-1]
    best = max(shares[1:], key=lambda share: accuracy[share].value)
    gains = accuracy[best].above(accuracy[0.0])
    return [
        Claim.checked(
            "Leaving out members of every batch lowers the diversity of joint training.",
            "; ".join(f"{diversity[share]:.4f} at p = {share:g}" for share in shares),
            diversity[most] < diversity[0.0],
        ),
        Claim(
            "It does not make the ensemble better.",
            "; ".join(f"accuracy {accuracy[share].value:.4f} at p = {share:g}" for share in shares),
            "not reproduced" if gains else "reproduced",
        ),
    ]
