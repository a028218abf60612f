"""Compares ways to train an ensemble on two moons: how right, how calibrated, how sure where there was no data.

Run `python examples/two_moons.py` for a table (ten seconds); `--smoke` trains for two epochs. Needs scikit-learn (for
the moons). The last two columns are a warning: on a circle far outside the data most networks are sure of most
points, and an ensemble, although it is sure of fewer than one network, is still sure of many.
"""

import argparse

import numpy as np
from sklearn.datasets import make_moons

import dissensus as ds
from dissensus import metrics, scores
from dissensus import objectives as obj
from dissensus.architectures import mlp

OBJECTIVES = {
    "independent": obj.Independent(),
    "adversarial": obj.Adversarial(obj.Independent(), epsilon=0.1),
    "virtual adversarial": obj.VirtualAdversarial(obj.Independent(), epsilon=0.3),
}
SURE = 0.1  # nats of total uncertainty: a probability of about 0.98


def far_points(count: int) -> np.ndarray:
    """Points on a circle around the moons, well outside them."""
    angles = np.linspace(0, 2 * np.pi, count, endpoint=False)
    return np.array([0.5, 0.25]) + 4 * np.stack([np.sin(angles), np.cos(angles)], 1)


def measure(ens: ds.DeepEnsemble, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Quality on held-out moons, and the share of far points that one network and the ensemble are sure about."""
    known, far = ds.predict(ens, x), ds.predict(ens, far_points(500))
    probs = known.softmax(-1).mean(0)
    return {
        "accuracy": metrics.accuracy(probs, y),
        "NLL": metrics.nll(probs, y),
        "ECE": metrics.ece(probs, y),
        "votes apart": metrics.mean_disagreement(known.argmax(-1)),
        "sure far away: one": float((scores.total_entropy(far[:1]) < SURE).double().mean()),
        "all": float((scores.total_entropy(far) < SURE).double().mean()),
    }


def main() -> None:
    """Train one ensemble for each objective and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="two epochs")
    options = parser.parse_args()
    x, y = make_moons(1400, noise=0.2, random_state=0)
    train, held_out = (x[:400], y[:400]), (x[400:], y[400:])
    for name, objective in OBJECTIVES.items():
        ens = ds.DeepEnsemble(lambda: mlp(2, [64, 64], 2), num_members=options.members, seed=0)
        epochs = 2 if options.smoke else 100
        ds.fit(ens, train, objective=objective, epochs=epochs, batch_size=64, lr=5e-3, seed=0)
        results = measure(ens, *held_out)
        print(f"{name:20}", "  ".join(f"{key} {value:.3f}" for key, value in results.items()))


if __name__ == "__main__":
    main()
