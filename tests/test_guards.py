"""Guards of loss-guided disagreement: their factors by hand, their data, and that members stay useful under them."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from training_helpers import net, norm_net, weights, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.objectives.objective import Step

LOSSES = torch.tensor([0.1, 0.3], dtype=torch.float64)
WEIGHTS = LOSSES / LOSSES.mean() ** 2


def seen(strength=0.5, losses=LOSSES, held_out=None):
    return obj.Seen(losses / losses.mean() ** 2, losses, torch.tensor(strength, dtype=torch.float64), held_out)


@pytest.mark.parametrize("strength", [0.1, 0.5, 10.0])
def test_a_share_of_the_pull_of_cross_entropy_is_never_exceeded_and_reached_where_it_binds(strength):
    guard = obj.LossShare(0.3)
    held = strength * WEIGHTS * guard.factor(seen(strength))
    torch.testing.assert_close(held, torch.minimum(strength * WEIGHTS, 0.3 * (1 - (-LOSSES).exp())))


@pytest.mark.parametrize("classes", [10, 100, 1000])
def test_the_bound_is_a_share_of_the_gradient_of_cross_entropy(classes):
    """Two members alike and right: what disagreement adds to the true class's logit is less than that share of what the loss adds."""
    logits = torch.randn(50, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(classes))
    labels = logits.argmax(-1)
    pair = (logits * torch.linspace(0.5, 5, 50)[:, None]).repeat(2, 1, 1).requires_grad_()
    pulls = {}
    for strength in (0.0, 100.0):
        objective = obj.LossGuided(strength, None, guard=obj.LossShare(0.25))
        step = Step(torch.tensor(0), 10, False, torch.arange(2), torch.tensor(0))
        loss, _ = objective.on_outputs(pair, labels, step)
        (slope,) = torch.autograd.grad(loss, pair)
        pulls[strength] = slope.gather(-1, labels.expand(2, -1)[..., None])[..., 0]
    apart = pulls[100.0] - pulls[0.0]
    assert (pulls[0.0] < 0).all()
    assert (apart.abs() <= 0.2501 * pulls[0.0].abs()).all()


def test_a_share_changes_nothing_while_the_loss_is_large():
    losses = torch.tensor([2.0, 4.0], dtype=torch.float64)
    assert (obj.LossShare(0.5).factor(seen(0.5, losses)) == 1.0).all()


def test_a_cap_holds_the_mean_weight():
    assert (WEIGHTS * obj.WeightCap(2.0).factor(seen())).mean().item() == pytest.approx(2.0)
    assert obj.WeightCap(100.0).factor(seen()) == 1.0


def test_the_held_out_loss_takes_the_place_of_a_smaller_training_loss():
    logits, labels = torch.zeros(2, 4, 3, dtype=torch.float64), torch.arange(4) % 3
    guard = obj.HeldOutLoss(x, y)
    held = WEIGHTS * guard.factor(seen(held_out=(logits, labels)))
    torch.testing.assert_close(held, LOSSES / torch.tensor(3.0, dtype=torch.float64).log() ** 2)
    assert guard.factor(seen(losses=LOSSES * 10, held_out=(logits, labels))) == 1.0


@pytest.mark.parametrize(("wrong", "factor"), [(0, 1.0), (2, 1.0), (3, 0.5), (4, 0.0), (10, 0.0)])
def test_the_worst_members_held_out_accuracy_turns_disagreement_off(wrong, factor):
    labels = torch.zeros(10, dtype=torch.long)
    logits = torch.zeros(2, 10, 3, dtype=torch.float64)
    logits[..., 0] = 1.0
    logits[1, :wrong, 1] = 2.0
    guard = obj.HeldOutAccuracy(x, y, reference=0.8, margin=0.2)
    assert guard.factor(seen(held_out=(logits, labels))).item() == pytest.approx(factor)


@pytest.mark.parametrize(
    "guard", [obj.LossShare(), obj.WeightCap(), obj.HeldOutLoss(x, y)], ids=lambda g: type(g).__name__
)
def test_a_batch_without_any_loss_has_a_finite_factor(guard):
    held_out = torch.zeros(2, 4, 3), torch.arange(4) % 3
    zeros = torch.zeros(2)
    factor = guard.factor(obj.Seen(zeros, zeros, torch.tensor(0.5), held_out))
    assert ((factor >= 0) & (factor <= 1)).all()


GUARDS = {
    "share": obj.LossShare(),
    "cap": obj.WeightCap(),
    "held-out loss": obj.HeldOutLoss(x[60:], y[60:]),
    "held-out accuracy": obj.HeldOutAccuracy(x[60:], y[60:], reference=0.9),
}


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS.keys())
@pytest.mark.parametrize("active", [2, None])
def test_recorded_steps_give_the_same_curve(guard, active):
    outputs = []
    for engine in ("eager", "captured"):
        ens = ds.DeepEnsemble(norm_net, 3)
        objective = obj.LossGuided(1.0, active=active, guard=guard)
        ds.fit(ens, (x[:60], y[:60]), objective=objective, epochs=3, batch_size=30, lr=0.02, engine=engine)
        outputs.append(ds.predict(ens, x))
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)


def test_looking_at_held_out_data_leaves_no_trace():
    # Without disagreement nothing of it can reach the weights, and BatchNorm must not see it either.
    found = []
    for guard in (None, obj.HeldOutLoss(100 * x, y)):
        ens = ds.DeepEnsemble(norm_net, 3)
        ds.fit(ens, (x, y), objective=obj.LossGuided(0.0, None, guard=guard), epochs=2, batch_size=30)
        assert ens.training
        found.append(weights(ens))
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name])


def test_inputs_and_labels_of_held_out_data_are_drawn_together():
    pairs = []

    class Watching(obj.LossGuided):
        def __call__(self, members, inputs, labels, step):
            pairs.append((step.streams["held_out.x"], step.streams["held_out.y"]))
            return super().__call__(members, inputs, labels, step)

    objective = Watching(0.5, guard=obj.HeldOutLoss(x, y))
    ds.fit(ds.DeepEnsemble(net, 2), (x, y), objective=objective, epochs=1, batch_size=50, engine="eager")
    rows = {tuple(row.tolist()): int(label) for row, label in zip(x, y, strict=True)}
    for inputs, labels in pairs:
        assert len(inputs) == 50
        assert [rows[tuple(row.tolist())] for row in inputs] == labels.tolist()
    assert not torch.equal(pairs[-1][0], pairs[-2][0])


@pytest.fixture(scope="module")
def digits():
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn holds the digits")
    inputs, labels = (torch.from_numpy(values) for values in datasets.load_digits(return_X_y=True))
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inputs, labels = (inputs / 16).float()[order], labels.long()[order]
    return (inputs[:900], labels[:900]), (inputs[900:], labels[900:])


def member_accuracies(objective, data, test):
    ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), 4)
    ds.fit(ens, data, objective=objective, epochs=30, batch_size=64, lr=3e-3, engine="captured")
    return (ds.predict(ens, test[0]).argmax(-1) == test[1]).float().mean(-1)


def test_the_default_guard_keeps_members_useful_where_the_published_form_does_not(digits):
    independent = member_accuracies(obj.Independent(), *digits)
    published = obj.LossGuided(1.0, active=None, guard=None)
    assert member_accuracies(published, *digits).min() < independent.mean() - 0.2
    guarded = member_accuracies(replace(published, guard=obj.LossGuided(1.0).guard), *digits)
    assert guarded.min() > independent.mean() - 0.02


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: obj.LossShare(0.0), "share"),
        (lambda: obj.WeightCap(-1.0), "largest"),
        (lambda: obj.HeldOutLoss(x, y[:5]), "one target for each"),
        (lambda: obj.HeldOutAccuracy(x, y, reference=90.0), "reference"),
        (lambda: obj.HeldOutAccuracy(x, y, reference=0.9, margin=0.0), "margin"),
    ],
)
def test_bad_input_gets_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()
