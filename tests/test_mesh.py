"""Several processes train what one process trains: members and batches spread over a mesh."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from mesh_case import OBJECTIVES, train, x, y

import dissensus as ds

HERE = Path(__file__).parent
SPREAD = [(name, (size, 1)) for name in OBJECTIVES if name != "loss-guided, two" for size in (2, 4)]
CUT = [(name, mesh) for name in OBJECTIVES for mesh in ((1, 2), (1, 4), (2, 2))]
CUT = [case for case in CUT if not (case[0] == "loss-guided, two" and case[1][0] > 1)]
OTHERS = {
    "uneven": ("joint", (2, 1), {"members": 5}),
    "uneven batch": ("joint", (1, 2), {"batch_size": 7}),
    "stops early": ("independent", (2, 1), {"patience": 1, "lr": 0.5, "epochs": 12}),
    "drawn": ("loss-guided, two", (2, 1), {}),
    "too few": ("independent", (4, 1), {"members": 3}),
    "another size": ("independent", (2, 1), {}),
}


def torchrun(processes, *arguments, **options):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    return subprocess.Popen([*command, *map(str, arguments)], env=environment, **options)


def name_of(objective, mesh):
    return f"{objective} on {mesh[0]} x {mesh[1]}"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What came out of every case, from one torchrun of two processes and one of four."""
    cases = [(name_of(*case), *case, {}) for case in SPREAD + CUT]
    cases += [(name, *case) for name, case in OTHERS.items()]
    results = {}
    for processes in (2, 4):
        output = tmp_path_factory.mktemp("mesh") / "found.json"
        process = torchrun(processes, HERE / "mesh_case.py", json.dumps(cases), output)
        assert process.wait(timeout=280) == 0
        results |= json.loads(output.read_text())
    return results


def alone(objective, **settings):
    ens, run = train(objective, None, **settings)
    return ds.predict(ens, x), run


@pytest.mark.parametrize(("objective", "mesh"), SPREAD, ids=str)
def test_spread_members_are_those_of_one_process(found, objective, mesh):
    outputs, run = alone(objective)
    result = found[name_of(objective, mesh)]
    assert result["alike"]
    # Sums in another order: the products of fewer members may be laid out differently.
    torch.testing.assert_close(torch.tensor(result["outputs"]), outputs, rtol=1e-5, atol=1e-6)
    assert result["loss"] == pytest.approx(run.history["loss"], rel=1e-5)


@pytest.mark.parametrize(("objective", "mesh"), CUT, ids=str)
def test_cut_batches_give_the_same_to_rounding(found, objective, mesh):
    outputs, _ = alone(objective)
    result = found[name_of(objective, mesh)]
    assert result["alike"]
    torch.testing.assert_close(torch.tensor(result["outputs"]), outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["uneven", "uneven batch", "stops early"])
def test_what_does_not_divide_and_early_stops_are_as_in_one_process(found, name):
    objective, _, settings = OTHERS[name]
    outputs, run = alone(objective, **settings)
    assert found[name]["alike"]
    assert len(found[name]["loss"]) == len(run.history["loss"])
    torch.testing.assert_close(torch.tensor(found[name]["outputs"]), outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "words"), [("drawn", "draws members"), ("too few", "cannot be spread")])
def test_what_cannot_be_spread_is_refused(found, name, words):
    assert words in found[name]["refused"]


def test_a_mesh_needs_a_process_group():
    with pytest.raises(ValueError, match="torchrun"):
        train("joint", (2, 1))
    with pytest.raises(ValueError, match="two numbers"):
        train("joint", (2,))


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
        f"{','.join(f'{v:.4f}' for v in row)},{'abc'[label]}"
        for row, label in zip(x.tolist(), y.tolist(), strict=True)
    ]
    (folder / "data.csv").write_text("\n".join(["a,b,c,d,y", *rows]) + "\n")
    (folder / "recipe.toml").write_text(RECIPE.format(epochs=epochs))


@pytest.mark.slow
def test_a_run_that_lost_one_process_of_four_goes_on_with_two(tmp_path):
    recipe(tmp_path, epochs=150)
    options = {
        "cwd": tmp_path,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "start_new_session": True,
    }
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
