"""The benchmark: every side does its work, ratios mean what they say, and a worse one is noticed."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from bench_records import result
from dissensus_bench import cases, masked, one_run, peers, timing
from dissensus_bench.cached_heads import STRENGTH, Size, _guided_loss, cost_rows, guided_heads
from dissensus_bench.cases import CASES, LOOP, STACKED, Options, heads_results, resnet_result, training_result
from dissensus_bench.encoders import encoder_problems
from dissensus_bench.inference import BARE, PREDICT, SCORED, compare_inference
from dissensus_bench.masked import ENSEMBLE, MEMBERS, PLAIN, SPLIT, masked_inference, masked_training
from dissensus_bench.problems import Problem, mlp, mlp_problem
from dissensus_bench.report import print_results
from dissensus_bench.rivals import Turn, plain_loop, stacked_by_hand, stacked_forward
from torch import nn

import dissensus as ds
from dissensus import objectives as obj
from dissensus.data.augment import HorizontalFlip
from dissensus.objectives.objective import Step

TINY = mlp_problem(3, (4, 8, 1), batch=8, steps=4, turn_steps=2, device="cpu")


@pytest.fixture
def no_peers(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)


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
        "dissensus_bench.rivals.stack_module_state", lambda nets: stacked.append(original(nets)) or stacked[0]
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
    monkeypatch.setattr("dissensus_bench.rivals._draw", lambda problem, members: rows)
    double = replace(TINY, x=TINY.x.double(), y=TINY.y.double(), optimizer="sgd", lr=0.1, turn_steps=5)
    held = []
    original = torch.func.stack_module_state
    monkeypatch.setattr(
        "dissensus_bench.rivals.stack_module_state", lambda nets: held.append(original(nets)) or held[0]
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
        ens, (TINY.x, y), objective=timing.PickSome(count=2), epochs=1, batch_size=len(y), engine="eager", device="cpu"
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
        return {name: {"ms": value} for name, value in ms.items()}, {f"eager against {name}": 1.0 for name in rivals}

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
    assert {"one eager model", "one model, ds.fit, eager", "ds.fit, eager, 1 in flight"} <= set(entry["sides"])


def test_inference_compares_with_bare_forward_passes():
    entry = compare_inference("tiny", 3, lambda: mlp((4, 8, 3)), (4,), 20, 8, device="cpu", repeats=2)
    check_result(entry)
    ratio = entry["sides"][BARE]["ms"] / entry["sides"][SCORED]["ms"]
    assert entry["ratios"][f"{SCORED} against {BARE}"] == pytest.approx(ratio)
    assert entry["sides"][PREDICT]["inputs_per_s"] == pytest.approx(20e3 / entry["sides"][PREDICT]["ms"])


def small_convolutional_net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
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


def test_transformers_are_trained_beside_a_loop_over_them():
    """Of a text only what the mask shows counts, and both sides learn from the same tree."""
    (what, problem), (_, images) = encoder_problems("cpu", quick=True).items()
    assert "BERT" in what
    torch.manual_seed(0)
    net = problem.make()
    x, y = problem.rows(torch.arange(16))
    noise = torch.randint_like(x["input_ids"], 200)
    changed = x | {"input_ids": torch.where(x["attention_mask"] == 1, x["input_ids"], noise)}
    assert not torch.equal(changed["input_ids"], x["input_ids"])
    torch.testing.assert_close(problem.outputs(net, changed), problem.outputs(net, x))
    few = replace(problem, members=1, make=lambda: net, turn_steps=60, lr=1e-2)
    before = problem.mean_loss(problem.outputs(net, x), y).item()
    plain_loop(few).run()
    assert problem.mean_loss(problem.outputs(net, x), y).item() < 0.5 * before
    assert images.outputs(images.make(), images.x[:2]).shape == (2, 10)
    entry = training_result("transformers", what, problem, ("eager",), repeats=1, alone=True)
    check_result(entry)
    assert set(entry["sides"]) == {"ds.fit, eager", LOOP}


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


def test_what_was_measured_stays_when_a_later_case_fails(tmp_path, monkeypatch):
    done = {"case": "heads", "what": "a job", "sides": {}, "ratios": {"ours": 2.0}, "missing": {}}

    def measure(name, options):
        if name == "resnet":
            raise KeyboardInterrupt
        return [done]

    monkeypatch.setattr("dissensus_bench.one_run._measure", measure)
    with pytest.raises(KeyboardInterrupt):
        one_run.run(tmp_path, device="cpu", cases=["heads", "resnet"])
    assert json.loads((tmp_path / "results.json").read_text())["results"] == [done]
