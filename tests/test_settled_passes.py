"""Passes of one block of evaluation: members keep what they were lent, and see what changed between blocks."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import dissensus as ds
from dissensus.members.deep_ensemble import LARGE_BATCH

LARGE = torch.randn(LARGE_BATCH + 88, 4, generator=torch.Generator().manual_seed(0))
SMALL = LARGE[:100]


class Replacing(nn.Module):
    """Replaces its buffer in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.temperature = 1.0
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x):
        self.shift = self.shift.clamp(-1, 1)
        return self.layer(x) / self.temperature + self.shift


def test_large_batches_run_one_member_at_a_time_and_say_the_same():
    ens = ds.DeepEnsemble(Replacing, 3)
    large = ds.predict(ens, LARGE, batch_size=len(LARGE))
    assert "one member at a time" in ens.execution_reason
    small = ds.predict(ens, SMALL)
    assert ens.execution_reason is None
    torch.testing.assert_close(large[:, : len(SMALL)], small)


def test_a_buffer_that_a_pass_replaced_can_be_loaded_anew():
    ens = ds.DeepEnsemble(Replacing, 3)
    before = ds.predict(ens, LARGE, batch_size=len(LARGE))
    state = ens.state_dict()
    state["net.shift"] = state["net.shift"] + 0.5
    ens.load_state_dict(state)
    torch.testing.assert_close(ds.predict(ens, LARGE, batch_size=len(LARGE)), before + 0.5)
    assert torch.equal(ens.net.shift, torch.full((3, 3), 0.5))


def _attribute(ens):
    ens.net.temperature = 0.5


def _hook(ens):
    ens.net.layer.register_forward_hook(lambda module, given, output: 2 * output)


@pytest.mark.parametrize("change", [_attribute, _hook])
def test_what_is_changed_in_the_network_counts_for_batches_of_any_size(change):
    ens = ds.DeepEnsemble(Replacing, 3)
    before = ds.predict(ens, SMALL)
    ds.predict(ens, LARGE, batch_size=len(LARGE))
    change(ens)
    torch.testing.assert_close(ds.predict(ens, SMALL), 2 * before)
    torch.testing.assert_close(ds.predict(ens, LARGE, batch_size=len(LARGE))[:, : len(SMALL)], 2 * before)


@pytest.mark.parametrize("rows", [64, len(LARGE)])
def test_threads_take_turns(rows):
    ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), 3)
    x = LARGE[:rows]
    expected, statistics = ds.predict(ens, x), ens.net[1].running_mean.clone()
    ens.train()
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: ds.predict(ens, x), range(24)):
            torch.testing.assert_close(found, expected)
    assert ens.training
    assert torch.equal(ens.net[1].running_mean, statistics)


def _pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_pruned, "cannot be copied"),
        pytest.param(
            lambda: torch.jit.script(nn.Linear(4, 3)),
            "scripted network",
            marks=pytest.mark.filterwarnings("ignore::DeprecationWarning"),
        ),
    ],
)
def test_networks_that_cannot_be_members_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        ds.DeepEnsemble(make, 2)


@pytest.mark.parametrize("rows", [[], [0, 0], [True, False, True], torch.tensor([True, False, True])])
def test_members_to_keep_are_named_by_number_each_once(rows):
    ens = ds.DeepEnsemble(lambda: nn.Linear(4, 3), 3)
    with pytest.raises(ValueError, match=r"each once, by number|must be a whole number"):
        ens.keep_members(rows)
    ens.keep_members(torch.tensor([2, 0]))
    assert ens.member_ids == (2, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": []}, "at least one score"),
        ({"batch_size": 0}, "at least 1"),
        ({"weights": torch.ones(3)}, "sum to 1"),
        ({"weights": [0.5, 0.5]}, "one per member"),
        ({"weights": "equal"}, "list or tuple, each a number"),
    ],
)
def test_scores_of_inputs_refuse_what_makes_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        ds.predict_scores(ds.DeepEnsemble(lambda: nn.Linear(4, 3), 3), SMALL, **options)


def test_weights_may_be_a_list_and_names_may_repeat():
    ens = ds.DeepEnsemble(lambda: nn.Linear(4, 3), 3)
    expected = ds.scores.bma(ds.predict(ens, SMALL), weights=torch.tensor([0.2, 0.3, 0.5]))
    found = ds.predict_scores(ens, SMALL, ["bma", "bma"], weights=[0.2, 0.3, 0.5])
    assert list(found) == ["bma"]
    torch.testing.assert_close(found["bma"], expected)
