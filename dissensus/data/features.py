"""Features of a frozen backbone, computed once and kept: in memory, or in a file that may be larger than memory."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dissensus._files import replace_file
from dissensus.data.fingerprints import network_digest, sum_of_rows
from dissensus.data.trees import OnDisk
from dissensus.randomness import signed

# 2: hashes that see signs, and targets in them.
FORMAT = 2
FACTS, FEATURES, TARGETS = "cache.json", "features.npy", "targets.npy"
# Rows that are read at once where a whole file is gone through.
_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class CachedFeatures(Dataset[tuple[Tensor, Tensor]]):
    """What a backbone says of a data set; `cache_features` makes it, and `fit`, `predict` and `evaluate` read it.

    Rows are ordered by pass: row `k * num_examples + i` is example `i` in pass `k`. In training an epoch goes once through the
    examples and takes each from another pass than the epoch before: after as many epochs as passes every row was seen once.

    Attributes:
        features: `(rows, ...)`: a read-only `np.memmap` of the file, or a tensor where there is no file.
        targets: `(rows, ...)`, None where the data had none.
        passes: How often the data was gone through.
        backbone: Digest of the backbone that computed the features.
        data: Digest of the data that it read.
        content: Hash of features and targets; `verify` compares the files with it.
        path: Folder of the file.
        resident_limit: Bytes up to which training moves the features to its device whole; by default half of the memory
            that is free there. Larger ones are streamed from the file.
        changing: Attributes that the backbone changes in every pass, and that say nothing of which one it is.
    """

    features: Tensor | np.ndarray
    targets: Tensor | None
    passes: int = 1
    backbone: str = ""
    data: str = ""
    content: int = 0
    path: Path | None = None
    resident_limit: int | None = None
    changing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.features) == 0 or len(self.features) % self.passes:
            raise ValueError(f"{self.passes} passes need as many rows each, at least one; got {len(self.features)}.")
        if self.targets is not None and len(self.targets) != len(self.features):
            raise ValueError(f"There must be one target for each of {len(self)} rows; got {len(self.targets)}.")

    @classmethod
    def open(cls, path: str | Path, *, resident_limit: int | None = None) -> "CachedFeatures":
        """Open a finished cache without its backbone and data; `cache_features` with both compares it with them."""
        folder = Path(path)
        facts = Facts.read(folder)
        if facts is None:
            raise ValueError(f"There is no feature cache in {folder}. Make one with ds.cache_features.")
        if facts.done < facts.rows:
            raise ValueError(f"{folder} has {facts.done} of {facts.rows} rows. Call ds.cache_features again to finish.")
        return facts.cached(folder, {}, resident_limit)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Any:
        row = self.rows(index, index + 1)[0]
        return row if self.targets is None else (row, self.targets[index])

    @property
    def num_examples(self) -> int:
        """How many examples the data has."""
        return len(self) // self.passes

    @property
    def stored(self) -> Tensor | OnDisk:
        """The features in the precision in which they are kept, read when they are asked for."""
        if isinstance(self.features, Tensor):
            return self.features
        return OnDisk(self.features, torch.from_numpy(np.array(self.features[:0])).dtype)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return some rows as real numbers that networks take: half precision becomes float32."""
        return as_real(self.stored[start:stop])

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        """Yield the features in order."""
        yield from map(as_real, self.stored.split(batch_size))

    def pairs(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield features and targets in order."""
        if self.targets is None:
            raise ValueError("These features have no targets. Cache them from data that has labels.")
        yield from zip(self.batches(batch_size), self.targets.split(batch_size), strict=True)

    def resident(self, device: torch.device | str = "cpu") -> Tensor:
        """Return all features on a device, in the precision in which they are kept."""
        return self.stored.to(torch.device(device))

    def check_backbone(self, net: nn.Module) -> None:
        """Refuse a backbone that did not compute these features: other weights, modules or plain attributes of them."""
        if self.backbone and network_digest(net, self.changing) != self.backbone:
            raise ValueError(
                "These features were computed by another backbone than the ensemble's, or by other weights of it. Cache "
                "them again with this backbone, or use the one that they are from."
            )

    def of_another_backbone(self, other: "CachedFeatures") -> bool:
        """Whether these and other features are known to come from different backbones."""
        return self.changing == other.changing and "" != self.backbone != other.backbone != ""

    def verify(self) -> None:
        """Read everything and compare it with the hash that was taken when it was written; ValueError if it was changed."""
        # The targets of a file as they are there now.
        stored = self.targets is not None and self.path is not None
        targets = torch.from_numpy(np.load(self.path / TARGETS)) if stored else self.targets  # type: ignore[operator]
        found = start = 0
        for part in self.stored.split(_AT_ONCE):
            found += content_of(part, None if targets is None else targets[start : start + len(part)], start)
            start += len(part)
        if signed(found) != self.content:
            raise ValueError(
                f"The features or targets in {self.path or 'memory'} are not those that were written: their hash is another one. "
                "Delete the cache and make it again."
            )


def content_of(features: Tensor, targets: Tensor | None, start: int) -> int:
    """Return a hash of rows `start` onwards; those of consecutive parts add up (wrapping) to that of the whole."""
    # Targets count from the other end, so that no target has the place of a feature.
    of_targets = 0 if targets is None else sum_of_rows(targets, start - (1 << 62))
    return signed(sum_of_rows(features, start) + of_targets)


def as_real(values: Tensor) -> Tensor:
    """Return values in float32, or as they are where they are more precise."""
    return values if values.dtype == torch.float64 else values.float()


@dataclass
class Facts:
    """What `cache.json` says: whose features they are, how they are laid out, and how far writing has come."""

    examples: int
    passes: int
    shape: list[int]
    dtype: str
    targets: list[Any] | None
    identity: dict[str, Any] = field(default_factory=dict)
    done: int = 0
    content: int = 0

    @property
    def rows(self) -> int:
        """How many rows there are to be."""
        return self.examples * self.passes

    @classmethod
    def read(cls, folder: Path) -> "Facts | None":
        """Read the facts of a folder; None if it has none."""
        path = folder / FACTS
        if not path.exists():
            return None
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            facts = cls(**stored) if stored.pop("format") == FORMAT else None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is not what a feature cache writes. Delete it and cache again.") from None
        if facts is None:
            raise ValueError(f"{path} was written by another version; delete the folder and cache again.")
        return facts

    def write(self, folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Have what the arrays hold in their files, then replace the facts in one step."""
        for array in arrays.values():
            array.flush()  # type: ignore[attr-defined]
        replace_file(folder / FACTS, json.dumps({"format": FORMAT, **vars(self)}, indent=1))

    def arrays(self) -> Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return shape and type of each file."""
        wanted = {FEATURES: ((self.rows, *self.shape), np.dtype(self.dtype))}
        if self.targets is not None:
            wanted[TARGETS] = ((self.rows, *self.targets[0]), np.dtype(self.targets[1]))
        return wanted

    def create(self, folder: Path | None) -> dict[str, np.ndarray]:
        """Return empty arrays to write into: those of new files in a folder, or in memory."""
        if folder is None:
            return {name: np.empty(shape, dtype) for name, (shape, dtype) in self.arrays().items()}
        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, np.ndarray] = {
            name: np.lib.format.open_memmap(folder / name, mode="w+", dtype=dtype, shape=shape)
            for name, (shape, dtype) in self.arrays().items()
        }
        self.write(folder, arrays)
        return arrays

    def load(self, folder: Path, mode: Literal["r", "r+"]) -> dict[str, np.ndarray]:
        """Map the files; ValueError where one is missing, cut off, or not of the shape and type that was written."""
        arrays = {}
        for name, (shape, dtype) in self.arrays().items():
            try:
                array = np.load(folder / name, mmap_mode=mode, allow_pickle=False)
            except (ValueError, OSError, EOFError) as problem:
                raise ValueError(f"{folder / name} cannot be read ({problem}). Delete it and cache again.") from None
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"{folder / name} holds {array.dtype} shaped {array.shape}, and {FACTS} says {dtype} shaped {shape}. "
                    "Delete the folder and cache again."
                )
            arrays[name] = array
        return arrays

    def cached(
        self, folder: Path | None, arrays: Mapping[str, np.ndarray], resident_limit: int | None
    ) -> CachedFeatures:
        """Return the finished cache: the files of a folder, or arrays in memory."""
        arrays = arrays if folder is None else self.load(folder, "r")
        targets = None if self.targets is None else torch.from_numpy(np.array(arrays[TARGETS]))
        return CachedFeatures(
            torch.from_numpy(arrays[FEATURES]) if folder is None else arrays[FEATURES],
            targets,
            self.passes,
            self.identity["backbone"],
            self.identity["data"],
            self.content,
            folder,
            resident_limit,
            tuple(self.identity["changing"]),
        )
