"""A folder with a tiny image set whose classes are told apart by brightness, and unknown images beside it."""

import numpy as np


def bright_images(count, classes=3, seed=0, size=32):
    rng = np.random.default_rng(seed)
    y = np.arange(count) % classes
    x = rng.integers(0, 60, (count, size, size, 3)) + 80 * y[:, None, None, None]
    return x.clip(0, 255).astype(np.uint8), y.astype(np.uint8)


def write_images(folder, name="cifar10", train=40, test=20, parts=2):
    """Write `<name>_train_1ofN.npz`, ..., `<name>_test.npz` and an unknown set; return the training arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    x, y = bright_images(train)
    for number, (own_x, own_y) in enumerate(zip(np.split(x, parts), np.split(y, parts), strict=True), start=1):
        np.savez(folder / f"{name}_train_{number}of{parts}.npz", x=own_x, y=own_y)
    test_x, test_y = bright_images(test, seed=1)
    np.savez(folder / f"{name}_test.npz", x=test_x, y=test_y)
    np.savez(folder / "svhn_test.npz", x=np.random.default_rng(2).integers(0, 256, (15, 32, 32, 3)).astype(np.uint8))
    np.savez(folder / "cifar100_test.npz", x=bright_images(12, classes=4, seed=3)[0])
    return x, y
