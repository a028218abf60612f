"""What each guard costs members and what it gains: the study's table of guards."""

from dataclasses import replace

import pytest
from dissensus_studies.diversification.report import Family, gains, guard_table, member_loss, rows_of
from dissensus_studies.diversification.settings import Setting
from diversification_records import fake

DEEP = Setting("heads", backbone="half")
SHARE = replace(DEEP, method="ldr", strength=0.5, guard="share", active=2)


def family(*records):
    return Family.all_of(rows_of(records))[0]


def signs(own, deep):
    return {sign for *_, sign in gains(family(*own, *deep), own, deep)}


def test_a_gain_counts_only_beyond_what_many_looks_would_find():
    # Half an interval of a record is 0.005, that of a difference 0.007, for one look; there are twelve.
    deep = [fake(DEEP, pds=0.7, bma=0.7)]
    assert signs([fake(SHARE, pds=0.72, bma=0.72)], deep) == {1, 0}
    assert signs([fake(SHARE, pds=0.68, bma=0.68)], deep) == {-1, 0}
    assert signs([fake(SHARE, pds=0.708, bma=0.708)], deep) == {0}


def test_repeats_that_differ_are_no_gain():
    deep = [fake(replace(DEEP, seed=seed), pds=0.7, bma=0.7) for seed in range(3)]
    apart = [fake(replace(SHARE, seed=s), pds=v, bma=v) for s, v in enumerate((0.6, 0.72, 0.84))]
    assert signs(apart, deep) == {0}


def test_members_are_compared_with_independent_ones_of_the_same_seed():
    deep = [fake(replace(DEEP, seed=seed), worst=worst) for seed, worst in ((0, 0.95), (1, 0.85))]
    guided = fake(replace(SHARE, seed=1), worst=0.88)
    # Independent members of seed 1 have 0.85 and 0.95.
    assert member_loss([guided], deep) == pytest.approx(0.02)


def test_the_table_says_what_members_lose_and_what_is_gained():
    lost = fake(replace(SHARE, guard="none"), worst=0.5, pds=0.6, bma=0.5)
    (row,) = guard_table(family(fake(DEEP, worst=0.95), lost)).rows
    assert row[:3] == ("ldr=0.5 none A=2 M=5", 0.45, "no")
    assert row[4] == "0 / 8 of 12"
    assert guard_table(family(fake(SHARE))).rows == []


def test_the_table_says_where_members_are_of_no_use():
    useless = fake(SHARE, worst=0.2) | {"finding": {"colluding": False, "members_useless": True}}
    (row,) = guard_table(family(fake(DEEP), useless)).rows
    assert row[3] == "members of no use alone, a lost member is hidden"


def test_the_table_says_where_the_ensemble_looks_fine_though_a_member_was_lost():
    deep = fake(DEEP, worst=0.95)
    colluding = fake(SHARE, worst=0.95) | {"finding": {"colluding": True}}
    cases = {"a lost member is hidden": fake(SHARE, worst=0.5, accuracy=0.89), "": fake(SHARE, worst=0.5, accuracy=0.6)}
    for diagnosis, guided in (cases | {"members collude": colluding}).items():
        (row,) = guard_table(family(deep, guided)).rows
        assert row[3] == diagnosis
