"""Steps in three parts: members' forward passes, a comparison, members' backward passes."""

import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import objectives as obj
from dissensus.data import augment
from dissensus.engines.trace import split_at_last_input
from dissensus.training import engines

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


def trained(objective, engine, kind, monkeypatch, dtype=torch.float64):
    monkeypatch.setattr(engines, "form_of", lambda *_: kind)
    ens = ds.DeepEnsemble(conv_net, 3).to(dtype)
    run = ds.fit(
        ens,
        (images.to(dtype), labels),
        objective=objective,
        epochs=3,
        batch_size=16,
        optimizer="sgd",
        optimizer_options={"momentum": 0.9},
        lr=0.05,
        weight_decay=0.01,
        clip_norm=1.0,
        augment=augment.Compose((augment.RandomCrop(1), augment.HorizontalFlip())),
        engine=engine,
    )
    return ens, run


@pytest.mark.parametrize(
    "objective",
    [obj.Joint(0.7), obj.Joint(0.7, average="scores", member_dropout=0.4), obj.Independent()],
    ids=["joint", "joint with dropped members", "independent"],
)
def test_a_step_in_parts_is_the_whole_step(objective, monkeypatch):
    whole, one = trained(objective, "eager", "whole", monkeypatch)
    parts, other = trained(objective, "captured", "in parts", monkeypatch)
    assert other.engine == "captured"
    torch.testing.assert_close(ds.predict(parts, images.double()), ds.predict(whole, images.double()))
    for column in one.history.columns:
        if column != "seconds":
            assert other.history[column] == pytest.approx(one.history[column], rel=1e-6)
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(parts.get_buffer(name), buffer)


@pytest.mark.slow
def test_compiled_parts_are_the_same_step(monkeypatch):
    whole, _ = trained(obj.Joint(0.7), "eager", "whole", monkeypatch, torch.float32)
    parts, _ = trained(obj.Joint(0.7), "compiled", "in parts", monkeypatch, torch.float32)
    torch.testing.assert_close(ds.predict(parts, images), ds.predict(whole, images), rtol=1e-4, atol=1e-5)


def test_members_that_convolve_and_are_compared_run_in_parts_where_they_are_faster_apart(monkeypatch):
    kinds = []
    real = engines.form_of

    def watched(*args):
        kinds.append(real(*args))
        return kinds[-1]

    monkeypatch.setattr(engines, "form_of", watched)
    monkeypatch.setattr(ds.DeepEnsemble, "faster_apart", True)
    ds.fit(ds.DeepEnsemble(conv_net, 2), (images, labels), objective=obj.Joint(0.5), epochs=2, engine="captured")
    ds.fit(ds.DeepEnsemble(conv_net, 2), (images, labels), objective=obj.Adversarial(obj.Joint(0.5), 0.1), epochs=2,
           engine="captured")  # fmt: skip
    assert kinds == ["in parts", "whole"]


def test_a_program_splits_where_its_last_input_is_first_used():
    def whole(a, b, last):
        a.add_(1.0)
        result = (a * b).exp()
        b.sub_(last * result)
        return result

    program = torch.fx.experimental.proxy_tensor.make_fx(whole)(torch.ones(3), torch.ones(3), torch.ones(3))
    first, second = split_at_last_input(program)
    a, b, last = (torch.rand(3) for _ in range(3))
    expected_a, expected_b = a + 1, b - last * ((a + 1) * b).exp()
    result, *kept = first(a, b)
    torch.testing.assert_close(result, (a * b).exp())
    second(a, b, last, *kept)
    torch.testing.assert_close((a, b), (expected_a, expected_b))


def test_a_program_whose_result_needs_the_last_input_is_refused():
    program = torch.fx.experimental.proxy_tensor.make_fx(lambda a, last: a * last)(torch.ones(3), torch.ones(3))
    with pytest.raises(RuntimeError, match="not finished"):
        split_at_last_input(program)
