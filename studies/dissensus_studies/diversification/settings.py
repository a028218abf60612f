"""Which ensembles the study `diversification` trains, what they are called, and in which order."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

STRENGTHS = (0.0, 0.1, 0.5, 1.0, 5.0, 10.0)
GUARDS = ("share=1", "share=0.5", "cap", "held-out loss", "held-out accuracy", "falling")
# Loss-guided disagreement as it was published, and with the library's own guard.
PUBLISHED, GUARDED = "none", "share"
FORMS = (PUBLISHED, GUARDED)
REPEATS = 3

WITH_STRENGTH = ("ldr", "a2d", "divdis", "two-stage", "joint")

Kind = Literal["nets", "backbone", "heads", "spurious"]


@dataclass(frozen=True)
class Setting:
    """One ensemble of the study.

    Attributes:
        kind: "nets" trained from scratch, "heads" on a frozen backbone, nets on the "spurious" set; or the "backbone" itself.
        method: "single", "deep", "diverse" (hyperparameters), "ldr" (loss-guided), "a2d" or "divdis" on other images, "two-stage", "joint";
            "masksembles", "dropout" or "batch" for nets.
        num_members: Members.
        strength: Weight of the disagreement.
        guard: What holds loss-guided disagreement back; "none" is the published form, "inverse probability" that form with
            weights of the other kind.
        active: Members drawn for a step; 0 for all.
        layers: Of each head.
        backbone: Whether the backbone was trained on "half" of the classes, on the "whole" training set, or elsewhere and heads have
            so many classes ("pretrained C=100").
        source: Which other images a method disagrees on: 0 or 1.
        fixed: Whether heads train for the same epochs whatever their number; otherwise so that each takes as many steps as alone.
        seed: Of the run.
    """

    kind: Kind
    method: str = "deep"
    num_members: int = 5
    strength: float = 0.0
    guard: str = "share"
    active: int = 0
    layers: int = 2
    backbone: str = ""
    source: int = 0
    fixed: bool = False
    seed: int = 0

    @property
    def row(self) -> str:
        """What it is but for its kind, backbone and seed.

        Example:
            >>> Setting("heads", "ldr", strength=0.5, active=2, guard="none", backbone="half").row
            'ldr=0.5 none A=2 M=5'
        """
        strength = f"={self.strength:g}" if self.method in WITH_STRENGTH else ""
        parts = [
            f"{self.method}{strength}",
            self.guard if self.method == "ldr" else "",
            f"source={self.source + 1}" if self.method in ("a2d", "divdis") and self.source else "",
            f"A={self.active}" if self.active else "",
            f"layers={self.layers}" if self.layers != 2 else "",
            "fixed" if self.fixed else "",
            f"M={self.num_members}" if self.method != "single" else "",
        ]
        return " ".join(filter(None, parts))

    @property
    def name(self) -> str:
        """Name of the arm."""
        first = f"{self.kind} {self.backbone}".strip()
        return f"{first} seed={self.seed}" if self.kind == "backbone" else f"{first} {self.row} seed={self.seed}"

    @property
    def family(self) -> str:
        """Its kind and backbone."""
        return f"{self.kind} {self.backbone}".strip()


def settings_of(quick: bool, seed: int) -> list[Setting]:
    """Return all ensembles in order of importance, each once."""
    return list(dict.fromkeys(_quick(seed) if quick else _full(seed)))


def ldr(base: Setting, strengths: Iterable[float], guards: Iterable[str]) -> Iterator[Setting]:
    """Vary strength and guard of loss-guided disagreement."""
    guards = list(guards)
    for strength in strengths:
        # Without disagreement there is nothing to hold back.
        for guard in guards if strength else [PUBLISHED]:
            yield replace(base, method="ldr", strength=strength, guard=guard)


def _full(seed: int) -> Iterator[Setting]:
    """All of it; a run that stops early has the tables that matter most."""
    nets, half = Setting("nets", seed=seed), Setting("heads", backbone="half", seed=seed)
    repeats = range(seed + 1, seed + REPEATS)
    yield nets
    yield from ldr(nets, [0.5], [GUARDED, PUBLISHED])
    yield Setting("backbone", "single", 1, backbone="half", seed=seed)
    yield from _heads(half)
    yield from _ablations(half)
    yield from _sizes(half)
    yield from _stochastic(half)
    yield from _spurious(seed)
    # Tables 1 to 3 and figure 4 for networks from scratch, guards and strengths.
    yield replace(nets, method="single", num_members=1)
    yield replace(nets, method="diverse")
    yield from _outside(nets)
    yield from ldr(nets, [0.5], ["cap", "falling"])
    yield from ldr(nets, [0.1, 1.0, 5.0], [GUARDED])
    yield from (replace(nets, method=method) for method in ("masksembles", "dropout", "batch"))
    yield from ldr(nets, [0.5], ["held-out loss", "held-out accuracy"])
    for repeat in repeats:
        yield from _heads(replace(half, seed=repeat))
        yield from _spurious(repeat)
    whole = replace(half, backbone="whole")
    yield Setting("backbone", "single", 1, backbone="whole", seed=seed)
    yield from _heads(whole)
    # Repeats, and the rest of figure 5 for networks from scratch.
    for repeat in repeats:
        yield from _with_ldr(replace(nets, seed=repeat))
    yield from ldr(nets, [0.1, 1.0, 5.0], [PUBLISHED])
    for size in (2, 10):
        yield from _with_ldr(replace(nets, num_members=size))
    yield from ldr(replace(half, active=2), [5.0], GUARDS)
    yield from _sources(half, 1.0)
    for size in (2, 10, 50):
        yield from _strengths(replace(half, num_members=size))
    for repeat in repeats:
        yield from ldr(replace(half, active=2, seed=repeat), [5.0], GUARDS)
        yield from _heads(replace(whole, seed=repeat))


def _with_ldr(base: Setting) -> Iterator[Setting]:
    yield base
    yield from ldr(base, [0.5], [GUARDED, PUBLISHED])


def _quick(seed: int) -> Iterator[Setting]:
    half = Setting("heads", backbone="half", seed=seed)
    yield from _with_ldr(Setting("nets", seed=seed))
    yield Setting("backbone", "single", 1, backbone="half", seed=seed)
    yield half
    pair = replace(half, active=2)
    yield from ldr(pair, [0.0, 0.1, 0.5, 5.0], FORMS)
    yield from ldr(pair, [0.5], ["cap", "held-out loss"])
    yield replace(half, method="diverse")
    yield from _outside(half)
    yield from ldr(replace(half, active=5), [0.5], [PUBLISHED])
    for size in (2, 10):
        yield replace(half, num_members=size)
        yield from ldr(replace(pair, num_members=size), [0.5], [PUBLISHED])
    yield from (each for each in _spurious(seed) if each.method != "divdis" and each.strength < 1)


def _heads(base: Setting) -> Iterator[Setting]:
    """Tables 1, 2, 3 and 6, what guards do at the usual strength, and figure 5's sweep over strengths."""
    yield base
    yield from ldr(replace(base, active=2), [0.5, 0.0], FORMS)
    yield replace(base, method="single", num_members=1)
    yield replace(base, method="diverse")
    yield from _outside(base)
    yield from ldr(replace(base, active=2), [0.5], GUARDS)
    yield from _strengths(base)


def _strengths(base: Setting) -> Iterator[Setting]:
    yield base
    yield from ldr(replace(base, active=2), STRENGTHS, FORMS)


def _outside(base: Setting) -> Iterator[Setting]:
    """Earlier methods, which disagree on other images."""
    yield from (replace(base, method=method, strength=strength) for method, strength in (("a2d", 0.1), ("divdis", 1.0)))


def _sources(base: Setting, factor: float) -> Iterator[Setting]:
    """Table 9: the same on either of two sets of other images."""
    for each in _outside(base):
        yield from (replace(each, strength=10 * factor * each.strength, source=source) for source in (0, 1))


def _sizes(base: Setting) -> Iterator[Setting]:
    """Figure 5's sweep over members, and table 3's fifty of them."""
    for size in (2, 10, 50):
        sized = replace(base, num_members=size)
        yield sized
        yield from ldr(replace(sized, active=2), [0.5, 0.0] if size == 50 else [0.5], FORMS)
    yield replace(base, num_members=50, method="diverse")


def _ablations(base: Setting) -> Iterator[Setting]:
    """Tables 4, 5, 7 and 9: layers, examples chosen beforehand, other images to disagree on; and the other weights."""
    pair = replace(base, active=2)
    for layers in (1, 3):
        yield replace(base, layers=layers)
        yield from ldr(replace(pair, layers=layers), [0.5], FORMS)
    yield replace(pair, method="two-stage", strength=0.5)
    yield from _sources(base, 0.1)
    yield from ldr(pair, [0.5], ["inverse probability"])


def _stochastic(base: Setting) -> Iterator[Setting]:
    """Table 10: how many members a step draws."""
    for size, active in ((5, 3), (5, 4), (5, 5), (50, 5), (50, 10)):
        yield from ldr(replace(base, num_members=size, active=active), [0.5], [PUBLISHED])
    yield from ldr(replace(base, num_members=50, active=2, fixed=True), [0.0, 0.5], [PUBLISHED])


def _spurious(seed: int) -> Iterator[Setting]:
    """Table 8: four members, all of them in every step; the document gives no strengths of A2D and DivDis."""
    base = Setting("spurious", num_members=4, seed=seed)
    yield base
    yield from ldr(base, [0.5], FORMS)
    for method, strength in (("a2d", 0.1), ("a2d", 1.0), ("divdis", 1.0), ("divdis", 10.0)):
        yield replace(base, method=method, strength=strength)


# Superclasses of the pretrained setting's task with few classes.
FEW = 10


def pretrained_settings(classes: int, outputs: int, seed: int) -> Iterator[Setting]:
    """Return heads on a network that was trained elsewhere: all methods, the guard by number of classes, other sizes."""
    repeats = range(seed, seed + REPEATS)

    def heads(number: int, repeat: int, size: int = 5) -> Setting:
        return Setting("heads", num_members=size, backbone=f"pretrained C={number}", seed=repeat)

    for repeat in repeats:
        yield from _methods(heads(classes, repeat), (0.1, 0.5, 1.0, 5.0))
    for number in (FEW, outputs):
        for repeat in repeats:
            yield heads(number, repeat)
            yield from ldr(_pairs(heads(number, repeat)), (0.5, 5.0), FORMS)
    for size, strengths in ((2, (0.5, 5.0)), (10, (0.5, 5.0)), (50, (0.5,))):
        for repeat in repeats:
            found = _methods(heads(classes, repeat, size), strengths)
            # All pairs of fifty members are 1225.
            yield from (each for each in found if size < 50 or each.method in ("deep", "ldr"))
    for size, strengths in ((2, (0.1, 1.0)), (10, (0.1, 1.0)), (50, (5.0,))):
        for repeat in repeats:
            yield from ldr(_pairs(heads(classes, repeat, size)), strengths, FORMS)


def _pairs(base: Setting) -> Setting:
    return replace(base, active=2 if base.num_members > 2 else 0)


def _methods(base: Setting, strengths: Iterable[float]) -> Iterator[Setting]:
    yield base
    yield from ldr(_pairs(base), strengths, FORMS)
    yield from _outside(base)
    yield replace(_pairs(base), method="two-stage", strength=0.5)
    yield replace(base, method="joint", strength=0.4)
