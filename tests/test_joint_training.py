from math import prod

import pytest
import torch
from torch import nn
from training_helpers import net, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.objectives.objective import Step
from dissensus.training.validation import validate


def a_step(index: int = 0) -> Step:
    return Step(torch.tensor(index), 10, False, torch.arange(4), torch.tensor(9))


@pytest.mark.parametrize("average", ["probs", "scores"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("loss", ["cross_entropy", "brier", "mse"])
def test_the_objective_is_m_times_the_pure_term(loss, beta, average):
    outputs = torch.randn(4, 6, 3)
    targets = torch.randn(6, 3) if loss == "mse" else torch.arange(6) % 3
    got, parts = obj.Joint(beta, loss, average).on_outputs(outputs, targets, a_step())
    torch.testing.assert_close(got, 4 * obj.joint_loss(outputs, targets, beta, loss, average))
    decomposed = obj.decompose(outputs, targets, loss, average)
    torch.testing.assert_close(parts["diversity"], decomposed.diversity.mean())
    torch.testing.assert_close(parts["ensemble_error"], decomposed.ensemble_error.mean())


@pytest.mark.parametrize("weights", [None, (0.1, 0.2, 0.3, 0.4)])
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3), (6, 2, 2)])
def test_squared_errors_of_any_shape_have_the_values_and_gradients_of_the_pure_term(shape, weights):
    outputs = torch.randn(4, *shape, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(*shape, dtype=torch.float64)
    objective = obj.Joint(0.7, "mse", weights=weights)
    shares = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    # Outputs with several axes behind the batch are maps: training takes the mean over their positions, the pure term the sum.
    positions = prod(shape[1:]) if len(shape) > 2 else 1
    pure = 4 * obj.joint_loss(outputs, targets, 0.7, "mse", weights=shares) / positions
    got, parts = objective.on_outputs(outputs, targets, a_step())
    torch.testing.assert_close(got, pure, rtol=1e-6, atol=0.0)
    wanted = torch.autograd.grad(pure, outputs)
    torch.testing.assert_close(torch.autograd.grad(got, outputs), wanted, rtol=1e-6, atol=1e-9)
    members = (outputs - targets).square().flatten(2).sum(-1) if len(shape) > 1 else (outputs - targets) ** 2
    torch.testing.assert_close(parts["loss"], members.mean(1).detach() / positions)


@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_beta_zero_is_independent_training_on_shared_batches(engine):
    joint, alone = ds.DeepEnsemble(net, 3), ds.DeepEnsemble(net, 3)
    settings = {"epochs": 4, "batch_size": 20, "lr": 0.02, "engine": engine}
    ds.fit(joint, (x, y), objective=obj.Joint(0.0), **settings)
    ds.fit(alone, (x, y), objective=obj.Independent(), batches="shared", **settings)
    torch.testing.assert_close(ds.predict(joint, x), ds.predict(alone, x), rtol=1e-4, atol=1e-5)


def test_beta_can_follow_the_run():
    outputs, targets = torch.randn(4, 6, 3), torch.arange(6) % 3
    got, _ = obj.Joint(lambda progress: progress).on_outputs(outputs, targets, a_step(5))
    torch.testing.assert_close(got, 4 * obj.joint_loss(outputs, targets, 0.5))
    plain, _ = obj.Joint(lambda progress: 0.3).on_outputs(outputs, targets, a_step(5))
    torch.testing.assert_close(plain, 4 * obj.joint_loss(outputs, targets, 0.3))


@pytest.mark.parametrize("weights", [None, (0.5, 0.3, 0.2, 0.0)])
@pytest.mark.parametrize("average", ["probs", "scores"])
@pytest.mark.parametrize("loss", ["cross_entropy", "brier", "mse"])
def test_validation_judges_the_ensemble_that_is_trained(loss, average, weights):
    outputs = 3 * torch.randn(4, 30, 3)
    targets = torch.randn(30, 3) if loss == "mse" else torch.arange(30) % 3
    found = obj.Joint(loss=loss, average=average, weights=weights).likelihood
    given = None if weights is None else torch.tensor(weights)
    wanted = obj.decompose(outputs, targets, loss, average, given).ensemble_error
    torch.testing.assert_close(found.mixture(outputs, targets), wanted)
    torch.testing.assert_close(
        found.per_example(outputs, targets), obj.Independent(loss).likelihood.per_example(outputs, targets)
    )


def test_the_history_has_the_held_out_error_of_averaged_scores():
    ens = ds.DeepEnsemble(net, 3)
    run = ds.fit(ens, (x, y), objective=obj.Joint(0.8, average="scores"), epochs=3, lr=0.05, validation=(x, y))
    outputs = ds.predict(ens, x)
    by_scores, by_probs = (
        obj.decompose(outputs, y, average=average).ensemble_error.mean().item() for average in ("scores", "probs")
    )
    assert run.history.by_epoch("ensemble_loss")[-1] == pytest.approx(by_scores, rel=1e-5)
    assert abs(by_scores - by_probs) > 1e-5


def test_dropping_by_batch_leaves_out_the_stated_number_of_members():
    outputs, targets = torch.randn(5, 6, 3), torch.arange(6) % 3
    objective = obj.Joint(1.0, member_dropout=0.4)
    got, _ = objective.on_outputs(outputs, targets, a_step())
    candidates = [
        5 * obj.joint_loss(outputs[list(kept)], targets, 1.0)
        for kept in torch.combinations(torch.arange(5), 3).tolist()
    ]
    assert min(abs(got - value) for value in candidates) < 1e-5


def test_dropping_by_example_counts_only_examples_that_kept_a_member():
    outputs, targets = torch.randn(2, 400, 3, requires_grad=True), torch.arange(400) % 3
    loss, _ = obj.Joint(0.5, member_dropout=0.7, dropout_per="example").on_outputs(outputs, targets, a_step())
    loss.backward()
    reached = outputs.grad.abs().sum(-1) > 0
    assert torch.isfinite(outputs.grad).all()
    assert (~reached.any(0)).float().mean().item() == pytest.approx(0.49, abs=0.08)
    assert reached.float().mean().item() == pytest.approx(0.3, abs=0.05)


def test_joint_training_of_regression_members_ends_in_collusion():
    # The recorded check: 10 learners of one hidden layer of 20, 400 points of 8 features.
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(800, 8, generator=generator)
    truth = inputs[:, :1].sin() + 0.5 * inputs[:, 1:2] * inputs[:, 2:3] + 0.3 * torch.randn(800, 1, generator=generator)
    train, test = slice(0, 400), slice(400, 800)
    found = {}
    for beta in (0.0, 1.0):
        ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 1)), 10)
        data = (inputs[train], truth[train])
        ds.fit(ens, data, objective=obj.Joint(beta, "mse"), epochs=150, batch_size=32, optimizer="adam", lr=0.01)
        found[beta] = (obj.decompose(ds.predict(ens, inputs[test]), truth[test], "mse"), ds.predict(ens, inputs[test]))
    diversity = {beta: d.diversity.mean().item() for beta, (d, _) in found.items()}
    error = {beta: d.ensemble_error.mean().item() for beta, (d, _) in found.items()}
    assert diversity[1.0] > 50 * diversity[0.0]
    assert error[1.0] > error[0.0]
    # Dropping 4 of 10 members raises the error by DIV (M - m) / (m (M - 1)), exactly on average.
    outputs = found[1.0][1].double()
    order = torch.rand(400, 10, 400, generator=generator).argsort(1)[:, :6]
    kept = outputs[order, torch.arange(400)].mean(1)
    increase = (kept - truth[test].double()).square().mean().item() - error[1.0]
    assert increase == pytest.approx(diversity[1.0] * 4 / (6 * 9), rel=0.03)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: obj.Joint(1.1), "theorem 5.1"),
        (lambda: obj.Joint(-0.1), "beta"),
        (lambda: obj.Joint(lambda progress: 2 * progress), "theorem 5.1"),
        (lambda: obj.Joint(loss="gaussian_nll"), "cross_entropy"),
        (lambda: obj.Joint(average="mean"), "'scores'"),
        (lambda: obj.Joint(member_dropout=1.0), "member_dropout"),
        (lambda: obj.Joint(weights=(0.5, 0.6)), "sum to 1"),
        (
            lambda: ds.fit(ds.DeepEnsemble(net, 2), (x, y), objective=obj.Joint(), batches="own", epochs=1),
            "share batches",
        ),
        (lambda: ds.fit(ds.DeepEnsemble(net, 2), (x, y), objective=obj.Joint(weights=(1.0,)), epochs=1), "each of 2"),
        (lambda: ds.fit(ds.DeepEnsemble(net, 2), (x, y), objective=obj.Joint(), on_divergence="drop"), "couple"),
        (lambda: ds.fit(ds.DeepEnsemble(net, 2), (x, y), objective=obj.Joint(), concurrent_members=1), "couples"),
    ],
)
def test_bad_input_gets_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_held_out_accuracy_is_that_of_what_is_averaged():
    # Two members lean weakly to class 0, one strongly to class 1: probabilities say 0, scores say 1.
    weak, strong = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 9.0])
    outputs = torch.stack([weak, weak, strong])[:, None]
    by_probs, by_scores = (
        obj.Joint(average=average).likelihood.probabilities(outputs) for average in ("probs", "scores")
    )
    assert by_probs.argmax(-1).item() == 0
    assert by_scores.argmax(-1).item() == 1
    first_only = obj.Joint(average="scores", weights=(1.0, 0.0, 0.0)).likelihood.probabilities(outputs)
    assert torch.equal(first_only[0], weak.softmax(-1))


@pytest.mark.parametrize("weights", [None, (0.1, 0.2, 0.7)])
def test_what_averaged_scores_say_of_yes_or_no_is_a_probability(weights):
    # A mean logit of 0.3 is yes, although 0.3 is below one half.
    outputs = torch.tensor([[[0.3, -2.0]], [[0.3, -1.0]], [[0.3, 0.5]]])
    joint = obj.Joint(0.5, "binary_cross_entropy", average="scores", weights=weights)
    said = joint.likelihood.probabilities(outputs)
    shares = torch.tensor(weights or (1 / 3,) * 3)
    torch.testing.assert_close(said, (shares[:, None, None] * outputs).sum(0).sigmoid())
    pair = torch.zeros(4, 1), torch.tensor([[1.0, 0.0]]).expand(4, 2)
    found = validate(_constant(outputs), [(*pair, None)], joint.likelihood)[1]
    wanted = ((said > 0.5) == torch.tensor([[True, False]])).double().mean().item()
    assert found["ensemble_accuracy"] == wanted


def _constant(outputs):
    nets = [nn.Linear(1, 2) for _ in outputs]
    with torch.no_grad():
        for member, logits in zip(nets, outputs, strict=True):
            member.weight.zero_()
            member.bias.copy_(logits[0])
    return ds.DeepEnsemble.from_members(nets)


def test_smoothed_answers_to_yes_or_no_train_as_independently_at_beta_zero():
    logits, y = torch.randn(4, 6, 2, dtype=torch.float64), torch.randint(0, 2, (6, 2)).double()
    settings = {"label_smoothing": 0.2, "class_weights": (1.0, 3.0)}
    joint, _ = obj.Joint(0.0, "binary_cross_entropy", **settings).on_outputs(logits, y, a_step())
    alone, _ = obj.Independent("binary_cross_entropy", **settings).on_outputs(logits, y, a_step())
    torch.testing.assert_close(joint, alone)
    together, _ = obj.Joint(1.0, "binary_cross_entropy", label_smoothing=0.2).on_outputs(logits, y, a_step())
    wanted = nn.functional.binary_cross_entropy(logits.sigmoid().mean(0), 0.8 * y + 0.1, reduction="none")
    torch.testing.assert_close(together, 4 * wanted.sum(-1).mean())


@pytest.mark.parametrize("kind", [obj.Independent, obj.Joint])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "mse", "label_smoothing": 0.1}, "`label_smoothing` is for class labels; the loss is 'mse'"),
        ({"label_smoothing": 2.0}, "`label_smoothing` must be a number of at least 0 and below 1; got 2"),
        ({"loss": "mse", "class_axis": 2}, "`class_axis` and `ignore_index` are for class indices; the loss is 'mse'"),
        ({"loss": "binary_cross_entropy", "ignore_index": 0}, "`ignore_index` are for class indices"),
        ({"loss": "mse", "class_weights": (1.0,)}, "`class_weights` are for class labels"),
    ],
)
def test_what_is_said_of_classes_is_checked_when_it_is_said(kind, settings, words):
    with pytest.raises(ValueError, match=words):
        kind(**settings)


def test_weights_of_anchored_networks_are_those_of_their_members():
    weights = (0.5, 0.3, 0.2)
    ens = ds.Anchored(net, x[:8], num_members=2, num_nets=3)
    objective = obj.Joint(0.5, weights=weights)
    run = ds.fit(ens, (x, y), objective=objective, validation=(x, y), watch_collusion=True, epochs=1, device="cpu")
    shares = torch.tensor([0.25, 0.25, 0.15, 0.15, 0.1, 0.1])
    wanted = obj.decompose(ds.predict(ens, x), y, weights=shares).ensemble_error.mean().item()
    assert run.history.rows[-1]["ensemble_loss"] == pytest.approx(wanted, rel=1e-5)
    assert run.history.rows[-1]["train_ensemble_error"] == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(ValueError, match="one number for each of 4 members; got 2"):
        ds.fit(ds.DeepEnsemble(net, 4), (x, y), objective=obj.Joint(weights=(0.5, 0.5)), epochs=1, device="cpu")


def test_a_share_that_is_no_number_is_named():
    with pytest.raises(ValueError, match=r"`beta` must be a number or a function; got 'mse'"):
        obj.Joint("mse")
