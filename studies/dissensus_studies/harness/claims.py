"""What a document says, beside what was measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dissensus.html import Table
from dissensus_studies.harness.statistics import Comparison

# What was found in one case: in words, and whether a claim holds there; None where that cannot be told.
Case = tuple[str, bool | None]


@dataclass(frozen=True)
class Claim:
    """A statement of a document and how it fared."""

    statement: str  # The document's claim, in our words.
    measured: str  # The numbers.
    verdict: str  # `"reproduced"`, `"not reproduced"`, `"within noise"`, `"unresolved"`, or which case it holds for.

    @classmethod
    def over(cls, statement: str, cases: Mapping[str, Case]) -> "Claim":
        """Judge a claim by what was found in each case."""
        measured = "; ".join(f"{name}: {text}" for name, (text, _) in cases.items())
        return cls(statement, measured, over_cases({name: holds for name, (_, holds) in cases.items()}))

    @classmethod
    def compared(cls, statement: str, expected: str, cases: Mapping[str, Comparison]) -> "Claim":
        """Judge a claim that a quantity is `"lower"` or `"higher"`, in several cases.

        Example:
            >>> cases = {"A": Comparison.of([2.0] * 9, [1.0] * 9), "B": Comparison.of([2.0] * 9, [3.0] * 9)}
            >>> Claim.compared("it falls", "lower", cases).verdict
            'reproduced for A; not reproduced for B'
        """
        return cls.over(statement, {name: (str(each), each.tells(expected)) for name, each in cases.items()})

    @classmethod
    def checked(cls, statement: str, measured: str, holds: bool, *, noise: bool = False) -> "Claim":
        """Judge a claim by a condition; where what it looks at differs by chance alone, there is nothing to judge."""
        return cls(statement, measured, "within noise" if noise else "reproduced" if holds else "not reproduced")


_WORDS = {True: "reproduced", None: "unresolved", False: "not reproduced"}


def over_cases(holds: Mapping[str, bool | None]) -> str:
    """Return the verdict on a claim that holds in some cases, not in others, or (None) cannot be told.

    Example:
        >>> over_cases({"A": True, "B": None}), over_cases({"A": False, "B": False}), over_cases({"A": None})
        ('reproduced for A; unresolved for B', 'not reproduced', 'unresolved')
    """
    cases = {word: [name for name, own in holds.items() if own == each] for each, word in _WORDS.items()}
    found = {word: names for word, names in cases.items() if names}
    return "; ".join(found if len(found) == 1 else (f"{word} for {', '.join(own)}" for word, own in found.items()))


def verdict_over(holds: Iterable[bool | None], most: bool = False) -> str:
    """Return a verdict as the record has it: reproduced is what holds in every case, or where no more is said in most of them.

    Example:
        >>> verdict_over([True, True, None]), verdict_over([True, True, None], most=True), verdict_over([True, False])
        ('within noise', 'reproduced', 'not reproduced')
    """
    found = list(holds)
    if most:
        return next((_WORDS[each] for each in (True, False) if 2 * found.count(each) > len(found)), "within noise")
    return "not reproduced" if False in found else "within noise" if None in found else "reproduced"


def in_one_word(verdict: str) -> str:
    """Return a verdict as the record has it: reproduced is what holds in every case.

    Example:
        >>> in_one_word("reproduced for A; unresolved for B"), in_one_word("reproduced for A; not reproduced for B")
        ('within noise', 'not reproduced')
    """
    return next(
        (v for v in ("not reproduced", "within noise") if v in verdict.replace("unresolved", "within noise")),
        "reproduced",
    )


def claims_table(claims: list[Claim], caption: str = "") -> Table:
    """Return claims as a table of a page."""
    rows = [(claim.statement, claim.measured, claim.verdict) for claim in claims]
    return Table(("the document says", "measured", "verdict"), rows, caption)
