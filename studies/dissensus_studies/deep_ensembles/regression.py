"""Study `practical-regression`: six small nets on a noisy cubic, and what each part of the recipe adds.

The experiment runs from its own data and scales. The questions asked about it (adversarial training, an ensemble, the
number of members, a Laplace likelihood) are answered on fresh samples of the same law, so that differences are not those
of one sample. The recipe is kept as it was, with a learning rate so high that some nets never fit.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
    curves,
    final_losses,
    headline,
    measure,
    region,
    test_sample,
    train_practical,
    train_repeats,
)
from dissensus_studies.deep_ensembles.regression_claims import Results, regression_claims
from dissensus_studies.deep_ensembles.scales import practical_scales
from dissensus_studies.harness.claims import claims_table
from dissensus_studies.harness.outputs import Outputs, print_table
from dissensus_studies.harness.statistics import Summary

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


def run(output: Path, *, quick: bool = False, seed: int = 0, data: Path | None = None) -> Path:
    """Run the study; see `dissensus_studies.Study.run`. `data` is not needed."""
    outputs = Outputs(output)
    practical = _practical(outputs, seed)
    seeds = headline(3 if quick else 20)
    outputs.sections.append(_seeds_section(seeds))
    results = _repeat(num_repeats=3 if quick else 20, seed=seed)
    claims = regression_claims(results)
    medians = _arms_table(results, "Medians over repeats", lambda found: found.median)
    num_repeats = len(next(iter(results.values()))["nll"].values)
    outputs.sections += [
        Section(
            "Single net, adversarial training, ensemble",
            Text(
                f"Each arm trains {NETS} nets on each of {num_repeats} fresh samples of {NUM_POINTS} points. Inside is |x| ≤ 4, "
                "where the data are, beside them 4 to 4.5, outside 5 to 6. NLL (nats) is that of the exact mixture on 400 fresh "
                f"points; attacked points have moved by {EPSILON} up the loss. Covered is the share of fresh targets in the "
                "mixture's central 90 % interval.",
                "Wild is the share whose error exceeds that of always predicting 0. The learning rate is so high that some nets "
                "never fit, and one of them decides the mean and the standard deviation of a mixture, though not its NLL: hence "
                "medians beside means.",
            ),
            _arms_table(results, "Means over repeats ± standard errors", str),
            medians,
        ),
        Section(
            "Number of members",
            outputs.picture(
                "practical_regression_members", _count_figure(results), "measures over the number of members"
            ),
            *(_counts_table(arm, results) for arm in ARMS),
        ),
        Section(
            "What the document says",
            claims_table(
                claims,
                f"Paired over {num_repeats} repeats, judged by an exact sign test at 5 %: heavy tails do not matter to it. That an average "
                "is better than its members are on average is no finding (Jensen's inequality); by how much is.",
            ),
        ),
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


def _practical(outputs: Outputs, seed: int) -> dict[str, object]:
    """Run the practical itself, in all four arms; draw its figure."""
    x, y = (torch.from_numpy(part).float() for part in toy.cubic(NUM_POINTS))
    grid = torch.linspace(-6, 6, 61)[:, None]
    found: dict[str, object] = {}
    rows = []
    figure, axes = plots.panels(2, 2, width=4.8, height=3.3)
    for arm, ax in zip(ARMS, axes, strict=True):
        trained = train_practical(arm, seed=seed)
        mean, scale, centre, sd = band(trained, arm.family, grid)
        inside, outside = (
            float(band(trained, arm.family, region(place)[0])[3].mean()) for place in ("inside", "outside")
        )
        losses = final_losses(trained, arm, (x, y))
        rows.append((arm.name, min(losses), max(losses), inside, outside))
        found[arm.name] = {"final_losses": losses, "sd_inside": inside, "sd_outside": outside}
        plots.bands(grid, centre, sd, ax, truth=grid**3, points=(x, y))
        ax.set(title=arm.name, ylim=(-300, 300), xlabel="x", ylabel="y")
        if arm == ARMS[0]:
            main = plots.member_bands(grid, mean, scale, truth=grid**3, points=(x, y), limits=(-300.0, 300.0))
            members = _members_table(losses)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    outputs.sections.append(
        Section(
            "The practical",
            Text(
                f"{PRACTICAL_MEMBERS} nets 1-10-6-30-2 with ReLU predict a mean and a standard deviation; all parameters start "
                f"as a scale drawn for each net times normal noise; Adam at 0.08 takes {STEPS} steps on all 40 points. A perfect "
                "net would end near 2.4 nats."
            ),
            outputs.picture("practical_regression", main, "bands of six members and of their mixture"),
            members,
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
    rows = []
    for name, words in names.items():
        values = torch.tensor([row[name] for row in seeds])
        rows.append((words, *values.quantile(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])).tolist()))
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
    results: dict[tuple[Arm, int], Measures] = {}
    for arm in ARMS:
        trained = train_repeats(arm, num_repeats, seed=seed)
        for count in COUNTS:
            results[arm, count] = measure(trained, count, test)
    return results


def _members_table(losses: list[float]) -> Table:
    seeds, scales = practical_scales(len(losses))
    rows = [(member, *values) for member, values in enumerate(zip(seeds, scales, losses, strict=True))]
    return Table(("member", "seed", "scale", "final NLL, nats"), rows, "The Gaussian nets without adversarial training")


def _arms_table(results: Results, caption: str, read: Callable[[Summary], object]) -> Table:
    rows = [
        (arm.name, count, *(read(results[arm, count][name]) for name in COLUMNS))
        for arm in ARMS
        for count in (1, PRACTICAL_MEMBERS)
    ]
    return Table(("arm", "members", *COLUMNS.values()), rows, caption)


def _counts_table(arm: Arm, results: Results) -> Table:
    rows = [(count, *(str(results[arm, count][name]) for name in COLUMNS)) for count in COUNTS]
    return Table(("members", *COLUMNS.values()), rows, arm.name)


def _count_figure(results: Results) -> "matplotlib.figure.Figure":
    figure, axes = plots.panels(2, 2, width=4.6, height=3.1)
    drawn = (
        ("nll", "NLL on fresh data, nats"),
        ("rmse", "median RMSE on fresh data"),
        ("coverage_inside", "coverage of the 90 % interval inside"),
        ("coverage_outside", "coverage of the 90 % interval outside"),
    )
    for ax, (name, label) in zip(axes, drawn, strict=True):
        lines = {arm.name: curves([results[arm, count] for count in COUNTS], name) for arm in ARMS}
        plots.member_count_curves(COUNTS, lines, ax, ylabel=label, legend=name == "nll")
        if name.startswith("coverage"):
            ax.axhline(COVERED, color=plots.NOTE_COLOUR, linestyle="--", linewidth=1)
    axes[1].set_yscale("log")
    axes[1].set_yticks((5, 10, 20, 50), ("5", "10", "20", "50"))
    axes[1].minorticks_off()
    return figure
