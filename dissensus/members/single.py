"""One member of a stacked ensemble on its own: the same names, tensors without the member axis."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from dissensus.data.trees import call, pick
from dissensus.members.deep_ensemble import DeepEnsemble
from dissensus.members.members import Keys, Members
from dissensus.members.shared import fastest_layout
from dissensus.nets.dropout import dropout_keys, rewind_dropout


class SingleMember(Members):
    """Runs one member's tensors; what a step is recorded with when each member gets a program of its own.

    It holds no tensors: they come with every call, under the names they have in the ensemble.
    """

    def __init__(self, ensemble: DeepEnsemble) -> None:
        super().__init__(1, ensemble.seed)
        self.training, self.output = ensemble.training, ensemble.output
        self._shell = ensemble.shell(0)

    @property
    def stacked(self) -> bool:
        """Tensors have no member axis."""
        return False

    def run(
        self, tensors: Mapping[str, Tensor], x: Any, *, own: bool, rows: Tensor | None, keys: Keys
    ) -> Tensor:
        """Run the member on its tensors; see `Members.run`."""
        row = {name.removeprefix("net."): tensor for name, tensor in tensors.items()}
        net = self._shell.net
        row.update(dropout_keys(net, lambda: keys()[0]))
        self._shell.lend(row)
        output: Tensor = pick(call(net, fastest_layout(x[0] if own else x)), self.picks)
        self._shell.collect(row)
        rewind_dropout(net)
        return output.unsqueeze(0)

    def parts(self) -> Iterator[nn.Module]:
        """Yield the modules of the member."""
        return self._shell.net.modules()

    def member(self, index: int) -> nn.Module:
        """There is no weight to give; ask the ensemble."""
        raise ValueError("A recorded member has no weights of its own; call `member` on the ensemble.")
