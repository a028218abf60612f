"""Networks and references as they were given to be anchored: taken in, or refused with what is wanted."""

from collections.abc import Sequence
from numbers import Integral, Real

from torch import Tensor, nn

from dissensus.data.sources import Array, as_tensor
from dissensus.members.deep_ensemble import DeepEnsemble
from dissensus.members.heads import HeadEnsemble
from dissensus.members.members import Members


def as_ensemble(net: object, num_nets: int, seed: int) -> DeepEnsemble:
    """Return what was given as networks as a deep ensemble of copies."""
    if isinstance(net, HeadEnsemble):
        raise ValueError(
            "Heads on a frozen backbone are anchored on its features: Anchored(ens.heads, features[:100]), with the features of "
            "ds.cache_features(backbone, data)."
        )
    if isinstance(net, Members) and not isinstance(net, DeepEnsemble):
        raise ValueError(
            f"`net` must be a network, a list of networks, a DeepEnsemble or a function that makes one; got a {type(net).__name__}."
        )
    if not isinstance(num_nets, Integral) or isinstance(num_nets, bool) or num_nets < 1:
        raise ValueError(f"`num_nets` must be a whole number, at least 1; got {num_nets!r}.")
    if num_nets != 1 and (isinstance(net, nn.Module) or not callable(net)):
        raise ValueError(
            f"num_nets={num_nets} asks for new networks, which only a function makes. Write `lambda: Net(...)`, or hand over a "
            "list of networks and leave `num_nets` out."
        )
    if isinstance(net, DeepEnsemble):
        return net
    if isinstance(net, nn.Module):
        return DeepEnsemble.from_members([net], seed)
    if callable(net):
        return DeepEnsemble(net, int(num_nets), seed)
    if isinstance(net, Sequence) and not isinstance(net, str) and len(net) > 0:
        return DeepEnsemble.from_members(net, seed)
    raise ValueError(
        f"`net` must be a network, a list of networks or a function that makes one; got {net!r:.60}. Make the network first."
    )


def as_inputs(references: Array) -> Tensor:
    """Return references as one tensor."""
    try:
        return as_tensor(references, "references")
    except (TypeError, ValueError) as problem:
        raise ValueError(
            f"`references` must be one tensor or numeric array of inputs, (references, ...); got a {type(references).__name__}. "
            "Of pairs and data sets hand over the inputs alone."
        ) from problem


def check_settings(
    references: Tensor, num_members: int, mask_probability: float, temperature: str | None
) -> int:
    """Refuse references and numbers that cannot be; return how many members a network has, as Python's own number."""
    if references.ndim < 2 or len(references) == 0:
        raise ValueError(
            f"`references` must be a batch of inputs, (references, ...); got shape {tuple(references.shape)}."
        )
    if not references.is_floating_point():
        raise ValueError(
            f"`references` must be real numbers, prepared like the inputs; got {references.dtype}. Convert and normalise them as "
            "the inputs are."
        )
    if not bool(references.isfinite().all()):
        raise ValueError("`references` hold values that are not finite. Leave such inputs out.")
    whole = isinstance(num_members, Integral) and not isinstance(num_members, bool)
    if not whole or not 1 <= num_members <= len(references):
        raise ValueError(
            f"`num_members` must be a whole number from 1 to that of references, {len(references)}; got {num_members!r}."
        )
    if not isinstance(mask_probability, Real) or not 0.0 <= mask_probability <= 1.0:
        raise ValueError(f"`mask_probability` must be a number in [0, 1]; got {mask_probability!r}.")
    if temperature is not None and num_members < 2:
        raise ValueError("A temperature compares references; give at least two with `num_members`.")
    return int(num_members)


def check_choices(**choices: tuple[str | None, tuple[str | None, ...]]) -> None:
    """Refuse a value that is not one of those allowed; each argument is a value and these."""
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"`{name}` must be {' or '.join(map(repr, allowed))}; got {value!r}.")


def check_dtype(net: nn.Module, references: Tensor) -> None:
    """Refuse references of another dtype than the network's weights."""
    weights = next((p for p in net.parameters() if p.is_floating_point()), None)
    if weights is not None and weights.dtype != references.dtype:
        raise ValueError(
            f"`references` must have the network's dtype, {weights.dtype}; got {references.dtype}. Convert one of them."
        )
