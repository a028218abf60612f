"""Runs of the collusion study in; what the document says of them beside what they show, out."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from dissensus_studies.collusion.uci_figures import SetRuns, Sets
from dissensus_studies.collusion.uci_training import DROP_SHARES, population_sd
from dissensus_studies.harness.claims import Claim, over_cases
from dissensus_studies.harness.statistics import Comparison

# What counts as harmful: the error rises by more than this share of itself.
HARM = 0.1
# "Around half", in shares of the diversity.
HALF = (1 / 3, 2 / 3)
# "Elsewhere", as against near 1.
ELSEWHERE = 0.8


def uci_claims(sets: Sets) -> list[Claim]:
    """Judge the document's statements on figures 2 to 4."""
    dropped = f"{100 * DROP_SHARES[-1]:.0f} % dropped raise the MSE by over {100 * HARM:.0f} % there"
    return [
        _higher("Joint training (β = 1) has a larger test error than independent training", sets, _at("mse")),
        _worst(sets),
        _each("Diversity at β = 1 is far above the ensemble's error (its median is above the MSE)", sets, _above),
        _each(f"It stays low for most β (below the MSE for all β ≤ {ELSEWHERE:g})", sets, _low_elsewhere),
        _each("Debiasing removes around half of the diversity at β = 1 (a third to two thirds)", sets, _half_is_bias),
        _higher("Debiasing removes more at β = 1 than at β = 0", sets, _at("bias_share")),
        _each(f"Dropping members harms only near β = 1 ({dropped}, by less up to {ELSEWHERE:g})", sets, _drop),
        _higher("Joint training has the larger generalisation gap (test minus training error)", sets, _gap),
    ]


def _higher(statement: str, sets: Sets, read: Callable[[SetRuns, float], list[float]]) -> Claim:
    """Judge that a quantity is higher at beta = 1 than at beta = 0."""
    cases = {name: Comparison.of(read(runs, 0.0), read(runs, 1.0)) for name, runs in sets.items()}
    return Claim.compared(statement, "higher", cases)


def _at(column: str) -> Callable[[SetRuns, float], list[float]]:
    return lambda runs, beta: runs.at(column, beta)


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


def _each(statement: str, sets: Sets, judge: Callable[[SetRuns], tuple[str, bool]]) -> Claim:
    """Judge a claim by a condition on every set."""
    found: Mapping[str, tuple[str, bool]] = {name: judge(runs) for name, runs in sets.items()}
    measured = "; ".join(f"{name} {text}" for name, (text, _) in found.items())
    return Claim(statement, measured, over_cases({name: holds for name, (_, holds) in found.items()}))


def _above(runs: SetRuns) -> tuple[str, bool]:
    ratio = median(_ratios(runs.at("diversity", 1.0), runs.at("mse", 1.0)))
    growth = median(_ratios(runs.at("diversity", 1.0), runs.at("diversity", 0.0)))
    return f"{ratio:.1f} × the MSE, {growth:.0f} × that of β = 0", ratio > 1


def _elsewhere(runs: SetRuns, ratio: Callable[[float], float]) -> float:
    return max(ratio(beta) for beta in runs.betas if beta <= ELSEWHERE)


def _low_elsewhere(runs: SetRuns) -> tuple[str, bool]:
    most = _elsewhere(runs, lambda beta: median(_ratios(runs.at("diversity", beta), runs.at("mse", beta))))
    return f"{most:.2f} × the MSE", most < 1


def _half_is_bias(runs: SetRuns) -> tuple[str, bool]:
    shares = runs.at("bias_share", 1.0)
    text = f"{100 * fmean(shares):.0f} ± {100 * population_sd(shares):.0f} %"
    return text, HALF[0] <= fmean(shares) <= HALF[1]


def _drop(runs: SetRuns) -> tuple[str, bool]:
    def harm(beta: float) -> float:
        return median(_ratios(runs.at(f"drop_{DROP_SHARES[-1]:g}", beta), runs.at("mse", beta)))

    near, far = harm(1.0), _elsewhere(runs, harm)
    text = f"+{100 * near:.0f} % at β = 1, at most +{100 * far:.1f} % up to {ELSEWHERE:g}"
    return text, near > HARM > far


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]
