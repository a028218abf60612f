"""Convolutions in groups that take two inputs, joined on their channels: each group meets its own channels of both."""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, nn


def by_group(pair: Tensor, groups: int, axis: int) -> Tensor:
    """Return the channels of two joined inputs so that those of each group are together, the first input's before the second's.

    Args:
        pair: Two inputs, joined along `axis`.
        groups: Of each input's channels.
        axis: Counted from the end.

    Example:
        >>> import torch
        >>> by_group(torch.tensor([0, 1, 2, 3, 10, 11, 12, 13]), groups=2, axis=-1)
        tensor([ 0,  1, 10, 11,  2,  3, 12, 13])
    """
    apart = pair.unflatten(axis, (2, groups, -1))
    return apart.transpose(axis - 2, axis - 1).flatten(axis - 2, axis)


class GroupedPairs1d(nn.Conv1d):
    """A convolution in groups over two joined inputs."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve each group's channels of both inputs."""
        return super().forward(by_group(input, self.groups, -2))


class GroupedPairs2d(nn.Conv2d):
    """A convolution in groups over two joined inputs."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve each group's channels of both inputs."""
        return super().forward(by_group(input, self.groups, -3))


class GroupedPairs3d(nn.Conv3d):
    """A convolution in groups over two joined inputs."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve each group's channels of both inputs."""
        return super().forward(by_group(input, self.groups, -4))


IN_GROUPS: Mapping[type[nn.Module], type[nn.Conv1d | nn.Conv2d | nn.Conv3d]] = MappingProxyType(
    {nn.Conv1d: GroupedPairs1d, nn.Conv2d: GroupedPairs2d, nn.Conv3d: GroupedPairs3d}
)
