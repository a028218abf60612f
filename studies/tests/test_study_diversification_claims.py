"""What `diversification` says of the document's statements, given records."""

from dataclasses import replace

import pytest
from dissensus_studies.diversification import _claims
from dissensus_studies.diversification.arms import with_values
from dissensus_studies.diversification.settings import Setting
from dissensus_studies.harness.statistics import Estimate
from diversification_records import fake

DEEP = Setting("heads", backbone="half")
GUARDED = replace(DEEP, method="ldr", strength=0.5, guard="share", active=2)
BETTER = "PDS of loss-guided ensembles detects better than BMA."


def verdicts(*makes, seeds=3):
    """Return verdicts on arms whose numbers differ a little by seed, each a setting and its numbers."""
    records = [fake(replace(setting, seed=seed), **numbers) for seed in range(seeds) for setting, numbers in makes]
    return {claim.statement.split(" (heads")[0]: claim.verdict for claim in _claims(list(map(with_values, records)))}


def test_they_are_judged_by_what_was_measured():
    guided = [replace(GUARDED, strength=s, guard="none") for s in (0.1, 0.5, 5.0)]
    good = [(s, {"pds": 0.8 + s.strength / 50, "unique": 2.0 + s.strength}) for s in guided]
    found = verdicts((DEEP, {"pds": 0.6}), (GUARDED, {}), *good)
    better = "Loss-guided training with PDS detects better than any other method with BMA or PDS."
    assert {found[claim] for claim in (BETTER, better, "PDS is poor without diversity.")} == {"reproduced"}
    assert found["Diversity rises with the strength."] == "reproduced"
    bad = [(s, {"pds": 0.6, "bma": 0.8, "worst": 0.4}) for s in guided]
    found = verdicts((DEEP, {"pds": 0.7, "bma": 0.9}), (GUARDED, {}), *bad)
    assert {found[claim] for claim in (BETTER, better)} == {
        "not reproduced: the opposite for severity 1, severity 5, near, far"
    }
    assert found["Members differ without harm to what they learn."] == "not reproduced"


def test_one_seed_tells_no_difference_and_missing_arms_no_claim():
    guided = replace(GUARDED, guard="none")
    found = verdicts((DEEP, {}), (GUARDED, {}), (guided, {}), seeds=1)
    assert found[BETTER] == "within noise"
    assert "More members detect better (PDS)." not in found
    assert verdicts((DEEP, {}), (guided, {})) == {}


def test_repeats_are_pooled():
    values = [[0.5, 0.4, 0.6], [0.7, 0.6, 0.8]]
    pooled = Estimate.of(values)
    assert (pooled.value, pooled.error) == (pytest.approx(0.6), pytest.approx(0.1))
