"""The rule by which members are said to collude, on numbers that were measured.

It stands below training because `fit` warns by it; `dissensus.diagnostics` explains it.
"""

from dataclasses import dataclass
from math import inf, isfinite, nan, sqrt

# Where the verdict's limits come from is told, with the numbers, in docs/diagnosis.md.
LEAST_CANCELLATION = 0.1
STANDARD_ERRORS = 3.0
LEAST_BIAS_SHARE = 0.1
LEAST_RATIO = 0.5
LEAST_OF_TRIVIAL = 0.1
LARGEST_BIAS_LEFT = 1.0
LARGEST_BIAS_ALONE = 0.8
LEAST_SKILL = 0.2
USELESS = 0.5
LEAST_TRAINING_RATIO = 3.0
LEAST_CLASS_DIVERSITY = 0.04
OF_INDEPENDENT = 0.9
STRONG = 2 / 3
# Fewer examples than this give every member an offset by chance.
EXAMPLES_FOR_OFFSETS = 10

# Relative size of a squared error that is the rounding of float32.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Measures:
    """What the verdict looks at, of one set.

    Attributes:
        num_members: Number of members.
        num_examples: Number of examples.
        member_errors: Mean error of each member.
        member_error: Their weighted average, ERRbar.
        ensemble_error: Error of the averaged prediction, ERR.
        diversity: ERRbar - ERR.
        trivial_error: Error of the best constant prediction; None where the loss has no known one.
        bias_share: Share of the diversity that goes when each member's constant offset is taken away, from 0 to 1.
        bias_left: Square of the ensemble's mean error over what members with independent offsets would leave of theirs:
            near 0 offsets cancel, 1 they do not.
        bias_alone: Largest share of one member in the members' squared mean errors; near 1 a single member is off.
        cancellation: How much smaller the squared error of the average is than if members erred independently: 1 members
            cancel each other, 0 independent, negative they err alike. NaN where predictions and targets have no distance.
        cancellation_error: Its standard error, from the examples.
        member_accuracies: Of each member, for classes; else empty.
        ensemble_accuracy: Of the averaged prediction, for classes.
        chance: Accuracy of always naming the commonest class.
        kept_agreement: For classes, the best member's agreement with the labels beyond guessing (Cohen's kappa) over the
            ensemble's; NaN where the ensemble has none.
        class_share: Share of the squared distances between members' probabilities that is the same for all examples of a class,
            less what chance gives: members that treat whole classes differently. NaN without classes.
    """

    num_members: int
    num_examples: int
    member_errors: tuple[float, ...]
    member_error: float
    ensemble_error: float
    diversity: float
    trivial_error: float | None
    bias_share: float
    bias_left: float
    bias_alone: float
    cancellation: float
    cancellation_error: float
    member_accuracies: tuple[float, ...] = ()
    ensemble_accuracy: float | None = None
    chance: float | None = None
    kept_agreement: float = nan
    class_share: float = nan

    @property
    def diversity_ratio(self) -> float:
        """Diversity over ensemble error; infinite where only the latter is zero, up to rounding."""
        rounding = _ROUNDING * max(abs(self.member_error), abs(self.trivial_error or 0.0))
        above, below = (
            0.0 if abs(value) <= rounding else value for value in (self.diversity, self.ensemble_error)
        )
        return ratio(above, below)

    @property
    def skill(self) -> float | None:
        """Share of the trivial error that the ensemble explains; for classes, of the accuracy above chance."""
        if self.ensemble_accuracy is not None and self.chance is not None:
            return ratio(self.ensemble_accuracy - self.chance, 1 - self.chance)
        return None if self.trivial_error is None else 1 - ratio(self.ensemble_error, self.trivial_error)

    @property
    def kept_best(self) -> float | None:
        """Share of the ensemble's skill that its best member has alone; None where the ensemble has none."""
        if self.ensemble_accuracy is not None:
            return self._kept(max(self.member_accuracies))
        return self._kept(min(self.member_errors))

    @property
    def kept_mean(self) -> float | None:
        """Share of the ensemble's skill that its mean member has alone; None where the ensemble has none."""
        if self.ensemble_accuracy is not None:
            return self._kept(sum(self.member_accuracies) / len(self.member_accuracies))
        return self._kept(self.member_error)

    def _kept(self, value: float) -> float | None:
        """Place of an accuracy, or an error, between that of a constant, 0, and that of the ensemble, 1."""
        if self.skill is None or not self.skill > 0:
            return None
        if self.ensemble_accuracy is not None and self.chance is not None:
            return (value - self.chance) / (self.ensemble_accuracy - self.chance)
        assert self.trivial_error is not None
        return (self.trivial_error - value) / (self.trivial_error - self.ensemble_error)

    @property
    def members_useless(self) -> bool:
        """Whether the mean member keeps less than half of an ensemble's skill that is worth having."""
        return (
            self.skill is not None
            and self.skill >= LEAST_SKILL
            and self.kept_mean is not None
            and self.kept_mean < USELESS
        )

    @property
    def diversity_is_large(self) -> bool:
        """Whether diversity matters beside the task, and beside the ensemble's error or its skill."""
        if self.trivial_error is None:
            return self.diversity_ratio > LEAST_RATIO
        explained = self.trivial_error - self.ensemble_error
        beside_skill = (
            explained > LEAST_OF_TRIVIAL * self.trivial_error and self.diversity > LEAST_RATIO * explained
        )
        return self._diversity_matters and (self.diversity_ratio > LEAST_RATIO or beside_skill)

    def signs(self, *, trained_on: bool = False) -> tuple[str, ...]:
        """Return the signs of collusion that are there; none means that there is no reason to suspect it.

        Args:
            trained_on: Whether members were trained on these examples, all of them on all.

        Returns:
            Among "cancelling" (errors cancel more than independent ones could), "shifted" (members sit beside the
            ensemble by constants that cancel), "dependent" (the best member alone keeps less of the ensemble's accuracy
            than independent members would); and of training data "unfitted" (the ensemble fits it, its members do not) and
            "specialised" (members give up whole classes to each other).
        """
        found = {
            "cancelling": self._cancelling,
            "shifted": self._shifted,
            "dependent": self._dependent,
            "unfitted": trained_on and self._unfitted,
            "specialised": trained_on and self._specialised,
        }
        return tuple(name for name, there in found.items() if there and self.num_members > 1)

    @property
    def suspicious(self) -> bool:
        """Whether members that are good alone give up whole classes: what joint training leaves on held-out data.

        It is no proof. Networks that a large rate has broken look the same there, but not on their training data. Weak members,
        which cannot know all classes, are left out.
        """
        return self._specialised and self.kept_mean is not None and self.kept_mean >= STRONG

    @property
    def _cancelling(self) -> bool:
        return (
            self.cancellation > LEAST_CANCELLATION
            and self.cancellation > STANDARD_ERRORS * self.cancellation_error
        )

    @property
    def _shifted(self) -> bool:
        least = max(LEAST_BIAS_SHARE, EXAMPLES_FOR_OFFSETS / self.num_examples)
        # One member that is off, or offsets that the ensemble inherits, are faults but no collusion. NaN: not known.
        faulty = self.bias_left >= LARGEST_BIAS_LEFT or self.bias_alone > LARGEST_BIAS_ALONE
        return self.bias_share > least and self.diversity_is_large and not faulty

    @property
    def _dependent(self) -> bool:
        if self.ensemble_accuracy is None or self.skill is None:
            return False
        # Averaging M independent answers raises signal over noise by sqrt(M), and accuracy above guessing by no more.
        # Members that have hardly begun to learn give nearly the same answer, and their best guess says little.
        return (
            self.skill >= LEAST_SKILL
            and self.kept_agreement < OF_INDEPENDENT / sqrt(self.num_members)
            and self._diversity_matters
        )

    @property
    def _unfitted(self) -> bool:
        return (
            self.ensemble_accuracy is not None
            and self.diversity_ratio > LEAST_TRAINING_RATIO
            and self._diversity_matters
        )

    @property
    def _specialised(self) -> bool:
        if self.trivial_error is None or self.num_members < 2:
            return False
        by_class = self.class_share * self.diversity
        return self.diversity_ratio > LEAST_RATIO and by_class > LEAST_CLASS_DIVERSITY * self.trivial_error

    @property
    def _diversity_matters(self) -> bool:
        return self.trivial_error is None or self.diversity > LEAST_OF_TRIVIAL * self.trivial_error


def ratio(above: float, below: float) -> float:
    """Return a quotient; of zero by zero zero, and infinity where only the divisor is zero."""
    if below == 0 or not isfinite(below):
        return 0.0 if above == 0 else inf if above > 0 else -inf
    return above / below
