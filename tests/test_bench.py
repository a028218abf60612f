"""The benchmark: every side does its work, ratios mean what they say, and a worse one is noticed."""

import itertools
import json
import math
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dissensus as ds
from dissensus import cli
from dissensus import objectives as obj
from dissensus._threads import one_thread
from dissensus.bench import cases, masked, one_run, peers, timing
from dissensus.bench.cached_heads import STRENGTH, Size, _guided_loss, cost_rows, guided_heads
from dissensus.bench.cases import CASES, LOOP, STACKED, Options, heads_results, resnet_result, training_result
from dissensus.bench.check import (
    check_comparable,
    find_slower,
    flat_ratios,
    keep_better,
    keep_worse,
    read_stored,
)
from dissensus.bench.inference import BARE, PREDICT, SCORED, compare_inference
from dissensus.bench.masked import ENSEMBLE, MEMBERS, PLAIN, SPLIT, masked_inference, masked_training
from dissensus.bench.problems import Problem, mlp, mlp_problem
from dissensus.bench.report import missing_peers, print_results, scaling_figure, write_results
from dissensus.bench.rivals import Turn, plain_loop, stacked_by_hand, stacked_forward
from dissensus.data.augment import HorizontalFlip
from dissensus.objectives.objective import Step

TINY = mlp_problem(3, (4, 8, 1), batch=8, steps=4, turn_steps=2, device="cpu")


def result(ratio=2.0, case="small-mlps", what="a job", name="captured against plain loop"):
    return {
        "case": case,
        "what": what,
        "sides": {"ds.fit, captured": {"ms": 1.0}, LOOP: {"ms": ratio}},
        "ratios": {name: ratio},
        "missing": {"JAX vmap + scan": "not installed"},
    }


def stored_file(folder, results, **about):
    path = folder / "stored.json"
    path.write_text(json.dumps({"about": {"device": "cpu", "quick": True} | about, "results": results}))
    return path


@pytest.fixture
def no_peers(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)


@pytest.fixture
def one_case(monkeypatch):
    """A single case, `small-mlps`, that takes its results from a list, run by run."""
    found = []
    case = cases.Case("A case.", lambda options: [result(found.pop(0))])
    monkeypatch.setattr(one_run, "CASES", {"small-mlps": case})
    return found


def check_result(entry):
    assert set(entry) >= {"case", "what", "sides", "ratios", "missing"}
    assert entry["case"] in CASES
    numbers = [*entry["ratios"].values(), *(side["ms"] for side in entry["sides"].values())]
    assert numbers
    assert all(math.isfinite(value) and value > 0 for value in numbers)
    json.dumps(entry)


@pytest.mark.parametrize("make", [plain_loop, stacked_by_hand])
def test_rivals_train_every_member(monkeypatch, make):
    nets = [mlp((4, 8, 1)) for _ in range(3)]
    made = iter(nets)
    problem = replace(TINY, make=lambda: next(made), lr=0.05, turn_steps=60)
    stacked = []
    original = torch.func.stack_module_state
    monkeypatch.setattr(
        "dissensus.bench.rivals.stack_module_state", lambda nets: stacked.append(original(nets)) or stacked[0]
    )
    before = [problem.mean_loss(net(problem.x), problem.y).item() for net in nets]
    make(problem).run()
    if stacked:
        outputs = stacked_forward(nets[0], shared_inputs=True)(*stacked[0], problem.x)
    else:
        outputs = [net(problem.x) for net in nets]
    after = [problem.mean_loss(output, problem.y).item() for output in outputs]
    assert all(late < 0.7 * early for early, late in zip(before, after, strict=True))


def test_a_step_of_the_stacked_program_is_a_step_of_the_loop(monkeypatch):
    nets = [mlp((4, 8, 1)).double() for _ in range(3)]
    twins = [mlp((4, 8, 1)).double() for _ in range(3)]
    for net, twin in zip(nets, twins, strict=True):
        twin.load_state_dict(net.state_dict())
    rows = torch.randint(len(TINY.x), (3, 5, 8))
    monkeypatch.setattr("dissensus.bench.rivals._draw", lambda problem, members: rows)
    double = replace(TINY, x=TINY.x.double(), y=TINY.y.double(), optimizer="sgd", lr=0.1, turn_steps=5)
    held = []
    original = torch.func.stack_module_state
    monkeypatch.setattr(
        "dissensus.bench.rivals.stack_module_state", lambda nets: held.append(original(nets)) or held[0]
    )
    for make, own in ((plain_loop, nets), (stacked_by_hand, twins)):
        made = iter(own)
        make(replace(double, make=lambda made=made: next(made))).run()
    for name, weights in held[0][0].items():
        torch.testing.assert_close(weights, torch.stack([net.state_dict()[name] for net in nets]))


def test_the_loop_trains_only_the_members_that_a_step_picks():
    nets = [nn.Linear(4, 3) for _ in range(6)]
    before = [net.weight.clone() for net in nets]
    made = iter(nets)
    y = torch.randint(0, 3, (len(TINY.x),))
    problem = Problem(6, lambda: next(made), TINY.x, y, 8, 1, "cross_entropy", "adamw", picked=2)
    plain_loop(problem).run()
    changed = [not torch.equal(net.weight, old) for net, old in zip(nets, before, strict=True)]
    assert sum(changed) == 2


def test_picking_trains_so_many_members_of_ours():
    ens = ds.DeepEnsemble(lambda: nn.Linear(4, 3), 6)
    before = ens(TINY.x).detach()
    y = torch.randint(0, 3, (len(TINY.x),))
    ds.fit(
        ens,
        (TINY.x, y),
        objective=timing.PickSome(count=2),
        epochs=1,
        batch_size=len(y),
        engine="eager",
        device="cpu",
    )
    assert (ens(TINY.x) - before).flatten(1).abs().amax(1).gt(0).sum() == 2


def test_sides_are_timed_in_turns():
    order = []
    rivals = {"a": Turn(lambda: order.append("a")), "b": Turn(lambda: order.append("b"))}
    watch = timing.Stopwatch(rivals, TINY.device)
    timing.time_fit(TINY, "eager", watch, repeats=3)
    assert order == ["a", "b"] * 4, "one turn to warm up, and one after each epoch that counts"


def test_a_turn_may_say_what_of_it_counts():
    assert timing.seconds_a_step(Turn(lambda: 6.0, steps=3), TINY.device) == 2.0


def test_time_is_a_step_and_the_best_of_all_rounds(monkeypatch):
    times = itertools.accumulate([0, 10, 0, 8, 0, 6, 0, 9])
    monkeypatch.setattr(timing, "clock", lambda device: next(times))
    watch = timing.Stopwatch({"a": Turn(lambda: None, steps=2)}, TINY.device)
    for _ in range(3):
        watch.round()
    assert watch.best == {"a": 3.0}


def test_a_ratio_is_the_rivals_time_over_ours(no_peers):
    entry = training_result("small-mlps", "tiny", TINY, ("eager", "captured"), repeats=2)
    check_result(entry)
    assert set(entry["sides"]) == {"ds.fit, eager", "ds.fit, captured", LOOP, STACKED}
    for engine, rival in itertools.product(("eager", "captured"), (LOOP, STACKED)):
        ratio = entry["sides"][rival]["ms"] / entry["sides"][f"ds.fit, {engine}"]["ms"]
        assert entry["ratios"][f"{engine} against {rival}"] == pytest.approx(ratio)


def test_heads_compare_the_cost_of_many_members_with_that_of_few(monkeypatch):
    # The machine is half as fast when the second is measured, and many members cost 1.5 times as much.
    times = iter([({"ds.fit, eager": 2.0}, 4.0), ({"ds.fit, eager": 6.0}, 8.0)])

    def fake(problem, engines, rivals, *, repeats):
        ours, yard = next(times)
        ms = ours | dict.fromkeys(rivals, yard)
        return {name: {"ms": value} for name, value in ms.items()}, {
            f"eager against {name}": 1.0 for name in rivals
        }

    monkeypatch.setattr(cases, "compare", fake)
    few, many = heads_results("cpu", (2, 5), (6, 4, 3), 8, 4, 2, "eager", repeats=2)
    assert set(few["ratios"]) == {"eager against plain loop"}
    assert many["ratios"]["cost of 2 members / cost of 5"] == pytest.approx(1 / 1.5)


def test_heads_are_measured_at_every_number_of_members():
    entries = heads_results("cpu", (2, 5), (6, 4, 3), 8, 4, 2, "eager", repeats=2)
    for entry in entries:
        check_result(entry)
    assert [entry["what"][:9] for entry in entries] == ["2 of 2 he", "2 of 5 he"]


def test_the_image_case_has_one_model_beside_the_ensemble():
    def make():
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))

    x, y = torch.randn(32, 1, 4, 4), torch.randint(0, 3, (32,))
    problem = Problem(2, make, x, y, 8, 2, "cross_entropy", "sgd", augment=HorizontalFlip())
    entry = resnet_result("tiny", problem, "eager", repeats=2, in_flight=1)
    check_result(entry)
    assert {"one eager model", "one model, ds.fit, eager", "ds.fit, eager, 1 in flight"} <= set(
        entry["sides"]
    )


def test_inference_compares_with_bare_forward_passes():
    entry = compare_inference("tiny", 3, lambda: mlp((4, 8, 3)), (4,), 20, 8, device="cpu", repeats=2)
    check_result(entry)
    ratio = entry["sides"][BARE]["ms"] / entry["sides"][SCORED]["ms"]
    assert entry["ratios"][f"{SCORED} against {BARE}"] == pytest.approx(ratio)
    assert entry["sides"][PREDICT]["inputs_per_s"] == pytest.approx(20e3 / entry["sides"][PREDICT]["ms"])


def small_convolutional_net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 3),
    )


def test_masked_networks_are_compared_with_the_plain_one_and_with_their_members():
    x, y = torch.randn(32, 1, 6, 6), torch.randint(0, 3, (32,))
    problem = Problem(1, small_convolutional_net, x, y, 8, 2, "cross_entropy", "sgd")
    training = masked_training("tiny", problem, 4, "eager", repeats=2)
    check_result(training)
    assert set(training["sides"]) == {SPLIT, PLAIN, masked.LOOP}
    found = masked_inference("tiny", small_convolutional_net, 4, (1, 6, 6), 20, 8, device="cpu", repeats=2)
    check_result(found)
    ratio = found["sides"][MEMBERS]["ms"] / found["sides"][ENSEMBLE]["ms"]
    assert found["ratios"] == {f"{ENSEMBLE} against {MEMBERS}": pytest.approx(ratio)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("quick", [True, False])
def test_every_case_puts_its_jobs_together(monkeypatch, name, quick):
    # Measuring replaced: what is left is the choice of sizes, engines and names.
    def fake(problem, engines, rivals, **kwargs):
        sides = [*(f"ds.fit, {engine}" for engine in engines), *rivals]
        ratios = {f"{engine} against {rival}": 1.0 for engine in engines for rival in rivals}
        return {name: {"ms": 1.0} for name in sides}, ratios

    monkeypatch.setattr(cases, "compare", fake)
    monkeypatch.setattr(cases, "time_fit", lambda *args, **kwargs: {"ms": 1.0})
    monkeypatch.setattr(cases, "compare_inference", lambda what, *a, **k: result(1.0, "inference", what))
    for measured in ("masked_training", "masked_inference"):
        monkeypatch.setattr(cases, measured, lambda what, *a, **k: result(1.0, "masksembles", what))
    monkeypatch.setattr(
        cases,
        "guided_heads",
        lambda device, size, counts, *a: [result(1.0, "ldr-imagenet-size", f"{m} of {size}") for m in counts],
    )
    entries = CASES[name].run(Options(quick=quick))
    for entry in entries:
        check_result(entry)
        assert entry["case"] == name
    assert len({entry["what"] for entry in entries}) == len(entries)


def test_guided_heads_are_measured_at_every_number_of_heads(capsys):
    entries = guided_heads("cpu", Size(64, 6, 3, 16), (2, 5), "eager", repeats=2, turn_steps=2)
    for entry in entries:
        check_result(entry)
    assert [entry["what"][:12] for entry in entries] == ["2 of 2 heads", "2 of 5 heads"]
    assert set(entries[1]["ratios"]) == {"eager against per-module loop", "cost of 2 heads / cost of 5"}
    rows = cost_rows(entries)
    assert rows[0][3] == 1.0
    assert rows[1][2] == pytest.approx(rows[1][1] * 4 / 1e3)
    assert 1 / rows[1][3] == pytest.approx(entries[1]["ratios"]["cost of 2 heads / cost of 5"])
    print_results(entries)
    assert capsys.readouterr().out.count("s an epoch") == 2


def test_the_loop_by_hand_minimises_what_the_objective_does():
    logits, y = torch.randn(2, 16, 4, dtype=torch.float64), torch.randint(0, 4, (16,))
    keys = torch.arange(2)
    step = Step(torch.tensor(0), 10, False, keys, torch.tensor(0))
    loss, _ = obj.LossGuided(STRENGTH, guard=None).on_outputs(logits, y, step)
    torch.testing.assert_close(_guided_loss(logits, y), loss)


def test_reasons_of_several_cases_are_told_once():
    entries = [result(), result(), result() | {"missing": {"JAX vmap + scan": "for MLPs"}}]
    assert missing_peers(entries) == {"JAX vmap + scan": "not installed; for MLPs"}


def test_only_ratios_worse_than_the_tolerance_are_slower():
    now, stored = {"a": 1.0, "b": 1.0, "new": 1.0}, {"a": 1.49, "b": 1.51, "old": 9.0}
    assert [worse.name for worse in find_slower(now, stored)] == ["b"]


def test_nothing_in_common_is_an_error_and_not_a_pass():
    with pytest.raises(ValueError, match="None of the stored ratios"):
        find_slower({"a": 1.0}, {"b": 1.0})


def test_ratios_that_only_one_side_has_are_named(tmp_path, one_case):
    one_case.append(4.0)
    gone, elsewhere = result(9.0, what="another job"), result(9.0, case="heads")
    ended = bench(tmp_path, "--check", stored_file(tmp_path, [result(4.0), gone, elsewhere]))
    assert ended.exit_code == 0
    told = [line for line in ended.stderr.splitlines() if "Not compared" in line]
    assert told == [
        "Not compared, as it was not measured in this run: small-mlps | another job | captured against plain loop"
    ]
    both = result(4.0) | {"ratios": {"captured against plain loop": 4.0, "auto against plain loop": 1.0}}
    one_run.CASES["small-mlps"] = cases.Case("A case.", lambda options: [both])
    ended = bench(tmp_path, "--check", stored_file(tmp_path, [result(4.0)]))
    assert "Not compared, as it is not stored: small-mlps | a job | auto against plain loop" in ended.stderr


def test_of_two_measurements_the_better_one_counts():
    both = keep_better(result(2.0), result(3.0))
    assert both["ratios"] == {"captured against plain loop": 3.0}
    assert both["sides"][LOOP] == {"ms": 2.0}


def test_what_is_stored_of_several_runs_is_the_worse_ratio():
    both = keep_worse(result(2.0), result(3.0))
    assert both["ratios"] == {"captured against plain loop": 2.0}


def test_a_reference_is_stored_from_several_runs(tmp_path, monkeypatch, one_case):
    one_case += [3.0, 2.0, 4.0]
    script = Path(__file__).parents[1] / "benchmarks" / "speed.py"
    stored = tmp_path / "reference.json"
    asked = ["--device", "cpu", "--quick", "--cases", "small-mlps", "--runs", "3"]
    places = ["--output", str(tmp_path / "out"), "--store", str(stored)]
    monkeypatch.setattr("sys.argv", [str(script), *asked, *places])
    runpy.run_path(str(script), run_name="__main__")
    assert [*flat_ratios(read_stored(stored)["results"]).values()] == [2.0]


@pytest.mark.parametrize("about", [{"device": "cuda"}, {"quick": False}])
def test_only_runs_of_one_kind_are_compared(about):
    with pytest.raises(ValueError, match="same way"):
        check_comparable(
            {"device": "cpu", "quick": True} | about, {"about": {"device": "cpu", "quick": True}}
        )


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"about": {}, "results": []}'])
def test_a_file_that_is_no_result_is_refused(tmp_path, text):
    path = tmp_path / "stored.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"results\.json"):
        read_stored(path)


def bench(tmp_path, *arguments):
    given = [
        "bench",
        "--device",
        "cpu",
        "--quick",
        "--cases",
        "small-mlps",
        "--output",
        str(tmp_path / "out"),
    ]
    return CliRunner().invoke(cli.app, [*given, *map(str, arguments)])


def test_check_fails_on_a_ratio_that_stays_worse(tmp_path, one_case):
    one_case += [2.0, 2.1, 2.6, 2.0]
    ended = bench(tmp_path, "--check", stored_file(tmp_path, [result(4.0)]))
    assert ended.exit_code == 1
    assert "Slower than stored" in ended.stderr
    assert "2.6, stored 4 (1.54 x worse)" in ended.stderr, "the best of all measurements"
    assert one_case == [], "measured three times more before it is believed"


@pytest.mark.parametrize("measured", [[2.0, 3.9], [2.0, 1.0, 3.9], [2.0, 1.0, 2.0, 3.9]])
def test_check_passes_once_a_measurement_is_good(tmp_path, one_case, measured):
    one_case += [*measured, 99.0]
    assert bench(tmp_path, "--check", stored_file(tmp_path, [result(4.0)])).exit_code == 0
    assert one_case == [99.0]


def test_check_measures_once_when_nothing_is_worse(tmp_path, one_case):
    one_case += [3.0, 99.0]
    assert bench(tmp_path, "--check", stored_file(tmp_path, [result(4.0)])).exit_code == 0
    assert one_case == [99.0]


def test_the_command_writes_results_figures_and_a_page(tmp_path, one_case):
    one_case.append(3.0)
    ended = bench(tmp_path)
    assert ended.exit_code == 0, ended.output
    assert {"results.json", "small-mlps.svg", "small-mlps.png", "report.html"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    written = read_stored(tmp_path / "out" / "results.json")
    assert flat_ratios(written["results"]) == {"small-mlps | a job | captured against plain loop": 3.0}
    assert {"date", "processor", "cores", "python", "versions"} <= set(written["about"])
    assert "torch" in written["about"]["versions"]


def test_scaling_is_drawn_as_a_line_for_each_side(tmp_path):
    points = [result(value, "scaling") | {"axis": "members", "value": value} for value in (1, 10, 100)]
    (ax,) = scaling_figure(points).axes
    assert [line.get_xdata().tolist() for line in ax.lines] == [[1, 10, 100]] * 2
    write_results(tmp_path, {"device": "cpu"}, points)
    assert (tmp_path / "scaling.svg").exists()


def test_without_matplotlib_there_is_a_page_without_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr("dissensus.bench.report.find_spec", lambda name: None)
    page = write_results(tmp_path, {"device": "cpu"}, [result()])
    assert "<svg" not in page.read_text()
    assert not list(tmp_path.glob("*.svg"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--cases", "smal-mlps"), "'smal-mlps'"),
        (("--engines", "fast"), "'fast'"),
        (("--device", "tpu"), "'tpu'"),
        (("--check", "nowhere.json"), "nowhere.json"),
    ],
)
def test_what_cannot_be_measured_ends_in_one_sentence(tmp_path, arguments, word):
    ended = bench(tmp_path, *arguments)
    assert ended.exit_code == 2
    assert word in ended.stderr


def test_the_stored_reference_is_a_quick_run_on_a_cpu():
    stored = read_stored(Path(__file__).parents[1] / "benchmarks" / "reference.json")
    assert (stored["about"]["device"], stored["about"]["quick"]) == ("cpu", True)
    names = {entry["case"] for entry in stored["results"]}
    assert names == set(cases.default_cases(quick=True))


def test_threads_are_set_back():
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
