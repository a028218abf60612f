import pytest
import torch

import dissensus as ds
from dissensus.training.schedules import factor_table

S = ds.schedules


def torch_factors(make, steps):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = make(optimizer)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return torch.tensor(factors, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("constant", lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
        (S.StepDecay(3, 0.5), lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5)),
        (S.MultiStep((4, 7), 0.2), lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [4, 7], 0.2)),
        ("cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 12)),
        (S.Cosine(final=0.1, period=6), None),
        (lambda epoch, epochs: 1 / (1 + epoch), lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1 / (1 + e))),
    ],
)
def test_factors_by_epoch_are_those_of_torch(ours, theirs):
    got = factor_table(ours, epochs=12, steps_per_epoch=1)
    if theirs is None:
        assert got[6:].unique().tolist() == pytest.approx([0.1])
        return
    torch.testing.assert_close(got, torch_factors(theirs, 12), rtol=1e-5, atol=1e-6)


def test_one_cycle_rises_and_falls_as_torch_does():
    got = factor_table(S.OneCycle(rise=0.3, start=1 / 25, final=1 / 25e4), epochs=1, steps_per_epoch=1001)
    theirs = torch_factors(
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, 1001, pct_start=0.3, cycle_momentum=False), 1000
    )
    # torch reaches its end one step before the run's; the curves are the same but for that.
    torch.testing.assert_close(got[:1000], theirs, rtol=0, atol=5e-3)


def test_warm_up_is_linear():
    factors = factor_table(S.Cosine(warmup=2), epochs=4, steps_per_epoch=2)
    assert factors[:5].tolist() == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="one_cycle"):
        factor_table("exponential", 1, 1)
