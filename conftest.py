import os
from pathlib import Path


def _instructions() -> str:
    """Which instructions oneDNN may use: results are the same without the rest.

    Some virtual machines announce matrix instructions (AMX) that they stop programs for. On processors without AVX-512 the AVX2
    kernels of oneDNN in torch 2.13 write past their memory in the backward pass of some grouped convolutions.
    """
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "avx512f"
    return "AVX512_CORE_FP16" if "avx512f" in flags else "AVX"


os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _instructions())

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


# Tests that take more than a second of a processor, as measured: `make test-all` runs them.
LONG = frozenset(Path(__file__).with_name("tests").joinpath("long_tests.txt").read_text(encoding="utf-8").splitlines())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid in LONG:
            item.add_marker(pytest.mark.slow)
        if "slow" in item.keywords:  # on a busy machine a compilation alone takes minutes
            item.add_marker(pytest.mark.timeout(1500))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded_test():
    """Tests that draw from torch's global generator draw the same every time."""
    torch.manual_seed(1234)
