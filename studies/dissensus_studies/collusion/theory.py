"""Study `collusion-theory`: the mathematics of joint training as pictures; nothing is trained.

What a target moved against the ensemble's error amounts to, why beta above 1 has no minimum, and how members collude without
the ensemble noticing. Every number comes from the library's own terms.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dissensus import plots
from dissensus.html import Section, Table, Text
from dissensus.objectives import beta_from_step, decompose, joint_loss, step_from_beta
from dissensus_studies.harness.outputs import Outputs, print_table

if TYPE_CHECKING:
    import matplotlib.figure

MEMBERS = (2, 3, 5, 10, 50)
STEPS = (0.25, 0.5, 1.0, 2.0, 4.0, 9.0)
BETAS = (0.9, 1.0, 1.1)
OFFSETS = (0.0, 0.5, 1.0, 2.0, 4.0)


def run(output: Path, *, quick: bool = False, seed: int = 0, data: Path | None = None) -> Path:
    """Run the study; see `dissensus_studies.Study.run`. It is quick as it is, draws nothing at random and needs no data."""
    outputs = Outputs(output)
    gammas = [[members, *(beta_from_step(step, members, others_only=True) for step in STEPS)] for members in MEMBERS]
    offsets = _offset_rows()
    outputs.sections += [
        Section(
            "A step of the targets is a share of joint training",
            Text(
                "Train each member by itself, on targets moved against the ensemble's error by a step α. For squared error this is "
                "exactly the objective between independent and joint training, with β = 1 − 1/(1+α)².",
                "Read from right to left: to reach β = 0.9 targets move by 2.2 times the ensemble's error, for 0.99 by 9 times. "
                "The step grows like (1−β)^(−1/2): a power law, where the document speaks of exponential growth. Where the moved "
                "target is held fixed (no gradient through it) β = α/(1+α), and the step grows like 1/(1−β).",
            ),
            outputs.picture(
                "collusion_step",
                step_figure(),
                "step against beta, with and without a gradient through the target",
                "Figure 9: the step that amounts to β.",
            ),
            outputs.picture(
                "collusion_gamma",
                gamma_figure(),
                "gamma against the step for five ensemble sizes",
                "Figure 8: the share γ that a step against the other members amounts to. It is 1 at α = M − 1 and falls beyond.",
            ),
            Table(("members", *(f"α = {step:g}" for step in STEPS)), gammas, "γ of a step against the other members"),
        ),
        Section(
            "Beyond joint training there is no minimum",
            Text(
                "Two members that move apart leave their average where it is. Up to β = 1 that costs, or costs nothing; above, the "
                "loss falls without end (theorem 5.1), for squared error and for cross-entropy with averaged probabilities alike. "
                "This is why joint_loss and Joint refuse β > 1."
            ),
            outputs.picture(
                "collusion_unbounded",
                unbounded_figure(),
                "the loss over the distance between members for three values of beta",
                "Left: members at t and −t, target 1. Right: one member gives the class 0.9, the other less and less.",
            ),
        ),
        Section(
            "Collusion is invisible to the ensemble",
            Text(
                "Figure 1 and appendix F. Two of three members are shifted by c up and down. The ensemble, and with it the joint "
                "loss, stays as it is; the members' error and the diversity grow together, and their ratio tends to 1."
            ),
            outputs.picture(
                "collusion_shift",
                shift_figure(),
                "three members before and after collusion, and errors over the offset",
                "Left: lines are members, dashes those before. Right: what the ensemble sees (ERR) does not change.",
            ),
            Table(("c", "members' error", "ensemble's error", "diversity", "ratio"), offsets),
        ),
    ]
    outputs.results({"gamma": gammas, "steps": STEPS, "offsets": offsets})
    print_table(("members", *(f"α = {step:g}" for step in STEPS)), gammas)
    return outputs.page(
        "Joint training, drawn",
        "Three facts behind learner collusion, in pictures: what beta means, where it must end, and why nobody notices.",
    )


def step_figure() -> "matplotlib.figure.Figure":
    """Draw figure 9: the step of the targets that amounts to a share of joint training."""
    figure, (ax,) = plots.panels(width=4.8, height=3.4)
    betas = np.linspace(0, 0.99, 200)
    for colour, detach, label in (
        (plots.COLOURS[0], False, "gradient through the target"),
        (plots.COLOURS[1], True, "target held fixed"),
    ):
        ax.plot(betas, [step_from_beta(beta, detach=detach) for beta in betas], color=colour, label=label)
    ax.set(xlabel="β", ylabel="step α", ylim=(0, 10), xlim=(0, 1))
    ax.legend(frameon=False, fontsize="small")
    return figure


def gamma_figure() -> "matplotlib.figure.Figure":
    """Draw figure 8: the share of joint training that a step against the other members amounts to."""
    figure, (ax,) = plots.panels(width=4.8, height=3.4)
    steps = np.geomspace(0.05, 100, 300)
    for colour, members in zip(plots.COLOURS, MEMBERS, strict=False):
        gammas = [beta_from_step(step, members, others_only=True) for step in steps]
        ax.plot(steps, gammas, color=colour, label=f"M = {members}")
        ax.plot([members - 1], [1], "o", color=colour, markersize=4)
    ax.plot(
        steps, [beta_from_step(step) for step in steps], color=plots.NOTE_COLOUR, linestyle="--", label="all members"
    )
    ax.set(xlabel="step α", ylabel="γ", xscale="log", ylim=(0, 1.04))
    ax.legend(frameon=False, fontsize="small")
    return figure


def unbounded_figure() -> "matplotlib.figure.Figure":
    """Draw theorem 5.1: the loss of two members that move apart, below, at and above beta = 1."""
    figure, (left, right) = plots.panels(columns=2, width=3.8, height=3.2)
    apart = np.linspace(0, 10, 101)
    small = np.linspace(1, 16, 61)
    for colour, beta in zip(plots.COLOURS, BETAS, strict=False):
        left.plot(apart, [squared_loss(t, beta) for t in apart], color=colour, label=f"β = {beta:g}")
        right.plot(small, [class_loss(10.0**-power, beta) for power in small], color=colour)
    left.set(xlabel="distance t", ylabel="loss", title="squared error")
    right.set(xlabel="−log₁₀ of the other's probability", title="cross-entropy")
    left.legend(frameon=False, fontsize="small")
    return figure


def squared_loss(distance: float, beta: float) -> float:
    """Return the loss of members at `distance` and `-distance` for the target 1.

    Example:
        >>> [round(squared_loss(t, 1.1), 6) for t in (1.0, 10.0, 100.0)]
        [0.9, -9.0, -999.0]
    """
    outputs = torch.tensor([[distance], [-distance]], dtype=torch.float64)
    target = torch.ones(1, dtype=torch.float64)
    return float(joint_loss(outputs, target, beta, loss="mse", allow_unbounded=True))


def class_loss(probability: float, beta: float) -> float:
    """Return the loss of two members of which one gives the true class 0.9, the other `probability`.

    Example:
        >>> [round(class_loss(p, 1.1), 3) for p in (1e-2, 1e-6, 1e-12)]
        [0.631, 0.182, -0.508]
    """
    probs = torch.tensor([probability, 0.9], dtype=torch.float64)
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


def shift_figure() -> "matplotlib.figure.Figure":
    """Draw figure 1 and appendix F: members shifted apart, and what that does to the errors."""
    figure, (left, right) = plots.panels(columns=2, width=3.8, height=3.2)
    x, before, _ = collude(0.0)
    _, after, _ = collude(1.0)
    for colour, old, new, label in zip(plots.COLOURS, before, after, ("f₁", "f₂", "f₃"), strict=False):
        left.plot(x, old, color=colour, linestyle="--", linewidth=1)
        left.plot(x, new, color=colour, label=label)
    left.plot(x, after.mean(0), color="black", linewidth=2.2, label="mean")
    left.set(xlabel="x", title="members and their mean")
    left.legend(frameon=False, fontsize="small", ncols=2)
    offsets = np.linspace(0, 2, 41)
    found = zip(*(_errors_at(float(offset)) for offset in offsets), strict=True)
    names = {"members' error": "-", "ERR": "-", "diversity": "--"}
    for colour, (name, style), values in zip(plots.COLOURS, names.items(), found, strict=False):
        right.plot(offsets, values, color=colour, linestyle=style, label=name)
    right.set(xlabel="offset c", title="errors")
    right.legend(frameon=False, fontsize="small")
    return figure


def _errors_at(offset: float) -> tuple[float, float, float]:
    """Return the members' error, the ensemble's error and the diversity."""
    _, members, targets = collude(offset)
    parts = decompose(members, targets, loss="mse")
    member, ensemble, diversity = (
        float(part.mean()) for part in (parts.member_error, parts.ensemble_error, parts.diversity)
    )
    return member, ensemble, diversity


def _offset_rows() -> list[list[float]]:
    rows = []
    for offset in OFFSETS:
        member, ensemble, diversity = _errors_at(offset)
        rows.append([offset, member, ensemble, diversity, diversity / member])
    return rows
