"""Which ensembles the study `diversification` trains, what they are called, and in which order."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

STRENGTHS = (0.0, 0.1, 0.5, 1.0, 5.0, 10.0)
# Loss-guided disagreement as it was published, and with the library's own guard.
PUBLISHED, GUARDED = "none", "share"
FORMS = (PUBLISHED, GUARDED)
REPEATS = 3

WITH_STRENGTH = ("ldr", "a2d", "divdis", "two-stage", "joint")

_NUMBERS = {"A": "active", "M": "num_members", "layers": "layers"}

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

    @classmethod
    def of(cls, family: str, row: str, seed: int = 0) -> "Setting":
        """Return the ensemble of a family that a row names; see `row`."""
        kind, _, backbone = family.partition(" ")
        method, *words = row.split()
        method, _, strength = method.partition("=")
        found: dict[str, Any] = {"num_members": 1}
        guard = []
        for word in words:
            name, _, value = word.partition("=")
            if name in _NUMBERS:
                found[_NUMBERS[name]] = int(value)
            elif name == "source":
                found["source"] = int(value) - 1
            elif name == "fixed":
                found["fixed"] = True
            else:
                guard.append(word)
        if guard:
            found["guard"] = " ".join(guard)
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
    """Return heads on a network that was trained elsewhere: all methods, the guard by number of classes, other sizes."""
    family, others = f"heads pretrained C={classes}", "{a2d=0.1,divdis=1,joint=0.4}"
    guards = "deep M=5; ldr={0.5,5} {none,share} A=2 M=5"
    # Of two members both are drawn. All pairs of fifty are 1225.
    found = (
        (family, "deep M=5; ldr={0.1,0.5,1,5} {none,share} A=2 M=5; two-stage=0.5 A=2 M=5; " + f"{others} M=5"),
        (f"heads pretrained C={FEW}", guards),
        (f"heads pretrained C={outputs}", guards),
        (family, "deep M=2; ldr={0.5,5} {none,share} M=2; two-stage=0.5 M=2; " + f"{others} M=2"),
        (family, "deep M=10; ldr={0.5,5} {none,share} A=2 M=10; two-stage=0.5 A=2 M=10; " + f"{others} M=10"),
        (family, "deep M=50; ldr=0.5 {none,share} A=2 M=50"),
        (family, "ldr={0.1,1} {none,share} M=2; ldr={0.1,1} {none,share} A=2 M=10; ldr=5 {none,share} A=2 M=50"),
    )
    return _listed(((family, range(REPEATS), rows) for family, rows in found), seed)


def _listed(groups: Iterable[tuple[str, Iterable[int], str]], seed: int) -> list[Setting]:
    return [
        Setting.of(family, row, seed + repeat)
        for family, repeats, rows in groups
        for repeat in repeats
        for pattern in rows.split("; ")
        for row in _expanded(pattern)
    ]


def _expanded(pattern: str) -> Iterator[str]:
    """Return what a pattern stands for, one of each pair of braces' choices."""
    # Every second part is the inside of braces.
    parts = re.split(r"[{}]", pattern)
    choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
    return map("".join, product(*choices))
