"""What `diversification` says of the document's statements, given records."""

from dataclasses import replace

import pytest
from dissensus_studies.diversification import _claims
from dissensus_studies.diversification.arms import with_values
from dissensus_studies.diversification.recorded import judged, same_elsewhere
from dissensus_studies.diversification.settings import Setting
from dissensus_studies.harness.statistics import Estimate
from dissensus_studies.recorded import framed
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
    assert verdicts((DEEP, {}), (GUARDED, {})) == {}


def test_ablations_are_judged_beside_the_usual_form():
    guided = replace(GUARDED, guard="none")
    arms = {
        "diverse": (replace(DEEP, method="diverse"), {"bma": 0.9}),
        "one layer": (replace(guided, layers=1), {"pds": 0.75, "unique": 1.5}),
        "one layer, alone": (replace(DEEP, layers=1), {"pds": 0.76}),
        "other weights": (replace(guided, guard="inverse probability"), {"unique": 2.5}),
    }
    found = verdicts((DEEP, {}), (GUARDED, {}), (guided, {"unique": 2.0}), *arms.values())
    assert found["By BMA, diverse hyperparameters detect best of all ensembles."] == "reproduced"
    assert found["Heads of two layers detect better than heads of one (PDS)."] == "reproduced"
    assert (
        found["On unknown images heads of two layers disagree more than heads of one, whose loss is convex."]
        == "reproduced"
    )
    beaten = found["Also with one layer, loss-guided heads beat independent ones (PDS)."]
    assert beaten.startswith("not reproduced")
    weights = found["Weights by the loss diversify more than weights by one over the probability."]
    assert weights.startswith("not reproduced")
    assert not any("soup" in claim for claim in verdicts((DEEP, {}), (GUARDED, {}), (guided, {})))


@pytest.mark.parametrize(("gap", "verdict"), [(0.002, "reproduced"), (0.03, "not reproduced")])
def test_images_to_disagree_on_matter_little_where_no_set_differs_by_more(gap, verdict):
    first = replace(DEEP, method="a2d", strength=0.1)
    records = []
    for source, pds in ((0, 0.8), (1, 0.8 + gap)):
        for seed in range(3):
            record = with_values(fake(replace(first, source=source, seed=seed), pds=pds))
            # What the second disagrees on does not count.
            record["auroc"] |= {
                "svhn": record["auroc"]["far"],
                "textures": {"predictive_diversity": 0.1 + 0.5 * source},
            }
            records.append(record | {"elsewhere": ("isun", "textures")[source]})
    frame = framed(records).set_index("setting.seed")
    cases, text = same_elsewhere(dict(iter(frame.groupby("row"))))
    assert judged(cases)[0] == verdict
    assert "textures" not in text


def test_repeats_are_pooled():
    values = [[0.5, 0.4, 0.6], [0.7, 0.6, 0.8]]
    pooled = Estimate.of(values)
    assert (pooled.value, pooled.error) == (pytest.approx(0.6), pytest.approx(0.1))
