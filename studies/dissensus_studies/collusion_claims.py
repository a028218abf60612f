"""Runs of the collusion study in; what the document says of them beside what they show, out."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from dissensus_studies.claims import Claim
from dissensus_studies.collusion_figures import SetRuns, Sets
from dissensus_studies.collusion_measures import DROP_SHARES, population_sd
from dissensus_studies.repeats import Comparison

# What counts as harmful: the error rises by more than this share of itself.
HARM = 0.1
# "Around half", in shares of the diversity.
HALF = (1 / 3, 2 / 3)
# "Elsewhere", as against near 1.
ELSEWHERE = 0.8


def uci_claims(sets: Sets) -> list[Claim]:
    """Judge the document's statements on figures 2 to 4."""
    return [
        _compared("Joint training (β = 1) has a larger test error than independent training", "mse", sets),
        _worst(sets),
        _diversity_above_error(sets),
        _low_elsewhere(sets),
        _half_is_bias(sets),
        _compared("Debiasing removes more at β = 1 than at β = 0", "bias_share", sets),
        _drop_harms_near_one(sets),
        Claim.compared(
            "Joint training has the larger generalisation gap (test minus training error)",
            "higher",
            {name: Comparison.of(_gap(runs, 0.0), _gap(runs, 1.0)) for name, runs in sets.items()},
        ),
    ]


def _compared(statement: str, column: str, sets: Sets) -> Claim:
    """Judge that a quantity is higher at beta = 1 than at beta = 0."""
    cases = {name: Comparison.of(runs.at(column, 0.0), runs.at(column, 1.0)) for name, runs in sets.items()}
    return Claim.compared(statement, "higher", cases)


def _gap(runs: SetRuns, beta: float) -> list[float]:
    pairs = zip(runs.at("mse", beta), runs.at("train_mse", beta), strict=True)
    return [test - train for test, train in pairs]


def _worst(sets: Sets) -> Claim:
    worst = {name: runs.betas[int(runs["mse"].mean(0).argmax())] for name, runs in sets.items()}
    held = sum(beta == 1.0 for beta in worst.values())
    measured = "; ".join(f"{name} is worst at β = {beta:g}" for name, beta in worst.items())
    return Claim.checked(
        "β = 1 has the largest mean test error of all β, for most sets", measured, 2 * held > len(worst)
    )


def _diversity_above_error(sets: Sets) -> Claim:
    ratios = {name: _ratios(runs.at("diversity", 1.0), runs.at("mse", 1.0)) for name, runs in sets.items()}
    growth = {
        name: _ratios(runs.at("diversity", 1.0), runs.at("diversity", 0.0)) for name, runs in sets.items()
    }
    measured = "; ".join(
        f"{name} {median(ratios[name]):.1f} × the MSE, {median(growth[name]):.0f} × that of β = 0"
        for name in sets
    )
    return _each(
        "Diversity at β = 1 is far above the ensemble's error (its median is above the MSE)",
        measured,
        {name: median(values) > 1 for name, values in ratios.items()},
    )


def _low_elsewhere(sets: Sets) -> Claim:
    places = {name: [beta for beta in runs.betas if beta <= ELSEWHERE] for name, runs in sets.items()}
    ratios = {
        name: max(median(_ratios(runs.at("diversity", beta), runs.at("mse", beta))) for beta in places[name])
        for name, runs in sets.items()
    }
    measured = "; ".join(f"{name} {ratio:.2f} × the MSE" for name, ratio in ratios.items())
    return _each(
        f"It stays low for most β (below the MSE for all β ≤ {ELSEWHERE:g})",
        measured,
        {name: ratio < 1 for name, ratio in ratios.items()},
    )


def _half_is_bias(sets: Sets) -> Claim:
    shares = {name: runs.at("bias_share", 1.0) for name, runs in sets.items()}
    measured = "; ".join(
        f"{name} {100 * fmean(values):.0f} ± {100 * population_sd(values):.0f} %"
        for name, values in shares.items()
    )
    return _each(
        "Debiasing removes around half of the diversity at β = 1 (a third to two thirds)",
        measured,
        {name: HALF[0] <= fmean(values) <= HALF[1] for name, values in shares.items()},
    )


def _drop_harms_near_one(sets: Sets) -> Claim:
    most = f"drop_{DROP_SHARES[-1]:g}"

    def harm(runs: SetRuns, beta: float) -> float:
        return median(_ratios(runs.at(most, beta), runs.at("mse", beta)))

    near = {name: harm(runs, 1.0) for name, runs in sets.items()}
    far = {
        name: max(harm(runs, beta) for beta in runs.betas if beta <= ELSEWHERE) for name, runs in sets.items()
    }
    measured = "; ".join(
        f"{name} +{100 * near[name]:.0f} % at β = 1, at most +{100 * far[name]:.1f} % up to {ELSEWHERE:g}"
        for name in sets
    )
    return _each(
        f"Dropping members harms only near β = 1 ({100 * DROP_SHARES[-1]:.0f} % dropped raise the MSE by over "
        f"{100 * HARM:.0f} % there, by less up to {ELSEWHERE:g})",
        measured,
        {name: near[name] > HARM > far[name] for name in sets},
    )


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def _each(statement: str, measured: str, holds: Mapping[str, bool]) -> Claim:
    """Judge a claim by a condition on every set."""
    held = [name for name, yes in holds.items() if yes]
    if len(held) == len(holds):
        verdict = "reproduced"
    else:
        verdict = f"reproduced for {', '.join(held)} only" if held else "not reproduced"
    return Claim(statement, measured, verdict)
