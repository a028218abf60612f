"""The practical's discussion of its regression, claim by claim, judged by the measurements."""

from collections.abc import Mapping

from dissensus_studies.claims import Claim
from dissensus_studies.regression_arms import ARMS, COVERED, PRACTICAL_MEMBERS, Arm, Measures
from dissensus_studies.repeats import Comparison

Results = Mapping[tuple[Arm, int], Measures]


def regression_claims(results: Results) -> list[Claim]:
    """Judge every claim.

    Args:
        results: Measurements by arm and number of members.
    """
    return [*_adversarial_claims(results), *_ensemble_claims(results), *_count_claims(results)]


def _adversarial_claims(results: Results) -> list[Claim]:
    return [
        Claim.compared(
            "Adversarial training makes a single net more robust (NLL at attacked inputs falls).",
            "lower",
            _with_adversarial(results, "nll_attacked"),
        ),
        Claim.compared(
            "It keeps a single net from fitting noise (NLL on fresh data minus NLL on its own falls).",
            "lower",
            _with_adversarial(results, "overfit"),
        ),
        Claim.compared(
            "It improves a single net's predictions (NLL on fresh data falls).",
            "lower",
            _with_adversarial(results, "nll"),
        ),
        Claim.compared(
            "It makes a single net less sure just beside the data (mean sd over 4 < |x| < 4.5 rises).",
            "higher",
            _with_adversarial(results, "sd_near"),
        ),
        Claim.compared(
            "It makes a single net less often too sure there (coverage over 4 < |x| < 4.5 rises).",
            "higher",
            _with_adversarial(results, "coverage_near"),
        ),
    ]


def _ensemble_claims(results: Results) -> list[Claim]:
    members = PRACTICAL_MEMBERS
    spread = {
        arm.name: Comparison.of(
            results[arm, members]["knowledge_inside"].values,
            results[arm, members]["knowledge_outside"].values,
        )
        for arm in ARMS
    }
    covered = {arm.name: results[arm, 1]["coverage_near"].mean for arm in ARMS}
    return [
        Claim.compared(
            f"Members that agree on the data disagree where there are none (sd of {members} members' means: "
            "5 < |x| < 6 against |x| < 4).",
            "higher",
            spread,
        ),
        Claim.checked(
            "A single net is too sure just beside the data.",
            f"Its {COVERED:.0%} intervals over 4 < |x| < 4.5 hold: {_percentages(covered)}.",
            max(covered.values()) < COVERED,
        ),
        Claim.compared(
            f"An ensemble of {members} is less often too sure where there are no data (coverage over 5 < |x| < 6 rises).",
            "higher",
            _with_members(results, "coverage_outside", 1, members),
        ),
        Claim.compared(
            f"An ensemble of {members} improves the NLL on fresh data (Jensen: it cannot be worse than its members' mean).",
            "lower",
            _with_members(results, "nll", 1, members),
        ),
        Claim.compared(
            f"An ensemble of {members} improves the error of the mean (Jensen again).",
            "lower",
            _with_members(results, "rmse", 1, members),
        ),
    ]


def _count_claims(results: Results) -> list[Claim]:
    counts = sorted({count for _, count in results})
    most = counts[-1]
    gained = {}
    for arm in ARMS:
        first, middle, last = (results[arm, m]["nll"].mean for m in (1, PRACTICAL_MEMBERS, most))
        gained[arm.name] = (first - middle) / (first - last)
    covered = {arm.name: results[arm, PRACTICAL_MEMBERS]["coverage_inside"].mean for arm in ARMS}
    return [
        Claim.compared(
            f"More members predict better (NLL of {most} against {PRACTICAL_MEMBERS}).",
            "lower",
            _with_members(results, "nll", PRACTICAL_MEMBERS, most),
        ),
        Claim.checked(
            "Returns diminish: a few members give most of the gain.",
            f"Share of the NLL gained from 1 to {most} members that {PRACTICAL_MEMBERS} members give: {_percentages(gained)}.",
            min(gained.values()) > 0.5,
        ),
        Claim.checked(
            "About five members are enough for well-calibrated uncertainty.",
            f"The mixture's {COVERED:.0%} intervals with {PRACTICAL_MEMBERS} members hold, inside: {_percentages(covered)}.",
            max(abs(value - COVERED) for value in covered.values()) < 0.03,
        ),
    ]


def _percentages(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1%}" for name, value in values.items())


def _with_adversarial(results: Results, name: str) -> dict[str, Comparison]:
    """Compare single nets of each family, adversarial against plain."""
    families = sorted({arm.family for arm in ARMS})
    return {
        family.capitalize(): Comparison.of(
            results[Arm(family, False), 1][name].values, results[Arm(family, True), 1][name].values
        )
        for family in families
    }


def _with_members(results: Results, name: str, few: int, many: int) -> dict[str, Comparison]:
    """Compare two numbers of members in each arm."""
    return {
        arm.name: Comparison.of(results[arm, few][name].values, results[arm, many][name].values)
        for arm in ARMS
    }
