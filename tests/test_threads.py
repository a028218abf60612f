"""As many threads as a step keeps busy."""

import logging

import pytest
import torch
from torch import nn
from training_helpers import net, x, y

import dissensus as ds
from dissensus import _machine
from dissensus._machine import threads_for
from dissensus.engines.watching import look_at


@pytest.fixture
def four_threads():
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(("work", "count"), [(1e4, 1), (3.9e8, 2), (1e12, 4)])
def test_large_steps_get_more_threads_and_all_are_given_back(four_threads, work, count):
    with threads_for(work):
        assert torch.get_num_threads() == count
    assert torch.get_num_threads() == 4


def test_small_steps_train_with_one_thread_and_the_log_says_so(four_threads, caplog):
    seen = []
    with caplog.at_level(logging.INFO, logger="dissensus"):
        ds.fit(ds.DeepEnsemble(net, 2), (x, y), epochs=1, callback=lambda run: seen.append(torch.get_num_threads()))
    assert (seen, torch.get_num_threads()) == ([1], 4)
    assert caplog.text.count("1 of 4 threads") == 1


def test_the_work_of_a_step_decides(four_threads, monkeypatch):
    """2 members x 100 examples x 12 weights x 2 operations x 3 passes."""
    monkeypatch.setattr(_machine, "WORK_OF_A_THREAD", 2 * 100 * 12 * 2 * 3 / 3)
    seen = []
    ds.fit(
        ds.DeepEnsemble(lambda: nn.Linear(4, 3), 2),
        (x, y),
        epochs=1,
        callback=lambda run: seen.append(torch.get_num_threads()),
    )
    assert seen == [3]


def test_a_network_that_returns_a_view_of_a_parameter_is_counted(four_threads):
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.zeros(1, 3))

        def forward(self, x):
            return self.value.expand(len(x), 3)

    assert look_at(lambda: Constant()(x)) == (set(), 0.0)
    assert ds.fit(ds.DeepEnsemble(Constant, 2), (x, y), epochs=1).step == 1
