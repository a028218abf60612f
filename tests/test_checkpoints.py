import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_helpers import net, norm_net, weights, x, y

import dissensus as ds
from dissensus.training import CheckpointError
from dissensus.training.checkpoints import CheckpointFolder

SETTINGS = {"epochs": 6, "batch_size": 30, "lr": 0.02, "schedule": "cosine", "validation": (x, y)}


class Stop(Exception):
    pass


def stop_after(checks):
    def callback(run):
        if len(set(run.history["step"])) >= checks:
            raise Stop

    return callback


def interrupted(folder, make, stop=4, **settings):
    """Train, break off in the middle, and go on in a fresh ensemble."""
    with pytest.raises(Stop):
        ds.fit(ds.DeepEnsemble(make, 3), checkpoint_dir=folder, callback=stop_after(stop), **settings)
    ens = ds.DeepEnsemble(make, 3)
    return ens, ds.fit(ens, checkpoint_dir=folder, resume=True, **settings)


@pytest.mark.parametrize("engine", ["eager", "captured"])
@pytest.mark.parametrize(
    "extra",
    [
        {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
        {"optimizer": "adamw"},
        {"optimizer": torch.optim.RMSprop, "engine": "eager"},
        {"select": "ensemble_loss"},
        {"schedule": ds.schedules.Plateau(patience=1)},
        {"check_every": 3},
    ],
    ids=["sgd", "adamw", "separate optimizers", "select", "plateau", "check every 3 steps"],
)
def test_a_resumed_run_ends_in_exactly_the_weights_of_an_uninterrupted_one(tmp_path, extra, engine):
    settings = {"data": (x, y), **SETTINGS, "engine": engine, **extra}
    whole = ds.DeepEnsemble(lambda: net(0.3), 3)
    run = ds.fit(whole, **settings)
    ens, resumed = interrupted(tmp_path, lambda: net(0.3), **settings)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(ens)[name]), name
    assert resumed.history["loss"] == run.history["loss"]
    assert resumed.best == run.best


def test_a_shuffling_loader_resumes_exactly_too(tmp_path):
    def settings():
        data = DataLoader(TensorDataset(x, y), batch_size=30, shuffle=True)
        return {"data": data, "epochs": 6, "lr": 0.02}

    whole = ds.DeepEnsemble(norm_net, 3)
    ds.fit(whole, **settings())
    ens, _ = interrupted(tmp_path, norm_net, **settings())
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(ens)[name]), name


SCRIPT = """
import sys, torch
sys.path.insert(0, {tests!r})
from training_helpers import net, x, y
import dissensus as ds
torch.set_num_threads(1)
ens = ds.DeepEnsemble(lambda: net(0.3), 3)
ds.fit(ens, (x, y), epochs={epochs}, batch_size=10, lr=0.01, checkpoint_dir={folder!r}, resume=True)
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_resumes_to_exactly_the_same_weights(tmp_path):
    tests = str(Path(__file__).parent)
    folder = tmp_path / "killed"
    script = SCRIPT.format(tests=tests, folder=str(folder), epochs=60)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    kills = 0
    for wait in (2, 9, 17):
        process = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE)
        deadline = time.monotonic() + 100
        # Wait for a number of finished epochs, then kill without warning, wherever the process is.
        while time.monotonic() < deadline and process.poll() is None:
            history = folder / "history.csv"
            if history.exists() and len(history.read_text().splitlines()) > 3 * wait:
                break
            time.sleep(0.005)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        process.stdout.close()
    assert kills >= 1
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, timeout=200)

    resumed, whole = ds.DeepEnsemble(lambda: net(0.3), 3), ds.DeepEnsemble(lambda: net(0.3), 3)
    settings = {"epochs": 60, "batch_size": 10, "lr": 0.01}
    ds.fit(resumed, (x, y), checkpoint_dir=folder, resume=True, **settings)
    ds.fit(whole, (x, y), **settings)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def trained(folder, **changes):
    settings = {**SETTINGS, **changes}
    return ds.fit(ds.DeepEnsemble(net, 3), (x, y), checkpoint_dir=folder, **settings)


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


def damage_header(path):
    data = bytearray(path.read_bytes())
    data[20] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "damage", [damage_truncate, damage_flip, damage_header], ids=["truncated", "changed", "header"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, damage, caplog):
    run = trained(tmp_path)
    newest = max(tmp_path.glob("last-*.safetensors"))
    damage(newest)
    ens = ds.DeepEnsemble(net, 3)
    resumed = ds.fit(ens, (x, y), checkpoint_dir=tmp_path, resume=True, **SETTINGS)
    assert newest.name in caplog.text
    assert resumed.history["loss"] == run.history["loss"]


def test_with_no_good_checkpoint_left_the_error_names_them(tmp_path):
    trained(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        damage_flip(path)
    with pytest.raises(CheckpointError, match="digest"):
        trained(tmp_path, resume=True)


def test_a_missing_checkpoint_is_the_one_before_it(tmp_path):
    run = trained(tmp_path)
    max(tmp_path.glob("last-*.safetensors")).unlink()
    ens = ds.DeepEnsemble(net, 3)
    ds.fit(ens, (x, y), checkpoint_dir=tmp_path, resume=True, **SETTINGS)
    assert torch.equal(ds.predict(ens, x), ds.predict(run.members, x))


def test_checkpoints_of_another_format_are_refused(tmp_path, monkeypatch):
    trained(tmp_path)
    monkeypatch.setattr("dissensus.training.checkpoints.FORMAT", 99)
    with pytest.raises(CheckpointError, match="this version reads 99"):
        trained(tmp_path, resume=True)
    with pytest.raises(ValueError, match="already holds a run"):
        trained(tmp_path)


def test_blocks_without_their_json_are_no_checkpoint_and_go_when_there_is_one(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "last-000000004-1-of-2.safetensors")
    run = trained(tmp_path, resume=True)
    assert run.step > 4
    assert not list(tmp_path.glob("*of-2*"))


def test_every_flipped_bit_of_a_checkpoint_is_noticed_or_harmless(tmp_path):
    folder = CheckpointFolder(tmp_path)
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3), "c": torch.ones(0)}
    folder.save("last", 1, tensors, {"history": [1.5, "two"]})
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]
    for path in tmp_path.iterdir():
        whole = path.read_bytes()
        for place in range(len(whole)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
            try:
                found, facts, _ = folder.load()
            except CheckpointError:
                continue
            assert facts == {"history": [1.5, "two"]}
            assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        for end in range(0, len(whole), 7):
            path.write_bytes(whole[:end])
            with pytest.raises(CheckpointError, match="digest"):
                folder.load()
        path.write_bytes(whole)


class Spread:
    """A mesh of processes along members, one of them."""

    data_rank = 0

    def __init__(self, rank, digests):
        self.member_rank, self.members, self.digests = rank, len(digests), digests

    def collect(self, digest):
        self.digests[self.member_rank] = digest
        return self.digests


def test_a_checkpoint_of_blocks_is_there_when_all_of_them_are(tmp_path):
    folder, rows = CheckpointFolder(tmp_path), torch.arange(12.0).reshape(4, 3)

    def save(step, ranks):
        digests = [None, None]
        for rank in ranks:
            own = {"rows": rows[2 * rank : 2 * rank + 2] + step}
            own |= {"index": torch.tensor(step)} if rank == 0 else {}
            folder.save("last", step, own, {"step": step}, mesh=Spread(rank, digests))

    for step in (1, 2, 3):
        save(step, (1, 0))
    save(4, (1,))  # died before the first process wrote
    tensors, facts, problem = folder.load()
    assert torch.equal(tensors["rows"], rows + 3)
    assert tensors["index"] == facts["step"] == 3
    assert problem is None
    damage_flip(tmp_path / "last-000000003-1-of-2.safetensors")
    tensors, facts, problem = folder.load()
    assert torch.equal(tensors["rows"], rows + 2)
    assert "last-000000003-1-of-2.safetensors" in problem
    assert not list(tmp_path.glob("last-000000001*"))


def test_one_process_at_a_time_trains_into_a_folder(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from dissensus._files import only_writer\n"
        "with only_writer(Path(sys.argv[1])): print('mine', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"mine\n"
        with pytest.raises(ValueError, match="Another process is training"):
            trained(tmp_path)
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    (tmp_path / ".history.csv.left.tmp").write_text("half")
    trained(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_link_at_a_temporary_name_is_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("keep")
    (tmp_path / ".history.csv.tmp").symlink_to(target)
    (tmp_path / "history.tmp").symlink_to(target)
    trained(tmp_path)
    assert target.read_text() == "keep"


def rebuilt(activation=nn.ReLU, rate=0.1, eps=1e-5, function=torch.relu):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(4, 8), nn.BatchNorm1d(8, eps=eps), activation(), nn.Dropout(rate), nn.Linear(8, 3)
            )
            self.function = function

        def forward(self, x):
            return self.layers(self.function(x))

    return Own


@pytest.mark.parametrize(
    "change",
    [{"activation": nn.Tanh}, {"rate": 0.9}, {"eps": 1e-3}, {"function": torch.tanh}],
    ids=lambda change: next(iter(change)),
)
def test_a_network_that_computes_something_else_is_refused(tmp_path, change):
    settings = {**SETTINGS, "checkpoint_dir": tmp_path}
    ds.fit(ds.DeepEnsemble(rebuilt(), 2), (x, y), **settings)
    ds.fit(ds.DeepEnsemble(rebuilt(), 2), (x, y), resume=True, **settings)
    with pytest.raises(CheckpointError, match="another architecture"):
        ds.fit(ds.DeepEnsemble(rebuilt(**change), 2), (x, y), resume=True, **settings)


def weighted(factor):
    return lambda epoch, epochs: factor


def other_row(values, row):
    values = values.clone()
    values[row] += 1
    return values


@pytest.mark.parametrize(
    "change",
    [{"validation": (x[:20], y[20:40])}, {"data": (other_row(x, 77), y)}, {"schedule": weighted(0.5)}],
    ids=["validation", "data", "closure"],
)
def test_other_data_and_other_values_of_closures_are_refused(tmp_path, change):
    settings = {"data": (x, y), "validation": (x[:20], y[:20]), "schedule": weighted(1.0), **SETTINGS}
    ds.fit(ds.DeepEnsemble(net, 2), checkpoint_dir=tmp_path, **settings)
    with pytest.raises(CheckpointError, match="other settings"):
        ds.fit(ds.DeepEnsemble(net, 2), checkpoint_dir=tmp_path, **{**settings, **change, "resume": True})


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    trained(tmp_path)
    with pytest.raises(ValueError, match="resume=True"):
        trained(tmp_path)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    trained(tmp_path)
    wider = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3)), 3)
    with pytest.raises(CheckpointError, match="another architecture"):
        ds.fit(wider, (x, y), checkpoint_dir=tmp_path, resume=True, **SETTINGS)


def test_a_checkpoint_of_other_settings_is_refused_and_the_setting_named(tmp_path):
    trained(tmp_path)
    with pytest.raises(CheckpointError, match=r"lr is 0\.02 there and 0\.5 here"):
        trained(tmp_path, resume=True, lr=0.5)


def test_resuming_a_finished_run_gives_its_weights(tmp_path):
    first = trained(tmp_path)
    ens = ds.DeepEnsemble(net, 3)
    again = ds.fit(ens, (x, y), checkpoint_dir=tmp_path, resume=True, **SETTINGS)
    assert torch.equal(ds.predict(ens, x), ds.predict(first.members, x))
    assert again.step == first.step


class Fragile(nn.Module):
    """The second of three diverges."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("blow", torch.tensor(float("inf") if Fragile.made % 3 == 1 else 0.0))
        Fragile.made += 1

    def forward(self, x):
        return self.linear(x) + (self.blow if self.training else 0.0)


def test_a_run_that_dropped_a_member_resumes_without_it(tmp_path):
    settings = {"data": (x, y), **SETTINGS, "on_divergence": "drop"}
    whole = ds.DeepEnsemble(Fragile, 3)
    ds.fit(whole, **settings)
    ens, run = interrupted(tmp_path, Fragile, **settings)
    assert run.dropped == [1]
    assert torch.equal(ds.predict(ens, x), ds.predict(whole, x))
    untouched = ds.DeepEnsemble(Fragile, 3)
    with pytest.raises(CheckpointError, match=r"lr is 0\.02 there and 0\.5 here"):
        ds.fit(untouched, checkpoint_dir=tmp_path, resume=True, **settings | {"lr": 0.5})
    assert untouched.num_members == len(untouched.net.linear.weight) == 3


def test_history_grows_on_disk(tmp_path):
    lines = []
    trained(tmp_path, callback=lambda run: lines.append(len((tmp_path / "history.csv").read_text().splitlines())))
    assert lines == [1 + 3 * checks for checks in range(1, 7)]


def test_divergence_leaves_the_last_good_checkpoint_intact(tmp_path):
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            if not self.training:
                return self.linear(x)
            self.steps += 1
            return self.linear(x) + torch.where(self.steps > 9, float("nan"), 0.0)

    ens = ds.DeepEnsemble(Later, 2)
    with pytest.raises(ds.DivergedError, match="checkpoint"):
        ds.fit(ens, (x, y), checkpoint_dir=tmp_path, epochs=6, batch_size=25)
    _, facts, _ = CheckpointFolder(tmp_path).load()
    assert facts["epoch"] == 2
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in facts["history"])


def test_a_finished_run_keeps_weights_only_and_twice(tmp_path):
    def half(run):
        if run.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, callback=half)
    before, _, _ = CheckpointFolder(tmp_path).load()
    first = trained(tmp_path, resume=True)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    after, _, _ = CheckpointFolder(tmp_path).load()
    assert after.keys() < before.keys()
    files[0].unlink()
    again = trained(tmp_path, resume=True)
    assert torch.equal(ds.predict(again.members, x), ds.predict(first.members, x))
