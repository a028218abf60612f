"""Networks whose first layer must not be doubled are refused, however they hide it."""

import pytest
import torch
from torch import nn

import dissensus as ds

x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers, of which the second may begin at zero, as heads often do."""

    def __init__(self, zeros: str = "") -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 16), nn.Linear(16, 3)
        for name in zeros.split():
            nn.init.zeros_(self.get_parameter(name))

    def forward(self, x):
        return self.head(self.first(x).relu())


class GoesElsewhere(Net):
    """Scales its features by the size of its inputs, which has another meaning for pairs."""

    def forward(self, x):
        return self.head(self.first(x).relu() * x.abs().mean(1, keepdim=True))


class Branch(Net):
    """Adds a branch that takes the inputs too, behind a gate that begins closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return super().forward(x) + self.gate * x.square().mean(1, keepdim=True)


@pytest.mark.parametrize("initialise", ["fresh", "sum"])
@pytest.mark.parametrize(
    "make",
    [GoesElsewhere, lambda: GoesElsewhere("head.weight"), lambda: GoesElsewhere("head.weight head.bias"), Branch],
    ids=["as it is", "zero weight", "zero head", "closed gate"],
)
def test_inputs_that_go_elsewhere_are_seen_behind_zeros(make, initialise):
    with pytest.raises(ValueError, match="inputs go elsewhere too"):
        ds.Anchored(make(), x, initialise=initialise)


@pytest.mark.parametrize("zeros", ["head.weight", "head.weight head.bias", "first.weight", "first.weight first.bias"])
def test_zeros_that_hide_nothing_stay_zero(zeros):
    net = Net(zeros)
    ens = ds.Anchored(net, x, initialise="sum").eval()
    torch.testing.assert_close(ens(x)[0], net(x))
    for name in zeros.split():
        assert not ens.inner.member(0).get_parameter(name).any()


def test_a_doubled_network_of_zeros_trains():
    ens = ds.Anchored(Net("head.weight head.bias"), x)
    run = ds.fit(ens, (x, (x[:, 0] > 0).long()), epochs=20, lr=0.05)
    assert run.history.by_epoch("loss")[-1] < 0.3


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(self.first(x).relu()).relu())


@pytest.mark.parametrize("options", [{}, {"first_layer": "first"}], ids=["found", "named"])
@pytest.mark.parametrize("several", [False, True])
def test_a_weight_that_another_layer_shares_is_not_doubled(options, several):
    nets = [Tied(), Tied()] if several else Tied()
    with pytest.raises(ValueError, match=r"first.* shares its weight with second"):
        ds.Anchored(nets, x, **options)


class ByWidth(Net):
    """Looks something up by the number of its inputs, before the first layer or behind it."""

    def __init__(self, before: dict[int, float], behind: dict[int, float]) -> None:
        super().__init__()
        self.before, self.behind = before, behind

    def forward(self, x):
        return super().forward(x * self.before[x.shape[1]]) * self.behind[x.shape[1]]


@pytest.mark.parametrize(
    ("before", "behind", "words"),
    [
        ({4: 1.0}, {4: 1.0}, r"before that layer does not go with them: KeyError\(8\)"),
        ({4: 1.0, 8: 1.0}, {4: 1.0}, r"does not run on them: KeyError\(8\)"),
        ({5: 1.0}, {5: 1.0}, r"cannot run on \(4\) of torch.float32: KeyError\(4\)"),
    ],
)
def test_whatever_a_network_raises_is_one_sentence(before, behind, words):
    with pytest.raises(ValueError, match=words):
        ds.Anchored(ByWidth(before, behind), x)
