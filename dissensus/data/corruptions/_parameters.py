"""What each severity means: the published parameters and the rule that carries them to other sizes.

Two tables are published (Hendrycks and Dietterich, 2019): CIFAR-10-C's, for 32 px, serves images whose shorter side has less than
128 px, ImageNet-C's, for 224 px, larger ones. Lengths (a radius, a blur, the size of a flake) are multiplied by side / 32 (at
least 1) or side / 224, so at 32 and 224 px the published numbers hold; in between, the scaling is ours. The amplitude of white
noise that is smoothed over a length grows with that length (smoothing over s pixels divides it by s).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_SMALLEST_IMAGENET_SIDE = 128


@dataclass(frozen=True)
class Values:
    """A keyword argument of a corruption at severities 1 to 5."""

    cifar: tuple[int | float, ...]  # for 32 px
    imagenet: tuple[int | float, ...] | None = None  # for 224 px; None where one table serves all sizes
    # Of the side: 1 for a length, 2 for an amplitude that is smoothed over a length and is a length itself.
    power: int = 0

    def at(self, severity: int, side: int) -> float:
        """Its value at one severity for an image whose shorter side is `side`."""
        if self.imagenet is not None and side >= _SMALLEST_IMAGENET_SIDE:
            return float(self.imagenet[severity - 1] * (side / 224) ** self.power)
        return float(self.cifar[severity - 1] * max(1.0, side / 32) ** self.power)


PARAMETERS: Mapping[str, Mapping[str, Values]] = MappingProxyType(
    {
        "gaussian_noise": {"sd": Values((0.04, 0.06, 0.08, 0.09, 0.1), (0.08, 0.12, 0.18, 0.26, 0.38))},
        "shot_noise": {"photons": Values((500, 250, 100, 75, 50), (60, 25, 12, 5, 3))},
        "impulse_noise": {"amount": Values((0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27))},
        "defocus_blur": {
            "radius": Values((0.3, 0.4, 0.5, 1, 1.5), (3, 4, 6, 8, 10), power=1),
            "alias_sd": Values((0.4, 0.5, 0.6, 0.2, 0.1), (0.1, 0.5, 0.5, 0.5, 0.5), power=1),
        },
        "glass_blur": {
            "sd": Values((0.05, 0.25, 0.4, 0.25, 0.4), (0.7, 0.9, 1, 1.1, 1.5), power=1),
            "reach": Values((1, 1, 1, 1, 1), (1, 2, 2, 3, 4), power=1),
            "rounds": Values((1, 1, 1, 2, 2), (2, 1, 3, 2, 2)),
        },
        "motion_blur": {
            "radius": Values((6, 6, 6, 8, 9), (10, 15, 15, 15, 20), power=1),
            "sd": Values((1, 1.5, 2, 2, 2.5), (3, 5, 8, 12, 15), power=1),
        },
        "zoom_blur": {
            "stop": Values((1.06, 1.11, 1.16, 1.21, 1.26), (1.11, 1.16, 1.21, 1.26, 1.31)),
            "step": Values((0.01, 0.01, 0.01, 0.01, 0.01), (0.01, 0.01, 0.02, 0.02, 0.03)),
        },
        "snow": {
            "loc": Values((0.1, 0.1, 0.15, 0.25, 0.3), (0.1, 0.2, 0.55, 0.55, 0.55)),
            "scale": Values((0.2, 0.2, 0.3, 0.3, 0.3), (0.3, 0.3, 0.3, 0.3, 0.3)),
            "flake_size": Values((1, 1, 1.75, 2.25, 1.25), (3, 2, 4, 4.5, 2.5), power=1),
            "threshold": Values((0.6, 0.5, 0.55, 0.6, 0.65), (0.5, 0.5, 0.9, 0.85, 0.85)),
            "radius": Values((8, 10, 10, 12, 14), (10, 12, 12, 12, 12), power=1),
            "sd": Values((3, 4, 4, 6, 12), (4, 4, 8, 8, 12), power=1),
            "keep": Values((0.95, 0.9, 0.9, 0.85, 0.8), (0.8, 0.7, 0.7, 0.65, 0.55)),
        },
        "frost": {
            "image_weight": Values((1, 1, 0.9, 0.85, 0.75), (1, 0.8, 0.7, 0.65, 0.6)),
            "frost_weight": Values((0.2, 0.3, 0.4, 0.4, 0.45), (0.4, 0.6, 0.7, 0.7, 0.75)),
            "texture_scale": Values((0.2, 0.2, 0.2, 0.2, 0.2), (1, 1, 1, 1, 1), power=1),
        },
        "fog": {
            "amount": Values((0.2, 0.5, 0.75, 1, 1.5), (1.5, 2, 2.5, 2.5, 3)),
            "decay": Values((3, 3, 2.5, 2, 1.75), (2, 2, 1.7, 1.5, 1.4)),
        },
        "brightness": {"shift": Values((0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5))},
        "contrast": {"factor": Values((0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05))},
        "elastic_transform": {
            "strength": Values((0, 1.6, 2.56, 3.2, 3.2), (488, 488, 12.2, 17.08, 29.28), power=2),
            "sd": Values((0, 6.4, 1.92, 1.28, 0.96), (170.8, 19.52, 2.44, 2.44, 2.44), power=1),
            "affine": Values((2.56, 2.24, 1.92, 1.6, 0.96), (24.4, 48.8, 4.88, 4.88, 4.88), power=1),
        },
        "pixelate": {"factor": Values((0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25))},
        "jpeg_compression": {"quality": Values((80, 65, 58, 50, 40), (25, 18, 15, 10, 7))},
        # The extra ones.
        "speckle_noise": {"sd": Values((0.06, 0.1, 0.12, 0.16, 0.2), (0.15, 0.2, 0.35, 0.45, 0.6))},
        "gaussian_blur": {"sd": Values((0.4, 0.6, 0.7, 0.8, 1.0), (1, 2, 3, 4, 6), power=1)},
        "spatter": {
            "loc": Values((0.62, 0.65, 0.65, 0.65, 0.65), (0.65, 0.65, 0.65, 0.65, 0.67)),
            "scale": Values((0.1, 0.1, 0.3, 0.1, 0.1), (0.3, 0.3, 0.3, 0.3, 0.4), power=1),
            "sd": Values((0.7, 0.8, 1, 0.7, 0.5), (4, 3, 2, 1, 1), power=1),
            "threshold": Values((0.7, 0.7, 0.69, 0.69, 0.68), (0.69, 0.68, 0.68, 0.65, 0.65)),
            "opacity": Values((0.5, 0.5, 0.5, 1, 1), (0.6, 0.6, 0.5, 1, 1)),
            "mud_sd": Values((0, 0, 0, 0.6, 0.6), (0, 0, 0, 1.5, 1.5), power=1),
        },
        "saturate": {
            "factor": Values((0.3, 0.1, 1.5, 2, 2.5), (0.3, 0.1, 2, 5, 20)),
            "shift": Values((0, 0, 0, 0.1, 0.2), (0, 0, 0, 0.1, 0.2)),
        },
        # C-bar: our own numbers, lengths as fractions of the side, one table for all sizes.
        "blue_noise_sample": {"dropped": Values((0.005, 0.015, 0.04, 0.09, 0.18))},
        "brownish_noise": {"sd": Values((0.03, 0.06, 0.09, 0.13, 0.18))},
        "checkerboard_cutout": {"fraction": Values((0.05, 0.12, 0.22, 0.4, 0.7))},
        "circular_motion_blur": {"degrees": Values((4, 8, 12, 17, 24))},
        "inverse_sparkles": {"sharpness": Values((0.1, 0.2, 0.35, 0.6, 1.0))},
        "lines": {"density": Values((0.03, 0.06, 0.11, 0.18, 0.28))},
        "pinch_and_twirl": {"angle": Values((0.4, 0.8, 1.2, 1.7, 2.3)), "amount": Values((0.1, 0.18, 0.27, 0.37, 0.5))},
        "ripple": {"amplitude": Values((0.005, 0.01, 0.016, 0.024, 0.036))},
        "sparkles": {"radius": Values((0.01, 0.02, 0.035, 0.055, 0.08))},
        "transverse_chromatic_abberation": {"spread": Values((0.04, 0.08, 0.14, 0.22, 0.34))},
    }
)
