"""Snapshot ensembles against the course of the same training."""

import pytest
import torch
from torch import nn
from training_helpers import net, norm_net, x, y

import dissensus as ds


def test_members_are_the_network_at_the_end_of_each_cycle():
    ens, seen = ds.SnapshotEnsemble(norm_net, 3, seed=1), []
    ds.fit(
        ens,
        (x, y),
        epochs=7,
        schedule=ds.schedules.Cyclic(3),
        callback=lambda run: seen.append({n: t.clone() for n, t in run.members.net.state_dict().items()}),
    )
    for member, epoch in enumerate([3, 5, 7]):  # cycles end within epochs 3, 5 and 7
        state = ens.member(member).state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in seen[epoch - 1].items())


def test_the_network_trains_as_it_would_alone():
    ens, alone = ds.SnapshotEnsemble(net, 2), ds.DeepEnsemble(net, 1)
    for members in (ens, alone):
        ds.fit(members, (x, y), epochs=4, batches="shared", optimizer="sgd", lr=0.1)
    torch.testing.assert_close(ens.member(1).eval()(x), alone.member(0).eval()(x))


def test_the_schedule_is_that_of_warm_restarts():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4)
    ours = ds.schedules.Cyclic(cycles=3)
    for epoch in range(12):
        assert abs(ours.factor(float(epoch), 12.0) - optimizer.param_groups[0]["lr"]) < 1e-6
        optimizer.step()
        torchs.step()


@pytest.mark.parametrize(("changes", "message"), [({"cycles": 0}, "cycles"), ({"cycles": 2, "final": -0.1}, "final")])
def test_cycles_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ds.schedules.Cyclic(**changes)


def test_a_run_that_was_interrupted_ends_with_the_same_members(tmp_path):
    whole, parts = ds.SnapshotEnsemble(net, 2), ds.SnapshotEnsemble(net, 2)
    ds.fit(whole, (x, y), epochs=4, engine="eager")

    class Stop(Exception):
        pass

    def stop(run):
        if run.epoch == 3:
            raise Stop

    try:
        ds.fit(parts, (x, y), epochs=4, engine="eager", checkpoint_dir=tmp_path, callback=stop)
    except Stop:
        parts = ds.SnapshotEnsemble(net, 2)
    ds.fit(parts, (x, y), epochs=4, engine="eager", checkpoint_dir=tmp_path, resume=True)
    assert torch.equal(ds.predict(whole, x), ds.predict(parts, x))
