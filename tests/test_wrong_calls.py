"""Wrong calls at every public name: how many refusals are sentences. `python -m attacks --long` makes all of them."""

import inspect
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus._signatures import checked
from dissensus.detectors import RowDistance

sys.path.insert(0, str(Path(__file__).parents[1] / "attacks"))

import wrong_calls


@pytest.mark.slow
def test_every_public_name_has_a_right_call(tmp_path):
    for _, call in wrong_calls.right_calls(tmp_path):
        call()


@pytest.mark.slow
def test_most_refusals_are_clear_sentences():
    ended, obscure = wrong_calls.attack(every=23)
    worst = [f"{case.name}({case.argument}={case.wrong}): {said:.120}" for case, said in obscure]
    assert ended["clear"] > 500
    assert wrong_calls.share(ended) >= wrong_calls.AIM, "\n".join(worst)


@checked
def example(
    x: torch.Tensor,
    rate: float = 0.5,
    times: int = 1,
    *,
    values: list[float] | None = None,
    pair: tuple[int, int] = (1, 2),
    strength: float | torch.Tensor = 1.0,
    net: nn.Module | None = None,
    **others: object,
) -> tuple[object, ...]:
    return x, rate, times, values, pair, strength, net, others


def test_numbers_of_any_origin_become_pythons_own_and_tensors_stay_what_they_are():
    strength = torch.tensor(2.0, requires_grad=True)
    _, rate, times, *_ = example(torch.zeros(1), np.float32(0.5), torch.tensor(3))
    assert (type(rate), rate, type(times), times) == (float, 0.5, int, 3)
    assert example(torch.zeros(1), strength=strength)[5] is strength
    # Shapes alone are enough where no value is read.
    assert example(torch.zeros(2, device="meta"), strength=torch.zeros((), device="meta"))[0].is_meta


def test_a_checked_function_keeps_its_signature():
    assert list(inspect.signature(example).parameters)[:3] == ["x", "rate", "times"]
    assert list(inspect.signature(ds.DeepEnsemble).parameters)[:2] == ["make_member", "num_members"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        example()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rate": "a"}, "`rate` must be a number; got 'a'"),
        ({"rate": float("nan")}, "`rate` must be a number; got nan"),
        ({"rate": True}, "`rate` must be a number; got True"),
        ({"rate": torch.zeros(3)}, r"`rate` must be a number; got a tensor of torch.float32 shaped \(3,\)"),
        ({"times": 1.0}, "`times` must be a whole number; got 1.0"),
        ({"times": None}, "`times` must be a whole number; got None"),
        ({"values": [1.0, "b"]}, "`values` must be a list or tuple, each a number or None; got"),
        ({"values": {1.0, 2.0}}, "`values` must be a list or tuple"),
        ({"pair": (1, 2, 3)}, r"`pair` must be a list or tuple of 2, each a whole number; got \(1, 2, 3\)"),
        ({"net": nn.Linear}, r"`net` must be an nn.Module \(a network\) or None; got the class Linear"),
        ({"x": [1.0]}, "`x` must be a torch tensor of real numbers; got"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, "got a tensor of torch.complex64"),
        ({"x": torch.eye(2).to_sparse()}, "got a sparse tensor"),
        ({"x": nn.Linear(1, 1)}, r"got Linear. Pass ds.predict\(ens, x\)"),
    ],
)
def test_arguments_of_another_kind_are_refused_in_a_sentence(arguments, words):
    with pytest.raises(ValueError, match=words):
        example(**{"x": torch.zeros(1), **arguments})


def test_checking_costs_little_beside_the_smallest_operation():
    """Three arguments are looked at by some type checks: a hundred times that is far more than they may take."""
    steps = 0

    def count(frame, event, _):
        nonlocal steps
        steps += event == "call"

    x = torch.zeros(1)
    example(x)
    sys.setprofile(count)
    try:
        example(x, 0.5, 2)
    finally:
        sys.setprofile(None)
    assert steps < 20


def test_the_page_on_reliability_has_the_figures_of_the_record():
    docs = Path(__file__).parents[1] / "docs"
    page = " ".join((docs / "reliability.md").read_text(encoding="utf-8").split())
    record = json.loads((docs / "attacks.json").read_text(encoding="utf-8"))
    assert record["broken"] == 0
    for counts in record["figures"].values():
        assert ", ".join(f"{what} {count}" for what, count in counts.items()) in page


def test_a_class_axis_of_what_is_no_tensor_gets_a_sentence():
    with pytest.raises(ValueError, match="must be a torch tensor; got ndarray"):
        ds.scores.mutual_information(np.zeros((3, 2, 4, 5)), class_axis=2)
    with pytest.raises(ValueError, match=r"`class_axis` must be a whole number; got 2\.5"):
        ds.scores.mutual_information(torch.zeros(3, 2, 4, 5), class_axis=2.5)


def test_whole_numbers_have_no_distance():
    with pytest.raises(ValueError, match=r"floating point; got torch\.int64"):
        RowDistance(torch.zeros(9, 2))(torch.ones(3, 2, dtype=torch.long))
