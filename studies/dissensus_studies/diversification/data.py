"""What the arms of `diversification` share: corrupted images, images to disagree on, frozen backbones and their features.

With `--setting pretrained --backbone MODULE:FUNCTION` the document's regime: a backbone that was trained elsewhere and knows far more
than the training set, frozen, and small heads on its features. CIFAR-100 with its hundred classes is the main task; the guard of
loss-guided disagreement is also looked at with ten classes (the images of ten superclasses) and with as many as the backbone itself was
trained for (its own answers are the labels).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dissensus.architectures import resnet18
from dissensus.caching import cache_features
from dissensus.data.corruptions import STANDARD, corrupt
from dissensus.data.features import CachedFeatures
from dissensus.members import DeepEnsemble
from dissensus.training.engines import EngineName
from dissensus_studies.anchoring.arms import without_head
from dissensus_studies.choosing import reserved
from dissensus_studies.diversification.measures import Judged
from dissensus_studies.diversification.settings import FEW
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.image_arms import augmentation, fit_images, on_pixels, training_record
from dissensus_studies.harness.image_sets import ImageSets, image_folder
from dissensus_studies.harness.image_study import Work
from dissensus_studies.masksembles import small_network

QUICK_CORRUPTIONS = ("gaussian_noise", "defocus_blur", "elastic_transform")
SEVERITIES = (1, 5)
CORRUPTED_IMAGES, QUICK_CORRUPTED = 1000, 100
# Unknown sets whose first half methods disagree on, by preference; the others are for judging only.
SOURCES = ("isun", "tiny_imagenet", "scenes", "textures", "photographs")
# The second set to disagree on of heads on a network that was trained elsewhere.
SECOND_SOURCES = ("textures", "scenes")
PASSES = 4
EPOCHS, QUICK_EPOCHS = 30, 8
# The document's; a small set takes more.
HEAD_EPOCHS, QUICK_HEAD_EPOCHS = 10, 15
RATE, BATCH, QUICK_BATCH = 0.2, 128, 64
UNUSED = "not trained with"
# Of heads on a backbone that was trained elsewhere.
HIDDEN = 256


@dataclass(frozen=True)
class Features:
    """What heads learn and are judged by: features of a frozen backbone, of training images in several augmented passes."""

    train: CachedFeatures
    judged: Judged
    sources: tuple[Tensor, ...]  # To disagree on.
    num_classes: int
    hidden: int  # Width of the heads' hidden layers.
    validation: tuple[Tensor, Tensor] | None = None  # For guards that look at held-out data.
    record: Record | None = None  # Of the backbone's training, if it was trained here.


def features_of(backbone: nn.Module, x: Tensor, *, device: torch.device, batch_size: int = 1024) -> Tensor:
    """Return what a backbone says of images, on the device."""
    features = cache_features(backbone, x, batch_size=batch_size, device=device).features
    assert isinstance(features, Tensor)
    return features.to(device)


class Material:
    """Everything that more than one arm needs, made when it is first asked for.

    Trained backbones are kept in the folder, so that a study that goes on need not train them again. `epochs` are those of networks
    from scratch; heads train for at most the document's ten.
    """

    # Whether records have intervals over images, diagnoses and examples, or are short: of runs with several seeds.
    whole_records = True

    def __init__(self, work: Work) -> None:
        self.sets, self.folder, self.quick, self.seed = work.sets, work.output, work.quick, work.seed
        self.epochs = work.epochs or (QUICK_EPOCHS if self.quick else EPOCHS)
        self.head_epochs = min(work.epochs or EPOCHS, QUICK_HEAD_EPOCHS if self.quick else HEAD_EPOCHS)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.corruptions: Sequence[str] = QUICK_CORRUPTIONS if self.quick else STANDARD
        # In a run that has to be quick, compiling does not pay.
        self.engine: EngineName = "captured" if self.quick else "auto"
        self._features: dict[str, Features] = {}
        # Which unknown sets are disagreed on, at most two.
        self.source_names = tuple([name for name in SOURCES if name in self.sets.ood][:2] or list(self.sets.ood)[-1:])

    def network(self, classes: int | None = None) -> nn.Module:
        """Make an untrained network that takes uint8 images."""
        make = small_network if self.quick else resnet18
        return on_pixels(make(classes or self.sets.num_classes), self.sets)

    @property
    def training(self) -> dict[str, Any]:
        """How networks are trained from scratch: SGD in one cycle."""
        return {
            "epochs": self.epochs,
            "lr": 0.1 if self.quick else RATE,
            "batch_size": QUICK_BATCH if self.quick else BATCH,
            "last_batch": "drop" if len(self.sets.train.x) >= 2 * BATCH else "keep",
            "engine": self.engine,
        }

    @cached_property
    def source_images(self) -> tuple[Tensor, ...]:
        """The first half of each source; the second half is judged by. With one source, both are it."""
        halves = [self.sets.ood[name][: len(self.sets.ood[name]) // 2] for name in self.source_names]
        return halves[0], halves[-1]

    @cached_property
    def images(self) -> Judged:
        """Images that ensembles are judged by, on the device."""
        sets, used = self.sets, self.source_names
        ood = {name: (x[len(x) // 2 :] if name in used else x).to(self.device) for name, x in sets.ood.items()}
        groups = {**sets.ood_groups, UNUSED: [name for name in ood if name not in used]}
        return Judged(sets.test.x.to(self.device), sets.test.y.to(self.device), ood, self.corrupted(), groups)

    def corrupted(self) -> dict[str, dict[str, Tensor]]:
        """Return the first test images, by severity and corruption, on the device."""
        few = self.sets.test.x[: QUICK_CORRUPTED if self.quick else CORRUPTED_IMAGES].to(self.device)
        return {
            f"C-{level}": {name: corrupt(few, name, level, self.seed) for name in self.corruptions}
            for level in SEVERITIES
        }

    def features(self, backbone: str) -> Features:
        """Return the features of a backbone: see `Setting.backbone`."""
        if backbone not in self._features:
            self._features[backbone] = self.make_features(backbone)
        return self._features[backbone]

    def make_features(self, kind: str) -> Features:
        """Train a backbone on "half" of the classes or the "whole" training set, freeze it, and keep what it says of all images."""
        classes = self.sets.num_classes if kind == "whole" else max(2, -(-self.sets.num_classes // 2))
        sets = of_first_classes(self.sets, classes)
        ensemble = DeepEnsemble(lambda: self.network(classes), 1, self.seed)
        run = fit_images(
            ensemble,
            sets,
            watch="nothing",
            seed=self.seed,
            checkpoint_dir=self.folder / "backbones" / f"{kind}-{self.epochs}-{len(sets.train.x)}-{self.seed}",
            checkpoint_every=self.epochs,
            resume=True,
            **self.training,
        )
        record = {"training": training_record(run), "classes": classes, "images": len(sets.train.x)}
        net, sets = without_head(ensemble.member(0)), self.sets
        read = partial(features_of, net, device=self.device)
        options: dict[str, Any] = {"augment": augmentation(sets), "seed": self.seed, "device": self.device}
        train = cache_features(net, sets.train, passes=PASSES, **options)
        assert isinstance(train.features, Tensor)
        judged = self.images.map(read, outputs=0)
        return Features(
            replace(train, features=train.features.to(self.device)),
            judged,
            tuple(map(read, self.source_images)),
            sets.num_classes,
            judged.test.shape[1],
            (read(sets.validation.x), sets.validation.y.to(self.device)),
            record,
        )


def of_first_classes(sets: ImageSets, classes: int) -> ImageSets:
    """Return the sets with images of the first classes only."""
    train, validation, test = (part.rows(part.y < classes) for part in (sets.train, sets.validation, sets.test))
    return replace(sets, train=train, validation=validation, test=test, num_classes=classes)


class Pretrained(Material):
    """What heads on a pretrained backbone need: features of three tasks, by what heads of them are called after."""

    whole_records = False

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        assert work.data is not None
        assert work.backbone is not None
        self.head_epochs = work.epochs or HEAD_EPOCHS
        # Of the classes, the superclasses.
        self.coarse = superclasses(work.data)
        self.body, self.head = load_backbone(work.backbone, self.device)
        self.outputs = int([layer for layer in self.head.modules() if isinstance(layer, nn.Linear)][-1].out_features)
        self.sets, elsewhere = reserved(work.sets)
        # Nothing is judged by the first; by the second all arms but those that disagree on it.
        second = next((name for name in SECOND_SOURCES if name in self.sets.ood), list(self.sets.ood)[-1])
        self.source_names = (*(name for name in work.sets.ood if name not in self.sets.ood), second)
        sets, place = self.sets, self.device
        read = partial(features_of, self.body, device=place, batch_size=500)
        x, y = read(sets.all_train.x), sets.all_train.y.to(place)
        known = Judged(read(sets.test.x), sets.test.y.to(place), {}, {})
        everything = replace(
            known,
            ood={name: read(x) for name, x in sets.ood.items()},
            groups=sets.ood_groups,
            corrupted={s: {name: read(x) for name, x in found.items()} for s, found in self.corrupted().items()},
        )
        sources = (read(elsewhere), everything.ood[second])
        groups, test_groups = (self.coarse.to(place)[labels] for labels in (y, known.labels))
        few, test_few = groups < FEW, test_groups < FEW
        superclass = replace(known, test=known.test[test_few], labels=test_groups[test_few])
        with torch.no_grad():
            own, own_test = (self.head(part).argmax(-1) for part in (x, known.test))
        for classes, features, labels, judged in (
            (FEW, x[few], groups[few], superclass),
            (self.outputs, x, own, replace(known, labels=own_test)),
            (len(self.coarse), x, y, everything),
        ):
            task = Features(CachedFeatures(features, labels), judged, sources, classes, HIDDEN)
            self._features[f"pretrained C={classes}"] = task


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
