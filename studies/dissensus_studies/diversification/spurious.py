"""Objects on backgrounds that give the answer away in training and not in testing, made from the real images.

As in Waterbirds: two classes of objects, two kinds of backgrounds, which go together in 95 % of the training images and in half of the
validation and test images. Objects are known images made smaller; backgrounds are scenes, cool (blue) ones and warm ones.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from dissensus import metrics
from dissensus.aggregation import mean_logits, oracle_selection
from dissensus.randomness import derive, permutation
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.image_sets import Images, ImageSets
from dissensus_studies.harness.statistics import share_ends

# As many images as Waterbirds has, in whole hundreds.
TRAIN, VALIDATION, TEST = 4800, 1200, 5800
ALIGNED = 0.95
OBJECT_SIZE = 20
BACKGROUNDS = ("scenes", "photographs", "isun", "tiny_imagenet")
# Classes of CIFAR-10 that are animals; elsewhere the upper half of the classes.
ANIMALS = (2, 3, 4, 5, 6, 7)


def spurious_sets(sets: ImageSets, seed: int = 0) -> tuple[ImageSets, Tensor, str]:
    """Paste known images onto backgrounds of unknown ones; return the sets, the group of each test image, and whose backgrounds they are.

    A group is twice the class plus the background.
    """
    source = next((name for name in BACKGROUNDS if name in sets.ood), None)
    if source is None:
        raise ValueError(
            "The spurious set takes its backgrounds from scenes or photographs, and none of "
            f"{', '.join(BACKGROUNDS)} is there. Leave these arms out with `arms`."
        )
    # The third of the images with most blue beside red, and the third with least, each in its old order.
    x, upper = sets.ood[source], torch.arange(sets.num_classes) >= sets.num_classes // 2
    means = x.float().mean((2, 3))
    order, third = (means[:, 2] - means[:, 0]).argsort(descending=True, stable=True), max(1, len(x) // 3)
    cool, warm = x[order[:third].sort().values], x[order[-third:].sort().values]
    if sets.name == "cifar10" and sets.num_classes == 10:
        upper = torch.isin(torch.arange(10), torch.tensor(ANIMALS))
    parts = ((sets.train, TRAIN, ALIGNED), (sets.validation, VALIDATION, 0.5), (sets.test, TEST, 0.5))
    (train, _), (validation, _), (test, test_groups) = (
        _pasted(
            Images(images.x[:count], upper[images.y[:count]].long()),
            # No background is in two parts.
            (warm[place::3], cool[place::3]),
            aligned,
            derive(seed, "spurious", place),
        )
        for place, (images, count, aligned) in enumerate(parts)
    )
    name = f"{sets.name} on {source}"
    combined = replace(sets, name=name, train=train, validation=validation, test=test, num_classes=2)
    return combined, test_groups, source


def _pasted(objects: Images, backgrounds: tuple[Tensor, Tensor], aligned: float, key: int) -> tuple[Images, Tensor]:
    """Put each object on a background of its class's kind in a share of the cases, else of the other kind."""
    count = len(objects.x)
    order = permutation(torch.tensor(derive(key, "aligned")), count)
    goes_with = torch.zeros(count, dtype=torch.bool)
    goes_with[order[: round(aligned * count)]] = True
    kinds = torch.where(goes_with, objects.y, 1 - objects.y)
    draws = permutation(torch.tensor(derive(key, "backgrounds")), count)
    x = torch.stack(
        [backgrounds[kind][draw % len(backgrounds[kind])] for kind, draw in zip(kinds.tolist(), draws, strict=True)]
    )
    small = interpolate(objects.x.float(), size=(OBJECT_SIZE, OBJECT_SIZE), mode="area")
    start = (x.shape[-1] - OBJECT_SIZE) // 2
    inside = slice(start, start + OBJECT_SIZE)
    x[:, :, inside, inside] = small.round().to(torch.uint8)
    return Images(x, objects.y), 2 * objects.y + kinds


def group_record(logits: Tensor, labels: Tensor, groups: Tensor) -> Record:
    """Return worst-group accuracy of the ensemble (mean logits), of the best member by hindsight, and of the members on average."""
    found = metrics.group_accuracies(mean_logits(logits), labels, groups)
    members = [metrics.group_accuracies(member.softmax(-1), labels, groups) for member in logits]
    worst = [min(each.values()) for each in members]
    sizes = {int(group): int((groups == group).sum()) for group in groups.unique()}

    def lowest(of_groups: dict[int, float]) -> list[float]:
        """Return the lowest accuracy with its 95 % interval over the images of that group."""
        group = min(of_groups, key=of_groups.__getitem__)
        return [round(v, 6) for v in (of_groups[group], *share_ends(of_groups[group], 0.0, sizes[group]))]

    return {
        "groups": {"ensemble": found, "members": members, "sizes": sizes},
        "worst_group": {
            "ensemble": lowest(found),
            "oracle": lowest(members[worst.index(max(worst))]),
            "mean member": [sum(worst) / len(worst), None, None],
        },
        "group_accuracy": {
            "ensemble": float((mean_logits(logits).argmax(-1) == labels).double().mean()),
            "oracle": oracle_selection(logits, labels).accuracy,
        },
    }
