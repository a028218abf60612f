"""What a document says, beside what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass

from dissensus.html import Table
from dissensus_studies.harness.statistics import Comparison


@dataclass(frozen=True)
class Claim:
    """A statement of a document and how it fared."""

    statement: str  # The document's claim, in our words.
    measured: str  # The numbers.
    verdict: str  # `"reproduced"`, `"not reproduced"`, `"within noise"`, `"unresolved"`, or which case it holds for.

    @classmethod
    def compared(cls, statement: str, expected: str, cases: Mapping[str, Comparison]) -> "Claim":
        """Judge a claim that a quantity is `"lower"` or `"higher"`, in several cases.

        Example:
            >>> cases = {"A": Comparison.of([2.0] * 9, [1.0] * 9), "B": Comparison.of([2.0] * 9, [3.0] * 9)}
            >>> Claim.compared("it falls", "lower", cases).verdict
            'reproduced for A only'
        """
        measured = "; ".join(f"{name} {compared}" for name, compared in cases.items())
        holds = {
            name: None if compared.verdict == "unresolved" else compared.verdict == expected
            for name, compared in cases.items()
        }
        return cls(statement, measured, over_cases(holds))

    @classmethod
    def checked(cls, statement: str, measured: str, holds: bool, *, noise: bool = False) -> "Claim":
        """Judge a claim by a condition; where what it looks at differs by chance alone, there is nothing to judge."""
        return cls(statement, measured, "within noise" if noise else "reproduced" if holds else "not reproduced")

    def as_json(self) -> dict[str, str]:
        """Return everything, for a results file."""
        return {"statement": self.statement, "measured": self.measured, "verdict": self.verdict}


def over_cases(holds: Mapping[str, bool | None]) -> str:
    """Return the verdict on a claim that holds in some cases, not in others, or (None) cannot be told.

    Example:
        >>> over_cases({"A": True, "B": None}), over_cases({"A": False, "B": None}), over_cases({"A": None})
        ('reproduced for A only', 'not reproduced', 'unresolved')
    """
    held = [name for name, yes in holds.items() if yes]
    if len(held) == len(holds):
        return "reproduced"
    if held:
        return f"reproduced for {', '.join(held)} only"
    return "unresolved" if all(yes is None for yes in holds.values()) else "not reproduced"


def claims_table(claims: list[Claim], caption: str = "") -> Table:
    """Return claims as a table of a page."""
    rows = [(claim.statement, claim.measured, claim.verdict) for claim in claims]
    return Table(("the document says", "measured", "verdict"), rows, caption)
