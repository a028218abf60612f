"""Study `practical-regression`: six small nets on a noisy cubic, and what each part of the recipe adds.

Questions about the recipe are answered on fresh samples of the same law, so that differences are not those of one sample.
"""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Laplace, Normal

from dissensus import plots
from dissensus.data import toy
from dissensus.html import Picture, Section, Table
from dissensus.members import DeepEnsemble
from dissensus.objectives import Adversarial, Independent, Objective, mean_and_scale
from dissensus.predictions import mixture, predict
from dissensus.randomness import derive
from dissensus.scores import Family
from dissensus.training import Run, fit
from dissensus_studies.deep_ensembles.networks import attacked, fit_own_sets, scaled_mlp
from dissensus_studies.harness.claims import Claim, claims_table
from dissensus_studies.harness.figures import Lines, name_lines, sweeps
from dissensus_studies.harness.outputs import Outputs, print_table
from dissensus_studies.harness.statistics import Comparison, Summary

if TYPE_CHECKING:
    import matplotlib.figure

SIZES = (1, 10, 6, 30, 2)
STEPS = 600
LEARNING_RATE = 0.08
EPSILON = 0.08
NUM_POINTS = 40
RECIPE: Mapping[str, Any] = {"batch_size": NUM_POINTS, "optimizer": "adam", "lr": LEARNING_RATE}
PRACTICAL_MEMBERS = 6
COUNTS = (1, 2, 4, 6, 10, 20)
# A multiple of every count: ensembles of each size are made of the same nets.
NETS = 60
COVERED = 0.9

# Inside lie the data; near is just beside them; outside is where only a guess is left.
REGIONS = {"inside": (0.0, 4.0), "near": (4.0, 4.5), "outside": (5.0, 6.0)}

Measures: TypeAlias = dict[str, Summary]

# Likelihoods, each without and with adversarial training.
ARMS: Mapping[str, Objective] = {
    "Gaussian": Independent("gaussian_nll"),
    "Gaussian + adversarial": Adversarial(Independent("gaussian_nll"), epsilon=EPSILON),
    "Laplace": Independent("laplace_nll"),
    "Laplace + adversarial": Adversarial(Independent("laplace_nll"), epsilon=EPSILON),
}
PLAIN = ARMS["Gaussian"]


def practical_scales(num_members: int = PRACTICAL_MEMBERS) -> dict[int, float]:
    """Return the seeds of the practical's regression members, and the scale of the initial parameters that each seed gives.

    The stream goes on where `cubic` left it and gives the first seed; each seed starts a new stream: its scale, then the next seed.
    """
    stream = np.random.RandomState(toy.CUBIC_SEED)
    # The forty points of `cubic`.
    stream.uniform(size=40)
    stream.normal(size=40)
    scales = {}
    for _ in range(num_members):
        seed = 100 + abs(int(stream.normal(0, 1) * 10_000))
        stream = np.random.RandomState(seed)
        scales[seed] = abs(float(stream.normal(0, 0.1)))
    return scales


def train_practical(
    objective: Objective = PLAIN, seed: int = 0, steps: int = STEPS, num_seeds: int = 1, **rest: Any
) -> Run:
    """Train the practical's ensemble on its data, with its scales; those of several seeds as one ensemble."""
    nets = [
        scaled_mlp(SIZES, scale, each, "practical", member)
        for each in range(seed, seed + num_seeds)
        for member, scale in enumerate(practical_scales().values())
    ]
    settings = {**RECIPE, "objective": objective, "epochs": steps, "seed": seed, "device": "cpu", **rest}
    return fit(DeepEnsemble.from_members(nets, seed), toy.cubic(NUM_POINTS), **settings)


def headline(num_seeds: int) -> dict[str, list[float]]:
    """Train the practical's six Gaussian nets with several seeds in one call of `fit`; return what each seed ends with.

    A run at this learning rate is chaotic: rounding decides it, so that only the distribution over seeds can be compared.
    """
    run = train_practical(num_seeds=num_seeds, engine="eager")
    found = {}
    for place in ("inside", "outside"):
        every = predict(run.members, region(place)[0]).unflatten(0, (num_seeds, -1))
        found[f"sd_{place}"] = [float(moments(own)[3].mean()) for own in every]
    losses = final_losses(run).reshape(num_seeds, -1)
    return found | {"best_net": losses.amin(1).tolist(), "worst_net": losses.amax(1).tolist()}


class Repeats(NamedTuple):
    """One arm trained on several samples, `(repeats, points, 1)`, as one ensemble: nets of the first sample, of the second, and so on."""

    objective: Objective
    ensemble: DeepEnsemble
    x: Tensor
    y: Tensor

    def outputs(self, x: Tensor, num_members: int) -> Tensor:
        """Return outputs in separate ensembles of a size: `(members, repeats, ensembles, points, 2)`.

        Inputs are `(points, 1)` for all, or `(repeats, ensembles, points, 1)` for each ensemble its own.
        """
        if x.ndim == 2:
            every = self.ensemble(x)
        else:
            every = self.ensemble.each(x.repeat_interleave(num_members, 1).flatten(0, 1))
        return every.unflatten(0, (len(self.x), -1, num_members)).movedim(2, 0).double()


def sample(num_points: int = NUM_POINTS, seed: int = toy.CUBIC_SEED) -> tuple[Tensor, Tensor]:
    """Return the practical's data, or a fresh sample of the same law, `(points, 1)` each."""
    x, y = (torch.from_numpy(part).float() for part in toy.cubic(num_points, seed=seed))
    return x, y[:, None]


def train_repeats(
    objective: Objective, num_repeats: int, num_members: int = NETS, seed: int = 0, steps: int = STEPS
) -> Repeats:
    """Train nets on fresh samples; samples, scales and initial draws are those of the other arms."""
    samples = [sample(seed=_numpy_seed(seed, "sample", repeat)) for repeat in range(num_repeats)]
    x, y = map(torch.stack, zip(*samples, strict=True))
    nets = []
    for repeat in range(num_repeats):
        draws = np.random.RandomState(_numpy_seed(seed, "scales", repeat)).normal(0, 0.1, num_members)
        for member, scale in enumerate(np.abs(draws)):
            nets.append(scaled_mlp(SIZES, float(scale), seed, "repeat", repeat, member))
    ensemble = DeepEnsemble.from_members(nets, seed)
    owners = [repeat for repeat in range(num_repeats) for _ in range(num_members)]
    fit_own_sets(ensemble, x, y, owners, objective, epochs=steps, seed=seed, check_every=100, **RECIPE)
    return Repeats(objective, ensemble.eval(), x, y)


def measure(trained: Repeats, num_members: int, test: tuple[Tensor, Tensor]) -> Measures:
    """Measure ensembles of a size on fresh inputs and targets, `(points, 1)` each; quantities are means over the ensembles of a repeat.

    NLL is that of the exact mixture in nats, RMSE that of its mean; `wild` is the share of ensembles with a larger error than the
    constant 0; by region, `coverage_…` is that of the central 90 % interval, `sd_…` the mixture's, `knowledge_…` the members' means'.
    """
    (x, y), likelihood = test, trained.objective.likelihood
    with torch.no_grad():
        outputs = trained.outputs(x, num_members)
        own_x = trained.x[:, None].expand(-1, outputs.shape[2], -1, -1)
        moved = trained.outputs(attack(trained, num_members, test), num_members)
        errors = (moments(outputs, likelihood.family)[2] - y[:, 0]).square().mean(-1, keepdim=True).sqrt()
        found = {
            "nll": likelihood.mixture(outputs, y),
            "nll_train": likelihood.mixture(trained.outputs(own_x, num_members), trained.y[:, None]),
            "nll_attacked": likelihood.mixture(moved, y),
            "rmse": errors,
            "wild": (errors > y.square().mean().sqrt()).double(),
        }
        for name in REGIONS:
            x, y = region(name)
            mean, scale, _, sd = moments(trained.outputs(x, num_members), likelihood.family)
            below = {"gaussian": Normal, "laplace": Laplace}[likelihood.family](mean, scale).cdf(y[:, 0]).mean(0)
            found[f"coverage_{name}"] = ((below - 0.5).abs() <= COVERED / 2).double()
            found[f"sd_{name}"] = sd
            found[f"knowledge_{name}"] = mean.std(0, correction=0)
        found["overfit"] = found["nll"].mean(-1, keepdim=True) - found["nll_train"].mean(-1, keepdim=True)
        found["ratio"] = found["sd_outside"].mean(-1, keepdim=True) / found["sd_inside"].mean(-1, keepdim=True)
    return {name: Summary(tuple(values.mean((1, 2)).tolist())) for name, values in found.items()}


def attack(trained: Repeats, num_members: int, test: tuple[Tensor, Tensor]) -> Tensor:
    """Move test inputs by `EPSILON` up the loss of each ensemble: `(repeats, ensembles, points, 1)`."""
    x, y = test
    likelihood = trained.objective.likelihood
    ensembles = trained.ensemble.num_members // len(trained.x) // num_members
    own = x.expand(len(trained.x), ensembles, *x.shape)
    return attacked(own, lambda x: likelihood.mixture(trained.outputs(x, num_members), y), EPSILON)


def region(name: str, points: int = 200) -> tuple[Tensor, Tensor]:
    """Return evenly spaced inputs of a region, on both sides, and targets of the practical's law there."""
    right = torch.linspace(*REGIONS[name], points)
    x = torch.cat([-right, right])[:, None]
    noise = np.random.RandomState(_numpy_seed(name)).normal(0, 3, (2 * points, 1))
    return x, x**3 + torch.from_numpy(noise).float()


def moments(outputs: Tensor, family: Family = "gaussian") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return members' means and scales, and mean and sd of their mixture."""
    mean, scale = (part[..., 0] for part in mean_and_scale(outputs))
    return mean, scale, *mixture(mean, scale, family)


def final_losses(run: Run) -> Tensor:
    """Return each Gaussian member's mean loss on the practical's data at the end of training."""
    x, y = sample()
    return PLAIN.likelihood.per_example(predict(run.members, x), y).mean(-1)


def _numpy_seed(*key: int | str) -> int:
    return derive(*key) & 0xFFFFFFFF


COLUMNS = ("nll", "nll_attacked", "rmse", "wild", *map("_".join, product(("sd", "coverage"), REGIONS)))
DRAWN: Mapping[str, str] = {
    "nll": "NLL on fresh data, nats",
    "rmse": "median RMSE on fresh data",
    "coverage_inside": "covered by 90 % intervals inside",
    "coverage_outside": "covered by 90 % intervals outside",
}
Results = Mapping[tuple[str, int], Measures]


def run(output: Path, *, quick: bool = False, seed: int = 0, data: Path | None = None) -> Path:
    """Run the study; see `dissensus_studies.Study.run`. `data` is not needed."""
    outputs = Outputs(output)
    num_repeats = 3 if quick else 20
    practical, seeds = _practical(outputs, seed), headline(num_repeats)
    trained = {name: train_repeats(arm, num_repeats, seed=seed) for name, arm in ARMS.items()}
    test = sample(400, _numpy_seed(seed, "test sample"))
    results = {(arm, count): measure(own, count, test) for arm, own in trained.items() for count in COUNTS}
    claims = regression_claims(results)
    rows = [
        (arm, count, *(f"{results[arm, count][name]} ({results[arm, count][name].median:.3g})" for name in COLUMNS))
        for arm, count in product(ARMS, (1, PRACTICAL_MEMBERS))
    ]
    caption = f"Means over {num_repeats} fresh samples ± standard errors (medians)"
    arms = Table(("arm", "members", *(name.replace("_", " ") for name in COLUMNS)), rows, caption)
    quantiles = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    of_seeds = [(k.replace("_", " "), *torch.tensor(own).quantile(quantiles).tolist()) for k, own in seeds.items()]
    columns = ("six Gaussian nets", "least", "first quartile", "median", "third quartile", "largest")
    counts = outputs.picture("practical_regression_members", count_figure(_counted(results)), "measures by members")
    outputs.sections += [
        Section("The practical", *practical),
        Section(f"The same with {num_repeats} seeds", Table(columns, of_seeds)),
        Section("Single net, adversarial training, ensemble", arms, counts),
        Section("What the document says", claims_table(claims, f"Exact sign tests at 5 % over {num_repeats} samples.")),
    ]
    repeats = {f"{arm}, {count} members": own for (arm, count), own in results.items()}
    records: dict[str, dict[str, Any]] = {
        f"regression {arm} M={count}": {
            "arm": arm,
            "members": count,
            "repeats": {k: list(v.values) for k, v in own.items()},
        }
        for (arm, count), own in results.items()
    }
    outputs.arms(
        records | {"regression seeds": {"seeds": seeds}}, {"repeats": num_repeats, "quick": quick, "seed": seed}
    )
    outputs.results({"headline": seeds, "repeats": repeats, "claims": claims, "quick": quick, "seed": seed})
    print_table(arms)
    return outputs.page(
        "Practical: regression", "Six small networks learn a noisy cubic: what does each part of the recipe add?"
    )


def _practical(outputs: Outputs, seed: int) -> list[Picture]:
    """Run the practical itself, in all four arms; return its figures."""
    x, y = sample()
    points, grid = (x, y[:, 0]), torch.linspace(-6, 6, 61)[:, None]
    figure, axes = plots.panels(2, 2, width=4.4, height=3.0)
    for (name, arm), ax in zip(ARMS.items(), axes, strict=True):
        mean, scale, centre, sd = moments(predict(train_practical(arm, seed).members, grid), arm.likelihood.family)
        plots.bands(grid, centre, sd, ax, truth=grid**3, points=points)
        ax.set(ylim=(-300, 300), xlabel="x", ylabel="y")
        ax.set_title(name, fontsize=10, loc="left")
        if arm is PLAIN:
            main = plots.member_bands(grid, mean, scale, truth=grid**3, points=points, limits=(-300.0, 300.0))
    name_lines(axes[1])
    return [
        outputs.picture("practical_regression", main, "bands of six members and of their mixture"),
        outputs.picture("practical_regression_arms", figure, "bands of the mixture in four arms"),
    ]


def _counted(results: Results) -> Mapping[str, Lines]:
    """Return means with standard errors, or of errors, which single wild nets decide, medians: by panel, arm and members."""
    panels: dict[str, dict[str, dict[float, tuple[float, float]]]] = {title: {} for title in DRAWN.values()}
    for ((arm, count), found), (name, title) in product(results.items(), DRAWN.items()):
        own = found[name]
        panels[title].setdefault(arm, {})[count] = (own.median, 0.0) if name == "rmse" else (own.mean, own.error)
    return panels


def count_figure(panels: Mapping[str, Lines]) -> "matplotlib.figure.Figure":
    """Draw quantities of each arm by number of members."""
    return sweeps(panels, "members", columns=2, logs=[DRAWN["rmse"]])


# What adversarial training does to a single net: statement, direction, quantity.
_ADVERSARIAL = (
    ("Adversarial training makes a single net more robust (NLL at attacked inputs falls).", "lower", "nll_attacked"),
    ("It keeps a single net from fitting noise (NLL on fresh data minus NLL on its own falls).", "lower", "overfit"),
    ("It makes a single net less sure just beside the data (mean sd over 4 < |x| < 4.5 rises).", "higher", "sd_near"),
    ("It makes a single net less often too sure there (coverage over 4 < |x| < 4.5 rises).", "higher", "coverage_near"),
)
# What an ensemble of the practical's size does against a single net.
_ENSEMBLE = (
    ("is less often too sure where there are no data (coverage over 5 < |x| < 6 rises)", "higher", "coverage_outside"),
    ("improves the NLL on fresh data (Jensen: it cannot be worse than its members' mean)", "lower", "nll"),
)


def regression_claims(results: Results) -> list[Claim]:
    """Judge every claim by measurements of each arm and number of members."""
    members, most = PRACTICAL_MEMBERS, max(count for _, count in results)

    def mean(name: str, count: int) -> dict[str, float]:
        return {arm: results[arm, count][name].mean for arm in ARMS}

    def compared(statement: str, expected: str, before: str, after: str, few: int, many: int) -> Claim:
        pairs = {arm: (results[arm, few][before].values, results[arm, many][after].values) for arm in ARMS}
        return Claim.compared(statement, expected, {name: Comparison.of(*pair) for name, pair in pairs.items()})

    def adversarial(statement: str, expected: str, name: str) -> Claim:
        values = {arm: results[arm, 1][name].values for arm in ARMS}
        cases = {arm: Comparison.of(values[arm], values[f"{arm} + adversarial"]) for arm in ("Gaussian", "Laplace")}
        return Claim.compared(statement, expected, cases)

    beside, inside = _percentages(mean("coverage_near", 1)), _percentages(mean("coverage_inside", members))
    first, middle, last = (mean("nll", count) for count in (1, members, most))
    gained = {name: (first[name] - middle[name]) / (first[name] - last[name]) for name in first}
    agreed = f"Members that agree on the data disagree where there are none (sd of {members} members' means: 5 < |x| < 6 against |x| < 4)."
    share = f"Share of the NLL gained from 1 to {most} members that {members} members give: {_percentages(gained)}."
    return [
        *(adversarial(*each) for each in _ADVERSARIAL),
        compared(agreed, "higher", "knowledge_inside", "knowledge_outside", members, members),
        Claim.checked(
            "A single net is too sure just beside the data.",
            f"Its {COVERED:.0%} intervals over 4 < |x| < 4.5 hold: {beside}.",
            max(mean("coverage_near", 1).values()) < COVERED,
        ),
        *(
            compared(f"An ensemble of {members} {statement}.", expected, name, name, 1, members)
            for statement, expected, name in _ENSEMBLE
        ),
        compared(
            f"More members predict better (NLL of {most} against {members}).", "lower", "nll", "nll", members, most
        ),
        Claim.checked("Returns diminish: a few members give most of the gain.", share, min(gained.values()) > 0.5),
        Claim.checked(
            "About five members are enough for well-calibrated uncertainty.",
            f"The mixture's {COVERED:.0%} intervals with {members} members hold, inside: {inside}.",
            max(abs(value - COVERED) for value in mean("coverage_inside", members).values()) < 0.03,
        ),
    ]


def _percentages(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1%}" for name, value in values.items())
