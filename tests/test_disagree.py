"""Disagreement on data from outside: the value written out, members side by side and one after another, and the two-stage split."""

from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import ClassVar, get_args

import pytest
import torch
import torch.nn.functional as F
from training_helpers import net, norm_net, weights, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.objectives.objective import BatchNorm, Step

ELSEWHERE = 3 * torch.randn(80, 4, generator=torch.Generator().manual_seed(5))


class Watching(obj.Disagree):
    """Remembers what a step saw and gave."""

    seen: ClassVar[list] = []

    def __call__(self, members, inputs, labels, step):
        result = super().__call__(members, inputs, labels, step)
        members = members.whole
        with members.evaluating():
            outputs = members(inputs), members(step.streams["unlabelled"])
        self.seen.append((outputs, labels, members.num_members, result))
        return result


@dataclass(frozen=True)
class Drawn(obj.Disagree):
    """Draws the members it is told to."""

    rows: tuple[int, ...] | None = None

    def pick(self, step, num_members):
        return None if self.rows is None else torch.tensor(self.rows)


def first_step(**options):
    Watching.seen.clear()
    objective = Watching(ELSEWHERE.double(), **options)
    ens = ds.DeepEnsemble(lambda: net().double(), 3)
    ds.fit(ens, (x.double(), y), objective=objective, epochs=1, batch_size=50, engine="eager")
    return Watching.seen[0]


@pytest.mark.parametrize("name", obj.PAIR_TERMS)
def test_the_loss_is_cross_entropy_here_and_the_mean_pair_term_there(name):
    (here, there), labels, _, (loss, parts) = first_step(regulariser=name, strength=0.3)
    log_probs = there.log_softmax(-1)
    pairs = [obj.PAIR_TERMS[name](log_probs[m], log_probs[k]).mean() for m, k in combinations(range(3), 2)]
    main = torch.stack([F.cross_entropy(each, labels) for each in here])
    torch.testing.assert_close(parts["loss"], main)
    torch.testing.assert_close(parts["regulariser"], torch.stack(pairs).mean())
    torch.testing.assert_close(loss.detach(), 3 * (main.mean() + 0.3 * torch.stack(pairs).mean()))


def test_divdis_holds_members_near_their_mean_prediction_on_labelled_data():
    (here, there), _, _, (_, parts) = first_step(regulariser="divdis")
    prior = here.softmax(-1).mean((0, 1))
    torch.testing.assert_close(parts["regulariser"], obj.divdis(there.softmax(-1), prior))


def disagreement_elsewhere(objective, **options):
    ens = ds.DeepEnsemble(net, 3)
    ds.fit(ens, (x, y), objective=objective, epochs=40, batch_size=50, lr=0.02, engine="captured", **options)
    found = ds.metrics.mean_disagreement(ds.predict(ens, ELSEWHERE).argmax(-1))
    accuracy = (ds.predict(ens, x).argmax(-1) == y).float().mean().item()
    return found, accuracy


@pytest.mark.parametrize(("regulariser", "strength"), [("a2d", 0.1), ("divdis", 0.5)])
def test_members_disagree_elsewhere_and_still_fit_the_data(regulariser, strength):
    without, _ = disagreement_elsewhere(obj.Disagree(ELSEWHERE, strength=0.0))
    found, accuracy = disagreement_elsewhere(obj.Disagree(ELSEWHERE, regulariser=regulariser, strength=strength))
    assert found > without + 0.2
    assert accuracy > 0.9


def test_the_data_may_come_with_the_objective_or_with_the_run_but_not_both():
    outputs = []
    for own, given in ((ELSEWHERE, None), (None, ELSEWHERE)):
        ens = ds.DeepEnsemble(net, 3)
        ds.fit(ens, (x, y), objective=obj.Disagree(own), unlabelled=given, epochs=2, batch_size=50)
        outputs.append(ds.predict(ens, x))
    torch.testing.assert_close(*outputs)
    with pytest.raises(ValueError, match="not both"):
        ds.fit(ds.DeepEnsemble(net, 3), (x, y), objective=obj.Disagree(ELSEWHERE), unlabelled=ELSEWHERE)
    with pytest.raises(ValueError, match="shaped as the training inputs"):
        ds.fit(ds.DeepEnsemble(net, 3), (x, y), objective=obj.Disagree(ELSEWHERE[:, :2]), epochs=1)
    with pytest.raises(ValueError, match="needs inputs"):
        ds.fit(ds.DeepEnsemble(net, 3), (x, y), objective=obj.Disagree(), epochs=1)


def test_passes_elsewhere_leave_batch_statistics_alone():
    found = []
    for scale in (1.0, 100.0):
        ens = ds.DeepEnsemble(norm_net, 3)
        objective = obj.Disagree(scale * ELSEWHERE, strength=0.0, batch_norm="eval")
        ds.fit(ens, (x, y), objective=objective, epochs=2, batch_size=50)
        found.append(weights(ens))
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name])


@pytest.mark.parametrize("batch_norm", get_args(BatchNorm))
def test_batch_norm_does_elsewhere_what_it_would_in_plain_passes(batch_norm):
    ens, elsewhere = ds.DeepEnsemble(norm_net, 3).train(), ELSEWHERE[:50]
    nets = [ens.member(j).train() for j in range(3)]
    step = Step(torch.tensor(0), 10, False, torch.arange(3), torch.tensor(9), {"unlabelled": elsewhere})
    _, parts = obj.Disagree(batch_norm=batch_norm)(ens.view(), x, y, step)
    if batch_norm == "mix":
        there = torch.stack([each(torch.cat([x, elsewhere]))[len(x) :] for each in nets])
    else:
        there = torch.stack([(each(x), each.train(batch_norm == "train")(elsewhere))[1] for each in nets])
    in_use = torch.stack([each.eval()(elsewhere) for each in nets])

    def agreement(logits):
        pairs = [obj.a2d_from_logits(logits[m], logits[k]).mean() for m, k in combinations(range(3), 2)]
        return torch.stack(pairs).mean().detach()

    torch.testing.assert_close(parts["regulariser"], agreement(there))
    torch.testing.assert_close(parts.get("regulariser_in_use", parts["regulariser"]), agreement(in_use))
    for j, each in enumerate(nets):
        torch.testing.assert_close(ens.member(j).state_dict(), each.state_dict())


@pytest.mark.parametrize("batch_norm", get_args(BatchNorm))
@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_what_training_reports_is_what_use_shows(batch_norm, engine):
    ens = ds.DeepEnsemble(norm_net, 3)
    objective = obj.Disagree(ELSEWHERE, strength=0.3, batch_norm=batch_norm)
    run = ds.fit(ens, (x, y), objective=objective, epochs=40, batch_size=len(x), lr=0.01, engine=engine)
    reported = run.history.by_epoch("regulariser" if batch_norm == "eval" else "regulariser_in_use")[-1]
    logits = ds.predict(ens, ELSEWHERE)
    pairs = [obj.a2d_from_logits(logits[m], logits[k]).mean() for m, k in combinations(range(3), 2)]
    assert reported == pytest.approx(torch.stack(pairs).mean().item(), rel=0.15)


@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_in_a_sequence_members_train_in_turn_and_the_others_stay_as_they_are(engine):
    ens = ds.DeepEnsemble(norm_net, 3)
    history = [weights(ens)]
    ds.fit(
        ens,
        (x, y),
        objective=obj.Disagree(ELSEWHERE, sequential=True),
        epochs=6,
        batch_size=100,
        weight_decay=0.1,
        callback=lambda run: history.append(weights(run.members)),
        engine=engine,
    )
    for epoch, (before, after) in enumerate(pairwise(history)):
        for name in before:
            moved = [m for m in range(3) if not torch.equal(before[name][m], after[name][m])]
            assert moved == [epoch // 2], (epoch, name)


def test_in_a_sequence_a_member_is_set_against_those_before_it():
    Watching.seen.clear()
    objective = Watching(ELSEWHERE, sequential=True, strength=1.0)
    ds.fit(ds.DeepEnsemble(net, 3), (x, y), objective=objective, epochs=3, batch_size=100, engine="eager")
    # One step to have choices made, then one for each member; dropout is off, so both modes give the same outputs.
    for member, ((_, there), _, count, (_, parts)) in enumerate(Watching.seen[-3:]):
        assert count == 3
        pairs = [obj.a2d_from_logits(there[earlier], there[member]).mean() for earlier in range(member)]
        expected = torch.stack(pairs).mean() if pairs else torch.zeros(())
        torch.testing.assert_close(parts["regulariser"], expected)


def test_in_a_sequence_an_anchored_network_is_set_against_all_members_of_those_before_it():
    Watching.seen.clear()
    # Two references that are one: a network then says the same in training, where it draws one, as in evaluation.
    ens = ds.Anchored(net, x[:1].expand(2, -1), num_members=2, num_nets=3, seed=0)
    objective = Watching(ELSEWHERE, sequential=True, strength=1.0)
    ds.fit(ens, (x, y), objective=objective, epochs=3, batch_size=100, engine="eager")
    for network, ((_, there), _, _, (_, parts)) in enumerate(Watching.seen[-3:]):
        assert len(there) == 6
        own = there[2 * network]
        pairs = [obj.a2d_from_logits(there[member], own).mean() for member in range(2 * network)]
        expected = torch.stack(pairs).mean() if pairs else torch.zeros(())
        torch.testing.assert_close(parts["regulariser"], expected)


def test_drawing_members_adds_no_bias():
    found = []
    for rows in (None, *combinations(range(4), 2)):
        ens = ds.DeepEnsemble(net, 4)
        before = weights(ens)
        objective = Drawn(ELSEWHERE[:20], strength=0.5, rows=rows)
        ds.fit(ens, (x[:20], y[:20]), objective=objective, epochs=1, batch_size=20, optimizer="sgd", lr=1.0)
        found.append({name: before[name] - tensor for name, tensor in weights(ens).items()})
    full, *draws = found
    for name, gradient in full.items():
        mean = torch.stack([draw[name] for draw in draws]).mean(0)
        torch.testing.assert_close(mean, gradient, rtol=1e-4, atol=1e-6)


def test_the_first_of_a_sequence_is_the_member_trained_alone():
    alone, first = ds.DeepEnsemble(net, 2), ds.DeepEnsemble(net, 2)
    ds.fit(alone, (x, y), objective=obj.Independent(), batches="shared", epochs=4, batch_size=50)
    ds.fit(first, (x, y), objective=obj.Disagree(ELSEWHERE, sequential=True), epochs=8, batch_size=50)
    torch.testing.assert_close(ds.predict(first, x)[0], ds.predict(alone, x)[0], rtol=1e-4, atol=1e-5)


def test_unsure_examples_are_those_with_a_low_largest_probability_or_a_low_one_for_the_label():
    logits = torch.tensor([[0.6, 0.3, 0.1], [0.35, 0.33, 0.32], [0.9, 0.05, 0.05]]).log()
    assert obj.low_confidence(logits, 0.5).tolist() == [False, True, False]
    assert obj.low_confidence(logits, 0.5, torch.tensor([1, 0, 0])).tolist() == [True, True, False]


def test_the_two_stage_split_fits_the_sure_and_disagrees_on_the_unsure():
    first = ds.DeepEnsemble(net, 1)
    ds.fit(first, (x, y), epochs=20, batch_size=50, lr=0.02)
    logits = ds.predict(first, x)[0]
    unsure = logits.softmax(-1).amax(-1) < 0.8
    data, objective = obj.two_stage(x, y, logits, threshold=0.8, strength=0.5, active=2)
    assert torch.equal(data[0], x[~unsure])
    assert torch.equal(data[1], y[~unsure])
    assert torch.equal(objective.ood_data, x[unsure])
    run = ds.fit(ds.DeepEnsemble(net, 4), data, objective=objective, epochs=2, batch_size=20)
    assert "regulariser" in run.history.columns
    with pytest.raises(ValueError, match="split the data"):
        obj.two_stage(x, y, logits, threshold=0.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: obj.Disagree(ELSEWHERE, strength=-1.0), "strength"),
        (lambda: obj.Disagree(ELSEWHERE, regulariser="nothing"), "divdis"),
        (lambda: ds.fit(ds.DeepEnsemble(net, 2), (x, y), objective=obj.Disagree(ELSEWHERE[:0]), epochs=1), "empty"),
        (lambda: obj.Disagree(ELSEWHERE, sequential=True, active=2), "one member at a time"),
        (lambda: obj.Disagree(ELSEWHERE, sequential=True, regulariser="divdis"), "pair term"),
        (lambda: obj.Disagree(ELSEWHERE, label_smoothing=1.0), "label_smoothing"),
        (
            lambda: ds.fit(ds.DeepEnsemble(net, 1), (x, y), objective=obj.Disagree(ELSEWHERE), epochs=1),
            "compares members",
        ),
    ],
)
def test_bad_input_gets_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_sequence_needs_a_step_for_each_member():
    with pytest.raises(ValueError, match="2 steps for 5 members"):
        ds.fit(
            ds.DeepEnsemble(net, 5),
            (x, y),
            objective=obj.Disagree(ELSEWHERE, sequential=True),
            epochs=2,
            batch_size=len(x),
            progress=False,
        )


def test_divdis_is_in_full_precision_under_autocast():
    # Nearly independent members: a difference of entropies of which bfloat16 keeps nothing.
    probs = (0.1 + 0.001 * torch.randn(3, 64, 10, generator=torch.Generator().manual_seed(0))).requires_grad_()
    found = []
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            value = obj.divdis(probs, prior=torch.full((10,), 0.1))
        found.append((value.detach(), torch.autograd.grad(value, probs)[0]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_the_known_class_frequencies_are_those_of_examples_that_count():
    ens, counts = ds.DeepEnsemble(net, 3), torch.cat([torch.zeros(50), torch.ones(50)])
    values = []
    for inputs in (x, torch.cat([9 + x[:50], x[50:]])):
        step = Step(torch.tensor(0), 10, False, torch.arange(3), torch.tensor(9), {"unlabelled": ELSEWHERE}, counts)
        values.append(obj.Disagree(regulariser="divdis", batch_norm="eval")(ens.view(), inputs, y, step)[0])
    torch.testing.assert_close(*values)
