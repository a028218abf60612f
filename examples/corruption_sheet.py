"""Draws the contact sheets of all corruptions: a photograph at 32 px and at 128 px, five severities each.

Run `python examples/corruption_sheet.py` to write docs/images/corruptions.png and
docs/images/corruptions_128.jpg; `--smoke` draws three corruptions into a temporary folder. Needs scikit-learn
(for the photograph) and Pillow.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_sample_image
from torch import Tensor

from dissensus.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt

GAP = 4


def photograph(side: int) -> Tensor:
    """The flower that comes with scikit-learn, cut square and reduced, uint8 `(3, side, side)`."""
    picture = Image.fromarray(load_sample_image("flower.jpg")).crop((150, 30, 530, 410))
    reduced = picture.resize((side, side), Image.Resampling.BOX)
    return torch.frombuffer(bytearray(reduced.tobytes()), dtype=torch.uint8).view(side, side, 3).permute(2, 0, 1)


def row(name: str, image: Tensor, enlarge: int) -> Image.Image:
    """The clean image and its five corruptions side by side, each pixel drawn `enlarge` times."""
    tiles = [image, *(corrupt(image[None], name, severity)[0] for severity in SEVERITIES)]
    side = image.shape[-1] * enlarge
    strip = Image.new("RGB", (len(tiles) * (side + GAP), side + GAP), "white")
    for i, tile in enumerate(tiles):
        picture = Image.fromarray(tile.permute(1, 2, 0).contiguous().numpy())
        strip.paste(picture.resize((side, side), Image.Resampling.NEAREST), (i * (side + GAP), 0))
    return strip


def sheet(names: list[str], image: Tensor, enlarge: int, columns: int = 2) -> Image.Image:
    """All rows in `columns` blocks, each row under its name."""
    font = ImageFont.load_default(size=15)
    strips = [row(name, image, enlarge) for name in names]
    width, height = strips[0].width + 3 * GAP, strips[0].height + 20
    rows = -(-len(strips) // columns)
    page = Image.new("RGB", (columns * width, rows * height), "white")
    draw = ImageDraw.Draw(page)
    for i, (name, strip) in enumerate(zip(names, strips, strict=True)):
        left, top = (i // rows) * width, (i % rows) * height
        draw.text((left, top + 1), name.replace("_", " "), fill="black", font=font)
        page.paste(strip, (left, top + 20))
    return page


def main() -> None:
    """Write both sheets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "docs" / "images")
    parser.add_argument("--smoke", action="store_true", help="three corruptions, into a temporary folder")
    options = parser.parse_args()
    names = list(CORRUPTIONS)[:3] if options.smoke else list(CORRUPTIONS)
    folder = Path(tempfile.mkdtemp()) if options.smoke else options.folder
    folder.mkdir(parents=True, exist_ok=True)
    sheet(names, photograph(32), enlarge=3).save(folder / "corruptions.png", optimize=True)
    sheet(names, photograph(128), enlarge=1).save(folder / "corruptions_128.jpg", quality=50)
    for path in sorted(folder.glob("corruptions*")):
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
