"""A backbone run once over a data set, its features written where training reads them at memory speed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from dissensus.data.augment import Augmentation
from dissensus.data.features import FEATURES, TARGETS, CachedFeatures, Facts, wrapped
from dissensus.data.fingerprints import Fingerprint, network_digest, sum_of_rows
from dissensus.data.sources import Inputs, Pairs, as_tensor, device_of, first_of
from dissensus.members import HeadEnsemble, Members
from dissensus.members.modes import evaluation_mode
from dissensus.randomness import Noise, derive, fold, seeded

# Items of a Dataset that are read to recognise it; all of them would take as long as caching itself.
_LOOKED_AT = 32
# Seconds between two notes of how far writing has come; what was written after the last one is computed again.
_NOTE_EVERY = 2.0
_DTYPES = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}

Batches = Iterator[tuple[Tensor, Tensor | None]]


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
) -> CachedFeatures:
    """Run a frozen backbone once over data and keep what it says.

    With a path the features go into a folder: two `.npy` files and a JSON file, nothing pickled. The same call again opens them,
    or goes on where a killed process stopped; the result is the same, row by row. A folder that was made from another
    backbone, other weights, other data or other settings is refused, never overwritten.

    Args:
        backbone: A network from inputs to features, or a `HeadEnsemble`, whose backbone is run.
        data: A pair (inputs, targets) of arrays, inputs alone, a Dataset, or a DataLoader that does not shuffle.
        path: Folder to keep the features in; in memory by default.
        passes: How often to go through the data. More than once needs random inputs: `augment`, or a Dataset with random
            transforms.
        augment: A function `(x, y, noise) -> (x, y)`, see `dissensus.data.augment`. Every example is changed on its own, by
            noise of (seed, pass, example); augmentations that mix examples have nothing to mix.
        batch_size: Inputs that go through the backbone at once; it changes speed only.
        dtype: Precision in which features are kept, `torch.float16` for half the size; the backbone's by default.
        precision: `"fp32"`, or `"bf16"` to run the backbone under autocast.
        seed: Decides the augmentation, and what random transforms in a Dataset draw.
        workers: Processes that load the items of a Dataset ahead.
        device: Where to run; by default where the backbone is. The backbone moves there and stays.
        resident_limit: Bytes up to which training moves the features to its device whole; half of what is free by default.

    Returns:
        The features, for `fit`, `predict` and `evaluate` in place of the data.

    Example:
        >>> backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
        >>> x, y = torch.randn(100, 8, 8), torch.randint(0, 3, (100,))
        >>> cached = cache_features(backbone, (x, y))
        >>> cached.features.shape, len(cached.targets)
        (torch.Size([100, 16]), 100)
    """
    net = backbone.backbone if isinstance(backbone, HeadEnsemble) else backbone
    if not isinstance(net, nn.Module) or isinstance(net, Members):
        raise ValueError(f"`backbone` must be a network or a HeadEnsemble; got {type(net).__name__}.")
    _check(passes, batch_size, dtype, precision)
    source = _source_of(data, batch_size, derive(seed, "features"), workers)
    if passes > 1 and augment is None and isinstance(source, _Arrays):
        raise ValueError(f"{passes} passes over the same arrays give the same features. Pass `augment`.")
    if device is not None:
        net.to(device)
    job = _Job(net, source, passes, augment, precision == "bf16", derive(seed, "features"))
    identity = {
        "backbone": network_digest(net),
        "data": source.digest(),
        "precision": precision,
        "augment": _describe(augment),
        # What is not random does not depend on it.
        "seed": seed if passes > 1 or augment is not None else 0,
    }
    with evaluation_mode(net), seeded(0):
        if path is None:
            return _in_memory(job, dtype, identity, resident_limit)
        return _in_files(job, Path(path), dtype, identity, resident_limit)


def _check(passes: int, batch_size: int, dtype: torch.dtype | None, precision: str) -> None:
    for name, value in (("passes", passes), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1; got {value}.")
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"`dtype` must be torch.float16, float32 or float64; got {dtype}.")
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"`precision` must be 'fp32' or 'bf16'; got {precision!r}.")


def _describe(augment: Augmentation | None) -> str:
    if augment is None or not hasattr(augment, "__qualname__"):
        return repr(augment)
    return f"{augment.__module__}.{augment.__qualname__}"


@runtime_checkable
class _Source(Protocol):
    """Data in order: how much there is, what it is, and its batches from a row on."""

    @property
    def count(self) -> int: ...

    def digest(self) -> str: ...

    def batches(self, number: int, start: int) -> Batches: ...


@dataclass(frozen=True)
class _Arrays:
    """Inputs, and targets if there are any, as arrays; they may be memory-mapped."""

    x: Any
    y: Any
    batch_size: int

    @property
    def count(self) -> int:
        return len(self.x)

    def digest(self) -> str:
        """Return a hash of everything."""
        fingerprint = Fingerprint()
        for x, y in self.batches(0, 0):
            fingerprint.add(x, y)
        return fingerprint.whole()

    def batches(self, number: int, start: int) -> Batches:
        """Yield slices; every pass is the same."""
        for first in range(start, self.count, self.batch_size):
            rows = slice(first, first + self.batch_size)
            yield as_tensor(self.x[rows], "x"), None if self.y is None else as_tensor(self.y[rows], "y")


class _Items(Dataset[Any]):
    """Items of a Dataset from some index on; what is random in them is a function of (seed, pass, index)."""

    def __init__(self, dataset: Dataset[Any], indices: range | list[int], key: int) -> None:
        self.dataset, self.indices, self.key = dataset, indices, key

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> Any:
        index = self.indices[place]
        with seeded(derive(self.key, index)):
            return self.dataset[index]


@dataclass(frozen=True)
class _Loaded:
    """A map-style Dataset."""

    dataset: Dataset[Any]
    batch_size: int
    key: int
    workers: int

    @property
    def count(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def digest(self) -> str:
        """Return a hash of the number of items and of some that lie evenly among them."""
        some = np.linspace(0, self.count - 1, min(_LOOKED_AT, self.count)).astype(int).tolist()
        fingerprint = Fingerprint()
        for x, y in self._load(some, 0, workers=0):
            fingerprint.add(x, y)
        return f"{self.count} items, {fingerprint.whole()}"

    def batches(self, number: int, start: int) -> Batches:
        """Yield items as batches, loaded ahead if there are workers."""
        yield from self._load(range(start, self.count), number, self.workers)

    def _load(self, indices: range | list[int], number: int, workers: int) -> Batches:
        items = _Items(self.dataset, indices, derive(self.key, "items", number))
        loader: DataLoader[Any] = DataLoader(
            items, self.batch_size, num_workers=workers, generator=torch.Generator()
        )
        for batch in loader:
            pair = isinstance(batch, tuple | list) and len(batch) > 1
            yield first_of(batch), torch.as_tensor(batch[1]) if pair else None


def _source_of(data: Any, batch_size: int, key: int, workers: int) -> _Source:
    if isinstance(data, CachedFeatures):
        raise ValueError("These are features already. Hand over the data that the backbone reads.")
    if isinstance(data, DataLoader):
        if not isinstance(data.sampler, SequentialSampler) or data.batch_sampler is None:
            raise ValueError(
                "A DataLoader must give its items in order. Leave shuffling out, or hand over its dataset."
            )
        data, workers = data.dataset, workers or data.num_workers
    if isinstance(data, TensorDataset):
        data = data.tensors if len(data.tensors) > 1 else data.tensors[0]
    source: _Source
    if isinstance(data, Dataset):
        source = _Loaded(data, batch_size, key, workers)
    elif isinstance(data, tuple | list):
        if len(data) != 2 or len(data[0]) != len(data[1]):
            sizes = ", ".join(str(len(part)) for part in data)
            raise ValueError(
                f"Data must be a pair (inputs, targets) with one target for each input; got lengths {sizes}."
            )
        source = _Arrays(data[0], data[1], batch_size)
    else:
        source = _Arrays(data, None, batch_size)
    if source.count == 0:
        raise ValueError("There is nothing to cache: the data is empty.")
    return source


@dataclass(frozen=True)
class _Job:
    """The backbone at work: features of every row, in order."""

    net: nn.Module
    source: _Source
    passes: int
    augment: Augmentation | None
    bf16: bool
    key: int

    @property
    def rows(self) -> int:
        return self.source.count * self.passes

    def batches(self, done: int = 0) -> Batches:
        """Yield features and targets of all rows after the first `done`."""
        first_pass, start = divmod(done, self.source.count)
        for number in range(first_pass, self.passes):
            place = start if number == first_pass else 0
            for x, y in self.source.batches(number, place):
                yield self._features(x, y, number, place)
                place += len(x)

    def _features(self, x: Tensor, y: Tensor | None, number: int, start: int) -> tuple[Tensor, Tensor | None]:
        place = device_of(self.net)
        x = x.to(place)
        if self.augment is not None:
            x, y = self._augmented(x, y, number, start)
        with torch.autocast(place.type, torch.bfloat16, enabled=self.bf16):
            features = self.net(x)
        if (
            not isinstance(features, Tensor)
            or not features.is_floating_point()
            or features.shape[:1] != x.shape[:1]
        ):
            shape = tuple(getattr(features, "shape", ()))
            raise ValueError(
                f"A backbone must give one tensor of real numbers with a row for each of {len(x)} inputs; got "
                f"{type(features).__name__} shaped {shape}."
            )
        return features, y

    def _augmented(
        self, x: Tensor, y: Tensor | None, number: int, start: int
    ) -> tuple[Tensor, Tensor | None]:
        """Change each example by noise of its own, as if it were the one example of a member's batch."""
        assert self.augment is not None
        pass_key = torch.tensor(derive(self.key, "augment", number), device=x.device)
        keys = fold(pass_key, torch.arange(start, start + len(x), device=x.device))
        labels = torch.zeros(len(x), dtype=torch.int64) if y is None else y
        x, labels = self.augment(x[:, None], labels.to(x.device)[:, None], Noise(keys))
        return x[:, 0], None if y is None else labels[:, 0]


def _layout(job: _Job, dtype: torch.dtype | None, identity: dict[str, Any]) -> Facts:
    """Run the backbone on a few inputs to see what it gives."""
    features, targets = next(iter(job.batches()))
    kept = dtype or (features.dtype if features.dtype == torch.float64 else torch.float32)
    about = None if targets is None else [list(targets.shape[1:]), str(targets.cpu().numpy().dtype)]
    shape = list(features.shape[1:])
    return Facts(job.source.count, job.passes, shape, np.dtype(_DTYPES[kept]).name, about, identity)


def _in_memory(
    job: _Job, dtype: torch.dtype | None, identity: dict[str, Any], resident_limit: int | None
) -> CachedFeatures:
    facts = _layout(job, dtype, identity)
    arrays = {name: np.empty(shape, kind) for name, (shape, kind) in facts.arrays().items()}
    _write(job, facts, arrays, lambda: None)
    targets = None if facts.targets is None else torch.from_numpy(arrays[TARGETS])
    return CachedFeatures(
        torch.from_numpy(arrays[FEATURES]),
        targets,
        job.passes,
        identity["backbone"],
        identity["data"],
        facts.content,
        None,
        resident_limit,
    )


def _in_files(
    job: _Job, folder: Path, dtype: torch.dtype | None, identity: dict[str, Any], resident_limit: int | None
) -> CachedFeatures:
    facts = Facts.read(folder)
    if facts is None:
        facts = _layout(job, dtype, identity)
        arrays = facts.create(folder)
    else:
        _check_same(facts, job, dtype, identity, folder)
        arrays = facts.load(folder, "r+")
    if facts.done < facts.rows:

        def note() -> None:
            for array in arrays.values():
                array.flush()  # type: ignore[attr-defined]
            facts.write(folder)

        _write(job, facts, arrays, note)
    return facts.open(folder, resident_limit)


def _check_same(
    facts: Facts, job: _Job, dtype: torch.dtype | None, identity: dict[str, Any], folder: Path
) -> None:
    """Refuse a folder of other features than those that are asked for."""
    stored = {**facts.identity, "examples": facts.examples, "passes": facts.passes, "dtype": facts.dtype}
    asked = {**identity, "examples": job.source.count, "passes": job.passes}
    asked["dtype"] = facts.dtype if dtype is None else np.dtype(_DTYPES[dtype]).name
    for name, value in asked.items():
        if stored.get(name) != value:
            raise ValueError(
                f"The feature cache in {folder} is another one: {name} is {stored.get(name)} there and {value} here. Choose "
                "another folder, or delete this one."
            )


def _write(job: _Job, facts: Facts, arrays: dict[str, np.ndarray], note: Callable[[], None]) -> None:
    """Fill the arrays from where they were left, noting from time to time how far that is."""
    noted = time.monotonic()
    for features, targets in job.batches(facts.done):
        rows = slice(facts.done, facts.done + len(features))
        values = features.float() if features.dtype == torch.bfloat16 else features
        with np.errstate(over="ignore"):  # what is too large for half precision is found below
            arrays[FEATURES][rows] = values.cpu().numpy()
        if targets is not None:
            arrays[TARGETS][rows] = targets.cpu().numpy()
        kept = torch.from_numpy(np.array(arrays[FEATURES][rows]))
        if not bool(torch.isfinite(kept).all()):
            bad = int((~torch.isfinite(kept)).flatten(1).any(1).nonzero()[0])
            raise ValueError(
                f"Features must be finite; those of row {facts.done + bad} are not, as {facts.dtype}. Look at that input, or "
                "keep them as torch.float32."
            )
        facts.content = wrapped(facts.content + sum_of_rows(kept, facts.done))
        facts.done = rows.stop
        if time.monotonic() - noted > _NOTE_EVERY or facts.done == facts.rows:
            note()
            noted = time.monotonic()
    if facts.done != facts.rows:
        raise ValueError(f"The data said that it has {facts.rows} rows and gave {facts.done}.")
