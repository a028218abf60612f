"""Captured passes and passes under a memory limit."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

import dissensus as ds
from dissensus._machine import inputs_under, peak_bytes
from dissensus.engines.graphs import _KNOWN, Captured, _Watch, _why_not
from dissensus.scores import SCORES, all_scores

x = torch.randn(100, 10, generator=torch.Generator().manual_seed(0))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 1000), nn.ReLU(), nn.Linear(1000, 4))


def test_on_a_cpu_a_captured_function_is_the_function():
    double = Captured(lambda values: {"double": 2 * values})
    for _ in range(4):
        assert torch.equal(double(x)["double"], 2 * x)
    assert double.why_not is None


@pytest.mark.parametrize(
    ("function", "computes"),
    [
        (nn.Identity(), False),
        (lambda values: values[None].expand(3, *values.shape).detach(), False),
        (lambda values: values + 1, True),
        (lambda values: values.clone(), True),
    ],
)
def test_a_function_of_views_alone_computes_nothing(function, computes):
    with _Watch() as watch:
        function(x)
    assert watch.computes is computes


def test_numbers_that_are_made_on_the_device_from_the_host_s_are_seen():
    made = torch.empty(2, device="meta")
    assert "host" in _why_not(torch.ops.aten.lift_fresh.default, (made,), {}, made)
    with _Watch() as watch:
        x.new_tensor([1.0, 2.0])  # on a CPU nothing moves
    assert watch.found is None


def test_the_peak_is_what_lives_at_one_time():
    def two_at_a_time(values):
        for _ in range(5):
            values = values + 1.0
        return values

    assert peak_bytes(two_at_a_time, x) == 2 * x.numel() * 4
    assert peak_bytes(lambda values: values.reshape(10, 100), x) == 0


def test_the_hidden_layer_of_all_members_decides_how_many_inputs_fit():
    ens = ds.DeepEnsemble(wide, 5).eval()
    hidden = 5 * 1000 * 4
    # The layer before and after its activation live together; the rest is small.
    assert peak_bytes(ens, x) == pytest.approx(2 * hidden * len(x), rel=0.1)
    assert inputs_under(40 * 2 * hidden, ens, x) == pytest.approx(40, abs=4)


def test_a_memory_limit_changes_no_prediction_and_keeps_passes_small():
    ens = ds.DeepEnsemble(wide, 5)
    sizes = []
    ens.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    limited = ds.predict(ens, x, memory_limit=500_000)
    assert max(sizes) < 20
    torch.testing.assert_close(limited, ds.predict(ens, x))


def test_a_limit_that_one_input_breaks_is_refused():
    with pytest.raises(ValueError, match=r"more than the limit of 1,000\. Raise `memory_limit`"):
        ds.predict(ds.DeepEnsemble(wide, 5), x, memory_limit=1000)


def test_scores_without_outputs_are_the_scores_of_the_outputs():
    ens = ds.DeepEnsemble(wide, 5)
    expected = all_scores(ds.predict(ens, x))
    found = ds.predict_scores(ens, x, batch_size=30)
    assert list(found) == list(SCORES)
    for name, values in found.items():
        torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-5)
    weights = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])
    torch.testing.assert_close(
        ds.predict_scores(ens, x, ["bma"], weights=weights)["bma"],
        all_scores(ds.predict(ens, x), ["bma"], weights=weights)["bma"],
        rtol=1e-4,
        atol=1e-5,
    )


def test_inputs_without_finite_outputs_are_named():
    bad = x.clone()
    bad[37] = float("nan")
    with pytest.raises(ValueError, match="input 37"):
        ds.predict_scores(ds.DeepEnsemble(wide, 2), bad)


@pytest.mark.gpu
@pytest.mark.parametrize("convolving", [False, True])
def test_captured_predictions_are_the_eager_ones(convolving):
    def conv() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))

    ens = ds.DeepEnsemble(conv if convolving else wide, 5).cuda().eval()
    inputs = torch.randn(700, *((3, 8, 8) if convolving else (10,)), device="cuda")
    with torch.no_grad():
        expected = torch.cat([ens(batch) for batch in inputs.split(64)], dim=1)
    run = Captured(ens, passes=20)
    with torch.no_grad():
        found = torch.cat([run(batch).clone() for batch in inputs.split(64)], dim=1)
    assert run.why_not is None
    assert run._graphs, "passes that come again and again are captured"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ds.predict(ens, inputs, batch_size=64), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_what_cannot_be_captured_runs_as_it_is(caplog):
    run = Captured(lambda values: values * values.max().item())
    values = torch.rand(10, device="cuda")
    with caplog.at_level("INFO", logger="dissensus"), torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(run(values), values * values.max())
    assert "read on the host" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize(
    "function", [nn.Identity(), lambda values: (values - values.new_tensor([0.5])) / 2], ids=["view", "host"]
)
def test_what_would_be_an_empty_program_is_not_captured(function):
    run, values = Captured(function), torch.rand(10, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(run(values), function(values))
    assert run.why_not is not None
    assert not run._graphs


class Recorded:
    """Stands in for a captured program where there is no GPU."""

    made = 0

    def __init__(self, function, tensors, spec):
        self.function, self.spec = function, spec
        Recorded.made += 1

    def replay(self, tensors):
        return self.function(*tree_unflatten(tensors, self.spec))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr("dissensus.engines.graphs._on_gpu", lambda tensor: True)
    monkeypatch.setattr("dissensus.engines.graphs._Graph", Recorded)
    monkeypatch.setattr(Recorded, "made", 0)


def test_what_is_found_of_passes_is_remembered_with_the_ensemble(as_on_a_gpu, monkeypatch):
    looked, original = [], Captured._watched
    monkeypatch.setattr(Captured, "_watched", lambda self, *given: looked.append(self.name) or original(self, *given))
    ens = ds.DeepEnsemble(wide, 5)
    expected = ds.predict(ens, x[:10], batch_size=10)  # its first pass, in which the ensemble looks at values
    assert list(_KNOWN[ens].values()) == ["met"]
    assert not looked
    found = ds.predict(ens, x, batch_size=5)
    assert len(looked) == 1
    assert Recorded.made == 1
    assert list(_KNOWN[ens].values()) == ["met", "can"]
    torch.testing.assert_close(found[:, :10], expected)
    torch.testing.assert_close(ds.predict(ens, x, batch_size=5), found)
    assert len(looked) == 1
    assert Recorded.made == 2
    ds.predict(ens, x[:25], batch_size=5)  # too few passes to repay a capture
    assert Recorded.made == 2


def test_what_cannot_be_captured_is_remembered_too(as_on_a_gpu, caplog):
    class Reading(nn.Linear):
        def forward(self, values):
            return super().forward(values) * values.max().item()

    ens = ds.DeepEnsemble(lambda: Reading(10, 4), 2)
    with caplog.at_level("INFO", logger="dissensus"):
        for _ in range(3):
            ds.predict(ens, x, batch_size=5)
    assert caplog.text.count("read on the host") == 1
    assert Recorded.made == 0


def test_a_capture_waits_until_it_is_known_to_repay():
    known, unknown = Captured(lambda values: values, passes=20), Captured(lambda values: values)
    assert [number for number in range(1, 21) if known._repays(number)] == list(range(1, 15))
    assert [number for number in range(1, 8) if unknown._repays(number)] == [4, 5, 6, 7]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 8192])
def test_captured_passes_follow_the_weights(width):
    ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)), 4)
    ens.to("cuda")
    inputs = torch.randn(20 * 8192, 64, device="cuda")
    first = ds.predict(ens, inputs, batch_size=8192)
    assert list(_KNOWN[ens].values()) == ["can"]
    torch.testing.assert_close(first, ds.predict(ens, inputs, batch_size=8192))
    with torch.no_grad():
        ens.net[0].weight.mul_(2.0)
    again = ds.predict(ens, inputs, batch_size=8192)
    torch.testing.assert_close(again[:, -8192:], ds.predict(ens, inputs[-8192:], batch_size=8192))
    assert not torch.allclose(again, first)
