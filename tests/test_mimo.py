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
