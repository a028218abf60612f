"""Small ensembles and data for the tests of evaluations and reports."""

import torch
from torch import nn

import dissensus as ds
from dissensus.evaluation import evaluate

CLASSES = 3
SIZES = {"id": 300, "later": 120, "far": 200, "near": 150}
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4])


def make_member():
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def classifier(num_members=4, seed=0):
    return ds.DeepEnsemble(make_member, num_members=num_members, seed=seed)


def labelled(size, seed=0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (size,), generator=generator)
    angle = 2.1 * y
    x = 2 * torch.stack([angle.cos(), angle.sin()], dim=1) + torch.randn(size, 2, generator=generator)
    return x + shift, y


def trained_classifier(num_members=4, seed=0):
    ensemble = classifier(num_members, seed)
    ds.fit(ensemble, labelled(400, seed=9), epochs=4, batch_size=50, lr=1e-2)
    return ensemble


def unlabelled(size, seed=5, scale=3.0):
    return scale * torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))


def make_image_member():
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, CLASSES))


def images(size, seed=0):
    """uint8 images 16 pixels wide whose brightest channel is the class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (size,), generator=generator)
    x = torch.randint(0, 120, (size, 3, 16, 16), generator=generator)
    x[torch.arange(size), y] += 12
    return x.to(torch.uint8), y


def as_floats(batch):
    return batch.float() / 255 - 0.5


def image_classifier(num_members=3):
    ensemble = ds.DeepEnsemble(make_image_member, num_members=num_members, seed=0)
    x, y = images(300, seed=1)
    ds.fit(ensemble, (as_floats(x), y), epochs=6, batch_size=50, lr=1e-2)
    return ensemble


def regression_data(size, seed=0, outputs=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, generator=generator)
    y = x @ torch.tensor([[1.0, -1.0], [0.5, 2.0]])[:, :outputs] + 0.3 * torch.randn(size, outputs, generator=generator)
    return x, y


def regressor(outputs=2, num_members=3):
    return ds.DeepEnsemble(lambda: nn.Linear(2, outputs), num_members=num_members, seed=0)


def four_sets():
    """Known data, the same shifted, and two unknown sets, by name."""
    return {
        "id": labelled(SIZES["id"]),
        "later": labelled(SIZES["later"], seed=1, shift=0.7),
        "far": unlabelled(SIZES["far"]),
        "near": labelled(SIZES["near"], seed=2, shift=2.0)[0],
    }


def evaluate_four_sets(ensemble, data, **options):
    options = {"bootstrap": 0, "groups": {"all": ["far", "near"]}, **options}
    return evaluate(
        ensemble,
        data["id"],
        ood={"far": data["far"], "near": data["near"]},
        shifted={"later": data["later"]},
        **options,
    )


def inputs_of(part):
    return part[0] if isinstance(part, tuple) else part
