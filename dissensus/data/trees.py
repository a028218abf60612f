"""Inputs and outputs of several tensors.

The whole rule of the package is here:

- A *tree* is a tuple, dictionary or dataclass of tensors (nested as you like), the batch on the first axis of each. Data holds
  trees of inputs; a network is called as it expects, `net(x)`, `net(*parts)` or `net(**parts)`; of what it returns, `output`
  picks the tensor that is scored.
- Between data and network a tree is a `Tree`: one value that is cut, moved and gathered like a tensor.
- What data holds are *rows*: a tensor, an array in a file that is read when it is asked for (`OnDisk`), or a tree of these.
"""

import dataclasses
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from dissensus._signatures import check_dense

# Bytes that are read at once where a whole file is gone through.
_AT_ONCE = 8 << 20
# Rows that are read before their pages are let go of: with each the system may map a megabyte around it.
_FEW = 16

# A key, an index, or a function of what a network returned; None where there is one tensor that can be meant.
Output: TypeAlias = str | int | Callable[[Any], Tensor] | None


def _of_each(name: str) -> Callable[..., "Tree"]:
    """Return the method of trees that calls a tensor's method of this name on each leaf."""

    def method(tree: "Tree", *arguments: Any, **options: Any) -> "Tree":
        return tree.map(lambda leaf: getattr(leaf, name)(*arguments, **options))

    return method


def _of_first(name: str) -> Any:
    """Return the property of trees that is what their first tensor says."""
    return property(lambda tree: getattr(tree.leaves[0], name))


class Tree:
    """Several tensors that are one batch: what is done with it is done with each of them.

    What a batch is asked for as a whole (length, device, dtype) is what its first tensor says.

    Example:
        >>> batch = Tree.of({"ids": torch.zeros(8, 5), "mask": torch.ones(8, 5)})
        >>> len(batch), batch[:3].value()["mask"].shape
        (8, torch.Size([3, 5]))
    """

    def __init__(self, leaves: Sequence[Any], spec: TreeSpec) -> None:
        self.leaves, self.spec = tuple(leaves), spec

    @classmethod
    def of(cls, value: Any) -> "Tree":
        """Return a tuple, list, mapping or dataclass of tensors as one batch."""
        leaves, spec = tree_flatten(plain(value))
        strange = [type(leaf).__name__ for leaf in leaves if not hasattr(leaf, "shape")]
        if strange or not leaves:
            held = f"a {strange[0]}" if strange else "none at all"
            raise ValueError(f"A {type(value).__name__} of inputs must hold a tensor in each part; got {held}.")
        return cls(leaves, spec)

    def value(self) -> Any:
        """Return the tuple or dictionary that this batch is."""
        return tree_unflatten(list(self.leaves), self.spec)

    def map(self, change: Callable[[Any], Any]) -> "Tree":
        """Return the same tree of other tensors."""
        return Tree([change(leaf) for leaf in self.leaves], self.spec)

    def paths(self) -> list[tuple[Any, ...]]:
        """Return the way to each tensor: keys and places, from the outermost container on."""
        paths: list[Any] = [path for path, _ in tree_flatten_with_path(self.value())[0]]
        return [tuple(getattr(key, "key", getattr(key, "idx", key)) for key in path) for path in paths]

    def named(self) -> list[tuple[str, Any]]:
        """Return each tensor with what to call it, the way to it."""
        return [(".".join(map(str, path)), leaf) for path, leaf in zip(self.paths(), self.leaves, strict=True)]

    def __len__(self) -> int:
        return len(self.leaves[0])

    def __getitem__(self, rows: Any) -> "Tree":
        return self.map(lambda leaf: leaf[rows])

    def __repr__(self) -> str:
        return f"Tree({describe(self)})"

    shape, dtype = _of_first("shape"), _of_first("dtype")
    device, is_cuda = _of_first("device"), _of_first("is_cuda")

    @property
    def ndim(self) -> int:
        """Axes of the first tensor."""
        return len(self.shape)

    def split(self, size: int) -> Iterator["Tree"]:
        """Yield all rows in order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    to, clone, detach = _of_each("to"), _of_each("clone"), _of_each("detach")
    flatten, unflatten = _of_each("flatten"), _of_each("unflatten")
    unsqueeze, index_select = _of_each("unsqueeze"), _of_each("index_select")


# vmap, captured programs and gradients look into trees by themselves.
register_pytree_node(Tree, lambda tree: (list(tree.leaves), tree.spec), lambda leaves, spec: Tree(list(leaves), spec))

Batch: TypeAlias = Tensor | Tree


def is_tree(value: Any) -> bool:
    """Whether a value is several tensors: a tuple, mapping or dataclass; lists are arrays."""
    dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclass or isinstance(value, Tree | tuple | Mapping)


def plain(value: Any) -> Any:
    """Return nested containers as tuples and dictionaries, without what is None."""
    if isinstance(value, Tree):
        return value.value()
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items() if part is not None}
    if isinstance(value, tuple) or _lists_tensors(value):
        return tuple(map(plain, value))
    if isinstance(value, list):
        return np.asarray(value)
    if is_tree(value):  # a dataclass
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    return value


def _lists_tensors(value: Any) -> bool:
    """Whether a list is one of tensors, as loaders make of tuples; other lists are arrays."""
    if not isinstance(value, list):
        return False
    return all(isinstance(part, Tensor) or is_tree(part) or _lists_tensors(part) for part in value)


def batch_of(value: Any) -> Batch:
    """Return what a network is given as one batch: a tensor as it is, several as a `Tree`."""
    return Tree.of(value) if _lists_tensors(value) or is_tree(value) else value


def describe(x: Any) -> str:
    """Return shapes and dtypes of a batch, for a message."""
    if not isinstance(x, Tree):
        return f"({', '.join(['batch', *map(str, x.shape[1:])])}{'' if len(x.shape) > 1 else ','}) of {x.dtype}"
    return ", ".join(f"{name}: {describe(leaf)}" for name, leaf in x.named())


def signature(x: Tree, leading: int) -> tuple[object, ...]:
    """Return what tells kinds of batches apart beside their first `leading` axes: names, shapes and dtypes."""
    return (str(x.spec), *((leaf.shape[leading:], leaf.dtype) for leaf in x.leaves))


def named_leaves(x: Tree, part: str | int | None) -> list[bool]:
    """Return which tensors of a tree belong to the part of this key or place; all of them for None."""
    parts = [path[0] for path in x.paths()]
    if part is not None and part not in parts:
        raise ValueError(f"Inputs have no part {part!r}; there are {', '.join(map(repr, dict.fromkeys(parts)))}.")
    return [part is None or own == part for own in parts]


def repeat_rows(x: Batch, count: int) -> Batch:
    """Return the batch `count` times, one after another."""
    repeated: Batch = tree_map(lambda leaf: leaf.repeat(count, *(1 for _ in leaf.shape[1:])), x)
    return repeated


def expand_rows(x: Batch, count: int) -> Batch:
    """Return the batch for each of `count` members, `(count, batch, ...)`, without copying it."""
    expanded: Batch = tree_map(lambda leaf: leaf.expand(count, *leaf.shape), x)
    return expanded


def join_rows(batches: Sequence[Any], axis: int = 0) -> Any:
    """Return batches one after another as one."""
    return tree_map(lambda *parts: _joined(parts, axis), *batches)


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    shapes = {(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}
    if len(shapes) > 1:
        raise ValueError(
            f"Tensors of examples differ in shape from batch to batch, such as {' and '.join(map(str, sorted(shapes)[:2]))} without "
            "the batch, so they are no one tensor. Pad all inputs to one length, or go batch by batch."
        )
    return torch.cat(list(parts), axis)


def inputs_of(parts: tuple[Any, ...], named: Mapping[str, Any]) -> Batch:
    """Return the batch that a call of an ensemble was given: `ens(x)`, `ens(a, b)` or `ens(a=..., b=...)`."""
    if parts and named:
        raise ValueError("Give an ensemble its inputs by place or by name, not both.")
    if named:
        return batch_of(dict(named))
    return batch_of(parts[0] if len(parts) == 1 else parts)


def writes(x: Any) -> tuple[int, ...]:
    """Return how often each tensor of a batch was written to, as far as tensors say so: those of inference mode do not."""
    if torch.compiler.is_compiling():
        return ()
    leaves = (x,) if isinstance(x, Tensor) else tree_leaves(x)
    return tuple(leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference())


def check_unwritten(x: Any, before: tuple[int, ...]) -> None:
    """Refuse a network that wrote into inputs which others get too: they would have what it left of them."""
    if writes(x) != before:
        raise ValueError("The network changes its inputs in place, such as by `x -= mean`. Write `x = x - mean` there.")


def call(net: Callable[..., Any], x: Any) -> Any:
    """Call a network as it expects to be: with one tensor, a tuple's parts, or a dictionary's by name."""
    value = plain(x)
    named = value if isinstance(value, dict) else {}
    parts = () if named else value if isinstance(value, tuple) else (value,)
    try:
        return net(*parts, **named)
    except TypeError as problem:
        if "argument" not in str(problem):
            raise
        how = ", ".join(["x"] * len(parts) if not named else [f"{name}=..." for name in named])
        raise ValueError(
            f"The network cannot be called as net({how}): {problem}. Give a tuple for net(a, b), a dictionary for net(a=..., b=...)."
        ) from problem


def call_on_lent(net: Callable[..., Any], x: Any) -> Any:
    """Call a network on inputs that others get too, which it must leave alone."""
    before = writes(x)
    returned = call(net, x)
    check_unwritten(x, before)
    return returned


class WholeOutput:
    """Stands for everything that a network returns."""


WHOLE = WholeOutput()


def pick(returned: Any, output: Output | WholeOutput) -> Any:
    """Return the tensor that is scored of what a network returned, or with `WHOLE` all tensors of it as a `Tree`."""
    value = returned if isinstance(returned, Tensor) else plain(returned)
    if output is WHOLE:
        return value if isinstance(value, Tensor) else Tree.of(_only_tensors(value))
    if callable(output):
        picked = output(returned)
    elif output is None:
        picked = _obvious(value)
    else:
        try:
            picked = value[output]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"There is no output {output!r} in what a member returned. {_choices(value)}") from None
    if not isinstance(picked, Tensor):
        got = f"got {type(picked).__name__}" + ("" if output is None else f" by `output={output!r}`")
        raise ValueError(f"A member must return one tensor to score; {got}. {_choices(value)}")
    if picked.is_complex():
        raise ValueError(
            f"A member must return real numbers to score; got {picked.dtype}. Return its size, or real and imaginary part on an axis."
        )
    return picked


def _obvious(value: Any) -> Any:
    """Return the one tensor that can be meant: `logits`, or the only one there is; everything where none can."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict) and isinstance(value.get("logits"), Tensor):
        return value["logits"]
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return tensors[0] if len(tensors) == 1 else value


def _choices(value: Any) -> str:
    if isinstance(value, dict):
        return f"Choose with `output=` one of {', '.join(map(repr, value))}."
    if isinstance(value, tuple):
        return f"Choose with `output=` one of its {len(value)} parts, from 0 on."
    return "Give the ensemble an `output=` that makes one of it."


def _only_tensors(value: Any) -> Any:
    """Return nested tuples and dictionaries without the parts that hold no tensor."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else None
    if parts is None:
        return value
    held = ((key, part) for key, part in parts if any(isinstance(leaf, Tensor) for leaf in tree_leaves(part)))
    kept = {key: _only_tensors(part) for key, part in held}
    return kept if isinstance(value, dict) else tuple(kept.values())


def as_tensor(array: Any, name: str) -> Tensor:
    """Return an array as a tensor: float64 arrays of numpy become float32, the default of networks; integers int64."""
    if isinstance(array, Tensor):
        check_dense(name, array)
        return array
    try:
        values = np.asarray(array)
    except ValueError:
        raise ValueError(
            f"`{name}` must be one array; its rows have different shapes. Pad them to one, or give a DataLoader that pads each batch."
        ) from None
    if not values.flags.writeable:
        values = values.copy()
    if values.dtype.kind not in "biufc":
        held = f"dtype {values.dtype}."
        if values.dtype.kind in "US":
            held = "strings. Number classes from 0, such as by np.unique(labels, return_inverse=True)[1]."
        raise ValueError(f"`{name}` must be a tensor or a numeric array; got {type(array).__name__} of {held}")
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if tensor.dtype == torch.float64:
        return tensor.float()
    return tensor.long() if tensor.dtype in (torch.int32, torch.int16, torch.int8) else tensor


class OnDisk:
    """An array in a file. Rows that are asked for are read, and tensors of their own; the file never is in memory whole."""

    def __init__(self, array: np.ndarray, dtype: torch.dtype) -> None:
        self.array, self.dtype = np.asarray(array), dtype
        # Pages may be let go of, but not where they hold changes that the file does not have.
        mapped = _map_of(array)
        self._pages = mapped._mmap if mapped.mode != "c" and hasattr(mmap, "MADV_DONTNEED") else None

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole."""
        return torch.Size(self.array.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole as a tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        if isinstance(rows, slice):
            part = self.array[rows].copy()
            self._release()
            return torch.from_numpy(part).to(self.dtype)
        part = np.empty((len(rows), *self.shape[1:]), self.array.dtype)
        for start in range(0, len(rows), _FEW):
            some = slice(start, start + _FEW)
            part[some] = self.array[rows[some].numpy()]
            self._release()
        return torch.from_numpy(part).to(self.dtype)

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield all rows in order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def to(self, device: torch.device) -> Tensor:
        """Return everything as one tensor on a device, without a second copy beside it."""
        whole, size = torch.empty(self.shape, dtype=self.dtype, device=device), rows_at_once(self)
        for held, part in zip(whole.split(size), self.split(size), strict=False):
            held.copy_(part)
        return whole

    def _release(self) -> None:
        """Let go of the pages that were read; the system keeps them as long as it has room, as with any file."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)


Rows: TypeAlias = Tensor | OnDisk | Tree


def rows_of(array: Any, name: str) -> Tensor | OnDisk:
    """Return an array as a tensor, or as rows to be read where it lies in a file."""
    if isinstance(array, OnDisk):
        return array
    in_a_file = isinstance(array, np.ndarray) and array.ndim > 0 and _map_of(array) is not None
    return OnDisk(array, as_tensor(array[:0], name).dtype) if in_a_file else as_tensor(array, name)


def tree_rows(value: Any, name: str) -> Rows:
    """Return inputs as rows: an array as `rows_of` does, a tuple, dictionary or dataclass of arrays as a `Tree` of such."""
    if not is_tree(value):
        return rows_of(value, name)
    parts = Tree.of(value)
    rows = Tree([rows_of(leaf, f"{name}: {part}") for part, leaf in parts.named()], parts.spec)
    lengths = {leaf.shape[:1] for leaf in rows.leaves}
    if len(lengths) > 1 or () in lengths:
        told = ", ".join(f"{part} shaped {tuple(leaf.shape)}" for part, leaf in rows.named())
        raise ValueError(f"All parts of `{name}` must have one row for each input; got {told}.")
    return rows


def rows_at_once(values: Tensor | OnDisk) -> int:
    """Return how many rows to go through at a time, so that what is computed of them stays small."""
    each = values.shape[1:].numel() * values.dtype.itemsize
    return max(1, _AT_ONCE // max(each, 1))


def _map_of(array: Any) -> Any:
    """Return the `np.memmap` that an array's memory belongs to; None where it is no file's."""
    while array is not None and getattr(array, "_mmap", None) is None:
        array = getattr(array, "base", None)
    return array
