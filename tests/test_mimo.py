"""MIMO against the network written by hand."""

import pytest
import torch
from torch import nn
from training_helpers import x, y

import dissensus as ds
from dissensus.architectures import cnn


def net():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def test_in_evaluation_every_member_answers_the_same_input():
    ens = ds.MIMO(net, 3).eval()
    first, last = ens.net[0], ens.net[2]
    hidden = torch.relu(torch.cat([x, x, x], 1) @ first.weight.T + first.bias)
    by_hand = (hidden @ last.weight.T + last.bias).reshape(len(x), 3, 3).transpose(0, 1)
    torch.testing.assert_close(ens(x), by_hand)


@pytest.mark.parametrize(("repetition", "same"), [(0.0, 0), (0.3, 30), (1.0, 100)])
def test_in_training_members_see_different_examples(repetition, same):
    ens = ds.MIMO(net, 3, repetition=repetition)
    seen = []
    ens.net[0].register_forward_pre_hook(lambda _, given: seen.append(given[0].chunk(3, 1)))
    outputs = ens(x)
    inputs = seen[-1]
    for part in inputs:  # each member sees the whole batch, in its own order
        assert torch.equal(part.sort(0).values, x.sort(0).values)
    alike = [(inputs[0] == inputs[k]).all(1).sum().item() for k in (1, 2)]
    assert all(same <= count <= same + 6 for count in alike)  # a random order leaves about one in its place
    with torch.no_grad():
        raw = ens.net(torch.cat(inputs, 1)).reshape(100, 3, 3).transpose(0, 1)
    for member in range(3):
        places = (inputs[member][:, None] == x[None]).all(-1).float().argmax(1)
        torch.testing.assert_close(outputs[member][places], raw[member])


def test_it_learns_with_as_many_members_as_it_has_room_for():
    ens = ds.MIMO(lambda: nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)), 2)
    run = ds.fit(ens, (x, y), epochs=40, batch_size=25, lr=0.02, validation=(x, y), engine="eager")
    assert run.history.by_epoch("ensemble_accuracy")[-1] > 0.8


def test_images_lie_side_by_side_on_channels():
    ens, images = ds.MIMO(cnn, 2).eval(), torch.randn(3, 3, 32, 32)
    assert ens.net[0].in_channels == 6
    torch.testing.assert_close(ens(images)[1], ens.member(1).eval()(images), rtol=1e-3, atol=1e-5)


class TwoEnds(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.left(x) + self.right(x)


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (TwoEnds, {}, "there must be one; found left, right"),
        (net(), {}, "got a network"),
        (net, {"repetition": 1.5}, "`repetition` must be a share"),
        (lambda: nn.Sequential(nn.Conv1d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, 2)), {}, "has groups"),
    ],
)
def test_what_cannot_be_widened_is_told_in_one_sentence(make, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        ds.MIMO(make, 2, **options)


class Behind(nn.Module):
    def __init__(self, last, then):
        super().__init__()
        self.last, self.then = last, then

    def forward(self, x):
        return self.then(self.last(x))


MIXING = {
    "softmax": lambda z: z.softmax(-1),
    "log_softmax": lambda z: torch.nn.functional.log_softmax(z, -1),
    "one answer": lambda z: z[:, 0],
    "transpose": lambda z: z.transpose(0, 1),
    "T": lambda z: z.T.T,
    "sum": lambda z: z.sum(-1),
    "flatten": lambda z: z.flatten(1),
    "mean": lambda z: z - z.mean(1, keepdim=True),
    "input again": None,
}


@pytest.mark.parametrize("then", MIXING)
def test_what_would_see_all_answers_as_one_is_refused(then):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 4)

        def forward(self, x):
            return self.last(x) + x if MIXING[then] is None else MIXING[then](self.last(x))

    with pytest.raises(ValueError, match=r"Behind its last layer, 'last', the network has .*answers of all members"):
        ds.MIMO(Net, 2)


@pytest.mark.parametrize("layer", [nn.Softmax(-1), nn.LayerNorm(3), nn.BatchNorm1d(3), nn.PReLU(3)])
def test_layers_that_would_see_all_answers_as_one_are_refused(layer):
    with pytest.raises(ValueError, match=f"'then' \\({type(layer).__name__}\\)"):
        ds.MIMO(lambda: Behind(nn.Linear(4, 3), layer), 2)


@pytest.mark.parametrize(
    "then",
    [
        torch.relu,
        lambda z: z / 3.0 + 1.0,
        lambda z: torch.nn.functional.softplus(z),
        lambda z: -z.float().squeeze(-1),
        lambda z: z.to(z.dtype).clamp_min(-1.0).square().sqrt().clip(max=2.0).detach().clone(),
    ],
)
def test_what_treats_each_answer_on_its_own_may_follow(then):
    ens = ds.MIMO(lambda: Behind(nn.Linear(4, 3), then), 2).eval()
    every = then(torch.cat([x, x], 1) @ ens.net.last.weight.T + ens.net.last.bias)
    torch.testing.assert_close(ens(x), every.unflatten(1, (2, 3)).transpose(0, 1))


@pytest.mark.parametrize(
    "then",
    [
        lambda z: z.mean((2, 3)),
        lambda z: z.view(z.size(0), -1),
        lambda z: z.view(z.shape[0], -1),
        lambda z: z.flatten(1),
        lambda z: z.mean(-1).amax(2),
        lambda z: z.sum(3, keepdim=True).amax(-1).mean(dim=-1),
        lambda z: torch.logsumexp(nn.functional.interpolate(z, size=z.shape[-2:], mode="bilinear"), (-2, -1)),
    ],
)
def test_maps_may_become_vectors_behind_the_last_layer(then):
    images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    ens = ds.MIMO(lambda: Behind(nn.Conv2d(3, 5, 3), then), 2).eval()
    maps = nn.functional.conv2d(torch.cat([images, images], 1), ens.net.last.weight, ens.net.last.bias)
    torch.testing.assert_close(ens(images), torch.stack([then(part) for part in maps.chunk(2, 1)]))


@pytest.mark.parametrize(
    "then",
    [lambda z: z.flatten(1).mean(-1), lambda z: z.mean(-1).mean(-1).mean(-1), lambda z: z.sum(), lambda z: z.amax(1)],
)
def test_reductions_of_maps_across_channels_are_refused(then):
    with pytest.raises(ValueError, match="answers of all members"):
        ds.MIMO(lambda: Behind(nn.Conv2d(3, 5, 3), then), 2)


def test_one_number_may_scale_and_shift_the_answers():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.log_scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.5))
            self.register_buffer("shift", torch.full((1, 1), 2.0))

        def forward(self, x):
            return self.last(x) * nn.functional.softplus(self.log_scale) + self.shift

    ens = ds.MIMO(Scaled, 2).eval()
    every = torch.cat([x, x], 1) @ ens.net.last.weight.T + ens.net.last.bias
    wanted = every * nn.functional.softplus(torch.tensor(0.5)) + 2.0
    torch.testing.assert_close(ens(x), wanted.unflatten(1, (2, 3)).transpose(0, 1))
