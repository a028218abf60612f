"""A stream of images and how disputed they are -> the few most and least disputed, small enough to keep."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus.evaluation.results import Disputed

_KEPT = 6
_LARGEST_SIDE = 96


class Gallery:
    """The most and least disputed images so far; nothing is copied to the host before the end."""

    def __init__(self) -> None:
        self._best: dict[bool, dict[str, Tensor]] = {}
        self._seen = 0

    def add(
        self, images: Tensor, dispute: Tensor, votes: Tensor, predicted: Tensor, labels: Tensor | None
    ) -> None:
        """Take in a batch; `votes` is `(members, batch)`, all else has the batch first."""
        batch = {
            "dispute": dispute,
            "index": torch.arange(self._seen, self._seen + len(images), device=images.device),
            "predicted": predicted,
            "label": torch.full_like(predicted, -1) if labels is None else labels.long(),
            "votes": votes.T,
        }
        self._seen += len(images)
        for most in (True, False):
            self._best[most] = self._merged(most, images, batch)

    def _merged(self, most: bool, images: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        best = _first(batch["dispute"], most)
        new = {name: values[best] for name, values in batch.items()} | {"image": images[best]}
        old = self._best.get(most)
        if old is None:
            return new
        joined = {name: torch.cat([old[name], new[name]]) for name in new}
        best = _first(joined["dispute"], most)
        return {name: values[best] for name, values in joined.items()}

    def items(self, name: str) -> list[Disputed]:
        """Return what was kept, the most (or least) disputed first."""
        return [
            _item(name, most, {key: values[place].cpu() for key, values in best.items()})
            for most, best in self._best.items()
            for place in range(len(best["dispute"]))
        ]


def _first(dispute: Tensor, most: bool) -> Tensor:
    # Stable: of equals the earliest is kept, however the set was cut into batches.
    return dispute.argsort(descending=most, stable=True)[:_KEPT]


def shows_images(raw: Tensor) -> bool:
    """Whether inputs can be shown: one or three channels, and more than one pixel a side."""
    numbers = raw.dtype == torch.uint8 or raw.is_floating_point()
    return numbers and raw.ndim == 4 and raw.shape[1] in (1, 3) and min(raw.shape[2:]) > 1


def _item(name: str, most: bool, kept: dict[str, Tensor]) -> Disputed:
    picture = _picture(kept["image"])
    channels, height, width = picture.shape
    label = int(kept["label"])
    return Disputed(
        set=name,
        most=most,
        index=int(kept["index"]),
        dispute=float(kept["dispute"]),
        predicted=int(kept["predicted"]),
        label=None if label < 0 else label,
        votes=tuple(kept["votes"].tolist()),
        shape=(channels, height, width),
        pixels=picture.numpy().tobytes(),
    )


def _picture(image: Tensor) -> Tensor:
    """Return an image as uint8; values beyond 0 to 1 (normalised inputs) are stretched to its own range."""
    values = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    low, high = values.aminmax()
    if float(low) < 0 or float(high) > 1:
        values = (values - low) / (high - low).clamp_min(1e-12)
    shrink = _LARGEST_SIDE / max(values.shape[1:])
    if shrink < 1:
        size = [max(1, round(side * shrink)) for side in values.shape[1:]]
        values = F.interpolate(values[None], size, mode="area")[0]
    return (255 * values).round().to(torch.uint8)
