"""Study `practical-regression`: six small nets on a noisy cubic, and what each part of the recipe adds.

The experiment runs from its own data and scales. The questions asked about it (adversarial training, an ensemble, the
number of members, a Laplace likelihood) are answered on fresh samples of the same law, so that differences are not those
of one sample. The recipe is kept as it was, with a learning rate so high that some nets never fit.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dissensus import plots
from dissensus.data import toy
from dissensus.html import Section, Table, Text
from dissensus_studies.deep_ensembles.regression_arms import (
    ARMS,
    COUNTS,
    COVERED,
    EPSILON,
    HEADLINE_ENGINE,
    NETS,
    NUM_POINTS,
    PRACTICAL_MEMBERS,
    STEPS,
    Arm,
    Measures,
    band,
    final_losses,
    headline,
    measure,
    region,
    test_sample,
    train_practical,
    train_repeats,
)
from dissensus_studies.harness.claims import Claim, claims_table
from dissensus_studies.harness.figures import name_lines, sweeps
from dissensus_studies.harness.outputs import Outputs, print_table
from dissensus_studies.harness.statistics import Comparison, Summary

if TYPE_CHECKING:
    import matplotlib.figure

COLUMNS: Mapping[str, str] = {
    "nll": "NLL",
    "nll_attacked": "NLL, attacked",
    "rmse": "RMSE",
    "wild": "wild",
    "sd_inside": "sd inside",
    "sd_near": "sd beside",
    "sd_outside": "sd outside",
    "coverage_inside": "covered inside",
    "coverage_near": "covered beside",
    "coverage_outside": "covered outside",
}


Results = Mapping[tuple[Arm, int], Measures]


def run(output: Path, *, quick: bool = False, seed: int = 0, data: Path | None = None) -> Path:
    """Run the study; see `dissensus_studies.Study.run`. `data` is not needed."""
    outputs = Outputs(output)
    practical = _practical(outputs, seed)
    num_repeats = 3 if quick else 20
    seeds, results = headline(num_repeats), _repeat(num_repeats, seed)
    claims = regression_claims(results)
    medians = _arms_table(results, "Medians over repeats", lambda found: found.median)
    judged = (
        f"Paired over {num_repeats} repeats, judged by an exact sign test at 5 %: heavy tails do not matter to it. That an average "
        "is better than its members are on average is no finding (Jensen's inequality); by how much is."
    )
    outputs.sections += [
        _seeds_section(seeds),
        Section(
            "Single net, adversarial training, ensemble",
            Text(
                f"Each arm trains {NETS} nets on each of {num_repeats} fresh samples of {NUM_POINTS} points. Inside is |x| ≤ 4, "
                "where the data are, beside them 4 to 4.5, outside 5 to 6. NLL (nats) is that of the exact mixture on 400 fresh "
                f"points; attacked points have moved by {EPSILON} up the loss. Covered is the share of fresh targets in the "
                "mixture's central 90 % interval. Wild is the share whose error exceeds that of always predicting 0: one such net "
                "decides the mean and the standard deviation of a mixture, though not its NLL, hence medians beside means."
            ),
            _arms_table(results, "Means over repeats ± standard errors", str),
            medians,
            outputs.picture(
                "practical_regression_members", count_figure(_counted(results)), "measures by number of members"
            ),
        ),
        Section("What the document says", claims_table(claims, judged)),
    ]
    outputs.results(
        {
            "practical": practical,
            "headline": {"seeds": seeds, "engine": HEADLINE_ENGINE},
            "repeats": {f"{arm.name}, {count} members": found for (arm, count), found in results.items()},
            "claims": claims,
            "quick": quick,
            "seed": seed,
        }
    )
    print_table(medians.columns, medians.rows)
    return outputs.page(
        "Practical: regression",
        "Six small networks learn a noisy cubic from 40 points. Where the data end, their mixture becomes unsure. What does "
        "each part of the recipe add?",
    )


def _practical(outputs: Outputs, seed: int) -> dict[str, dict[str, Any]]:
    """Run the practical itself, in all four arms; draw its figures."""
    x, y = (torch.from_numpy(part).float() for part in toy.cubic(NUM_POINTS))
    grid = torch.linspace(-6, 6, 61)[:, None]
    found: dict[str, dict[str, Any]] = {}
    figure, axes = plots.panels(2, 2, width=4.4, height=3.0)
    for arm, ax in zip(ARMS, axes, strict=True):
        trained = train_practical(arm, seed=seed)
        mean, scale, centre, sd = band(trained, arm.family, grid)
        sds = {f"sd_{p}": float(band(trained, arm.family, region(p)[0])[3].mean()) for p in ("inside", "outside")}
        found[arm.name] = {"final_losses": final_losses(trained, arm, (x, y)), **sds}
        plots.bands(grid, centre, sd, ax, truth=grid**3, points=(x, y))
        ax.set(ylim=(-300, 300), xlabel="x", ylabel="y")
        ax.set_title(arm.name, fontsize=10, loc="left")
        if arm == ARMS[0]:
            main = plots.member_bands(grid, mean, scale, truth=grid**3, points=(x, y), limits=(-300.0, 300.0))
    name_lines(axes[1])
    rows = [(name, min(r["final_losses"]), max(r["final_losses"]), *list(r.values())[1:]) for name, r in found.items()]
    outputs.sections.append(
        Section(
            "The practical",
            Text(
                f"{PRACTICAL_MEMBERS} nets 1-10-6-30-2 with ReLU predict a mean and a standard deviation; all parameters start "
                f"as a scale drawn for each net times normal noise; Adam at 0.08 takes {STEPS} steps on all 40 points. A perfect "
                "net would end near 2.4 nats."
            ),
            outputs.picture("practical_regression", main, "bands of six members and of their mixture"),
            outputs.picture("practical_regression_arms", figure, "bands of the mixture in four arms"),
            Table(("arm", "best net, nats", "worst net, nats", "mean sd, |x| ≤ 4", "mean sd, 5 ≤ |x| ≤ 6"), rows),
        )
    )
    return found


def _seeds_section(seeds: Sequence[Mapping[str, float]]) -> Section:
    names = {
        "sd_inside": "mean sd, |x| ≤ 4",
        "sd_outside": "mean sd, 5 ≤ |x| ≤ 6",
        "best_net": "best net, nats",
        "worst_net": "worst net, nats",
    }
    quantiles = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    found = {words: torch.tensor([row[name] for row in seeds]) for name, words in names.items()}
    rows = [(words, *values.quantile(quantiles).tolist()) for words, values in found.items()]
    return Section(
        f"The same with {len(seeds)} seeds",
        Text(
            "A run of this recipe is chaotic: another machine, engine or version of torch ends elsewhere with the same seed. What can be "
            f"compared is the distribution over seeds (here: {platform.machine()}, torch {torch.__version__}, engine {HEADLINE_ENGINE!r})."
        ),
        Table(("six Gaussian nets", "least", "first quartile", "median", "third quartile", "largest"), rows),
    )


def _repeat(num_repeats: int, seed: int) -> Results:
    test = test_sample(400, seed)
    trained = {arm: train_repeats(arm, num_repeats, seed=seed) for arm in ARMS}
    return {(arm, count): measure(repeats, count, test) for arm, repeats in trained.items() for count in COUNTS}


def _arms_table(results: Results, caption: str, read: Callable[[Summary], object]) -> Table:
    shown = [(arm, count) for arm in ARMS for count in (1, PRACTICAL_MEMBERS)]
    rows = [(key[0].name, key[1], *(read(results[key][name]) for name in COLUMNS)) for key in shown]
    return Table(("arm", "members", *COLUMNS.values()), rows, caption)


DRAWN: Mapping[str, str] = {
    "nll": "NLL on fresh data, nats",
    "rmse": "median RMSE on fresh data",
    "coverage_inside": "covered by 90 % intervals inside",
    "coverage_outside": "covered by 90 % intervals outside",
}


def _counted(results: Results) -> dict[tuple[str, float, str], tuple[float, float]]:
    """Return means with standard errors, or of errors, which single wild nets decide, medians: by arm, members and quantity."""
    return {
        (arm.name, float(count), name): (v.median, 0.0) if name == "rmse" else (v.mean, v.error)
        for (arm, count), found in results.items()
        for name, v in found.items()
        if name in DRAWN
    }


def count_figure(values: Mapping[tuple[str, float, str], tuple[float, float]]) -> "matplotlib.figure.Figure":
    """Draw quantities of each arm by number of members."""
    panels: dict[str, dict[str, dict[float, tuple[float, float]]]] = {title: {} for title in DRAWN.values()}
    for (arm, count, name), value in values.items():
        panels[DRAWN[name]].setdefault(arm, {})[count] = value
    return sweeps(panels, "members", columns=2, logs=[DRAWN["rmse"]])


# What adversarial training does to a single net: statement, direction, quantity.
_ADVERSARIAL = (
    ("Adversarial training makes a single net more robust (NLL at attacked inputs falls).", "lower", "nll_attacked"),
    ("It keeps a single net from fitting noise (NLL on fresh data minus NLL on its own falls).", "lower", "overfit"),
    ("It improves a single net's predictions (NLL on fresh data falls).", "lower", "nll"),
    ("It makes a single net less sure just beside the data (mean sd over 4 < |x| < 4.5 rises).", "higher", "sd_near"),
    ("It makes a single net less often too sure there (coverage over 4 < |x| < 4.5 rises).", "higher", "coverage_near"),
)
# What an ensemble of the practical's size does against a single net.
_ENSEMBLE = (
    ("is less often too sure where there are no data (coverage over 5 < |x| < 6 rises)", "higher", "coverage_outside"),
    ("improves the NLL on fresh data (Jensen: it cannot be worse than its members' mean)", "lower", "nll"),
    ("improves the error of the mean (Jensen again)", "lower", "rmse"),
)


def regression_claims(results: Results) -> list[Claim]:
    """Judge every claim.

    Args:
        results: Measurements by arm and number of members.
    """
    members, most = PRACTICAL_MEMBERS, max(count for _, count in results)

    def mean(name: str, count: int) -> dict[str, float]:
        return {arm.name: results[arm, count][name].mean for arm in ARMS}

    def with_members(name: str, few: int, many: int) -> dict[str, Comparison]:
        return {
            arm.name: Comparison.of(results[arm, few][name].values, results[arm, many][name].values) for arm in ARMS
        }

    def with_adversarial(name: str) -> dict[str, Comparison]:
        return {
            family.capitalize(): Comparison.of(
                *(results[Arm(family, adversarial), 1][name].values for adversarial in (False, True))
            )
            for family in sorted({arm.family for arm in ARMS})
        }

    apart = {
        arm.name: Comparison.of(
            *(results[arm, members][f"knowledge_{place}"].values for place in ("inside", "outside"))
        )
        for arm in ARMS
    }
    beside, inside = mean("coverage_near", 1), mean("coverage_inside", members)
    first, middle, last = (mean("nll", count) for count in (1, members, most))
    gained = {name: (first[name] - middle[name]) / (first[name] - last[name]) for name in first}
    return [
        *(Claim.compared(statement, expected, with_adversarial(name)) for statement, expected, name in _ADVERSARIAL),
        Claim.compared(
            f"Members that agree on the data disagree where there are none (sd of {members} members' means: "
            "5 < |x| < 6 against |x| < 4).",
            "higher",
            apart,
        ),
        Claim.checked(
            "A single net is too sure just beside the data.",
            f"Its {COVERED:.0%} intervals over 4 < |x| < 4.5 hold: {_percentages(beside)}.",
            max(beside.values()) < COVERED,
        ),
        *(
            Claim.compared(f"An ensemble of {members} {statement}.", expected, with_members(name, 1, members))
            for statement, expected, name in _ENSEMBLE
        ),
        Claim.compared(
            f"More members predict better (NLL of {most} against {members}).",
            "lower",
            with_members("nll", members, most),
        ),
        Claim.checked(
            "Returns diminish: a few members give most of the gain.",
            f"Share of the NLL gained from 1 to {most} members that {members} members give: {_percentages(gained)}.",
            min(gained.values()) > 0.5,
        ),
        Claim.checked(
            "About five members are enough for well-calibrated uncertainty.",
            f"The mixture's {COVERED:.0%} intervals with {members} members hold, inside: {_percentages(inside)}.",
            max(abs(value - COVERED) for value in inside.values()) < 0.03,
        ),
    ]


def _percentages(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1%}" for name, value in values.items())
