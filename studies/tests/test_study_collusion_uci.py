"""Regression ensembles between independent and joint training: data, training, measures, protocol, pages."""

import itertools
import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from dissensus_studies import STUDIES
from dissensus_studies.collusion import theory, uci
from dissensus_studies.collusion.uci import (
    SEARCH_SPACE,
    Rows,
    Settings,
    by_set,
    measure_all,
    train,
    train_again,
    uci_claims,
)

import dissensus as ds
from dissensus import objectives as obj
from dissensus.architectures import mlp
from dissensus.randomness import derive

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
shared = pytest.mark.skipif(
    not (SHARED / "uci" / "abalone.csv").is_file(), reason="the UCI tables are not in ../shared/data"
)
SMALL = {"lr": 0.01, "batch_size": 32, "weight_decay": 0.001, "num_members": 3, "hidden": 8, "layers": 1}


def make_problem(rows=150, seed=0):
    rng = np.random.default_rng(seed)
    x = np.column_stack([rng.normal(size=(rows, 3)), rng.lognormal(0, 1.5, rows), rng.integers(0, 2, rows)])
    y = np.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 4] + rng.normal(0, 0.2, rows)
    return Rows(torch.from_numpy(x), torch.from_numpy(y))


@pytest.fixture(scope="module")
def split():
    return uci.split_problem(make_problem(), "document", 0, "test")


def test_a_skewed_feature_becomes_its_logarithm_and_others_stay():
    problem = make_problem()
    train_rows = torch.arange(100)
    logs = uci.log_skewed(problem.x, train_rows)
    lowest = problem.x[:100, 3].min()
    torch.testing.assert_close(logs[:, 3], torch.log1p((problem.x[:, 3] - lowest).clamp_min(0)))
    torch.testing.assert_close(logs[:, [0, 1, 2, 4]], problem.x[:, [0, 1, 2, 4]])
    # A 0/1 feature may be as skewed as it likes.
    rare = torch.cat([torch.zeros(99, 1), torch.ones(1, 1)])
    torch.testing.assert_close(uci.log_skewed(rare, train_rows), rare)


def test_a_split_holds_every_row_once_in_the_documents_shares():
    problem = make_problem(rows=200)
    marked = Rows(torch.arange(200.0).double()[:, None], torch.arange(200.0).double())
    parts = uci.split_problem(marked, "document", 5)
    assert [len(part.x) for part in (parts.test, parts.validation, parts.train)] == [40, 32, 128]
    # Standardising keeps the order, so ranks tell the rows.
    joined = torch.cat([parts.test.x, parts.validation.x, parts.train.x]).flatten()
    assert len(joined.unique()) == 200
    other = uci.split_problem(problem, "document", 6)
    assert not torch.equal(other.test.x, uci.split_problem(problem, "document", 7).test.x)


def test_parts_are_standardised_on_the_training_rows(split):
    torch.testing.assert_close(split.train.x.mean(0), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(split.train.x.std(0, correction=0), torch.ones(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(split.train.y.std(0, correction=0), torch.ones(1), atol=1e-5, rtol=0)
    assert split.test.x.mean(0).abs().max() > 1e-3


def test_a_category_that_no_training_row_has_is_no_nan():
    values = torch.zeros(10, 1, dtype=torch.float64)
    values[9] = 1.0
    assert uci.standardised(values, torch.arange(9))[9].item() == 1.0


@pytest.mark.parametrize("beta", [0.0, 0.7, 1.0])
def test_every_beta_is_trained_and_stopped_as_fit_does_it_with_the_joint_objective(split, beta):
    found = train(split, SMALL, beta, Settings(most_epochs=40), 3)
    ensemble = ds.DeepEnsemble(lambda: mlp(5, [8], 1), 3, derive(3, "start"))
    run = ds.fit(
        ensemble,
        split.train,
        objective=obj.Joint(beta, "mse"),
        epochs=40,
        batch_size=32,
        optimizer="adam",
        lr=0.01,
        weight_decay=0.001,
        validation=split.validation,
        patience=5,
        seed=3,
        device="cpu",
    )
    assert found.validation_error == pytest.approx(run.best, rel=1e-3)
    assert found.epochs * 3 == run.best_step
    found_outputs, wanted = (ds.predict(each, split.test.x)[..., 0] for each in (found.members, ensemble))
    torch.testing.assert_close(found_outputs, wanted, atol=2e-3, rtol=1e-3)


def test_training_again_with_the_validation_rows_takes_the_epochs_found_without_them(split):
    for beta in (0.0, 1.0):
        once = train(split, SMALL, beta, Settings(most_epochs=8), 3)
        again = train_again(split, SMALL, beta, once.epochs, 3)
        ensemble = ds.DeepEnsemble(lambda: mlp(5, [8], 1), 3, derive(3, "start"))
        ds.fit(
            ensemble,
            (torch.cat([split.train.x, split.validation.x]), torch.cat([split.train.y, split.validation.y])),
            objective=obj.Joint(beta, "mse"),
            epochs=once.epochs,
            batch_size=32,
            optimizer="adam",
            lr=0.01,
            weight_decay=0.001,
            seed=3,
            device="cpu",
            engine="eager",
        )
        found, wanted = (ds.predict(each, split.test.x)[..., 0] for each in (again, ensemble))
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3)


def test_ensembles_with_the_same_beta_end_the_same_and_members_differ(split):
    first, again = (
        ds.predict(train(split, SMALL, 0.5, Settings(most_epochs=3), 0).members, split.test.x)[..., 0] for _ in range(2)
    )
    torch.testing.assert_close(first, again)
    assert (first[0] - first[1]).abs().max() > 0.01


def test_a_run_measures_an_ensemble_before_and_after_training_it_again(monkeypatch):
    monkeypatch.setattr(uci, "search", lambda *rest: (SMALL, []))
    asked = Settings(betas=(0.0, 1.0), most_epochs=3, on_validation_too=True)
    rows = uci.measure_run("made", 0, make_problem(), asked)["betas"]
    for row in rows:
        assert row["again"]["mse"] != row["mse"]
        assert row["again"]["member_mse"] - row["again"]["mse"] == pytest.approx(row["again"]["diversity"], rel=1e-6)
    runs = [{"set": "made", "run": 0, "betas": rows}]
    before, after = (by_set(runs, again)["made"]["mse"].tolist() for again in (False, True))
    assert before == [row["mse"] for row in rows]
    assert after == [row["again"]["mse"] for row in rows]


def test_joint_training_explodes_in_diversity_and_a_fifth_of_the_members_is_missed_as_the_closed_form_says():
    # The check of ten members with one layer of twenty units, 150 epochs without stopping early.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(800, 8, generator=generator)
    signal = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * x[:, 3].abs()
    y = ((signal + 0.3 * torch.randn(800, generator=generator)) / signal.std())[:, None]
    measured = []
    for beta in (0.0, 1.0):
        nets = ds.DeepEnsemble(lambda: mlp(8, [20], 1), 10, 0)
        options = {"epochs": 150, "batch_size": 32, "optimizer": "adam", "lr": 0.01, "device": "cpu"}
        ds.fit(nets, (x[:400], y[:400]), objective=obj.Joint(beta, "mse"), engine="captured", **options)
        measured.append(uci.measure(ds.predict(nets, x[400:])[..., 0], y[400:, 0]))
    apart, joint = measured
    assert joint["diversity"] > 50 * apart["diversity"]
    assert joint["mse"] > apart["mse"]
    for share in uci.DROP_SHARES:
        assert joint[f"drop_{share:g}"] == pytest.approx(joint[f"drop_{share:g}_expected"], rel=0.03)


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6])
def test_the_expected_increase_is_the_mean_over_all_choices_of_members(share):
    torch.manual_seed(1)
    outputs, targets = torch.randn(5, 6).double(), torch.randn(6).double()
    left = 5 - int(5 * share)
    errors = [
        (outputs[list(kept)].mean(0) - targets).square().mean() for kept in itertools.combinations(range(5), left)
    ]
    increase = torch.stack(errors).mean() - (outputs.mean(0) - targets).square().mean()
    found = [uci.measure(outputs, targets, seed=seed) for seed in range(40)]
    assert found[0][f"drop_{share:g}_expected"] == pytest.approx(increase.item(), abs=1e-12)
    assert fmean(each[f"drop_{share:g}"] for each in found) == pytest.approx(increase.item(), rel=0.1)


def test_members_are_dropped_row_by_row():
    # One member is off by 10 on all rows. Per row about a fifth of the rows lose it: the mean over rows hardly varies between
    # repeats; if it were lost on all rows or none, single repeats would be 0 or 4.
    outputs = torch.zeros(5, 2000, dtype=torch.float64)
    outputs[0] = 10.0
    single = [uci.measure(outputs, torch.zeros(2000), seed=seed)["drop_0.2"] for seed in range(5)]
    kept = (10 / 4) ** 2
    assert single == pytest.approx([0.8 * kept - 4.0] * 5, abs=0.3)


def test_shifted_copies_are_all_bias_and_balanced_members_none():
    rows = torch.linspace(-1, 1, 50).double()
    shares = [
        uci.measure(torch.stack(members), torch.zeros(50))["bias_share"]
        for members in ([rows + 3, rows - 3], [rows, -rows], [rows + 0.5, -rows - 0.5])
    ]
    assert shares[:2] == pytest.approx([1.0, 0.0], abs=1e-12)
    assert shares[2] == pytest.approx(0.25 / (0.25 + rows.square().mean().item()))


def test_the_search_finds_a_better_configuration_than_its_first_ones():
    def evaluate(configuration):
        return (
            abs(configuration["lr"] - 0.005) * 100
            + abs(configuration["num_members"] - 15)
            + abs(configuration["hidden"] - 30) / 10
            + configuration["layers"]
        )

    best, tried = uci.search(evaluate, 20, seed=0)
    assert len(tried) == 20
    assert evaluate(best) == min(trial["value"] for trial in tried)
    assert evaluate(best) < min(trial["value"] for trial in tried[: uci.STARTUP_TRIALS])
    assert all(trial[name] in choices for trial in tried for name, choices in SEARCH_SPACE.items())
    assert uci.search(evaluate, 7, seed=1)[1] == uci.search(evaluate, 7, seed=1)[1]


def test_without_optuna_the_study_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(uci, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e \./studies"):
        STUDIES["collusion-uci"].run(tmp_path, quick=True)


def fake_run(name, run, problem, settings):
    betas = [{"beta": beta, **dict.fromkeys(("mse", "train_mse", "diversity"), 1.0)} for beta in settings.betas]
    return {"set": name, "run": run, "configuration": SMALL, "betas": betas}


def test_a_study_that_was_ended_goes_on_where_it_was(tmp_path, monkeypatch):
    problems = {"one": make_problem(), "two": make_problem()}
    begun = []

    def ends_at_the_fourth(name, run, *rest):
        begun.append((name, run))
        if len(begun) == 4:
            raise KeyboardInterrupt
        return fake_run(name, run, *rest)

    monkeypatch.setattr(uci, "measure_run", ends_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        measure_all(problems, 3, Settings(), tmp_path)
    lines = (tmp_path / "arms.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["arm"] for line in lines] == ["one run=0", "two run=0", "one run=1"]
    found = measure_all(problems, 3, Settings(), tmp_path)
    assert begun[3:] == [("two", 1), ("two", 1), ("one", 2), ("two", 2)]
    assert [(result["set"], result["run"]) for result in found] == list(itertools.product(("one", "two"), range(3)))
    # Runs with other settings are others: all begin anew.
    assert len(measure_all(problems, 3, Settings(search_beta=0.0), tmp_path)) == 6
    assert len(begun) == 7 + 6


def test_no_run_is_begun_after_the_time_and_sets_may_be_chosen(tmp_path, monkeypatch):
    problems = {"one": make_problem(), "two": make_problem()}
    assert measure_all(problems, 2, Settings(), tmp_path, minutes=-1) == []
    monkeypatch.setattr(uci, "measure_run", fake_run)
    found = measure_all(problems, 2, Settings(), tmp_path, only=["two"])
    assert [(result["set"], result["run"]) for result in found] == [("two", 0), ("two", 1)]


def test_runs_use_one_thread_and_give_the_others_back(tmp_path, monkeypatch):
    before, seen = torch.get_num_threads(), []

    def measured(name, run, *rest):
        seen.append(torch.get_num_threads())
        return {"set": name, "run": run}

    monkeypatch.setattr(uci, "measure_run", measured)
    torch.set_num_threads(2)
    try:
        measure_all({"made": None}, 2, Settings(), tmp_path)
        assert (seen, torch.get_num_threads()) == ([1, 1], 2)
    finally:
        torch.set_num_threads(before)


def with_numbers(**columns):
    """Ten runs of one set with the same numbers in each, at four values of beta."""
    betas = (0.0, 0.8, 0.9, 1.0)
    rows = [
        {"beta": beta, "train_mse": 0.1, "drop_0.6": 0.0, **{name: values[place] for name, values in columns.items()}}
        for place, beta in enumerate(betas)
    ]
    return by_set([{"set": "made", "run": run, "betas": rows} for run in range(10)])


def verdicts(sets):
    return [claim.verdict for claim in uci_claims(sets)]


def test_runs_that_collude_reproduce_every_claim():
    sets = with_numbers(
        mse=(0.5, 0.5, 0.5, 0.8),
        diversity=(0.02, 0.1, 0.2, 4.0),
        bias_share=(0.02, 0.02, 0.02, 0.5),
        **{"drop_0.6": (0.0, 0.01, 0.02, 0.6)},
    )
    assert set(verdicts(sets)) == {"reproduced"}


@pytest.mark.parametrize(
    ("error", "verdict", "measured"),
    [(0.52, "reproduced", "+4 %, 10 of 10"), (0.8, "not reproduced", "+60 %, 0 of 10")],
)
def test_one_set_is_said_to_be_unaffected_and_not_to_be_harmed(error, verdict, measured):
    same = {"diversity": (0.02,) * 4, "bias_share": (0.1,) * 4}
    claims = uci_claims({"facebook": with_numbers(mse=(0.5, 0.5, 0.5, error), **same)["made"]})
    assert not any(claim.statement.startswith("Joint training (β = 1) has a larger test error") for claim in claims)
    claim = next(claim for claim in claims if claim.statement.startswith("Facebook"))
    assert (claim.verdict, claim.measured) == (verdict, f"facebook: {measured}")


def test_a_set_is_judged_by_its_runs_and_not_by_their_mean():
    runs = with_numbers(mse=(0.5,) * 4, diversity=(0.02, 0.02, 0.02, 0.1), bias_share=(0.1, 0.1, 0.1, 0.5))["made"]
    runs.loc[(0, 1.0), "diversity"] = 1000.0
    explodes = next(claim for claim in uci_claims({"made": runs}) if claim.statement.startswith("It explodes"))
    assert (explodes.verdict, explodes.measured) == ("not reproduced", "made: 5 ×, 1 of 10")
    for run in range(3, 10):
        runs.loc[(run, 1.0), "diversity"] = 1000.0
    explodes = next(claim for claim in uci_claims({"made": runs}) if claim.statement.startswith("It explodes"))
    assert explodes.verdict == "unresolved"


def test_runs_that_do_not_collude_reproduce_only_that_diversity_is_low():
    sets = with_numbers(mse=(0.5, 0.5, 0.5, 0.4), diversity=(0.02,) * 4, bias_share=(0.1, 0.1, 0.1, 0.05))
    low = ("Diversity stays low for most β", "… and hardly elsewhere")
    for claim in uci_claims(sets):
        assert (claim.verdict == "reproduced") == claim.statement.startswith(low), claim


def test_the_quick_study_needs_no_data_and_writes_everything(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(uci, "QUICK", {"trials": 2, "most_epochs": 3})
    page = STUDIES["collusion-uci"].run(tmp_path / "out", quick=True, runs=2)
    names = {path.name for path in page.parent.iterdir()}
    figures = {"collusion_uci.svg", "collusion_uci.png"}
    assert figures | {"report.html", "results.json", "arms.jsonl"} <= names
    results = json.loads((page.parent / "results.json").read_text(encoding="utf-8"))
    assert len(results["claims"]) == 9
    rows = [row for run in results["runs"] for row in run["betas"]]
    assert len(rows) == 2 * 11
    for row in rows:
        assert row["member_mse"] - row["mse"] == pytest.approx(row["diversity"], rel=1e-6)
    assert "diabetes" in capsys.readouterr().out


def test_a_folder_without_tables_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="there are none in"):
        STUDIES["collusion-uci"].run(tmp_path / "out", data=tmp_path)


def test_an_unknown_setting_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`setting` must be 'tangos'"):
        STUDIES["collusion-uci"].run(tmp_path / "out", setting="imagenet")


def test_the_theory_page_has_the_shares_of_the_theorem(tmp_path, capsys):
    page = STUDIES["collusion-theory"].run(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    known = {2: [0.64, 0.8889, 1, 0.8889, 0.64, 0.36], 10: [0.3951, 0.6036, 0.8025, 0.9328, 0.9877, 1]}
    for members, *shares in results["gamma"]:
        if members in known:
            assert shares == pytest.approx(known[members], abs=1e-4)
    assert page.read_text(encoding="utf-8").count("<svg") == 4


def test_above_one_the_loss_falls_without_end():
    assert [theory.squared_loss(t, 1.1) for t in (1.0, 10.0, 100.0)] == pytest.approx([0.9, -9.0, -999.0])
    assert [theory.class_loss(power, 1.1) for power in (2, 6, 12)] == pytest.approx([0.631, 0.182, -0.508], abs=1e-3)


def test_shifting_members_apart_leaves_the_ensembles_error_and_adds_to_diversity_what_the_offsets_say():
    before, after = theory._errors_at(0.0), theory._errors_at(3.0)
    assert after[1] == pytest.approx(before[1], abs=1e-12)
    _, members, _ = theory.collude(0.0)
    offsets = torch.tensor([3.0, -3.0, 0.0]).double()
    deviation = (members - members.mean(0)).mean(1)
    added = (offsets.square().mean() + 2 * (offsets * deviation).mean()).item()
    assert after[2] - before[2] == pytest.approx(added)


@pytest.mark.shared
@shared
@pytest.mark.parametrize(
    ("name", "rows", "features"),
    [("bioconcentration", 779, 45), ("weather", 7588, 45), ("facebook", 495, 21), ("abalone", 4177, 9)],
)
def test_real_sets_have_all_their_rows_and_the_known_columns(name, rows, features):
    whole = uci.find_problems(SHARED)[name]
    assert whole.x.shape == (rows, features)
    assert torch.isfinite(whole.x).all()
    assert torch.isfinite(whole.y).all()
    shortened = uci.find_problems(SHARED, preparation="tangos")[name]
    assert shortened.x.shape == (min(rows, 1000 if name in ("weather", "abalone") else rows), features)


@pytest.mark.shared
@shared
def test_on_a_real_set_members_collude_at_one_and_not_before(monkeypatch):
    problem = uci.find_problems(SHARED)["bioconcentration"]
    configuration = SMALL | {"lr": 0.005, "weight_decay": 0.0, "num_members": 10, "hidden": 20, "layers": 2}
    monkeypatch.setattr(uci, "search", lambda *rest: (configuration, []))
    rows = uci.measure_run("bioconcentration", 0, problem, Settings(betas=(0.0, 0.8, 1.0)))["betas"]
    apart, nearly, joint = (row["diversity"] for row in rows)
    assert joint > 5 * nearly > 5 * apart
    assert all(row["mse"] < 0.6 for row in rows)
