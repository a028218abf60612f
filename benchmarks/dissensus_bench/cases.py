"""The cases, by name. Each measures its sides in one run and returns plain dictionaries.

A result has `case`, `what` (the job in words), `sides` (name to milliseconds and more), `ratios` (larger is better for
us, 1 is a tie) and `missing` (peers that took no part, and why).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dissensus as ds
from dissensus.architectures import resnet18
from dissensus.data import augment
from dissensus_bench.cached_heads import FIFTIETH, IMAGENET, guided_heads
from dissensus_bench.encoders import encoder_problems
from dissensus_bench.inference import compare_inference
from dissensus_bench.masked import masked_inference, masked_training
from dissensus_bench.peers import join_peers
from dissensus_bench.problems import Problem, mlp, mlp_problem
from dissensus_bench.rivals import plain_loop, stacked_by_hand
from dissensus_bench.timing import Stopwatch, compare, time_fit

Result = dict[str, Any]
LOOP, STACKED = "plain loop", "vmap by hand"
_YARDSTICK = "plain loop over the fewest heads"
CROP_AND_FLIP = augment.Compose((augment.RandomCrop(4), augment.HorizontalFlip()))


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        device: `"cpu"` or `"cuda"`.
        engines: Engines of `ds.fit`; each case has its own default.
        quick: Smaller and fewer, for a check that takes less than a minute.
    """

    device: str = "cpu"
    engines: tuple[str, ...] | None = None
    quick: bool = False

    @property
    def cuda(self) -> bool:
        """Whether a GPU is measured."""
        return self.device.startswith("cuda")

    @property
    def repeats(self) -> int:
        """Turns of each side."""
        return 5 if self.quick else 8


def small_mlps(options: Options) -> list[Result]:
    """Many small networks, bound by overhead, and ten wider ones, bound by arithmetic."""
    engines = options.engines or (("captured", "compiled") if options.cuda else ("eager", "captured"))
    jobs = {
        "20 x 10-30-30-1, batch 64, Adam": (20, (10, 30, 30, 1), 64),
        "10 x 10-128-128-1, batch 256, Adam": (10, (10, 128, 128, 1), 256),
    }
    results = []
    for what, (members, widths, batch) in jobs.items():
        steps, turn = (1000, 20) if options.cuda else (40, 10) if options.quick else (60, 30)
        problem = mlp_problem(members, widths, batch, steps, turn, options.device)
        results.append(training_result("small-mlps", what, problem, engines, options.repeats))
    return results


class TwoInputs(nn.Module):
    """A network of two inputs, `left` and `right`."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(6, 32), nn.Linear(4, 32), nn.Linear(32, 1)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        """Return a dictionary, as models of others do."""
        return {"prediction": self.out(torch.relu(self.left(left) + self.right(right)))}


class OneInput(TwoInputs):
    """The same network of one tensor."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return the prediction."""
        return super().forward(x[:, :6], x[:, 6:])["prediction"]


def two_inputs(options: Options) -> list[Result]:
    """Trees cost what tensors do: the same network, its two inputs given as one tensor and as a dictionary."""
    engines = options.engines or (("captured", "compiled") if options.cuda else ("eager", "captured"))
    steps = 1000 if options.cuda else 40 if options.quick else 200
    problem = replace(mlp_problem(20, (10, 32, 1), 64, steps, 1, options.device), make=OneInput)
    tree = {"left": problem.x[:, :6].contiguous(), "right": problem.x[:, 6:].contiguous()}
    sides: dict[str, dict[str, Any]] = {}
    ratios: dict[str, float] = {}
    for engine in engines:
        nobody = Stopwatch({}, problem.device)
        one = time_fit(problem, engine, nobody, repeats=options.repeats)
        members = ds.DeepEnsemble(TwoInputs, problem.members, output="prediction")
        two = time_fit(problem, engine, nobody, repeats=options.repeats, members=members, data=(tree, problem.y))
        sides |= {f"one tensor, {engine}": one, f"two inputs, {engine}": two}
        ratios[f"two inputs against one tensor, {engine}"] = one["ms"] / two["ms"]
    what = f"{problem.members} networks of two inputs, batch {problem.batch}, Adam"
    return [{"case": "two-inputs", "what": what, "sides": sides, "ratios": ratios, "missing": {}}]


def transformers(options: Options) -> list[Result]:
    """Five encoders of tokens (ids and mask in, a dictionary out) and five of images, beside a loop over them."""
    engines = options.engines or (("captured", "compiled") if options.cuda else ("eager", "captured"))
    jobs = encoder_problems(options.device, options.quick)
    return [
        training_result("transformers", what, problem, engines, 3 if options.quick else 5, alone=True)
        for what, problem in jobs.items()
    ]


def training_result(
    case: str,
    what: str,
    problem: Problem,
    engines: Sequence[str],
    repeats: int,
    peers: bool = True,
    alone: bool = False,
) -> Result:
    """Train beside the loop; unless it is to stand alone, also beside the program stacked by hand and who else is installed."""
    rivals, missing = join_peers(problem) if peers and not alone else ({}, {})
    by_hand = {} if alone else {STACKED: stacked_by_hand(problem)}
    rivals = {LOOP: plain_loop(problem), **by_hand, **rivals}
    sides, ratios = compare(problem, engines, rivals, repeats=repeats)
    return {"case": case, "what": what, "sides": sides, "ratios": ratios, "missing": missing}


def heads(options: Options) -> list[Result]:
    """Two of M heads a step on cached features: the cost must not grow with M."""
    counts: tuple[int, ...] = (2, 50) if options.quick else (2, 50, 1000)
    if options.cuda:
        widths, batch, steps, turn, engine = (768, 768, 1000), 256, 400, 50, "compiled"
    else:
        widths, batch, steps, turn, engine = (64, 64, 10), 64, 40, 20, "captured"
    engine = (options.engines or (engine,))[-1]
    return heads_results(options.device, counts, widths, batch, steps, turn, engine, options.repeats)


def heads_results(
    device: str,
    counts: Sequence[int],
    widths: tuple[int, int, int],
    batch: int,
    steps: int,
    turn_steps: int,
    engine: str,
    repeats: int,
) -> list[Result]:
    """Train two of M heads for each M, beside a loop that does so."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch * steps, widths[0], generator=generator).to(device)
    y = torch.randint(0, widths[2], (batch * steps,), generator=generator).to(device)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(widths[0], widths[1]), nn.GELU(), nn.Linear(widths[1], widths[2]))

    problems = [
        Problem(members, make, x, y, batch, turn_steps, "cross_entropy", "adamw", bf16=x.is_cuda, picked=2)
        for members in counts
    ]
    results: list[Result] = []
    for problem in problems:
        rivals = {LOOP: plain_loop(problem), _YARDSTICK: plain_loop(problems[0])}
        sides, ratios = compare(problem, [engine], rivals, repeats=repeats)
        what = f"2 of {problem.members} heads {'-'.join(map(str, widths))}, batch {batch}, AdamW"
        results.append({"case": "heads", "what": what, "sides": sides, "ratios": ratios, "missing": {}})
        ratios.pop(f"{engine} against {_YARDSTICK}")
        if problem is not problems[0]:
            name = f"cost of {counts[0]} members / cost of {problem.members}"
            ratios[name] = _cost_ratio(results[0]["sides"], sides, f"ds.fit, {engine}", x.is_cuda)
    return results


def _cost_ratio(few: Mapping[str, Any], many: Mapping[str, Any], side: str, cuda: bool) -> float:
    """Return the cost of few members over that of many.

    The two were not timed in turns; on a CPU, whose speed changes with its neighbours, a loop timed beside both is the
    measure. On a GPU that loop would measure the host, which captured steps do not wait for.
    """
    ratio = few[side]["ms"] / many[side]["ms"]
    return ratio if cuda else ratio * many[_YARDSTICK]["ms"] / few[_YARDSTICK]["ms"]


def guided(options: Options) -> list[Result]:
    """Two of M heads a step by the loss-guided objective, on cached features of ImageNet's size; a fiftieth on a CPU."""
    counts: tuple[int, ...] = (2, 50) if options.quick else (2, 5, 50, 1000)
    size, turn = (IMAGENET, 50) if options.cuda else (FIFTIETH, 20)
    engine = (options.engines or ("captured" if options.quick else "compiled",))[-1]
    return guided_heads(options.device, size, counts, engine, 3 if options.quick else options.repeats, turn)


def resnet(options: Options) -> list[Result]:
    """Five ResNet-18 with crop and flip, beside one eager model and a loop over five."""
    if options.cuda:
        make: Callable[[], nn.Module] = resnet18
        members, size, batch, steps, turn, engine = 5, 32, 128, 100, 10, "compiled"
    else:
        make = _narrow_resnet18
        members, size, batch, steps, turn, engine = 3, 16, 32, 4, 2, "captured"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch * steps, 3, size, size, generator=generator).to(options.device)
    y = torch.randint(0, 10, (batch * steps,), generator=generator).to(options.device)
    problem = Problem(
        members,
        make,
        x,
        y,
        batch,
        turn,
        "cross_entropy",
        "sgd",
        lr=0.1,
        options={"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
        bf16=options.cuda,
        augment=CROP_AND_FLIP,
    )
    precision = "bf16" if options.cuda else "float32"
    what = f"{members} ResNet-18{'' if options.cuda else ' of width 8'}, batch {batch}, SGD, {precision}"
    engine = (options.engines or (engine,))[-1]
    in_flight = 2 if options.cuda else 1
    return [resnet_result(what, problem, engine, 3, None if options.quick else in_flight)]


def _narrow_resnet18() -> nn.Module:
    return resnet18(width=8)


def resnet_result(what: str, problem: Problem, engine: str, repeats: int, in_flight: int | None) -> Result:
    """Train an ensemble, one model with the same engine, and the ensemble with few members in flight."""
    one = replace(problem, members=1)
    bare = replace(problem, augment=None)
    # Elsewhere augmentation is a matter of the data loader, image by image: they are spared it.
    peers, missing = join_peers(bare)
    rivals = {f"{name}, no augmentation": turn for name, turn in peers.items()} | {
        "one eager model": plain_loop(one),
        "one eager model, no augmentation": plain_loop(replace(bare, members=1)),
        LOOP: plain_loop(problem),
        f"{LOOP}, no augmentation": plain_loop(bare),
        STACKED: stacked_by_hand(problem),
    }
    sides, ratios = compare(problem, [engine], rivals, repeats=repeats)
    nobody = Stopwatch({}, problem.device)
    ours = sides[f"ds.fit, {engine}"]["ms"]
    alone = time_fit(one, engine, nobody, repeats=repeats)
    sides[f"one model, ds.fit, {engine}"] = alone
    ratios[f"one model, {engine} / {problem.members} members, {engine}"] = alone["ms"] / ours
    if in_flight is not None:
        few = time_fit(problem, engine, nobody, repeats=repeats, concurrent=in_flight)
        sides[f"ds.fit, {engine}, {in_flight} in flight"] = few
    return {"case": "resnet", "what": what, "sides": sides, "ratios": ratios, "missing": missing}


def inference(options: Options) -> list[Result]:
    """`ds.predict`, and `ds.predict_scores` with every score, beside the bare forward passes of the members' modules."""
    inputs, batch = (2048, 1024) if options.quick else (8192, 1024)
    jobs: dict[str, tuple[int, Callable[[], nn.Module], tuple[int, ...], int, int]] = {
        "20 x 10-30-30-10": (20, lambda: mlp((10, 30, 30, 10)), (10,), inputs, batch),
        "5 x 64-512-512-10": (5, lambda: mlp((64, 512, 512, 10)), (64,), inputs, batch),
    }
    if options.cuda:
        jobs["5 ResNet-18"] = (5, resnet18, (3, 32, 32), 8192, 512)
    return [
        compare_inference(what, *job, device=options.device, repeats=2 * options.repeats) for what, job in jobs.items()
    ]


_SIZES: Mapping[str, tuple[int, ...]] = {
    "members": (1, 2, 5, 10, 20, 50, 100),
    "batch": (16, 64, 256, 1024),
    "width": (16, 32, 64, 128, 256, 512),
}
_QUICK_SIZES: Mapping[str, tuple[int, ...]] = {"members": (1, 10, 50), "batch": (16, 256), "width": (16, 128)}


def scaling(options: Options) -> list[Result]:
    """Cost against the number of members, the batch and the width, around 20 x 10-30-30-1 at batch 64."""
    members, batches, widths = (_QUICK_SIZES if options.quick else _SIZES).values()
    points = (
        [("members", count, count, 64, 30) for count in members]
        + [("batch", size, 20, size, 30) for size in batches]
        + [("width", size, 20, 64, size) for size in widths]
    )
    engines = options.engines or ("captured",)
    results = []
    for axis, value, count, batch, width in points:
        # Short turns are noisy: few members take more steps.
        steps, turn = max(200 if options.cuda else 40, 400 // count), max(10, 100 // count)
        problem = mlp_problem(count, (10, width, width, 1), batch, steps, turn, options.device)
        what = f"{axis}: {count} x 10-{width}-{width}-1, batch {batch}"
        result = training_result("scaling", what, problem, engines, 5, peers=False)
        results.append(result | {"axis": axis, "value": value})
    return results


def masksembles(options: Options) -> list[Result]:
    """A ResNet-18 with four masks: its training step beside the plain one's, predictions beside its members'."""
    if options.cuda:
        make: Callable[[], nn.Module] = resnet18
        size, batch, steps, turn, engine, inputs, at_once = 32, 128, 100, 10, "compiled", 8192, 512
    else:
        make = _small_resnet18
        size, batch, steps, turn, engine, inputs, at_once = 16, 32, 4, 2, "captured", 384, 64
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch * steps, 3, size, size, generator=generator).to(options.device)
    y = torch.randint(0, 10, (batch * steps,), generator=generator).to(options.device)
    problem = Problem(1, make, x, y, batch, turn, "cross_entropy", "sgd", lr=0.1, bf16=options.cuda)
    engine = (options.engines or (engine,))[-1]
    net = "ResNet-18" if options.cuda else "ResNet-18 of width 32"
    repeats = 3 if options.quick else options.repeats
    return [
        masked_training(f"{net}, 4 masks, a training step, batch {batch}", problem, 4, engine, repeats),
        masked_inference(
            f"{net}, 4 masks, predictions",
            make,
            4,
            (3, size, size),
            inputs,
            at_once,
            device=options.device,
            repeats=repeats,
        ),
    ]


def _small_resnet18() -> nn.Module:
    return resnet18(width=32)


class Case(NamedTuple):
    """A case: what it measures, and how."""

    summary: str
    run: Callable[[Options], list[Result]]


CASES: Mapping[str, Case] = {
    "small-mlps": Case("20 small MLPs and 10 wider ones, Adam", small_mlps),
    "heads": Case("two of M heads trained a step, M up to 1000", heads),
    "ldr-imagenet-size": Case("two of M loss-guided heads a step, on features of ImageNet's size", guided),
    "resnet": Case("five ResNet-18 (on a CPU three narrow ones)", resnet),
    "inference": Case("predictions with all scores against bare forward passes", inference),
    "masksembles": Case("a ResNet-18 with masks beside the plain one and its members", masksembles),
    "scaling": Case("cost against members, batch and width", scaling),
    "two-inputs": Case("one network on one tensor and on two inputs", two_inputs),
    "transformers": Case("five BERT-shaped networks and five vision transformers", transformers),
}

# What a quick run leaves out unless it is asked for by name.
_LONG = ("ldr-imagenet-size", "resnet", "masksembles", "two-inputs", "transformers")


def default_cases(quick: bool) -> list[str]:
    """Return the names of the cases that run if none is named.

    Example:
        >>> default_cases(quick=True)
        ['small-mlps', 'heads', 'inference', 'scaling']
    """
    return [name for name in CASES if not (quick and name in _LONG)]
