"""Which layer is doubled, and that the doubled network is the network as it was."""

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import objectives as obj
from dissensus.architectures import cnn, resnet18, wide_resnet
from dissensus.nets.first_layer import Places

images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))


class Patches(nn.Module):
    """A small vision transformer: parameters of its own, a patch embedding registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 5)
        self.embed = nn.Conv2d(3, 16, 8, stride=8)

    def forward(self, x):
        patches = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.block(torch.cat([self.token.expand(len(x), -1, -1), patches], 1))[:, 0])


class LinearPatches(nn.Module):
    """A vision transformer whose patches are cut out by hand and embedded by a linear layer."""

    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.embed = nn.Linear(3 * 8 * 8, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        patches = nn.functional.unfold(x, 8, stride=8).transpose(1, 2)
        if self.channels_last:
            cells = x.unflatten(3, (-1, 8)).unflatten(2, (-1, 8))
            patches = cells.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2).flatten(2)
        return self.head(self.block(self.embed(patches)).mean(1))


class Tokens(nn.Module):
    """A transformer over vectors in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 16), nn.Linear(16, 3)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.head(self.block(self.embed(input=x)).mean(1))


class ChannelsLast(nn.Module):
    """Images come with their channels last, and are convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x.permute(0, 3, 1, 2)).mean((2, 3))


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(self.norm(x)).mean((2, 3))


class Skipping(nn.Module):
    """Looks at its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x)) + x[:, :4]


NETS = {
    "residual": (lambda: resnet18(width=4), images, "stem.0"),
    "wide": (lambda: wide_resnet(depth=10, widen=1), images, "stem"),
    "cnn": (cnn, images, "0"),
    "patches": (Patches, images, "embed"),
    "flattened": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 4)), images, "1"),
    "linear": (lambda: nn.Linear(4, 3), torch.randn(6, 4), ""),
    "sequence": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(24, 3)), torch.randn(6, 2, 8), "0"),
    "unfolded": (lambda: LinearPatches(False), images, "embed"),
    "patches, channels last": (lambda: LinearPatches(True), images, "embed"),
    "tokens": (Tokens, torch.randn(6, 5, 4), "embed"),
    "channels last": (ChannelsLast, images.permute(0, 2, 3, 1), "conv"),
    "channels last, flattened": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 4)),
        images.permute(0, 2, 3, 1),
        "1",
    ),
    "unshuffled": (lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(12, 4, 3), nn.Flatten()), images, "1"),
    "resized": (
        lambda: nn.Sequential(nn.Upsample(48, mode="bilinear"), nn.Conv2d(3, 4, 16), nn.Flatten()),
        images,
        "1",
    ),
    "in groups": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Flatten()), images, "0"),
    "in two groups": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Flatten()), torch.randn(6, 4, 8), "0"),
}


def halves_of(ens: ds.Anchored, name: str) -> Places:
    """The columns of the reference and of the residual, as they are wherever inputs are not cut and dealt out anew."""
    width = ens.inner.net.get_submodule(name).weight.shape[2]
    columns = torch.arange(width)
    if name == "embed" and getattr(ens.inner.net, "channels_last", False):
        columns = columns.reshape(-1, 2, 3).transpose(0, 1).flatten()
    if name == "1" and ens.pair_axis == -1:
        columns = columns.reshape(-1, 2, 3).transpose(0, 1).flatten()
    return Places(columns[: width // 2], columns[width // 2 :])


@pytest.mark.parametrize(("make", "x", "name"), NETS.values(), ids=NETS.keys())
class TestEveryNetwork:
    def test_the_doubled_network_is_the_network_as_it_was(self, make, x, name):
        net = make().eval()
        ens = ds.Anchored(net, x, num_members=3, initialise="sum")
        for outputs in ens(x):
            torch.testing.assert_close(outputs, net(x), rtol=1e-3, atol=1e-4)

    def test_both_inputs_reach_their_weights_in_every_way_to_run_it(self, make, x, name):
        """With the reference's weights at zero the network sees the residual alone, as it saw inputs."""
        net = make().eval()
        ens = ds.Anchored(net, x, num_members=3)
        halves = halves_of(ens, name)
        with torch.no_grad():
            ens.inner.net.get_submodule(name).weight[:, :, halves.first] = 0.0
            wanted = torch.stack([net(x - x[k]) for k in range(3)])
            close = {"rtol": 1e-3, "atol": 1e-4}
            torch.testing.assert_close(ens.eval()(x), wanted, **close)
            torch.testing.assert_close(ens.each(x.expand(3, *x.shape)), wanted, **close)
            torch.testing.assert_close(ens.pick([2])(x), wanted[2:], **close)
            torch.testing.assert_close(ens.member(1).eval()(x), wanted[1], **close)
            torch.testing.assert_close(ens.forward_pair(x[1], x - x[1])[0], wanted[1], **close)

    def test_it_trains_with_masks_and_tails(self, make, x, name):
        net, labels = make(), torch.arange(6) % 3
        ens = ds.Anchored(net, x, num_members=2, mask_probability=0.5, mask_per="example")
        before = ens.inner.member(0).get_submodule(name).weight.detach()
        run = ds.fit(ens, (x, labels), objective=obj.HardDelta(obj.Independent(), warm_up=0.0), epochs=2, batch_size=3)
        assert torch.isfinite(torch.tensor(run.history.by_epoch("loss"))).all()
        moved = ens.inner.member(0).get_submodule(name).weight - before
        assert all(moved[:, half].abs().sum() > 0 for half in halves_of(ens, name))

    def test_only_its_first_layer_changes(self, make, x, name):
        net = make()
        before, after = net.state_dict(), ds.Anchored(net, x).inner.member(0).state_dict()
        assert before.keys() == after.keys()
        changed = [key for key in before if before[key].shape != after[key].shape]
        assert changed == [f"{name}.weight".removeprefix(".")]

    def test_fresh_weights_see_the_reference_and_keep_the_residual(self, make, x, name):
        net = make()
        layer = net.get_submodule(name)
        ens = ds.Anchored(net, x)
        halves = halves_of(ens, name)
        doubled = ens.inner.member(0).get_submodule(name).weight
        new, kept = doubled[:, halves.first], doubled[:, halves.second]
        torch.testing.assert_close(kept, layer.weight)
        assert not torch.allclose(new, kept)
        if new.numel() > 100:
            assert new.std().item() == pytest.approx(layer.weight.std().item(), rel=0.2)

    def test_it_can_be_named(self, make, x, name):
        if name:
            assert ds.Anchored(make(), x, first_layer=name).num_members == 1


def test_the_network_handed_over_stays_as_it_was():
    net = cnn()
    ds.Anchored(net, images)
    assert net[0].in_channels == 3
    assert not any(module._forward_pre_hooks for module in net.modules())
    assert net.training


def test_networks_that_join_inputs_on_different_axes_are_brought_to_a_common_one():
    x = torch.randn(6, 5, 4)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(20, 3))
    assert ds.Anchored(flat, x).pair_axis == -2
    nets = [flat, Tokens().eval()]
    ens = ds.Anchored(nets, x, 2, initialise="sum").eval()
    assert ens.pair_axis == -1
    for index in range(4):
        torch.testing.assert_close(ens(x)[index], nets[index // 2](x), rtol=1e-4, atol=1e-5)


def test_an_ensemble_in_groups_runs_as_one_program():
    nets = ds.DeepEnsemble(NETS["in groups"][0], 3)
    ens = ds.Anchored(nets, images, 2, initialise="sum").eval()
    torch.testing.assert_close(ens(images)[::2], nets.eval()(images), rtol=1e-4, atol=1e-5)
    assert ens.inner.why_different is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_columns_are_found_in_every_precision(dtype):
    net, x = LinearPatches(True).to(dtype).eval(), images.to(dtype)
    ens = ds.Anchored(net, x, 2, initialise="sum").eval()
    close = {"rtol": 0.1, "atol": 0.1} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(ens(x)[1], net(x), **close)


class Bare(nn.Module):
    """Its first weights are no layer."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 3))
        self.head = nn.Linear(3, 2) if head else None

    def forward(self, x):
        hidden = x @ self.first
        return hidden if self.head is None else self.head(hidden)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class WithPositions(nn.Module):
    """An embedding that sees no input runs before the layer that does."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.embed, self.head = nn.Embedding(5, 8), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        positions = self.positions(torch.arange(5))
        return self.head((self.embed(x) + positions).mean(1))


class Largest(nn.Module):
    """Its first layer takes the four largest values, of which joined inputs have as many."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(x.sort(-1).values[..., -4:])


class Dealt(nn.Module):
    """Channels are dealt out among groups."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(12, 4, 3, groups=4)

    def forward(self, x):
        return self.conv(nn.functional.pixel_unshuffle(x, 2).flip(1)).mean((2, 3))


class OwnConv(nn.Conv2d):
    pass


rows = torch.randn(6, 4)
series = torch.randn(6, 5, 4)


@pytest.mark.parametrize(
    ("net", "x", "message"),
    [
        (Normalised(), images, "norm is a BatchNorm2d. Only a linear or convolutional layer can be"),
        (nn.Sequential(OwnConv(3, 6, 3, groups=3), nn.Flatten()), images, "is a OwnConv in groups"),
        (Dealt(), images, "4 groups, among which the network has dealt out its inputs anew"),
        (nn.Flatten(), images, "no layer with weights runs. Only a linear"),
        (nn.Sequential(nn.LSTM(4, 4)), rows, "one tensor"),
        (Recurrent(), series, "lstm is a LSTM. Only a linear .* put one in front of the network"),
        (Skipping(), rows, "go elsewhere too"),
        (Bare(head=False), rows, "the network itself is a Bare. Only a linear"),
        (Bare(head=True), rows, "before that layer does not go with them: mat1 and mat2"),
        (Largest(), rows, "do not reach it as they are"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), rows, "computed from others .weight_norm"),
        (WithPositions(), series, "positions is a Embedding.* Layers that take the inputs: 'embed'; name one"),
    ],
)
def test_what_cannot_be_doubled_is_named(net, x, message):
    with pytest.raises(ValueError, match=message) as refused:
        ds.Anchored(net, x)
    assert "give references shaped" not in str(refused.value)


def test_what_is_advised_helps():
    assert ds.Anchored(WithPositions(), series, first_layer="embed").pair_axis == -1
    assert ds.Anchored(nn.Sequential(nn.Linear(4, 4), Recurrent()), series).pair_axis == -1
    assert ds.Anchored(nn.Sequential(nn.Linear(4, 4), Bare(head=True)), rows).pair_axis == -1


@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_network_is_named(inside):
    compiled = torch.compile(nn.Linear(4, 4), backend="eager")
    net = nn.Sequential(compiled, nn.Linear(4, 2)) if inside else compiled
    with pytest.raises(ValueError, match=r"was compiled.*Hand over the network that torch\.compile was given"):
        ds.Anchored(net, rows)


def test_checks_of_shape_inside_the_network_are_named():
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            if x.shape[1] != 3:
                raise ValueError("three channels wanted")
            return self.conv(x).mean((2, 3))

    with pytest.raises(ValueError, match="three channels wanted"):
        ds.Anchored(Checked(), images)
