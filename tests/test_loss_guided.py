"""Loss-guided disagreement: its value written out, who is drawn and who stays, and that drawing adds no bias."""

from copy import deepcopy
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_helpers import net, norm_net, weights, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.objectives.objective import Step

LABELS = torch.arange(6) % 3


def a_step(index=0, members=4):
    return Step(torch.tensor(index), 10, False, torch.arange(members), torch.tensor(9))


def outputs_of(members=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(members, 6, 3, generator=generator, dtype=torch.float64)


def written_out(outputs, labels, strength, mean_logits=None):
    """Equation 6 with means, for A2D with the class of the earlier member, times the number of members."""
    probs = outputs.softmax(-1)
    main = torch.stack([F.cross_entropy(each, labels) for each in outputs]).mean()
    hard = F.cross_entropy(outputs.mean(0) if mean_logits is None else mean_logits, labels, reduction="none")
    alpha = (hard / hard.mean() ** 2).detach()
    pairs = [obj.a2d(probs[m], probs[k], eps=0.0) for m, k in combinations(range(len(outputs)), 2)]
    return len(outputs) * (main + strength * (alpha * torch.stack(pairs).mean(0)).mean())


@pytest.mark.parametrize("members", [2, 4])
def test_the_loss_is_the_published_formula_with_means(members):
    outputs = outputs_of(members)
    step = a_step(members=members)
    loss, parts = obj.LossGuided(0.7, active=None, guard=None).on_outputs(outputs, LABELS, step)
    torch.testing.assert_close(loss, written_out(outputs, LABELS, 0.7))
    torch.testing.assert_close(parts["weight"], obj.loss_guided_weights(outputs, LABELS).mean())
    torch.testing.assert_close(parts["loss"], torch.stack([F.cross_entropy(each, LABELS) for each in outputs]))


def test_the_documents_constant_halves_the_regulariser():
    outputs = outputs_of()
    values = {
        (strength, reduction): obj.LossGuided(strength, active=None, reduction=reduction, guard=None).on_outputs(
            outputs, LABELS, a_step()
        )[0]
        for strength in (0.5, 1.0)
        for reduction in ("mean", "document")
    }
    torch.testing.assert_close(values[1.0, "document"], values[0.5, "mean"])
    # 1 / (N M (M - 1)) over pairs m < l, as printed.
    alpha, probs = obj.loss_guided_weights(outputs, LABELS), outputs.softmax(-1)
    pairs = [obj.a2d(probs[m], probs[k], eps=0.0) for m, k in combinations(range(4), 2)]
    printed = (alpha * torch.stack(pairs)).sum() / (6 * 4 * 3)
    main = torch.stack([F.cross_entropy(each, LABELS) for each in outputs]).mean()
    torch.testing.assert_close(values[1.0, "document"], 4 * (main + printed))


def test_no_gradient_flows_through_the_weights():
    outputs = outputs_of().requires_grad_()
    loss, _ = obj.LossGuided(0.7, active=None, guard=None).on_outputs(outputs, LABELS, a_step())
    (ours,) = torch.autograd.grad(loss, outputs)
    (theirs,) = torch.autograd.grad(written_out(outputs, LABELS, 0.7), outputs)
    torch.testing.assert_close(ours, theirs)


def test_strength_can_follow_the_run_and_weights_use_the_label_without_smoothing():
    outputs = outputs_of()
    ramp = obj.LossGuided(lambda progress: 2 * progress, active=None, guard=None)
    fixed = obj.LossGuided(1.0, active=None, guard=None)
    torch.testing.assert_close(
        ramp.on_outputs(outputs, LABELS, a_step(5))[0], fixed.on_outputs(outputs, LABELS, a_step())[0]
    )
    smooth, parts = replace(fixed, label_smoothing=0.5).on_outputs(outputs, LABELS, a_step())
    torch.testing.assert_close(parts["weight"], obj.loss_guided_weights(outputs, LABELS).mean())
    assert smooth != fixed.on_outputs(outputs, LABELS, a_step())[0]


def test_divdis_is_weighted_over_the_batch_and_by_the_mean_weight():
    outputs = outputs_of()
    objective = obj.LossGuided(0.7, active=None, regulariser="divdis", guard=None)
    loss, _ = objective.on_outputs(outputs, LABELS, a_step())
    alpha = obj.loss_guided_weights(outputs, LABELS)
    main = torch.stack([F.cross_entropy(each, LABELS) for each in outputs]).mean()
    expected = main + 0.7 * alpha.mean() * obj.divdis(outputs.softmax(-1), weights=alpha)
    torch.testing.assert_close(loss, 4 * expected)


@pytest.mark.parametrize(
    ("regulariser", "orientation"),
    [("a2d", "second"), ("a2d", "both"), *((name, "first") for name in (*obj.PAIR_TERMS, "divdis"))],
)
def test_every_regulariser_falls_where_it_counts(regulariser, orientation):
    found = {}
    for strength in (0.0, 0.5):
        objective = obj.LossGuided(strength, None, regulariser, orientation=orientation, guard=obj.LossShare(1.0))
        run = ds.fit(ds.DeepEnsemble(net, 3), (x, y), objective=objective, epochs=15, batch_size=50, lr=0.02)
        found[strength] = run.history.by_epoch("pair_term")[-1]
    assert found[0.5] < found[0.0] - 0.003


@pytest.mark.parametrize("active", [2, 3, 4, 5])
def test_members_are_drawn_without_replacement_in_order_and_evenly(active):
    objective = obj.LossGuided(0.5, active=active)
    drawn = [tuple(objective.pick(a_step(index, 6), 6).tolist()) for index in range(3000)]
    assert all(rows == tuple(sorted(set(rows))) for rows in drawn)
    counts = [drawn.count(rows) for rows in combinations(range(6), active)]
    assert sum(counts) == 3000
    # All subsets alike: the sum of squared deviations, by what chance gives, has a known mean and spread.
    wanted, free = 3000 / len(counts), len(counts) - 1
    chance = sum((count - wanted) ** 2 for count in counts) / wanted
    assert abs(chance - free) < 4 * (2 * free) ** 0.5


def test_few_of_very_many_members_are_drawn_from_all_of_them():
    objective = obj.LossGuided(0.5, active=2)
    drawn = torch.stack([objective.pick(a_step(index, 1000), 1000) for index in range(2000)])
    assert (drawn[:, 0] < drawn[:, 1]).all()
    assert drawn.double().mean().item() == pytest.approx(499.5, abs=25)
    assert len(drawn.unique()) > 950


def test_all_members_take_part_where_as_many_are_asked_for():
    assert obj.LossGuided(0.5, active=2).pick(a_step(0, 2), 2) is None
    assert obj.LossGuided(0.5, active=None).pick(a_step(0, 5), 5) is None


class Fixed(obj.LossGuided):
    """Draws the members it is told to."""

    def pick(self, step, num_members):
        return None if rows_now is None else torch.tensor(rows_now)


rows_now: tuple[int, ...] | None = None


def displacement(objective, rows):
    """How far one plain gradient step of size 1 moves each member: its gradient."""
    global rows_now
    rows_now = rows
    ens = ds.DeepEnsemble(lambda: net().double(), 4)
    before = weights(ens)
    inputs = x[:20].double()
    ds.fit(ens, (inputs, y[:20]), objective=objective, epochs=1, batch_size=20, optimizer="sgd", lr=1.0)
    return {name: before[name] - tensor for name, tensor in ens.state_dict().items()}


@pytest.mark.parametrize(
    ("active", "orientation", "guard"),
    [
        (2, "first", None),
        (3, "first", None),
        (2, "both", None),
        (3, "both", None),
        (2, "first", obj.LossShare(0.1)),
        (2, "first", obj.WeightCap(0.1)),
    ],
)
def test_drawing_members_adds_no_bias_where_all_of_them_decide_the_weights(active, orientation, guard):
    objective = Fixed(2.0, active=active, weights_from="all", orientation=orientation, guard=guard)
    draws = [displacement(objective, rows) for rows in combinations(range(4), active)]
    full = displacement(objective, None)
    for name, gradient in full.items():
        mean = torch.stack([draw[name] for draw in draws]).mean(0)
        torch.testing.assert_close(mean, gradient)


@pytest.mark.parametrize(
    ("weights_from", "guard"),
    [
        ("active", None),
        # Held-out answers are those of the drawn members alone, whoever decides the weights.
        ("all", obj.HeldOutLoss(10 * x.double(), y)),
    ],
)
def test_weights_and_factors_from_the_drawn_members_alone_are_biased(weights_from, guard):
    objective = Fixed(2.0, active=2, weights_from=weights_from, guard=guard)
    draws = [displacement(objective, rows) for rows in combinations(range(4), 2)]
    full = displacement(objective, None)
    off = [(torch.stack([d[name] for d in draws]).mean(0) - full[name]).abs().max() for name in full]
    assert max(off) > 1e-3


@pytest.mark.parametrize("objective", [obj.Independent(), obj.LossGuided(0.0, active=None)])
def test_without_disagreement_a_drawn_member_makes_up_for_the_steps_it_is_not_drawn_for(objective):
    # Two of four members: half of the steps, so twice the gradient of the member trained alone.
    drawn = displacement(Fixed(0.0, active=2), (1, 3))
    alone = displacement(objective, None)
    for name, gradient in drawn.items():
        torch.testing.assert_close(gradient[[1, 3]], 2 * alone[name][[1, 3]])
        assert (gradient[[0, 2]] == 0).all()


def test_the_loss_of_a_draw_is_the_number_of_all_members_times_the_mean_over_those_drawn():
    outputs = outputs_of(2)
    loss, parts = obj.LossGuided(0.7, active=2, guard=None).on_outputs(outputs, LABELS, a_step(members=50))
    torch.testing.assert_close(loss, 25 * written_out(outputs, LABELS, 0.7))
    assert parts["loss"].shape == (2,)


def test_drawing_views_of_one_network_trains_on_their_mean():
    # Members that share all parameters: whoever is drawn, the step is that of the network alone.
    found, plain = [], nn.Sequential(nn.Dropout(1e-9), net())
    for active in (2, None):
        ens = ds.MCDropout(deepcopy(plain), num_members=4, seed=0)
        before = {name: tensor.clone() for name, tensor in ens.state_dict().items()}
        objective = obj.LossGuided(0.0, active=active)
        ds.fit(ens, (x, y), objective=objective, epochs=1, batch_size=100, optimizer="sgd", lr=1.0)
        found.append({name: before[name] - tensor for name, tensor in ens.state_dict().items()})
    for name, moved in found[0].items():
        torch.testing.assert_close(moved, found[1][name])
    assert any(moved.abs().max() > 0 for moved in found[0].values())


@pytest.mark.parametrize(("weights_from", "engine"), [("active", "captured"), ("all", "eager")])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_members_that_a_step_did_not_draw_stay_bit_for_bit_as_they_were(optimizer, weights_from, engine):
    ens = ds.DeepEnsemble(norm_net, 5)
    history = [weights(ens)]
    objective = obj.LossGuided(0.5, active=2, weights_from=weights_from)
    ds.fit(
        ens,
        (x, y),
        objective=objective,
        epochs=6,
        batch_size=100,
        optimizer=optimizer,
        optimizer_options={"momentum": 0.9} if optimizer == "sgd" else {},
        lr=0.05,
        weight_decay=0.1,
        check_every=1,
        callback=lambda run: history.append(weights(run.members)),
        engine=engine,
    )
    for before, after in pairwise(history):
        moved = {name: {m for m in range(5) if not torch.equal(before[name][m], after[name][m])} for name in before}
        changed = moved["net.0.weight"]
        assert len(changed) == 2
        # Weights, BatchNorm's statistics and its count of passes: all of those drawn, nothing of the others.
        assert all(members == changed for members in moved.values()), moved


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_moments_and_step_counts_of_members_that_were_not_drawn_stay_too(optimizer, tmp_path):
    # A checkpoint holds them: after each epoch, which is one step here, two members' rows have changed.
    from safetensors.torch import load_file

    states = []
    for epochs in (1, 2, 3):
        ens = ds.DeepEnsemble(norm_net, 5)
        settings = {
            "objective": obj.LossGuided(0.5, active=2),
            "batch_size": 100,
            "optimizer": optimizer,
            "optimizer_options": {"momentum": 0.9} if optimizer == "sgd" else {},
            "weight_decay": 0.1,
            "checkpoint_dir": tmp_path / f"{optimizer}{epochs}",
        }

        def stop(run, last=epochs):
            if run.epoch > last:
                raise KeyboardInterrupt

        # A run that has ended keeps no moments.
        with pytest.raises(KeyboardInterrupt):
            ds.fit(ens, (x, y), epochs=5, callback=stop, **settings)
        (file,) = sorted((tmp_path / f"{optimizer}{epochs}").glob("last*.safetensors"))[-1:]
        states.append({k: v for k, v in load_file(file).items() if k.startswith("optimizer.") and v.ndim})
    for before, after in pairwise(states):
        counts = next(name for name in before if name.endswith(".count"))
        drawn = (after[counts] - before[counts]).flatten()
        assert sorted(drawn.tolist()) == [0, 0, 0, 1, 1]
        for name in before:
            assert torch.equal(before[name][drawn == 0], after[name][drawn == 0]), name


@pytest.mark.parametrize(
    ("regulariser", "weights_from", "active"),
    [("a2d", "active", 2), ("a2d", "all", 2), ("a2d", "active", None), ("divdis", "active", 2)],
)
def test_recorded_steps_give_the_same_curve(regulariser, weights_from, active):
    outputs, losses = [], []
    for engine in ("eager", "captured"):
        ens = ds.DeepEnsemble(norm_net, 4)
        objective = obj.LossGuided(0.5, active=active, weights_from=weights_from, regulariser=regulariser)
        run = ds.fit(ens, (x, y), objective=objective, epochs=4, batch_size=30, lr=0.02, engine=engine)
        assert run.engine == engine
        outputs.append(ds.predict(ens, x))
        losses.append(torch.tensor(run.history["loss"]))
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)


def test_it_can_be_wrapped_and_says_so_where_it_cannot():
    inner = obj.LossGuided(0.5, active=2)
    ds.fit(ds.DeepEnsemble(net, 3), (x, y), objective=obj.Adversarial(inner, 0.01), epochs=1)
    for other in (replace(inner, weights_from="all"), replace(inner, guard=obj.HeldOutLoss(x, y))):
        with pytest.raises(ValueError, match="by itself"):
            ds.fit(ds.DeepEnsemble(net, 3), (x, y), objective=obj.Adversarial(other, 0.01), epochs=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: obj.LossGuided(-1.0), "strength"),
        (lambda: obj.LossGuided("strong"), "strength"),
        (lambda: obj.LossGuided(active=1), "active"),
        (lambda: obj.LossGuided(active=2.5), "active"),
        (lambda: obj.LossGuided(weights_from="some"), "'all'"),
        (lambda: obj.LossGuided(reduction="sum"), "'document'"),
        (lambda: obj.LossGuided(weighting="square"), "inverse_probability"),
        (lambda: obj.LossGuided(orientation="random"), "orientation"),
        (lambda: obj.LossGuided(label_smoothing=1.0), "label_smoothing"),
        (lambda: obj.LossGuided(guard="careful"), "guard"),
        (lambda: ds.fit(ds.DeepEnsemble(net, 1), (x, y), objective=obj.LossGuided(), epochs=1), "compares members"),
        (
            lambda: ds.fit(ds.DeepEnsemble(net, 3), (x, y), objective=obj.LossGuided(), epochs=1, batches="own"),
            "share batches",
        ),
    ],
)
def test_bad_input_gets_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_members_become_useless_while_the_ensemble_looks_fine():
    # The recorded check: ten Gaussian classes, a twentieth of the labels wrong, five small heads trained in pairs.
    generator = torch.Generator().manual_seed(1)
    centres = 1.5 * torch.randn(10, 20, generator=generator)
    labels = torch.randint(0, 10, (4000,), generator=generator)
    inputs = centres[labels] + torch.randn(4000, 20, generator=generator)
    wrong = torch.rand(4000, generator=generator) < 0.05
    noisy = torch.where(wrong, torch.randint(0, 10, (4000,), generator=generator), labels)
    unique, best, ensemble, findings = [], [], [], []
    for strength in (0.0, 0.5, 5.0):
        ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)), 5)
        objective = obj.LossGuided(strength, active=2, guard=None)
        ds.fit(
            ens,
            (inputs[:2000], noisy[:2000]),
            objective=objective,
            epochs=20,
            batch_size=50,
            optimizer="adam",
            lr=3e-3,
            engine="captured",
        )
        outputs, truth = ds.predict(ens, inputs[2000:]), labels[2000:]
        unique.append(ds.scores.num_unique(outputs).mean().item())
        best.append((outputs.argmax(-1) == truth).float().mean(-1).max().item())
        ensemble.append((outputs.mean(0).argmax(-1) == truth).float().mean().item())
        findings.append(ds.diagnose(outputs, truth))
    assert [finding.colluding for finding in findings] == [False, False, True]
    assert findings[-1].members_useless
    assert "of little use alone while the ensemble looks fine" in findings[-1].explain()
    assert unique[0] + 0.3 < unique[1] < unique[2] - 0.3
    assert max(ensemble) - min(ensemble) < 0.01
    assert best[2] < best[0] - 0.1


class TestExamplesOfWeightZero:
    """They leave everything as it would be without them."""

    counts = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0, 3.0])

    @pytest.mark.parametrize("weighting", ["loss", "inverse_probability"])
    @pytest.mark.parametrize("regulariser", ["a2d", "divdis"])
    @pytest.mark.parametrize("guard", ["share", "cap", "held out", None])
    def test_do_not_move_the_loss(self, guard, regulariser, weighting):
        if guard == "held out":
            guard = obj.HeldOutLoss(x[:6], y[:6])
        objective = obj.LossGuided(2.0, active=None, regulariser=regulariser, guard=guard, weighting=weighting)
        outputs, kept = 3 * outputs_of(), self.counts > 0
        told = outputs_of(seed=5), LABELS[3:].repeat(2)

        def judged(outputs, labels, counts):
            outputs, step = outputs.requires_grad_(), replace(a_step(), weights=counts)
            loss, parts = objective._judge(None, outputs, labels, step, outputs.detach().mean(0), told)
            return loss, parts, torch.autograd.grad(loss, outputs)[0]

        loss, parts, gradient = judged(outputs.clone(), LABELS, self.counts)
        other = outputs.clone()
        other[:, ~kept] = 50 * torch.randn(4, 2, 3, dtype=torch.float64)
        for found in (
            judged(other, torch.where(kept, LABELS, (LABELS + 1) % 3), self.counts),
            judged(outputs[:, kept].clone(), LABELS[kept], self.counts[kept]),
        ):
            torch.testing.assert_close(found[0], loss)
            torch.testing.assert_close(found[1], parts)
            torch.testing.assert_close(found[2] if found[2].shape[1] == 4 else found[2][:, kept], gradient[:, kept])
        assert (gradient[:, ~kept] == 0).all()

    def test_equal_weights_are_none(self):
        outputs = outputs_of()
        for objective in (obj.LossGuided(active=None), obj.LossGuided(active=None, weighting="inverse_probability")):
            plain, _ = objective.on_outputs(outputs, LABELS, a_step())
            weighed, _ = objective.on_outputs(outputs, LABELS, replace(a_step(), weights=torch.full((6,), 2.0)))
            torch.testing.assert_close(plain, weighed)

    @pytest.mark.parametrize("objective", [obj.LossGuided(), obj.VirtualAdversarial(obj.Independent())])
    def test_do_not_move_any_member_in_training(self, objective):
        counts = torch.cat([torch.zeros(50), torch.ones(50)])
        ends = []
        for inputs, labels in (
            (x, y),
            (x.clone().index_fill(0, torch.arange(50), 7.0), torch.cat([2 - y[:50], y[50:]])),
        ):
            ens = ds.DeepEnsemble(net, 3)
            settings = {"batch_size": 100, "optimizer": "sgd", "epochs": 3, "device": "cpu"}
            ds.fit(ens, (inputs, labels, counts), objective=objective, **settings)
            ends.append(ds.predict(ens, x))
        torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_positions_of_maps_are_examples():
    maps, labels = torch.randn(3, 4, 3, 5, 5, dtype=torch.float64), torch.randint(0, 3, (4, 5, 5))
    labels[0, 0] = -100
    step = a_step(members=3)
    found, _ = obj.LossGuided(active=None).on_outputs(maps, labels, step)
    rows, flat = maps.movedim(2, -1).flatten(1, 3), labels.flatten()
    wanted, _ = obj.LossGuided(active=None).on_outputs(rows[:, flat >= 0], flat[flat >= 0], step)
    torch.testing.assert_close(found, wanted)
