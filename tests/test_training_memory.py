"""The memory that training takes at its peak, as `benchmarks/memory.py` measures it."""

import runpy
import sys
from argparse import Namespace
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "memory.py"
AIM = 1.1


def shares(device: str, *engines: str) -> list[float]:
    """Return the peak of an ensemble's training, by engines, over that of its members one by one."""
    measured = runpy.run_path(str(SCRIPT))["measured"]
    options = Namespace(device=device, case="mlp", members=5)
    plain = measured("plain", "adam", options)
    return [measured(engine, "adam", options) / (5 * plain) for engine in engines]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from Linux's /proc")
def test_an_ensemble_takes_no_more_memory_than_its_members_one_by_one():
    """With a copy of the state beside it while engines are tried, it was 1.7."""
    assert max(shares("cpu", "captured")) < AIM


@pytest.mark.gpu
def test_nor_on_a_gpu():
    assert max(shares("cuda", "eager", "captured", "compiled")) < AIM
