"""Loss-guided heads on cached features, at the size of ImageNet: the cost of a step must not depend on their number."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dissensus as ds
from dissensus import objectives as obj
from dissensus.architectures import mlp
from dissensus_bench.problems import Problem
from dissensus_bench.rivals import Turn
from dissensus_bench.timing import Stopwatch, time_fit

CASE, LOOP = "ldr-imagenet-size", "per-module loop"
STRENGTH, ACTIVE = 0.5, 2


@dataclass(frozen=True)
class Size:
    """How large everything is: examples, width of features (and of the hidden layer), classes, and examples a step."""

    examples: int
    features: int
    classes: int
    batch: int

    def __str__(self) -> str:
        heads = f"{self.features}-{self.features}-{self.classes}"
        return f"{self.examples} features, heads {heads}, batch {self.batch}, AdamW"


IMAGENET = Size(1_281_167, 768, 1000, 256)
# Every size but that of the batch divided by fifty: a thousand heads of ImageNet's size take 16 GB with their optimizer.
FIFTIETH = Size(25_623, 16, 20, 256)


def guided_heads(
    device: str, size: Size, counts: Sequence[int], engine: str, repeats: int, turn_steps: int
) -> list[dict[str, Any]]:
    """Train two of M heads a step by `ds.fit` on cached features, for each M, beside a loop over modules.

    Args:
        device: Where to run; on a GPU under bf16 autocast.
        size: How large everything is.
        counts: Numbers of heads.
        engine: Engine of `ds.fit`.
        repeats: Epochs that count.
        turn_steps: Steps of the loop's turn.

    Returns:
        Results as in `dissensus_bench.cases`; sides also have `s_an_epoch` and, against the fewest heads, `times_the_fewest`.
    """
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(size.examples, size.features, generator=generator, device=device)
    y = torch.randint(0, size.classes, (size.examples,), generator=generator, device=device)
    backbone = nn.Identity()
    cached = ds.CachedFeatures(x, y)
    make = _maker(size)
    problems = [
        Problem(count, make, x, y, size.batch, turn_steps, "cross_entropy", "adamw", bf16=x.is_cuda) for count in counts
    ]
    yardstick = guided_loop(problems[0])
    results: list[dict[str, Any]] = []
    first: tuple[float, float] | None = None
    for problem in problems:
        watch = Stopwatch({LOOP: guided_loop(problem), "yardstick": yardstick}, problem.device)
        ours = time_fit(
            problem,
            engine,
            watch,
            repeats=repeats,
            members=ds.HeadEnsemble(backbone, make, problem.members),
            data=cached,
            objective=obj.LossGuided(STRENGTH, active=ACTIVE, guard=None),
        )
        # On a CPU, whose speed changes with its neighbours, the same loop beside each is the measure.
        unit = 1.0 if x.is_cuda else watch.best["yardstick"]
        first = first or (ours["ms"], unit)
        times = ours["ms"] / first[0] * first[1] / unit
        ours |= {"s_an_epoch": ours["ms"] * (size.examples / size.batch) / 1e3, "times_the_fewest": times}
        loop_ms = watch.best[LOOP] * 1e3
        ratios = {f"{engine} against {LOOP}": loop_ms / ours["ms"]}
        if problem is not problems[0]:
            ratios[f"cost of {counts[0]} heads / cost of {problem.members}"] = 1 / times
        results.append(
            {
                "case": CASE,
                "what": f"{ACTIVE} of {problem.members} heads, {size}",
                "sides": {f"ds.fit, {engine}": ours, LOOP: {"ms": loop_ms}},
                "ratios": ratios,
                "missing": {},
            }
        )
    return results


def cost_rows(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float, float, float]]:
    """Return what each number of heads costs: the job, ms a step, s an epoch, times the fewest heads', times the loop's speed."""
    rows = []
    for result in results:
        for side in result["sides"].values():
            if "s_an_epoch" in side:
                faster = result["sides"][LOOP]["ms"] / side["ms"]
                rows.append((result["what"], side["ms"], side["s_an_epoch"], side["times_the_fewest"], faster))
    return rows


def _maker(size: Size) -> Callable[[], nn.Module]:
    return lambda: mlp(size.features, [size.features], size.classes, activation=nn.GELU)


def guided_loop(problem: Problem) -> Turn:
    """Return the same training as it is written by hand: the drawn modules run in turn, and an optimizer each."""
    nets = problem.new_nets()
    optimizers = [problem.torch_optimizer(net.parameters()) for net in nets]

    def turn() -> None:
        shape = (problem.turn_steps, problem.batch)
        for rows in torch.randint(len(problem.x), shape, device=problem.device):
            active = torch.randperm(len(nets))[:ACTIVE].tolist()
            x, y = problem.x[rows], problem.y[rows]
            for index in active:
                optimizers[index].zero_grad()
            with torch.autocast(problem.device.type, torch.bfloat16, enabled=problem.bf16):
                logits = torch.stack([nets[index](x) for index in active]).float()
            _guided_loss(logits, y).backward()
            for index in active:
                optimizers[index].step()

    return Turn(turn, problem.turn_steps)


def _guided_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the objective as a function of two members' logits: what `LossGuided` minimises."""
    fit = sum((F.cross_entropy(member, y) for member in logits), torch.zeros((), device=y.device))
    first, second = logits.softmax(-1)
    disagreement = (obj.loss_guided_weights(logits, y) * obj.a2d(first, second)).mean()
    return fit + len(logits) * STRENGTH * disagreement
