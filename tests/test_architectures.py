import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.architectures import ARCHITECTURES, cnn, mlp, resnet18, resnet34, vgg, wide_resnet

# One small network of each kind, and an input that is quick to run through it.
SMALL = {
    "mlp": (lambda: mlp(5, [8, 6], 4, activation=nn.Tanh, dropout=0.3, norm=True), (5,)),
    "cnn": (lambda: cnn(classes=4), (3, 32, 32)),
    "vgg": (lambda: vgg(classes=4), (3, 8, 8)),
    "resnet18": (lambda: resnet18(classes=4, width=8), (3, 12, 12)),
    "resnet34": (lambda: resnet34(classes=4, width=4), (3, 8, 8)),
    "wide_resnet": (lambda: wide_resnet(depth=16, widen=2, classes=4, dropout=0.3), (3, 12, 12)),
}


def size(net):
    return sum(parameter.numel() for parameter in net.parameters())


def batch_of(shape, rows=6):
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_every_architecture_has_a_small_form_here():
    assert SMALL.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize(
    ("net", "parameters"),
    [
        # Published: He's networks for CIFAR-10 in their common PyTorch form.
        pytest.param(resnet18(), 11_173_962, id="resnet18"),
        pytest.param(resnet34(), 21_282_122, id="resnet34"),
        # Counted by hand.
        pytest.param(cnn(), (75 * 10 + 10) + (250 * 20 + 20) + (500 * 50 + 50) + (50 * 10 + 10), id="cnn"),
        pytest.param(mlp(4, [7, 5], 3), (4 * 7 + 7) + (7 * 5 + 5) + (5 * 3 + 3), id="mlp"),
        pytest.param(mlp(4, [7], 3, norm=True), 4 * 7 + 2 * 7 + (7 * 3 + 3), id="mlp with norm"),
        pytest.param(mlp(4, [], 3), 4 * 3 + 3, id="linear"),
    ],
)
def test_parameters_are_as_many_as_known(net, parameters):
    assert size(net) == parameters


def test_vgg_has_the_parameters_of_the_table():
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    convolutions = sum(9 * a * b + 2 * b for a, b in pairwise(widths))
    assert size(vgg()) == convolutions + (512 * 512 + 2 * 512) + (512 * 10 + 10)


@pytest.mark.parametrize(("depth", "widen", "millions"), [(40, 2, 2.2), (28, 10, 36.5), (40, 4, 8.9), (16, 1, 0.2)])
def test_wide_resnet_has_the_parameters_of_the_formula_and_of_the_paper(depth, widen, millions):
    widths, blocks = [16 * widen, 32 * widen, 64 * widen], (depth - 4) // 6
    total, before = 27 * 16, 16
    for width in widths:
        for _ in range(blocks):
            total += 2 * before + 9 * before * width + 2 * width + 9 * width * width
            total += before * width if before != width else 0
            before = width
    total += 2 * before + before * 10 + 10
    assert size(wide_resnet(depth, widen)) == total
    assert total / 1e6 == pytest.approx(millions, abs=0.06)


def test_default_wide_resnet_is_wrn_40_2():
    assert sum(isinstance(layer, nn.Conv2d) for layer in wide_resnet().modules()) == 40
    assert size(wide_resnet()) == 2_243_546


@pytest.mark.parametrize(
    ("net", "sizes"),
    [
        (resnet18(width=4), [(4, 32), (8, 16), (16, 8), (32, 4)]),
        (resnet34(width=4), [(4, 32), (8, 16), (16, 8), (32, 4)]),
        (wide_resnet(16, 2), [(32, 32), (64, 16), (128, 8)]),
    ],
    ids=["resnet18", "resnet34", "wide_resnet"],
)
def test_stages_have_the_channels_and_sizes_of_the_papers(net, sizes):
    x = net.stem(torch.zeros(2, 3, 32, 32))
    for index, (width, side) in enumerate(sizes):
        x = net.get_submodule(f"stage{index + 1}")(x)
        assert x.shape == (2, width, side, side)


@pytest.mark.parametrize("side", [9, 28, 32, 40])
@pytest.mark.parametrize("make", [lambda: resnet18(7, 1, width=4), lambda: wide_resnet(10, 1, 7, 1)])
def test_residual_networks_take_images_of_any_size_and_channels(make, side):
    assert make()(torch.zeros(2, 1, side, side)).shape == (2, 7)


@pytest.mark.parametrize("side", [8, 28, 32])
def test_vgg_takes_images_of_up_to_32_pixels(side):
    assert vgg(7, 1).eval()(torch.zeros(1, 1, side, side)).shape == (1, 7)


@pytest.mark.parametrize(("make", "side"), [(cnn, 28), (vgg, 33)])
def test_networks_of_fixed_input_say_which_images_they_want(make, side):
    with pytest.raises(ValueError, match=r"32 x 32 pixels.*got"):
        make()(torch.zeros(2, 3, side, side))


def test_cnn_flattens_to_500_and_drops_at_the_places_of_the_released_network():
    kinds = [type(layer).__name__.strip("_") for layer in cnn()]
    stage = ["Conv2d", "Dropout2d", "MaxPool2d", "ReLU"]
    assert kinds == [*stage, *stage, "FlattenTo", "Linear", "Dropout", "ReLU", "Linear"]
    assert cnn()[:9](torch.zeros(2, 3, 32, 32)).shape == (2, 500)


def test_vgg_drops_at_the_rates_of_the_table_and_pools_as_released():
    # A rate follows its layer's activation; a pooling, here 0, ends a stage.
    layers = list(vgg())
    after = {nn.Dropout: lambda layer: layer.p, nn.MaxPool2d: lambda _: 0}
    marks = [after[type(layer)](layer) for layer in layers if type(layer) in after]
    assert marks == [0.3, 0, 0.4, 0, *[0.4, 0.4, 0] * 3, 0.5, 0.5]
    assert all(layer.ceil_mode for layer in layers if isinstance(layer, nn.MaxPool2d))
    for before, layer in pairwise(layers):
        if isinstance(layer, nn.Dropout):
            assert isinstance(before, nn.ReLU) or layer is layers[-6]


def test_a_basic_block_without_residual_is_the_activation_of_its_input():
    block = resnet18(width=4).stage1[1].eval()
    nn.init.zeros_(block.residual[-1].weight)
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(block(x), x.relu())


def test_a_pre_activation_block_without_residual_passes_its_input_on_or_projects_the_activated_one():
    first, second = wide_resnet(16, 2).stage1
    for block in (first, second):
        nn.init.zeros_(block.residual[-1].weight)
    x = torch.randn(8, 16, 5, 5)
    normalised = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(
        first(x), torch.einsum("oi,bihw->bohw", first.projection.weight[:, :, 0, 0], normalised.relu())
    )
    wide = torch.randn(2, 32, 5, 5)
    torch.testing.assert_close(second(wide), wide)


@pytest.mark.parametrize("make", [vgg, resnet18, wide_resnet])
def test_convolutions_start_from_he_s_law_over_the_fan_out(make):
    for layer in make().modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 20_000:
            fan_out = layer.out_channels * layer.kernel_size[0] * layer.kernel_size[1]
            assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.03)


@pytest.mark.parametrize("depth", [4, 18, 41])
def test_wide_resnet_refuses_a_depth_of_no_whole_blocks(depth):
    with pytest.raises(ValueError, match=f"6 n \\+ 4.*got {depth}"):
        wide_resnet(depth)


def test_mlp_refuses_one_width_that_is_no_list():
    with pytest.raises(ValueError, match=r"sequence of widths; got 16\. Pass \[16\]"):
        mlp(4, 16, 3)


@pytest.mark.parametrize(("make", "shape"), SMALL.values(), ids=SMALL.keys())
class TestEveryArchitecture:
    def test_outputs_are_one_row_an_input(self, make, shape):
        assert make().double()(batch_of(shape)).shape == (6, 4)

    def test_every_parameter_gets_a_gradient(self, make, shape):
        net = make().double()
        nn.functional.cross_entropy(net(batch_of(shape, 16)), torch.arange(16) % 4).backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().max() > 1e-9, name

    def test_each_layer_runs_once_and_leaves_its_input_as_it_was(self, make, shape):
        net, calls, before = make().double(), [], {}
        for name, layer in net.named_modules():
            if not list(layer.children()):
                layer.register_forward_pre_hook(lambda _, given, name=name: before.update({name: given[0].clone()}))

                def check(_, given, out, name=name):
                    calls.append(name)
                    assert torch.equal(given[0], before[name]), name

                layer.register_forward_hook(check)
        net(batch_of(shape))
        leaves = [name for name, layer in net.named_modules() if not list(layer.children())]
        assert sorted(calls) == sorted(leaves)

    @pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
    def test_members_run_as_one_program_that_gives_the_loop_s_numbers(self, make, shape, training):
        ens = ds.DeepEnsemble(make, num_members=2, seed=0, execution="vectorised").double().train(training)
        loop = ds.DeepEnsemble(make, num_members=2, seed=0, execution="loop").double().train(training)
        x = batch_of(shape)
        outputs, wanted = ens(x), loop(x)
        torch.testing.assert_close(outputs, wanted)
        outputs.square().sum().backward()
        wanted.square().sum().backward()
        for (name, ours), theirs in zip(ens.named_parameters(), loop.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
        for ours, theirs in zip(ens.buffers(), loop.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_members_run_in_a_loop_only_for_speed(self, make, shape):
        ens, x = ds.DeepEnsemble(make, num_members=2, seed=0), batch_of(shape).float()
        for training in (True, False):
            ens.train(training)(x)
            assert ens.execution_reason in (None, "convolutions are faster one member at a time")

    def test_two_networks_differ_and_a_copy_does_not(self, make, shape):
        x, net = batch_of(shape), make().double().eval()
        assert (net(x) - make().double().eval()(x)).abs().max() > 1e-6
        assert torch.equal(copy.deepcopy(net)(x), net(x))
