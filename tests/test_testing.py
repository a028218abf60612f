"""The contract's checks refuse what breaks it, in one sentence, and pass a kind written outside the package."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from training_helpers import net, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.randomness import derive, seeded
from dissensus.testing import check_members, check_objective


class Blocks(ds.Members):
    """Linear members whose weights lie in one matrix, member after member: not on an axis of their own."""

    own_batches: ClassVar[bool] = False
    separate: ClassVar[bool] = False

    def __init__(self, num_members=3, seed=0):
        super().__init__(num_members, seed)
        layers = []
        for index in range(num_members):
            with seeded(derive(seed, index), alone=True):
                layers.append(nn.Linear(4, 3))
        self.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]))

    def run(self, tensors, x, *, own, rows, keys):
        weight = tensors["weight"].unflatten(0, (self.num_members, 3))
        weight = weight if rows is None else weight[rows]
        return torch.einsum("mbi,moi->mbo" if own else "bi,moi->mbo", x, weight)

    def member(self, index):
        layer = nn.Linear(4, 3, bias=False)
        layer.weight = nn.Parameter(self.weight.detach()[3 * index : 3 * index + 3].clone())
        return layer


class MeanLoss(Blocks):
    loss_over_members: ClassVar[str] = "mean"


class SumOfShared(ds.BatchEnsemble):
    loss_over_members: ClassVar[str] = "sum"


class OtherMembers(Blocks):
    def member(self, index):
        return super().member(0)


class Draws(Blocks):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.weight.add_(torch.rand(()))


class Forgets(ds.DeepEnsemble):
    def keep_members(self, rows):
        super().keep_members([0])


def test_a_kind_of_ones_own_passes():
    with torch.random.fork_rng():  # nn.Linear of `member` draws
        check_members(Kept, x, y)
    check_objective(obj.Joint(0.5), Kept, x, y)


class Kept(Blocks):
    def member(self, index):
        with seeded(0):
            return super().member(index)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (MeanLoss, "declare loss_over_members='sum'"),
        (lambda: SumOfShared(lambda: nn.Linear(4, 3), 3), "One SGD step moves 'weight' of member 0 by"),
        (OtherMembers, r"member\(1\) gives other outputs than row 1"),
        (Draws, "Made again with its seed, the ensemble has other members"),
        (lambda: Forgets(net, 3), "The last member ends differently in company than alone"),
        (lambda num_members=2: ds.DeepEnsemble(net, num_members, seed=num_members), "Adding a member changes"),
        (lambda: nn.Linear(4, 3), "must be a ds.Members"),
    ],
)
def test_what_breaks_the_contract_is_named(make, sentence):
    with torch.random.fork_rng(), pytest.raises(AssertionError, match=sentence):
        check_members(make, x, y)


def test_a_member_that_draws_from_the_global_generator_is_named():
    with torch.random.fork_rng(), pytest.raises(AssertionError, match="global generator of torch"):
        check_members(Blocks, x, y)


@dataclass(frozen=True)
class Leaks(obj.Independent):
    """Says that it does not couple members, and pulls them to their mean."""

    def on_outputs(self, outputs, y, step):
        loss, parts = super().on_outputs(outputs, y, step)
        return loss + (outputs - outputs.mean(0)).square().sum(), parts


@dataclass(frozen=True)
class Undetached(obj.Independent):
    def on_outputs(self, outputs, y, step):
        loss, parts = super().on_outputs(outputs, y, step)
        return loss, {**parts, "whole": loss}


@dataclass(frozen=True)
class PerExample(obj.Independent):
    def on_outputs(self, outputs, y, step):
        loss, parts = super().on_outputs(outputs, y, step)
        return loss, {**parts, "whole": outputs.detach().sum((0, 2))}


@pytest.mark.parametrize(
    ("objective", "sentence"),
    [
        (Leaks(), "The last member ends differently in company than alone, trained with Leaks"),
        (Undetached(), "must detach what it logs; 'whole' has a gradient"),
        (PerExample(), r"must log scalars or one number a member, \(3,\); 'whole' is \(50,\)"),
    ],
)
def test_what_breaks_an_objectives_contract_is_named(objective, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_objective(objective, lambda: ds.DeepEnsemble(net, 3), x, y)
