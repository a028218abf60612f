import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training_helpers import net, norm_net, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.data import augment
from dissensus.training import engines
from dissensus.training.engines import why_not_by_member

images = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
labels = torch.arange(40) % 3


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Conv2d(6, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


@pytest.mark.parametrize(
    "objective",
    [obj.Independent(), obj.Adversarial(obj.Independent(), 0.05), obj.NormPenalty(obj.Independent(), 0.01)],
    ids=lambda o: type(o).__name__,
)
@pytest.mark.parametrize("batches", ["own", "shared"])
def test_a_program_for_each_member_is_the_same_step(monkeypatch, objective, batches):
    settings = {
        "objective": objective,
        "epochs": 3,
        "batch_size": 16,
        "optimizer": "sgd",
        "optimizer_options": {"momentum": 0.9},
        "lr": 0.05,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
        "batches": batches,
        "augment": augment.Compose((augment.RandomCrop(1), augment.HorizontalFlip())),
        "engine": "eager",
    }
    whole, apart = ds.DeepEnsemble(conv_net, 3).double(), ds.DeepEnsemble(conv_net, 3).double()
    run = ds.fit(whole, (images.double(), labels), **settings)

    def form(train_step, state):
        assert why_not_by_member(train_step, state) is None
        return "by member"

    monkeypatch.setattr(engines, "form_of", form)
    settings["engine"] = "captured"
    other = ds.fit(apart, (images.double(), labels), **settings)
    torch.testing.assert_close(ds.predict(apart, images.double()), ds.predict(whole, images.double()))
    assert other.history["loss"] == pytest.approx(run.history["loss"], rel=1e-6)
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(apart.get_buffer(name), buffer)


class Counter(nn.Module):
    """Looks at a value of its weights, which a recording cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x) * (1.0 if self.linear.weight.sum().item() < 1e9 else 0.0)


def test_what_cannot_be_recorded_runs_eagerly_and_says_why(caplog):
    with caplog.at_level(logging.INFO, logger="dissensus"):
        run = ds.fit(ds.DeepEnsemble(Counter, 2), (x, y), epochs=400, batch_size=20)
    assert run.engine == "eager"
    assert "cannot be traced" in caplog.text
    for settings, advice in (
        ({"engine": "captured"}, "To train, use engine='eager'"),
        ({"concurrent_members": 1}, "To train, leave `concurrent_members` out"),
        (
            {"concurrent_members": 1, "engine": "captured"},
            "To train, leave `concurrent_members` out and use engine='eager'",
        ),
    ):
        with pytest.raises(ValueError, match=rf"cannot be traced: .*\. {advice}\.$"):
            ds.fit(ds.DeepEnsemble(Counter, 2), (x, y), epochs=2, **settings)


def test_threads_can_record_at_the_same_time():
    with ThreadPoolExecutor(3) as pool:
        runs = list(
            pool.map(
                lambda seed: ds.fit(ds.DeepEnsemble(net, 2, seed=seed), (x, y), epochs=3, engine="captured"), range(3)
            )
        )
    assert [run.engine for run in runs] == ["captured"] * 3


def test_training_inside_no_grad_trains():
    with torch.no_grad():
        run = ds.fit(ds.DeepEnsemble(net, 2), (x, y), epochs=2, engine="captured")
    assert run.step > 0


def test_auto_runs_short_trainings_eagerly_and_long_ones_captured():
    short = ds.fit(ds.DeepEnsemble(net, 2), (x, y), epochs=1)
    long = ds.fit(ds.DeepEnsemble(net, 2), (x, y), epochs=300, batch_size=10)
    assert (short.engine, long.engine) == ("eager", "captured")


def test_compiling_is_a_rule_of_steps_and_work():
    def replay(operations, work):
        state = SimpleNamespace(index=torch.zeros(()))
        return SimpleNamespace(form="whole", work=(operations, work), units=[()], state=state)

    # An MLP's step takes half a millisecond and compiling it eight seconds.
    assert [engines.compiling_pays(replay(100, 1e5), steps) for steps in (10_000, 100_000)] == [False, True]
    # A step of ten seconds of arithmetic repays at once.
    assert engines.compiling_pays(replay(1500, 2e11), 20)


def test_auto_compiles_where_it_pays_and_not_the_smaller_last_batch(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        "dissensus.training.engines.compile_program", lambda program, combine: compiled.append(1) or program
    )
    monkeypatch.setattr(engines, "COMPILE_SECONDS", -1e9)
    monkeypatch.setattr(engines, "TRACE_STEPS", 0)
    ens = ds.DeepEnsemble(norm_net, 2)
    run = ds.fit(ens, (x, y), epochs=3, batch_size=30)
    assert (run.engine, len(compiled)) == ("compiled", 1)
    eager = ds.DeepEnsemble(norm_net, 2)
    ds.fit(eager, (x, y), epochs=3, batch_size=30, engine="eager")
    torch.testing.assert_close(ds.predict(ens, x), ds.predict(eager, x))


def test_members_one_by_one_are_refused_where_they_are_compared():
    with pytest.raises(ValueError, match="couples members"):
        ds.fit(ds.DeepEnsemble(net, 2), (x, y), objective=obj.Joint(0.5), concurrent_members=1)


@pytest.mark.parametrize("engine", ["auto", "captured", "eager"])
def test_members_in_turn_give_the_same_numbers(engine):
    outputs = []
    for concurrent in (None, 1):
        ens = ds.DeepEnsemble(conv_net, 3).double()
        ds.fit(ens, (images.double(), labels), epochs=2, batch_size=16, concurrent_members=concurrent, engine=engine)
        outputs.append(ds.predict(ens, images.double()))
    torch.testing.assert_close(*outputs)


def test_the_engine_is_kept_on_resume(tmp_path):
    settings = {"epochs": 4, "batch_size": 20, "checkpoint_dir": tmp_path}
    first = ds.fit(ds.DeepEnsemble(net, 2), (x, y), engine="captured", **settings)
    again = ds.fit(ds.DeepEnsemble(net, 2), (x, y), engine="auto", resume=True, **settings)
    assert (first.engine, again.engine) == ("captured", "captured")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["captured", "compiled"])
@pytest.mark.parametrize(
    ("make", "data"),
    [(net, (x, y)), (norm_net, (x, y)), (lambda: net(0.3), (x, y)), (conv_net, (images, labels))],
    ids=["mlp", "batchnorm", "dropout", "convolutions"],
)
def test_engines_on_a_gpu_follow_the_eager_trajectory(make, data, engine):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    settings = {"epochs": 10, "batch_size": 20, "device": "cuda", "optimizer": "sgd", "lr": 0.05, "schedule": "cosine"}
    outputs, curves = [], []
    for name in ("eager", engine):
        ens = ds.DeepEnsemble(make, 3)
        run = ds.fit(ens, data, engine=name, **settings)
        assert run.engine == name
        outputs.append(ds.predict(ens, data[0]))
        curves.append(run.history["loss"])
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["captured", "compiled"])
def test_compared_members_that_convolve_follow_the_eager_trajectory_on_a_gpu(engine):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    curves = []
    for name in ("eager", engine):
        ens = ds.DeepEnsemble(conv_net, 3)
        settings = {"epochs": 10, "batch_size": 20, "device": "cuda", "optimizer": "sgd", "lr": 0.05}
        run = ds.fit(ens, (images, labels), objective=obj.Joint(0.7), engine=name, **settings)
        curves.append(run.history["ensemble_error"])
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


@pytest.mark.parametrize("every", ["epoch", 3])
def test_steps_taken_several_at_once_are_the_same_steps(monkeypatch, every):
    limits = []

    def take(replay, state, limit):
        taken = min(limit, 2)
        limits.append(limit)
        for _ in range(taken):
            replay.train_step(state, replay.size)
        return taken

    runs = []
    monkeypatch.setattr(engines.Replay, "take", take)
    for engine in ("eager", "captured"):
        ens = ds.DeepEnsemble(net, 2)
        run = ds.fit(ens, (x, y), epochs=3, batch_size=7, engine=engine, check_every=every)
        runs.append((run.step, run.history["loss"], ds.predict(ens, x)))
    assert max(limits) > 2
    assert runs[0][:2] == runs[1][:2]
    assert torch.equal(runs[0][2], runs[1][2])


@pytest.mark.gpu
def test_several_steps_in_one_graph_are_the_same_steps(monkeypatch):
    curves, captured = [], []
    # However busy the GPU is.
    monkeypatch.setattr(engines, "SHORT_MS", float("inf"))
    capture = engines.GraphReplay._capture
    monkeypatch.setattr(
        engines.GraphReplay, "_capture", lambda self, steps: captured.append(steps) or capture(self, steps)
    )
    for least in (10**9, 0):
        monkeypatch.setattr(engines, "MANY_STEPS", least)
        run = ds.fit(ds.DeepEnsemble(net, 3), (x, y), epochs=60, batch_size=4, device="cuda", engine="captured")
        curves.append(run.history["loss"])
    assert engines.AT_ONCE in captured
    assert curves[0] == curves[1]


@pytest.mark.gpu
def test_training_on_a_gpu_is_training_on_the_cpu():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    outputs = []
    for device in ("cpu", "cuda"):
        ens = ds.DeepEnsemble(lambda: net(0.3), 3).double()
        ds.fit(ens, (x.double(), y), epochs=5, batch_size=20, device=device)
        outputs.append(ds.predict(ens, x.double().to(device)).cpu())
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_loader_feeds_a_captured_step():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=20)
    outputs = []
    for engine in ("eager", "captured"):
        ens = ds.DeepEnsemble(net, 2)
        ds.fit(ens, loader, epochs=5, device="cuda", engine=engine)
        outputs.append(ds.predict(ens, x))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_recurrent_members_train_on_a_gpu():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 6, batch_first=True)
            self.out = nn.Linear(6, 3)

        def forward(self, x):
            return self.out(self.rnn(x[:, None])[0][:, -1])

    run = ds.fit(ds.DeepEnsemble(Recurrent, 2), (x, y), epochs=20, batch_size=20, lr=0.05, device="cuda")
    assert run.history.by_epoch("loss")[-1] < run.history.by_epoch("loss")[0]


@pytest.mark.gpu
def test_the_cost_of_a_step_that_picks_two_does_not_depend_on_how_many_there_are():
    import time

    class PickTwo(obj.Independent):
        batches = "shared"

        def pick(self, step, num_members):
            return step.noise(shared=True).uniform(num_members).topk(2).indices

    def seconds(members):
        stamps = []

        def stamp(run):
            torch.cuda.synchronize()
            stamps.append(time.perf_counter())

        ens = ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 100)), members)
        data = torch.randn(25600, 256), torch.randint(0, 100, (25600,))
        ds.fit(
            ens, data, objective=PickTwo(), epochs=6, batch_size=256, engine="captured", device="cuda", callback=stamp
        )
        return min(b - a for a, b in itertools.pairwise(stamps))

    # Rows of few members stay in the cache, so a little more time for many is no dependence on their number.
    few, many = seconds(2), seconds(300)
    assert many < 1.5 * few
