"""Values and networks are told by texts: equal ones alike in every process, different ones apart."""

import functools
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from backbone_cases import Vit
from torch import nn

import dissensus as ds
from dissensus.data.augment import Compose, GaussianNoise, HorizontalFlip
from dissensus.data.fingerprints import attributes_of, described, network_digest


class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, x, y, noise):
        return x * self.by, y


@dataclass(frozen=True)
class Shift:
    by: float
    names: tuple[str, ...] = ("a",)


class Colour(Enum):
    RED = 1
    BLUE = 2


def scale(x, y, noise, by=1):
    return x * by, y


def closing(by):
    return lambda x, y, noise: (x * by, y)


def with_default(by):
    def inner(x, y, noise, by=by):
        return x * by, y

    return inner


DIFFERENT = {
    "objects": lambda k: Scale(k),
    "objects in objects": lambda k: Compose((HorizontalFlip(), Scale(k))),
    "dataclasses": lambda k: GaussianNoise(k),
    "fields": lambda k: Shift(1.0, ("a", str(k))),
    "partials": lambda k: functools.partial(scale, by=k),
    "closures": closing,
    "defaults": with_default,
    "methods": lambda k: Scale(k).__call__,
    "code": lambda k: (lambda x, y, n: (2 * x, y)) if k == 2 else (lambda x, y, n: (3 * x, y)),
    "names in code": lambda k: (lambda x: x.sin()) if k == 2 else (lambda x: x.cos()),
    "inner code": lambda k: (lambda x: [v + 1 for v in x]) if k == 2 else (lambda x: [v + 2 for v in x]),
    "arrays": lambda k: np.full(3, k),
    "tensors": lambda k: torch.full((3,), float(k)),
    "signs": lambda k: torch.tensor([1.0, 2.0]) if k == 2 else torch.tensor([-1.0, -2.0]),
    "sets": lambda k: {"a", k},
    "numbers": np.float32,
    "enums": Colour,
    "modules": lambda k: nn.LeakyReLU(k),
    "functions of C": lambda k: torch.sin if k == 2 else torch.cos,
}


@pytest.mark.parametrize("make", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_equal_values_have_one_text_and_others_another(make):
    first = 1 if make is Colour else 3
    assert described(make(2)) == described(make(2)) != described(make(first))
    assert described(make(2)) is not None
    assert " at 0x" not in described(make(2))


@pytest.mark.parametrize(
    "value", [iter([]), torch.Generator(), np.random.default_rng(0), random.Random(0)], ids=lambda v: type(v).__name__
)
def test_what_shows_no_value_cannot_be_told(value):
    assert described(value) is described(Scale(value)) is described(closing(value)) is None


def test_what_holds_itself_cannot_be_told():
    loop = Scale(1)
    loop.by = loop
    assert described(loop) is None


def test_texts_are_the_same_in_every_process():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_descriptions import DIFFERENT, described, network_digest, Vit, torch\n"
        "torch.manual_seed(0)\n"
        "words = lambda x: x in {'some', 'words', 'in', 'a', 'set'}\n"
        "print([described(make(2)) for make in DIFFERENT.values()], described(words), network_digest(Vit()))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code, os.path.dirname(__file__)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


class Keeping(nn.Module):
    """Keeps whatever it is given, and counts its passes."""

    def __init__(self, kept=1) -> None:
        super().__init__()
        self.inner, self.kept, self.passes = nn.Linear(4, 3), kept, 0
        nn.init.ones_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x):
        self.passes += 1
        return self.inner(x)


class TestNetworks:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (1, 2),
            (1, 1.0),
            (1.0, 1.0 + 1e-15),
            ("cls", "mean"),
            (True, False),
            (None, 0),
            ((1, (2, "a")), (1, (2, "b"))),
            (torch.float32, torch.float16),
            (F.relu, F.silu),
            (np.int64(1), np.int64(2)),
        ],
    )
    def test_plain_attributes_are_part_of_what_they_are(self, one, other):
        assert network_digest(Keeping(one)) == network_digest(Keeping(one)) != network_digest(Keeping(other))

    def test_attributes_are_named_by_their_modules(self):
        told = attributes_of(nn.Sequential(Keeping(5), nn.Flatten()))
        assert told["0.kept"] == "5"
        assert told["1.start_dim"] == "1"
        assert not any("training" in name for name in told)

    def test_what_does_not_tell_them_apart_can_be_left_out(self):
        net, used = Keeping(), Keeping()
        used(torch.zeros(1, 4))
        assert network_digest(net) != network_digest(used)
        assert network_digest(net, ["passes"]) == network_digest(used, ["passes"])

    def test_neither_mode_nor_gradients_nor_hooks_make_them_others(self):
        net = Keeping()
        before = network_digest(net)
        net.eval().requires_grad_(False).register_forward_hook(lambda *_: None)
        assert network_digest(net) == before

    def test_signs_and_heads_of_attention_are_seen(self):
        torch.manual_seed(0)
        net = nn.MultiheadAttention(8, 2)
        before = network_digest(net)
        net.num_heads = 4
        assert network_digest(net) != before
        net.num_heads = 2
        assert network_digest(net) == before
        net.in_proj_weight.data.neg_()
        assert network_digest(net) != before

    def test_the_token_of_a_cut_is_seen(self):
        torch.manual_seed(0)
        net = Vit()
        digests = [network_digest(ds.cut(net, "blocks.2.norm2", token=token)[0]) for token in (None, 0, 1)]
        assert len(set(digests)) == 3
        assert network_digest(ds.cut(net, "blocks.2.norm2", token=1)[0]) == digests[2]

    def test_what_forward_does_between_the_layers_of_a_cut_is_seen(self):
        class Net(nn.Module):
            def __init__(self, between):
                super().__init__()
                self.between = [between]
                self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
                nn.init.ones_(self.first.weight)
                nn.init.zeros_(self.first.bias)

            def forward(self, x):
                return self.last(self.between[0](self.first(x)))

        one, other = (network_digest(ds.cut(Net(between), "last")[0]) for between in (torch.relu, torch.tanh))
        assert one != other

    def test_empty_tensors_do_no_harm(self):
        net = nn.Module()
        net.register_buffer("empty", torch.zeros(0, 3))
        assert network_digest(net) == network_digest(net)
