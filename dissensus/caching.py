"""A backbone run once over a data set, its features written where training reads them at memory speed."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dissensus._checks import explained
from dissensus._signatures import checked, whole_number
from dissensus.data.augment import Augmentation
from dissensus.data.features import FEATURES, TARGETS, CachedFeatures, Facts, content_of
from dissensus.data.fingerprints import attributes_of, described, network_digest
from dissensus.data.sources import Arrays, Inputs, Pairs, Source, device_named, device_of, not_finite, source_of
from dissensus.data.trees import Batch, Output, Tree, call, pick
from dissensus.members import HeadEnsemble, Members
from dissensus.members.members import evaluation_mode
from dissensus.randomness import Noise, derive, fold, seeded, signed

# Seconds between two notes of how far writing has come; what was written after the last one is computed again.
_NOTE_EVERY = 2.0
# Largest difference from the stored features of the first example, relative to their length, that rounding may explain.
_ROUNDING = 0.1
_DTYPES = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


@checked
def cache_features(
    backbone: nn.Module,
    data: Inputs | Pairs,
    path: str | Path | None = None,
    *,
    passes: int = 1,
    augment: Augmentation | None = None,
    batch_size: int = 256,
    dtype: torch.dtype | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    seed: int = 0,
    workers: int = 0,
    device: str | torch.device | None = None,
    resident_limit: int | None = None,
    features: Output = None,
) -> CachedFeatures:
    """Run a frozen backbone once over data and keep what it says.

    With a path the features go into a folder: two `.npy` files and a JSON file, nothing pickled. The same call again opens them,
    or goes on where a killed process stopped; the result is the same, row by row. A folder that was made from another
    backbone, other weights or plain attributes (numbers, words, functions by name) of it, other data or other settings is refused,
    never overwritten; so is one whose first row is not what the backbone gives now.

    Args:
        backbone: A network from inputs to features, or a `HeadEnsemble`, whose backbone is run.
        data: A pair (inputs, targets) of arrays, inputs alone, a Dataset of such pairs or inputs, or a DataLoader that does not
            shuffle, of which dataset, collate function and workers are used.
        path: Folder to keep the features in; in memory by default.
        passes: How often to go through the data. More than once needs random inputs: `augment`, or a Dataset with random
            transforms.
        augment: A function `(x, y, noise) -> (x, y)`, see `dissensus.data.augment`. Every example is changed on its own, by
            noise of (seed, pass, example); augmentations that mix examples have nothing to mix. It is recognised by its class
            and attributes, a function by its name and code.
        batch_size: Inputs that go through the backbone at once; it changes speed, and features by rounding only.
        dtype: Precision in which features are kept, `torch.float16` for half the size; by default that of what the backbone
            gives, but float32 for bfloat16, which NumPy does not have.
        precision: `"fp32"`, or `"bf16"` to run the backbone under autocast.
        seed: Decides the augmentation, and what random transforms in a Dataset draw.
        workers: Processes that load the items of a Dataset ahead.
        device: Where to run; by default where the backbone is. The backbone moves there and stays.
        resident_limit: Bytes up to which training moves the features to its device whole; half of what is free by default.
        features: What to keep of a backbone that returns several tensors: a key, an index or a function (of a `HeadEnsemble`
            what its heads take).

    Returns:
        The features, for `fit`, `predict` and `evaluate` in place of the data.

    Example:
        >>> backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
        >>> x, y = torch.randn(100, 8, 8), torch.randint(0, 3, (100,))
        >>> cached = cache_features(backbone, (x, y))
        >>> cached.features.shape, len(cached.targets)
        (torch.Size([100, 16]), 100)
    """
    net = one_network(backbone)
    if isinstance(backbone, HeadEnsemble):
        features = backbone.takes
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"`dtype` must be torch.float16, float32 or float64; got {dtype}.")
    passes, batch_size = whole_number("passes", passes, 1), whole_number("batch_size", batch_size, 1)
    source = source_of(data, batch_size, derive(seed, "features"), workers)
    if device is not None:
        net.to(device_named(device))
    identity = {
        "data": source.digest(),
        "precision": precision,
        "augment": described(augment),
        # What is not random does not depend on it.
        "seed": seed if passes > 1 or augment is not None else 0,
    }
    job = _Job(net, source, passes, augment, derive(seed, "features"), features, dtype, identity)
    folder = None if path is None else Path(path)
    with evaluation_mode(net), seeded(0):
        facts, arrays = _begun(job, folder)
        _write(job, facts, arrays, folder)
        return facts.cached(folder, arrays, resident_limit)


def one_network(backbone: nn.Module) -> nn.Module:
    """Return the network that computes features, of a HeadEnsemble its backbone."""
    net = backbone.backbone if isinstance(backbone, HeadEnsemble) else backbone
    if isinstance(net, Members):
        raise ValueError(
            f"`backbone` must be one network, or a HeadEnsemble; got {type(net).__name__}. Take one of its members without its "
            "last layer: backbone, _ = ds.cut(ens.member(0), 1)."
        )
    return net


@dataclass(frozen=True)
class _Job:
    """The backbone at work: features of every row, in order."""

    net: nn.Module
    source: Source
    passes: int
    augment: Augmentation | None
    key: int
    takes: Output
    dtype: torch.dtype | None
    identity: dict[str, Any]

    def __post_init__(self) -> None:
        if self.passes > 1 and self.augment is None and isinstance(self.source, Arrays):
            raise ValueError(f"{self.passes} passes over the same arrays give the same features. Pass `augment`.")

    def batches(self, done: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield features and targets of all rows after the first `done`."""
        first_pass, start = divmod(done, len(self.source))
        for number in range(first_pass, self.passes):
            place = start if number == first_pass else 0
            for x, y in self.source.load(range(place, len(self.source)), number):
                yield self._features(x, y, number, place)
                place += len(x)

    def first(self) -> Tensor:
        """Return the features of the first row alone."""
        return self._features(*next(self.source.load(range(1), 0)), 0, 0)[0]

    def _features(self, x: Batch, y: Tensor | None, number: int, start: int) -> tuple[Tensor, Tensor | None]:
        place = device_of(self.net)
        x = x.to(place)
        if self.augment is not None:
            if isinstance(x, Tree):
                raise ValueError("`augment` changes one tensor, and these are several. Augment them in a Dataset.")
            x, y = self._augmented(x, y, number, start)
        with torch.autocast(place.type, torch.bfloat16, enabled=self.identity["precision"] == "bf16"):
            features = pick(explained(partial(call, self.net), self.net)(x), self.takes)
        if not features.is_floating_point() or features.shape[:1] != x.shape[:1]:
            raise ValueError(
                f"A backbone must give one tensor of real numbers with a row for each of {len(x)} inputs; got "
                f"{features.dtype} shaped {tuple(features.shape)}."
            )
        return features, y

    def _augmented(self, x: Tensor, y: Tensor | None, number: int, start: int) -> tuple[Tensor, Tensor | None]:
        """Change each example by noise of its own, as if it were the one example of a member's batch."""
        assert self.augment is not None
        pass_key = torch.tensor(derive(self.key, "augment", number), device=x.device)
        keys = fold(pass_key, torch.arange(start, start + len(x), device=x.device))
        labels = torch.zeros(len(x), dtype=torch.int64) if y is None else y
        found = self.augment(x[:, None], labels.to(x.device)[:, None], Noise(keys))
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(f"`augment` must return changed inputs and targets, (x, y); got {type(found).__name__}.")
        x, labels = found
        return x[:, 0], None if y is None else labels[:, 0]


def _layout(job: _Job) -> Facts:
    """Run the backbone on a few inputs to see what it gives, and what it is."""
    seen = [attributes_of(job.net)]
    features, targets = next(iter(job.batches()))
    seen.append(attributes_of(job.net))
    job.first()
    seen.append(attributes_of(job.net))
    # A network may count its passes, or keep the size of a batch; that makes it no other one.
    names = {name for attributes in seen for name in attributes}
    changing = sorted(name for name in names if len({attributes.get(name) for attributes in seen}) > 1)
    identity = {"backbone": network_digest(job.net, changing), "changing": changing, **job.identity}
    kept = job.dtype or (features.dtype if features.dtype in _DTYPES else torch.float32)
    about = None if targets is None else [list(targets.shape[1:]), str(targets.cpu().numpy().dtype)]
    shape = list(features.shape[1:])
    return Facts(len(job.source), job.passes, shape, np.dtype(_DTYPES[kept]).name, about, identity)


def _begun(job: _Job, folder: Path | None) -> tuple[Facts, dict[str, np.ndarray]]:
    """Return what a folder holds of these features, or new arrays for them, in files or in memory."""
    facts = None if folder is None else Facts.read(folder)
    if folder is None or facts is None:
        facts = _layout(job)
        return facts, facts.create(folder)
    _check_same(facts, job, folder)
    arrays = facts.load(folder, "r+")
    _check_first(facts, job, arrays[FEATURES], folder)
    return facts, arrays


def _check_same(facts: Facts, job: _Job, folder: Path) -> None:
    """Refuse a folder of other features than those that are asked for."""
    if job.identity["augment"] is None:
        raise ValueError(
            f"The feature cache in {folder} cannot be recognised with this `augment`: it holds what has no value that Python shows (a "
            "generator, a lock, a file). Open it with ds.CachedFeatures.open, or write the augmentation as a dataclass of numbers."
        )
    stored = facts.identity | vars(facts)
    asked = {
        "backbone": network_digest(job.net, facts.identity.get("changing", ())),
        **job.identity,
        "examples": len(job.source),
        "passes": job.passes,
        "dtype": facts.dtype if job.dtype is None else np.dtype(_DTYPES[job.dtype]).name,
    }
    for name, value in asked.items():
        if stored.get(name) != value:
            raise _another(folder, f"{name} is {stored.get(name)} there and {value} here")


def _check_first(facts: Facts, job: _Job, stored: np.ndarray, folder: Path) -> None:
    """Refuse features that the backbone does not give: what its code does, no hash of it tells."""
    features = job.first()
    shape = tuple(features.shape[1:])
    if list(shape) != facts.shape:
        raise _another(folder, f"its features are shaped {tuple(facts.shape)}, and this backbone gives {shape}")
    if facts.done == 0:
        return
    now, then = features[0].double().cpu(), torch.tensor(stored[0]).double()
    apart = float((now - then).norm()) / max(float(now.norm()), float(then.norm()), 1e-30)
    if not apart <= _ROUNDING:
        made = "what this backbone, or `augment`, makes of the first example differs from what is stored"
        raise _another(folder, f"{made} by {apart:.0%}, though weights and settings are the same")


def _another(folder: Path, why: str) -> ValueError:
    return ValueError(f"The feature cache in {folder} is another one: {why}. Choose another folder or delete this one.")


def _write(job: _Job, facts: Facts, arrays: dict[str, np.ndarray], folder: Path | None) -> None:
    """Fill the arrays from where they were left, noting in the folder from time to time how far that is."""
    if facts.done == facts.rows:
        return
    noted = time.monotonic()
    for features, targets in job.batches(facts.done):
        rows = slice(facts.done, facts.done + len(features))
        values = features.float() if features.dtype == torch.bfloat16 else features
        with np.errstate(over="ignore"):  # what is too large for half precision is found below
            arrays[FEATURES][rows] = values.cpu().numpy()
        labels = None
        if targets is not None:
            arrays[TARGETS][rows] = targets.cpu().numpy()
            labels = torch.from_numpy(np.array(arrays[TARGETS][rows]))
        kept = torch.from_numpy(np.array(arrays[FEATURES][rows]))
        if bad := not_finite(kept):
            raise ValueError(
                f"Features must be finite; those of row {facts.done + bad[0]} are not, as {facts.dtype}. Look at that input, or "
                "keep them as torch.float32."
            )
        facts.content = signed(facts.content + content_of(kept, labels, facts.done))
        facts.done = rows.stop
        if folder is not None and (time.monotonic() - noted > _NOTE_EVERY or facts.done == facts.rows):
            facts.write(folder, arrays)
            noted = time.monotonic()
    if facts.done != facts.rows:
        raise ValueError(f"The data said that it has {facts.rows} rows and gave {facts.done}.")
