"""Study `practical-classification`: four nets on three spirals, and what their uncertainty says where.

The practical's own loss (cross-entropy divided by the number of classes, plus the norm of the parameters, not squared) runs
beside the usual one, each with and without adversarial training, from several initialisations.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import pi
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dissensus import metrics, plots, scores
from dissensus.data import toy
from dissensus.html import Section, Table
from dissensus.members import DeepEnsemble, Members
from dissensus.objectives import Adversarial, Independent, NormPenalty, Objective
from dissensus.predictions import predict
from dissensus.randomness import derive
from dissensus.training import Run, fit
from dissensus_studies.deep_ensembles.networks import attacked, scaled_mlp
from dissensus_studies.harness.claims import Claim, claims_table
from dissensus_studies.harness.figures import Line, Panel, draw, name_lines
from dissensus_studies.harness.outputs import Outputs, print_table
from dissensus_studies.harness.statistics import Comparison, Summary

if TYPE_CHECKING:
    import matplotlib.figure

SIZES = (2, 150, 150, 3)
SCALE = 0.1
STEPS = 300
# Of full batches, in which the order changes nothing.
RECIPE: dict[str, Any] = {"optimizer": "adam", "lr": 0.1, "batches": "shared", "device": "cpu"}
NUM_MEMBERS = 4
EPSILON = 0.02
NORM_WEIGHT = 1e-3
# What the practical's penalty on the norm amounts to near its end, as a penalty on half the squared norm.
WEIGHT_DECAY = 1e-4

# Members agree to float32 precision below this many nats of knowledge uncertainty.
AGREED = 1e-6


PRACTICAL, ATTACKED = "practical", "practical + adversarial"
_OVER_CLASSES = Independent(over_classes=True)
# By the practical's own loss or the usual one, without or with attacked inputs.
ARMS: Mapping[str, Objective] = {
    PRACTICAL: NormPenalty(_OVER_CLASSES, NORM_WEIGHT),
    ATTACKED: NormPenalty(Adversarial(_OVER_CLASSES, epsilon=EPSILON), NORM_WEIGHT),
    "usual loss": Independent(),
    "usual loss + adversarial": Adversarial(Independent(), epsilon=EPSILON),
}


def spirals(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the practical's data set (seed 0), or another of the same law, as tensors."""
    x, y = toy.spirals(seed=seed)
    return torch.from_numpy(x).float(), torch.from_numpy(y)


def train_spirals(arm: str, seed: int = 0, steps: int = STEPS, **settings: Any) -> Run:
    """Train the practical's ensemble on its data, one full batch a step; settings are passed on to `fit`."""
    x, y = spirals()
    nets = [scaled_mlp(SIZES, SCALE, seed, "spirals", member) for member in range(NUM_MEMBERS)]
    recipe = RECIPE | {
        "batch_size": len(x),
        "weight_decay": 0.0 if arm in (PRACTICAL, ATTACKED) else WEIGHT_DECAY,
        **settings,
    }
    return fit(DeepEnsemble.from_members(nets, seed), (x, y), objective=ARMS[arm], epochs=steps, seed=seed, **recipe)


class Plane:
    """What an ensemble says on a square grid: points, `(side * side, 2)` and row by row from below, and scores on them.

    Data end at `radius` 1.
    """

    def __init__(self, ensemble: Members, low: float = -2.0, high: float = 2.0, side: int = 201) -> None:
        self.axis = torch.linspace(low, high, side)
        rows, columns = torch.meshgrid(self.axis, self.axis, indexing="ij")
        self.points = torch.stack([columns, rows], -1).reshape(-1, 2)
        self.radius = self.points.norm(dim=-1)
        self.logits = predict(ensemble, self.points, batch_size=8192)
        self.mean_probs = self.logits.softmax(-1).mean(0)
        self.confidence = self.mean_probs.amax(-1)
        self.data = scores.expected_entropy(self.logits)
        self.knowledge = scores.mutual_information(self.logits)

    def boundary(self) -> Tensor:
        """Whether the ensemble's class differs from that of a neighbour on the grid, `(points,)`."""
        kind = self.grid(self.mean_probs.argmax(-1))
        edge = torch.zeros_like(kind, dtype=torch.bool)
        for grid, found in ((kind, edge), (kind.T, edge.T)):
            changes = grid[1:] != grid[:-1]
            found[1:] |= changes
            found[:-1] |= changes
        return edge.reshape(-1)

    def grid(self, values: Tensor) -> Tensor:
        """Return values on the points as rows of the grid, `(side, side, ...)`."""
        return values.unflatten(0, (len(self.axis), len(self.axis)))


def measure(run: Run, plane: Plane, seed: int = 0) -> dict[str, float]:
    """Answer the practical's questions about a trained ensemble with numbers; `seed` decides the fresh test sample."""
    ensemble, found = run.members.eval(), {}
    fresh = spirals(derive(seed, "spirals, test") & 0xFFFFFFFF)
    moved = attacked(fresh[0], lambda x: Independent().likelihood.mixture(ensemble(x), fresh[1]), EPSILON)
    samples = {"train": spirals(), "test": fresh, "attacked": (moved, fresh[1])}
    answers = {name: predict(ensemble, x) for name, (x, _) in samples.items()}
    probs = {name: logits.softmax(-1).mean(0) for name, logits in answers.items()}
    for name, (_, y) in samples.items():
        found[f"{name}_accuracy"] = metrics.accuracy(probs[name], y)
        found[f"{name}_nll"] = metrics.nll(probs[name], y)
    found["test_ece"] = metrics.ece(probs["test"], fresh[1])

    angle = torch.linspace(0, 2 * pi, 721)[:-1]
    ring = predict(ensemble, 10 * torch.stack([angle.sin(), angle.cos()], -1)).softmax(-1)
    members, total = plane.logits.softmax(-1).amax(-1), scores.total_entropy(plane.logits)
    confidence, data, knowledge = plane.confidence, plane.data, plane.knowledge
    edge, inside, far = plane.boundary(), plane.radius <= 1, plane.radius > 1.5
    side = len(plane.axis)
    corners = torch.tensor([0, side - 1, side * (side - 1), side * side - 1])
    values = {
        "confidence_data": probs["train"].amax(-1).mean(),
        "confidence_far": confidence[far].mean(),
        "confidence_far_member": members[:, far].mean(),
        "confidence_far_member_above_99": (members[:, far] > 0.99).float().mean(),
        "confidence_radius_10": ring.mean(0).amax(-1).mean(),
        "entropy_boundary": total[edge & inside].mean(),
        "entropy_elsewhere": total[~edge & inside].mean(),
        "entropy_boundary_far": total[edge & ~inside].mean(),
        "data_share_boundary": data[edge & inside].sum() / total[edge & inside].sum(),
        "data_uncertainty_inside": data[inside].mean(),
        # Half of the largest entropy possible, log 3, is 0.549 nats.
        "uncertain_area_inside": (total[inside] > 0.549).float().mean(),
        "knowledge_data": scores.mutual_information(answers["train"]).mean(),
        "knowledge_far": knowledge[~inside].mean(),
        "knowledge_far_boundary": knowledge[~inside & edge].mean(),
        "knowledge_far_elsewhere": knowledge[~inside & ~edge].mean(),
        "agreed_corners": (knowledge[corners] < AGREED).sum(),
        "agreed_far": (knowledge[~inside] < AGREED).float().mean(),
    }
    return found | {name: float(value) for name, value in values.items()}


FIT_COLUMNS = (*map("_".join, product(("train", "test", "attacked"), ("accuracy", "nll"))), "test_ece")
QUESTION_COLUMNS = (
    *("confidence_far", "confidence_far_member", "confidence_data", "entropy_boundary", "entropy_elsewhere"),
    *("knowledge_far", "knowledge_data", "agreed_corners", "data_uncertainty_inside"),
)

Results = Mapping[str, Mapping[str, Summary]]


def run(output: Path, *, quick: bool = False, seed: int = 0, data: Path | None = None) -> Path:
    """Run the study; see `dissensus_studies.Study.run`. `data` is not needed."""
    outputs = Outputs(output)
    steps, num_repeats = (100, 1) if quick else (STEPS, 6)
    results, runs = _train(num_repeats, steps, seed)
    claims = classification_claims(results)
    repeated = f"Mean over {num_repeats} initialisations ± standard error" if num_repeats > 1 else "One initialisation"
    fits = _table(FIT_COLUMNS, results, repeated)
    judged = "Adversarial training is judged by an exact sign test at 5 % over initialisations and both losses; all share the data."
    wide = Plane(runs[PRACTICAL].members, -4.0, 4.0)
    maps = torch.stack([wide.grid(member) for member in wide.logits.softmax(-1)])
    planes = {arm: Plane(runs[arm].members) for arm in (PRACTICAL, ATTACKED)}
    numbered = [f"member {number}" for number in range(len(maps))]
    figures = {
        "practical_training": (_training_figure(runs), "accuracy and NLL on the training data by step"),
        "practical_panels": (
            _panels(planes[PRACTICAL]),
            "data, mean prediction, data and knowledge uncertainty on the plane",
        ),
        "practical_panels_adversarial": (_panels(planes[ATTACKED]), "the same with adversarial training"),
        "practical_profile": (
            _profile_figure(planes),
            "confidence and uncertainties over the distance from the centre",
        ),
        "practical_members": (plots.class_maps(wide.axis, maps, numbered), "what each member predicts on the plane"),
    }
    training, *plane = (outputs.picture(name, *drawn) for name, drawn in figures.items())
    outputs.sections += [
        Section("The practical", training, fits),
        Section("The plane", *plane),
        Section("What the document says", _table(QUESTION_COLUMNS, results, repeated), claims_table(claims, judged)),
    ]
    records = {
        f"spirals {arm}": {"arm": arm, "repeats": {name: list(own.values) for name, own in found.items()}}
        for arm, found in results.items()
    }
    outputs.arms(records, {"steps": steps, "quick": quick, "seed": seed})
    outputs.results({"arms": results, "claims": claims, "steps": steps, "quick": quick, "seed": seed})
    print_table(fits)
    return outputs.page(
        "Practical: classification", "Four networks learn three spirals: where are they sure, and where do they differ?"
    )


def classification_claims(results: Results) -> list[Claim]:
    """Judge what the practical says about its four questions; the practical's own loss is meant unless both are named."""
    means = {name: summary.mean for name, summary in results[PRACTICAL].items()}
    claims = [Claim.checked(statement, text.format(**means), holds(means)) for statement, text, holds in _CHECKED]
    for statement, expected, name in _ADVERSARIAL:
        plain, attacked = (
            [value for arm in pair for value in results[arm][name].values]
            for pair in (list(ARMS)[::2], list(ARMS)[1::2])
        )
        claims.append(Claim.compared(statement, expected, {"both losses": Comparison.of(plain, attacked)}))
    return claims


# Statement, what was measured, and whether it holds of the practical's own loss.
_CHECKED: tuple[tuple[str, str, Callable[[Mapping[str, float]], bool]], ...] = (
    (
        "Single nets are overconfident far from the data.",
        "Beyond radius 1.5 a single net's mean confidence is {confidence_far_member:.3f}, on {confidence_far_member_above_99:.0%} of "
        "that area above 0.99; on the data the ensemble's is {confidence_data:.3f}.",
        lambda found: found["confidence_far_member"] > found["confidence_data"],
    ),
    (
        "An ensemble is less so, if no remedy.",
        "Beyond radius 1.5 its mean confidence is {confidence_far:.3f}, that of a single net {confidence_far_member:.3f}; on the "
        "data it is {confidence_data:.3f}, at radius 10 {confidence_radius_10:.3f}.",
        lambda found: found["confidence_far"] < found["confidence_far_member"],
    ),
    (
        "Entropy is highest at the boundaries between arms, and is data uncertainty there.",
        "Inside the disc, {entropy_boundary:.2f} nats at boundaries and {entropy_elsewhere:.2f} elsewhere; {data_share_boundary:.0%} "
        "of it is data uncertainty. Just as high, {entropy_boundary_far:.2f}, on boundaries beyond the data.",
        lambda found: found["entropy_boundary"] > found["entropy_elsewhere"] and found["data_share_boundary"] > 0.5,
    ),
    (
        "Members differ most where there are no data.",
        "Mean knowledge uncertainty {knowledge_far:.3f} nats beyond radius 1, {knowledge_data:.3f} on the data.",
        lambda found: found["knowledge_far"] > found["knowledge_data"],
    ),
    (
        "In particular in the corners.",
        f"{{agreed_corners:.1f}} of 4 corners have less than {AGREED:g} nats, and so has {{agreed_far:.0%}} of the area beyond radius 1. "
        "Knowledge uncertainty sits where boundaries leave the data: {knowledge_far_boundary:.2f} nats on them, "
        "{knowledge_far_elsewhere:.3f} off them.",
        lambda found: found["agreed_corners"] < 2,
    ),
)
# What adversarial training does over initialisations and both losses: statement, direction, quantity.
_THICKENS = "Adversarial training thickens the boundaries (data uncertainty in the disc rises)."
_EXPANDS = "It expands the regions of uncertainty (the part of the disc above half the largest entropy grows)."
_ADVERSARIAL = (
    (_THICKENS, "higher", "data_uncertainty_inside"),
    ("It makes predictions near the data more robust (NLL at attacked points falls).", "lower", "attacked_nll"),
    (
        "It makes predictions near the data less confident (mean confidence on the data falls).",
        "lower",
        "confidence_data",
    ),
    (_EXPANDS, "higher", "uncertain_area_inside"),
)


def _train(num_repeats: int, steps: int, seed: int) -> tuple[Results, Mapping[str, Run]]:
    """Train every arm from several initialisations; return all measurements, and each arm's first run."""
    results: dict[str, Mapping[str, Summary]] = {}
    first: dict[str, Run] = {}
    for arm in ARMS:
        found = []
        for repeat in range(num_repeats):
            # Watching the first run costs another pass over the data at every tenth step.
            watched = {"validation": spirals(), "check_every": 10} if repeat == 0 else {"check_every": steps}
            trained = train_spirals(arm, seed + repeat, steps, **watched)
            first.setdefault(arm, trained)
            found.append(measure(trained, Plane(trained.members), seed + repeat))
        results[arm] = {name: Summary(tuple(values[name] for values in found)) for name in found[0]}
    return results, first


def _panels(plane: Plane) -> "matplotlib.figure.Figure":
    return plots.four_panels(*spirals(), plane.axis, *map(plane.grid, (plane.mean_probs, plane.data, plane.knowledge)))


def _training_figure(runs: Mapping[str, Run]) -> "matplotlib.figure.Figure":
    figure, axes = plots.panels(2, width=4.4, height=2.8)
    shown = {"ensemble_accuracy": "accuracy on the training data", "ensemble_loss": "NLL on the training data, nats"}
    for ax, (column, title) in zip(axes, shown.items(), strict=True):
        for index, arm in enumerate((PRACTICAL, ATTACKED)):
            plots.training_curves(runs[arm].history, ax, column=column, colour=plots.COLOURS[index], label=arm)
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_ylabel("")
    name_lines(axes[-1])
    return figure


def _profile_figure(planes: Mapping[str, Plane]) -> "matplotlib.figure.Figure":
    """Draw means over rings of the grid, from the centre to the corners."""
    edges = torch.linspace(0, 2.8, 57)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    lines: dict[str, list[Line]] = {}
    for index, (arm, plane) in enumerate(planes.items()):
        ring = torch.bucketize(plane.radius, edges[1:-1])
        quantities = {"data uncertainty, nats": plane.data, "knowledge uncertainty, nats": plane.knowledge}
        for name, values in ({"confidence": plane.confidence} | quantities).items():
            means = torch.bincount(ring, values.double()) / torch.bincount(ring)
            lines.setdefault(name, []).append(Line(arm, middles, means.tolist(), colour=index, style="-"))
    return draw([Panel(name, "distance from the centre", own) for name, own in lines.items()])


def _table(names: Sequence[str], results: Results, caption: str) -> Table:
    several = len(results[PRACTICAL]["train_nll"].values) > 1
    rows = [
        (arm, *(str(found[name]) if several else fmean(found[name].values) for name in names))
        for arm, found in results.items()
    ]
    return Table(("arm", *(name.replace("_", " ") for name in names)), rows, caption)
