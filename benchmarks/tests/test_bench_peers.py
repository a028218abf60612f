"""Other libraries in the benchmark: named where they are missing; where they are installed, they do the work that is timed."""

import importlib
from dataclasses import replace

import pytest
import torch
from dissensus_bench import peers
from dissensus_bench.inference import PREDICT, compare_inference
from dissensus_bench.problems import mlp, mlp_problem
from dissensus_bench.report import print_results
from torch import nn

# What other libraries warn of is their own business.
pytestmark = pytest.mark.filterwarnings("ignore")

TINY = mlp_problem(3, (4, 8, 1), batch=8, steps=4, turn_steps=2, device="cpu")
CLASSES = replace(TINY, y=torch.arange(32) % 3, make=lambda: mlp((4, 8, 3)), loss="cross_entropy", widths=None)
TRAINERS = ["TorchUncertainty", "lightning-uq-box", "TorchEnsemble"]


def installed(name):
    """Return the peer, or skip where it is missing, in the bench's own words."""
    reason = peers._why_not_there(peers.PEERS[name].module)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return peers.PEERS[name]


@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_that_are_not_installed_are_named(monkeypatch, name, capsys):
    monkeypatch.setattr(peers, "find_spec", lambda module: None)
    turns, missing = peers.join_peers(TINY)
    assert turns == {}
    assert missing[name] == "not installed"
    print_results([{"case": "small-mlps", "what": "", "sides": {}, "ratios": {}, "missing": missing}])
    assert f"{name}: not installed" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ImportError("no such file"), RuntimeError("no such operator")])
def test_peers_that_do_not_import_are_named_with_the_reason(monkeypatch, error):
    def fail(module):
        raise error

    monkeypatch.setattr(peers, "find_spec", lambda module: object())
    monkeypatch.setattr(peers, "import_module", fail)
    turns, missing = peers.join_peers(TINY)
    assert turns == {}
    assert all(str(error) in reason for reason in missing.values())
    assert set(missing) == set(peers.PEERS)


def test_peers_take_part_in_training_and_predictions_as_they_are_listed(monkeypatch):
    seen = []
    turn = peers.Turn(lambda: 0.5, 4)
    listed = {
        "both": peers.Peer("torch", lambda problem: turn, lambda nets, x, batch: lambda: seen.append(len(nets))),
        "refuses": peers.Peer("torch", lambda problem: "written for something else"),
    }
    monkeypatch.setattr(peers, "PEERS", listed)
    assert peers.join_peers(TINY) == ({"both": turn}, {"refuses": "written for something else"})
    entry = compare_inference("tiny", 3, lambda: mlp((4, 8, 3)), (4,), 20, 8, device="cpu", repeats=2)
    assert seen == [3] * 3
    assert f"{PREDICT} against both" in entry["ratios"]
    assert entry["missing"] == {"refuses": "no adapter for predictions"}


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("problem", [replace(TINY, picked=2), replace(TINY, augment=lambda x, y, noise: (x, y))])
def test_peers_say_what_they_do_not_do(name, problem):
    installed(name)
    assert isinstance(peers.PEERS[name].train(problem), str)


@pytest.mark.parametrize("name", peers.PEERS)
def test_installed_peers_take_their_turn(name):
    turn = installed(name).train(TINY)
    counted = turn.run()
    assert counted is None or counted > 0
    assert turn.steps == len(TINY.x) // TINY.batch, "an epoch"


def losses(problem, nets):
    with torch.no_grad():
        return [problem.mean_loss(net(problem.x), problem.y).item() for net in nets]


@pytest.mark.parametrize("problem", [TINY, CLASSES], ids=["regression", "classification"])
def test_torch_uncertainty_trains_every_member(monkeypatch, problem):
    installed("TorchUncertainty")
    methods = importlib.import_module("torch_uncertainty.methods")
    kept = []

    def keep(*args, original=methods.deep_ensembles, **kwargs):
        ensemble = original(*args, **kwargs)
        kept.append((ensemble, losses(problem, ensemble.core_models)))
        return ensemble

    monkeypatch.setattr(methods, "deep_ensembles", keep)
    peers.PEERS["TorchUncertainty"].train(replace(problem, lr=0.02)).run()
    ((ensemble, before),) = kept
    assert len(set(before)) == problem.members, "members start from different weights"
    after = losses(problem, ensemble.core_models)
    assert all(late < early for early, late in zip(before, after, strict=True))


@pytest.mark.parametrize("problem", [TINY, CLASSES], ids=["regression", "classification"])
def test_lightning_uq_box_trains_every_member(problem):
    peer = installed("lightning-uq-box")
    nets = [problem.make() for _ in range(problem.members)]
    before, made = losses(problem, nets), iter(nets)
    peer.train(replace(problem, make=lambda: next(made), lr=0.02)).run()
    after = losses(problem, nets)
    assert all(late < early for early, late in zip(before, after, strict=True))


class Counted(nn.Linear):
    """A network that counts how many inputs it was asked about."""

    asked = 0

    def forward(self, x):
        self.asked += len(x)
        return super().forward(x)


@pytest.mark.parametrize("name", [name for name, peer in peers.PEERS.items() if peer.predict is not None])
def test_peers_predict_with_every_network(name):
    nets = [Counted(4, 3) for _ in range(3)]
    predict = installed(name).predict(nets, TINY.x, 10)
    before = [net.asked for net in nets]
    predict()
    assert [net.asked - earlier for net, earlier in zip(nets, before, strict=True)] == [len(TINY.x)] * 3
