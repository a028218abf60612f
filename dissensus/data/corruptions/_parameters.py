"""What each severity means: the published parameters and the rule that carries them to other sizes.

Two tables are published (Hendrycks and Dietterich, 2019): CIFAR-10-C's, for 32 px, serves images whose shorter side has less than
128 px, ImageNet-C's, for 224 px, larger ones. Lengths (a radius, a blur, the size of a flake) are multiplied by side / 32 (at
least 1) or side / 224, so at 32 and 224 px the published numbers hold; in between, the scaling is ours. The amplitude of white
noise that is smoothed over a length grows with that length (smoothing over s pixels divides it by s).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

Numbers: TypeAlias = Sequence[float | int]
Severities: TypeAlias = tuple[tuple[float | int, ...], ...]

CIFAR_SIDE, IMAGENET_SIDE = 32, 224
_SMALLEST_IMAGENET_SIDE = 128


@dataclass(frozen=True)
class Parameters:
    """Five severities of one corruption."""

    names: tuple[str, ...]  # the keyword arguments that a severity sets
    cifar: Severities  # their values at severities 1 to 5 for 32 px
    imagenet: Severities | None = None  # the same for 224 px; None where one table serves all sizes
    # How an argument grows with the side: 1 for a length, 2 for an amplitude that is smoothed over a length and is a length itself.
    powers: Mapping[str, int] = field(default_factory=dict)

    def at(self, severity: int, side: int) -> dict[str, float]:
        """The keyword arguments of one severity for an image whose shorter side is `side`."""
        table, scale = self.cifar, max(1.0, side / CIFAR_SIDE)
        if self.imagenet is not None and side >= _SMALLEST_IMAGENET_SIDE:
            table, scale = self.imagenet, side / IMAGENET_SIDE
        values = zip(self.names, table[severity - 1], strict=True)
        return {name: float(value * scale ** self.powers.get(name, 0)) for name, value in values}


def _single(name: str, cifar: Numbers, imagenet: Numbers | None = None, power: int = 0) -> Parameters:
    """Parameters of a corruption with one number a severity."""
    tables = [None if table is None else tuple((value,) for value in table) for table in (cifar, imagenet)]
    return Parameters((name,), tables[0] or (), tables[1], {name: power})


PARAMETERS: Mapping[str, Parameters] = MappingProxyType(
    {
        "gaussian_noise": _single("sd", (0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38)),
        "shot_noise": _single("photons", (500, 250, 100, 75, 50), (60, 25, 12, 5, 3)),
        "impulse_noise": _single("amount", (0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27)),
        "defocus_blur": Parameters(
            ("radius", "alias_sd"),
            ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
            ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
            {"radius": 1, "alias_sd": 1},
        ),
        "glass_blur": Parameters(
            ("sd", "reach", "rounds"),
            ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
            ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
            {"sd": 1, "reach": 1},
        ),
        "motion_blur": Parameters(
            ("radius", "sd"),
            ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
            ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
            {"radius": 1, "sd": 1},
        ),
        "zoom_blur": Parameters(
            ("stop", "step"),
            ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
            ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        ),
        "snow": Parameters(
            ("loc", "scale", "flake_size", "threshold", "radius", "sd", "keep"),
            (
                (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
                (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
                (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
                (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
                (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
            ),
            (
                (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
                (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
                (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
                (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
                (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
            ),
            {"flake_size": 1, "radius": 1, "sd": 1},
        ),
        "frost": Parameters(
            ("image_weight", "frost_weight", "texture_scale"),
            ((1, 0.2, 0.2), (1, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)),
            ((1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)),
            {"texture_scale": 1},
        ),
        "fog": Parameters(
            ("amount", "decay"),
            ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
            ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        ),
        "brightness": _single("shift", (0.05, 0.10, 0.15, 0.20, 0.30), (0.1, 0.2, 0.3, 0.4, 0.5)),
        "contrast": _single("factor", (0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05)),
        "elastic_transform": Parameters(
            ("strength", "sd", "affine"),
            ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
            ((488, 170.8, 24.4), (488, 19.52, 48.8), (12.2, 2.44, 4.88), (17.08, 2.44, 4.88), (29.28, 2.44, 4.88)),
            {"strength": 2, "sd": 1, "affine": 1},
        ),
        "pixelate": _single("factor", (0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25)),
        "jpeg_compression": _single("quality", (80, 65, 58, 50, 40), (25, 18, 15, 10, 7)),
        # The extra ones.
        "speckle_noise": _single("sd", (0.06, 0.10, 0.12, 0.16, 0.20), (0.15, 0.20, 0.35, 0.45, 0.60)),
        "gaussian_blur": _single("sd", (0.4, 0.6, 0.7, 0.8, 1.0), (1, 2, 3, 4, 6), power=1),
        "spatter": Parameters(
            ("loc", "scale", "sd", "threshold", "opacity", "mud_sd"),
            (
                (0.62, 0.1, 0.7, 0.7, 0.5, 0),
                (0.65, 0.1, 0.8, 0.7, 0.5, 0),
                (0.65, 0.3, 1, 0.69, 0.5, 0),
                (0.65, 0.1, 0.7, 0.69, 1, 0.6),
                (0.65, 0.1, 0.5, 0.68, 1, 0.6),
            ),
            (
                (0.65, 0.3, 4, 0.69, 0.6, 0),
                (0.65, 0.3, 3, 0.68, 0.6, 0),
                (0.65, 0.3, 2, 0.68, 0.5, 0),
                (0.65, 0.3, 1, 0.65, 1, 1.5),
                (0.67, 0.4, 1, 0.65, 1, 1.5),
            ),
            {"scale": 1, "sd": 1, "mud_sd": 1},
        ),
        "saturate": Parameters(
            ("factor", "shift"),
            ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
            ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
        ),
        # C-bar: our own numbers, lengths as fractions of the side, one table for all sizes.
        "blue_noise_sample": _single("dropped", (0.005, 0.015, 0.04, 0.09, 0.18)),
        "brownish_noise": _single("sd", (0.03, 0.06, 0.09, 0.13, 0.18)),
        "checkerboard_cutout": _single("fraction", (0.05, 0.12, 0.22, 0.4, 0.7)),
        "circular_motion_blur": _single("degrees", (4, 8, 12, 17, 24)),
        "inverse_sparkles": _single("sharpness", (0.1, 0.2, 0.35, 0.6, 1.0)),
        "lines": _single("density", (0.03, 0.06, 0.11, 0.18, 0.28)),
        "pinch_and_twirl": Parameters(
            ("angle", "amount"), ((0.4, 0.10), (0.8, 0.18), (1.2, 0.27), (1.7, 0.37), (2.3, 0.5))
        ),
        "ripple": _single("amplitude", (0.005, 0.01, 0.016, 0.024, 0.036)),
        "sparkles": _single("radius", (0.01, 0.02, 0.035, 0.055, 0.08)),
        "transverse_chromatic_abberation": _single("spread", (0.04, 0.08, 0.14, 0.22, 0.34)),
    }
)
