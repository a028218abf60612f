"""Study `collusion-theory`: the mathematics of joint training as pictures; nothing is trained.

What a target moved against the ensemble's error amounts to, why beta above 1 has no minimum, and how members collude without
the ensemble noticing. Every number comes from the library's own terms.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dissensus.html import Section, Table
from dissensus.objectives import beta_from_step, decompose, joint_loss, step_from_beta
from dissensus_studies.harness.figures import Drawing, Line, Panel
from dissensus_studies.harness.outputs import Outputs, print_table

MEMBERS = (2, 3, 5, 10, 50)
STEPS = (0.25, 0.5, 1.0, 2.0, 4.0, 9.0)
BETAS = (0.9, 1.0, 1.1)
OFFSETS = (0.0, 0.5, 1.0, 2.0, 4.0)


def run(output: Path, *, quick: bool = False, seed: int = 0, data: Path | None = None) -> Path:
    """Run the study; see `dissensus_studies.Study.run`. It is quick as it is, draws nothing at random and needs no data."""
    outputs = Outputs(output)
    gammas = [[members, *(beta_from_step(step, members, others_only=True) for step in STEPS)] for members in MEMBERS]
    offsets = [[offset, *found, found[2] / found[0]] for offset in OFFSETS for found in [_errors_at(offset)]]
    columns = ("members", *(f"α = {step:g}" for step in STEPS))
    numbers = (
        Table(columns, gammas, "γ of a step against the other members"),
        Table(("c", "members' error", "ensemble's error", "diversity", "ratio"), offsets, "Members shifted by c"),
    )
    outputs.sections += [*(drawing.section(outputs) for drawing in drawings()), Section("Numbers", *numbers)]
    outputs.results({"gamma": gammas, "steps": STEPS, "offsets": offsets})
    print_table(numbers[0])
    return outputs.page(
        "Joint training, drawn", "What beta means, where it must end, and why nobody notices collusion."
    )


def drawings() -> list[Drawing]:
    """Return figures 9 and 8, theorem 5.1, and figure 1 with appendix F, as lines."""
    betas = np.linspace(0, 0.99, 200).tolist()
    steps = np.geomspace(0.05, 100, 300).tolist()
    apart, small = np.linspace(0, 10, 101).tolist(), np.linspace(1, 16, 61).tolist()
    gamma_lines = [
        _line(f"M = {members}", steps, partial(beta_from_step, num_members=members, others_only=True), colour)
        for colour, members in enumerate(MEMBERS)
    ]
    gamma_lines += [
        Line("", [members - 1.0], [1.0], colour=colour, style="o") for colour, members in enumerate(MEMBERS)
    ]
    gamma_lines.append(_line("all members", steps, beta_from_step, None, "--"))
    step_lines = [
        _line("target held fixed", betas, partial(step_from_beta, detach=True), 1),
        _line("gradient through it", betas, step_from_beta, 0),
    ]
    step = Panel("step α", "β", step_lines, {"ylim": (0, 10), "xlim": (0, 1)})
    gamma = Panel("γ", "step α", gamma_lines, {"xscale": "log", "ylim": (0, 1.04)})
    squared = [_line(f"β = {beta:g}", apart, partial(squared_loss, beta=beta), c) for c, beta in enumerate(BETAS)]
    classes = [_line("", small, partial(class_loss, beta=beta), c) for c, beta in enumerate(BETAS)]
    unbounded = [
        Panel("squared error: loss", "distance t", squared),
        Panel("cross-entropy: loss", "−log₁₀ of the other's probability", classes),
    ]
    far = "Left: members at t and −t, target 1. Right: one member gives the class 0.9, the other less and less."
    seen = "Figure 1 and appendix F. Left: lines are members, dashes those before. Right: what the ensemble sees does not change."
    other = "The share γ that a step against the other members amounts to"
    return [
        Drawing("collusion_step", "The step of the targets that amounts to β", [step], "Figure 9."),
        Drawing("collusion_gamma", other, [gamma], "Figure 8. It is 1 at α = M − 1 and falls beyond."),
        Drawing("collusion_unbounded", "The loss of two members that move apart", unbounded, far),
        Drawing("collusion_shift", "Members shifted apart", _shifted(), seen),
    ]


def _line(name: str, places: list[float], read: Callable[[float], float], colour: int | None, style: str = "-") -> Line:
    return Line(name, places, [read(place) for place in places], colour=colour, style=style)


def _shifted() -> list[Panel]:
    """Return three members before and after collusion, and their errors over the offset."""
    (x, before, _), (_, after, _) = collude(0.0), collude(1.0)
    places = x.tolist()
    lines = [Line("", places, line.tolist(), colour=colour, style="--") for colour, line in enumerate(before)]
    lines += [Line(f"f{'₁₂₃'[c]}", places, line.tolist(), colour=c, style="-") for c, line in enumerate(after)]
    lines.append(Line("mean", places, after.mean(0).tolist(), colour=6, style="-"))
    offsets = np.linspace(0, 2, 41).tolist()
    found = zip(*map(_errors_at, offsets), strict=True)
    looks = (("members' error", "-"), ("ensemble's error", "-"), ("diversity", "--"))
    errors = [
        Line(name, offsets, list(values), colour=colour, style=style)
        for colour, ((name, style), values) in enumerate(zip(looks, found, strict=True))
    ]
    return [Panel("members and their mean", "x", lines), Panel("errors", "offset c", errors)]


def squared_loss(distance: float, beta: float) -> float:
    """Return the loss of members at `distance` and `-distance` for the target 1."""
    outputs = torch.tensor([[distance], [-distance]], dtype=torch.float64)
    return float(joint_loss(outputs, torch.ones(1).double(), beta, loss="mse", allow_unbounded=True))


def class_loss(power: float, beta: float) -> float:
    """Return the loss of two members of which one gives the true class 0.9, the other ten to the minus `power`."""
    probs = torch.tensor([10.0**-power, 0.9], dtype=torch.float64)
    logits = torch.stack([probs.log(), torch.log1p(-probs)], dim=-1)[:, None]
    label = torch.zeros(1, dtype=torch.int64)
    return float(joint_loss(logits, label, beta, average="probs", allow_unbounded=True))


def collude(offset: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, three members' predictions `(members, points)` and targets; two members are shifted apart."""
    x = torch.linspace(-2, 2, 81, dtype=torch.float64)
    shared = torch.sin(1.5 * x)
    members = torch.stack([shared + 0.12 * torch.cos(3 * x + phase) for phase in (0.0, 2.0, 4.0)])
    # What all members miss alike: an error of the ensemble that no collusion changes.
    targets = shared + 0.5 * torch.cos(4 * x)
    return x, members + offset * torch.tensor([[1.0], [-1.0], [0.0]]), targets


def _errors_at(offset: float) -> list[float]:
    """Return the members' error, the ensemble's error and the diversity."""
    _, members, targets = collude(offset)
    parts = decompose(members, targets, loss="mse")
    return [float(part.mean()) for part in (parts.member_error, parts.ensemble_error, parts.diversity)]
