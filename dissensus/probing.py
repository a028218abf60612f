"""Adaptation by a linear probe: features of a frozen backbone once, then logistic regression on them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dissensus import metrics
from dissensus._signatures import checked, real_number, whole_number
from dissensus.caching import cache_features, one_network
from dissensus.data.features import CachedFeatures, as_real
from dissensus.data.sources import Array, Pairs, check_labels_fit, device_named, device_of
from dissensus.members import DeepEnsemble
from dissensus.members.stacking import tensors_of
from dissensus.randomness import derive, permutation
from dissensus.training import fit

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
# Largest gradient and smallest change at which solving ends. Choosing needs the order of the strengths only; what is
# reported is solved more precisely.
_CHOOSING = {"tolerance_grad": 1e-4, "tolerance_change": 1e-7}
_FINAL = {"tolerance_grad": 1e-5, "tolerance_change": 1e-10}


@dataclass(frozen=True)
class Tried:
    """One strength of the regularisation and what it gave on the validation data.

    Attributes:
        strength: Inverse strength C: smaller is more regularised.
        accuracy: Accuracy on the validation data.
        nll: Mean negative log-likelihood there, in nats.
    """

    strength: float
    accuracy: float
    nll: float


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """A linear probe and how good it is.

    Attributes:
        accuracy: Accuracy on the test data.
        ece: Expected calibration error there, 15 bins.
        nll: Mean negative log-likelihood there, in nats.
        strength: Inverse strength C of the regularisation that was chosen.
        curve: What every strength gave on the validation data; empty where only one was asked for.
        head: The classifier: features to logits.
        probs: Probabilities of the test data, `(test inputs, classes)`.
    """

    accuracy: float
    ece: float
    nll: float
    strength: float
    curve: tuple[Tried, ...]
    head: nn.Linear
    probs: Tensor


@checked
def linear_probe(
    backbone: nn.Module | None,
    train: Pairs | CachedFeatures,
    test: Pairs | CachedFeatures,
    validation: Pairs | CachedFeatures | None = None,
    *,
    method: Literal["lbfgs", "sgd"] = "lbfgs",
    strengths: Sequence[float] | Array = STRENGTHS,
    validation_share: float = 0.2,
    standardise: bool = True,
    refit: bool = True,
    max_steps: int = 500,
    epochs: int = 30,
    lr: float = 0.1,
    batch_size: int = 256,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> LinearProbe:
    r"""Fit a linear classifier on a frozen backbone's features, and measure it.

    $$\min_{W,b}\ \frac1N\sum_n -\log \mathrm{softmax}(W f(x_n) + b)_{y_n} + \frac{1}{2CN}\lVert W\rVert^2$$

    This is scikit-learn's `LogisticRegression(C=C)`, after its `StandardScaler` if features are standardised; for two classes,
    which have one vector of weights there, the penalty is twice this. C is chosen by the accuracy on validation data (the
    likelihood breaks ties).

    Args:
        backbone: A network from inputs to features; None where the data is features already. A classifier is probed on its class
            logits: `backbone, _ = ds.cut(net, 1)` is what comes before its last layer. Of an ensemble take a member,
            `ds.cut(ens.member(0), 1)`.
        train: Inputs and class labels.
        test: Data to measure on.
        validation: Data to choose the strength on; by default a share of the training data is held out for it.
        method: `"lbfgs"` solves the problem; `"sgd"` trains one head for each strength, all at once, with weight decay
            (on the bias too), momentum and a cosine schedule.
        strengths: Values of C to choose from, a list or an array; with one there is nothing to choose, and nothing is held out.
        validation_share: Share of the training data that is held out, drawn at random.
        standardise: Scale features to mean 0 and deviation 1 on the training data; strengths then mean the same for every
            backbone.
        refit: Fit once more on all training and validation data with the strength that was chosen.
        max_steps: Most steps of L-BFGS for each strength.
        epochs: Epochs of SGD.
        lr: Learning rate of SGD.
        batch_size: Inputs that go through the backbone at once, and examples of a step of SGD.
        seed: Decides what is held out, and the order of SGD.
        device: Where to run: by default where the backbone is; `"auto"` takes a GPU if there is one, as in `fit`.

    Returns:
        The probe. Reading: the accuracy says how much of the task is linearly there in the features.

    Example:
        >>> x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
        >>> y = (x[:, 0] > 0).long()
        >>> probe = linear_probe(None, (x[:150], y[:150]), (x[150:], y[150:]))
        >>> probe.accuracy > 0.9, len(probe.curve)
        (True, 7)
    """
    tried = sorted(_checked(strengths))
    real_number("validation_share", validation_share, above=True, below=1.0)
    for name, number in {"max_steps": max_steps, "epochs": epochs, "batch_size": batch_size}.items():
        whole_number(name, number, 1)
    net = nn.Identity() if backbone is None else one_network(backbone)
    device = device_of(net) if device is None else device_named(device)
    features = partial(_features, net, batch_size, device)
    x, y = features("training", train)
    least, classes = int(y.min()), int(y.max()) + 1
    if least < 0 or classes < 2:
        raise ValueError(f"The training labels must number two classes or more from 0; got {least} to {classes - 1}.")
    x_test, y_test = features("test", test, x.shape[1])
    check_labels_fit(y_test, classes, "test")
    held_out = None if validation is None else features("validation", validation, x.shape[1])
    if held_out is not None:
        check_labels_fit(held_out[1], classes, "validation")
    sgd = {"epochs": epochs, "lr": lr, "batch_size": batch_size, "seed": seed}
    solve = partial(_by_lbfgs, classes, max_steps) if method == "lbfgs" else partial(_by_sgd, classes, sgd)
    curve: tuple[Tried, ...] = ()
    strength = tried[0]
    if len(tried) > 1:
        if held_out is None:
            (x, y), held_out = _split(x, y, validation_share, seed)
        heads = list(_path(solve, x, y, tried, _CHOOSING, standardise))
        curve = tuple(_tried(strength, head, *held_out) for strength, head in heads)
        strength = max(curve, key=lambda tried: (tried.accuracy, -tried.nll)).strength
    if refit and held_out is not None:
        x, y = torch.cat([x, held_out[0]]), torch.cat([y, held_out[1]])
    ((_, head),) = _path(solve, x, y, [strength], _FINAL, standardise)
    with torch.no_grad():
        logits = head(x_test)
    probs, nll = logits.softmax(-1), float(F.cross_entropy(logits, y_test))
    accuracy, ece = metrics.accuracy(probs, y_test), metrics.ece(probs, y_test)
    return LinearProbe(accuracy, ece, nll, strength, curve, head, probs.cpu())


def _checked(strengths: Sequence[float] | Array) -> list[float]:
    listed = strengths.tolist() if isinstance(strengths, Tensor | np.ndarray) else list(strengths)
    numbers = isinstance(listed, list) and all(isinstance(each, int | float | np.number) for each in listed)
    if not listed or not numbers or not all(0 < each < inf for each in listed):
        raise ValueError(f"`strengths` must be finite positive numbers, at least one, in a list; got {strengths!r}.")
    return [float(each) for each in listed]


def _features(
    net: nn.Module, batch_size: int, device: torch.device, name: str, data: Any, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return all features, of the width of the training data's, and labels of a set, on the device."""
    if not isinstance(data, CachedFeatures):
        data = cache_features(net, data, batch_size=batch_size, device=device)
    elif tensors_of(net):
        data.check_backbone(net)
    if data.targets is None or data.targets.is_floating_point() or data.targets.ndim != 1:
        raise ValueError("A linear probe needs one class label for each input. Hand over (inputs, labels).")
    x = as_real(data.resident(device)).flatten(1)
    if width is not None and x.shape[1] != width:
        raise ValueError(
            f"The {name} inputs must have as many features as the training inputs, {width}; got {x.shape[1]}. Take them "
            "from the same backbone."
        )
    return x, data.targets.long().to(device)


def _split(x: Tensor, y: Tensor, share: float, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return training and validation data, of which the latter is held out."""
    count = round(share * len(x))
    if not 0 < count < len(x):
        raise ValueError(
            f"Holding out {share} of {len(x)} examples leaves one side empty. Pass `validation`, or one strength."
        )
    order = permutation(torch.tensor(derive(seed, "held out")), len(x)).to(x.device)
    return [(x[rows], y[rows]) for rows in (order[count:], order[:count])]


@torch.no_grad()
def _tried(strength: float, head: nn.Linear, x: Tensor, y: Tensor) -> Tried:
    logits = head(x)
    return Tried(strength, float((logits.argmax(-1) == y).float().mean()), float(F.cross_entropy(logits, y)))


Tolerance = dict[str, float]
Solve = Callable[[Tensor, Tensor, Sequence[float], Tolerance], Iterable[tuple[Tensor, Tensor]]]


def _path(
    solve: Solve, x: Tensor, y: Tensor, strengths: Sequence[float], tolerance: Tolerance, standardise: bool
) -> Iterator[tuple[float, nn.Linear]]:
    """Yield each strength and its classifier, in terms of the features as they came."""
    mean, scale = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    if standardise:
        mean, scale = x.mean(0), x.std(0, correction=0)
        # A feature that never varies stays as it is, as in scikit-learn.
        scale = torch.where(scale > 10 * torch.finfo(x.dtype).eps * mean.abs(), scale, torch.ones_like(scale))
        x = (x - mean) / scale
    for strength, (weight, bias) in zip(strengths, solve(x, y, strengths, tolerance), strict=True):
        # Not initialised: that would draw from the global generator.
        head = nn.utils.skip_init(nn.Linear, x.shape[1], len(bias), device=x.device, dtype=x.dtype)
        assert isinstance(head, nn.Linear)
        with torch.no_grad():
            head.weight.copy_(weight / scale)
            head.bias.copy_(bias - (weight / scale) @ mean)
        yield strength, head


def _decay(strength: float, classes: int, x: Tensor) -> float:
    """Return the weight decay of an inverse strength."""
    # scikit-learn has one vector for two classes, the difference of these: being opposite, its square is twice the sum of theirs.
    return (2 if classes == 2 else 1) / (strength * len(x))


def _by_lbfgs(
    classes: int, max_steps: int, x: Tensor, y: Tensor, strengths: Sequence[float], tolerance: Tolerance
) -> Iterator[tuple[Tensor, Tensor]]:
    """Solve from the strongest regularisation to the weakest, each from where the last one ended."""
    weight = x.new_zeros(classes, x.shape[1], requires_grad=True)
    bias = x.new_zeros(classes, requires_grad=True)
    for strength in strengths:
        options: dict[str, Any] = {"history_size": 10, "line_search_fn": "strong_wolfe", **tolerance}
        optimizer = torch.optim.LBFGS([weight, bias], max_iter=max_steps, **options)

        def loss(strength: float = strength, optimizer: torch.optim.LBFGS = optimizer) -> Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(F.linear(x, weight, bias), y)
            value = value + _decay(strength, classes, x) / 2 * weight.square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        yield weight.detach().clone(), bias.detach().clone()


def _by_sgd(
    classes: int, settings: Mapping[str, Any], x: Tensor, y: Tensor, strengths: Sequence[float], _: object
) -> list[tuple[Tensor, Tensor]]:
    """Train the heads of all strengths at once, as members of one ensemble."""
    heads = DeepEnsemble(lambda: nn.Linear(x.shape[1], classes, dtype=x.dtype), len(strengths), settings["seed"])
    fit(
        heads,
        (x, y),
        optimizer="sgd",
        weight_decay=[_decay(strength, classes, x) for strength in strengths],
        optimizer_options={"momentum": 0.9},
        schedule="cosine",
        device=x.device,
        progress=False,
        **settings,
    )
    return [(head.get_parameter("weight").detach(), head.get_parameter("bias").detach()) for head in heads]
