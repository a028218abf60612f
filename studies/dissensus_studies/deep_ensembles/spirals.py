"""Study `practical-classification`: four nets on three spirals, and what their uncertainty says where.

The practical's own loss (cross-entropy divided by the number of classes, plus the norm of the parameters, not squared) runs
beside the usual one, each with and without adversarial training, from several initialisations.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from dissensus import plots, scores
from dissensus.html import Picture, Section, Table, Text
from dissensus.training import Run
from dissensus_studies.deep_ensembles.spiral_arms import (
    AGREED,
    ARMS,
    EPSILON,
    NUM_MEMBERS,
    STEPS,
    Arm,
    Plane,
    measure,
    spirals,
    train_spirals,
)
from dissensus_studies.harness.claims import Claim, claims_table
from dissensus_studies.harness.figures import name_lines
from dissensus_studies.harness.outputs import Outputs, print_table
from dissensus_studies.harness.statistics import Comparison, Summary

if TYPE_CHECKING:
    import matplotlib.figure

PRACTICAL, ATTACKED = ARMS[0], ARMS[1]

FIT_COLUMNS: Mapping[str, str] = {
    "train_accuracy": "train accuracy",
    "train_nll": "train NLL",
    "test_accuracy": "test accuracy",
    "test_nll": "test NLL",
    "test_ece": "test ECE",
    "attacked_accuracy": "accuracy, attacked",
    "attacked_nll": "NLL, attacked",
}

QUESTION_COLUMNS: Mapping[str, str] = {
    "confidence_far": "confidence far away",
    "confidence_far_member": "that of one net",
    "confidence_data": "confidence on the data",
    "entropy_boundary": "entropy at boundaries",
    "entropy_elsewhere": "entropy elsewhere",
    "knowledge_far": "knowledge, radius > 1",
    "knowledge_data": "knowledge on the data",
    "agreed_corners": "agreed corners",
    "data_uncertainty_inside": "data uncertainty inside",
}

Results = Mapping[Arm, Mapping[str, Summary]]


def run(output: Path, *, quick: bool = False, seed: int = 0, data: Path | None = None) -> Path:
    """Run the study; see `dissensus_studies.Study.run`. `data` is not needed."""
    outputs = Outputs(output)
    steps, num_repeats = (100, 1) if quick else (STEPS, 6)
    results, runs = _train(num_repeats, steps, seed)
    claims = classification_claims(results)
    repeated = f"Mean over {num_repeats} initialisations ± standard error" if num_repeats > 1 else "One initialisation"
    fits = _table(FIT_COLUMNS, results, repeated)
    judged = "Adversarial training is judged by an exact sign test at 5 % over initialisations and both losses; all share the data."
    outputs.sections += [
        Section(
            "The practical",
            Text(
                f"{NUM_MEMBERS} nets 2-150-150-3 with ReLU, all parameters starting from 0.1 times normal noise, take {steps} "
                "steps of Adam at 0.1 on all 3000 points. The practical's loss divides cross-entropy by the number of classes "
                "and adds 0.001 times the norm of the parameters; the usual loss has neither, but weight decay of 0.0001, "
                f"which is what that norm amounts to here. Adversarial training moves inputs by {EPSILON}."
            ),
            outputs.picture(
                "practical_training", _training_figure(runs), "accuracy and NLL on the training data by step"
            ),
            fits,
        ),
        Section(
            "The plane",
            *(_panels(outputs, arm, runs[arm]) for arm in (PRACTICAL, ATTACKED)),
            outputs.picture(
                "practical_profile",
                _profile_figure(runs),
                "confidence, data uncertainty and knowledge uncertainty over the distance from the centre",
                "The data end at radius 1. Lines are means over the ring of the practical's ensemble.",
            ),
            outputs.picture(
                "practical_members",
                _members_figure(runs[PRACTICAL]),
                "what each member predicts on the plane",
                "Each member continues the rim outwards in wedges. Where the wedges of all members overlap, as in the corners, "
                "they are sure and agree: knowledge uncertainty is zero although nothing is known there.",
            ),
        ),
        Section("What the document says", _table(QUESTION_COLUMNS, results, repeated), claims_table(claims, judged)),
    ]
    arms = {arm.name: found for arm, found in results.items()}
    outputs.results({"arms": arms, "claims": claims, "steps": steps, "quick": quick, "seed": seed})
    print_table(fits.columns, fits.rows)
    return outputs.page(
        "Practical: classification",
        "Four networks learn three spirals. They are unsure where the arms meet, differ where their boundaries leave the "
        "data, and agree with full confidence on most of what they have never seen.",
    )


def classification_claims(results: Results) -> list[Claim]:
    """Judge what the practical says about its four questions; the practical's own loss is meant unless both are named."""
    plain = {name: summary.mean for name, summary in results[PRACTICAL].items()}
    return [
        Claim.checked(
            "Single nets are overconfident far from the data.",
            f"Beyond radius 1.5 a single net's mean confidence is {plain['confidence_far_member']:.3f}, on "
            f"{plain['confidence_far_member_above_99']:.0%} of that area above 0.99; on the data the ensemble's is "
            f"{plain['confidence_data']:.3f}.",
            plain["confidence_far_member"] > plain["confidence_data"],
        ),
        Claim.checked(
            "An ensemble is not.",
            f"Beyond radius 1.5 its mean confidence is {plain['confidence_far']:.3f}, at radius 10 "
            f"{plain['confidence_radius_10']:.3f}.",
            plain["confidence_far"] < plain["confidence_data"],
        ),
        Claim.checked(
            "Entropy is highest at the boundaries between arms, and is data uncertainty there.",
            f"Inside the disc, {plain['entropy_boundary']:.2f} nats at boundaries and {plain['entropy_elsewhere']:.2f} elsewhere; "
            f"{plain['data_share_boundary']:.0%} of it is data uncertainty. Just as high, {plain['entropy_boundary_far']:.2f}, "
            "on boundaries beyond the data.",
            plain["entropy_boundary"] > plain["entropy_elsewhere"] and plain["data_share_boundary"] > 0.5,
        ),
        Claim.checked(
            "Members differ most where there are no data.",
            f"Mean knowledge uncertainty {plain['knowledge_far']:.3f} nats beyond radius 1, {plain['knowledge_data']:.3f} on the "
            "data.",
            plain["knowledge_far"] > plain["knowledge_data"],
        ),
        Claim.checked(
            "In particular in the corners.",
            f"{plain['agreed_corners']:.1f} of 4 corners have less than {AGREED:g} nats, and so has "
            f"{plain['agreed_far']:.0%} of the area beyond radius 1. Knowledge uncertainty sits where boundaries leave the data: "
            f"{plain['knowledge_far_boundary']:.2f} nats on them, {plain['knowledge_far_elsewhere']:.3f} off them.",
            plain["agreed_corners"] < 2,
        ),
        *(
            Claim.compared(statement, expected, {"both losses:": _adversarial(results, name)})
            for statement, expected, name in _ADVERSARIAL
        ),
    ]


# What adversarial training does: statement, direction, quantity.
_ADVERSARIAL = (
    (
        "Adversarial training thickens the boundaries (data uncertainty in the disc rises).",
        "higher",
        "data_uncertainty_inside",
    ),
    ("It makes predictions near the data more robust (NLL at attacked points falls).", "lower", "attacked_nll"),
    (
        "It makes predictions near the data less confident (mean confidence on the data falls).",
        "lower",
        "confidence_data",
    ),
    (
        "It expands the regions of uncertainty (the part of the disc above half the largest entropy grows).",
        "higher",
        "uncertain_area_inside",
    ),
)


def _adversarial(results: Results, name: str) -> Comparison:
    """Compare adversarial with plain training, over initialisations and both losses."""
    plain, attacked = (
        [value for arm in ARMS if arm.adversarial == adversarial for value in results[arm][name].values]
        for adversarial in (False, True)
    )
    return Comparison.of(plain, attacked)


def _train(num_repeats: int, steps: int, seed: int) -> tuple[Results, Mapping[Arm, Run]]:
    """Train every arm from several initialisations; return all measurements, and each arm's first run."""
    results: dict[Arm, Mapping[str, Summary]] = {}
    first: dict[Arm, Run] = {}
    for arm in ARMS:
        found = []
        for repeat in range(num_repeats):
            # Watching the first run costs another pass over the data at every tenth step.
            watched = {"validation": spirals(), "check_every": 10} if repeat == 0 else {"check_every": steps}
            trained = train_spirals(arm, seed + repeat, steps, **watched)
            first.setdefault(arm, trained)
            found.append(measure(trained, Plane.of(trained.members), seed + repeat))
        results[arm] = {name: Summary(tuple(values[name] for values in found)) for name in found[0]}
    return results, first


def _panels(outputs: Outputs, arm: Arm, trained: Run) -> Picture:
    plane = Plane.of(trained.members)
    knowledge = scores.mutual_information(plane.logits)
    values = (plane.mean_probs, scores.expected_entropy(plane.logits), knowledge)
    share = float((knowledge[plane.radius > 1] < AGREED).float().mean())
    return outputs.picture(
        "practical_panels_adversarial" if arm.adversarial else "practical_panels",
        plots.four_panels(*spirals(), plane.axis, *map(plane.grid, values)),
        "data, mean prediction, data uncertainty and knowledge uncertainty on the plane",
        f"{arm.name}: on {share:.0%} of the area beyond the data, members agree to float32 precision.",
    )


def _training_figure(runs: Mapping[Arm, Run]) -> "matplotlib.figure.Figure":
    figure, axes = plots.panels(2, width=4.4, height=2.8)
    shown = {"ensemble_accuracy": "accuracy on the training data", "ensemble_loss": "NLL on the training data, nats"}
    for ax, (column, title) in zip(axes, shown.items(), strict=True):
        for index, arm in enumerate((PRACTICAL, ATTACKED)):
            plots.training_curves(runs[arm].history, ax, column=column, colour=plots.COLOURS[index], label=arm.name)
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_ylabel("")
    name_lines(axes[-1])
    return figure


def _profile_figure(runs: Mapping[Arm, Run]) -> "matplotlib.figure.Figure":
    """Draw means over rings of the grid, from the centre to the corners."""
    figure, axes = plots.panels(3, width=3.6, height=2.6)
    edges = torch.linspace(0, 2.8, 57)
    for index, arm in enumerate((PRACTICAL, ATTACKED)):
        plane = Plane.of(runs[arm].members)
        ring = torch.bucketize(plane.radius, edges[1:-1])
        quantities = {
            "confidence": plane.mean_probs.amax(-1),
            "data uncertainty, nats": scores.expected_entropy(plane.logits),
            "knowledge uncertainty, nats": scores.mutual_information(plane.logits),
        }
        for ax, (name, values) in zip(axes, quantities.items(), strict=True):
            means = torch.bincount(ring, values.double()) / torch.bincount(ring)
            ax.plot((edges[1:] + edges[:-1]) / 2, means, color=plots.COLOURS[index], label=arm.name)
            ax.set_title(name, fontsize=10, loc="left")
            ax.set_xlabel("distance from the centre")
    for ax in axes:
        ax.axvline(1, color=plots.NOTE_COLOUR, linestyle="--", linewidth=1)
    axes[0].text(1.06, 0.05, "the data end", transform=axes[0].get_xaxis_transform(), fontsize=8)
    name_lines(axes[-1])
    return figure


def _members_figure(trained: Run) -> "matplotlib.figure.Figure":
    plane = Plane.of(trained.members, -4.0, 4.0)
    probs = torch.stack([plane.grid(member) for member in plane.logits.softmax(-1)])
    return plots.class_maps(plane.axis, probs, [f"member {number}" for number in range(len(probs))])


def _table(names: Mapping[str, str], results: Results, caption: str) -> Table:
    several = len(results[PRACTICAL]["train_nll"].values) > 1
    rows = [
        (arm.name, *(str(found[name]) if several else fmean(found[name].values) for name in names))
        for arm, found in results.items()
    ]
    return Table(("arm", *names.values()), rows, caption)
