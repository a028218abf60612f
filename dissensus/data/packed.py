"""Packed image sets: losslessly compressed RGB images in an .npz archive, read with numpy and lzma alone.

An archive of this kind holds `shape`, (images, height, width, 3), and `xz`, an xz stream of bytes, beside further arrays such
as labels. The bytes are residues modulo 256 of three planes (red less green, green, blue less green; each plane is images x
height x width), predicted pixel by pixel from the neighbours to the left, above and above to the left.
"""

import lzma
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

_STREAM, _SHAPE = "xz", "shape"
_GREEN = 1
# Images decoded at once: enough for numpy to be busy with each pixel, few enough to stay in a processor's cache.
_AT_ONCE = 2500


def is_packed(names: Iterable[str]) -> bool:
    """Whether an archive with arrays of these names holds packed images.

    Example:
        >>> is_packed(["xz", "shape", "y"]), is_packed(["x", "y"])
        (True, False)
    """
    return {_STREAM, _SHAPE} <= set(names)


def unpack(arrays: Mapping[str, NDArray[np.generic]], name: str = "the archive") -> NDArray[np.uint8]:
    """Decode packed images.

    Args:
        arrays: The archive's arrays, `xz` and `shape` among them.
        name: What to call the archive in messages.

    Returns:
        Images, `(images, 3, height, width)`.
    """
    shape = tuple(int(size) for size in np.asarray(arrays[_SHAPE]).reshape(-1))
    if len(shape) != 4 or shape[3] != 3 or min(shape) < 1:
        raise ValueError(
            f"Packed images must be shaped (images, height, width, 3); {name} says {shape}. Pack them again."
        )
    images, height, width, channels = shape
    try:
        raw = lzma.decompress(np.asarray(arrays[_STREAM], np.uint8).tobytes(), format=lzma.FORMAT_XZ)
    except (lzma.LZMAError, EOFError) as problem:
        raise ValueError(f"The packed images of {name} cannot be decompressed: {problem}") from None
    if len(raw) != images * height * width * channels:
        raise ValueError(
            f"{name} should unpack to {images * height * width * channels} bytes and has {len(raw)}. Fetch it again."
        )
    planes = np.frombuffer(raw, np.int8).reshape(channels, images, height, width)
    parts = [_decode(planes[:, start : start + _AT_ONCE]) for start in range(0, images, _AT_ONCE)]
    return np.concatenate(parts)


def _decode(planes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return `(images, 3, height, width)` of residues `(3, images, height, width)`."""
    _, images, height, width = planes.shape
    residues = np.ascontiguousarray(planes.transpose(2, 3, 0, 1))
    # A frame of zeros above and to the left makes the first row and column no exception.
    values = np.zeros((height + 1, width + 1, 3, images), np.int16)
    for row in range(height):
        for column in range(width):
            left, above, corner = values[row + 1, column], values[row, column + 1], values[row, column]
            # The middle one of left, above and left + above - corner: an edge is followed, a slope continued.
            low, high = np.minimum(left, above), np.maximum(left, above)
            value = np.minimum(np.maximum(left + above - corner, low), high) + residues[row, column]
            green = value[_GREEN] & 255
            # Of all numbers with this residue a difference to green is the one whose colour lies in 0 to 255.
            value = ((value + green) & 255) - green
            value[_GREEN] = green
            values[row + 1, column + 1] = value
    values = values[1:, 1:]
    values[:, :, ::2] += values[:, :, _GREEN : _GREEN + 1]
    return np.ascontiguousarray(values.astype(np.uint8).transpose(3, 2, 0, 1))
