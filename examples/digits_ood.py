"""Puts an alarm on networks that exist already: do they notice digits that they were never taught?

Three networks of different architectures know the handwritten digits 0 to 6. Wrapped as an ensemble, without
training anything further, each score gets a limit that familiar digits pass 19 times in 20. The table says how many
of the strange digits (7, 8, 9) the limit catches. Run `python examples/digits_ood.py`; `--smoke` trains for two
epochs. Needs scikit-learn (for the digits).
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import dissensus as ds
from dissensus import metrics, scores
from dissensus.architectures import mlp

KNOWN = 7
FALSE_ALARMS = 0.05


def small_cnn() -> nn.Module:
    """A convolutional network on the 8 by 8 images, given as 64 values."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, KNOWN)
    )


def trained_networks(x: np.ndarray, y: np.ndarray, epochs: int) -> list[nn.Module]:
    """Stand-ins for the networks that you have: each is trained by itself and is a plain module."""
    architectures = (lambda: mlp(64, [64], KNOWN), lambda: mlp(64, [128, 64], KNOWN, dropout=0.2), small_cnn)
    networks = []
    for number, make in enumerate(architectures):
        alone = ds.DeepEnsemble(make, num_members=1, seed=number)
        ds.fit(alone, (x, y), epochs=epochs, batch_size=64, lr=2e-3, seed=number)
        networks.append(alone.member(0))
    return networks


def main() -> None:
    """Wrap the networks, set the limits, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two epochs")
    options = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    x, known = x / 16, y < KNOWN
    part = np.arange(len(x)) % 4
    networks = trained_networks(x[known & (part < 2)], y[known & (part < 2)], 2 if options.smoke else 30)

    ens = ds.DeepEnsemble.from_members(networks)
    calibration, familiar, strange = (
        ds.predict(ens, x[rows]) for rows in (known & (part == 2), known & (part == 3), ~known)
    )
    labels = torch.as_tensor(y[known & (part == 3)])
    print(f"accuracy on known digits: {metrics.accuracy(familiar.softmax(-1).mean(0), labels):.3f}")
    print(f"{'score':26}{'AUROC':>8}{'caught':>9}{'false alarms':>14}")
    for name, score in scores.SCORES.items():
        limit = score(calibration).quantile(1 - FALSE_ALARMS)
        old, new = score(familiar), score(strange)
        caught, false = (new > limit).float().mean(), (old > limit).float().mean()
        print(f"{name:26}{metrics.auroc(new, old):8.3f}{caught:9.1%}{false:14.1%}")


if __name__ == "__main__":
    main()
