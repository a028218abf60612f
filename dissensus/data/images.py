"""Pictures as tensors: decoding, one size and one number of channels for all, folders and lists of them."""

from collections.abc import Iterable, Sequence
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Layout = Literal["auto", "channels_first", "channels_last"]
Size: TypeAlias = int | Sequence[int]  # of squares, or height and width
Pictures: TypeAlias = tuple[list[Path], list[str] | None]  # files, and the class of each where there are classes

IMAGE_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})

# Weights of red, green and blue in grey, of ITU-R BT.601, as Pillow has them.
_LUMA = (0.299, 0.587, 0.114)
_GREY_MODES = frozenset({"1", "L", "LA"})
_DEEP_MODES = ("I", "F")
_BILINEAR = 2  # of Pillow's filters
_CHUNK = 1024


def as_images(array: Tensor, layout: Layout = "auto", name: str = "the array") -> Tensor:
    """Return images as `(images, channels, height, width)`; `layout` says where the channels are, for shapes that do not tell.

    Example:
        >>> as_images(torch.zeros(10, 28, 28)).shape, as_images(torch.zeros(10, 32, 32, 3)).shape
        (torch.Size([10, 1, 28, 28]), torch.Size([10, 3, 32, 32]))
    """
    if array.ndim == 3:
        return array.unsqueeze(1)
    if array.ndim != 4:
        raise ValueError(f"Images need 3 or 4 axes; {name} is shaped {tuple(array.shape)}.")
    first, last = array.shape[1] in (1, 3), array.shape[3] in (1, 3)
    if layout == "auto" and first == last:
        raise ValueError(
            f"The channels of images must be the one axis of size 1 or 3; {name} is shaped {tuple(array.shape)}. "
            "Set layout to 'channels_first' or 'channels_last'."
        )
    return array.movedim(3, 1).contiguous() if layout == "channels_last" or (layout == "auto" and last) else array


def match_images(x: Tensor, channels: int, height: int, width: int) -> tuple[Tensor, tuple[str, ...]]:
    """Give images `(images, channels, height, width)` this number of channels and this size; say what was done.

    Grey is repeated and colour made grey. A picture is scaled until it covers the frame; what stands out is cut off evenly.

    Example:
        >>> images, notes = match_images(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), 3, 32, 32)
        >>> images.shape, notes
        (torch.Size([2, 3, 32, 32]), ('grey repeated in 3 channels', 'resized from 28 x 28 to 32 x 32'))
    """
    notes = []
    if x.shape[1] != channels:
        x, note = _match_channels(x, channels)
        notes.append(note)
    if x.shape[2:] != (height, width):
        notes.append(f"resized from {x.shape[2]} x {x.shape[3]} to {height} x {width}")
        x = torch.cat([_cover(part, height, width) for part in x.split(_CHUNK)])
    return x, tuple(notes)


def _match_channels(x: Tensor, channels: int) -> tuple[Tensor, str]:
    if x.shape[1] == 1 and channels == 3:
        return x.expand(-1, 3, -1, -1).contiguous(), "grey repeated in 3 channels"
    if x.shape[1] == 3 and channels == 1:
        grey = (x.float() * torch.tensor(_LUMA)[:, None, None]).sum(1, keepdim=True)
        return _as_dtype(grey, x.dtype), "colour made grey"
    raise ValueError(f"Images with {x.shape[1]} channels cannot be given {channels}. Use 1 or 3.")


def _cover(x: Tensor, height: int, width: int) -> Tensor:
    """Scale images until they cover the frame, then cut the middle out."""
    size, top, left = _covering(x.shape[2], x.shape[3], height, width)
    large = F.interpolate(x.float(), size=size, mode="bilinear", antialias=True)
    return _as_dtype(large[:, :, top : top + height, left : left + width], x.dtype)


def _covering(high: int, wide: int, height: int, width: int) -> tuple[tuple[int, int], int, int]:
    """Return the smallest size that covers a frame, and where the frame begins in its middle."""
    scale = max(height / high, width / wide)
    size = max(height, round(high * scale)), max(width, round(wide * scale))
    return size, (size[0] - height) // 2, (size[1] - width) // 2


def _as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if dtype.is_floating_point else x.round().clamp(0, 255).to(dtype)


def find_pictures(folder: Path) -> Pictures:
    """Find the image files of a folder: one class for each subfolder, or none where they lie in it directly."""
    there = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    labelled = {path: sub.name for sub in there if sub.is_dir() for path in _image_files(sub.rglob("*"))}
    flat = _image_files(there)
    if flat and labelled:
        raise ValueError(
            f"{folder} holds both images and subfolders with images ({next(iter(labelled.values()))}, ...). "
            "Put every image into the subfolder of its class, or all into one folder."
        )
    if flat:
        return flat, None
    if not labelled:
        raise ValueError(f"{folder} holds no images: files that end in {', '.join(sorted(IMAGE_ENDINGS))}.")
    return list(labelled), list(labelled.values())


def _image_files(paths: Iterable[Path]) -> list[Path]:
    return sorted(p for p in paths if p.suffix.lower() in IMAGE_ENDINGS and not p.name.startswith("."))


def read_list(path: Path, root: Path) -> Pictures:
    """Read a list of image files: on every line a path, relative to `root`, and after a space its label."""
    lines = list(filter(None, map(str.strip, path.read_text().splitlines())))
    if not lines:
        raise ValueError(f"{path} lists no images. Write one line for each: a path, a space, a label.")
    parts = [line.rsplit(" ", 1) for line in lines]
    paths = [root / part[0] for part in parts]
    missing = [p for p in paths if not p.is_file()]
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(paths)} images that {path.name} lists are not there; the first is {missing[0]}."
        )
    labels = [part[1] for part in parts if len(part) == 2]
    return paths, labels if len(labels) == len(paths) else None


def open_picture(source: Path | bytes, name: str = "An embedded image") -> Any:
    """Open an image file, or one that was read already and is called `name`, with Pillow."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(source) if isinstance(source, bytes) else source) as picture:
            picture.load()
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as problem:
        what = name if isinstance(source, bytes) else str(source)
        raise ValueError(f"{what} cannot be read as an image: {problem}. Remove or replace it.") from None
    return picture


def decode(
    pictures: Iterable[Any], names: Sequence[str], size: Size | None, problems: dict[int, str] | None = None
) -> Tensor:
    """Decode images into one uint8 tensor, `(images, channels, height, width)`: one channel where all are grey, or three.

    Args:
        pictures: Files, what files hold, or images of Pillow's; None where there is none.
        names: What to call each image in messages.
        size: Height and width to give every image; None where all have one size already.
        problems: Gets the places of images that cannot be read, and why, and these are left out; None refuses them.
    """
    if not names:
        raise ValueError("There are no images to decode.")
    pixels, grey, kept = np.empty((0, 0, 0, 3), dtype=np.uint8), True, list[str]()
    for index, (picture, name) in enumerate(zip(pictures, names, strict=True)):
        try:
            opened = _opened(picture, name)
            values = _pixels(opened, name, size)
        except ValueError as problem:
            if problems is None:
                raise
            problems[index] = str(problem)
            continue
        grey = grey and opened.mode in _GREY_MODES
        if not kept:
            pixels = np.empty((len(names), *values.shape), dtype=np.uint8)
        if values.shape != pixels.shape[1:]:
            raise ValueError(
                f"Images must have one size; {name} is {values.shape[1]} x {values.shape[0]} pixels and {kept[0]} "
                f"{pixels.shape[2]} x {pixels.shape[1]}. Set size to give all of them one."
            )
        pixels[len(kept)] = values
        kept.append(name)
    found = pixels[: len(kept), ..., :1] if grey else pixels[: len(kept)]
    return torch.from_numpy(np.ascontiguousarray(found.transpose(0, 3, 1, 2)))


def _opened(picture: Any, name: str) -> Any:
    if picture is None:
        raise ValueError(f"{name} has no image. Leave such rows out.")
    return open_picture(picture, name) if isinstance(picture, Path | bytes) else picture


def height_and_width(size: Any) -> tuple[int, int]:
    """Return a size that is one number, of a square, or two."""
    both = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list | tuple) else ()
    if len(both) != 2 or not all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in both):
        raise ValueError(f"`size` of images must be a whole number of at least 1, or [height, width]; got {size!r}.")
    return both[0], both[1]


def _pixels(picture: Any, name: str, size: Size | None) -> np.ndarray:
    """Return `(height, width, 3)` of one picture, resized and cropped where a size is given."""
    if picture.mode.startswith(_DEEP_MODES):
        raise ValueError(f"Images must have 8 bits a channel; {name} is {picture.mode}. Convert it, or give arrays.")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    picture = picture.convert("RGB")
    if size is not None and picture.size != (both := height_and_width(size))[::-1]:
        (high, wide), top, left = _covering(picture.height, picture.width, *both)
        large = picture.resize((wide, high), _BILINEAR)
        picture = large.crop((left, top, left + both[1], top + both[0]))
    return np.asarray(picture)


def describe_shape(shape: Sequence[int]) -> str:
    """Say what an input of this shape is, for messages.

    Example:
        >>> describe_shape((3, 32, 32)), describe_shape((8, 8)), describe_shape((8,))
        ('images of 32 x 32 pixels and 3 channels', 'arrays of 8 x 8 numbers', '8 features')
    """
    if len(shape) == 3:
        channels, height, width = shape
        return f"images of {height} x {width} pixels and {channels} channel{'s' if channels > 1 else ''}"
    if len(shape) > 1:
        return f"arrays of {' x '.join(map(str, shape))} numbers"
    return f"{prod(shape)} feature{'s' if prod(shape) != 1 else ''}"
