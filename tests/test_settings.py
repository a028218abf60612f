"""Settings of a file: names, types, changes, and the way to TOML and back."""

import tomllib
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissensus.recipes.settings import changed, check_names, checked, to_toml

KEYS = st.text(min_size=1, max_size=8)
VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, st.dictionaries(KEYS, VALUES, min_size=1, max_size=4), max_size=3))
def test_what_is_written_is_read_back_by_the_standard_library(tables):
    assert tomllib.loads(to_toml(tables)) == tables


def test_none_and_empty_tables_are_left_out():
    assert to_toml({"a": {"b": None}, "c": {"d": 1, "e": {"f": None}}}) == "[c]\nd = 1\ne = {}\n"


def example(
    count: int,
    rate: float = 0.5,
    mode: Literal["fast", "slow"] = "fast",
    widths: Sequence[int] = (1, 2),
    pair: tuple[float, ...] = (),
    options: dict[str, Any] | None = None,
    flag: bool = False,
    hook: type | None = None,
) -> None:
    """Takes what recipes take."""


def test_defaults_are_filled_in_and_lists_become_tuples_where_tuples_are_wanted():
    assert checked(example, {"count": 3, "pair": [1, 2], "widths": [4]}, "[x]") == {
        "count": 3,
        "rate": 0.5,
        "mode": "fast",
        "widths": [4],
        "pair": (1, 2),
        "flag": False,
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, r"\[x\] needs count"),
        ({"count": 1.5}, r"count in \[x\] must be a whole number; got 1\.5"),
        ({"count": True}, "must be a whole number; got True"),
        ({"count": "3"}, "must be a whole number; got '3'"),
        ({"count": 1, "rate": "a"}, "rate in .* must be a number"),
        ({"count": 1, "mode": "quick"}, "must be 'fast' or 'slow'; got 'quick'"),
        ({"count": 1, "widths": 3}, "must be a list of whole numbers; got 3"),
        ({"count": 1, "widths": [1.5]}, "must be a list of whole numbers"),
        ({"count": 1, "options": 3}, "must be a table"),
        ({"count": 1, "flag": 1}, "must be true or false"),
        ({"count": 1, "rat": 1}, "unknown key 'rat' in .*; did you mean 'rate'"),
        ({"count": 1, "hook": 1}, "unknown key 'hook'"),
        ({"count": 1, "zzz": 1}, "there are count, flag, mode, options, pair, rate, widths"),
    ],
)
def test_what_does_not_fit_is_said(given, words):
    with pytest.raises(ValueError, match=words):
        checked(example, given, "[x]")


def test_a_whole_number_is_a_number():
    found = checked(example, {"count": 1, "rate": 2, "pair": [1]}, "[x]")
    assert isinstance(found["rate"], float)
    assert isinstance(found["pair"][0], float)
    assert isinstance(found["count"], int)


def test_changes_reach_inner_tables_and_leave_the_original_alone():
    tables = {"training": {"lr": 0.1, "schedule": {"name": "step"}}}
    found = changed(tables, ["training.schedule.every=5", "training.lr=1e-3", "data.path=a b.csv", "x.y=[1, 2]"])
    assert found == {
        "training": {"lr": 1e-3, "schedule": {"name": "step", "every": 5}},
        "data": {"path": "a b.csv"},
        "x": {"y": [1, 2]},
    }
    assert tables == {"training": {"lr": 0.1, "schedule": {"name": "step"}}}


@pytest.mark.parametrize("change", ["epochs=3", "training.epochs", "=3", "training.=3"])
def test_changes_that_are_none_are_refused(change):
    with pytest.raises(ValueError, match=r"table\.key=value"):
        changed({}, [change])


def test_known_names_pass():
    check_names(["a"], ["a", "b"], "[x]")
