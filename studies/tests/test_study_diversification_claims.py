"""What `diversification` says of the document's statements, given records."""

from dataclasses import replace

import pytest
from dissensus_studies.diversification.report import diversification_claims, rows_of
from dissensus_studies.diversification.settings import Setting
from dissensus_studies.harness.statistics import Estimate
from diversification_records import fake


def verdicts(records):
    claims = diversification_claims(rows_of(records))
    return {claim.statement.split(" (")[0]: claim.verdict for claim in claims}


def test_they_are_judged_by_what_was_measured():
    deep = Setting("heads", backbone="half")
    guided = [replace(deep, method="ldr", strength=s, guard="none", active=2) for s in (0.0, 0.1, 0.5, 5.0)]
    good = [fake(deep, pds=0.6, bma=0.7)] + [fake(s, pds=0.8 + s.strength / 50, unique=2.0) for s in guided]
    found = verdicts(good)
    assert found["PDS of loss-guided ensembles detects better than BMA; published form."] == "reproduced"
    better = "Loss-guided training with PDS detects better than any other method with BMA or PDS; published form."
    assert found[better] == "reproduced"
    assert found["PDS is poor without diversity: below BMA for a deep ensemble."] == "reproduced"
    assert found["Diversity"] == "reproduced"
    bad = [fake(deep, pds=0.7, bma=0.9)] + [fake(s, pds=0.6, bma=0.8, worst=0.4) for s in guided]
    found = verdicts(bad)
    assert found["PDS of loss-guided ensembles detects better than BMA; published form."] == "not reproduced"
    assert found[better] == "not reproduced"
    harmless = next(verdict for name, verdict in found.items() if name.startswith("Members differ without harm"))
    assert harmless == "not reproduced"


def test_small_differences_are_unresolved():
    deep = Setting("nets")
    guided = replace(deep, method="ldr", strength=0.5, guard="none")
    found = verdicts([fake(deep), fake(guided, pds=0.701, bma=0.7)])
    assert found["PDS of loss-guided ensembles detects better than BMA; published form."] == "unresolved"


def test_repeats_are_pooled():
    values = [[0.5, 0.4, 0.6], [0.7, 0.6, 0.8]]
    pooled = Estimate.of(values)
    assert (pooled.value, pooled.error) == (pytest.approx(0.6), pytest.approx(0.1))


def test_the_cost_claim_compares_sizes():
    five = Setting("heads", "ldr", 5, 0.5, "none", 2, backbone="half")
    records = [fake(five, seconds=0.1), fake(replace(five, num_members=50), seconds=0.3)]
    found = verdicts(records)
    assert found["With pairs, the cost of a step does not depend on the number of members."] == "not reproduced"
