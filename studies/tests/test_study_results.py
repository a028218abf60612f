"""Pages are what the record says: every table, verdict and claim on them is written from it."""

import json
from decimal import Decimal
from itertools import product

import pytest
from anchoring_records import record
from dissensus_studies import recorded, results
from dissensus_studies.harness.statistics import ece_floor, typical_confidence


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
    found = recorded.over([1.0, 2.0, 3.0])
    assert found.half == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert (found.sign, recorded.over([2.0, 2.1, 2.2]).sign, recorded.over([5.0]).sign) == (0, 1, 0)
    cases = {"a": recorded.over([2.0, 2.1, 2.2]), "b": recorded.over([-1.0, 1.0, 0.0])}
    assert recorded.judged(cases) == ("within noise", "holds for a, elsewhere within noise")
    assert recorded.judged({"a": cases["a"]})[0] == "reproduced"
    assert recorded.judged(cases | {"c": recorded.over([-2.0, -2.1, -2.2])})[0] == "not reproduced"


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
        assert all(
            claim["verdict"] in results.VERDICTS and claim["command"].startswith("dissensus study") for claim in claims
        )
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
    (row,) = results.load("masksembles", tmp_path)
    assert (row["machine"], row["source"], row["seconds"]) == ("a GPU", "run", Decimal("3.0"))
    assert row["numbers"] == {"accuracy": Decimal("0.5")}


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
    assert "CIFAR-10, 80 epochs (the document's 80), 8 arms in 40 minutes, a GPU" in after
    claims = {claim["claim"]: claim for claim in results.load("claims", tmp_path) if "claim" in claim}
    first = next(claim for text, claim in claims.items() if text.startswith("Joint training has the lowest accuracy"))
    assert (first["verdict"], first["seeds"]) == ("reproduced", 2)
    assert claims["It does so only near 1."]["verdict"] == "reproduced"
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
    assert "80 epochs (the document's 80), stopped after 34 to 35, 6 arms" in page
    claims = {claim["claim"]: claim for claim in results.load("claims", tmp_path) if "claim" in claim}
    between = claims["The CNN has its lowest test error between the ends (figure 15)."]
    assert (between["verdict"], between["seeds"]) == ("reproduced", 2)
    assert claims["Joint training is poor for the CNN, five members (figure 15)."]["verdict"] == "reproduced"
    assert claims["… ten members (figure 15)."]["verdict"] == results.VERDICTS[-1]


def _without_runs(study, folder):
    """Copy the records without what runs of a study measured."""
    for path in results.RECORDS.glob("*.jsonl"):
        rows = [line for line in path.read_text(encoding="utf-8").splitlines() if f'"{study}/runs"' not in line]
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

    @pytest.mark.parametrize(
        "changes", [{"rows": ("plain",)}, {"epochs": 30}, {"limit": 100}, {"together": True}], ids=str
    )
    def test_what_is_not_enough_changes_nothing(self, changes, records, tmp_path):
        before = results.pages(records)["anchoring.md"], (records / "claims.jsonl").read_text(encoding="utf-8")
        page, _ = _add(_anchored_arms(**changes), tmp_path / "anchoring", records)
        assert (page, (records / "claims.jsonl").read_text(encoding="utf-8")) == before

    def test_networks_of_the_document_s_length_fill_the_page(self, records, tmp_path):
        page, claims = _add(_anchored_arms(), tmp_path / "anchoring", records)
        assert (
            "**Ours on CIFAR-10 are means over 2 seeds of 200 epochs, as the document's**: 8 networks in 40 minutes"
            in page
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
        assert claims["Masked anchoring keeps clean accuracy (within one point)."]["verdict"] == "not reproduced"
        assert claims["Masking detects unknown images better than a plain network."]["verdict"] == "within noise"
        assert claims["Hard-delta mining costs accuracy under corruption."]["verdict"] == "within noise"
        drawn = results.page_figures(results.shown("anchoring", records))["anchoring-alpha"].axes
        assert drawn[0].lines[0].get_xdata().tolist() == [0.0, 0.25]
        assert drawn[0].lines[0].get_ydata().tolist() == pytest.approx([0.951, 0.931])

    def test_mining_needs_the_masked_network_only(self, records, tmp_path):
        before = results.pages(records)["anchoring.md"]
        arms = _anchored_arms(rows=("alpha=0.25", "alpha=0.25 tail=1 diagonal"))
        page, claims = _add(arms, tmp_path / "anchoring", records)
        tables = [text.split("<summary>Claims")[0].split("How ours are measured")[1] for text in (before, page)]
        assert tables[0] == tables[1]
        assert claims["Hard-delta mining raises AUROC."]["verdict"] == "within noise"

    def test_another_known_set_has_tables_and_claims_of_its_own(self, records, tmp_path):
        page, claims = _add(_anchored_arms(data="cifar100"), tmp_path / "anchoring-cifar100", records)
        assert "short runs**: 10 epochs" in page
        assert "Ours on CIFAR-100 are means over 2 seeds" in page
        assert "| resnet18 | alpha=0.25 | 0.080 | 0.051 | 0.110 | 0.051 |" in page
        judged = claims["Masked anchoring lowers the smooth ECE under corruption (CIFAR-100)."]
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
            "row": row,
            "setting": {"architecture": "resnet18", "alpha": 0.25 if masked else 0.0, "seed": seed},
            "training": {"epochs": epochs, "history": {"loss": [1.0]}},
            "arm_seconds": 300.0,
            "made": {"date": "2026-11-19", "torch": "2", "device": "a GPU"},
        }
        found |= {"together": {"nets": 2, "references": 5}} if together else {}
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


def test_every_line_of_a_figure_is_drawn_from_the_record():
    for study in ("anchoring", "collusion", "masksembles"):
        rows = [row for row in results.load(study) if row["table"] == f"{study}/figures"]
        drawn = results.page_figures(rows)
        assert set(drawn) == {row["arm"][0] for row in rows}
        for name, figure in drawn.items():
            assert (results.PAGES / f"{name}.svg").is_file()
            lines = [line for ax in figure.axes for line in ax.lines]
            assert len(lines) == sum(row["arm"][0] == name for row in rows)
