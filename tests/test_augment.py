"""Augmentation in training: recorded like everything else, and whose batches it changes."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds
from dissensus import objectives as obj
from dissensus.data import augment
from dissensus.randomness import Noise, derive

images = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
labels = torch.arange(40) % 3
EVERY = {
    "flip": augment.HorizontalFlip(),
    "crop": augment.RandomCrop(2),
    "noise": augment.GaussianNoise(0.1),
    "rotation": augment.Rotation(10),
    "colour": augment.ColourJitter(0.2, 0.2, 0.2),
    "mixup": augment.Mixup(3),
    "cutmix": augment.CutMix(3),
    "compose": augment.Compose((augment.HorizontalFlip(), augment.Mixup(3), augment.CutMix(3))),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))


class Items(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(images)

    def __getitem__(self, index):
        return images[index], labels[index]


SHARED = {
    "compared": {"data": (images, labels), "objective": obj.Joint(0.5), "batch_size": 10},
    "asked for": {"data": (images, labels), "batches": "shared", "batch_size": 10},
    "Dataset": {"data": Items(), "batch_size": 10},
    "DataLoader": {"data": DataLoader(TensorDataset(images, labels), batch_size=10)},
}
OWN = {"own": {"data": (images, labels), "batch_size": 10}}


@pytest.mark.parametrize("settings", (SHARED | OWN).values(), ids=(SHARED | OWN).keys())
@pytest.mark.parametrize("change", EVERY.values(), ids=EVERY.keys())
def test_every_augmentation_can_be_recorded(change, settings):
    curves = []
    for engine in ("eager", "captured"):
        run = ds.fit(ds.DeepEnsemble(net, 2), augment=change, epochs=2, engine=engine, device="cpu", **settings)
        assert run.engine == engine
        curves.append(torch.tensor(run.history["loss"]))
    torch.testing.assert_close(*curves)


def test_a_share_is_the_same_with_one_key_as_among_many():
    keys = torch.tensor([derive(0, number) for number in range(50)])
    together = augment._beta(Noise(keys), 0.2)
    assert torch.equal(torch.stack([augment._beta(Noise(key), 0.2) for key in keys]), together)


class Seen:
    """Keeps the augmented batches of eager steps."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []

    def __call__(self, x, y, noise):
        x, y = augment.GaussianNoise(1.0)(torch.zeros_like(x), y, noise)
        self.batches.append(x)
        return x, y


@pytest.mark.parametrize("settings", (SHARED | OWN).values(), ids=(SHARED | OWN).keys())
def test_members_with_own_batches_augment_them_in_their_own_way_and_others_together(settings):
    seen = Seen()
    ds.fit(ds.DeepEnsemble(net, 2), augment=seen, epochs=1, engine="eager", device="cpu", **settings)
    wanted = (10, 3, 8, 8) if settings in SHARED.values() else (2, 10, 3, 8, 8)
    assert {batch.shape for batch in seen.batches} == {torch.Size(wanted)}
    if len(wanted) == 5:
        assert not torch.equal(*seen.batches[-1])
