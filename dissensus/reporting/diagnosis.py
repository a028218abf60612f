"""Findings about members in, a section of a page or a page of its own out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from math import sqrt
from pathlib import Path
from statistics import fmean

from dissensus.diagnostics import DropCurve, Finding
from dissensus.diagnostics.findings import advice, readings, verdict
from dissensus.evaluation import Evaluation
from dissensus.evaluation.tables import short
from dissensus.html import Block, Picture, Section, Table, Text, write_page
from dissensus.plots import diversity_accuracy, drop_curve, error_curves, offset_bars
from dissensus.reporting.figures import panel

Runs = Sequence[Evaluation]

_METRICS = {
    "error": "error (the loss)",
    "rmse": "RMSE",
    "mae": "mean absolute error",
    "nll": "NLL",
    "brier": "Brier score",
    "ece": "ECE",
}


def collusion(runs: Runs, score: str) -> Iterator[Block]:
    """Whether the members of each run know different things, or only cancel each other."""
    return _blocks({run.name: run.diagnosis for run in runs if run.diagnosis is not None})


def write_diagnosis(finding: Finding, path: Path | str, title: str = "Diagnosis of an ensemble") -> Path:
    """Write a page about one finding."""
    return write_page(path, title, [Section("Do members collude?", *_blocks({title: finding}))])


def _blocks(findings: Mapping[str, Finding]) -> Iterator[Block]:
    """Yield verdict, numbers and pictures of each finding, by its name."""
    yield Text(
        "Averaging helps because members err differently. That difference is worth having where each member is good by "
        "itself; members that were trained together may instead shift their answers in opposite directions, which cancel "
        "in the average and say nothing about the input. Then the ensemble looks diverse, and falls when a member is "
        "missing."
    )
    for title, finding in findings.items():
        name = title if len(findings) > 1 else ""
        yield Text((f"{name}: " if name else "") + verdict(finding))
        caption = f"Numbers behind the verdict{f' on {name}' if name else ''}"
        yield Table(["quantity", "value", "how to read it"], readings(finding), caption)
        yield Text(advice(finding).replace("`", ""))
        yield from _pictures(finding, name)


def _pictures(finding: Finding, name: str) -> Iterator[Picture]:
    of, squared = f" of {name}" if name else "", finding.loss == "mse"
    for curve in finding.drops:
        shown = _rooted(curve) if squared and curve.metric == "error" else curve
        figure, ax = panel(name)
        drop_curve(shown, ax)
        ax.set_ylabel(_METRICS.get(shown.metric, shown.metric))
        points = zip((0, *shown.dropped), (shown.full, *shown.values), strict=True)
        listed = ", ".join(f"{count}: {short(value)}" for count, value in points)
        caption = f"Members dropped at random, others for each {finding.drop_per}; bars: one standard deviation."
        yield Picture(figure, f"{shown.metric}{of} with so many members dropped: {listed}.", caption)
    figure, ax = panel(name)
    # 0 where offsets are not in the units of the error.
    offset_bars(finding.offsets, ax, ensemble_error=sqrt(max(0.0, finding.ensemble_error)) if squared else 0.0)
    listed = ", ".join(map(short, finding.offsets))
    caption = "How far each member sits beside the ensemble on average; offsets cancel."
    yield Picture(figure, f"Constant offset of each member{of}: {listed}.", caption)
    if finding.checks:
        figure, ax = panel(name)
        error_curves(finding.checks, ax)
        alt = "at the end, on training data, mean member {:.3g} and ensemble {:.3g}; held out, {:.3g} and {:.3g}."
        caption = "Shaded: the diversity, by which the mean member errs more than the ensemble."
        yield Picture(figure, f"Errors over training{of}; " + alt.format(*astuple(finding.checks[-1])[2:]), caption)
    if finding.pairs:
        figure, ax = panel(name)
        diversity_accuracy(finding.pairs, finding.num_classes, ax)
        mean = fmean(pair.diversity for pair in finding.pairs)
        alt = f"Diversity of {len(finding.pairs)} pairs of members{of}, {mean:.3g} on average."
        yield Picture(figure, alt, "Above the upper line, two members avoid each other's answers.")


def _rooted(curve: DropCurve) -> DropCurve:
    """Return squared errors as their roots, which are in the target's units."""
    values, exact = tuple(map(sqrt, curve.values)), tuple(map(sqrt, curve.exact))
    spread = (own / (2 * value) if value else 0.0 for own, value in zip(curve.deviations, values, strict=True))
    return replace(curve, metric="rmse", full=sqrt(curve.full), values=values, deviations=tuple(spread), exact=exact)
