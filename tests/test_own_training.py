"""The example of training code of one's own: the same curve as `ds.fit`, and ensembles inside other people's loops."""

import copy
import importlib.util
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from models_table import declare_torchvision
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus.training.validation import Watch, validate

PATH = Path(__file__).parents[1] / "examples" / "own_training.py"
spec = importlib.util.spec_from_file_location("own_training", PATH)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


def test_a_plain_loop_gives_the_curve_of_fit():
    loader = DataLoader(TensorDataset(*example.data()), batch_size=16)
    mine, theirs = ds.DeepEnsemble(example.make_net, 3).train(), ds.DeepEnsemble(example.make_net, 3)
    curves = example.plain_loop(mine, loader, 3, 0.1), example.fitted(theirs, loader, 3, 0.1)
    torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curves[1]), atol=1e-5, rtol=1e-4)
    x, _ = example.data()
    torch.testing.assert_close(ds.predict(mine, x), ds.predict(theirs, x), atol=1e-5, rtol=1e-4)


def test_a_score_is_a_detector():
    ens = ds.DeepEnsemble(example.make_net, 3)
    x, _ = example.data()
    found = example.Detector(ens).fit(None)(x)
    torch.testing.assert_close(found, ds.scores.mutual_information(ds.predict(ens, x)))


def test_arrays_for_openood_give_the_same_auroc():
    """By its own rule: unknown inputs are those with label -1, told apart by less confidence."""
    ens, (x, y) = ds.DeepEnsemble(example.make_net, 3), example.data()
    confidence, label, prediction = example.for_openood(ens, (x, y), 3 * x[:40])
    assert confidence.shape == label.shape == prediction.shape == (136,)
    pairs = confidence[label == -1][:, None] - confidence[label != -1][None]
    auroc = ((pairs < 0) + 0.5 * (pairs == 0)).mean()
    found = [ds.scores.mutual_information(ds.predict(ens, part)) for part in (3 * x[:40], x)]
    assert auroc == pytest.approx(float(ds.metrics.auroc(*found)), abs=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("lightning") is None and find_spec("pytorch_lightning") is None,
    reason="neither lightning nor pytorch_lightning is installed; it is no dependency of ours",
)
@pytest.mark.filterwarnings("ignore")  # it warns of few workers, unused GPUs and long intervals of logging
def test_inside_lightning_members_train_as_in_a_plain_loop():
    mine, theirs = (ds.DeepEnsemble(example.make_net, 3).train() for _ in range(2))
    loader = DataLoader(TensorDataset(*example.data()), batch_size=16)
    example.plain_loop(mine, loader, 3, 0.1)
    example.with_lightning(theirs, loader, 3, 0.1)
    x, _ = example.data()
    start = ds.predict(ds.DeepEnsemble(example.make_net, 3), x)
    assert (ds.predict(mine, x) - start).abs().amax() > 0.1
    torch.testing.assert_close(ds.predict(theirs, x), ds.predict(mine, x), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_detectors_of_pytorch_ood_are_scores():
    declare_torchvision()  # which pytorch-ood imports, and which does not load beside every build of torch
    pytest.importorskip("pytorch_ood")
    ens, (x, _) = ds.DeepEnsemble(example.make_net, 3), example.data()
    torch.testing.assert_close(example.with_pytorch_ood(ens, x), ds.scores.mean_energy(ds.predict(ens, x)))


@pytest.mark.slow
def test_inside_the_trainer_of_transformers_and_torchmetrics(tmp_path):
    pytest.importorskip("torchmetrics")
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    ens = ds.DeepEnsemble(example.make_net, 3)
    x, y = example.data()
    before = torch.nn.functional.cross_entropy(ds.predict(ens, x)[0], y)
    example.with_trainer(ens, str(tmp_path))
    assert torch.nn.functional.cross_entropy(ds.predict(ens, x)[0], y) < before
    assert 0 <= example.with_torchmetrics(ens) <= 1
    wanted = float(ds.metrics.ece(ds.predict(ens, x).softmax(-1).mean(0), y, bins=15))
    assert example.with_torchmetrics(ens) == pytest.approx(wanted, abs=1e-5)


def test_gradients_are_clipped_number_by_number():
    x, y = torch.tensor([[1.0]]), torch.tensor([[100.0]])
    ens = ds.DeepEnsemble(lambda: torch.nn.Linear(1, 1), 2)
    before = [parameter.detach().clone() for parameter in ens.parameters()]
    objective = ds.objectives.Independent("mse")
    ds.fit(
        ens,
        (x, y),
        objective=objective,
        epochs=1,
        optimizer="sgd",
        lr=0.5,
        clip_value=0.1,
        device="cpu",
        engine="eager",
    )
    for old, new in zip(before, ens.parameters(), strict=True):
        torch.testing.assert_close((new - old).abs(), torch.full_like(old, 0.05))
    with pytest.raises(ValueError, match="`clip_value` must be a number above 0"):
        ds.fit(ens, (x, y), objective=objective, clip_value=0.0)


def problem(count=60):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=g)
    return x, (x[:, 0] + x[:, 1].square() > 0.5).long()


def small_net():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def trained(data, make=small_net, **settings):
    ens = ds.DeepEnsemble(make, 3, seed=1)
    defaults = {"epochs": 3, "optimizer": "sgd", "lr": 0.2, "device": "cpu", "seed": 3}
    return ens, ds.fit(ens, data, **defaults | settings)


def in_float64():
    return small_net().double()


@pytest.mark.parametrize("engine", ["eager", "captured"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batches", ["own", "shared"])
def test_accumulating_is_one_larger_batch(engine, weighted, batches):
    x, y = problem()
    data = (x.double(), y, torch.rand(60)) if weighted else (x.double(), y)
    settings = {"make": in_float64, "batches": batches, "clip_norm": 0.5}
    # 60 examples in batches of 16: the last one, of 12, is cut into four parts too.
    large, one = trained(data, batch_size=16, engine="eager", **settings)
    small, four = trained(data, batch_size=4, accumulate=4, engine=engine, **settings)
    assert four.step == one.step
    torch.testing.assert_close(ds.predict(small, data[0]), ds.predict(large, data[0]), atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(torch.tensor(four.history["loss"]), torch.tensor(one.history["loss"]))


def by_torch(net, x, y, weights, class_weights):
    """The loss of a whole batch: sums over what counts, by torch's functions alone."""
    losses = torch.nn.functional.cross_entropy(net(x), y, reduction="none", ignore_index=-100)
    counts = (y != -100).double()
    if class_weights is not None:
        counts = counts * torch.tensor(class_weights)[y.clamp_min(0)]
    if weights is not None:
        counts = counts * weights.reshape(-1, *[1] * (y.ndim - 1))
    return (counts * losses).sum() / counts.sum()


def map_net():
    return torch.nn.Conv2d(1, 2, 3, padding=1).double()


@pytest.mark.parametrize("engine", ["eager", "captured"])
@pytest.mark.parametrize("objective", [ds.objectives.Independent, ds.objectives.Joint])
@pytest.mark.parametrize("class_weights", [None, (0.25, 4.0)], ids=["", "classes"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "examples"])
@pytest.mark.parametrize("maps", [False, True], ids=["", "maps"])
def test_an_accumulated_step_is_torchs_on_the_whole_batch(maps, weighted, class_weights, objective, engine):
    g = torch.Generator().manual_seed(2)
    x, y = problem(14)
    x, weights = x.double(), torch.rand(14, generator=g).double().square() if weighted else None
    if maps:
        x = torch.randn(14, 1, 5, 5, generator=g).double()
        y = (x[:, 0] > 0.3).long()
        for place in range(14):  # as unevenly as can be
            y[place].view(-1)[2 * place - 3 :] = -100 if place % 3 else 0
    make = map_net if maps else in_float64
    options = {"beta": 0.0} if objective is ds.objectives.Joint else {}
    ens = ds.DeepEnsemble(make, 2, seed=1)
    wanted, losses = [], []
    for member in range(2):
        alone = copy.deepcopy(ens.member(member))
        losses.append(by_torch(alone, x, y, weights, class_weights))
        gradients = torch.autograd.grad(losses[-1], list(alone.parameters()))
        wanted.append([p.detach() - 0.3 * g for p, g in zip(alone.parameters(), gradients, strict=True)])
    run = ds.fit(
        ens,
        (x, y) if weights is None else (x, y, weights),
        objective=objective(class_weights=class_weights, **options),
        **{"epochs": 1, "batch_size": 4, "accumulate": 4, "optimizer": "sgd", "lr": 0.3},
        **{"device": "cpu", "engine": engine},
    )
    assert run.step == 1
    assert run.history["loss"] == pytest.approx([loss.item() for loss in losses], rel=1e-6)
    for member in range(2):
        for parameter, value in zip(ens.member(member).parameters(), wanted[member], strict=True):
            torch.testing.assert_close(parameter, value, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize(
    "objective",
    [
        ds.objectives.LossGuided(0.0, active=None, class_weights=(0.25, 4.0)),
        ds.objectives.NormPenalty(ds.objectives.Independent(class_weights=(0.25, 4.0)), 0.1),
        ds.objectives.Joint(0.7, class_weights=(0.25, 4.0)),
        ds.objectives.Independent("brier", class_weights=(0.25, 4.0)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_accumulating_by_class_is_one_larger_batch(objective):
    x, y = problem()
    settings = {"make": in_float64, "batches": "shared", "objective": objective, "epochs": 2}
    large, one = trained((x.double(), y), batch_size=30, **settings)
    small, six = trained((x.double(), y), batch_size=5, accumulate=6, **settings)
    torch.testing.assert_close(ds.predict(small, x.double()), ds.predict(large, x.double()), atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(torch.tensor(six.history["loss"]), torch.tensor(one.history["loss"]))


class Focal(ds.objectives.OutputObjective):
    """An objective of somebody's own that takes means without weights."""

    batches, couples = "own", False
    likelihood = ds.objectives.likelihood_of("cross_entropy")

    def on_outputs(self, outputs, y, step):
        losses = self.likelihood.per_example(outputs, y)
        losses = ((1 - (-losses).exp()) * losses).mean(-1)
        return losses.sum(), {"loss": losses.detach()}


def test_parts_count_by_their_sizes_where_an_objective_has_no_weights():
    x, y = problem()
    data = x.double(), y, torch.rand(60, generator=torch.Generator().manual_seed(0))
    large, one = trained(data, in_float64, objective=Focal(), batch_size=30)
    small, six = trained(data, in_float64, objective=Focal(), batch_size=5, accumulate=6)
    torch.testing.assert_close(ds.predict(small, data[0]), ds.predict(large, data[0]), atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(torch.tensor(six.history["loss"]), torch.tensor(one.history["loss"]))


def test_accumulating_joins_the_batches_of_a_loader():
    x, y = problem()
    ends = []
    for size, accumulate in ((20, 1), (5, 4)):
        loader = DataLoader(TensorDataset(x.double(), y), size)
        ends.append(ds.predict(trained(loader, in_float64, accumulate=accumulate)[0], x.double()))
    torch.testing.assert_close(*ends, atol=1e-9, rtol=1e-7)


class Silent(torch.nn.Module):
    def forward(self, x):
        return 0.0 * x


def test_means_over_masked_examples_stay_means_where_they_are_accumulated():
    """Of a network that says nothing every loss is log 2, whatever counts how much."""
    x, y = problem()
    ens = ds.Anchored(
        torch.nn.Sequential(torch.nn.Linear(4, 2), Silent()), x[:10], mask_probability=0.5, mask_per="example"
    )
    objective = ds.objectives.MaskedUniform(ds.objectives.Independent(class_weights=(0.25, 4.0)))
    settings = {"objective": objective, "epochs": 1, "batch_size": 5, "accumulate": 4, "device": "cpu"}
    assert ds.fit(ens, (x, y), **settings).history["loss"] == pytest.approx([math.log(2)])


class Masking(ds.objectives.OutputObjective):
    """An objective of somebody's own that gives others of ours targets that the batch does not have."""

    batches, couples = "own", False
    inner = ds.objectives.Independent()
    likelihood = inner.likelihood

    def on_outputs(self, outputs, y, step):
        y = y.clone()
        y[..., ::2] = -100
        y[..., 0, 0] = -100
        return self.inner.on_outputs(outputs, y, step)


@pytest.mark.parametrize("weighted", [False, True])
def test_means_over_changed_targets_stay_means_where_they_are_accumulated(weighted):
    y = (torch.arange(8 * 5 * 6) % 3 == 0).long().reshape(8, 5, 6)
    y[0, 1:] = y[5, 2:] = -100
    data = (torch.ones(8, 1, 5, 6), y) + ((torch.rand(8),) if weighted else ())

    def make():
        return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), Silent())

    for size, accumulate in ((8, 1), (2, 4)):
        ens = ds.DeepEnsemble(make, 2)
        settings = {"objective": Masking(), "epochs": 1, "batch_size": size, "accumulate": accumulate}
        run = ds.fit(ens, data, **settings, device="cpu")
        assert run.history["loss"] == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize("batches", ["own", "shared"])
def test_accumulating_weighted_batches_of_members_that_share_their_parameters(batches):
    x, y = problem()
    data = x.double(), y, torch.rand(60, generator=torch.Generator().manual_seed(0))
    ends, runs = [], []
    for size, accumulate in ((30, 1), (5, 6)):
        ens = ds.PackedEnsemble(in_float64, 2)
        settings = {"epochs": 2, "optimizer": "sgd", "lr": 0.2, "batches": batches, "device": "cpu"}
        runs.append(ds.fit(ens, data, batch_size=size, accumulate=accumulate, **settings))
        ends.append(ds.predict(ens, data[0]))
    torch.testing.assert_close(*ends, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(*(torch.tensor(run.history["loss"]) for run in runs))


def test_parts_of_an_accumulated_batch_draw_their_own_noise():
    """One input in both parts: with masks that they share, weights would move by two sizes only, one and none."""
    x, y = torch.ones(2, 400), torch.zeros(2, dtype=torch.long)

    def make():
        return torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(400, 2, bias=False))

    ens, _ = trained((x, y), make, epochs=1, batch_size=1, accumulate=2)
    start = ds.DeepEnsemble(make, 3, seed=1)
    moved = (ens.net[1].weight - start.net[1].weight).abs()[0, 0]
    # Inputs that both parts kept, either, and none.
    assert len(moved.mul(1e4).round().unique()) == 4


@pytest.mark.parametrize("engine", ["eager", "captured"])
@pytest.mark.parametrize("optimizer", ["sgd", torch.optim.RMSprop])
def test_the_average_of_weights_is_its_closed_form(engine, optimizer, tmp_path):
    if optimizer != "sgd" and engine == "captured":
        pytest.skip("other optimizers run eagerly")
    x, y = problem()
    decay, weights = 0.7, []
    settings = {"batch_size": 20, "optimizer": optimizer, "lr": 0.01, "engine": engine}

    def look(run):
        weights.append(run.members.net[0].weight.detach().clone().double())

    trained((x, y), check_every=1, callback=look, **settings)
    ens, _ = trained((x, y), ema=decay, **settings)
    shares = torch.tensor([decay ** (len(weights) - step) for step in range(1, len(weights) + 1)])
    wanted = sum(share * weight for share, weight in zip(shares / shares.sum(), weights, strict=True))
    torch.testing.assert_close(ens.net[0].weight.double(), wanted, atol=1e-6, rtol=1e-5)


def test_the_averaged_weights_are_validated_selected_and_stored(tmp_path):
    x, y = problem()
    ens, run = trained((x, y), ema=0.9, validation=(x, y), checkpoint_dir=tmp_path / "run", epochs=4)
    last = torch.nn.functional.cross_entropy(ds.predict(ens, x)[1], y)
    assert run.history["validation_loss"][-2] == pytest.approx(float(last), abs=1e-6)
    again, _ = trained((x, y), ema=0.9, validation=(x, y), checkpoint_dir=tmp_path / "run", epochs=4, resume=True)
    assert torch.equal(ds.predict(again, x), ds.predict(ens, x))
    chosen, run = trained((x, y), ema=0.9, validation=(x, y), select="ensemble_loss", epochs=4)
    assert run.best_step == run.step
    assert torch.equal(ds.predict(chosen, x), ds.predict(ens, x))


def test_a_member_that_stopped_is_bit_for_bit_what_it_was():
    x, y = problem(120)
    held_out = (x[60:], y[60:])

    def make():
        return torch.nn.Sequential(
            torch.nn.Linear(4, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Linear(32, 2)
        )

    seen: dict[int, list[torch.Tensor]] = {}

    def look(run):
        seen[run.step] = [t.detach().clone() for t in (*run.members.parameters(), *run.members.buffers())]

    settings = {"epochs": 40, "lr": 0.5, "validation": held_out, "batch_size": 20, "make": make}
    _, plain = trained((x[:60], y[:60]), callback=look, **settings)
    losses = torch.tensor(plain.history["validation_loss"]).reshape(-1, 3)
    wanted = {}
    for member, values in enumerate(losses.T.tolist()):
        best = 0
        for check, value in enumerate(values):
            if value < values[best]:
                best = check
            elif check - best == 3:
                break
        wanted[member] = 3 * (best + 1)
    assert len(set(wanted.values())) > 1, "members should stop at different times for this to say anything"
    at_best = {member: [t[member] for t in seen[step]] for member, step in wanted.items()}
    seen.clear()
    ens, run = trained((x[:60], y[:60]), callback=look, patience=3, per_member=True, **settings)
    assert run.best_steps == wanted
    assert run.stopped_early
    assert run.step < plain.step
    for member, tensors in at_best.items():
        for end, then in zip((*ens.parameters(), *ens.buffers()), tensors, strict=True):
            assert torch.equal(end[member], then)
        for step, held in seen.items():
            if step >= wanted[member] + 9:
                assert all(torch.equal(t[member], then) for t, then in zip(held, tensors, strict=True))


def wide(width):
    return torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Tanh(), torch.nn.Linear(width, 2)
    )


def heads_of(widths):
    made = iter(widths)
    return ds.HeadEnsemble(torch.nn.Flatten(), lambda: wide(next(made)), len(widths))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ds.DeepEnsemble.from_members([wide(4), wide(32)]),
        lambda: heads_of([4, 32]),
        lambda: ds.Anchored([wide(4), wide(32)], problem()[0][:8], 2, seed=1),
    ],
    ids=["deep", "heads", "anchored"],
)
@pytest.mark.parametrize("patience", [None, 2])
def test_networks_of_other_architectures_are_kept_with_their_own_buffers(make, patience):
    x, y = problem(120)
    held_out = (x[60:], y[60:])
    torch.manual_seed(0)
    ens, objective = make(), ds.objectives.Independent()
    run = ds.fit(
        ens, (x[:60], y[:60]), epochs=12, lr=0.3, batch_size=20, validation=held_out, per_member=True, optimizer="sgd",
        schedule=lambda epoch, epochs: 1.0 if epoch < 8 else 30.0, patience=patience, device="cpu",
    )  # fmt: skip
    curves = torch.tensor(run.history["validation_loss"]).reshape(-1, 2)
    assert min(run.best_steps.values()) > 3, "the first check should not be the best one for this to say anything"
    assert patience is not None or max(run.best_steps.values()) < run.step, "nor the last"
    now, _ = validate(ens, [(*held_out, None)], objective.likelihood)
    torch.testing.assert_close(torch.tensor(now["validation_loss"]), curves.min(0).values)


def test_a_first_value_that_is_no_number_is_not_the_best_for_ever():
    nan = float("nan")
    for name, values in (
        ("ensemble_loss", [nan, nan, 3.0, 2.0, nan, 2.5]),
        ("accuracy", [nan, nan, 0.1, 0.2, nan, 0.1]),
    ):
        watch = Watch(name)
        assert [watch.see(value, step) for step, value in enumerate(values)] == [True, False, True, True, False, False]
        assert (watch.best, watch.best_step, watch.stale) == (values[3], 3, 2)


@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_runs_with_all_of_it_resume_exactly(engine, tmp_path):
    x, y = problem()
    settings = {
        **{"accumulate": 2, "ema": 0.8, "per_member": True, "patience": 2, "validation": (x[40:], y[40:])},
        **{"batch_size": 8, "epochs": 12, "lr": 0.6, "engine": engine, "optimizer": "adam"},
    }
    whole, run = trained((x[:40], y[:40]), **settings)

    class Stop(Exception):
        pass

    def stop(run):
        if run.epoch == 5:
            raise Stop

    with pytest.raises(Stop):
        trained((x[:40], y[:40]), checkpoint_dir=tmp_path, callback=stop, **settings)
    part, again = trained((x[:40], y[:40]), checkpoint_dir=tmp_path, resume=True, **settings)
    assert torch.equal(ds.predict(part, x), ds.predict(whole, x))
    assert again.best_steps == run.best_steps
    assert repr(again).endswith(f", best {run.best:.4g})")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"accumulate": 0}, "`accumulate` must be"),
        ({"ema": 1.0}, "`ema` must be a number of at least 0 and below 1"),
        ({"per_member": True}, "give `validation=`"),
        ({"per_member": True, "select": "ensemble_loss", "validation": problem()}, "`select` must be one of validation_loss"),
        ({"per_member": True, "objective": ds.objectives.Joint(), "validation": problem()}, "does not couple them"),
        ({"per_member": True, "optimizer": torch.optim.RMSprop, "validation": problem()}, "needs sgd, adam or adamw"),
    ],
)  # fmt: skip
def test_wrong_options_of_steps_get_a_sentence(settings, words):
    with pytest.raises(ValueError, match=words):
        trained(problem(), **settings)


def disagreeing(members, x, y, step):
    """What somebody writes after reading what an objective is."""
    logits = members.each(x) if step.own else members(x)
    losses = torch.stack([torch.nn.functional.cross_entropy(own, y) for own in logits])
    spread = logits.softmax(-1).var(0).mean()
    return losses.sum() - 0.1 * spread, {"loss": losses.detach(), "spread": spread.detach()}


@pytest.mark.parametrize("engine", ["eager", "captured"])
def test_a_function_is_an_objective(engine, tmp_path):
    x, y = problem()
    ens, run = trained((x, y), objective=disagreeing, engine=engine)
    assert {"loss", "spread"} <= {*run.history.columns}
    plain, _ = trained((x, y), objective=ds.objectives.Independent(), batches="shared", engine=engine)
    assert not torch.equal(ds.predict(ens, x), ds.predict(plain, x))
    ds.testing.check_objective(disagreeing, lambda: ds.DeepEnsemble(lambda: torch.nn.Linear(4, 2), 3), x, y)
    kept, _ = trained((x, y), objective=disagreeing, engine=engine, checkpoint_dir=tmp_path)
    again, _ = trained((x, y), objective=disagreeing, engine=engine, checkpoint_dir=tmp_path, resume=True)
    assert torch.equal(ds.predict(again, x), ds.predict(kept, x))


def test_a_function_says_what_it_needs():
    def alone(members, x, y, step):
        assert step.own
        losses = torch.stack([torch.nn.functional.mse_loss(*pair) for pair in zip(members.each(x), y, strict=True)])
        return losses.sum(), {"loss": losses.detach()}

    alone.batches, alone.couples = "own", False
    x = problem()[0]
    ens = ds.DeepEnsemble(lambda: torch.nn.Linear(4, 1), 2, seed=1)
    run = ds.fit(ens, (x, x[:, :1]), objective=alone, epochs=2, validation=(x, x[:, :1]), device="cpu")
    assert run.history["validation_loss"][-1] == pytest.approx(
        float((ds.predict(ens, x)[1] - x[:, :1]).square().mean()), rel=1e-4
    )


@pytest.mark.parametrize(
    "loss",
    [
        torch.nn.CrossEntropyLoss(),
        torch.nn.functional.cross_entropy,
        "joint",
        ds.objectives.Independent,
        lambda output, target: output,
    ],
)
def test_a_loss_is_no_objective(loss):
    with pytest.raises(ValueError, match=r"`objective` must be an objective.*Independent\(loss\)|must be an objective"):
        trained(problem(), objective=loss)
