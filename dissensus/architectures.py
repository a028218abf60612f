"""The reference networks of the documents: small enough to read, plain enough to run as members of any ensemble.

Each function returns a fresh network of PyTorch's own layers that maps `(batch, ...)` to `(batch, outputs)`. No layer
works in place, none is used twice, and no layer before a batch normalisation has a bias: it would have no gradient.
Convolutions of `vgg`, `resnet18`, `resnet34` and `wide_resnet` start from He's normal law over the fan out; all other
layers, and the whole of `mlp` and `cnn`, keep PyTorch's own initialisation. Networks for images tell `classes` apart in
`(batch, channels, height, width)`.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from types import MappingProxyType

from torch import Tensor, nn

from dissensus.construction import remembers_how


@remembers_how
def mlp(
    inputs: int,
    hidden: Sequence[int],
    outputs: int,
    activation: Callable[[], nn.Module] = nn.ReLU,
    dropout: float = 0.0,
    norm: bool = False,
) -> nn.Module:
    """Make a multi-layer perceptron: linear, batch normalisation, activation, dropout for every hidden layer.

    Args:
        inputs: Features of an input.
        hidden: Width of each hidden layer; none makes a linear model.
        outputs: Values a prediction has: classes, or parameters of a likelihood.
        activation: Makes an activation layer; called once a hidden layer.
        dropout: Chance that a hidden value is dropped in training.
        norm: Whether to put batch normalisation before each activation.

    Returns:
        A network from `(batch, inputs)` to `(batch, outputs)`.

    Example:
        >>> import torch
        >>> mlp(4, [32, 32], 3, dropout=0.1)(torch.zeros(8, 4)).shape
        torch.Size([8, 3])

    References:
        Lakshminarayanan et al., 2017, <https://arxiv.org/abs/1612.01474>.
    """
    if not isinstance(hidden, Sequence):
        raise ValueError(f"`hidden` must be a sequence of widths; got {hidden!r}. Pass [{hidden!r}].")
    layers: list[nn.Module] = []
    for width in hidden:
        normalised = [nn.BatchNorm1d(width)] if norm else []
        dropped = [nn.Dropout(dropout)] if dropout > 0.0 else []
        layers += [nn.Linear(inputs, width, bias=not norm), *normalised, activation(), *dropped]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


@remembers_how
def cnn(classes: int = 10, channels: int = 3) -> nn.Module:
    """Make the small convolutional network of the joint training study, for images of 32 x 32 pixels.

    This is the network of the released experiments. The printed table gives stride 2 and padding 1 instead of the
    pooling here; its convolutions would leave 980 values, not the 500 that its linear layer takes.

    Example:
        >>> import torch
        >>> cnn()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    References:
        Jeffares et al., 2023, table 3, <https://arxiv.org/abs/2301.11323>.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 10, kernel_size=5),
        nn.Dropout2d(0.1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, kernel_size=5),
        nn.Dropout2d(0.1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        _FlattenTo(25, "images of 32 x 32 pixels"),
        nn.Linear(500, 50),
        nn.Dropout(0.1),
        nn.ReLU(),
        nn.Linear(50, classes),
    )


# Table 4 of the joint training study: (width, dropout rate) of each convolution between two poolings.
_VGG_STAGES = (
    ((64, 0.3), (64, 0.0)),
    ((128, 0.4), (128, 0.0)),
    ((256, 0.4), (256, 0.4), (256, 0.0)),
    ((512, 0.4), (512, 0.4), (512, 0.0)),
    ((512, 0.4), (512, 0.4), (512, 0.0)),
)


@remembers_how
def vgg(classes: int = 10, channels: int = 3) -> nn.Module:
    """Make the VGG-style network of the joint training study, for images of up to 32 x 32 pixels.

    Thirteen 3 x 3 convolutions, each with batch normalisation and most with dropout, five poolings that round sizes
    up, and two linear layers.

    Example:
        >>> import torch
        >>> vgg().eval()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    References:
        Jeffares et al., 2023, table 4, <https://arxiv.org/abs/2301.11323>; Simonyan and Zisserman, 2015,
        <https://arxiv.org/abs/1409.1556>.
    """
    layers: list[nn.Module] = []
    for stage in _VGG_STAGES:
        for width, rate in stage:
            layers += [_conv3x3(channels, width), nn.BatchNorm2d(width), nn.ReLU()]
            if rate > 0.0:
                layers.append(nn.Dropout(rate))
            channels = width
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    return _with_he_convolutions(
        nn.Sequential(
            *layers,
            _FlattenTo(1, "images of at most 32 x 32 pixels"),
            nn.Dropout(0.5),
            nn.Linear(512, 512, bias=False),
            nn.BatchNorm1d(512),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(512, classes),
        )
    )


@remembers_how
def resnet18(classes: int = 10, channels: int = 3, width: int = 64) -> nn.Module:
    """Make ResNet-18 in its form for small images: a 3 x 3 first convolution of stride 1 and no pooling after it.

    Args:
        classes: Classes to tell apart.
        channels: Channels of an image.
        width: Channels of the first of four stages; each stage has twice as many as the one before.

    Returns:
        A network for images of any size.

    Example:
        >>> import torch
        >>> resnet18()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    References:
        He et al., 2016, <https://arxiv.org/abs/1512.03385>.
    """
    return _resnet((2, 2, 2, 2), classes, channels, width)


@remembers_how
def resnet34(classes: int = 10, channels: int = 3, width: int = 64) -> nn.Module:
    """Make ResNet-34 in its form for small images: `resnet18` with 3, 4, 6 and 3 blocks in its stages, all else alike.

    Example:
        >>> import torch
        >>> resnet34()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return _resnet((3, 4, 6, 3), classes, channels, width)


@remembers_how
def wide_resnet(
    depth: int = 40, widen: int = 2, classes: int = 10, channels: int = 3, dropout: float = 0.0
) -> nn.Module:
    """Make a wide residual network of pre-activation blocks; WRN-40-2 unless told otherwise.

    Args:
        depth: Convolutions, 6 n + 4 for n blocks in each of three stages (3 of them project shortcuts).
        widen: Factor on the stages' widths of 16, 32 and 64 channels.
        classes: Classes to tell apart.
        channels: Channels of an image.
        dropout: Chance that a value between the two convolutions of a block is dropped in training.

    Returns:
        A network for images of any size.

    Example:
        >>> import torch
        >>> wide_resnet()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    References:
        Zagoruyko and Komodakis, 2016, <https://arxiv.org/abs/1605.07146>.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"`depth` must be 6 n + 4 with n of at least 1; got {depth}. Try 16, 28 or 40.")
    blocks = (depth - 4) // 6
    widths = (16, 16 * widen, 32 * widen, 64 * widen)
    stem, make_block = _conv3x3(channels, 16), partial(_PreActivationBlock, dropout=dropout)
    behind = {"norm": nn.BatchNorm2d(widths[-1]), "activation": nn.ReLU()}
    return _staged(stem, make_block, widths, [blocks] * 3, classes, **behind)


ARCHITECTURES: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {"mlp": mlp, "cnn": cnn, "vgg": vgg, "resnet18": resnet18, "resnet34": resnet34, "wide_resnet": wide_resnet}
)


class _BasicBlock(nn.Module):
    """Two convolutions, added to their input; the input is projected where the shape changes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _conv3x3(before, width, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            _conv3x3(width, width),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.residual(x) + self.shortcut(x))


class _PreActivationBlock(nn.Module):
    """Normalisation and activation before each convolution; a projection shares the first of them."""

    def __init__(self, before: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.activated = nn.Sequential(nn.BatchNorm2d(before), nn.ReLU())
        self.residual = nn.Sequential(
            _conv3x3(before, width, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout(dropout) if dropout > 0.0 else nn.Identity(),
            _conv3x3(width, width),
        )
        self.projection: nn.Module | None = None
        if stride != 1 or before != width:
            self.projection = nn.Conv2d(before, width, kernel_size=1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = self.activated(x)
        shortcut = x if self.projection is None else self.projection(activated)
        return shortcut + self.residual(activated)


class _FlattenTo(nn.Flatten):
    """Flatten images of which so many positions are left, or say what images were wanted."""

    def __init__(self, positions: int, wanted: str) -> None:
        super().__init__()
        self.positions, self.wanted = positions, wanted

    def forward(self, x: Tensor) -> Tensor:
        if (left := prod(x.shape[2:])) != self.positions:
            raise ValueError(
                f"This network wants {self.wanted}, of which {self.positions} positions are left where it flattens them; got {left}. "
                "Resize the images, or use a ResNet, which takes any size."
            )
        return super().forward(x)


def _resnet(blocks: Sequence[int], classes: int, channels: int, width: int) -> nn.Module:
    stem = nn.Sequential(_conv3x3(channels, width), nn.BatchNorm2d(width), nn.ReLU())
    return _staged(stem, _BasicBlock, (width, width, 2 * width, 4 * width, 8 * width), blocks, classes)


def _staged(
    stem: nn.Module,
    make_block: Callable[..., nn.Module],
    widths: Sequence[int],
    blocks: Sequence[int],
    classes: int,
    **behind: nn.Module,
) -> nn.Module:
    """Return a stem, stages from one of the widths to the next, of which all but the first halve the image, and a pooled linear head."""
    stages = {}
    for index, (before, width, count) in enumerate(zip(widths, widths[1:], blocks, strict=False)):
        first = make_block(before, width, 1 if index == 0 else 2)
        stages[f"stage{index + 1}"] = nn.Sequential(first, *(make_block(width, width, 1) for _ in range(count - 1)))
    head = {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "head": nn.Linear(widths[-1], classes)}
    return _with_he_convolutions(nn.Sequential(OrderedDict(stem=stem, **stages, **behind, **head)))


def _conv3x3(before: int, width: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, width, kernel_size=3, stride=stride, padding=1, bias=False)


def _with_he_convolutions(net: nn.Module) -> nn.Module:
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return net
