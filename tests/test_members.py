import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.members import KINDS


def mlp(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(64, 3)
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 6, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.rnn(x[:, None])[0][:, -1])


class Peeking(nn.Module):
    """Looks at a value, which vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        out = self.out(x)
        return out * (2.0 if out.sum().item() > 1e9 else 1.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.b(self.a(x).relu()))


class Noisy(nn.Module):
    """Draws random numbers that are not a dropout layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x + torch.randn_like(x)) if self.training else self.out(x)


class Counting(nn.Module):
    """Replaces a buffer instead of changing it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + len(x)
        return self.out(x)


FACTORIES = {
    "mlp": mlp,
    "dropout": lambda: mlp(0.4),
    "recurrent": Recurrent,
    "peeking": Peeking,
    "tied": Tied,
    "noisy": Noisy,
    "counting": Counting,
}
x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES.keys())
class TestEveryArchitecture:
    def test_outputs_are_those_of_the_members_as_plain_modules(self, make):
        ens = ds.DeepEnsemble(make, num_members=3, seed=0).eval()
        plain = torch.stack([ens.member(j)(x) for j in range(3)])
        torch.testing.assert_close(ens(x), plain)

    def test_adding_members_leaves_earlier_ones_as_they_were(self, make):
        small, large = ds.DeepEnsemble(make, 2, seed=0), ds.DeepEnsemble(make, 5, seed=0)
        torch.testing.assert_close(large(x)[:2], small(x))
        torch.testing.assert_close(large.eval()(x)[:2], small.eval()(x))

    def test_members_differ(self, make):
        outputs = ds.DeepEnsemble(make, 3, seed=0).eval()(x)
        assert (outputs[0] - outputs[1]).abs().max() > 1e-3
        assert (outputs[1] - outputs[2]).abs().max() > 1e-3

    def test_gradients_reach_the_stacked_parameters_as_in_plain_modules(self, make):
        ens = ds.DeepEnsemble(make, 3, seed=0).eval()
        ens(x).square().sum().backward()
        plain = ens.member(1)
        plain(x).square().sum().backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(ens.get_parameter(f"net.{name}").grad[1], parameter.grad, rtol=1e-4, atol=1e-4)

    def test_training_passes_update_buffers_as_plain_modules_do(self, make):
        ens = ds.DeepEnsemble(make, 3, seed=0)
        plain = [ens.member(j).train() for j in range(3)]
        ens(x)
        for j, net in enumerate(plain):
            net(x)
            for name, buffer in net.named_buffers():
                torch.testing.assert_close(ens.get_buffer(f"net.{name}")[j], buffer)

    def test_state_dict_round_trip(self, make):
        ens, other = ds.DeepEnsemble(make, 3, seed=0).eval(), ds.DeepEnsemble(make, 3, seed=1).eval()
        other.load_state_dict(ens.state_dict())
        assert torch.equal(other(x), ens(x))

    def test_a_deep_copy_is_independent(self, make):
        ens = ds.DeepEnsemble(make, 3, seed=0).eval()
        before = ens(x).detach()
        twin = copy.deepcopy(ens)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(2)
        assert torch.equal(ens(x), before)
        assert not torch.allclose(twin(x), before)

    def test_picked_members_give_their_rows(self, make):
        ens = ds.DeepEnsemble(make, 4, seed=0).eval()
        torch.testing.assert_close(ens.pick([2, 0])(x), ens(x)[[2, 0]])

    def test_each_member_can_have_inputs_of_its_own(self, make):
        ens = ds.DeepEnsemble(make, 3, seed=0).eval()
        own = torch.randn(3, 16, 4)
        torch.testing.assert_close(ens.each(own), torch.stack([ens.member(j)(own[j]) for j in range(3)]))

    def test_the_global_generator_is_left_as_found(self, make):
        before = torch.get_rng_state()
        ds.DeepEnsemble(make, 2, seed=0)(x)
        assert torch.equal(torch.get_rng_state(), before)

    def test_moving_to_another_dtype_moves_everything(self, make):
        ens = ds.DeepEnsemble(make, 2, seed=0).eval()
        single = ens(x)
        torch.testing.assert_close(ens.double()(x.double()).float(), single, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [mlp, lambda: mlp(0.4)], ids=["mlp", "dropout"])
def test_loop_and_vectorised_execution_give_the_same_numbers_and_buffers(make):
    loop = ds.DeepEnsemble(make, 3, seed=0, execution="loop")
    fast = ds.DeepEnsemble(make, 3, seed=0, execution="vectorised")
    for _ in range(2):
        torch.testing.assert_close(loop(x), fast(x))
    for a, b in zip(loop.state_dict().values(), fast.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_convolutions_with_batchnorm_and_feature_dropout_agree_between_executions():
    images = torch.randn(8, 2, 4, 4)
    loop, fast = (ds.DeepEnsemble(conv, 3, execution=e) for e in ("loop", "vectorised"))
    torch.testing.assert_close(loop(images), fast(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("nets", "reason"),
    [
        ([nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Sequential(nn.Linear(4, 3), nn.Tanh())], "Tanh"),
        ([nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))], "different architectures"),
        ([Recurrent(), Recurrent()], "vmap"),
        ([Peeking(), Peeking()], "vmap"),
        ([Noisy(), Noisy()], "random numbers"),
        ([nn.Dropout(0.1), nn.Dropout(0.2)], "'p'"),
    ],
)
def test_what_cannot_run_vectorised_runs_in_a_loop_and_says_why(nets, reason):
    ens = ds.DeepEnsemble.from_members(nets)
    outputs = ens(x)
    assert reason in ens.execution_reason
    expected = torch.stack([net.eval()(x) for net in nets])
    torch.testing.assert_close(ens.eval()(x), expected)
    assert outputs.shape[:2] == (2, 16)


def test_plain_networks_run_vectorised():
    ens = ds.DeepEnsemble(mlp, 3)
    ens(x)
    assert ens.execution_reason is None


def test_hooks_run():
    calls = []
    nets = [mlp(), mlp()]
    for net in nets:
        net[0].register_forward_hook(lambda *_: calls.append(1))
    ens = ds.DeepEnsemble.from_members(nets).eval()
    ens(x)
    calls.clear()
    ens(x)
    assert len(calls) == 2
    assert "hooks" in ens.execution_reason


def test_dropout_drops_the_share_it_should_and_rescales():
    ens = ds.DeepEnsemble(lambda: nn.Dropout(0.25), 2)
    out = ens(torch.ones(200, 100))
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close(out[out != 0].unique(), torch.tensor([1 / 0.75]))


def test_alpha_dropout_keeps_mean_and_variance():
    ens = ds.DeepEnsemble(lambda: nn.AlphaDropout(0.2), 1)
    out = ens(torch.randn(400, 200))
    assert out.mean().item() == pytest.approx(0.0, abs=0.02)
    assert out.var().item() == pytest.approx(1.0, abs=0.03)


def test_feature_dropout_drops_whole_channels():
    ens = ds.DeepEnsemble(lambda: nn.Dropout2d(0.5), 1)
    out = ens(torch.ones(50, 10, 3, 3))[0]
    kept = out.flatten(2).ne(0)
    assert torch.equal(kept.all(-1), kept.any(-1))


def test_a_dropout_layer_used_twice_draws_twice():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return torch.stack([self.drop(x), self.drop(x)])

    first, second = ds.DeepEnsemble(Twice, 1)(torch.ones(64, 64))[0]
    assert not torch.equal(first, second)


def test_successive_training_passes_draw_anew_and_evaluation_does_not_draw():
    ens = ds.DeepEnsemble(lambda: mlp(0.5), 2)
    assert not torch.equal(ens(x), ens(x))
    ens.eval()
    assert torch.equal(ens(x), ens(x))


def test_a_perturbed_pass_repeats_the_noise_and_leaves_no_trace():
    view = ds.DeepEnsemble(lambda: mlp(0.5), 2).view()
    outputs = view(x)
    before = {name: buffer.clone() for name, buffer in view.buffers.items()}
    with view.perturbed():
        torch.testing.assert_close(view(x), outputs)
    for name, buffer in view.buffers.items():
        assert torch.equal(buffer, before[name])


def test_picking_in_training_updates_only_the_picked_buffers():
    ens = ds.DeepEnsemble(mlp, 4)
    before = ens.get_buffer("net.1.running_mean").clone()
    ens.pick([1, 3])(x)
    after = ens.get_buffer("net.1.running_mean")
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert (after[[1, 3]] - before[[1, 3]]).abs().min() > 0


def test_input_gradient_is_each_members_own():
    view = ds.DeepEnsemble(mlp, 3).eval().view()
    inputs = view.expand(x)
    value, gradient = view.input_gradient(lambda z: view.each(z).square().sum((1, 2)), inputs)
    for j in range(3):
        own = x.clone().requires_grad_()
        total = view.members.member(j)(own).square().sum()
        total.backward()
        torch.testing.assert_close(value[j], total)
        torch.testing.assert_close(gradient[j], own.grad)


def test_a_member_is_a_plain_module_with_plain_dropout():
    net = ds.DeepEnsemble(lambda: mlp(0.4), 2).member(1)
    assert type(net[3]) is nn.Dropout
    assert list(net.state_dict()) == list(mlp().state_dict())


def test_a_soup_averages_weights_and_copies_integer_buffers():
    ens = ds.DeepEnsemble(mlp, 3)
    ens(x)
    soup = ens.soup()
    nets = [ens.member(j) for j in range(3)]
    for name, tensor in soup.state_dict().items():
        rows = torch.stack([net.state_dict()[name] for net in nets])
        torch.testing.assert_close(tensor, rows.mean(0) if tensor.is_floating_point() else rows[0])


def test_members_of_one_kind_given_as_nets_are_copied():
    nets = [mlp().eval(), mlp().eval()]
    ens = ds.DeepEnsemble.from_members(nets)
    torch.testing.assert_close(ens(x), torch.stack([net(x) for net in nets]))
    with torch.no_grad():
        nets[0][0].weight.zero_()
    assert not torch.allclose(ens(x)[0], nets[0](x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ds.DeepEnsemble(mlp, 0), "`num_members` must be a whole number of at least 1"),
        (lambda: ds.DeepEnsemble(lambda shared=mlp(): shared, 2), "share parameters"),
        (lambda: ds.DeepEnsemble(lambda layer=nn.ReLU(): layer, 2), "same object"),
        (lambda: ds.DeepEnsemble(lambda: "net", 2), "nn.Module"),
        (lambda: ds.DeepEnsemble(lambda: nn.LazyLinear(3), 2), "no shape yet"),
        (lambda: ds.DeepEnsemble(mlp, 2, execution="fast"), "'vectorised'"),
        (lambda: ds.DeepEnsemble.from_members([]), "list of networks.*got an empty one"),
        (lambda: ds.DeepEnsemble(mlp, 2).member(2), "members 0 to 1"),
        (lambda: ds.DeepEnsemble(mlp, 2).each(x), "members=2"),
        (lambda: ds.DeepEnsemble.from_members([nn.Linear(4, 3), nn.Linear(4, 2)])(x), "one shape"),
        (lambda: ds.DeepEnsemble.from_members([nn.Linear(4, 3), nn.Linear(4, 2)]).soup(), "one architecture"),
        (lambda: ds.DeepEnsemble(lambda: nn.LSTM(4, 3), 2)(x), "one tensor"),
    ],
)
def test_bad_input_gets_one_clear_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_members_are_picked_by_number_from_either_end():
    ens, inputs = ds.DeepEnsemble(mlp, 3).eval(), torch.randn(5, 4)
    assert torch.equal(ens.pick([-1, 0])(inputs), ens(inputs)[[2, 0]])
    assert torch.equal(ens.pick([2, 1]).pick([-1])(inputs), ens(inputs)[[1]])
    for rows, count in (([3], 2), ([0, -4], 2)):
        with pytest.raises(ValueError, match=f"`rows` must name members from 0 to {count}"):
            ens.pick(rows)
    with pytest.raises(ValueError, match="from 0 to 1; got 2"):
        ens.pick([2, 1]).pick([2])
    # In the cheaper pass of training, which gives one output, members can be picked all the same.
    shared = ds.MCDropout(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), 3)
    assert shared.pick([-1])(inputs).shape == (1, 5, 3)


@pytest.mark.parametrize("wrong", [np.zeros((2, 4)), [[0.0] * 4], (np.zeros(2), torch.zeros(2))])
def test_an_ensemble_is_called_with_tensors(wrong):
    ens = ds.DeepEnsemble(mlp, 3)
    for call in (ens, ens.each):
        with pytest.raises(ValueError, match=r"called with tensors; got ndarray|called with tensors; got list"):
            call(wrong)


def test_the_same_net_twice_is_refused():
    net = mlp()
    with pytest.raises(ValueError, match="same object"):
        ds.DeepEnsemble.from_members([net, net])


@pytest.mark.gpu
def test_an_ensemble_of_networks_on_a_gpu_is_on_the_gpu():
    ens = ds.DeepEnsemble.from_members([mlp(0.5).cuda(), mlp(0.5).cuda()])
    assert {tensor.device.type for tensor in (*ens.parameters(), *ens.buffers())} == {"cuda"}
    assert ens(torch.randn(5, 4, device="cuda")).shape[:2] == (2, 5)


def test_an_ensemble_lies_where_its_networks_lie():
    ens = ds.DeepEnsemble.from_members([mlp(0.5).to("meta"), mlp(0.5).to("meta")])
    assert {tensor.device.type for tensor in (*ens.parameters(), *ens.buffers())} == {"meta"}


def test_a_network_that_a_factory_returns_stays_as_it_is():
    net = mlp(0.5)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    ens = ds.DeepEnsemble(lambda: net, num_members=1)
    ds.fit(ens, (x, torch.zeros(len(x), dtype=torch.int64)), epochs=1, progress=False)
    assert any(type(module) is nn.Dropout for module in net.modules())
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert net(x).shape == ens(x)[0].shape


class AsOnAGPU(nn.LSTM):
    """Warns as torch does on a GPU, where weights are not in one piece."""

    def forward(self, *given):
        warnings.warn("RNN module weights are not part of single contiguous chunk of memory.", stacklevel=1)
        return super().forward(*given)


class WarningNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = AsOnAGPU(4, 6, batch_first=True)
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.drop(self.rnn(x[:, None])[0][:, -1]))


@pytest.mark.parametrize("make", [lambda: ds.DeepEnsemble(WarningNet, 2), lambda: ds.MCDropout(WarningNet(), 2)])
def test_weights_that_are_slices_are_no_news(make):
    ens, inputs = make(), torch.randn(20, 4)
    ds.fit(ens, (inputs, torch.arange(20) % 3), epochs=1, device="cpu")
    ds.predict(ens, inputs)
    with pytest.warns(UserWarning, match="RNN module"):  # of the user's own network it still is
        ens.member(0)(inputs)


class WritesIntoItsInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x -= 1.0
        return self.head(self.layers(x))


WRITING = {
    "deep": lambda: ds.DeepEnsemble(WritesIntoItsInputs, 3),
    "loop": lambda: ds.DeepEnsemble(WritesIntoItsInputs, 3, execution="loop"),
    "vectorised": lambda: ds.DeepEnsemble(WritesIntoItsInputs, 3, execution="vectorised"),
    "apart": lambda: ds.Masksembles(WritesIntoItsInputs(), 3, execution="apart"),
    "heads": lambda: ds.HeadEnsemble(WritesIntoItsInputs(), (3, 3), 3),
    "swag": lambda: ds.SWAG(WritesIntoItsInputs, 3),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", WRITING)
def test_a_network_that_writes_into_its_inputs_is_refused_before_it_ruins_them(kind, training):
    if kind in ("apart", "swag") and training:
        pytest.skip("in training one pass takes the batch, which nobody else gets")
    given = torch.randn(8, 4)
    before = given.clone()
    ens = WRITING[kind]().train(training)
    with pytest.raises(ValueError, match="changes its inputs in place"):
        ens(given)
    if kind not in ("vectorised", "heads"):  # which do not try a few rows first
        torch.testing.assert_close(given, before)


def test_a_network_that_writes_into_one_of_several_inputs_is_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, a, b):
            return self.layer(a + b.mul_(2.0))

    for execution in ("loop", "vectorised"):
        with pytest.raises(ValueError, match="changes its inputs in place"):
            ds.DeepEnsemble(Two, 2, execution=execution)(torch.randn(8, 4), torch.randn(8, 4))


ENGINES = ["loop", "vectorised"]


def leaky():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.01), nn.Linear(8, 3))


@pytest.mark.parametrize("execution", ENGINES)
def test_attributes_that_are_changed_on_an_ensemble_reach_every_member(execution):
    given = torch.randn(16, 4)
    ens = ds.DeepEnsemble(leaky, 2, execution=execution)
    for module in ens.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 1.0
        if isinstance(module, nn.LeakyReLU):
            module.negative_slope = 1.0
    ens.train()(given)
    member = ens.member(1)
    torch.testing.assert_close(ens.net[1].running_mean[1], member[0](given).mean(0))
    assert (member[1].momentum, member[2].negative_slope) == (1.0, 1.0)
    torch.testing.assert_close(ens.eval()(given)[1], member.eval()(given))


def test_attributes_of_members_own_stay_until_they_are_changed_for_all():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.factor = nn.Linear(4, 3), float(torch.rand(()))

        def forward(self, x):
            return self.factor * self.layer(x)

    ens = ds.DeepEnsemble(Scaled, 2)
    ens(torch.zeros(2, 4))
    assert ens.member(0).factor != ens.member(1).factor
    ens.net.factor = 2.0
    assert [net.factor for net in ens] == [2.0, 2.0]


class MovesItsTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.basis = nn.Linear(4, 3), torch.randn(4, 4)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.basis = fn(self.basis)
        return self

    def forward(self, x):
        return self.layer(x @ self.basis)


def test_plain_tensors_that_a_network_moves_by_itself_follow_the_ensembles_dtype():
    ens = ds.DeepEnsemble(MovesItsTensor, 2).double()
    given = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(ens(given)[1], ens.member(1)(given))


class KeepsMore(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.factors = nn.Linear(4, 3), [float(torch.rand(()))]

    def get_extra_state(self):
        return {"factors": list(self.factors)}

    def set_extra_state(self, state):
        self.factors = state["factors"]

    def forward(self, x):
        return self.factors[0] * self.layer(x)


def test_what_networks_keep_beside_tensors_is_restored_for_each_member():
    given = torch.randn(5, 4)
    ens, other = (ds.DeepEnsemble(KeepsMore, 2, seed=seed) for seed in (0, 1))
    other.load_state_dict(ens.state_dict())
    torch.testing.assert_close(other(given), ens(given))
    torch.testing.assert_close(other.member(1)(given), ens.member(1)(given))


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = ds.MCDropout(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)), 4)

    def forward(self, x):
        return self.inside(x).mean(0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ds.DeepEnsemble(Holds, 2),
        lambda: ds.DeepEnsemble.from_members([Holds(), Holds()]),
        lambda: ds.BatchEnsemble(Holds, 2),
        lambda: ds.MCDropout(Holds(), 2),
        lambda: ds.LoRAEnsemble(Holds(), 2, 2),
    ],
)
def test_a_network_that_holds_an_ensemble_is_refused(make):
    with pytest.raises(ValueError, match="must be one network; got a Holds with a MCDropout"):
        make()


def spectral():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 16)), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ds.Masksembles(spectral(), 2),
        lambda: ds.BatchEnsemble(spectral, 2),
        lambda: ds.MCDropout(spectral(), 2),
        lambda: ds.SnapshotEnsemble(spectral, 2),
        lambda: ds.SWAG(spectral, 2),
    ],
)
def test_weights_that_old_hooks_compute_are_refused_where_one_network_is_shared(make):
    with pytest.raises(ValueError, match=r"computed from others before each pass \(SpectralNorm\)"):
        make()


def test_members_with_the_old_spectral_norm_are_copied_after_a_pass_of_training():
    given, ens = torch.randn(8, 4), ds.DeepEnsemble(spectral, 2)
    ens(given).sum().backward()
    again = copy.deepcopy(ens).eval()
    torch.testing.assert_close(again(given)[1], again.member(1)(given))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat))

    def forward(self, x):
        return (x.to(torch.cfloat) @ self.weight).abs()


def test_a_soup_averages_complex_weights():
    ens = ds.DeepEnsemble(Complex, 2)
    torch.testing.assert_close(ens.soup().weight, (ens.member(0).weight + ens.member(1).weight) / 2)
    with pytest.raises(ValueError, match="SWAG draws real weights"):
        ds.SWAG(Complex, 2)


def test_sparse_gradients_are_refused_before_training():
    def make():
        return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))

    ens, data = ds.DeepEnsemble(make, 2), (torch.randint(0, 10, (8, 2)), torch.arange(8) % 3)
    with pytest.raises(ValueError, match=r"'net\.0' was made with sparse=True"):
        ds.fit(ens, data, epochs=1)
    ens.net[0].sparse = False
    ds.fit(ens, data, epochs=1)


@pytest.mark.parametrize("kind", ["deep", "batch_ensemble", "packed"])
def test_a_pass_without_updates_leaves_buffers_alone(kind):
    def make():
        return torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
        )

    ens = KINDS[kind](make, 2, seed=0).train()
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)) + 1.0
    before = {name: buffer.clone() for name, buffer in ens.named_buffers()}
    alone = ens(x, update_buffers=False)
    each = ens.each(x.expand(2, 16, 4), update_buffers=False)
    assert all(torch.equal(buffer, before[name]) for name, buffer in ens.named_buffers())
    torch.testing.assert_close(ens(x), alone)
    assert any(not torch.equal(buffer, before[name]) for name, buffer in ens.named_buffers())
    assert each.shape == alone.shape


def test_one_member_may_be_picked_by_its_number():
    ens = ds.DeepEnsemble(lambda: torch.nn.Linear(4, 3)).eval()
    assert ens.num_members == 5
    x = torch.randn(6, 4)
    assert torch.equal(ens.pick(1)(x), ens.pick([1])(x))
    assert torch.equal(ens.pick(-1)(x)[0], ens(x)[4])


@pytest.mark.parametrize("make", [lambda net: ds.BatchEnsemble(lambda: net, 3), lambda net: ds.MCDropout(net, 3)])
def test_a_network_may_write_into_rows_of_its_own(make):
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(4, 3))
    ens, x = make(net).eval(), torch.randn(6, 4)
    before = x.clone()
    outputs = ens(x)
    assert torch.equal(x, before)
    for index in range(3):
        torch.testing.assert_close(ens.member(index).eval()(x.clone()), outputs[index])
