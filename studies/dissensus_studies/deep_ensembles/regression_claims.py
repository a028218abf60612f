"""The practical's discussion of its regression, claim by claim, judged by the measurements."""

from collections.abc import Mapping

from dissensus_studies.deep_ensembles.regression_arms import ARMS, COVERED, PRACTICAL_MEMBERS, Arm, Measures
from dissensus_studies.harness.claims import Claim
from dissensus_studies.harness.statistics import Comparison

Results = Mapping[tuple[Arm, int], Measures]

# What adversarial training does to a single net: statement, direction, quantity.
_ADVERSARIAL = (
    ("Adversarial training makes a single net more robust (NLL at attacked inputs falls).", "lower", "nll_attacked"),
    ("It keeps a single net from fitting noise (NLL on fresh data minus NLL on its own falls).", "lower", "overfit"),
    ("It improves a single net's predictions (NLL on fresh data falls).", "lower", "nll"),
    ("It makes a single net less sure just beside the data (mean sd over 4 < |x| < 4.5 rises).", "higher", "sd_near"),
    ("It makes a single net less often too sure there (coverage over 4 < |x| < 4.5 rises).", "higher", "coverage_near"),
)
# What an ensemble of the practical's size does against a single net.
_ENSEMBLE = (
    ("is less often too sure where there are no data (coverage over 5 < |x| < 6 rises)", "higher", "coverage_outside"),
    ("improves the NLL on fresh data (Jensen: it cannot be worse than its members' mean)", "lower", "nll"),
    ("improves the error of the mean (Jensen again)", "lower", "rmse"),
)


def regression_claims(results: Results) -> list[Claim]:
    """Judge every claim.

    Args:
        results: Measurements by arm and number of members.
    """
    members, most = PRACTICAL_MEMBERS, max(count for _, count in results)

    def mean(name: str, count: int) -> dict[str, float]:
        return {arm.name: results[arm, count][name].mean for arm in ARMS}

    def with_members(name: str, few: int, many: int) -> dict[str, Comparison]:
        return {
            arm.name: Comparison.of(results[arm, few][name].values, results[arm, many][name].values) for arm in ARMS
        }

    def with_adversarial(name: str) -> dict[str, Comparison]:
        return {
            family.capitalize(): Comparison.of(
                *(results[Arm(family, adversarial), 1][name].values for adversarial in (False, True))
            )
            for family in sorted({arm.family for arm in ARMS})
        }

    apart = {
        arm.name: Comparison.of(
            *(results[arm, members][f"knowledge_{place}"].values for place in ("inside", "outside"))
        )
        for arm in ARMS
    }
    beside, inside = mean("coverage_near", 1), mean("coverage_inside", members)
    first, middle, last = (mean("nll", count) for count in (1, members, most))
    gained = {name: (first[name] - middle[name]) / (first[name] - last[name]) for name in first}
    return [
        *(Claim.compared(statement, expected, with_adversarial(name)) for statement, expected, name in _ADVERSARIAL),
        Claim.compared(
            f"Members that agree on the data disagree where there are none (sd of {members} members' means: "
            "5 < |x| < 6 against |x| < 4).",
            "higher",
            apart,
        ),
        Claim.checked(
            "A single net is too sure just beside the data.",
            f"Its {COVERED:.0%} intervals over 4 < |x| < 4.5 hold: {_percentages(beside)}.",
            max(beside.values()) < COVERED,
        ),
        *(
            Claim.compared(f"An ensemble of {members} {statement}.", expected, with_members(name, 1, members))
            for statement, expected, name in _ENSEMBLE
        ),
        Claim.compared(
            f"More members predict better (NLL of {most} against {members}).",
            "lower",
            with_members("nll", members, most),
        ),
        Claim.checked(
            "Returns diminish: a few members give most of the gain.",
            f"Share of the NLL gained from 1 to {most} members that {members} members give: {_percentages(gained)}.",
            min(gained.values()) > 0.5,
        ),
        Claim.checked(
            "About five members are enough for well-calibrated uncertainty.",
            f"The mixture's {COVERED:.0%} intervals with {members} members hold, inside: {_percentages(inside)}.",
            max(abs(value - COVERED) for value in inside.values()) < 0.03,
        ),
    ]


def _percentages(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1%}" for name, value in values.items())
