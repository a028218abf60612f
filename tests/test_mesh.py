"""Several processes train what one process trains: members and batches spread over a mesh."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from mesh_case import OBJECTIVES, seen_of, train, x, y

from dissensus.training.mesh import together

HERE = Path(__file__).parent
EXACT = ("independent", "joint, gathered", "loss-guided")
TRAINED = [name for name in OBJECTIVES if name not in ("adversarial", "loss-guided, two")]
SPREAD = [(name, (2, 1)) for name in (*EXACT, "joint")] + [(name, (4, 1)) for name in TRAINED]
CUT = [(name, (2, 2)) for name in (*EXACT, "joint", "joint, dropped")]
CUT += [("independent", (1, 2)), ("joint", (1, 4)), ("loss-guided, two", (1, 2)), ("loss-guided, two", (1, 4))]
OTHERS = {
    "five": ("independent", (2, 1), {"members": 5}),
    "uneven": ("joint", (2, 1), {"members": 5}),
    "uneven, gathered": ("joint, gathered", (4, 1), {"members": 6}),
    "uneven batch": ("joint", (1, 2), {"batch_size": 7}),
    "stops early": ("independent", (2, 1), {"patience": 1, "lr": 0.5, "epochs": 12}),
    "selects": ("joint", (2, 2), {"select": "validation_loss", "lr": 0.5}),
    "plateau": ("joint", (2, 1), {"plateau": True, "lr": 0.3, "epochs": 10}),
    "drops": ("independent", (2, 1), {"lr": [1e-2, 1e30, 1e-2, 1e-2], "on_divergence": "drop"}),
    "watches": ("joint", (4, 1), {"watch_collusion": True, "lr": 0.05}),
    "norms": ("independent", (2, 1), {"norm": "batch"}),
    "not traced": ("independent", (2, 1), {"norm": "reads", "engine": "auto", "batch_size": 1, "epochs": 9}),
}
# As programs around the exchange of outputs: of none, of means, of all, with parts of a batch, and of what BatchNorm keeps.
CAPTURED = {
    "none": ("independent", (2, 1), {"members": 5}),
    "means": ("joint", (2, 1), {}),
    "all": ("joint, gathered", (4, 1), {"members": 6}),
    "cut": ("joint", (1, 2), {"batch_size": 7}),
    "drawn": ("loss-guided, two", (1, 2), {}),
    "both": ("joint, dropped", (2, 2), {}),
    "norms": ("independent", (2, 1), {"norm": "batch"}),
}
REFUSED = {
    "drawn": ("loss-guided, two", (2, 1), {}, "draws members"),
    "too few": ("independent", (4, 1), {"members": 3}, "cannot be spread"),
    "more than outputs": ("adversarial", (2, 1), {}, "see the members' outputs only; Adversarial"),
    "sharded": ("independent", (2, 1), {"norm": "sharded"}, "Member 0 is sharded over processes (FSDP)"),
    "wrapped": ("independent", (2, 1), {"norm": "wrapped"}, "Member 0 is sharded over processes (FSDP)"),
    "cut norms": ("independent", (1, 2), {"norm": "batch"}, "BatchNorm sees the whole batch"),
    # Not refused by the mesh: torch itself has it on accelerators only.
    "synchronised norms": ("independent", (1, 2), {"norm": "sync"}, "SyncBatchNorm expected input tensor to be on"),
}


# Written on one mesh and broken off, then gone on with on another, or by one process.
RESUMED = {
    "two, then four": ("joint, gathered", (2, 1), (4, 1), {"select": "ensemble_loss"}),
    "two parts, then four": ("independent", (1, 2), (4, 1), {}),
    "programs": ("joint, gathered", (2, 1), (4, 1), {"engine": "captured"}),
    "four, then one": ("independent", (4, 1), None, {"norm": "batch", "members": 5}),
    "other optimizer": ("independent", (2, 1), None, {"rmsprop": True, "members": 5}),
}


def torchrun(processes, *arguments, **options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    return subprocess.Popen([*command, str(processes), *map(str, arguments)], env=environment, **options)


def results_of(cases, folder, processes, backend="gloo"):
    """Return what the first process saw of the cases."""
    process = torchrun(processes, HERE / "mesh_case.py", json.dumps(cases), folder, backend)
    assert process.wait(timeout=280) == 0
    return json.loads((folder / "0.json").read_text())


def name_of(objective, mesh):
    return f"{objective} on {mesh[0]} x {mesh[1]}"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What came out of every case, from one torchrun."""
    cases = [(name_of(*case), *case, {}) for case in SPREAD + CUT]
    cases += [(name, *case[:3]) for name, case in (OTHERS | REFUSED).items()]
    for name, (objective, mesh, settings) in CAPTURED.items():
        for engine in ("eager", "captured"):
            cases.append((f"{name}, {engine}", objective, mesh, settings | {"engine": engine}))
    folder = tmp_path_factory.mktemp("mesh")
    for name, (objective, first, then, settings) in RESUMED.items():
        kept = settings | {"checkpoint_dir": str(folder / name)}
        cases.append((f"{name}, broken off", objective, first, kept | {"stop": 4}))
        if then is not None:
            cases.append((name, objective, then, kept | {"resume": True}))
    results = results_of(cases, folder, 4)
    results["lost"] = [results["lost"]] + [json.loads((folder / f"{rank}.json").read_text()) for rank in (1, 2)]
    results["folder"] = folder
    return results


@functools.cache
def alone(objective, settings="{}"):
    return seen_of(*train(objective, None, **json.loads(settings)))


def difference(result, expected):
    """Return the largest difference of any weight."""
    pairs = [(torch.tensor(result["weights"][name]), torch.tensor(own)) for name, own in expected["weights"].items()]
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize(("objective", "mesh"), SPREAD, ids=str)
def test_spread_members_are_those_of_one_process(found, objective, mesh):
    result, expected = found[name_of(objective, mesh)], alone(objective)
    assert result["alike"]
    if objective in EXACT:
        assert result["weights"] == expected["weights"]
        assert result["history"] == expected["history"]
    else:  # Means over members are summed in another order.
        assert difference(result, expected) < 5e-7


@pytest.mark.parametrize(("objective", "mesh"), CUT, ids=str)
def test_cut_batches_give_the_same_to_rounding(found, objective, mesh):
    result = found[name_of(objective, mesh)]
    assert result["alike"]
    assert difference(result, alone(objective)) < 5e-7


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_decided_on_a_mesh_is_what_one_process_decides(found, name):
    objective, _, settings = OTHERS[name]
    result, expected = found[name], alone(objective, json.dumps(settings))
    assert result["alike"]
    assert result["dropped"] == expected["dropped"]
    assert result["best_step"] == expected["best_step"]
    assert result["history"].keys() == expected["history"].keys()
    for column, values in expected["history"].items():
        assert result["history"][column] == pytest.approx(values, rel=1e-4, abs=1e-5), column
    torch.testing.assert_close(torch.tensor(result["outputs"]), torch.tensor(expected["outputs"]), rtol=1e-4, atol=1e-5)


def test_these_cases_do_what_their_names_say():
    seen = {name: alone(OTHERS[name][0], json.dumps(OTHERS[name][2])) for name in OTHERS}
    assert len(seen["stops early"]["history"]["epoch"]) < 12 * 4
    assert 0 < seen["selects"]["best_step"] < 24
    assert min(seen["plateau"]["history"]["lr_factor"]) < 1
    assert seen["drops"]["dropped"] == [1]
    assert "colluding" in seen["watches"]["history"]


@pytest.mark.parametrize("name", CAPTURED)
def test_programs_around_the_exchange_train_what_eager_steps_train(found, name):
    eager, captured = found[f"{name}, eager"], found[f"{name}, captured"]
    assert (eager["engine"], captured["engine"]) == ("eager", "captured")
    assert captured["alike"]
    assert captured["numbers"] == eager["numbers"]
    # Bit for bit, but that traced BatchNorm adds up in another order.
    assert difference(captured, eager) <= (5e-7 if "norm" in CAPTURED[name][2] else 0)


def test_that_steps_run_eagerly_is_said_once(found):
    (line,) = found["not traced"]["said"]
    assert line.startswith("training runs eagerly: the step cannot be traced (it reads the value")
    assert found["not traced"]["engine"] == "eager"
    assert found["five"]["said"] == found["none, captured"]["said"] == []


def test_member_j_depends_on_seed_and_j_whoever_runs_it(found):
    five, four = found["five"]["weights"], alone("independent")["weights"]
    assert {name: rows[:4] for name, rows in five.items()} == four


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_spread_is_refused(found, name):
    assert REFUSED[name][-1] in found[name]["refused"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_on_another_mesh_or_without_one(found, name):
    objective, first, then, settings = RESUMED[name]
    folder = found["folder"] / name
    assert found[f"{name}, broken off"]["refused"] == "in epoch 4"
    if then is None:
        blocks = {path.name for path in folder.glob("last-000000012*.safetensors")}
        assert blocks == {f"last-000000012-{place}-of-{first[0]}.safetensors" for place in range(first[0])}
        result = seen_of(*train(objective, None, checkpoint_dir=folder, resume=True, **settings))
    else:
        result = found[name]
        assert result["alike"]
    expected = alone(objective, json.dumps(settings))
    # Bit for bit, but for sums in another order: of parts of a batch, and of BatchNorm over fewer members at a time.
    assert difference(result, expected) <= (5e-7 if first[1] > 1 or "norm" in settings else 0)
    assert result["best_step"] == expected["best_step"]


def test_joint_training_exchanges_means_and_not_all_outputs(found):
    steps, members, batch, classes = 24, 4, 12, 3
    gathered = found[name_of("joint, gathered", (4, 1))]["numbers"]
    assert gathered == {"all_gather": steps * members * batch * classes, "all_reduce": 0}
    # The largest and the sum of the label's probability, an example each, and the members' mean error.
    means = found[name_of("joint", (4, 1))]["numbers"]
    assert means == {"all_gather": 0, "all_reduce": steps * (2 * batch + 1)}
    assert set(found[name_of("independent", (4, 1))]["numbers"].values()) == {0}


def test_when_a_process_is_gone_the_others_stop_and_name_it(found):
    for one in found["lost"]:
        assert "Process 3 no longer answers" in one["said"]
        assert one["seconds"] < 60


def test_a_mesh_needs_a_process_group():
    with pytest.raises(ValueError, match="torchrun"):
        train("joint", (2, 1))
    with pytest.raises(ValueError, match="list or tuple of 2"):
        train("joint", (2,))


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="this machine has 1: torchrun --nproc-per-node 1"), together(None):
        pass


# On one GPU, gloo's processes share it; NCCL wants one for each.
ON_GPU = [("independent", {}), ("joint", {}), ("joint, gathered", {}), ("joint", {"norm": "batch"})]
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"NCCL wants a GPU for each of two processes; this machine has {torch.cuda.device_count()}",
)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "mesh"),
    [
        ("nccl", (1, 1)),
        ("gloo", (2, 1)),
        ("gloo", (1, 2)),
        pytest.param("nccl", (2, 1), marks=two_gpus),
        pytest.param("nccl", (1, 2), marks=two_gpus),
    ],
)
def test_on_gpus_a_mesh_trains_what_one_process_trains(tmp_path, backend, mesh):
    cases = {}
    for objective, settings in ON_GPU:
        # Parts of a batch are normalised together.
        here = settings | ({"norm": "sync"} if mesh[1] > 1 and settings else {}) | {"device": "cuda"}
        cases[f"{objective} {settings}"] = (objective, mesh, here)
    seen = results_of([(name, *case) for name, case in cases.items()], tmp_path, mesh[0] * mesh[1], backend)
    for objective, settings in ON_GPU:
        result = seen[f"{objective} {settings}"]
        assert result.get("alike"), result
        expected = alone(objective, json.dumps(settings | {"device": "cuda"}))
        assert difference(result, expected) < (1e-4 if settings else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["captured", "compiled"])
@pytest.mark.parametrize(("backend", "mesh"), [("nccl", (1, 1)), ("gloo", (2, 1)), ("gloo", (1, 2))])
def test_on_gpus_programs_train_what_eager_steps_train(tmp_path, backend, mesh, engine):
    cases = [(each, each, mesh, {"device": "cuda", "engine": engine}) for each in ("independent", "joint, gathered")]
    if mesh[1] > 1:
        cases.append(("sync", "independent", mesh, {"device": "cuda", "engine": engine, "norm": "sync"}))
    seen = results_of(cases, tmp_path, mesh[0] * mesh[1], backend)
    for objective in ("independent", "joint, gathered"):
        assert seen[objective].get("engine") == engine, seen[objective]
        assert difference(seen[objective], alone(objective, json.dumps({"device": "cuda"}))) < 1e-5
    if mesh[1] > 1:
        assert "SyncBatchNorm asks other processes" in seen["sync"]["refused"]


@pytest.mark.slow
def test_compiled_programs_train_what_eager_steps_train(tmp_path):
    cases = [(f"{mesh}", "joint, gathered", mesh, {"engine": "compiled"}) for mesh in ((2, 1), (1, 2))]
    seen = results_of(cases, tmp_path, 2)
    for name in seen.keys() - {"lost"}:
        assert seen[name]["engine"] == "compiled"
        assert difference(seen[name], alone("joint, gathered")) < 5e-7


@pytest.mark.gpu
def test_the_command_trains_under_nccl(tmp_path):
    recipe(tmp_path, epochs=10)
    done = torchrun(1, "-m", "dissensus", "train", "recipe.toml", "-o", "run", "--mesh", "1x1", cwd=tmp_path)
    assert done.wait(timeout=280) == 0
    from dissensus.recipes import load_run

    assert load_run(tmp_path / "run").ensemble.num_members == 4


RECIPE = """
[data]
path = "data.csv"
target = "y"
[model]
name = "mlp"
hidden = [8]
[ensemble]
members = 4
[training]
epochs = {epochs}
batch_size = 12
checkpoint_every = 5
"""


def recipe(folder, epochs):
    rows = [
        f"{','.join(f'{v:.4f}' for v in row)},{'abc'[label]}" for row, label in zip(x.tolist(), y.tolist(), strict=True)
    ]
    (folder / "data.csv").write_text("\n".join(["a,b,c,d,y", *rows]) + "\n")
    (folder / "recipe.toml").write_text(RECIPE.format(epochs=epochs))


@pytest.mark.slow
def test_a_run_that_lost_one_process_of_four_goes_on_with_two(tmp_path):
    recipe(tmp_path, epochs=150)
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    process = torchrun(4, "-m", "dissensus", "train", "recipe.toml", "-o", "run", **options)
    while process.poll() is None and not list(tmp_path.glob("run/last-*.safetensors")):
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()[0].decode()[-2000:]
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    os.kill(int(workers.stdout.split()[-1]), signal.SIGKILL)
    begun = time.monotonic()
    said = process.communicate(timeout=120)[0].decode()
    assert process.returncode != 0
    assert time.monotonic() - begun < 90, said[-2000:]
    done = torchrun(2, "-m", "dissensus", "train", "run", "--resume", "--mesh", "2x1", **options)
    said = done.communicate(timeout=280)[0].decode()
    assert done.returncode == 0, said[-2000:]
    assert said.count("Trained 4 members") == 1
    whole = tmp_path / "whole"
    done = torchrun(2, "-m", "dissensus", "train", "recipe.toml", "-o", whole, **options)
    done.communicate(timeout=280)
    assert done.returncode == 0
    from dissensus.recipes import load_run

    one, other = (load_run(folder).ensemble(x) for folder in (tmp_path / "run", whole))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
