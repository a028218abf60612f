"""Heads on a network that was pretrained elsewhere: `dissensus study diversification --setting pretrained --backbone MODULE:FUNCTION`.

The document's regime: a backbone that knows far more than the training set, frozen, and small heads on its features. CIFAR-100 with its
hundred classes is the main task; the guard of loss-guided disagreement is also looked at with ten classes (the images of ten superclasses)
and with as many as the backbone itself was trained for (its own answers are the labels).
"""

from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dissensus.data.features import CachedFeatures
from dissensus_studies.choosing import reserved
from dissensus_studies.diversification.data import HEAD_EPOCHS, Features, Material, features_of
from dissensus_studies.diversification.measures import Judged
from dissensus_studies.diversification.settings import FEW
from dissensus_studies.harness.image_sets import image_folder
from dissensus_studies.harness.image_study import Work

HIDDEN = 256


class Pretrained(Material):
    """What heads on a pretrained backbone need: features of three tasks, by what heads of them are called after."""

    whole_records = False

    def __init__(self, work: Work, backbone: str) -> None:
        super().__init__(work)
        assert work.data is not None
        self.head_epochs = work.epochs or HEAD_EPOCHS
        # Of the classes, the superclasses.
        self.coarse = superclasses(work.data)
        self.body, self.head = load_backbone(backbone, self.device)
        self.outputs = int([layer for layer in self.head.modules() if isinstance(layer, nn.Linear)][-1].out_features)
        self.sets, elsewhere = reserved(work.sets)
        self.disagreed = [name for name in work.sets.ood if name not in self.sets.ood]
        tasks = self._tasks(elsewhere)
        self._features = {f"pretrained C={number}": task for number, task in tasks.items()}

    @property
    def source_names(self) -> tuple[str, ...]:
        """The set that is disagreed on and that nothing is judged by."""
        return tuple(self.disagreed)

    def _tasks(self, elsewhere: Tensor) -> dict[int, Features]:
        sets, place = self.sets, self.device
        read = partial(features_of, self.body, device=place, batch_size=500)
        x, y = read(sets.all_train.x), sets.all_train.y.to(place)
        known = Judged(read(sets.test.x), sets.test.y.to(place), {}, {})
        sources = (read(elsewhere),)
        everything = replace(known, ood={name: read(x) for name, x in sets.ood.items()}, groups=sets.ood_groups)
        groups, test_groups = (self.coarse.to(place)[labels] for labels in (y, known.labels))
        few, test_few = groups < FEW, test_groups < FEW
        with torch.no_grad():
            own, own_test = (self.head(part).argmax(-1) for part in (x, known.test))

        def task(x: Tensor, y: Tensor, judged: Judged, classes: int) -> Features:
            return Features(CachedFeatures(x, y), judged, sources, classes, HIDDEN)

        superclass = replace(known, test=known.test[test_few], labels=test_groups[test_few])
        return {
            FEW: task(x[few], groups[few], superclass, FEW),
            self.outputs: task(x, own, replace(known, labels=own_test), self.outputs),
            len(self.coarse): task(x, y, everything, len(self.coarse)),
        }


def load_backbone(name: str, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Return a backbone up to its features, from uint8 images, and its own last layer: what `"module:function"` returns."""
    module, _, function = name.partition(":")
    try:
        body, head = getattr(import_module(module), function)()
    except (ImportError, AttributeError, TypeError, ValueError) as problem:
        raise ValueError(
            f"`backbone` must be module:function, a function that returns two networks, images to features and features to logits; "
            f"{name!r} gave {type(problem).__name__}: {problem}"
        ) from problem
    return body.eval().to(device), head.eval().to(device)


def superclasses(data: Path) -> Tensor:
    """Return the superclass of each class of CIFAR-100, from the labels `y` and `y_coarse` of its test file."""
    path = image_folder(data) / "cifar100_test.npz"
    if not path.is_file():
        raise ValueError(f"The pretrained setting trains on CIFAR-100; there is no {path.name} in {path.parent}.")
    with np.load(path, allow_pickle=False) as arrays:
        if "y_coarse" not in arrays.files:
            raise ValueError(f"{path.name} must hold the superclasses, y_coarse, beside the classes, y.")
        fine, coarse = (torch.from_numpy(arrays[name].astype(np.int64)) for name in ("y", "y_coarse"))
    found = torch.zeros(int(fine.max()) + 1, dtype=torch.int64)
    found[fine] = coarse
    return found
