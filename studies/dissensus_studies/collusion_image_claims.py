"""Records of `collusion-images` in, what the document says beside what they show out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from dissensus_studies.arm_log import Record
from dissensus_studies.claims import Claim
from dissensus_studies.collusion_image_figures import final_gap
from dissensus_studies.repeats import Summary

# Which entry of a record's "test" has the interval of a quantity that was measured once.
_INTERVAL_OF = {"accuracy": "accuracy", "member_accuracy": "member_accuracy", "ensemble_error": "nll"}


@dataclass(frozen=True)
class Estimate:
    """A mean over runs and its standard error; of one run, the error over test images."""

    value: float
    error: float

    @classmethod
    def of(cls, records: Sequence[Record], name: str) -> "Estimate":
        """Take a number of `joint_numbers` from all runs of an arm."""
        values = Summary(tuple(float(record[name]) for record in records))
        if len(records) > 1:
            return cls(values.mean, values.error)
        entry = records[0]["test"].get(_INTERVAL_OF.get(name, ""), [None, None, None])
        low, high = entry[1], entry[2]
        return cls(values.mean, float("nan") if low is None or high is None else (high - low) / (2 * 1.96))

    def above(self, other: "Estimate") -> bool | None:
        """Whether this is larger; None where the difference is within two standard errors, if these are known."""
        difference = self.value - other.value
        spread = 2 * sqrt(self.error**2 + other.error**2)
        return None if abs(difference) <= spread else difference > 0


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
    gap_ends = {name: found for name, found in gaps.items() if {0.0, 1.0} <= set(found)}
    claims = [
        _over_cases(
            "Joint training has the lowest test accuracy of all beta.",
            {name: _worst(found, "accuracy", larger_is_worse=False) for name, found in ends.items()},
        ),
        _over_cases(
            "It has the highest ensemble error, the very quantity that it minimises.",
            {name: _worst(found, "ensemble_error", larger_is_worse=True) for name, found in ends.items()},
        ),
        _over_cases(
            "Its members are far worse than independent ones.",
            {name: _members(found) for name, found in ends.items()},
        ),
        _over_cases(
            "Diversity is larger in joint than in independent training.",
            {name: _diversity(found) for name, found in ends.items()},
        ),
        _over_cases(
            "Joint training has the larger generalisation gap.",
            {name: _gap(found) for name, found in gap_ends.items()},
        ),
        _over_cases(
            "The small network has its lowest test error between 0 and 1.",
            {
                name: _between(found)
                for name, found in ends.items()
                if name.startswith("cnn") and len(found) > 2
            },
        ),
        *_dropout_claims(dropped),
    ]
    return [claim for claim in claims if claim.measured]


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
    joint = Estimate.of(family[1.0], name)
    others = {beta: Estimate.of(records, name) for beta, records in family.items() if beta != 1.0}
    choose = max if larger_is_worse else min
    beta = choose(others, key=lambda each: others[each].value)
    above = joint.above(others[beta])
    text = f"{joint.value:.4f} at beta = 1, next worst {others[beta].value:.4f} at {beta:g}, {others[0.0].value:.4f} at 0"
    return text, None if above is None else above == larger_is_worse


def _members(family: Family) -> Case:
    independent, joint = (Estimate.of(family[beta], "member_accuracy") for beta in (0.0, 1.0))
    return f"mean accuracy {independent.value:.4f} at 0, {joint.value:.4f} at 1", independent.above(joint)


def _diversity(family: Family) -> Case:
    independent, joint = (Estimate.of(family[beta], "diversity") for beta in (0.0, 1.0))
    times = joint.value / max(independent.value, 1e-12)
    return f"{independent.value:.4f} at 0, {joint.value:.4f} at 1 ({times:.1f} times)", joint.above(
        independent
    )


def _gap(family: Family) -> Case:
    gaps = (Summary(tuple(map(final_gap, family[beta]))) for beta in (0.0, 1.0))
    independent, joint = (Estimate(gap.mean, gap.error) for gap in gaps)
    text = f"{independent.value:.4f} nats at 0, {joint.value:.4f} at 1 over the last tenth of epochs"
    return text, joint.above(independent)


def _between(family: Family) -> Case:
    errors = {beta: Estimate.of(records, "ensemble_error").value for beta, records in family.items()}
    best = min(errors, key=lambda beta: errors[beta])
    return f"lowest {errors[best]:.4f} at {best:g}, {errors[0.0]:.4f} at 0", best not in (0.0, 1.0)


def _dropout_claims(dropped: Mapping[float, Sequence[Record]]) -> list[Claim]:
    if 0.0 not in dropped or len(dropped) < 2:
        return []
    shares = sorted(dropped)
    diversity = {share: Estimate.of(dropped[share], "diversity").value for share in shares}
    accuracy = {share: Estimate.of(dropped[share], "accuracy") for share in shares}
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
