"""Some rows updated in place, beside copies of them and beside torch's optimizers."""

import pytest
import torch

from dissensus.engines import row_updates
from dissensus.training.step import SGD, Adam, AdamW, Given, Rule

ROWS = torch.tensor([4, 1])
RULES = {"sgd": SGD(momentum=0.9), "adam": Adam(), "adamw": AdamW(betas=(0.5, 0.9), eps=1e-3)}


def numbers(columns: int, device: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    values, first, second = (torch.randn(6, columns, generator=draw).to(device) for _ in range(3))
    gradient = torch.randn(2, columns, generator=draw).to(device)
    return values, {"first": first, "second": second.square(), "momentum": first.clone()}, gradient


def given(gradient: torch.Tensor, decays: bool) -> Given:
    device = gradient.device
    lr = torch.tensor([[0.1], [0.02]], dtype=torch.float64, device=device)
    decay = torch.tensor([[0.3], [0.2]], dtype=torch.float64, device=device) if decays else None
    return Given(gradient, torch.tensor([[3], [70]], device=device), lr, decay)


def changed(rule: Rule, how, columns: int, device: str, decays: bool) -> list[torch.Tensor]:
    values, slots, gradient = numbers(columns, device)
    how(rule, values, {name: slots[name] for name in rule.slots}, ROWS.to(device), given(gradient, decays))
    return [values, *(slots[name] for name in rule.slots)]


@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rows_change_as_they_would_alone_and_others_do_not(rule, decays):
    found = changed(rule, Rule.update_rows, 40, "cpu", decays)
    values, slots, gradient = numbers(40, "cpu")
    start = [values, *(slots[name] for name in rule.slots)]
    alone, own = values[ROWS], {name: slots[name][ROWS] for name in rule.slots}
    rule.update(alone, own, given(gradient, decays))
    for new, old, wanted in zip(found, start, [alone, *own.values()], strict=True):
        assert torch.equal(new[ROWS], wanted)
        assert torch.equal(new[[0, 2, 3, 5]], old[[0, 2, 3, 5]])
        assert not torch.equal(new[ROWS], old[ROWS])


@pytest.mark.gpu
@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("rule", [RULES["adam"], RULES["adamw"]], ids=["adam", "adamw"])
@pytest.mark.parametrize("columns", [5, 5000])
def test_the_kernel_changes_rows_as_the_rule_does(rule, decays, columns):
    found = changed(rule, type(rule).update_rows, columns, "cuda", decays)
    wanted = changed(rule, Rule.update_rows, columns, "cuda", decays)
    values, slots, _ = numbers(columns, "cuda")
    for new, copied, old in zip(found, wanted, [values, slots["first"], slots["second"]], strict=True):
        # Where second moments are small, values change by up to 20.
        torch.testing.assert_close(new, copied, rtol=1e-5, atol=1e-5)
        assert torch.equal(new[[0, 2, 3, 5]], old[[0, 2, 3, 5]])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[100, 2500, 7, 2393], [2100, 1, 30, 2, 2048, 800]])
def test_the_kernel_takes_a_gradient_in_parts_of_any_precision(sizes):
    rule = RULES["adamw"]
    values, slots, gradient = numbers(5000, "cuda")
    gradient = gradient.bfloat16().float()
    copies = [values.clone(), slots["first"].clone(), slots["second"].clone()]
    parts = [
        part.bfloat16() if index % 2 else part
        for index, part in enumerate(gradient.split([*sizes, 5000 - sum(sizes)], 1))
    ]
    step, rows = given(gradient, decays=True), ROWS.cuda()
    factors = rule._factors(step, torch.float32)
    row_updates.update_by_adam(*copies, parts[: len(sizes)], rows, *factors, *rule.betas)
    wanted = [values.clone(), slots["first"].clone(), slots["second"].clone()]
    Rule.update_rows(rule, wanted[0], dict(zip(rule.slots, wanted[1:], strict=True)), rows, step)
    for found, new, old in zip(copies, wanted, [values, slots["first"], slots["second"]], strict=True):
        torch.testing.assert_close(found[:, : sum(sizes)], new[:, : sum(sizes)], rtol=1e-5, atol=1e-5)
        assert torch.equal(found[:, sum(sizes) :], old[:, sum(sizes) :])
        assert torch.equal(found[[0, 2, 3, 5]], old[[0, 2, 3, 5]])


def test_a_cpu_has_no_kernel():
    assert not row_updates.runs_as_kernel(torch.zeros(2, 2))
