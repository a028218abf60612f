"""Uses of the core that once went wrong in silence, or would, if the obvious code were written."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from training_helpers import net, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.data import augment
from dissensus.randomness import Noise
from dissensus.training import CheckpointError


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(F.dropout(x, 0.5, self.training))


def test_members_that_draw_random_numbers_are_not_recorded():
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        ens = ds.DeepEnsemble(Noisy, 2)
        run = ds.fit(ens, (x, y), epochs=150, batch_size=20)
        assert run.engine == "eager"
        runs.append(ds.predict(ens, x))
    assert torch.equal(*runs)
    for extra in ({}, {"concurrent_members": 1}):
        with pytest.raises(ValueError, match=r"random|reads"):
            ds.fit(ds.DeepEnsemble(Noisy, 2), (x, y), epochs=2, batch_size=20, engine="captured", **extra)


class PickOne(obj.Independent):
    batches = "shared"

    def pick(self, step, num_members):
        return step.noise(shared=True).uniform(num_members).argsort()[:1]


def test_picking_among_members_that_run_in_a_loop_is_not_baked_into_a_recording():
    nets = [nn.Sequential(nn.Linear(4, 3), kind()) for kind in (nn.ReLU, nn.Tanh)]
    with pytest.raises(ValueError, match="reads the value"):
        ds.fit(ds.DeepEnsemble.from_members(nets), (x, y), objective=PickOne(), epochs=2, engine="captured")


def test_a_program_a_member_is_refused_where_members_differ_or_are_picked():
    nets = [nn.Sequential(nn.Linear(4, 3), kind()) for kind in (nn.ReLU, nn.Tanh)]
    with pytest.raises(ValueError, match="Tanh"):
        ds.fit(ds.DeepEnsemble.from_members(nets), (x, y), epochs=1, concurrent_members=1)
    with pytest.raises(ValueError, match="only those of a deep ensemble can be; this is Anchored"):
        ds.fit(ds.Anchored(net, x[:5], num_nets=2), (x, y), epochs=1, concurrent_members=1)
    with pytest.raises(ValueError, match="picks"):
        ds.fit(ds.DeepEnsemble(net, 2), (x, y), objective=PickOne(), epochs=1, concurrent_members=1)


class Checkpointed(nn.Module):
    def __init__(self, use: bool) -> None:
        super().__init__()
        self.a, self.b, self.drop, self.use = nn.Linear(4, 8), nn.Linear(8, 3), nn.Dropout(0.5), use

    def inner(self, x):
        return self.drop(self.a(x).relu())

    def forward(self, x):
        return self.b(checkpoint(self.inner, x, use_reentrant=False) if self.use else self.inner(x))


def test_dropout_draws_the_same_when_activations_are_computed_again():
    gradients = []
    for use in (False, True):
        ens = ds.DeepEnsemble(lambda use=use: Checkpointed(use), 2)
        ens(x).square().sum().backward()
        gradients.append(ens.get_parameter("net.a.weight").grad)
    torch.testing.assert_close(*gradients)


def test_plain_tensor_attributes_that_differ_keep_members_apart():
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.directions = torch.randn(4, 8)
            self.head = nn.Linear(8, 3)
            nn.init.zeros_(self.head.weight)

        def forward(self, x):
            return self.head((x @ self.directions).relu())

    ens = ds.DeepEnsemble(Features, 3)
    ds.fit(ens, (x, y), epochs=3)
    assert "directions" in ens.execution_reason
    torch.testing.assert_close(ds.predict(ens, x)[1], ens.member(1).eval()(x).detach())


def test_a_module_used_twice_survives():
    def make():
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 3))

    ens = ds.DeepEnsemble(make, 2)
    ds.fit(ens, (x, y), epochs=2)
    torch.testing.assert_close(ds.predict(ens, x)[0], ens.member(0).eval()(x).detach())


def test_integer_regression_targets_keep_their_values_beside_integer_inputs():
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.value.expand(len(x), 1)

    targets = torch.arange(64) * 10
    data = (torch.zeros(64, 1, dtype=torch.uint8), targets)
    run = ds.fit(ds.DeepEnsemble(Constant, 1), data, objective=obj.Independent("mse"), epochs=1, lr=1e-9)
    assert run.history["loss"][0] == pytest.approx(targets.float().square().mean().item(), rel=1e-4)


def test_a_range_needs_the_whole_data():
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    with pytest.raises(ValueError, match="measures all training inputs"):
        ds.fit(ds.DeepEnsemble(net, 2), loader, objective=obj.Adversarial(obj.Independent(), of_range=True), epochs=1)


def test_adam_with_decoupled_decay_is_adamw():
    outputs = []
    for kind, options in ((torch.optim.Adam, {"decoupled_weight_decay": True}), (torch.optim.AdamW, {})):
        ens = ds.DeepEnsemble(net, 2)
        ds.fit(ens, (x, y), epochs=5, optimizer=kind, optimizer_options=options, weight_decay=0.5, lr=0.01)
        outputs.append(ds.predict(ens, x))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("members", [2, 5])
def test_a_run_is_not_resumed_with_another_number_of_members(tmp_path, members):
    settings = {"epochs": 1, "checkpoint_dir": tmp_path}
    ds.fit(ds.DeepEnsemble(net, 3), (x, y), **settings)
    with pytest.raises(CheckpointError, match="of 3 members"):
        ds.fit(ds.DeepEnsemble(net, members), (x, y), resume=True, **settings)


def test_a_run_is_not_resumed_on_other_data_or_batches(tmp_path):
    settings = {"epochs": 1, "checkpoint_dir": tmp_path, "batch_size": 60}
    ds.fit(ds.DeepEnsemble(net, 2), (x, y), **settings)
    for changes in ({"batch_size": 95}, {}):
        data = (x * 9, y) if not changes else (x, y)
        with pytest.raises(CheckpointError, match="data is"):
            ds.fit(ds.DeepEnsemble(net, 2), data, resume=True, **{**settings, **changes})


@pytest.mark.parametrize(
    "step", [augment.Mixup(3), augment.GaussianNoise(1.0), augment.Rotation(10), augment.ColourJitter(0.1)]
)
def test_integer_images_are_refused_where_values_are_computed_with(step):
    with pytest.raises(ValueError, match="floating-point"):
        step(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), Noise(torch.tensor(1)))


@pytest.mark.parametrize("mix", [augment.Mixup(6, strength=1.0), augment.CutMix(6)])
@pytest.mark.parametrize("lead", [(), (2,)], ids=["shared", "own"])
def test_mixing_keeps_inputs_and_labels_in_step(mix, lead):
    # Image i is filled with i and labelled i, so an image's mean is what its label's shares say.
    images = torch.arange(6.0)[:, None, None, None].expand(*lead, 6, 1, 8, 8)
    labels = torch.arange(6).expand(*lead, 6)
    mixed, soft = mix(images, labels, Noise(torch.zeros(lead, dtype=torch.int64) + 3))
    torch.testing.assert_close(soft.sum(-1), torch.ones(*lead, 6))
    torch.testing.assert_close(mixed.mean((-1, -2, -3)), soft @ torch.arange(6.0))
    assert (soft.amax(-1) < 1).any()


def test_validation_targets_are_checked():
    with pytest.raises(ValueError, match="validation labels"):
        ds.fit(ds.DeepEnsemble(net, 2), (x, y), validation=(x, y + 3), epochs=1)


def test_a_penalty_says_what_its_inner_objective_says():
    wrapped = obj.NormPenalty(obj.Joint(0.5), 0.1)
    assert wrapped.couples
    assert obj.NormPenalty(PickOne(), 0.1).pick(
        obj.Step(torch.tensor(0), 1, False, torch.arange(3), torch.tensor(1)), 3
    ).shape == (1,)


@pytest.mark.parametrize("rows", [[1], [2, 0]])
def test_the_norms_of_picked_members_of_several_architectures_are_their_own(rows):
    ens = ds.DeepEnsemble.from_members([net(), nn.Linear(4, 3), net()])
    wanted = [torch.cat([p.flatten() for p in ens.member(row).parameters()]).norm() for row in rows]
    torch.testing.assert_close(ens.view().pick(rows).parameter_norms(), torch.stack(wanted).detach(), check_dtype=False)


def test_a_penalty_moves_only_the_members_of_several_architectures_that_are_picked():
    for objective in (obj.LossGuided(active=2), obj.Disagree(x, sequential=True)):
        ens = ds.DeepEnsemble.from_members([net(), nn.Linear(4, 3), net()])
        ds.fit(ens, (x, y), objective=obj.NormPenalty(objective, 0.1), epochs=1, batch_size=30, device="cpu")


def test_the_norm_of_all_zero_parameters_has_no_slope():
    ens = ds.DeepEnsemble(net, 2)
    with torch.no_grad():
        for parameter in ens.parameters():
            parameter.zero_()
    ens.view().parameter_norms().sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in ens.parameters())


def diverging(**settings):
    return ds.fit(
        ds.DeepEnsemble(net, 3), epochs=4, optimizer="sgd", lr=[0.01, 1e20, 0.01], on_divergence="drop", **settings
    )


def test_dropping_goes_on_with_selection_and_with_a_loader_in_the_middle_of_an_epoch():
    run = diverging(data=(x, y), batch_size=20, validation=(x, y), select="ensemble_loss")
    assert run.dropped == [1]
    run = diverging(data=DataLoader(TensorDataset(x, y), batch_size=20), check_every=2)
    assert run.dropped == [1]


def test_no_checkpoint_of_ruined_weights_is_written(tmp_path):
    settings = {"epochs": 3, "batch_size": 20, "lr": 1e30, "optimizer": "sgd", "check_every": 100}
    with pytest.raises(ds.DivergedError):
        ds.fit(ds.DeepEnsemble(net, 2), (x, y), checkpoint_dir=tmp_path, **settings)
    assert not list(tmp_path.glob("*.safetensors"))


def test_an_error_before_training_leaves_ordinary_parameters():
    ens = ds.DeepEnsemble(net, 2)
    with pytest.raises(ValueError, match="rmsprp"):
        ds.fit(ens, (x, y), optimizer="rmsprp")
    for parameter in ens.parameters():
        assert parameter.is_contiguous()
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4


def test_a_frozen_batchnorm_stays_frozen():
    ens = ds.DeepEnsemble(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), 2, execution="loop"
    )
    ens.net[1].eval()
    before = ens.get_buffer("net.1.running_mean").clone()
    ens(x)
    assert torch.equal(ens.get_buffer("net.1.running_mean"), before)


def test_a_member_is_frozen_where_the_ensemble_is():
    ens = ds.DeepEnsemble(net, 2)
    ens.net[0].requires_grad_(False)
    assert [p.requires_grad for p in ens.member(0).parameters()] == [False, False, True, True]


def test_predicting_from_a_loader_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    ds.predict(ds.DeepEnsemble(net, 2), DataLoader(TensorDataset(x, y), batch_size=20))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ds.DeepEnsemble(net(), 2), "lambda"),
        (lambda: ds.DeepEnsemble.from_members(nn.Linear(4, 3)), "list of networks"),
        (lambda: ds.fit(ds.DeepEnsemble(net, 2), (x, y), objective="mse"), "Independent"),
        (lambda: ds.fit(ds.DeepEnsemble(net, 2), (x, y), device="gpu"), "'cuda'"),
        (lambda: ds.fit(ds.DeepEnsemble(net, 2), (x, y), precision="fp16"), "precision"),
        (lambda: ds.fit(ds.DeepEnsemble(net, 2), (x, y), last_batch="dropp"), "last_batch"),
        (lambda: ds.fit(ds.DeepEnsemble(net, 2), (x, y), lr=-1.0), "at least 0"),
        (lambda: ds.fit(ds.DeepEnsemble(net, 2), (x, y), epochs=1.5), "epochs"),
    ],
)
def test_common_slips_get_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()
