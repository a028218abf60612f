"""Updates of some rows in place, beside those of the rules on copies and those of torch's optimizers."""

import pytest
import torch

from dissensus.training import row_updates
from dissensus.training.row_updates import adam_rows
from dissensus.training.rules import Adam, AdamW, Rule

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = torch.tensor([4, 1])


def numbers(columns: int, device: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(6, columns, generator=draw) for name in ("values", "first", "second")}
    whole["second"] = whole["second"].square()
    whole["gradient"] = torch.randn(2, columns, generator=draw)
    return {name: tensor.to(device) for name, tensor in whole.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", [Adam(), AdamW(betas=(0.5, 0.9), eps=1e-3)], ids=["adam", "adamw"])
@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("columns", [5, 5000])
def test_rows_change_in_place_as_copies_of_them_would(device, rule, decays, columns, monkeypatch):
    count = torch.tensor([[3], [70]], device=device)
    lr = torch.tensor([[0.1], [0.02]], dtype=torch.float64, device=device)
    decay = torch.tensor([[0.3], [0.2]], dtype=torch.float64, device=device) if decays else None
    found, wanted = numbers(columns, device), numbers(columns, device)
    for whole, how in ((found, type(rule).update_rows), (wanted, Rule.update_rows)):
        monkeypatch.setattr("dissensus.training.rules.runs_as_kernel", lambda values: True)
        slots = {"first": whole["first"], "second": whole["second"]}
        how(rule, whole["values"], whole["gradient"], slots, ROWS.to(device), count, lr, decay)
    start = numbers(columns, device)
    for name in ("values", "first", "second"):
        # Where second moments are small, values change by up to 20.
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)
        assert torch.equal(found[name][[0, 2, 3, 5]], start[name][[0, 2, 3, 5]])
        assert not torch.equal(found[name][4], start[name][4])


@pytest.mark.parametrize("device", DEVICES)
def test_a_first_step_is_that_of_torch_s_adamw(device):
    whole = numbers(40, device)
    whole["first"].zero_()
    whole["second"].zero_()
    parameters = whole["values"][ROWS].clone().requires_grad_()
    optimizer = torch.optim.AdamW([parameters], lr=0.1, weight_decay=0.3)
    parameters.grad = whole["gradient"].clone()
    optimizer.step()
    ones = torch.ones(2, 1, device=device)
    spread = (1 - 0.999) ** 0.5
    adam_rows(
        whole["values"],
        whole["first"],
        whole["second"],
        whole["gradient"],
        ROWS.to(device),
        ones * (1 - 0.1 * 0.3),
        None,
        ones * -0.1 * spread / (1 - 0.9),
        ones * spread * 1e-8,
        0.9,
        0.999,
    )
    torch.testing.assert_close(whole["values"][ROWS], parameters.detach(), rtol=1e-5, atol=1e-6)


def test_a_cpu_has_no_kernel():
    assert not row_updates.runs_as_kernel(torch.zeros(2, 2))
