"""Arrays that the device has no room for train as if it had: same order, same numbers."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from training_helpers import net, weights, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.data.augment import GaussianNoise
from dissensus.training import feeds
from dissensus.training.feeds import ArrayFeed, HostFeed, lives_on
from dissensus.training.step import read_batch

CPU = torch.device("cpu")


@pytest.fixture
def no_room(monkeypatch):
    """Has everything fed from the host; returns what was made."""
    made = []
    monkeypatch.setattr("dissensus.training.feeds.lives_on", lambda *_: False)
    start = HostFeed._hold

    def remember(self, *args):
        made.append(self)
        start(self, *args)

    monkeypatch.setattr(HostFeed, "_hold", remember)
    return made


SETTINGS = {
    "own": {},
    "shared": {"batches": "shared"},
    "compared": {"objective": obj.Joint(0.5)},
    "dropped rest": {"last_batch": "drop"},
    "in turn": {"concurrent_members": 1},
    "one batch": {"batch_size": 200},
    "augmented": {"augment": GaussianNoise(0.1)},
    "several checks": {"check_every": 3, "validation": (x, y)},
}


def trained(data=(x, y), **settings):
    ens = ds.DeepEnsemble(lambda: net(0.2), 3)
    run = ds.fit(ens, data, **{"epochs": 3, "batch_size": 16, "device": "cpu", **settings})
    return weights(ens), run.history["loss"]


@pytest.mark.parametrize("engine", ["eager", "captured"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_training_from_the_host_is_training_on_the_device(engine, settings, request):
    there = trained(engine=engine, **settings)
    made = request.getfixturevalue("no_room")
    here = trained(engine=engine, **settings)
    assert made
    assert here[1] == there[1]
    for name, tensor in there[0].items():
        assert torch.equal(here[0][name], tensor), name


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_memory_map_trains_as_the_array_in_memory(tmp_path, mode):
    np.save(tmp_path / "x.npy", x.numpy().astype(np.float64))
    mapped = np.load(tmp_path / "x.npy", mmap_mode=mode)
    there = trained((x, y))
    assert trained((mapped, y))[1] == there[1]
    assert trained((mapped, y), validation=(mapped, y), watch_collusion=True)[1] == there[1]


def test_an_objective_that_measures_all_inputs_has_a_memory_map_read(tmp_path):
    np.save(tmp_path / "x.npy", x.numpy())
    objective = obj.Adversarial(obj.Independent(), epsilon=0.1, of_range=True)
    there = trained((x, y), objective=objective)
    assert trained((np.load(tmp_path / "x.npy", mmap_mode="r"), y), objective=objective)[1] == there[1]


def test_a_dropped_member_leaves_the_others_as_they_were(no_room):
    def run():
        ens = ds.DeepEnsemble(net, 3)
        settings = dict(epochs=4, batch_size=16, optimizer="sgd", lr=[0.01, 1e20, 0.01], check_every=2)
        found = ds.fit(ens, (x, y), on_divergence="drop", device="cpu", engine="eager", **settings)
        assert found.dropped == [1]
        return ds.predict(ens, x)

    here = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dissensus.training.feeds.lives_on", lambda *_: True)
        assert torch.equal(run(), here)


def test_a_stopped_run_goes_on_from_the_host_and_from_the_device_alike(tmp_path, no_room, monkeypatch):
    settings = dict(epochs=4, batch_size=16, device="cpu", engine="eager")
    straight, _ = trained(**settings)

    def stop(run):
        if run.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(checkpoint_dir=tmp_path, callback=stop, **settings)
    monkeypatch.setattr("dissensus.training.feeds.lives_on", lambda *_: True)
    resumed, _ = trained(checkpoint_dir=tmp_path, resume=True, **settings)
    for name, tensor in straight.items():
        assert torch.equal(resumed[name], tensor)


def feed(own=False, count=103, **options):
    keys = torch.tensor([5, 6]) if own else torch.tensor(5)
    rows = torch.arange(count)
    return HostFeed((rows[:, None].float(), rows), 10, keys, **options)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_batches_come_in_the_order_of_arrays_on_the_device(own, threads):
    here = feed(own, threads=threads)
    rows = torch.arange(103)
    there = ArrayFeed((rows[:, None].float(), rows), 10, here.order_keys)
    assert (here.identity(), here.steps_per_epoch) == (there.identity(), there.steps_per_epoch)
    for number in range(2):
        for sizes in zip(*(f.epoch(number, 0) for f in (here, there)), strict=True):
            got, want = (read_batch(f, f.tensors, sizes[0]) for f in (here, there))
            assert sizes[0] == sizes[1]
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
            there.tensors["position"].add_(1)


def test_an_epoch_can_begin_in_the_middle():
    source = feed()
    whole, rest = ([read_batch(source, source.tensors, size)[1] for size in source.epoch(1, skip)] for skip in (0, 4))
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], rest, strict=True))


def test_threads_are_ahead_of_training_and_end_with_it():
    source = feed()
    epoch = source.epoch(0, 0)
    next(epoch)
    assert any(thread.name.startswith("dissensus data") for thread in threading.enumerate())
    epoch.close()
    assert not any(thread.name.startswith("dissensus data") for thread in threading.enumerate())


def test_data_that_cannot_be_read_stops_training_with_its_error():
    class Broken(torch.Tensor):
        def __getitem__(self, rows):
            raise OSError("the disk is gone")

    source = feed()
    source.data = (source.data[0].as_subclass(Broken), *source.data[1:])
    with pytest.raises(OSError, match="the disk is gone"):
        list(source.epoch(0, 0))


class TestRoom:
    def test_on_a_cpu_is_for_what_is_in_memory_already(self, tmp_path):
        np.save(tmp_path / "x.npy", x.numpy())
        assert lives_on(x, CPU)
        assert not lives_on(hosted_rows(tmp_path / "x.npy"), CPU)

    def test_on_a_gpu_is_half_of_what_is_free(self, tmp_path, monkeypatch):
        np.save(tmp_path / "x.npy", x.numpy())
        gpu = torch.device("cuda")
        for rows in (x, hosted_rows(tmp_path / "x.npy")):
            monkeypatch.setattr(feeds, "free_memory", lambda device: 2 * x.nbytes)
            assert lives_on(rows, gpu)
            monkeypatch.setattr(feeds, "free_memory", lambda device: 2 * x.nbytes - 1)
            assert not lives_on(rows, gpu)


def hosted_rows(path):
    from dissensus.data.trees import rows_of

    return rows_of(np.load(path, mmap_mode="r"), "x")


PEAK = """
import resource, sys
import numpy as np, torch
import dissensus as ds

x = np.load(sys.argv[1], mmap_mode="r")
y = torch.arange(len(x)) % 3
ens = ds.DeepEnsemble(lambda: torch.nn.Linear(x.shape[1], 3), 2)
options = dict(batch_size=256, epochs=2, device="cpu", engine="eager")
ds.fit(ens, (np.array(x[:200]), y[:200]), **options)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ds.fit(ens, (x, y), validation=(x, y), **options)
ds.predict(ens, x)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in other units, and maps kept, elsewhere")
def test_a_file_larger_than_what_training_needs_is_never_in_memory_whole(tmp_path):
    path, megabytes = tmp_path / "x.npy", 320
    # A sparse file: zeros that take no room on the disk.
    np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(megabytes * 256, 1024)).flush()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, env=environment, check=True
    )
    assert float(told.stdout) < 0.6 * megabytes


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["eager", "captured"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_gpu_is_fed_in_the_same_order(engine, settings, request):
    there = trained(engine=engine, **settings | {"device": "cuda"})
    request.getfixturevalue("no_room")
    here = trained(engine=engine, **settings | {"device": "cuda"})
    torch.testing.assert_close(torch.tensor(here[1]), torch.tensor(there[1]), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_a_gpus_batches_are_not_overwritten_while_they_are_copied(pinned):
    from dissensus.training.feeds import Carrier

    carrier = Carrier(torch.device("cuda"))

    def make(place):
        values = torch.full((1 << 20,), float(place))
        return (values.pin_memory() if pinned else values), torch.full((4,), place)

    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        found = []
        for values, label in carrier.ahead(make, range(40), threads=3):
            busy = busy @ busy * 1e-3
            found.append((values.min(), values.max(), label[0]))
        for place, parts in enumerate(found):
            assert [float(part) for part in parts] == [place] * 3
