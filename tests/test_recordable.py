"""What a traced step would not repeat: it runs eagerly, and says why."""

import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from training_helpers import x, y

import dissensus as ds
from dissensus.training import engines


class Plain(nn.Module):
    """A network whose hidden values pass through something that a recording cannot repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.calls, self.box = nn.Linear(4, 6), nn.Linear(6, 3), 0, [0]

    def change(self, h):
        return h

    def forward(self, x):
        return self.last(self.change(self.first(x)))


class CountsCalls(Plain):
    def change(self, h):
        self.calls += 1
        return h * (1.0 if self.calls < 7 else 2.0)


class CountsInAList(Plain):
    def change(self, h):
        self.box[0] += 1
        return h * (1.0 + 0.01 * self.box[0])


class CountsInATensor(Plain):
    count = None

    def change(self, h):
        self.count = torch.zeros(()) if self.count is None else self.count
        self.count += 1
        return h * self.count


class ReadsItsLastActivation(Plain):
    kept = None

    def change(self, h):
        self.kept, before = h.detach().mean(), self.kept
        return h if before is None else h + 0.1 * before


class KeepsItsLastActivation(Plain):
    def change(self, h):
        self.kept = h
        return h


class DrawsInPython(Plain):
    def change(self, h):
        return h * random.random()


class DrawsInNumPy(Plain):
    def change(self, h):
        return h * np.random.rand()  # noqa: NPY002


class DrawsInTorch(Plain):
    def change(self, h):
        return nn.functional.dropout(h, 0.5)


class Masks(Plain):
    def change(self, h):
        out = h.clone()
        out[h < 0] = 0.1 * h[h < 0]
        return out


class CountsDifferentValues(Plain):
    def change(self, h):
        return h / torch.unique(h).numel()


class Branches(Plain):
    def change(self, h):
        return h if h.sum() > 0 else 2 * h


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (CountsCalls, "change Python attributes"),
        (CountsInAList, "change Python attributes"),
        (CountsInATensor, "neither parameter nor buffer"),
        (ReadsItsLastActivation, "kept from the step before"),
        (DrawsInPython, "Python's or NumPy's generator"),
        (DrawsInNumPy, "Python's or NumPy's generator"),
        (DrawsInTorch, "draws random numbers outside dropout layers"),
        (Masks, "shapes in it depend on values"),
        (CountsDifferentValues, "shapes in it depend on values"),
        (Branches, "reads the value of a tensor"),
    ],
)
def test_what_a_trace_would_bake_in_runs_eagerly(kind, reason, caplog, monkeypatch):
    monkeypatch.setattr(engines, "TRACE_STEPS", 0)
    with caplog.at_level(logging.INFO, logger="dissensus"):
        run = ds.fit(ds.DeepEnsemble(kind, 2), (x, y), epochs=2, batch_size=20)
    assert run.engine == "eager"
    assert reason in caplog.text
    with pytest.raises(ValueError, match=reason):
        ds.fit(ds.DeepEnsemble(kind, 2), (x, y), epochs=2, engine="captured")


def test_a_network_may_keep_its_last_activation():
    run = ds.fit(ds.DeepEnsemble(KeepsItsLastActivation, 2), (x, y), epochs=2, engine="captured")
    assert run.engine == "captured"


def test_a_network_may_set_something_when_it_is_first_called():
    class Lazy(Plain):
        ready = False

        def change(self, h):
            self.ready = True
            return h

    run = ds.fit(ds.DeepEnsemble(Lazy, 2), (x, y), epochs=2, batch_size=50, concurrent_members=1)
    assert run.engine == "captured"


def test_choosing_an_engine_leaves_python_as_it_was(monkeypatch):
    monkeypatch.setattr(engines, "TRACE_STEPS", 0)
    curves = []
    for engine in ("auto", "eager"):
        run = ds.fit(ds.DeepEnsemble(CountsCalls, 2), (x, y), epochs=4, batch_size=20, engine=engine)
        curves.append(run.history["loss"])
    assert curves[0] == curves[1]


def test_lists_that_a_trace_added_to_are_as_they_were(monkeypatch):
    class Appends(Plain):
        def change(self, h):
            self.box.append(1)
            return h

    monkeypatch.setattr(engines, "TRACE_STEPS", 0)
    lengths = []
    for engine in ("auto", "eager"):
        ens = ds.DeepEnsemble(Appends, 2)
        ds.fit(ens, (x, y), epochs=2, batch_size=20, engine=engine)
        lengths.append([len(part.box) for part in ens.parts() if hasattr(part, "box")])
    assert lengths[0] == lengths[1]


def freeze(run):
    next(run.members.parameters()).requires_grad_(False)


def replace(run):
    parameter = next(run.members.parameters())
    parameter.data = parameter.data.clone()


@pytest.mark.parametrize(("change", "reason"), [(freeze, "froze 'net.0.weight'"), (replace, "in place")])
def test_what_training_would_not_notice_is_refused(change, reason):
    ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(4, 3)), 2)
    with pytest.raises(ValueError, match=reason):
        ds.fit(ens, (x, y), epochs=2, callback=change)


@pytest.mark.parametrize("kind", [DrawsInPython, DrawsInNumPy, DrawsInTorch])
def test_networks_that_draw_follow_the_seed_and_leave_generators_alone(kind):
    curves = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        curves.append(ds.fit(ds.DeepEnsemble(kind, 2), (x, y), epochs=2, batch_size=20).history["loss"])
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        assert before == after
    assert curves[0] == curves[1]


def test_what_a_callback_changes_in_modules_is_seen_by_the_eager_engine():
    def calm(run):
        if run.epoch == 2:
            for module in run.members.modules():
                if hasattr(module, "p"):
                    module.p = 0.0

    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Dropout(0.9), nn.Linear(30, 3))

    settings = {"epochs": 4, "batch_size": 20, "engine": "eager"}
    run = ds.fit(ds.DeepEnsemble(dropping, 2), (x, y), callback=calm, **settings)
    never = ds.fit(ds.DeepEnsemble(dropping, 2), (x, y), **settings)
    losses = [
        [row["loss"] for row in each.history.rows if row["epoch"] == 4 and row["member"] == 0] for each in (run, never)
    ]
    assert losses[0] != losses[1]
