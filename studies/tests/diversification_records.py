"""Records as the arms of `diversification` leave them, with numbers made up for tests."""


def fake(setting, *, pds=0.8, bma=0.7, worst=0.9, unique=1.2, accuracy=0.9):
    """Return the record of an ensemble of two members."""

    def value(x, spread=0.005):
        return [x, x - spread, x + spread]

    parts = ("C-1", "C-5", "near", "far")
    found = {"predictive_diversity": value(pds), "bma": value(bma), "mean_energy": value(0.75)}
    return {
        "setting": {**setting.__dict__},
        "family": setting.family,
        "row": setting.row,
        "test": {"accuracy": value(accuracy), "member_accuracy": value(worst), "ece": [0.02, None, None]},
        "members": [worst, 0.95],
        "unique": {part: value(unique) for part in ("test", *parts)},
        "pds": {part: value(1 + setting.strength) for part in ("test", *parts)},
        "accuracy": {p: {"mean_logits": value(accuracy), "oracle": value(worst)} for p in ("test", "C-1", "C-5")},
        "auroc": {part: found for part in parts},
        "training": {"epochs": 1, "seconds": 1.0},
    }


def fake_backbone(setting):
    """Return the record of a backbone, by whose features unknown images are told."""
    return {
        "setting": {**setting.__dict__},
        "family": setting.family,
        "row": setting.row,
        "detectors": {"C-5": {"mahalanobis": [0.6, 0.55, 0.65], "nearest_neighbours": [0.7, 0.65, 0.75]}},
        "training": {"epochs": 1, "seconds": 1.0},
    }


def fake_spurious(setting):
    """Return the record of networks on the set whose backgrounds mislead."""
    ways = ("ensemble", "oracle", "mean member")
    return {
        "setting": {**setting.__dict__},
        "family": setting.family,
        "row": setting.row,
        "worst_group": {way: [0.7, 0.65, 0.75] for way in ways},
        "training": {"epochs": 1, "seconds": 1.0},
    }
