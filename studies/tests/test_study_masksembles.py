"""Study `masksembles`: laws against simulation, arms, claims, and the page."""

import json

import pytest
import torch
from dissensus_studies import STUDIES
from dissensus_studies.harness.arm_log import Arms
from dissensus_studies.masksembles import (
    DROPOUT,
    MaskSetting,
    ensemble_numbers,
    in_order,
    laws,
    make_members,
    mask_claims,
    scale_families,
    settings_of,
    simulate,
    small_network,
    with_dropout,
)
from torch import nn

import dissensus as ds
from dissensus.architectures import resnet18


def record(diversity, ece, member_ece=0.05):
    return {"diversity": diversity, "ece": ece, "member_ece": member_ece, "members": [0.9] * 4}


def families(diversities, errors, deep=(1.0, 0.01)):
    found = {
        f"masks S={scale}": [record(diversity, error)]
        for scale, diversity, error in zip((1, 2, 3, 4, 5), diversities, errors, strict=True)
    }
    return found | {"deep ensemble": [record(*deep)]}


def verdicts(found):
    return {
        claim.statement.split(":")[0]: claim.verdict
        for claim in mask_claims(
            found, [{"overlap": 0.201, "expected_overlap": 0.2, "width": 60.1, "expected_width": 60.0}]
        )
    }


class TestLaws:
    @pytest.mark.parametrize(
        ("scale", "num_masks", "width", "overlap"), [(2.0, 4, 60.0, 0.3357), (3.0, 4, 77.037, 0.20204)]
    )
    def test_simulated_masks_have_the_widths_and_overlaps_of_the_closed_form(self, scale, num_masks, width, overlap):
        widths, overlaps = simulate(scale, num_masks, 4000)
        assert widths.mean() == pytest.approx(width, abs=0.2)
        assert overlaps.mean() == pytest.approx(overlap, abs=0.003)

    def test_at_scale_one_all_masks_are_alike(self):
        row = next(row for row in laws(40) if row["scale"] == 1.0)
        assert row["width"] == row["expected_width"] == 32
        assert row["overlap"] == row["expected_overlap"] == 1.0


class TestArms:
    def test_the_full_study_has_the_documents_arms_and_the_ends_of_the_dial_first(self):
        names = [setting.family for setting in settings_of(False, 0)]
        assert names[:4] == ["deep ensemble", "masks S=1", "masks S=5", "masks S=2"]
        assert {f"masks S={scale}" for scale in (1, 2, 3, 4, 5)} <= set(names)
        assert {"BatchEnsemble", f"MC dropout p={DROPOUT:g}", "thin masks S=2"} <= set(names)
        every = [setting.name for setting in settings_of(False, 0)]
        assert len(set(every)) == len(every)

    @pytest.mark.parametrize("setting", settings_of(True, 0), ids=lambda setting: setting.name)
    def test_members_are_as_large_as_the_single_network(self, setting):
        ens = make_members(setting, lambda: small_network(5), 4)
        expected = sum(p.numel() for p in small_network(5).parameters())
        assert sum(p.numel() for p in ens.member(1).parameters()) == expected

    def test_all_kinds_of_one_seed_start_from_one_network(self):
        x = torch.randn(3, 3, 32, 32)
        first = make_members(MaskSetting("deep"), lambda: small_network(5), 4).eval()(x)[0]
        grown = make_members(MaskSetting("masks", 3.0), lambda: small_network(5), 4).eval()(x)[0]
        torch.testing.assert_close(grown, first, rtol=1e-4, atol=1e-5)

    def test_dropout_is_put_where_masks_would_be(self):
        net = with_dropout(resnet18(width=8), 0.2)
        found = [name for name, module in net.named_modules() if isinstance(module, nn.Dropout)]
        assert found == [f"stage{stage}.{block}.residual.2.1" for stage in (1, 2, 3, 4) for block in (0, 1)]

    def test_pairs_have_the_diversity_of_the_metric(self):
        logits = torch.randn(4, 200, 5, generator=torch.Generator().manual_seed(0))
        labels = torch.randint(0, 5, (200,), generator=torch.Generator().manual_seed(1))
        numbers = ensemble_numbers(logits, labels)
        assert [pair["members"] for pair in numbers["pairs"]] == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
        votes = logits.argmax(-1)
        assert numbers["pairs"][4]["diversity"] == ds.metrics.pair_diversity(votes[1], votes[3], labels)

    def test_calibration_is_that_of_the_mean_prediction(self):
        logits = 3 * torch.randn(4, 300, 5, generator=torch.Generator().manual_seed(0)).double()
        labels = torch.randint(0, 5, (300,), generator=torch.Generator().manual_seed(1))
        numbers = ensemble_numbers(logits, labels)
        assert numbers["ece"] == pytest.approx(float(ds.metrics.ece(logits.softmax(-1).mean(0), labels, 15)))
        assert sum(numbers["curve"]["weight"]) == pytest.approx(1.0, abs=1e-5)
        assert numbers["member_ece"] > numbers["ece"]


class TestClaims:
    def test_what_the_document_says_is_recognised(self):
        found = verdicts(families((0.0, 0.3, 0.5, 0.7, 0.85), (0.05, 0.04, 0.03, 0.02, 0.015)))
        assert set(found.values()) == {"reproduced"}
        assert len(found) == 7
        far = verdicts(families((0.0, 0.3, 0.5, 0.6, 0.7), (0.05, 0.04, 0.03, 0.02, 0.015)))
        assert far["Ensembles have the largest diversity, and masks come close to it."] == "not reproduced"

    def test_diversity_rises_where_seeds_tell(self):
        first = families((0.0, 0.3, 0.5, 0.7, 0.85), (0.05, 0.04, 0.03, 0.02, 0.015))
        for last, verdict in ((0.84, "reproduced"), (0.72, "within noise")):
            second = families((0.0, 0.31, 0.51, 0.71, last), (0.05, 0.04, 0.03, 0.02, 0.015))
            found = verdicts({name: [*own, *second[name]] for name, own in first.items()})
            assert found["Diversity rises with S."] == verdict

    @pytest.mark.parametrize(
        ("diversities", "errors", "deep", "statement"),
        [
            (
                (0.1, 0.3, 0.5, 0.7, 0.8),
                (0.05, 0.04, 0.03, 0.02, 0.015),
                (1.0, 0.01),
                "At S = 1 the members are one model",
            ),
            ((0.0, 0.3, 0.2, 0.7, 0.8), (0.05, 0.04, 0.03, 0.02, 0.015), (1.0, 0.01), "Diversity rises with S."),
            (
                (0.0, 0.3, 0.5, 0.7, 1.2),
                (0.05, 0.04, 0.03, 0.02, 0.015),
                (1.0, 0.01),
                "Ensembles have the largest diversity, and masks come close to it.",
            ),
            (
                (0.0, 0.3, 0.5, 0.7, 0.8),
                (0.05, 0.04, 0.03, 0.02, 0.06),
                (1.0, 0.01),
                "The calibration error falls with S.",
            ),
            (
                (0.0, 0.3, 0.5, 0.7, 0.8),
                (0.05, 0.04, 0.03, 0.02, 0.04),
                (1.0, 0.01),
                "It falls towards that of the deep ensemble.",
            ),
        ],
    )
    def test_what_is_not_found_is_not_reproduced(self, diversities, errors, deep, statement):
        assert verdicts(families(diversities, errors, deep))[statement] == "not reproduced"

    def test_whole_batches_are_judged_apart(self):
        found = families((0.0, 0.3, 0.5, 0.7, 0.8), (0.05, 0.04, 0.03, 0.02, 0.015))
        found["masks S=2, whole batches"] = [record(0.4, 0.03)]
        assert list(scale_families(found, ", whole batches")) == [1.0, 2.0]
        assert any("whole batches" in statement for statement in verdicts(found))


def test_the_study_writes_a_page_and_goes_on_where_it_stopped(tmp_path, capsys):
    run = STUDIES["masksembles"].run
    first = run(tmp_path, quick=True, epochs=1, limit=60, arms=["deep", "masks S=1", "masks S=5"])
    assert first == tmp_path / "report.html"
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["arms"]) == 3
    assert results["arms"]["masks S=1, whole batches seed=0"]["diversity"] == 0.0
    assert len(results["arms"]["deep ensemble seed=0"]["pairs"]) == 6
    assert (tmp_path / "masksembles_scales.svg").exists()
    assert (tmp_path / "masksembles_scales.png").exists()
    assert len(results["laws"]) == 27
    capsys.readouterr()
    run(tmp_path, quick=True, epochs=1, limit=60, arms=["masks S=1"])
    assert "1 of 1 arms were done before" in capsys.readouterr().out


def test_families_are_shown_in_the_order_of_their_scales():
    # The order in which arms are run, and so in which records come, is that of their importance.
    done = {
        setting.name: {"family": setting.family, "setting": {"scale": setting.scale}}
        for setting in settings_of(quick=False, seed=0)
    }
    names = [name for name in in_order(Arms(done)) if "whole" not in name and "thin" not in name]
    assert names[:5] == [f"masks S={scale}" for scale in (1, 2, 3, 4, 5)]
    assert set(names[5:]) == {"deep ensemble", "MC dropout p=0.2", "BatchEnsemble"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"setting": "moon"}, "no option setting"),
        ({"arms": ["nothing"]}, "No arm of this study fits"),
        ({"minutes": 0}, "No arm was finished"),
    ],
)
def test_bad_input_gets_one_clear_sentence(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        STUDIES["masksembles"].run(tmp_path, quick=True, **options)
