"""The practical's two experiments: what must hold of them, and the measurements that answer its questions."""

import functools
import importlib
import inspect
import json
import math
import subprocess
import sys

import pytest
import torch
from dissensus_studies import STUDIES
from dissensus_studies.deep_ensembles import regression, spirals
from dissensus_studies.deep_ensembles.networks import fit_own_sets, scaled_mlp
from dissensus_studies.deep_ensembles.regression import practical_scales
from dissensus_studies.harness.claims import Claim
from dissensus_studies.harness.statistics import Comparison, Summary
from torch import nn
from torch.distributions import Categorical, Laplace, MixtureSameFamily, Normal

from dissensus.members import DeepEnsemble
from dissensus.objectives import Independent
from dissensus.predictions import predict
from dissensus.training import fit


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES.keys())
class TestStudyContract:
    def test_its_module_has_a_run_with_the_common_signature(self, study):
        parameters = inspect.signature(importlib.import_module(study.module).run).parameters
        assert list(parameters)[:4] == ["output", "quick", "seed", "data"]
        defaults = [each.default for each in parameters.values() if each.kind != inspect.Parameter.VAR_KEYWORD]
        assert defaults[1:4] == [False, 0, None]
        assert inspect.Parameter.empty not in defaults[4:], "what a study takes beyond that can be left out"

    def test_it_is_listed_under_its_name_with_a_summary(self, study):
        assert STUDIES[study.name] is study
        assert study.summary


def test_listing_studies_imports_none_of_them():
    code = (
        "import sys, dissensus_studies as s; "
        "print([m for m in sys.modules if m.startswith('dissensus_studies.') or m == 'matplotlib'])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_all_parameters_of_a_scaled_net_have_its_scale():
    net = scaled_mlp((50, 200, 100), 0.3, 1, "key")
    for parameter in net.parameters():
        # The standard error of a standard deviation of n draws is sd / sqrt(2 n).
        assert parameter.std().item() == pytest.approx(0.3, abs=4 * 0.3 / math.sqrt(2 * parameter.numel()))


def test_a_scaled_net_depends_on_its_key_alone():
    state = torch.get_rng_state()
    first, again, other = (scaled_mlp((1, 5, 2), 0.1, 0, word)[0].weight for word in ("a", "a", "b"))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_members_on_own_sets_become_what_they_become_alone():
    torch.manual_seed(0)
    x, y = torch.randn(3, 20, 2), torch.randn(3, 20, 1)
    nets = [scaled_mlp((2, 8, 2), 0.5, member) for member in range(4)]
    sets = [2, 0, 1, 2]
    settings = {"epochs": 3, "batch_size": 20, "optimizer": "adam", "lr": 0.01}
    together = DeepEnsemble.from_members(nets)
    fit_own_sets(together, x, y, sets, Independent("gaussian_nll"), **settings)
    points = torch.randn(5, 2)
    for member, (net, own) in enumerate(zip(nets, sets, strict=True)):
        alone = DeepEnsemble.from_members([net])
        fit(alone, (x[own], y[own]), objective=Independent("gaussian_nll"), device="cpu", **settings)
        torch.testing.assert_close(together(points)[member], alone(points)[0], rtol=1e-4, atol=1e-5)


def test_the_sign_test_has_its_exact_probability():
    # Closed form: 9 of 10 or more uneven, on both sides: 2 (1 + 10) / 2^10.
    compared = Comparison.of([0.0] * 10, [-1.0] * 9 + [1.0])
    assert compared.p == pytest.approx(22 / 1024)
    assert compared.verdict == "lower"
    assert Comparison.of([0.0] * 10, [-1.0] * 8 + [1.0] * 2).verdict == "unresolved"
    assert Comparison.of([0.0] * 6, [1.0] * 6).verdict == "higher"
    assert Comparison.of([1.0, 2.0], [1.0, 2.0]).p == 1.0


def test_a_summary_has_mean_standard_error_and_median():
    summary = Summary((1.0, 2.0, 6.0))
    assert (summary.mean, summary.median) == (3.0, 2.0)
    assert summary.error == pytest.approx(math.sqrt(7 / 3))
    assert Summary((1.0,)).as_json()["error"] is None


@pytest.mark.parametrize(
    ("cases", "verdict"),
    [
        (["lower", "lower"], "reproduced"),
        (["lower", "higher"], "reproduced for case 0; not reproduced for case 1"),
        (["unresolved", "unresolved"], "unresolved"),
        (["unresolved", "higher"], "unresolved for case 0; not reproduced for case 1"),
    ],
)
def test_claims_are_judged_over_all_their_cases(cases, verdict):
    after = {"lower": -1.0, "higher": 1.0}
    compared = {
        f"case {number}": Comparison.of([0.0] * 6, [after[case]] * 6 if case in after else [-1.0, 1.0] * 3)
        for number, case in enumerate(cases)
    }
    assert Claim.compared("it falls", "lower", compared).verdict == verdict


def constant_nets(means, scales):
    """Nets that predict one mean and scale everywhere."""
    nets = []
    for mean, scale in zip(means, scales, strict=True):
        net = nn.Linear(1, 2)
        nn.init.zeros_(net.weight)
        # softplus(rho) + 1e-6 is the scale.
        net.bias.data = torch.tensor([mean, math.log(math.expm1(scale - 1e-6))])
        nets.append(net)
    return nets


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_measurements_are_those_of_the_mixture_distribution(family):
    means, scales = [-1.0, 1.0, 0.0, 4.0], [1.0, 2.0, 0.5, 1.0]
    ensemble = DeepEnsemble.from_members(constant_nets(means, scales)).eval()
    x, y = torch.zeros(2, 3, 1), torch.tensor([[[0.0], [1.0], [5.0]], [[2.0], [-2.0], [0.5]]])
    trained = regression.Repeats(Independent(f"{family}_nll"), ensemble, x, y)
    test = torch.linspace(-3, 3, 7)[:, None], torch.linspace(-4, 6, 7)[:, None]
    found = regression.measure(trained, 2, test)
    kind = Normal if family == "gaussian" else Laplace
    for repeat in range(2):
        own = slice(2 * repeat, 2 * repeat + 2)
        parts = kind(torch.tensor(means[own]).double(), torch.tensor(scales[own]).double())
        whole = MixtureSameFamily(Categorical(torch.ones(2).double()), parts)
        target = test[1][:, 0].double()
        assert found["nll"].values[repeat] == pytest.approx(-whole.log_prob(target).mean().item(), rel=1e-5)
        train_nll = -whole.log_prob(y[repeat, :, 0].double()).mean().item()
        assert found["nll_train"].values[repeat] == pytest.approx(train_nll, rel=1e-5)
        rmse = (target - whole.mean).square().mean().sqrt().item()
        assert found["rmse"].values[repeat] == pytest.approx(rmse, rel=1e-5)
        assert found["sd_outside"].values[repeat] == pytest.approx(whole.stddev.item(), rel=1e-5)
        assert found["knowledge_near"].values[repeat] == pytest.approx(parts.loc.std(correction=0).item(), rel=1e-5)
        _, near = regression.region("near")
        below = whole.cdf(near[:, 0].double())
        covered = ((below >= 0.05) & (below <= 0.95)).double().mean().item()
        assert found["coverage_near"].values[repeat] == pytest.approx(covered)
        # Constant nets have no slope: an attack cannot move their inputs.
        assert found["nll_attacked"].values[repeat] == pytest.approx(found["nll"].values[repeat])


def test_an_attack_moves_inputs_by_epsilon_up_each_ensembles_loss():
    nets = [scaled_mlp((1, 10, 2), 1.0, member) for member in range(8)]
    x, y = torch.randn(2, 5, 1), torch.randn(2, 5, 1)
    trained = regression.Repeats(regression.PLAIN, DeepEnsemble.from_members(nets).eval(), x, y)
    test = torch.randn(30, 1), torch.randn(30, 1)
    moved = regression.attack(trained, 2, test)
    assert moved.shape == (2, 2, 30, 1)
    step = (moved - test[0]).abs()
    torch.testing.assert_close(step, torch.full_like(step, regression.EPSILON), rtol=1e-4, atol=0)
    before = regression.PLAIN.likelihood.mixture(trained.outputs(test[0], 2), test[1])
    after = regression.PLAIN.likelihood.mixture(trained.outputs(moved, 2), test[1])
    assert (after > before).double().mean() > 0.9


def test_ensembles_of_any_size_are_made_of_all_nets():
    assert all(regression.NETS % count == 0 for count in regression.COUNTS)


@pytest.fixture(scope="module")
def practical():
    return regression.train_practical()


def test_every_member_of_the_practical_ends_between_2_and_12_nats(practical):
    losses = regression.final_losses(practical).tolist()
    assert len(losses) == 6
    assert all(2 < loss < 12 for loss in losses)


def test_the_practicals_mixture_is_less_sure_where_there_are_no_data(practical):
    inside, outside = (
        regression.moments(predict(practical.members, regression.region(place)[0]))[3].mean()
        for place in ("inside", "outside")
    )
    assert outside > inside


def test_the_practicals_members_start_from_its_scales():
    run = regression.train_practical(steps=1)
    # One step of Adam moves every parameter by at most the learning rate.
    for member, scale in enumerate(practical_scales().values()):
        parameters = torch.cat([p.flatten() for p in run.members.member(member).parameters()])
        start = torch.cat(
            [p.flatten() for p in scaled_mlp(regression.SIZES, scale, 0, "practical", member).parameters()]
        )
        assert (parameters - start).abs().max() <= 1.001 * regression.LEARNING_RATE
        assert start.std().item() == pytest.approx(scale, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["practical", "usual loss"])
def test_the_practicals_spirals_are_learnt_and_unknown_beyond_the_data(arm):
    run = spirals.train_spirals(arm, check_every=spirals.STEPS)
    found = spirals.measure(run, spirals.Plane(run.members))
    assert found["train_accuracy"] >= 0.95
    assert found["train_nll"] <= 0.15
    assert found["knowledge_far"] > found["knowledge_data"]
    # Members are confidently wrong together in far corners.
    assert found["agreed_corners"] >= 2
    assert found["confidence_far"] > found["confidence_data"]


def test_the_parity_loss_is_the_practicals():
    ensemble = DeepEnsemble.from_members([scaled_mlp(spirals.SIZES, 0.1, m) for m in range(2)])
    x, y = spirals.spirals()
    loss, parts = spirals.ARMS["practical"](ensemble.view(), x, y, _step(ensemble))
    expected = 0.0
    for member in range(2):
        net = ensemble.member(member)
        mean_over_all = -(net(x).log_softmax(-1) * nn.functional.one_hot(y, 3)).mean()
        norm = torch.sqrt(sum(p.square().sum() for p in net.parameters()))
        torch.testing.assert_close(parts["norm"][member], norm.detach())
        expected = expected + mean_over_all + 1e-3 * norm
    torch.testing.assert_close(loss, expected)


def _step(ensemble):
    from dissensus.objectives import Step

    return Step(torch.tensor(0), 1, False, ensemble.member_keys, torch.tensor(0))


def test_boundaries_are_found_where_the_predicted_class_changes():
    # One linear net that says class 1 to the right of 0.5, wherever up or down.
    net = nn.Linear(2, 2)
    net.weight.data, net.bias.data = torch.tensor([[0.0, 0.0], [4.0, 0.0]]), torch.tensor([0.0, -2.0])
    plane = spirals.Plane(DeepEnsemble.from_members([net]), -1.0, 1.0, side=9)
    edge = plane.grid(plane.boundary())
    # Columns are at -1, -0.75, ...; at 0.5 both classes tie and the first wins.
    assert edge.all(0).nonzero().flatten().tolist() == [6, 7]
    assert edge.sum() == 18


def check_outputs(folder, page):
    assert page == folder / "report.html"
    assert "<svg" in page.read_text(encoding="utf-8")
    drawn = {path.stem for path in folder.glob("*.svg")}
    assert drawn == {path.stem for path in folder.glob("*.png")}
    assert drawn
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def test_the_regression_study_writes_its_page(tmp_path, monkeypatch, capsys):
    counts = (1, 2, 6)
    monkeypatch.setattr(regression, "COUNTS", counts)
    monkeypatch.setattr(regression, "train_practical", functools.partial(regression.train_practical, steps=20))
    few = functools.partial(regression.train_repeats, steps=20, num_members=6)
    monkeypatch.setattr(regression, "train_repeats", few)
    page = STUDIES["practical-regression"].run(tmp_path / "new" / "folder", quick=True)
    results = check_outputs(tmp_path / "new" / "folder", page)
    assert len(results["repeats"]) == len(regression.ARMS) * len(counts)
    assert all(claim["verdict"] for claim in results["claims"])
    lines = [json.loads(line) for line in (tmp_path / "new" / "folder" / "arms.jsonl").read_text().splitlines()]
    assert len(lines) == len(results["repeats"]) + 1
    assert lines[0]["record"]["repeats"]["nll"] == results["repeats"]["Gaussian, 1 members"]["nll"]["values"]
    assert lines[0]["settings"]["quick"]
    assert "Laplace + adversarial" in capsys.readouterr().out


def test_the_classification_study_writes_its_page(tmp_path, monkeypatch, capsys):
    original = spirals.train_spirals

    def train(arm, seed, steps, **settings):
        return original(arm, seed, 10, **{**settings, "check_every": 5, "engine": "eager"})

    monkeypatch.setattr(spirals, "Plane", functools.partial(spirals.Plane, side=41))
    monkeypatch.setattr(spirals, "train_spirals", train)
    page = STUDIES["practical-classification"].run(tmp_path, quick=True)
    results = check_outputs(tmp_path, page)
    assert set(results["arms"]) == set(spirals.ARMS)
    lines = (tmp_path / "arms.jsonl").read_text().splitlines()
    assert [json.loads(line)["record"]["arm"] for line in lines] == [*spirals.ARMS]
    assert "usual loss" in capsys.readouterr().out


def test_member_seeds_and_scales_are_the_practicals_print_out_exactly():
    assert practical_scales() == {
        672: 0.05341477341995916,
        7888: 0.12899350046504218,
        3587: 0.06450740460784611,
        1379: 0.1859958185502153,
        5820: 0.021813948079358225,
        19048: 0.17893712367557665,
    }


def test_asking_for_more_members_leaves_earlier_scales_as_they_were():
    scales = list(practical_scales(20).values())
    assert scales[:6] == list(practical_scales(6).values())
    assert len(set(scales)) == 20
