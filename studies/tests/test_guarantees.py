"""The guarantees of `ds.conformal` hold in simulation, and the stored record says so."""

import json
from pathlib import Path

import pytest
from dissensus_studies import guarantees

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def check_false_alarms(found, repetitions):
    low, high = guarantees.band(guarantees.RATE, repetitions)
    assert len(found) >= 17
    for name, rate in found.items():
        assert rate <= high, name
        assert rate >= low or name in guarantees.DISCRETE, name


def check_by_class(found, repetitions):
    low, high = guarantees.band(guarantees.RATE, repetitions)
    assert len(found) >= 15
    for name, rates in found.items():
        assert all(rate <= high for rate in rates.values()), name
        exact = name not in (*guarantees.DISCRETE, guarantees.UNKNOWN_CLASS)
        assert all(rate >= low for rate in rates.values()) or not exact, name


def check_coverage(found, repetitions):
    low, high = guarantees.band(1 - guarantees.RATE, repetitions)
    # Sets of few classes tie at "all of them", where the adaptive scores are 1.
    assert all(rate >= low for rate in found.values())
    assert all(found[name] <= high for name in found if "lac" in name or "intervals" in name)


def check_streams(found, repetitions):
    for name, shares in found.items():
        for threshold, share in shares.items():
            high = guarantees.band(1 / float(threshold), repetitions)[1]
            assert share <= high or name.startswith("not valid"), (name, threshold)
    assert found["not valid: p-values against 200 fixed inputs"]["20"] > 0.05


def test_the_record_keeps_the_promises_and_the_page_is_made_of_it():
    record = json.loads((RESULTS / "guarantees.json").read_text(encoding="utf-8"))
    assert record["repetitions"] == 1000
    check_false_alarms(record["false_alarms"], 1000)
    check_by_class(record["false_alarms_by_class"], 1000)
    check_coverage(record["coverage"], 1000)
    for by_class in record["coverage_by_class"].values():
        check_coverage({f"{name}": rate for name, rate in by_class.items()}, 1000)
    check_streams(record["quiet_streams"], 1000)
    assert (RESULTS / "guarantees.md").read_text(encoding="utf-8") == guarantees.page(record)


@pytest.mark.slow
def test_false_alarms_stay_at_their_rate_for_every_score():
    check_false_alarms(guarantees.false_alarms(), guarantees.REPETITIONS)


@pytest.mark.slow
def test_false_alarms_stay_at_their_rate_where_examples_choose_the_score():
    low, high = guarantees.band(guarantees.RATE, 300)
    assert low <= guarantees.false_alarms_of_a_chosen_score(300)["chosen by examples"] <= high


@pytest.mark.slow
def test_false_alarms_stay_at_their_rate_within_classes():
    check_by_class(guarantees.false_alarms_by_class(), guarantees.REPETITIONS)


@pytest.mark.slow
def test_sets_and_intervals_cover():
    check_coverage(guarantees.coverage(), guarantees.REPETITIONS)
    for by_class in guarantees.coverage_by_class(300).values():
        check_coverage(by_class, 300)


@pytest.mark.slow
def test_streams_without_a_change_stay_quiet():
    check_streams(guarantees.quiet_streams(100), 100)
