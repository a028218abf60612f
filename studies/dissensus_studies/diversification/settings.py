"""Which ensembles the study `diversification` trains, what they are called, and in which order."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

REPEATS = 3

WITH_STRENGTH = ("ldr", "a2d", "divdis", "two-stage", "joint")
_NUMBERS = {"A": "active", "M": "num_members", "layers": "layers", "source": "source"}


@dataclass(frozen=True)
class Setting:
    """One ensemble of the study."""

    # "nets" trained from scratch, "heads" on a frozen backbone, nets on the "spurious" set; the "backbone" itself; heads that are "timed".
    kind: Literal["nets", "backbone", "heads", "spurious", "timed"]
    # "single", "deep", "diverse" (hyperparameters), "ldr" (loss-guided), "a2d" or "divdis" on other images, "two-stage", "joint";
    # "masksembles", "dropout" or "batch" for nets.
    method: str = "deep"
    num_members: int = 5
    strength: float = 0.0  # Weight of the disagreement.
    # What holds loss-guided disagreement back; "none" is the published form, "inverse probability" that with the other weights.
    guard: str = "share"
    active: int = 0  # Members drawn for a step; 0 for all.
    layers: int = 2  # Of each head.
    # Trained on "half" of the classes, on the "whole" training set, or elsewhere and heads have so many classes ("pretrained C=100").
    backbone: str = ""
    source: int = 0  # Which other images a method disagrees on: 0 or 1.
    fixed: bool = False  # Whether heads train for the same epochs whatever their number; otherwise each takes as many steps as alone.
    seed: int = 0  # Of the run.

    @classmethod
    def of(cls, family: str, row: str, seed: int = 0) -> "Setting":
        """Return the ensemble of a family that a row names; see `row`."""
        kind, _, backbone = family.partition(" ")
        method, *words = row.split()
        method, _, strength = method.partition("=")
        named = {word: word.partition("=") for word in words}
        numbers = {
            _NUMBERS[name]: int(value) - (name == "source") for name, _, value in named.values() if name in _NUMBERS
        }
        guard = " ".join(word for word, (name, *_) in named.items() if name not in (*_NUMBERS, "fixed"))
        found: dict[str, Any] = {
            "num_members": 1,
            "fixed": "fixed" in words,
            **({"guard": guard} if guard else {}),
            **numbers,
        }
        return cls(kind, method, strength=float(strength or 0), backbone=backbone, seed=seed, **found)  # type: ignore[arg-type]

    @property
    def row(self) -> str:
        """What it is but for its kind, backbone and seed.

        Example:
            >>> Setting("heads", "ldr", strength=0.5, active=2, guard="none", backbone="half").row
            'ldr=0.5 none A=2 M=5'
            >>> Setting.of("heads half", "ldr=0.5 none A=2 M=5").row
            'ldr=0.5 none A=2 M=5'
        """
        parts = {
            f"{self.method}={self.strength:g}" if self.method in WITH_STRENGTH else self.method: True,
            self.guard: self.method == "ldr",
            f"source={self.source + 1}": self.source,
            f"A={self.active}": self.active,
            f"layers={self.layers}": self.layers != 2,
            "fixed": self.fixed,
            f"M={self.num_members}": self.method != "single",
        }
        return " ".join(part for part, there in parts.items() if there)

    @property
    def family(self) -> str:
        """Its kind and backbone."""
        return f"{self.kind} {self.backbone}".strip()

    @property
    def name(self) -> str:
        """Name of the arm."""
        return f"{self.family} {'' if self.kind == 'backbone' else f'{self.row} '}seed={self.seed}"


# Rows by what they are for, one after the other; braces hold choices.
_GUARDS = "{share=1,share=0.5,cap,held-out loss,held-out accuracy,falling}"
_USUAL = "deep M=5; ldr=0.5 {share,none} M=5"
# Tables 1, 2, 3 and 6, guards at the usual strength, and figure 5's sweep over strengths.
_HEADS = (
    "deep M=5; ldr=0.5 {none,share} A=2 M=5; ldr=0 none A=2 M=5; single; diverse M=5; a2d=0.1 M=5; divdis=1 M=5; "
    f"ldr=0.5 {_GUARDS} A=2 M=5; ldr={{0.1,1,5,10}} {{none,share}} A=2 M=5"
)
# Tables 4, 5, 7 and 9: layers, examples chosen beforehand, other images to disagree on; and the other weights.
_ABLATIONS = (
    "deep layers={1,3} M=5; ldr=0.5 {none,share} A=2 layers={1,3} M=5; two-stage=0.5 A=2 M=5; "
    "{a2d=0.1,divdis=1} source=2 M=5; ldr=0.5 inverse probability A=2 M=5"
)
# Figure 5's sweep over members, and table 3's fifty of them.
_SIZES = "deep M={2,10,50}; ldr=0.5 {none,share} A=2 M={2,10,50}; ldr=0 none A=2 M=50; diverse M=50"
# Table 10: how many members a step draws.
_DRAWN = "ldr=0.5 none A={3,4,5} M=5; ldr=0.5 none A={5,10} M=50; ldr={0,0.5} none A=2 fixed M=50"
# The same, and pairs of few and many, for their time alone.
_TIMED = "ldr=0.5 none A={2,3,4,5} M=5; ldr=0.5 none A=2 M={2,50}; ldr=0.5 none A=10 M=50"
# Table 8: four members, all of them in every step; the document gives no strengths of A2D and DivDis.
_SPURIOUS = "deep M=4; ldr=0.5 {none,share} M=4; a2d={0.1,1} M=4; divdis={1,10} M=4"
# Tables 1 to 3 and figure 4 for networks from scratch, guards and strengths.
_NETS = (
    "single; diverse M=5; a2d=0.1 M=5; divdis=1 M=5; ldr=0.5 {cap,falling} M=5; ldr={0.1,1,5} share M=5; "
    "{masksembles,dropout,batch} M=5; ldr=0.5 {held-out loss,held-out accuracy} M=5"
)
_ONCE, _AGAIN = range(1), range(1, REPEATS)
# Families, seeds and rows in order of importance: a run that stops early has the tables that matter most.
_FULL = (
    ("nets", _ONCE, _USUAL),
    ("backbone half", _ONCE, "single"),
    ("heads half", _ONCE, f"{_HEADS}; {_ABLATIONS}; {_SIZES}; {_DRAWN}"),
    ("spurious", _ONCE, _SPURIOUS),
    ("nets", _ONCE, _NETS),
    ("heads half", _AGAIN, _HEADS),
    ("spurious", _AGAIN, _SPURIOUS),
    ("backbone whole", _ONCE, "single"),
    ("heads whole", _ONCE, _HEADS),
    ("nets", _AGAIN, _USUAL),
    ("nets", _ONCE, "ldr={0.1,1,5} none M=5; deep M={2,10}; ldr=0.5 {share,none} M={2,10}"),
    ("heads half", _ONCE, f"ldr=5 {_GUARDS} A=2 M=5; {{a2d=1,divdis=10}} M=5; {{a2d=1,divdis=10}} source=2 M=5"),
    ("heads half", _ONCE, "ldr=0 none A=2 M={2,10}; ldr={0.1,1,5,10} {none,share} A=2 M={2,10,50}"),
    ("heads half", _AGAIN, f"ldr=5 {_GUARDS} A=2 M=5"),
    ("heads whole", _AGAIN, _HEADS),
    ("timed", range(REPEATS), _TIMED),
)
_QUICK = (
    ("nets", _ONCE, _USUAL),
    ("backbone half", _ONCE, "single"),
    ("heads half", _ONCE, "deep M=5; ldr=0 none A=2 M=5; ldr={0.1,0.5,5} {none,share} A=2 M=5"),
    ("heads half", _ONCE, "ldr=0.5 {cap,held-out loss} A=2 M=5; diverse M=5; a2d=0.1 M=5; divdis=1 M=5"),
    ("heads half", _ONCE, "ldr=0.5 none A=5 M=5; deep M={2,10}; ldr=0.5 none A=2 M={2,10}"),
    ("spurious", _ONCE, "deep M=4; ldr=0.5 {none,share} M=4; a2d=0.1 M=4"),
)
# Superclasses of the pretrained setting's task with few classes.
FEW = 10


def settings_of(quick: bool, seed: int) -> list[Setting]:
    """Return all ensembles in order of importance."""
    return _listed(_QUICK if quick else _FULL, seed)


def pretrained_settings(classes: int, outputs: int, seed: int) -> list[Setting]:
    """Return heads on a network that was trained elsewhere: all methods, the guard by number of classes, ablations, other sizes."""
    family, others = f"heads pretrained C={classes}", "{a2d=0.1,divdis=1,joint=0.4}"
    guards = "deep M=5; ldr={0.5,5} {none,share} A=2 M=5"
    # Of two members both are drawn. All pairs of fifty are 1225.
    found = (
        (family, f"deep M=5; ldr={{0.1,0.5,1,5}} {{none,share}} A=2 M=5; two-stage=0.5 A=2 M=5; {others} M=5"),
        (f"heads pretrained C={FEW}", guards),
        (f"heads pretrained C={outputs}", guards),
        # Tables 3, 4, 9 and 10, the other weights, and what drawing two of five does without disagreement.
        (family, "diverse M=5; deep layers={1,3} M=5; ldr=0.5 {none,share} A=2 layers={1,3} M=5; ldr=0 none A=2 M=5"),
        (family, "{a2d=0.1,divdis=1} source=2 M=5; ldr=0.5 inverse probability A=2 M=5; ldr=0.5 none A={3,4,5} M=5"),
        (family, f"deep M=2; ldr={{0.5,5}} {{none,share}} M=2; two-stage=0.5 M=2; {others} M=2"),
        (family, f"deep M=10; ldr={{0.5,5}} {{none,share}} A=2 M=10; two-stage=0.5 A=2 M=10; {others} M=10"),
        (family, "deep M=50; ldr=0.5 {none,share} A=2 M=50"),
        (family, "ldr={0.1,1} {none,share} M=2; ldr={0.1,1} {none,share} A=2 M=10; ldr=5 {none,share} A=2 M=50"),
        # For the document's number of epochs, however few are drawn.
        (family, "ldr={0.1,0.5,1,5} none A=2 fixed M=5; two-stage=0.5 A=2 fixed M=5; ldr={0.5,5} share A=2 fixed M=5"),
        (
            family,
            "ldr=0.5 none A=2 layers=1 fixed M=5; ldr=0.5 inverse probability A=2 fixed M=5; ldr=0 none A=2 fixed M=5",
        ),
        (family, "ldr=0.5 none A=2 fixed M=10"),
    )
    return _listed(((family, range(REPEATS), rows) for family, rows in found), seed)


def _listed(groups: Iterable[tuple[str, Iterable[int], str]], seed: int) -> list[Setting]:
    """Return the ensembles that patterns stand for: one of each pair of braces' choices."""
    found = []
    for family, repeats, rows in groups:
        # Every second part is the inside of braces.
        parts = [re.split(r"[{}]", pattern) for pattern in rows.split("; ")]
        choices = [[part.split(",") if place % 2 else [part] for place, part in enumerate(each)] for each in parts]
        names = ["".join(row) for each in choices for row in product(*each)]
        found += [Setting.of(family, row, seed + repeat) for repeat in repeats for row in names]
    return found
