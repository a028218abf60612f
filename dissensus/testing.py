"""The contract of members and objectives as checks that anybody can run on a kind or an objective of their own."""

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dissensus.members import Members, View
from dissensus.members.stacking import copies_of
from dissensus.objectives import Independent, Joint, Objective, likelihood_of
from dissensus.objectives.objective import Parts, Step, Wrapper, as_objective
from dissensus.predictions import predict
from dissensus.training import fit

MakeMembers = Callable[..., Members]
_State = Mapping[str, Tensor]
_LR = 0.1


def check_members(
    make: MakeMembers, x: Tensor, y: Tensor, *, loss: str | None = None, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    """Check that a kind of ensemble keeps the contract on which training, predictions and scores rely.

    In evaluation it gives `(num_members, batch, ...)` and leaves no trace; `member(j)` is an independent plain module that
    gives row j; `pick` and `each` give the same rows; members are decided by their seed alone and leave global generators
    as they were; copies and state dicts carry everything; after training members differ. And the law of training:

    - where `loss_over_members` is `"sum"`, one SGD step moves each member exactly as that member trained alone in plain torch;
    - where it is `"mean"`, one SGD step moves the shared parameters along the mean of the members' losses;
    - where members are `separate`, one that trains in company ends as it does without the others, dropout and all.

    The first two are looked at where a training pass draws no random numbers.

    Args:
        make: Makes the ensemble, with its seed; small, with two members or more. If it takes `num_members`, adding members must
            leave the earlier ones as they are.
        x: Some inputs, `(batch, ...)`.
        y: Their targets: class labels, or real values `(batch, outputs)`.
        loss: Loss to train with, by name; cross-entropy for class labels and squared error for real targets by default.
        rtol: Relative tolerance of comparisons.
        atol: Absolute tolerance.

    Raises:
        AssertionError: The contract is broken; one sentence says where.

    Example:
        >>> import dissensus as ds
        >>> x, y = torch.randn(20, 4), torch.arange(20) % 3
        >>> check_members(lambda: ds.DeepEnsemble(lambda: nn.Linear(4, 3), 3, seed=0), x, y)
    """
    loss = loss or ("mse" if y.is_floating_point() else "cross_entropy")
    case = _Case(make, x, y, loss, rtol, atol)
    with _generators_left_alone("making, running or training it"):
        ens = make()
        _check(isinstance(ens, Members), f"An ensemble must be a ds.Members; got a {type(ens).__name__}.")
        case.check_evaluation(ens)
        case.check_seed(ens)
        case.check_copies(ens)
        case.check_step(ens)
        case.check_alone(ens, Independent(loss))
        case.check_trained(ens)


def check_objective(
    objective: Objective | Callable[..., Any],
    make: MakeMembers,
    x: Tensor,
    y: Tensor,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Check that an objective keeps the contract on which `fit` relies.

    It gives a finite scalar with a gradient, and parts with the same names in every step, scalars or `(members,)`, without
    gradients; the same seed gives the same run, whatever the global generators are; data stay as they are; its likelihood
    judges outputs. One that says that it does not couple members trains each as it would train without the others, and
    members that a step does not pick stay bit for bit as they were (for kinds whose members are `separate`).

    Args:
        objective: The objective, or a function of (members, x, y, step).
        make: Makes an ensemble to train, with its seed.
        x: Some inputs, `(batch, ...)`.
        y: Their targets.
        rtol: Relative tolerance of comparisons.
        atol: Absolute tolerance.

    Raises:
        AssertionError: The contract is broken; one sentence says where.

    Example:
        >>> import dissensus as ds
        >>> x, y = torch.randn(20, 4), torch.arange(20) % 3
        >>> check_objective(Joint(0.5), lambda: ds.DeepEnsemble(lambda: nn.Linear(4, 3), 3, seed=0), x, y)
    """
    objective = as_objective(objective, likelihood_of("mse" if y.is_floating_point() else "cross_entropy"))
    name = type(objective).__name__
    case = _Case(make, x, y, objective.likelihood.name, rtol, atol)
    before = x.clone(), y.clone()
    with _generators_left_alone(f"training with {name}"):
        spy = _Spy(objective)
        first, second = make(), make()
        case.fit(first, spy, epochs=2)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            case.fit(second, objective, epochs=2)
        case.same(predict(first, x), predict(second, x), f"Two runs of {name} with one seed end differently.")
        _check(torch.equal(x, before[0]) and torch.equal(y, before[1]), f"{name} changed the data it was given.")
        outputs, likelihood = predict(first, x), objective.likelihood
        own, mixture = likelihood.per_example(outputs, y), likelihood.mixture(outputs, y)
        _check(
            own.shape == outputs.shape[:2] and mixture.shape == outputs.shape[1:2],
            f"The likelihood of {name} must give (members, batch) and (batch,) = {tuple(outputs.shape[:2])} and "
            f"{tuple(outputs.shape[1:2])}; got {tuple(own.shape)} and {tuple(mixture.shape)}.",
        )
        case.check_picked(objective, name)
        if not objective.couples:
            case.check_alone(make(), objective)


@dataclass(frozen=True)
class _Case:
    """An ensemble to make, data to train it on, and how closely numbers must agree."""

    make: MakeMembers
    x: Tensor
    y: Tensor
    loss: str
    rtol: float
    atol: float

    def fit(self, ens: Members, objective: Objective, epochs: int = 1, **options: Any) -> None:
        """Train for a few steps, two an epoch if nothing else is said."""
        device = next(ens.parameters()).device
        # Not Adam: it makes whole steps of the rounding in gradients that are zero, as of a bias before BatchNorm.
        settings: dict[str, Any] = {"batch_size": -(-len(self.x) // 2), "optimizer": "sgd", "lr": 0.05}
        settings |= {"epochs": epochs, "device": device, "engine": "eager"} | options
        fit(ens, (self.x, self.y), objective=objective, **settings)

    def step(self, ens: Members, objective: Objective) -> None:
        """Take one plain SGD step on all the data."""
        self.fit(ens, objective, batch_size=len(self.x), lr=_LR, batches="shared")

    def same(self, found: Tensor, wanted: Tensor, sentence: str) -> None:
        """Fail with a sentence where two tensors differ by more than rounding."""
        close = found.shape == wanted.shape and torch.allclose(found, wanted, self.rtol, self.atol)
        _check(close, sentence)

    def check_evaluation(self, ens: Members) -> None:
        """Shapes, members, picks and batches of their own in evaluation, and that nothing is left behind."""
        count, before = ens.num_members, copies_of(ens.state_dict())
        outputs = predict(ens, self.x)
        wanted = f"(num_members, batch, ...) = ({count}, {len(self.x)}, ...)"
        fits = outputs.shape[:2] == (count, len(self.x))
        _check(fits, f"In evaluation an ensemble must give {wanted}; got {tuple(outputs.shape)}.")
        for index in range(count):
            net = ens.member(index).eval()
            plain = isinstance(net, nn.Module) and not isinstance(net, Members)
            _check(plain, f"member({index}) must be a plain nn.Module; got a {type(net).__name__}.")
            with torch.no_grad():
                self.same(net(self.x), outputs[index], f"member({index}) gives other outputs than row {index}.")
                for parameter in net.parameters():
                    parameter.zero_()
        self.same(predict(ens, self.x), outputs, "Changing what member(j) returned changes the ensemble.")
        twin, chosen = copy.deepcopy(ens).eval(), [count - 1, 0]
        with torch.no_grad():
            picked, each = twin.pick(chosen)(self.x), twin.each(self.x.expand(count, *self.x.shape))
        self.same(picked, outputs[chosen], "pick([last, 0]) gives other outputs than these rows of all.")
        self.same(each, outputs, "`each` with the same inputs for all members gives other outputs.")
        changed = [name for name, tensor in ens.state_dict().items() if not torch.equal(tensor, before[name])]
        _check(not changed, f"A pass in evaluation changed {', '.join(changed[:1])}.")

    def check_seed(self, ens: Members) -> None:
        """Members depend on (seed, member) only."""
        outputs = predict(ens, self.x)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.same(
                predict(self.make(), self.x), outputs, "Made again with its seed, the ensemble has other members."
            )
        if "num_members" in inspect.signature(self.make).parameters:
            more = predict(self.make(num_members=ens.num_members + 1), self.x)
            self.same(more[: len(outputs)], outputs, "Adding a member changes the earlier ones.")

    def check_copies(self, ens: Members) -> None:
        """Deep copies are equal and independent, and a state dict carries everything."""
        trained, other = copy.deepcopy(ens), self.make()
        self.fit(trained, Independent(self.loss))
        outputs = predict(trained, self.x)
        self.same(predict(copy.deepcopy(trained), self.x), outputs, "A deep copy gives other outputs.")
        self.same(predict(ens, self.x), predict(other, self.x), "Training a deep copy changes the original.")
        other.load_state_dict(trained.state_dict())
        self.same(predict(other, self.x), outputs, "A state dict does not carry all that decides outputs.")

    def check_trained(self, ens: Members) -> None:
        """After training members differ."""
        self.fit(ens, Independent(self.loss), epochs=2)
        first, *others = predict(ens, self.x)
        for index, outputs in enumerate(others, 1):
            _check(not torch.equal(outputs, first), f"After training members 0 and {index} are the same.")

    def check_step(self, ens: Members) -> None:
        """The law: a step moves each member as it moves alone, or what members share along their mean; unless passes draw noise."""
        ens = copy.deepcopy(ens).train()
        view = copy.deepcopy(ens).train().view()
        view.together = ens.comparable and ens.num_trained > 1
        with torch.no_grad():
            draws = not torch.equal(view(self.x), view(self.x))
        if not draws:
            (self._check_each_moves_alone if ens.loss_over_members == "sum" else self._check_mean_moves_all)(ens)

    def _check_each_moves_alone(self, ens: Members) -> None:
        nets = [ens.member(index) for index in range(ens.num_members)]
        starts = [copies_of(net.state_dict()) for net in nets]
        for net in nets:
            optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], _LR)
            likelihood_of(self.loss).per_example(net(self.x), self.y).mean().backward()
            optimizer.step()
        self.step(ens, Independent(self.loss))
        for index, (net, start) in enumerate(zip(nets, starts, strict=True)):
            self._compare(ens.member(index).state_dict(), net.state_dict(), start, f"member {index}", "it moves alone")

    def _check_mean_moves_all(self, ens: Members) -> None:
        probe = copy.deepcopy(ens).train()
        view = probe.view()
        view.together = ens.comparable
        losses = likelihood_of(self.loss).per_example(view(self.x), self.y).mean(-1)
        trained = {name: p for name, p in probe.named_parameters() if p.requires_grad}
        if len(losses) > 1:
            self._check_something_is_shared(losses, list(trained.values()))
        slopes = torch.autograd.grad(losses.mean(), list(trained.values()), allow_unused=True, materialize_grads=True)
        start = copies_of(trained)
        wanted = {name: p - _LR * slope for (name, p), slope in zip(start.items(), slopes, strict=True)}
        # Joint at 0 is the mean over members that all see the whole batch.
        self.step(ens, Joint(0.0, loss=self.loss) if ens.comparable else Independent(self.loss))
        rule = "the mean of its members' losses asks"
        self._compare(dict(ens.named_parameters()), wanted, start, "the network", rule)

    def _check_something_is_shared(self, losses: Tensor, parameters: list[nn.Parameter]) -> None:
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        slopes = [torch.autograd.grad(loss, parameters, **options) for loss in losses]
        _check(
            any(bool((torch.stack(each) != 0).sum(0).gt(1).any()) for each in zip(*slopes, strict=True)),
            "No parameter is used by two members, so each would train with a part of its gradient: declare loss_over_members='sum'.",
        )

    def _compare(self, found: _State, wanted: _State, start: _State, who: str, rule: str) -> None:
        for name, target in wanted.items():
            moved, should = (float((t.detach().double() - start[name].double()).norm()) for t in (found[name], target))
            close = not target.is_floating_point() or torch.allclose(found[name], target, self.rtol, self.atol)
            told = f"One SGD step moves {name!r} of {who} by {moved:.4g}, and not by {should:.4g} as {rule}; see "
            _check(close, f"{told}`loss_over_members`.")

    def check_alone(self, ens: Members, objective: Objective) -> None:
        """A member that trains in company ends as it does without the others."""
        if not ens.separate or ens.num_trained < 2:
            return
        ens, alone = copy.deepcopy(ens), copy.deepcopy(ens)
        last, each = ens.num_trained - 1, ens.num_members // ens.num_trained
        alone.keep_members([last])
        fits = alone.num_members == each and predict(alone, self.x).shape[0] == each
        _check(fits, "keep_members([last]) leaves another number of members than one network's.")
        for members in (ens, alone):
            self.fit(members, objective, epochs=2)
        told = f"The last member ends differently in company than alone, trained with {type(objective).__name__}."
        self.same(predict(ens, self.x)[last * each :], predict(alone, self.x), told)

    def check_picked(self, objective: Objective, name: str) -> None:
        """Members that a step does not pick are left exactly as they were."""
        ens = self.make()
        if not ens.separate:
            return
        spy = _Spy(objective)
        before = [copies_of(ens.member(index).state_dict()) for index in range(ens.num_members)]
        self.fit(ens, spy, batch_size=len(self.x), optimizer="adamw")
        if (rows := spy.calls[0][1]) is None:
            return
        each = ens.num_members // ens.num_trained
        for index, was in enumerate(before):
            now = ens.member(index).state_dict()
            unmoved = all(torch.equal(tensor, now[key]) for key, tensor in was.items())
            picked = index // each in rows.tolist()
            _check(picked or unmoved, f"A step of {name} did not pick member {index} and changed it.")


@dataclass(frozen=True)
class _Spy(Wrapper):
    """Checks what the inner objective gives in each step, and keeps its parts and the rows that it picked."""

    calls: list[tuple[Parts, Tensor | None]] = field(default_factory=list)

    def __call__(self, members: View, x: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return what the inner objective gives: a finite scalar with a gradient; the same parts each time, without gradients."""
        loss, parts = self.inner(members, x, y, step)
        self.calls.append((parts, members.rows))
        name, first = type(self.inner).__name__, self.calls[0][0]
        good = loss.ndim == 0 and loss.requires_grad and bool(torch.isfinite(loss))
        _check(good, f"{name} must give a finite scalar with a gradient; got {loss!r:.80}.")
        same = parts.keys() == first.keys()
        _check(same, f"{name} must log the same parts in every step; got {sorted(parts)} after {sorted(first)}.")
        each = (members.num_members,)
        for key, part in parts.items():
            _check(not part.requires_grad, f"{name} must detach what it logs; {key!r} has a gradient.")
            told = f"{name} must log scalars or one number a member, {each}; {key!r} is {tuple(part.shape)}."
            _check(part.shape in ((), each), told)
        return loss, parts


def _check(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)


@contextmanager
def _generators_left_alone(doing: str) -> Iterator[None]:
    """Fail where a block draws from the global generators of torch, NumPy or Python."""
    states = _global_states()
    yield
    for name, before, after in zip(("torch", "NumPy", "Python"), states, _global_states(), strict=True):
        _check(before == after, f"The global generator of {name} is changed by {doing}.")


def _global_states() -> tuple[object, ...]:
    numpy = repr(np.random.get_state(legacy=False))  # noqa: NPY002  # the global one is what is looked at
    return torch.get_rng_state().tolist(), numpy, random.getstate()
