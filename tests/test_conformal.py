"""Ranks, alarms, sets and intervals: formulas, guarantees in expectation, files, and use without torch."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus import conformal
from dissensus.data.files import load
from dissensus.scores import REGRESSION_SCORES, SCORES

RNG = np.random.default_rng(0)


def classifier(members=5, classes=3):
    return ds.DeepEnsemble(
        lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, classes)), num_members=members
    )


def regressor(outputs):
    return ds.DeepEnsemble(lambda: nn.Linear(2, outputs), num_members=4)


def inputs(num=120, seed=0):
    return torch.randn(num, 2, generator=torch.Generator().manual_seed(seed))


def counted(calibration, scores):
    """The p-value as its definition says, one score at a time."""
    return np.array([(1 + sum(c >= s for c in calibration)) / (len(calibration) + 1) for s in scores])


def test_p_values_follow_the_definition_also_with_ties():
    calibration = RNG.integers(0, 10, 57).astype(float)
    scores = RNG.integers(-2, 12, 200).astype(float)
    np.testing.assert_array_equal(conformal.p_values(calibration, scores), counted(calibration, scores))
    np.testing.assert_array_equal(
        conformal.p_values(torch.tensor(calibration, dtype=torch.bfloat16), scores), counted(calibration, scores)
    )


def test_exactly_the_promised_share_rings_without_ties():
    """Of n + 1 exchangeable scores each in turn being the new one, floor(rate (n + 1)) ring."""
    scores = RNG.normal(size=100)
    for rate in (0.01, 0.05, 0.07, 0.1, 0.29):
        rings = sum(conformal.p_values(np.delete(scores, place), scores[[place]])[0] <= rate for place in range(100))
        assert rings == int(rate * 100 + 1e-9)


@pytest.mark.parametrize("score", [*SCORES, "auto"])
def test_an_alarm_ranks_the_score_it_names(score):
    ens, held_out, x = classifier(), inputs(), 4 * inputs(30, seed=1)
    alarm = ds.Alarm.calibrate(ens, held_out, score=score, false_alarms=0.05)
    name = "mutual_information" if score == "auto" else score
    known, new = (ds.predict_scores(ens, part, [name])[name].double().numpy() for part in (held_out, x))
    p = alarm.p_values(x)
    assert p.dtype == torch.float64
    np.testing.assert_array_equal(p.numpy(), counted(known, new))
    assert alarm(x).dtype == torch.bool
    assert torch.equal(alarm(x), p <= 0.05)
    assert torch.equal(alarm(x), torch.from_numpy(new > alarm.threshold))
    assert torch.equal(alarm.at(0.2)(x), p <= 0.2)
    assert alarm.false_alarms == 0.05


def test_held_out_inputs_may_be_given_in_any_form():
    ens, x = classifier(), inputs()
    y = torch.randint(3, (120,))
    wanted = ds.Alarm.calibrate(ens, x).calibration[None]
    loader = DataLoader(TensorDataset(x, y), batch_size=50)
    for held_out in (x.numpy(), (x, y), [x, y], TensorDataset(x, y), loader):
        np.testing.assert_allclose(ds.Alarm.calibrate(ens, held_out).calibration[None], wanted, rtol=1e-4, atol=1e-7)


def test_a_function_may_be_the_score():
    ens, x = classifier(), inputs()
    alarm = ds.Alarm.calibrate(ens, x, score=lambda outputs: outputs.std(0).sum(-1), false_alarms=0.1)
    by_hand = ds.predict(ens, x).std(0).sum(-1).double().numpy()
    np.testing.assert_array_equal(alarm.p_values(x).numpy(), counted(by_hand, by_hand))


@pytest.mark.parametrize(
    ("outputs", "targets", "loss"),
    [(1, (120,), "mse"), (2, (120,), "gaussian_nll"), (2, (120, 2), "mse"), (4, (120, 2), "gaussian_nll")],
)
def test_regression_is_told_by_targets_and_goes_by_the_variance_of_means(outputs, targets, loss):
    ens, x = regressor(outputs), inputs()
    alarm = ds.Alarm.calibrate(ens, (x, torch.randn(targets)), false_alarms=0.1)
    assert (alarm.scorer.score, alarm.scorer.loss) == ("knowledge_variance", loss)
    means = ds.predict(ens, x)[..., : 1 if len(targets) == 1 else targets[1]]
    by_hand = means.var(0, unbiased=False).mean(-1).double().numpy()
    np.testing.assert_allclose(alarm.calibration[None], np.sort(by_hand), rtol=1e-4)


@pytest.mark.parametrize("kind", ["path", "loaded"])
def test_targets_of_files_tell_how_outputs_are_read(tmp_path, kind):
    """A Gaussian head (mean, rho) on a file with float targets is no pair of class logits."""
    ens, x = regressor(2), inputs()
    np.savez(tmp_path / "held_out.npz", x=x.numpy(), y=np.random.default_rng(0).normal(size=120).astype(np.float32))
    np.savez(tmp_path / "bare.npz", x=x.numpy())
    held_out, bare = tmp_path / "held_out.npz", tmp_path / "bare.npz"
    if kind == "loaded":
        held_out, bare = load(held_out), load(bare)
    alarm = ds.Alarm.calibrate(ens, held_out)
    assert (alarm.scorer.score, alarm.scorer.loss) == ("knowledge_variance", "gaussian_nll")
    by_hand = ds.predict(ens, x)[..., 0].var(0, unbiased=False).double().numpy()
    np.testing.assert_allclose(alarm.calibration[None], np.sort(by_hand), rtol=1e-4)
    monitor = conformal.DriftMonitor.calibrate(ens, held_out)
    assert (monitor.scorer.score, monitor.scorer.loss) == ("knowledge_variance", "gaussian_nll")
    assert ds.Alarm.calibrate(ens, bare).scorer.loss == "cross_entropy"


@pytest.mark.parametrize("make", [ds.Alarm.calibrate, conformal.DriftMonitor.calibrate])
def test_a_pair_without_targets_is_its_inputs(make):
    ens = classifier()
    assert make(ens, (inputs(), None)).scorer == make(ens, inputs()).scorer


def test_the_monitor_of_an_alarm_scores_inputs_by_its_ensemble():
    ens, x = classifier(), inputs()
    alarm = ds.Alarm.calibrate(ens, x)
    value = conformal.DriftMonitor.of_alarm(alarm).update(x)
    names = [alarm.scorer.score]
    by_scores = conformal.DriftMonitor.of_alarm(alarm)
    assert value == by_scores.update_scores(ds.predict_scores(ens, x, names)[names[0]])


@pytest.mark.parametrize("told", [{}, {"score": "bma"}, {"score": "bma", "loss": "binary_cross_entropy"}])
def test_several_labels_an_input_are_told_by_targets_or_by_the_loss(told):
    torch.manual_seed(0)
    # New inputs: of those held out rounding would break the ties.
    ens, x, new = ds.DeepEnsemble(lambda: nn.Linear(2, 3), 4), torch.randn(99, 2), torch.randn(9, 2)
    held_out = x if "loss" in told else (x, torch.randint(0, 2, (99, 3)))
    alarm = ds.Alarm.calibrate(ens, held_out, **told)
    name = told.get("score", "mutual_information")
    own, ours = (ds.predict_scores(ens, part, [name], loss="binary_cross_entropy")[name] for part in (x, new))
    expected = (1 + (own[None] >= ours[:, None]).sum(1)) / 100
    torch.testing.assert_close(alarm.p_values(new), expected.double())


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (2, torch.arange(20, 140)),  # ages beside a mean and a rho
        (3, torch.arange(120) % 9),
        (3, torch.arange(120) % 3 - 1),
        (1, torch.arange(120)),
        (3, torch.zeros(120, 1, dtype=torch.long)),
        (2, torch.full((120, 2), 2)),
    ],
)
@pytest.mark.parametrize("form", ["pair", "dataset", "loader"])
def test_whole_numbers_that_cannot_number_the_outputs_are_no_classes(outputs, targets, form):
    ens, held_out = regressor(outputs), (inputs(), targets)
    if form != "pair":
        held_out = TensorDataset(*held_out)
    if form == "loader":
        held_out = DataLoader(held_out, batch_size=64)
    with pytest.raises(ValueError, match=f"How {outputs} outputs a member are|must number {outputs} classes"):
        ds.Alarm.calibrate(ens, held_out)
    assert ds.Alarm.calibrate(ens, held_out, loss="mse").scorer.loss == "mse"


def test_members_without_an_axis_of_outputs_give_one():
    ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), num_members=3)
    assert ds.Alarm.calibrate(ens, (inputs(), torch.randn(120))).scorer.loss == "mse"


@pytest.mark.parametrize("name", REGRESSION_SCORES)
def test_any_variance_may_be_the_score(name):
    ens, x = regressor(2), inputs()
    alarm = ds.Alarm.calibrate(ens, x, score=name, loss="laplace_nll", false_alarms=0.1)
    assert len(alarm.p_values(x)) == 120


def test_outputs_that_could_be_read_in_two_ways_are_refused():
    with pytest.raises(ValueError, match="pass \\(inputs, targets\\), or say loss="):
        ds.Alarm.calibrate(regressor(2), inputs(), score="knowledge_variance")


def test_within_classes_inputs_are_ranked_among_their_own_and_else_in_the_class_that_suits_them_best():
    scores, labels = RNG.normal(size=90), np.arange(90) % 3
    scores[labels == 2] += 5
    alarm = conformal.Alarm.of_scores(scores, labels=labels, false_alarms=0.1)
    new, own = RNG.normal(2, 3, 40), RNG.integers(0, 3, 40)
    each = np.stack([counted(scores[labels == c], new) for c in range(3)])
    np.testing.assert_array_equal(alarm.p_values_of(new, own), each[own, np.arange(40)])
    np.testing.assert_array_equal(alarm.p_values_of(new), each.max(0))
    np.testing.assert_array_equal(alarm.p_values_of(new) <= 0.1, new > alarm.threshold)
    words = conformal.Alarm.of_scores(scores, labels=np.array(["a", "b", "c"])[labels], false_alarms=0.1)
    np.testing.assert_array_equal(words.p_values_of(new, np.array(["a", "b", "c"])[own]), alarm.p_values_of(new, own))
    with pytest.raises(ValueError, match=r"calibrated with \(0, 1, 2\); got 7"):
        alarm.p_values_of([0.0], [7])


def test_examples_choose_the_score_on_inputs_that_are_not_ranked_among():
    ens, x, far = classifier(), inputs(200), inputs(100, seed=5) * 5
    alarm = ds.Alarm.calibrate(ens, x, examples=far, false_alarms=0.1)
    assert len(alarm.calibration[None]) == 150
    assert alarm.aurocs[alarm.scorer.name] == max(alarm.aurocs.values())
    assert set(alarm.aurocs) == set(SCORES)
    known = ds.predict_scores(ens, x, [alarm.scorer.name])[alarm.scorer.name].double().numpy()
    choosing = np.random.default_rng(0).permutation(200)[:50]
    np.testing.assert_array_equal(alarm.calibration[None], np.sort(np.delete(known, choosing)))
    regression = ds.Alarm.calibrate(
        regressor(2), (x, torch.randn(200)), examples=far, false_alarms=0.1, labels=np.arange(200) % 2
    )
    assert set(regression.aurocs) == set(REGRESSION_SCORES)
    assert sum(map(len, regression.calibration.values())) == 150


def test_examples_that_no_score_tells_choose_none():
    """Of one linear member far inputs are the surest ones: what is left are scores that are constant."""
    lone, x = ds.DeepEnsemble(lambda: nn.Linear(10, 3), num_members=1), torch.randn(400, 10)
    with pytest.raises(ValueError, match=r"best AUROC is 0\.50.*Name a score, such as score=RowDistance"):
        ds.Alarm.calibrate(lone, x, examples=5 * x[:100])


def test_too_few_inputs_to_ever_ring_are_warned_of():
    with pytest.warns(UserWarning, match="98, are too few: this alarm can never ring.*hold out 99 or more"):
        alarm = conformal.Alarm.of_scores(RNG.normal(size=98), false_alarms=0.01)
    assert alarm.threshold == np.inf
    alarm = conformal.Alarm.of_scores(RNG.normal(size=99), false_alarms=0.01)
    assert alarm.p_values_of([99.0])[0] <= 0.01
    with pytest.warns(UserWarning, match="class 'b'.*can never ring"):
        conformal.Alarm.of_scores(RNG.normal(size=99), labels=["a"] * 90 + ["b"] * 9, false_alarms=0.02)
    with pytest.warns(UserWarning, match="too few"):
        alarm.at(0.001)


@pytest.mark.parametrize(
    "labels",
    [
        None,
        np.arange(120) % 3,
        np.array(["x", "y"])[np.arange(120) % 2],
        np.array(["x", "y"], dtype=object)[np.arange(120) % 2],  # what a column of pandas is
    ],
)
def test_an_alarm_is_saved_and_loaded(tmp_path, labels):
    ens, x = classifier(), inputs()
    alarm = ds.Alarm.calibrate(ens, x, false_alarms=0.1, labels=labels)
    alarm.save(tmp_path / "alarm.json")
    again = ds.Alarm.load(tmp_path / "alarm.json", ens)
    assert torch.equal(again.p_values(x), alarm.p_values(x))
    assert (again.false_alarms, again.scorer, list(again.calibration)) == (0.1, alarm.scorer, list(alarm.calibration))
    bare = ds.Alarm.load(tmp_path / "alarm.json")
    with pytest.raises(ValueError, match="no ensemble"):
        bare(x)
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="does not hold"):
        ds.Alarm.load(tmp_path / "other.json")


def test_a_function_is_not_saved_and_asked_for(tmp_path):
    ens, x = classifier(), inputs()
    alarm = ds.Alarm.calibrate(ens, x, score=spread, false_alarms=0.1)
    alarm.save(tmp_path / "alarm.json")
    with pytest.raises(ValueError, match="pass it as `score`"):
        ds.Alarm.load(tmp_path / "alarm.json", ens)
    again = ds.Alarm.load(tmp_path / "alarm.json", ens, score=spread)
    assert torch.equal(again.p_values(x), alarm.p_values(x))


def spread(outputs):
    return outputs.std(0).sum(-1)


class TwiceAsMany:
    """A wrong score of inputs."""

    of_inputs = True

    def __call__(self, x):
        return x.flatten()


def test_scores_are_ranked_without_torch(tmp_path):
    """A server has numpy and a file."""
    conformal.Alarm.of_scores(range(99), false_alarms=0.05).save(tmp_path / "alarm.json")
    conformal.DriftMonitor.of_scores(range(99)).save(tmp_path / "drift.json")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from dissensus import conformal\n"
        f"alarm = conformal.Alarm.load({str(tmp_path / 'alarm.json')!r})\n"
        f"drift = conformal.DriftMonitor.load({str(tmp_path / 'drift.json')!r})\n"
        "print(alarm.p_values_of([98.0])[0], drift.update_scores([5.0] * 3) > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0.02 True\n"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ds.Alarm.calibrate(nn.Linear(2, 2), inputs()), "`ens` must be an ensemble.*got Linear"),
        (lambda: ds.Alarm.calibrate(classifier(), inputs(), score="entropie"), "one of predictive_diversity"),
        (lambda: ds.Alarm.calibrate(classifier(), inputs(), score=3), "must be a string or a function; got 3"),
        (
            lambda: ds.Alarm.calibrate(regressor(2), inputs(), score="bma", loss="mse"),
            "With the loss 'mse' `score` must be",
        ),
        (
            lambda: ds.Alarm.calibrate(classifier(), inputs(), score="data_variance", loss="cross_entropy"),
            "one of predictive",
        ),
        (lambda: ds.Alarm.calibrate(classifier(), inputs(), false_alarms=0), "above 0 and below 1"),
        (lambda: ds.Alarm.calibrate(classifier(), inputs(), labels=[0, 1]), "must be 120 whole numbers"),
        (lambda: ds.Alarm.calibrate(classifier(), inputs(), score="bma", examples=inputs()), "Leave one out"),
        (lambda: ds.Alarm.calibrate(classifier(), inputs(6), examples=inputs()), "8 held-out inputs or more"),
        (lambda: conformal.p_values([1.0, np.nan], [1.0]), "NaN; row 1"),
        (lambda: conformal.Martingale().update(None), "NaN; row 0"),
        (lambda: conformal.Martingale().update(float("nan")), "NaN; row 0"),
        (lambda: conformal.Alarm.of_scores([1.0, 2.0], labels=np.array([b"a", b"b"])), "2 whole numbers or words.*S1"),
        (lambda: conformal.Alarm.of_scores([1.0, 2.0], labels=["a", None]), "2 whole numbers or words.*object"),
        (
            lambda: ds.Alarm.calibrate(classifier(), inputs(), score=lambda outputs: outputs.var(0).flatten()),
            r"the score's answer` must be shaped \(120,\); got \(360,\)",
        ),
        (
            lambda: ds.Alarm.calibrate(classifier(), inputs(), score=TwiceAsMany()),
            r"must be shaped \(120,\); got \(240,\)",
        ),
        (lambda: conformal.p_values([], [1.0]), "must not be empty"),
        (lambda: conformal.p_values([[1.0]], [1.0]), r"shaped \(batch,\)"),
        (lambda: conformal.p_values(["a"], [1.0]), "must hold numbers"),
        (lambda: conformal.Martingale().update(1.5), "from 0 to 1"),
        (lambda: conformal.Martingale().alarm(1), "above 1"),
        (lambda: conformal.DriftMonitor.of_scores([1.0, 2.0]), "3 held-out inputs"),
        (lambda: conformal.DriftMonitor.of_scores(range(9), bins=1000), "2..256"),
        (lambda: conformal.sets([[0.5, 0.5]], [2], [[0.5, 0.5]]), "classes from 0 to 1; got 2"),
        (lambda: conformal.sets([[0.5, 0.5]], ["cat"], [[0.5, 0.5]]), "classes from 0 to 1; got words"),
        (lambda: conformal.sets([[2.0, 0.5]], [0], [[0.5, 0.5]]), "sum 1"),
        (lambda: conformal.sets([[0.5, 0.5]], [0], [[0.5, 0.5]], method="oops"), "'lac', 'aps' or 'raps'"),
        (lambda: conformal.sets([[0.5, 0.5]], [0], [[0.2, 0.3, 0.5]]), "the classes of `probs_cal`, 2; got 3"),
        (lambda: conformal.intervals(([1.0], [0.0]), [1.0], ([1.0], [1.0])), "must be positive"),
        (lambda: conformal.intervals([1.0], [1.0], [1.0]), "must be a list or tuple of 2"),
        (lambda: conformal.intervals(([1.0], [1.0]), [1.0], ([1.0], [1.0]), groups=["a"]), "`groups_cal` and `groups`"),
    ],
)
def test_bad_input_gets_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def probabilities(num, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.ones(classes), num)
    return probs, np.array([rng.choice(classes, p=row) for row in probs])


def naive_scores(row, method, penalty=0.01, free=1):
    """How strange each class of one input would be, as the papers say it."""
    if method == "lac":
        return [1 - p for p in row]
    found = []
    for c in range(len(row)):
        rank = 1 + sum(p > row[c] for p in row)
        total = sum(p for p in row if p >= row[c])
        found.append(total + (penalty * max(0, rank - free) if method == "raps" else 0))
    return found


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
@pytest.mark.parametrize("per_class", [False, True])
def test_sets_are_the_classes_whose_score_is_not_too_strange(method, per_class):
    (held_out, y), (new, _) = probabilities(81), probabilities(20, seed=1)
    found = conformal.sets(held_out, y, new, 0.8, method=method, per_class=per_class)
    cal = np.array([naive_scores(row, method)[own] for row, own in zip(held_out, y, strict=True)])
    for row, got in zip(new, found, strict=True):
        for c, score in enumerate(naive_scores(row, method)):
            among = cal[y == c] if per_class else cal
            p = (1 + sum(among >= score - 1e-12)) / (len(among) + 1)
            assert got[c] == (p > 0.2 + 1e-9)
    assert found.shape == (20, 4)
    assert found.dtype == bool
    tensor = conformal.sets(
        torch.tensor(held_out), torch.tensor(y), torch.tensor(new), 0.8, method=method, per_class=per_class
    )
    assert torch.equal(tensor, torch.from_numpy(found))


def test_too_few_held_out_inputs_give_everything_and_a_warning():
    with pytest.warns(UserWarning, match="too few: the answer is everything.*hold out 9 or more"):
        found = conformal.sets([[0.9, 0.1]] * 8, [0] * 8, [[0.5, 0.5]], 0.9)
    assert found.all()
    with pytest.warns(UserWarning, match="too few"):
        ends = conformal.intervals(([0.0] * 8, [1.0] * 8), range(8), ([0.0], [1.0]), 0.9)
    assert np.isinf(ends).all()
    with pytest.warns(UserWarning, match="of group 'a', 8, are too few") as told:
        conformal.intervals(([0.0] * 8, [1.0] * 8), range(8), ([0.0], [1.0]), 0.9, groups_cal=["a"] * 8, groups=["a"])
    assert told[0].filename == __file__


def test_intervals_reach_as_far_as_errors_of_held_out_inputs_did():
    mean, sd, y = RNG.normal(size=99), RNG.uniform(0.5, 2, 99), RNG.normal(size=99)
    new, wide = RNG.normal(size=7), RNG.uniform(0.5, 2, 7)
    reach = np.sort(np.abs(y - mean) / sd)[89]
    ends = conformal.intervals((mean, sd), y, (new, wide), 0.9)
    np.testing.assert_allclose(ends, np.stack([new - reach * wide, new + reach * wide], 1), rtol=1e-12)
    shift = np.sort(np.maximum(mean - sd - y, y - mean - sd))[89]
    ends = conformal.intervals((mean - sd, mean + sd), y, (new - wide, new + wide), 0.9, method="cqr")
    np.testing.assert_allclose(ends, np.stack([new - wide - shift, new + wide + shift], 1), rtol=1e-12)


def test_intervals_within_groups_use_their_own_errors():
    mean, y, groups = np.zeros(200), RNG.normal(size=200), np.arange(200) % 2
    y[groups == 1] *= 10
    ends = conformal.intervals((mean, mean + 1), y, (np.zeros(2), np.ones(2)), 0.9, groups_cal=groups, groups=[0, 1])
    for group in (0, 1):
        alone = conformal.intervals((mean[groups == group], np.ones(100)), y[groups == group], ([0.0], [1.0]), 0.9)
        np.testing.assert_array_equal(ends[group], alone[0])


def test_states_are_json():
    monitor = conformal.DriftMonitor.of_scores(RNG.normal(size=300))
    monitor.update_scores(RNG.normal(size=10))
    state = json.loads(json.dumps(monitor.state()))
    assert set(state) >= {"counts", "martingale", "seed"}
    assert sum(state["counts"]) == 210


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x, mask=None):
        return self.head(x if mask is None else x * mask)


def test_a_tuple_is_several_inputs_as_in_predict():
    draws = torch.Generator().manual_seed(0)
    x, mask = torch.randn(200, 6, generator=draws), (torch.rand(200, 6, generator=draws) > 0.5).float()
    ens, named = ds.DeepEnsemble(Masked, 3), {"x": x, "mask": mask}
    alarm = ds.Alarm.calibrate(ens, named, false_alarms=0.1)
    torch.testing.assert_close(alarm.p_values((x, mask)), alarm.p_values(named))
    monitors = [ds.conformal.DriftMonitor.calibrate(ens, named) for _ in range(2)]
    assert monitors[0].update((x, mask)) == monitors[1].update(named)
    strange = (5 * x, mask)
    chosen = [ds.Alarm.calibrate(ens, named, examples=own) for own in (strange, {"x": 5 * x, "mask": mask})]
    assert chosen[0].aurocs == chosen[1].aurocs


@pytest.mark.parametrize("targets", [None, torch.arange(200) % 3])
@pytest.mark.parametrize(
    "told",
    [{}, {"score": "bma"}, {"loss": "cross_entropy"}, {"score": spread}, {"score": "bma", "loss": "cross_entropy"}],
)
def test_inputs_of_several_parts_keep_them_with_and_without_targets(targets, told):
    draws = torch.Generator().manual_seed(0)
    x, mask = torch.randn(200, 6, generator=draws), (torch.rand(200, 6, generator=draws) > 0.5).float()
    ens, named = ds.DeepEnsemble(Masked, 3), {"x": x, "mask": mask}
    wanted = ds.Alarm.calibrate(ens, named, **told)
    found = ds.Alarm.calibrate(ens, ((x, mask), targets), **told)
    assert found.scorer == wanted.scorer
    np.testing.assert_array_equal(found.calibration[None], wanted.calibration[None])
    monitor = conformal.DriftMonitor.calibrate(ens, ((x, mask), targets), **told)
    np.testing.assert_array_equal(monitor.edges, conformal.DriftMonitor.calibrate(ens, named, **told).edges)


def test_a_score_of_inputs_sees_all_their_parts():
    class Sum:
        of_inputs = True

        def __call__(self, parts):
            return parts[0].sum(1) + 100 * parts[1].sum(1)

    x, mask = torch.rand(200, 6), torch.ones(200, 6)
    alarm = ds.Alarm.calibrate(ds.DeepEnsemble(Masked, 3), ((x, mask), None), score=Sum())
    np.testing.assert_allclose(alarm.calibration[None], np.sort((x.sum(1) + 600).double()), rtol=1e-6)
    assert alarm.p_values((x, 2 * mask)).unique().tolist() == [1 / 201]


@pytest.mark.parametrize("score", ["variation_ratio", "num_unique"])
def test_inputs_whose_outputs_are_not_finite_are_refused_whatever_the_score(score):
    alarm, x = ds.Alarm.calibrate(classifier(), inputs(), score=score, false_alarms=0.1), inputs(300)
    x[200] = torch.nan
    with pytest.raises(ValueError, match="those for input 200 are not"):
        alarm.p_values(x)
