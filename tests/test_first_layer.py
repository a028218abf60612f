"""Which layer is doubled, and that the doubled network is the network as it was."""

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus.architectures import cnn, resnet18, wide_resnet

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
    "sequence": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(24, 3)),
        torch.randn(6, 2, 8),
        "0",
    ),
}


@pytest.mark.parametrize(("make", "x", "name"), NETS.values(), ids=NETS.keys())
class TestEveryNetwork:
    def test_the_doubled_network_is_the_network_as_it_was(self, make, x, name):
        net = make().eval()
        ens = ds.Anchored(net, x, num_members=3)
        for outputs in ens(x):
            torch.testing.assert_close(outputs, net(x), rtol=1e-3, atol=1e-4)

    def test_only_its_first_layer_changes(self, make, x, name):
        net = make()
        before, after = net.state_dict(), ds.Anchored(net, x).inner.member(0).state_dict()
        changed = [key for key in before if before[key].shape != after[key].shape]
        assert changed == [f"{name}.weight".removeprefix(".")]

    def test_fresh_weights_see_the_reference_and_keep_the_residual(self, make, x, name):
        net = make()
        layer = net.get_submodule(name)
        doubled = ds.Anchored(net, x, initialise="fresh").inner.member(0).get_submodule(name)
        new, kept = doubled.weight.chunk(2, dim=1)
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


@pytest.mark.parametrize(
    ("net", "x", "message"),
    [
        (Normalised(), images, "norm is a BatchNorm2d.*'conv'"),
        (nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Flatten()), images, "3 groups"),
        (nn.Flatten(), images, "no layer with weights"),
        (nn.Sequential(nn.LSTM(4, 4)), torch.randn(6, 4), "one tensor"),
        (Skipping(), torch.randn(6, 4), "go elsewhere too"),
        (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(6, 5, 4), "takes 4 features"),
    ],
)
def test_what_cannot_be_doubled_is_named(net, x, message):
    with pytest.raises(ValueError, match=message):
        ds.Anchored(net, x)


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
