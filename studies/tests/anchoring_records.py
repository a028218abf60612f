"""Records of networks as the study of masked anchoring writes them."""

import math


def record(accuracy=0.9, corrupted=0.7, ece=0.1, auroc=0.9, adapted=0.5):
    level = {"accuracy": [corrupted, None, None], "smooth_ece": [ece, None, None]}
    return {
        "test": {"accuracy": [accuracy, None, None]},
        "corrupted": {key: level for key in ("1", "2", "3", "4", "5", "all")},
        "auroc": {name: {"mean_energy": [auroc, None, None]} for name in ("cifar100", "isun", "near", "far")},
        "adaptation": {"dtd": {"accuracy": adapted, "ece": 0.3, "images": 10**6}},
    }


def judged(share, images):
    """Everything measured is one share of so many images, with its 95 % interval."""
    half = 1.96 * math.sqrt(share * (1 - share) / images)
    ends = [share, share - half, share + half]
    found = record()
    found["test"] = {"accuracy": ends}
    found["corrupted"] = {"all": {"accuracy": ends, "smooth_ece": [0.1, None, None]}}
    found["auroc"] = {"isun": {"mean_energy": ends}}
    found["adaptation"] = {"dtd": {"accuracy": share, "ece": 0.1, "images": images}}
    found["images"] = {"test": images, "corrupted": images}
    return found
