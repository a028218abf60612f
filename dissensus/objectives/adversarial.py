"""Objectives that perturb inputs: adversarial training with labels, and virtual adversarial training without."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dissensus._signatures import checked, real_number, whole_number
from dissensus.data.trees import Tree, describe, named_leaves
from dissensus.members import View
from dissensus.objectives.objective import OutputObjective, Parts, Step, Wrapper, one_answer
from dissensus.randomness import Noise


@checked
def fast_gradient_sign(x: Tensor, gradient: Tensor | None, epsilon: Tensor | float) -> Tensor:
    r"""Move inputs a step of fixed size up the loss: $x + \epsilon\,\mathrm{sign}(\nabla_x \ell)$.

    Example:
        >>> fast_gradient_sign(torch.zeros(3), torch.tensor([2.0, -0.1, 0.0]), 0.5)
        tensor([ 0.5000, -0.5000,  0.0000])
    """
    if gradient is not None and gradient.shape != x.shape:
        raise ValueError(f"`gradient` must be shaped as `x`, {tuple(x.shape)}; got {tuple(gradient.shape)}.")
    # A range is float32 also of inputs in half precision, which they keep.
    return x if gradient is None else (x + epsilon * gradient.sign()).detach().to(x.dtype)


@checked
@dataclass(frozen=True)
class Adversarial(Wrapper):
    r"""Train on each batch and on its fast-gradient-sign copy, half and half.

    $$\tfrac12\,\ell(x) + \tfrac12\,\ell(x'),\qquad x' = x + \epsilon\,\mathrm{sign}(\nabla_x \ell(x))$$

    Each member is attacked with its own gradient. The perturbed pass leaves BatchNorm statistics alone.

    Args:
        inner: What is minimised on both.
        epsilon: Size of the step, in units of the inputs.
        of_range: Read `epsilon` as a fraction of each feature's (of images, each channel's) range in the training data.
        part: Which part of inputs that are several tensors is moved, by its key or place; by default all real numbers in them.

    References:
        Goodfellow et al., 2015, <https://arxiv.org/abs/1412.6572>; Lakshminarayanan et al., 2017, <https://arxiv.org/abs/1612.01474>.
    """

    inner: OutputObjective
    epsilon: float = 0.01
    of_range: bool = False
    ranges: Any = None
    part: str | int | None = None

    def __post_init__(self) -> None:
        real_number("epsilon", self.epsilon)

    def prepare(self, x: Any) -> Self:
        """Measure the inputs' ranges where they are wanted."""
        return replace(self, ranges=tree_map(_ranges, x)) if self.of_range and self.ranges is None else self

    def __call__(self, members: View, x: Any, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the mean of the clean and the perturbed loss, and both."""
        own = x if step.own else members.expand(x)
        parts: Parts = {}

        def loss_at(inputs: Any, prefix: str = "") -> Tensor:
            loss, found = self.inner.on_outputs_of(members, members.each(inputs), y, step)
            parts.update({prefix + name: value for name, value in found.items()})
            return loss

        moves = self._moves(own)
        clean, gradient = members.input_gradient(loss_at, own)
        attacked = self._attacked(own, gradient, moves)
        with members.perturbed():
            perturbed = loss_at(attacked, "adversarial_")
        return (clean + perturbed) / 2, parts

    def _moves(self, x: Any) -> list[bool]:
        """Return which of several tensors are moved, if any of them can be."""
        moves = named_leaves(x, self.part) if isinstance(x, Tree) else [True]
        if not any(asked and leaf.is_floating_point() for leaf, asked in zip(tree_leaves(x), moves, strict=True)):
            raise ValueError(f"Adversarial moves real numbers; there are none to move in {describe(x)}.")
        return moves

    def _attacked(self, x: Any, gradient: Any, moves: list[bool]) -> Any:
        """Return inputs moved by their gradients; of several tensors those that are asked for."""
        leaves, spec = tree_flatten(x)
        ranges = [1.0] * len(leaves) if self.ranges is None else [r.to(x.device) for r in tree_leaves(self.ranges)]
        gradients = [gradient] if isinstance(x, Tensor) else list(gradient.leaves)
        moved = [
            fast_gradient_sign(leaf, found if asked else None, self.epsilon * scale)
            for leaf, found, scale, asked in zip(leaves, gradients, ranges, moves, strict=True)
        ]
        return tree_unflatten(moved, spec)


def _ranges(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return torch.ones(())  # is not moved
    # Images share one range a channel: a pixel's own range is an accident of the sample.
    axes = [0, *range(2, x.ndim)] if x.ndim > 2 else [0]
    ranges = x.amax(axes, keepdim=True) - x.amin(axes, keepdim=True)
    return ranges.to(torch.float32)[0]


@checked
@dataclass(frozen=True)
class VirtualAdversarial(Wrapper):
    r"""Ask that predictions stay the same under the small perturbation that changes them most; no labels needed.

    $$\ell(x) + w\,\mathrm{KL}(p(x)\,\Vert\,p(x + r)),\qquad r = \epsilon\, g / \lVert g\rVert,\quad
      g = \nabla_d\,\mathrm{KL}(p(x)\,\Vert\,p(x + d))$$

    where d starts as a random direction of length `xi` and p(x) takes no gradient. It is computed on the labelled batch and, where
    `fit(..., unlabelled=...)` gives one, on the unlabelled batch too. Regression heads use the divergence of their likelihood; outputs
    with positions, losses of your own and quantiles have none.

    Args:
        inner: The objective on labelled data.
        epsilon: Length of the perturbation (L2 norm over one input).
        weight: Weight of the smoothness term.
        xi: Length of the finite step that finds the direction. Small ones underflow in float32: the divergence is of order xi².
        iterations: Power iterations.

    References:
        Miyato et al., 2018, <https://arxiv.org/abs/1704.03976>.
    """

    epsilon: float = 1.0
    weight: float = 1.0
    xi: float = 0.1
    iterations: int = 1

    streams: ClassVar[tuple[str, ...]] = ("unlabelled",)

    def __post_init__(self) -> None:
        real_number("epsilon", self.epsilon, above=True)
        real_number("xi", self.xi, above=True)
        whole_number("iterations", self.iterations, 1)

    def __call__(self, members: View, x: Any, y: Tensor, step: Step) -> tuple[Tensor, Parts]:
        """Return the inner loss plus the weighted smoothness, and both."""
        loss, parts = self.inner(members, x, y, step)
        smoothness = step.mean(self.divergences(members, x, step))
        unlabelled = step.inputs("unlabelled", x)
        if unlabelled is not None:
            smoothness = (smoothness + self.divergences(members, unlabelled, step).mean(-1)) / 2
        return loss + self.weight * smoothness.sum(), {**parts, "virtual": smoothness.detach()}

    def divergences(self, members: View, x: Any, step: Step) -> Tensor:
        """Return how far each input's prediction goes under its worst perturbation, `(members, batch)`."""
        if isinstance(x, Tree):
            raise ValueError("VirtualAdversarial moves one tensor of inputs, and these are several. Use Adversarial.")
        if not x.is_floating_point():
            raise ValueError(f"VirtualAdversarial moves real numbers; got inputs of {x.dtype}.")
        own = x if step.own else members.expand(x)
        divergence = self.likelihood.divergence
        with members.perturbed():
            with torch.no_grad():
                clean = one_answer(self, members.each(own).detach())
            # Members that share a pass share its noise.
            noise = Noise(step.noise(rows=members.rows).keys[: len(own)])
            direction = noise.normal(*own.shape[1:]).to(own.dtype)
            for _ in range(self.iterations):
                start = self.xi * _unit(direction)
                _, direction = members.input_gradient(lambda d: divergence(clean, members.each(own + d)), start)
            worst = (own + self.epsilon * _unit(direction)).detach()
            return divergence(clean, members.each(worst))


def _unit(direction: Tensor) -> Tensor:
    """Scale every input's perturbation, `(members, batch, ...)`, to length one; zero stays zero."""
    flat = direction.flatten(2)
    # Divide by the largest entry first: the square of a tiny gradient underflows.
    flat = flat / flat.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    flat = flat / flat.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    return flat.view_as(direction)
