"""One member of a stacked ensemble on its own: the same names, tensors without the member axis."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from dissensus.members.deep_ensemble import DeepEnsemble
from dissensus.members.dropout import dropout_keys, rewind_dropout
from dissensus.members.members import Keys, Members, PythonState, plain_attributes


class SingleMember(Members):
    """Runs one member's tensors; what a step is recorded with when each member gets a program of its own.

    It holds no tensors: they come with every call, under the names they have in the ensemble.
    """

    def __init__(self, ensemble: DeepEnsemble) -> None:
        super().__init__(1, ensemble.seed)
        self.training = ensemble.training
        self._shell = ensemble.shell(0)

    @property
    def stacked(self) -> bool:
        """Tensors have no member axis."""
        return False

    def run(
        self, tensors: Mapping[str, Tensor], x: Tensor, *, own: bool, rows: Tensor | None, keys: Keys
    ) -> Tensor:
        """Run the member on its tensors; see `Members.run`."""
        row = {name.removeprefix("net."): tensor for name, tensor in tensors.items()}
        net = self._shell.net
        row.update(dropout_keys(net, lambda: keys()[0]))
        self._shell.lend(row)
        x = x[0] if own else x
        if x.is_cuda and x.ndim == 4 and x.is_floating_point():
            # The memory order in which GPUs convolve fastest.
            x = x.contiguous(memory_format=torch.channels_last)
        output: Tensor = net(x)
        self._shell.collect(row)
        rewind_dropout(net)
        return output.unsqueeze(0)

    def parts(self) -> Iterator[nn.Module]:
        """Yield the modules of the member."""
        return self._shell.net.modules()

    def python_state(self) -> PythonState:
        """Return the attributes of the modules that run."""
        return [entry for entry in plain_attributes(self._shell.net) if not self._shell.lends(*entry[:2])]

    def member(self, index: int) -> nn.Module:
        """There is no weight to give; ask the ensemble."""
        raise ValueError("A recorded member has no weights of its own; call `member` on the ensemble.")
