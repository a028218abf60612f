"""Golden trajectories: what training and evaluation gave when `golden.json` was stored, they give now.

On the processor and torch version that stored them the numbers are the same bit for bit; elsewhere they are close. A change that is meant
to change numbers stores them anew (`python tests/test_golden.py`) and says "Changed values" in the CHANGELOG.
"""

import json
import os
import platform
import sys
from pathlib import Path

import pytest
import torch
from backbone_cases import small_backbone
from torch import nn
from training_helpers import net, norm_net, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.randomness import seeded

STORED = Path(__file__).with_name("golden.json")
TOLERANCE = 1e-4
images = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
labels = torch.arange(40) % 3


def made(make):
    """Make a network whose weights do not depend on what ran before."""
    with seeded(0):
        return make()


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(216, 3)
    )


def different() -> ds.DeepEnsemble:
    return ds.DeepEnsemble.from_members(made(lambda: [net(), norm_net(), nn.Linear(4, 3)]))


KINDS = {
    "deep": lambda: ds.DeepEnsemble(norm_net, 3),
    "dropout": lambda: ds.DeepEnsemble(lambda: net(0.3), 3),
    "loop": lambda: ds.DeepEnsemble(norm_net, 3, execution="loop"),
    "different": different,
    "anchored": lambda: ds.Anchored(norm_net, x, 3, mask_probability=0.2, initialise="fresh"),
    "anchored ensemble": lambda: ds.Anchored(norm_net, x, 2, num_nets=3, mask_probability=0.2),
    "masksembles": lambda: ds.Masksembles(made(norm_net), 3, 2.0),
    "mc dropout": lambda: ds.MCDropout(made(lambda: net(0.2)), 3),
    "batch ensemble": lambda: ds.BatchEnsemble(norm_net, 3),
    "heads": lambda: ds.HeadEnsemble(small_backbone(), lambda: nn.Linear(6, 3), 3),
    "convolutions": lambda: ds.DeepEnsemble(conv_net, 3),
}
OBJECTIVES = {
    "independent": obj.Independent(),
    "brier": obj.Independent("brier"),
    "joint": obj.Joint(0.5),
    "joint, scores and dropout": obj.Joint(0.3, average="scores", member_dropout=0.4),
    "norm penalty": obj.NormPenalty(obj.Independent(), 1e-3),
    "loss-guided": obj.LossGuided(0.3),
    "loss-guided, all pairs": obj.LossGuided(0.3, active=None, regulariser="jensen_shannon"),
    "disagree": obj.Disagree(3 * x, strength=0.05),
    "adversarial": obj.Adversarial(obj.Independent(), epsilon=0.01, of_range=True),
    "virtual adversarial": obj.VirtualAdversarial(obj.Independent(), epsilon=0.1),
    "hard delta": obj.HardDelta(obj.Independent(), 0.1),
}
# The sign of a gradient near zero is another one elsewhere: only the first step is the same.
BY_SIGNS = ("adversarial", "virtual adversarial")
ONLY_APART = ("anchored", "mc dropout")
RUNS = {
    **{(kind, "independent", "eager"): {} for kind in KINDS},
    **{(kind, "joint", "eager"): {} for kind in KINDS if kind not in ONLY_APART},
    **{("deep", objective, "eager"): {} for objective in OBJECTIVES if objective != "hard delta"},
    **{(kind, "hard delta", "eager"): {} for kind in ("anchored", "anchored ensemble")},
    **{(kind, "independent", "captured"): {} for kind in ("deep", "dropout", "masksembles", "convolutions")},
    **{("deep", objective, "captured"): {} for objective in ("joint", "loss-guided", "disagree")},
    ("anchored ensemble", "hard delta", "captured"): {},
    ("deep", "independent", "compiled"): {},
    ("dropout", "brier", "eager"): {"optimizer": "adamw", "schedule": "cosine", "clip_norm": 1.0},
    ("dropout", "loss-guided", "captured"): {"optimizer": "adam", "weight_decay": 0.01},
    ("dropout", "norm penalty", "eager"): {"optimizer": torch.optim.RMSprop, "lr": 0.01},
    ("dropout", "joint", "captured"): {"precision": "bf16"},
}

# Tracing takes a second or more for each: in the quick tests one program for all members, one in which they are compared, one that picks.
QUICK = [("deep", objective, "captured") for objective in ("independent", "joint", "loss-guided")]


def trained(kind: str, objective: str, engine: str) -> torch.Tensor:
    """Train for three epochs, the last batch of each a smaller one; return outputs of a few inputs."""
    few = objective in BY_SIGNS
    settings = {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "lr": 0.05}
    changed = RUNS[kind, objective, engine]
    if "optimizer" in changed:
        settings = {"lr": 0.01}
    data = (images, labels) if kind == "convolutions" else (x, y)
    ens = KINDS[kind]()
    ds.fit(
        ens,
        data,
        objective=OBJECTIVES[objective],
        epochs=1 if few else 3,
        batch_size=len(x) if few else 30,
        engine=engine,
        device="cpu",
        **settings | changed,
    )
    return ds.predict(ens, data[0][:4])


def evaluated(folder: Path) -> dict:
    """Return an evaluation as it is saved."""
    ens = ds.DeepEnsemble(norm_net, 3)
    ds.fit(ens, (x, y), epochs=2, batch_size=30, optimizer="sgd", lr=0.1, engine="eager", device="cpu")
    ds.evaluate(ens, (x, y), ood={"far": 3 * x}).save(folder / "evaluation.json")
    return json.loads((folder / "evaluation.json").read_text())


def machine() -> list[str]:
    """Return what decides rounding: the processor, its instructions in use, torch."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    # Virtual machines shorten the name to that of a whole family.
    words = ("model name", "cpu family", "model\t", "stepping")
    found = [line.partition(":")[2].strip() for word in words for line in lines if line.startswith(word)]
    model = " ".join(dict.fromkeys(found))
    limits = [os.environ.get("ONEDNN_MAX_CPU_ISA", ""), torch.backends.cpu.get_cpu_capability()]
    return [model or platform.processor(), *limits, torch.__version__]


@pytest.fixture(scope="module")
def stored():
    return json.loads(STORED.read_text())


@pytest.mark.parametrize(
    "case",
    [
        case if case[2] == "eager" or case in QUICK else pytest.param(case, marks=pytest.mark.slow)
        for case in sorted(RUNS)
    ],
    ids=", ".join,
)
def test_a_run_is_what_it_was(case, stored):
    before = torch.tensor([float.fromhex(value) for value in stored["runs"][", ".join(case)].split()])
    now = trained(*case)
    before = before.reshape(now.shape)
    # bf16 keeps 8 bits, compilers put operations together as they like.
    if machine() == stored["machine"] and case[2] != "compiled":
        assert torch.equal(now, before), f"differs by {float((now - before).abs().max()):.2g}"
    torch.testing.assert_close(now, before, rtol=TOLERANCE, atol=0.05 if RUNS[case].get("precision") else TOLERANCE)


def numbers(value, path=""):
    """Yield every number of a saved result with its place, but for curves and single inputs; times are another each time."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("rocs", "histograms", "examples") and "seconds" not in key:
                yield from numbers(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from numbers(inner, f"{path}/{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def test_an_evaluation_is_what_it_was(tmp_path, stored):
    now, before = dict(numbers(evaluated(tmp_path))), dict(stored["evaluation"])
    missing = [path for path in before if path not in now]
    assert not missing
    # A value that changes by rounding may change a rank, of which there are 100.
    apart = 0.0 if machine() == stored["machine"] else 0.02
    wrong = {
        path: (value, now[path])
        for path, value in before.items()
        if now[path] != pytest.approx(value, rel=apart, abs=apart)
    }
    assert not wrong


def short_hex(value: float) -> str:
    mantissa, _, exponent = value.hex().partition("p")
    return f"{mantissa.rstrip('0')}p{exponent}"


def store() -> None:
    """Store all runs and the evaluation anew."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        evaluation = dict(numbers(evaluated(Path(folder))))
    runs = {}
    for case in sorted(RUNS):
        runs[", ".join(case)] = " ".join(map(short_hex, trained(*case).flatten().tolist()))
    STORED.write_text(json.dumps({"machine": machine(), "runs": runs, "evaluation": evaluation}, indent=0) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    torch.set_num_threads(1)
    sys.exit(store())
