"""Packed ensembles against PyTorch's own grouped layers, laid out as the paper lays them out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dissensus as ds
from dissensus.architectures import cnn, resnet18, vgg

images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def small():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 64, 10),
    )


def as_in_the_paper(ens, x):
    """Members side by side on the channel axis through `groups=`; our parameters are those of such layers as they are."""
    state, groups = ens.net.state_dict(), ens.num_members
    z = F.conv2d(x, state["0.weight"], state["0.bias"], padding=1)
    norm = [state[f"1.{name}"] for name in ("running_mean", "running_var", "weight", "bias")]
    z = F.batch_norm(z, *norm).relu()
    z = F.conv2d(
        F.pad(z, (1, 1, 1, 1), mode="circular"), state["3.weight"], state["3.bias"], stride=2, groups=groups * ens.gamma
    )
    z = z.relu().flatten(1).unsqueeze(-1)
    z = F.conv1d(z, state["6.weight"].unsqueeze(-1), state["6.bias"], groups=groups).squeeze(-1)
    return z.unflatten(1, (groups, -1)).transpose(0, 1)


@pytest.mark.parametrize(("members", "alpha", "gamma"), [(4, 2.0, 1), (4, 2.0, 2), (2, 3.0, 4), (3, 1.0, 1)])
def test_it_is_a_network_of_grouped_layers(members, alpha, gamma):
    ens = ds.PackedEnsemble(small, members, alpha, gamma).eval()
    torch.testing.assert_close(ens(images), as_in_the_paper(ens, images), rtol=1e-4, atol=1e-5)


def test_hidden_layers_have_the_parameters_that_the_paper_says():
    def wide():
        return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.Linear(64, 3))

    for members, alpha, gamma in [(4, 2, 1), (4, 4, 2), (8, 2, 1)]:
        hidden = ds.PackedEnsemble(wide, members, alpha, gamma).net.get_parameter("2.weight")
        assert hidden.numel() == 64 * 64 * alpha**2 / (members * gamma)


@pytest.mark.parametrize("make", [cnn, pytest.param(resnet18, marks=pytest.mark.slow), vgg])
def test_the_reference_networks_are_packed_for_the_parameters_of_one(make):
    ens = ds.PackedEnsemble(make, 4).eval()
    x = torch.randn(3, 3, 32, 32)
    count = [sum(p.numel() for p in net.parameters()) for net in (ens, make())]
    assert 0.95 < count[0] / count[1] < 1.1
    torch.testing.assert_close(ens.member(2).eval()(x), ens(x)[2], rtol=1e-3, atol=1e-4)


def test_picked_members_leave_the_statistics_of_others_alone():
    ens = ds.PackedEnsemble(small, 3)
    before = ens.net.get_buffer("1.running_mean").clone().unflatten(0, (3, -1))
    ens.pick([2, 0])(images)
    after = ens.net.get_buffer("1.running_mean").unflatten(0, (3, -1))
    assert torch.equal(before[1], after[1])
    net = ds.PackedEnsemble(small, 3).member(2)
    net(images)
    torch.testing.assert_close(after[2], net[1].running_mean)


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(x + self.first(x))


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(4)), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(x * self.scale)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(x) if x.sum() > 0 else self.last(-x)


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (Skip, {}, "widths that are thinned differently"),
        (Bare, {}, "scale is a parameter"),
        (Branches, {}, "graph cannot be read"),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 2)), {}, "1 is a PReLU"),
        (nn.Linear(4, 2), {}, "got a network"),
        (small, {"alpha": 0.0}, "`alpha` must be positive"),
        (small, {"gamma": 0}, "`gamma` a whole number"),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(4, 8), nn.Linear(8, 2)), {"num_members": 8}, "divisible.*another alpha"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_told_in_one_sentence(make, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        ds.PackedEnsemble(make, **options)


def test_tokens_are_packed():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.norm, self.last = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 2)

        def forward(self, ids):
            return self.last(self.norm(self.words(ids)).mean(1))

    ens, ids = ds.PackedEnsemble(Words, 4).eval(), torch.arange(12).reshape(3, 4) % 11
    for index in range(4):
        torch.testing.assert_close(ens.member(index)(ids), ens(ids)[index])


class SecondAxis(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(torch.relu(self.first(x.transpose(0, 1))).mean(0))


def test_a_batch_on_the_second_axis_is_refused():
    # Six tokens fit two members, which alone would not tell.
    with pytest.raises(ValueError, match=r"the batch, 8 rows, on the first axis .*\(6, 8, 8\)"):
        ds.PackedEnsemble(SecondAxis, 2)(torch.zeros(4, 6, 8))
