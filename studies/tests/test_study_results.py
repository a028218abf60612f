"""Pages are what the record says: every table, verdict and claim on them is written from it."""

import json
from collections import Counter
from decimal import Decimal
from itertools import product

import numpy as np
import pytest
from anchoring_records import record
from dissensus_studies import choosing, masksembles, recorded, results
from dissensus_studies.collusion import recorded as collusion
from dissensus_studies.collusion.uci import SOURCES
from dissensus_studies.deep_ensembles import recorded as deep_recorded
from dissensus_studies.deep_ensembles import regression, spirals
from dissensus_studies.diversification import recorded as diversification
from dissensus_studies.guide import kinds_points
from dissensus_studies.harness.statistics import Summary, ece_floor, typical_confidence

from dissensus.scores import SCORES


def test_pages_are_what_the_record_says():
    """After `make results` this passes; a number typed into a page by hand does not last."""
    for name, text in results.pages().items():
        assert (results.PAGES / name).read_text(encoding="utf-8") == text, f"{name}: run `make results`"


def test_claims_are_judged_by_the_arms_of_runs(tmp_path):
    """After `make results` this passes; a verdict that runs do not give does not last."""
    assert (results.RECORDS / "claims.jsonl").read_text(encoding="utf-8") == results.judged_claims()
    for path in results.RECORDS.glob("*.jsonl"):
        text = path.read_text(encoding="utf-8")
        (tmp_path / path.name).write_text(text.replace('"predictive_diversity": 0.', '"predictive_diversity": 1.'))
    claims = map(json.loads, results.judged_claims(tmp_path).splitlines())
    verdicts = {claim["claim"]: claim["verdict"] for claim in claims if claim.get("seeds") == 3}
    assert verdicts["PDS is the best of all scores for them."] == "reproduced"


def test_intervals_over_seeds_are_students():
    found = Summary.of([1.0, 2.0, 3.0])
    assert found.half == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert (found.sign, Summary.of([2.0, 2.1, 2.2]).sign, Summary.of([5.0]).sign) == (0, 1, 0)
    cases = {"a": Summary.of([2.0, 2.1, 2.2]), "b": Summary.of([-1.0, 1.0, 0.0])}
    assert diversification.judged(cases) == ("within noise", "holds for a, elsewhere within noise")
    assert diversification.judged({"a": cases["a"]})[0] == "reproduced"
    assert diversification.judged(cases | {"c": Summary.of([-2.0, -2.1, -2.2])})[0] == "not reproduced"


def test_a_changed_record_changes_its_page(tmp_path):
    for path in results.RECORDS.glob("*.jsonl"):
        text = path.read_text(encoding="utf-8")
        (tmp_path / path.name).write_text(text.replace('"accuracy": 0.909', '"accuracy": 0.123'), encoding="utf-8")
    assert "| masks S = 1, the single network | 0.123 |" in results.pages(tmp_path)["masksembles.md"]


@pytest.mark.parametrize("path", sorted(results.RECORDS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_line_of_the_record_says_what_it_is(path):
    rows = results.load(path.stem)
    if path.stem == "claims":
        claims = [row for row in rows if "claim" in row]
        assert {claim["verdict"] for claim in claims} <= {*results.VERDICTS}
        untested = [claim for claim in claims if claim["command"] == ""]
        assert [claim["note"] for claim in untested] == ["not tested: needs ImageNet"]
        tested = (claim["command"] for claim in claims if claim not in untested)
        assert all(command.startswith(("dissensus study", "pytest tests/")) for command in tested)
        assert {claim["document"] for claim in claims if claim.get("data") == "other"} == {"002"}
        assert {claim["document"] for claim in claims} == {"000", "001", "002", "003", "004"}
        return
    for row in rows:
        assert row["source"] in ("page", "run")
        assert {
            "study",
            "table",
            "arm",
            "machine",
            "versions",
            "date",
            "seeds",
            "setting",
            "seconds",
            "numbers",
        } <= set(row)


def test_every_table_of_a_page_has_a_record():
    layouts = json.loads((recorded.TEMPLATES / "tables.json").read_text(encoding="utf-8"))
    used = {
        line.split()[2]
        for page in recorded.TEMPLATES.glob("*.md")
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith(("<!-- table", "<!-- claims"))
    }
    assert used == set(layouts)


def test_arms_of_a_run_are_added_once_with_what_made_them(tmp_path):
    run = tmp_path / "masksembles"
    run.mkdir()
    record = {
        "accuracy": 0.5,
        "line": "shown",
        "arm_seconds": 3.0,
        "made": {"date": "d", "torch": "2", "device": "a GPU"},
    }
    (run / "arms.jsonl").write_text(
        json.dumps({"arm": "S=2 seed=0", "settings": {"epochs": 4}, "record": record}) + "\n"
    )
    for _ in range(2):
        assert results.add(run, tmp_path) == 1
    # Settings in another order are the same settings.
    again = {"arm": "S=2 seed=0", "settings": {"quick": False, "epochs": 4}, "record": record}
    for settings in (again["settings"], dict(reversed(again["settings"].items()))):
        (run / "arms.jsonl").write_text(json.dumps(again | {"settings": settings}) + "\n")
        results.add(run, tmp_path)
    row, _ = results.load("masksembles", tmp_path)
    assert (row["machine"], row["source"], row["seconds"]) == ("a GPU", "run", Decimal("3.0"))
    assert row["numbers"] == {"accuracy": Decimal("0.5")}


def test_runs_on_tables_make_tables_and_verdicts(tmp_path):
    rows = results.load("collusion")
    assert Counter(run["set"] for run in collusion.tabular(rows)) == dict.fromkeys(SOURCES, 10)
    claim = next(each for each in collusion.judged_tabular(rows) if each.startswith("Debiasing typically"))
    assert collusion.judged_tabular(rows)[claim]["verdict"] == "within noise"
    for row in collusion.tabular_rows(rows):
        row["numbers"]["betas"][-1] |= {"bias_share": 0.5, "mse": 7.0}
    assert collusion.judged_tabular(rows)[claim]["measured"] == ["50 %, 10 of 10"] * 4
    assert collusion.judged_tabular(rows)[claim]["verdict"] == "reproduced"
    joint = [row["numbers"]["MSE"] for row in collusion.shown(rows) if row["arm"][1:] == ["1"]]
    assert joint == [["7.000", "0.000"]] * 4
    # Those that were trained again are judged apart.
    again = next(line for line in collusion.again_table(rows).splitlines() if claim in line)
    assert "50 %, 10 of 10" not in again


def test_arms_of_images_replace_what_only_the_page_had(tmp_path):
    _without_runs("collusion", tmp_path)
    run = tmp_path / "collusion-images"
    run.mkdir()
    before = results.pages(tmp_path)["collusion.md"]
    with open(run / "arms.jsonl", "w") as file:
        for beta in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
            for seed in range(2 if beta in (0.0, 1.0) else 1):
                file.write(json.dumps(_joint_arm(beta, seed)) + "\n")
    assert results.add(run, tmp_path) == 8
    (tmp_path / "claims.jsonl").write_text(results.judged_claims(tmp_path), encoding="utf-8")
    after = results.pages(tmp_path)["collusion.md"]
    assert before != after
    assert "| 0.2 | 0.930 | 0.930 (0.920 to 0.940) | 0.320 | 0.012 | 0.010 |" in after
    assert "| 1 (2 seeds) | 0.850 ±" in after
    assert "CIFAR-10, 80 epochs (the document's 80): 8 arms in 40 minutes, a GPU" in after
    claims = {claim["claim"]: claim for claim in results.load("claims", tmp_path) if "claim" in claim}
    first = next(claim for text, claim in claims.items() if text.startswith("Joint training has the lowest accuracy"))
    assert (first["verdict"], first["seeds"]) == ("reproduced", 1)
    assert (
        claims["Collusion emerges as beta goes to 1: most of the rise of diversity is above 0.8."]["verdict"]
        == "reproduced"
    )
    assert claims["… CIFAR-100 (figures 6, 14)."]["verdict"] == results.VERDICTS[-1]
    lines = results.page_figures(results.shown("collusion", tmp_path))["collusion-images"].axes[0].lines
    assert lines[0].get_ydata().tolist() == pytest.approx([0.95, 0.93, 0.91, 0.89, 0.87, 0.85])


def test_arms_of_the_small_network_that_stop_early_are_at_the_document_s_length(tmp_path):
    _without_runs("collusion", tmp_path)
    run = tmp_path / "collusion-images"
    run.mkdir()
    with open(run / "arms.jsonl", "w") as file:
        for beta in (0.0, 0.6, 1.0):
            for seed in range(2):
                arm = _joint_arm(beta, seed, "cnn")
                arm["record"]["training"]["epochs"] = 34 + seed
                arm["record"]["ensemble_error"] = {0.0: 0.9, 0.6: 0.8, 1.0: 1.0}[beta] + 0.001 * seed
                file.write(json.dumps(arm) + "\n")
    assert results.add(run, tmp_path) == 6
    (tmp_path / "claims.jsonl").write_text(results.judged_claims(tmp_path), encoding="utf-8")
    page = results.pages(tmp_path)["collusion.md"]
    assert "| five members, 0 (2 seeds) |" in page
    assert "80 epochs (the document's 80), stopped after 34 to 35: 6 arms" in page
    claims = {claim["claim"]: claim for claim in results.load("claims", tmp_path) if "claim" in claim}
    between = claims["The CNN has its lowest test error between the ends (figure 15)."]
    assert (between["verdict"], between["seeds"]) == ("reproduced", 2)
    assert claims["Joint training is poor for the CNN, five members (figure 15)."]["verdict"] == "reproduced"


def _without_runs(study, folder):
    """Copy the records without what runs of a study on images measured."""
    for path in results.RECORDS.glob("*.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [line for line in lines if not (f'"{study}/runs"' in line and '"data": "' in line)]
        (folder / path.name).write_text("\n".join(rows) + "\n", encoding="utf-8")


def _add(arms, run, records):
    """Add arms of a run, judge the claims, and return the page and the claims by text."""
    run.mkdir(exist_ok=True)
    (run / "arms.jsonl").write_text("".join(json.dumps(arm) + "\n" for arm in arms))
    assert results.add(run, records) == len(arms)
    (records / "claims.jsonl").write_text(results.judged_claims(records), encoding="utf-8")
    claims = [claim for claim in results.load("claims", records) if claim["table"] == "anchoring/claims"]
    return results.pages(records)["anchoring.md"], {claim["claim"]: claim for claim in claims if "claim" in claim}


class TestAnchoring:
    """Networks of the document's 200 epochs fill the page and judge the claims; all else leaves both as they are."""

    @pytest.fixture
    def records(self, tmp_path):
        folder = tmp_path / "records"
        folder.mkdir()
        _without_runs("anchoring", folder)
        return folder

    @pytest.mark.parametrize("changes", [{"epochs": 30}, {"limit": 100}, {"together": True}], ids=str)
    def test_what_is_not_enough_changes_nothing(self, changes, records, tmp_path):
        before = results.pages(records)["anchoring.md"], (records / "claims.jsonl").read_text(encoding="utf-8")
        page, _ = _add(_anchored_arms(**changes), tmp_path / "anchoring", records)
        assert (page, (records / "claims.jsonl").read_text(encoding="utf-8")) == before

    def test_networks_of_the_document_s_length_fill_the_page(self, records, tmp_path):
        page, claims = _add(_anchored_arms(), tmp_path / "anchoring", records)
        assert (
            "**Ours on CIFAR-10 are means over 2 seeds of 200 epochs, as the document's**: 8 arms in 40 minutes" in page
        )
        assert "short runs**: 10 epochs" not in page
        # Table 6: the document's and ours, no short run between; table 7; probes; accuracy by severity.
        assert "| resnet18 | plain | 97.40 |  | 94.63 |  | 94.05 | 90.50 | 87.49 |" in page
        assert "| resnet18 | alpha=0.125 | 98.19 |  | 96.55 |  | 96.12 |  | 91.47 |" in page
        assert "| resnet18 | alpha=0.25 | 0.040 | 0.051 | 0.060 | 0.051 |" in page
        assert "| resnet18 | alpha=0.25 |  | 60.00 |  |  |  |" in page
        assert "| resnet18 | alpha=0.25 tail=1 diagonal | 2 | 0.701 |" in page
        first = claims["Masked anchoring lowers the smooth ECE under corruption."]
        assert (first["verdict"], first["seeds"]) == ("reproduced", 2)
        assert first["measured"] == ["plain 0.1010, alpha=0.25 0.0510 (2 runs, noise of a difference up to 0.0028)"]
        assert "200 epochs" in first["setting"]
        assert claims["Masking detects unknown images better than a plain network."]["verdict"] == "within noise"
        assert claims["Hard-delta mining costs accuracy under corruption."]["verdict"] == "within noise"
        drawn = results.page_figures(results.shown("anchoring", records))["anchoring-alpha"].axes
        assert drawn[0].lines[0].get_xdata().tolist() == [0.0, 0.25]
        assert drawn[0].lines[0].get_ydata().tolist() == pytest.approx([0.951, 0.931])

    def test_some_networks_of_the_document_s_length_stand_below_the_short_runs(self, records, tmp_path):
        before = (records / "claims.jsonl").read_text(encoding="utf-8")
        page, _ = _add(_anchored_arms(rows=("plain",)), tmp_path / "anchoring", records)
        assert "short runs**: 10 epochs" in page
        assert "Of the document's 200 epochs there are, for ResNet-18: plain (2 seeds)" in page
        short, long = page.split("| resnet18 | plain | 97.40 |")[1].splitlines()[:2]
        assert " 93.49 |" in short
        assert long.startswith("| resnet18 | plain, 200 epochs |  |  |  |  |  | 90.50 |")
        assert (records / "claims.jsonl").read_text(encoding="utf-8") == before

    def test_mining_needs_the_masked_network_only(self, records, tmp_path):
        arms = _anchored_arms(rows=("alpha=0.25", "alpha=0.25 tail=1 diagonal"))
        _, claims = _add(arms, tmp_path / "anchoring", records)
        assert claims["Hard-delta mining raises AUROC."]["verdict"] == "within noise"

    def test_another_known_set_has_tables_and_claims_of_its_own(self, records, tmp_path):
        page, claims = _add(_anchored_arms(data="cifar100"), tmp_path / "anchoring-cifar100", records)
        assert "short runs**: 10 epochs" in page
        assert "Ours on CIFAR-100 are means over 2 seeds" in page
        assert "| resnet18 | alpha=0.25 | 0.080 | 0.051 | 0.110 | 0.051 |" in page
        assert (
            claims["Masking detects unknown images better than a plain network (CIFAR-100)."]["verdict"]
            == "within noise"
        )
        # The document's own table has ResNet-18 the other way round.
        assert "Masked anchoring lowers the smooth ECE under corruption (CIFAR-100)." not in claims
        judged = claims["Masked networks adapt better (linear probes) (CIFAR-100)."]
        assert (judged["verdict"], judged["command"]) == (
            "reproduced",
            "dissensus study anchoring --data DIR --known cifar100",
        )
        assert "alpha=0.25; 200 epochs" in judged["setting"]


ROWS = ("plain", "anchored", "alpha=0.25", "alpha=0.25 tail=1 diagonal")


def _anchored_arms(rows=ROWS, epochs=200, data="cifar10", limit=None, together=False):
    """Return arms of two seeds: masked ones are less accurate, better calibrated under corruption, and detect as plain ones do."""
    arms = []
    settings = {"data": data, "epochs": None, "limit": limit, "quick": False, "images": 40000}
    for row, seed in product(rows, range(2)):
        masked = row.startswith("alpha")
        more = 0.002 * seed
        found = record(0.95 - 0.02 * masked + more, 0.7 + more, 0.1 - 0.05 * masked + more)
        found["auroc"]["isun"]["mean_energy"] = [0.9 + 0.01 * seed, 0.89, 0.91]
        found["adaptation"]["dtd"]["accuracy"] = 0.5 + 0.1 * masked
        found |= {
            "row": row + " together" * together,
            "setting": {"architecture": "resnet18", "alpha": 0.25 if masked else 0.0, "seed": seed},
            "training": {"epochs": epochs, "history": {"loss": [1.0]}},
            "arm_seconds": 300.0,
            "made": {"date": "2026-11-19", "torch": "2", "device": "a GPU"},
        }
        if together:
            every = {name: dict.fromkeys(SCORES, own["mean_energy"]) for name, own in found["auroc"].items()}
            found |= {"together": {"nets": 2, "references": 5}, "auroc": every}
        arms.append({"arm": f"resnet18 {row} seed={seed}", "settings": settings, "record": found})
    return arms


def _joint_arm(beta, seed, architecture="resnet18"):
    accuracy = 0.95 - 0.1 * beta
    setting = {"architecture": architecture, "num_members": 5, "beta": beta, "average": "probs", "member_dropout": 0.0}
    record = {
        "setting": {**setting, "experiment": "sweep", "seed": seed},
        "family": f"{architecture} M=5",
        "members": [accuracy - 0.01, accuracy + 0.01],
        "test": {"accuracy": [accuracy, accuracy - 0.005, accuracy + 0.005], "ece": [0.01, None, None]},
        "accuracy": accuracy + 0.001 * seed - 0.0005 * (beta in (0.0, 1.0)),
        "member_accuracy": accuracy,
        "ensemble_error": 0.3 + 0.1 * beta,
        "diversity": 1.0 if beta == 1 else 0.01 * (1 + beta),
        "training": {"epochs": 80, "history": {"loss": [1.0]}},
        "arm_seconds": 300.0,
        "made": {"date": "2026-11-18", "torch": "2", "device": "a GPU"},
    }
    settings = {"data": "cifar10", "epochs": None, "limit": None, "quick": False, "images": 40000}
    return {"arm": f"{architecture} M=5 beta={beta:g} seed={seed}", "settings": settings, "record": record}


def test_the_floor_of_the_calibration_error_is_that_of_one_bin_where_all_are_equally_sure():
    # E|mean error| of a coin with p = .8: sqrt(2 p (1 - p) / (pi n)).
    assert ece_floor([0.8] * 4000) == pytest.approx((2 * 0.8 * 0.2 / (3.141593 * 4000)) ** 0.5, rel=0.15)
    assert ece_floor(typical_confidence(0.9, 1000)) > 2 * ece_floor(typical_confidence(0.9, 10_000))


def _copied(folder, left_out):
    """Copy the record without the lines of a table."""
    for path in results.RECORDS.glob("*.jsonl"):
        rows = [line for line in path.read_text(encoding="utf-8").splitlines() if f'"{left_out}"' not in line]
        (folder / path.name).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def _ran(folder, name, arms):
    """Write the arms of a run, and add them to the record."""
    run = folder / name
    run.mkdir(exist_ok=True)
    (run / "arms.jsonl").write_text("".join(json.dumps(arm) + "\n" for arm in arms))
    assert results.add(run, folder) == len(arms)


MADE = {"date": "2026-11-19", "torch": "2.11", "device": "NVIDIA H200"}


def _masked_arm(setting, ece=0.02, floor=0.005, seed=0, epochs=None, quick=False):
    """Return an arm of the study of masks whose diversity rises by a tenth with each step of S."""
    setting = masksembles.MaskSetting(*setting, seed=seed)
    scale = setting.scale or 1.0
    diversity = {"deep": 0.8, "dropout": 0.5, "masks": 0.1 * (scale - 1)}[setting.kind]
    accuracy = {"deep": 0.95, "dropout": 0.92, "masks": 0.94 - 0.01 * scale}[setting.kind] + 0.001 * seed
    accuracy += 0.005 * (setting.batches == "whole")
    curve = {"confidence": [0.5, 0.9 + 0.02 * seed], "accuracy": [0.4, 0.8], "weight": [0.25, 0.75]}
    record = {
        "setting": vars(setting),
        "family": setting.family,
        "test": {"accuracy": [accuracy, accuracy - 0.005, accuracy + 0.005], "nll": [0.2, None, None]},
        "members": [accuracy - 0.01] * 4,
        "auroc": {"near": {"mean_energy": [0.9, None, None]}, "far": {"mean_energy": [0.91, 0.9, 0.92]}},
        **{"diversity": diversity, "ece": ece, "member_ece": 0.04, "ece_floor": floor},
        **{"curve": curve, "member_curve": curve, "arm_seconds": 90.0, "made": MADE},
    }
    settings = {"data": "cifar10", "epochs": epochs, "limit": None, "quick": quick, "images": 40000}
    return {"arm": setting.name, "settings": settings, "record": record}


DIAL = {("masks", scale): 0.04 - 0.005 * scale for scale in masksembles.SCALES}


def test_masks_that_were_not_trained_to_the_end_leave_the_page_as_it_was(tmp_path):
    _copied(tmp_path, "masksembles/runs")
    before, claims = results.pages(tmp_path)["masksembles.md"], results.judged_claims(tmp_path)
    ends = [("deep",), ("masks", 1.0), ("masks", 5.0)]
    _ran(tmp_path, "masksembles", [_masked_arm(each) for each in ends[:2]])
    _ran(tmp_path, "masksembles-short", [_masked_arm(each, epochs=12) for each in ends])
    _ran(tmp_path, "masksembles-quick", [_masked_arm(each, quick=True) for each in ends])
    assert results.pages(tmp_path)["masksembles.md"] == before
    assert results.judged_claims(tmp_path) == claims


def test_masks_that_were_trained_to_the_end_replace_what_only_the_page_had(tmp_path):
    _copied(tmp_path, "masksembles/runs")
    arms = [_masked_arm(each, ece, seed=seed) for seed in range(2) for each, ece in DIAL.items()]
    arms += [_masked_arm(("deep",), 0.012, seed=seed) for seed in range(2)]
    arms += [_masked_arm(("dropout",)), _masked_arm(("masks", 5.0, True, "whole")), _masked_arm(("masks", 2.0, False))]
    _ran(tmp_path, "masksembles-h200", arms)
    (tmp_path / "claims.jsonl").write_text(results.judged_claims(tmp_path), encoding="utf-8")
    page = results.pages(tmp_path)["masksembles.md"]
    assert (
        "40 epochs of one cycle up to 0.1, bf16: 14 arms in 21 minutes, NVIDIA H200, torch 2.11, 2026-11-19, 2 seeds ("
        in page
    )
    assert "(masks S = 5, whole batches: 1; MC" in page
    assert "± is half a 95 % interval over seeds." in page
    assert "| masks S = 5 | 0.891 ± 0.006 | 0.881 ± 0.006 | 0.400 ± 0.000 | 0.015 ± 0.000 |" in page
    assert "| masks S = 5, whole batches | 0.895 | 0.885 | 0.400 | 0.020 | 0.040 | 0.200 | 0.900 / 0.910 |" in page
    assert "an ECE of 0.005 to 0.005 on 10000 images" in page
    assert "Within that noise of the least (deep ensemble): masks S = 5." in page
    assert "seen each image 10 times, a member of the deep ensemble 40 times; at S = 5 the mean accuracy of" in page
    assert "12 epochs" not in page.replace("dissensus study", "")
    assert "thin masks S" not in page
    assert "<!--" not in page
    claims = {claim["claim"]: claim for claim in results.load("claims", tmp_path) if "claim" in claim}
    verdicts = {text: claims[text]["verdict"] for text in claims if claims[text].get("document") == "000"}
    *found, on_imagenet = verdicts.values()
    assert found == [*["reproduced"] * 4, "not reproduced", "reproduced", "reproduced"]
    assert on_imagenet == results.VERDICTS[-1]
    rises = claims["Diversity rises with S."]
    assert (rises["seeds"], rises["setting"]) == (2, "CIFAR-10, ResNet-18, S = 1, 2, 3, 4, 5, 40 epochs")


def test_calibration_errors_of_masks_that_chance_alone_gives_are_within_noise(tmp_path):
    _copied(tmp_path, "masksembles/runs")
    arms = [_masked_arm(each, ece, floor=0.1) for each, ece in {**DIAL, ("deep",): 0.012}.items()]
    _ran(tmp_path, "masksembles", arms)
    found = masksembles.judged_claims(results.load("masksembles", tmp_path))["masksembles/what-the-document-says"]
    noise = {"The calibration error falls with S.", "It falls towards that of the deep ensemble."}
    assert {text for text, claim in found.items() if claim["verdict"] == "within noise"} == noise


def test_figures_of_masks_are_drawn_of_the_arms_of_runs(tmp_path):
    _copied(tmp_path, "masksembles/runs")
    arms = [_masked_arm(each, ece, seed=seed) for seed in range(2) for each, ece in {**DIAL, ("deep",): 0.01}.items()]
    _ran(tmp_path, "masksembles", [*arms, _masked_arm(("masks", 5.0, True, "whole"))])
    rows = results.shown("masksembles", tmp_path)
    gaps, accuracies = results.page_figures(rows)["masksembles-calibration"].axes
    names = [line.get_label() for line in gaps.lines if not line.get_label().startswith("_")]
    assert names == [
        "single network, ECE 0.040",
        *(f"masks S = {s}, ECE {0.04 - 0.005 * s:.3f}" for s in (2, 3, 4, 5)),
        "deep ensemble, ECE 0.010",
    ]
    # Two seeds with confidences .9 and .92 in one bin.
    assert gaps.lines[1].get_ydata().tolist() == pytest.approx([-0.025, -0.0825])
    assert accuracies.lines[1].get_xdata().tolist() == pytest.approx([0.5, 0.91])
    drawn = results.diversity_figure([row for row in rows if row["table"] == masksembles.TABLE])
    assert {text.get_text() for text in drawn.axes[0].texts} >= {"masks S = 1", "masks S = 5", "deep ensemble"}
    assert not any("whole" in text.get_text() for text in drawn.axes[0].texts)


def _kind_arm(family, nll, seconds, seed=0, network=None):
    test = {"accuracy": 0.9, "nll": nll + 0.01 * seed, "ece": 0.01 + 0.1 * nll, "smooth_ece": 0.01}
    several = {} if family.startswith("single") else {"bma": 0.8, "mutual_information": 0.7}
    auroc = {group: {"mean_energy": 0.85, **several} for group in ("near", "far")}
    record = {
        "setting": {"kind": family.split(",")[0], "objective": family.split(", ")[1], "seed": seed},
        "family": family,
        "members": [0.89, 0.9],
        **{"test": test, "auroc": auroc, "corrupted": {"all": {"accuracy": 0.7}}},
        **{
            "training": {"epochs": 8, "seconds": seconds},
            "images_a_second": 28_000.0,
            "made": MADE,
            "arm_seconds": seconds,
        },
    }
    settings = {"data": "cifar10", "epochs": None, "limit": None, "quick": False, "images": 40000, "seconds": seconds}
    if network is not None:
        settings["network"] = network
        record |= {"made": MADE | {"device": "AMD EPYC"}, "threads": 1, "parameter_bytes": 373152}
    return {"arm": f"{family} seed={seed}", "settings": settings, "record": record}


def test_kinds_have_a_table_for_each_budget_the_longest_first(tmp_path):
    _copied(tmp_path, "choosing/runs")
    families = [choosing.Setting(*each).family for each in choosing.COMBINATIONS]
    for seconds in (90.0, 30.0):
        arms = [
            _kind_arm(family, 0.2 + 0.01 * place, seconds, seed)
            for place, family in enumerate(families)
            for seed in range(2 if family == "swag, independent" else 3)
            if (family, seconds) != ("mimo, independent", 90.0)
        ]
        _ran(tmp_path, f"choosing-{seconds:g}", arms)
    on_a_cpu = [
        _kind_arm(family, 0.8, 20.0, network="small") for family in ("deep, independent", "single, independent")
    ]
    _ran(tmp_path, "choosing-small", on_a_cpu)
    page = results.pages(tmp_path)["../choosing.md"]
    first, folded = page.split("<details", 1)
    assert "**every arm trained for the same 90 seconds** (30 in what is folded). 2 to 3 seeds; ±" in first
    row = "| deep | 3 | 8 | .900 ± .000 | .890 ± .000 | .210 ± .025 | .030 ± .000 | .010 ± .000 | .700 ± .000 |"
    assert row in first
    assert "| mimo |" not in first
    assert "| mimo | 3 |" in folded
    assert "In the study, but not in the table: mimo." in folded
    assert "<summary>The same in 30 seconds</summary>" in folded
    assert "--seconds 90 --repeats 3" in folded
    assert "Within that noise of the least (deep): single" in first
    assert set(kinds_points(results.load("choosing", tmp_path))) == {*families} - {"mimo, independent"}
    small = page.split("### On a CPU")[1]
    assert "four members, one thread of AMD EPYC: **every arm trained for the same 20 seconds**" in small
    assert "| deep | 1 | 8 | .900 | .890 | .800 | .090 | .010 | .700 | .850 / .850 | 0.37 |" in small
    assert "--network small --seconds 20 --repeats 1" in small


def test_what_a_claim_says_of_some_sets_only_stands_in_their_columns():
    claim = {"claim": "it falls", "verdict": "reproduced", "note": "reproduced"}
    layout = {"kind": "claims", "columns": ["the document says", "a", "b", "verdict"]}
    table = results.table_of([claim | {"cases": ["b"], "measured": ["3 of 10"]}], layout)
    assert "| it falls | | 3 of 10 | reproduced | reproduced |" in table
    layout_of_one = {"kind": "claims", "columns": ["the document says", "measured", "verdict"]}
    assert "| it falls | 3; 4 | reproduced |" in results.table_of([claim | {"measured": ["3", "4"]}], layout_of_one)
    with pytest.raises(AssertionError, match="more or fewer cells"):
        results.table_of([claim | {"measured": ["3 of 10"]}], layout)


def test_claims_on_heads_go_by_arms_of_the_documents_epochs():
    frame = diversification.pretrained(results.load("diversification"))
    own = diversification.as_the_document(frame[frame["setting.backbone"] == "pretrained C=100"])
    guided = [f"ldr={s} none A=2 M=5" for s in (0, 0.1, 0.5, 1, 5)] + [
        "ldr=0.5 none A=2 M=10",
        "ldr=0.5 none A=2 layers=1 M=5",
    ]
    rows = [*guided, "ldr=0.5 inverse probability A=2 M=5", "two-stage=0.5 A=2 M=5", "deep M=5", "divdis=1 M=5"]
    chosen = own[own["row"].isin(rows)]
    # Groups are means over their sets: arms that are compared are judged by the same ones.
    sets = own[own["training.epochs"].notna()].filter(regex=r"^auroc\..*\.bma$").dropna(axis=1, how="all")
    assert sets.loc[:, ~sets.columns.str.startswith("auroc.textures")].notna().all(axis=None)
    assert set(chosen["training.epochs"]) == {10}
    assert (chosen.groupby("row").size() == 3).all()
    assert len(chosen) == 3 * len(rows)


def test_what_drawing_costs_is_judged_by_the_fastest_of_seeds():
    made = {"machine": "AMD EPYC", "versions": {"torch": "2.13"}, "date": "2026-11-19", "seconds": 6.0}

    def row(active, members, ms):
        numbers = {"family": "timed", "setting": {"active": active, "num_members": members}, "ms": ms}
        return {"table": "diversification/runs", "numbers": numbers} | made

    times = {(2, 2): 10, (2, 5): 10, (3, 5): 15, (4, 5): 20, (5, 5): 25, (2, 50): 12, (10, 50): 48}
    rows = [row(*drawn, ms * slow) for drawn, ms in times.items() for slow in (1.0, 1.4 if drawn == (2, 50) else 1.0)]
    (found,) = diversification.judged_times(rows).values()
    assert (found["verdict"], found["seeds"]) == ("reproduced", 2)
    assert found["measured"][0] == "(3, 4 and 5 of 5 take 1.50, 2.00, 2.50 times as long as 2, 10 of 50 4.0 times)"
    # A little faster with one more is noise; as fast with five as with two is not what the document says.
    (noisy,) = diversification.judged_times(
        [row(*drawn, 19 if drawn == (5, 5) else ms) for drawn, ms in times.items()]
    ).values()
    assert noisy["verdict"] == "reproduced"
    (flat,) = diversification.judged_times([row(*drawn, min(ms, 12)) for drawn, ms in times.items()]).values()
    assert flat["note"] == "reproduced for pairs; not reproduced for the more are drawn"
    (slow,) = diversification.judged_times([row(2, 50, 20), *rows[:10], *rows[12:]]).values()
    assert (slow["verdict"], slow["note"]) == (
        "not reproduced",
        "reproduced for the more are drawn; not reproduced for pairs",
    )
    assert diversification.judged_times(rows[:10]) == {}


def _practical_arms():
    """Return arms of both practicals with repeats that differ in everything."""
    chance = np.random.default_rng(0)
    regressed = {"nll", "nll_attacked", "rmse", "wild", "overfit", *deep_recorded.BY_COLUMN.values()}
    regressed |= {f"{what}_{where}" for what in ("sd", "knowledge", "coverage") for where in regression.REGIONS}
    judged = {"confidence_far_member_above_99", "confidence_radius_10", "data_share_boundary", "entropy_boundary_far"}
    judged |= {"agreed_far", "knowledge_far_boundary", "knowledge_far_elsewhere", "uncertain_area_inside"}
    judged |= {*deep_recorded.FITS.values(), *deep_recorded.PLANE.values()}
    settings = {"quick": False, "seed": 0}

    def record(names, repeats, **rest):
        values = {name: chance.random(repeats).tolist() for name in sorted(names)}
        return rest | {"repeats": values, "made": MADE, "arm_seconds": 6.0}

    for (place, arm), count in product(enumerate(regression.ARMS), regression.COUNTS):
        own = record(regressed, 20, arm=arm, members=count)
        own["repeats"]["nll"] = [4.0 - 0.1 * place - 0.3 * (1 - 1 / count) + 0.01 * i for i in range(20)]
        yield {"arm": f"regression {arm} M={count}", "settings": settings, "record": own}
    seeds = {name: [1.0, 2.0, 3.0] for name, _ in deep_recorded.OF_SEEDS.values()}
    yield {
        "arm": "regression seeds",
        "settings": settings,
        "record": {"seeds": seeds, "made": MADE, "arm_seconds": 6.0},
    }
    for arm in spirals.ARMS:
        yield {"arm": f"spirals {arm}", "settings": settings, "record": record(judged, 6, arm=arm)}


def test_the_practicals_tables_and_verdicts_are_those_of_their_arms(tmp_path):
    _copied(tmp_path, "deep-ensembles/runs")
    _ran(tmp_path, "deep-ensembles-practicals", [*_practical_arms()])
    page = results.pages(tmp_path)["deep-ensembles.md"]
    assert "≤ 4 | | 1 | 1.5 | 2 | 2.5 | 3 |" in page
    # Of one net 4 + .095, of twenty .285 less; the error of evenly spaced values.
    assert "| Gaussian | 1 | 4.095 ± 0.013 |" in page
    assert "| | 20 | 3.810 ± 0.013 |" in page
    claims = deep_recorded.judged_claims(results.load("deep-ensembles", tmp_path))
    better = claims[f"{deep_recorded.BY_MEMBERS}-2"]["More members predict better (NLL of 20 against 6)."]
    assert (better["verdict"], better["seeds"]) == ("reproduced", 20)
    known = {line["claim"] for line in results.load("claims") if line.get("document") == "004"}
    assert {text for own in claims.values() for text in own} <= known


def test_what_a_regime_of_ours_says_of_a_claim_counts_as_none_of_the_document_s():
    lines = results.load("claims")
    ours = [line["claim"] for line in lines if line.get("regime") not in (None, "tables")]
    assert len(ours) == 10
    claims = results.documents_claims(lines)
    assert not any("regime" in claim for claim in claims)
    pages = results.pages()
    assert f"make {len(claims)} claims" in pages["claims.md"]
    assert "networks trained apart cannot be averaged" not in pages["claims.md"]
    assert all(f"| {text} |" in pages["diversification.md"].split("### Every method, and claims")[1] for text in ours)


def test_every_line_of_a_figure_is_drawn_from_the_record():
    for study in ("anchoring", "collusion", "masksembles"):
        rows = [row for row in results.load(study) if row["table"] == f"{study}/figures"]
        drawn = results.page_figures(rows)
        assert set(drawn) == {row["arm"][0] for row in rows}
        for name, figure in drawn.items():
            assert (results.PAGES / f"{name}.svg").is_file()
            lines = [line for ax in figure.axes for line in ax.lines]
            assert len(lines) == sum(row["arm"][0] == name for row in rows)
