"""Networks that can also be asked for their features: what their last linear layer takes."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dissensus.members.deep_ensemble import DeepEnsemble
from dissensus.members.members import Keys


class FeatureEnsemble(DeepEnsemble):
    """A deep ensemble with one more pass, which gives features in place of outputs."""

    def run_features(
        self, tensors: Mapping[str, Tensor], x: Tensor, *, own: bool, rows: Tensor | None, keys: Keys
    ) -> Tensor:
        """Run networks and return what their last linear layers take, `(members, batch, features)`; see `Members.run`."""
        nets = [shell.net for shell in self._shells]
        if self.net is not None:
            nets.append(self.net)
        with giving_features(nets):
            return self.run(tensors, x, own=own, rows=rows, keys=keys)


@contextmanager
def giving_features(nets: Iterable[nn.Module]) -> Iterator[None]:
    """Networks that are called inside give what their last linear layer took, in place of what they say.

    The features leave as the network's own output, so they go wherever outputs go: out of `functional_call`, `vmap`, a
    recorded step and a captured one, from none of which a tensor that is kept aside could be taken.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x = torch.zeros(5, 4)
        >>> with giving_features([net]):
        ...     features = net(x)
        >>> features.shape, net(x).shape
        (torch.Size([5, 8]), torch.Size([5, 2]))
    """
    hooks = [hook for net in nets for hook in _give_features(net)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _give_features(net: nn.Module) -> list[RemovableHandle]:
    """Have one network give features until the hooks are removed."""
    last: dict[str, Tensor] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        last.update(taken=args[0] if args else kwargs["input"], given=output)

    def give(net: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor:
        taken, given = last.pop("taken", None), last.pop("given", None)
        if taken is None or given is None:
            raise ValueError(
                "Features are what the last linear layer takes, and no nn.Linear runs in this network. Give it a linear head, or "
                "use law='outputs'."
            )
        if given.shape != getattr(output, "shape", None):
            raise ValueError(
                "Features are what the last linear layer takes, and this network's is not its head: it gives "
                f"{tuple(given.shape)}, the network {tuple(getattr(output, 'shape', ()))}. Use law='outputs'."
            )
        return taken

    layers = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    # A network that is one linear layer notes first and gives then: hooks run in the order of their registration.
    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    return [*hooks, net.register_forward_hook(give)]
