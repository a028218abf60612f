"""Which guard keeps members and gains something: the study's table of guards and its verdict."""

from dataclasses import replace

import pytest
from dissensus_studies.diversification.guards import (
    best_gain,
    bonferroni,
    gains,
    guard_table,
    guard_verdict,
    member_loss,
)
from dissensus_studies.diversification.reading import Found
from dissensus_studies.diversification.settings import Setting
from diversification_records import fake

DEEP = Setting("heads", backbone="half")
SHARE = replace(DEEP, method="ldr", strength=0.5, guard="share", active=2)
CAP = replace(SHARE, guard="cap")
NETS = Setting("nets")
NET_SHARE = Setting("nets", "ldr", strength=0.5)


def verdict(*records):
    return guard_verdict(Found.of([fake(DEEP, worst=0.95), *records]))


def test_a_gain_counts_only_beyond_what_many_looks_would_find():
    # Half an interval of a record is 0.005, for one look; there are four.
    assert best_gain(gains([fake(SHARE, gain=0.02)], "gain")).sure
    assert best_gain(gains([fake(SHARE, gain=0.0055)], "gain")).sure is None
    (first, *_) = gains([fake(SHARE, gain=0.02)], "gain")
    assert first.spread == pytest.approx(0.005 * bonferroni(4) / bonferroni(1), rel=1e-5)


def test_a_sure_gain_is_shown_before_a_larger_one_that_may_be_chance():
    record = fake(SHARE, gain=0.02)
    record["gain"]["near"] = {"bma": [0.5, -0.5, 1.5]}
    assert best_gain(gains([record], "gain")).value == 0.02


def test_repeats_do_not_make_the_images_more():
    once = gains([fake(SHARE, gain=0.02)], "gain")[0]
    thrice = gains([fake(SHARE, gain=0.02)] * 3, "gain")[0]
    assert thrice.spread == once.spread
    apart = gains([fake(SHARE, gain=g) for g in (-0.1, 0.02, 0.14)], "gain")[0]
    assert apart.value == pytest.approx(0.02)
    assert apart.sure is None


def test_members_are_compared_with_independent_ones_of_the_same_seed():
    deep = [fake(replace(DEEP, seed=seed), worst=worst) for seed, worst in ((0, 0.95), (1, 0.85))]
    guided = fake(replace(SHARE, seed=1), worst=0.88)
    # Independent members of seed 1 have 0.85 and 0.95.
    assert member_loss(guided, deep) == pytest.approx(0.02)


def test_the_table_says_what_members_lose_and_what_is_gained():
    found = Found.of([fake(DEEP, worst=0.95), fake(replace(SHARE, guard="none"), worst=0.5, gain=-0.02)])
    (row,) = guard_table(found, "heads half").rows
    assert row[:3] == ("LDR 0.5, published", 0.45, "no")
    assert row[6] == "0 / 4 of 4"
    assert guard_table(Found.of([fake(SHARE)]), "heads half").rows == []


def test_the_default_is_named_where_it_does_both():
    found = verdict(fake(SHARE, worst=0.94, gain=0.03), fake(CAP, worst=0.7, gain=0.05))
    assert found.outcome == "default"
    assert "cap" not in found.text


def test_another_guard_is_named_where_only_that_one_does_both():
    found = verdict(fake(SHARE, worst=0.94), fake(CAP, worst=0.94, gain=0.05))
    assert found.outcome == "other"
    assert "LDR 0.5, cap (heads half)" in found.text


def test_where_nothing_does_both_the_default_is_judged_by_its_harm():
    useless = fake(CAP, worst=0.7, gain=0.05)
    assert verdict(fake(SHARE, worst=0.94), useless).outcome == "harmless"
    harmful = verdict(fake(SHARE, worst=0.9, gain=0.05), useless)
    assert harmful.outcome == "harmful"
    assert "heads half" in harmful.text


def test_a_guard_must_be_harmless_everywhere_and_may_gain_anywhere():
    others = fake(NETS, worst=0.95), fake(NET_SHARE, worst=0.94, gain=0.03)
    assert verdict(fake(SHARE, worst=0.94), *others).outcome == "default"
    assert verdict(fake(SHARE, worst=0.8), *others).outcome == "harmful"


def test_a_guard_that_was_not_tried_wherever_the_default_was_is_no_candidate():
    others = fake(NETS, worst=0.95), fake(NET_SHARE, worst=0.94)
    found = verdict(fake(SHARE, worst=0.94), fake(CAP, worst=0.94, gain=0.05), *others)
    assert found.outcome == "harmless"


def test_the_table_says_where_members_are_of_no_use():
    useless = fake(SHARE, worst=0.2) | {"finding": {"colluding": False, "members_useless": True}}
    (row,) = guard_table(Found.of([fake(DEEP), useless]), "heads half").rows
    assert row[3] == "members of no use alone, a lost member is hidden"


def test_the_table_says_where_the_ensemble_looks_fine_though_a_member_was_lost():
    deep = fake(DEEP, worst=0.95)
    colluding = fake(SHARE, worst=0.95) | {"finding": {"colluding": True}}
    cases = {"a lost member is hidden": fake(SHARE, worst=0.5, accuracy=0.89), "": fake(SHARE, worst=0.5, accuracy=0.6)}
    for diagnosis, guided in (cases | {"members collude": colluding}).items():
        (row,) = guard_table(Found.of([deep, guided]), "heads half").rows
        assert row[3] == diagnosis


def test_the_published_form_is_no_guard():
    published = fake(replace(SHARE, guard="none", strength=0.1), worst=0.95, gain=0.05)
    assert verdict(fake(SHARE, worst=0.94), published).outcome == "harmless"


def test_without_arms_of_the_default_there_is_no_verdict():
    assert verdict(fake(CAP)) is None
