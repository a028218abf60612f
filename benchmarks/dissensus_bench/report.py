"""Results as a table on the screen, as `results.json`, as figures and as a page."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dissensus.html import Block, Picture, Section, Table, Text, cell_text, write_page
from dissensus_bench.cached_heads import cost_rows
from dissensus_bench.cases import Result

if TYPE_CHECKING:
    import matplotlib.figure

_AXES = {"members": "members", "batch": "batch", "width": "hidden width"}


def ratio_rows(results: Sequence[Result]) -> list[tuple[str, str, str, float]]:
    """Return case, job, comparison and ratio, row by row."""
    return [
        (result["case"], result["what"], name, value) for result in results for name, value in result["ratios"].items()
    ]


def missing_peers(results: Sequence[Result]) -> dict[str, str]:
    """Return peers that took no part in some case, and why."""
    found: dict[str, dict[str, None]] = {}
    for result in results:
        for name, reason in result["missing"].items():
            found.setdefault(name, {})[reason] = None
    return {name: "; ".join(reasons) for name, reasons in found.items()}


def print_results(results: Sequence[Result]) -> None:
    """Print the ratios, and which peers are missing."""
    if find_spec("rich") is None:
        print(*(f"{case} | {job} | {name}: {ratio:.3g}" for case, job, name, ratio in ratio_rows(results)), sep="\n")
    else:
        _print_grid(results)
    for job, ms, seconds, growth, faster in cost_rows(results):
        print(
            f"{job}: {ms:.3g} ms a step, {seconds:.3g} s an epoch, {growth:.2f} x the fewest, {faster:.2f} x as fast as a loop"
        )
    for name, reason in missing_peers(results).items():
        print(f"{name}: {reason}")


def _print_grid(results: Sequence[Result]) -> None:
    from rich.console import Console
    from rich.table import Table as Grid

    grid = Grid(caption="Ratios of times in one run: above 1 we are faster.")
    for column in ("case", "job", "ours against"):
        grid.add_column(column, overflow="fold")
    grid.add_column("ratio", justify="right", no_wrap=True)
    shown = ("", "")
    for case, job, name, ratio in ratio_rows(results):
        first = (case, job) != shown
        grid.add_row(case if first else "", job if first else "", name, f"{ratio:.3g}")
        shown = (case, job)
    Console().print(grid)


def store(folder: Path, about: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Write `results.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"about": about, "results": list(results)}, indent=1)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")


def write_results(folder: Path, about: Mapping[str, Any], results: Sequence[Result]) -> Path:
    """Write `results.json`, the figures (SVG and PNG) and `report.html`; return the page's path."""
    store(folder, about, results)
    pictures = _pictures(folder, results)
    sections = [
        Section("Ratios", _ratio_table(results), *_peer_lines(results)),
        *_case_sections(results, pictures),
        Section("Measured on", Table(("what", "value"), [(key, _plain(value)) for key, value in about.items()])),
    ]
    lead = (
        "Every ratio compares two best times of one run, taken in turns. Above 1, this library is faster; 1 is a tie."
    )
    return write_page(folder / "report.html", "Speed", sections, lead)


def _plain(value: Any) -> object:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _ratio_table(results: Sequence[Result]) -> Table:
    return Table(("case", "job", "ours against", "ratio"), ratio_rows(results))


def _peer_lines(results: Sequence[Result]) -> list[Block]:
    missing = missing_peers(results)
    return [Text(*(f"{name}: {reason}." for name, reason in missing.items()))] if missing else []


def _case_sections(results: Sequence[Result], pictures: Mapping[str, Picture]) -> list[Section]:
    sections = []
    for case in dict.fromkeys(result["case"] for result in results):
        rows = [
            (result["what"], name, timed["ms"], timed.get("first_epoch_s"), timed.get("peak_GB"))
            for result in results
            if result["case"] == case
            for name, timed in result["sides"].items()
        ]
        table = Table(
            ("job", "side", "ms", "first epoch, s", "peak, GB"),
            rows,
            "Milliseconds a step; for inference, for all inputs.",
        )
        own = cost_rows([result for result in results if result["case"] == case])
        costs = [Table(("job", "ms a step", "s an epoch", "x the fewest", "x as fast as a loop"), own)] if own else []
        sections.append(Section(case, *([pictures[case]] if case in pictures else []), table, *costs))
    return sections


def _pictures(folder: Path, results: Sequence[Result]) -> dict[str, Picture]:
    """Draw and save a figure for each case; none where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return {}
    from dissensus import plots

    pictures = {}
    for case in dict.fromkeys(result["case"] for result in results):
        own = [result for result in results if result["case"] == case]
        figure = scaling_figure(own) if "axis" in own[0] else times_figure(own)
        plots.save(figure, folder / case)
        pictures[case] = Picture(figure, f"Times of all sides in the case {case}; the table has the numbers.")
    return pictures


def times_figure(results: Sequence[Result]) -> "matplotlib.figure.Figure":
    """Draw the time of every side as a point, a panel for each job."""
    from dissensus.plots import COLOURS, panels

    tallest = max(len(result["sides"]) for result in results)
    figure, axes = panels(rows=len(results), width=7.0, height=0.7 + 0.32 * tallest)
    for result, ax in zip(results, axes, strict=True):
        names = list(result["sides"])[::-1]
        times = [result["sides"][name]["ms"] for name in names]
        colours = [COLOURS[0] if "ds." in name else COLOURS[4] for name in names]
        ax.scatter(times, names, color=colours, zorder=2)
        for name, ms in zip(names, times, strict=True):
            ax.annotate(
                cell_text(ms), (ms, name), xytext=(7, 0), textcoords="offset points", va="center", fontsize="small"
            )
        ax.set_xscale("log")
        ax.minorticks_off()
        ax.grid(axis="y", alpha=0.3)
        ax.margins(x=0.15)
        ax.set_title(result["what"], fontsize="medium", loc="left")
        ax.set_xlabel("ms (logarithmic)")
    return figure


def scaling_figure(results: Sequence[Result]) -> "matplotlib.figure.Figure":
    """Draw time a step against members, batch and width, a line for each side."""
    from dissensus.plots import COLOURS, panels

    axes_names = list(dict.fromkeys(result["axis"] for result in results))
    figure, axes = panels(columns=len(axes_names), width=4.0, height=3.4)
    for axis, ax in zip(axes_names, axes, strict=True):
        points = [result for result in results if result["axis"] == axis]
        for index, side in enumerate(points[0]["sides"]):
            ax.plot(
                [point["value"] for point in points],
                [point["sides"][side]["ms"] for point in points],
                "o-",
                color=COLOURS[index % len(COLOURS)],
                markersize=4,
                label=side,
            )
        ax.set(xscale="log", yscale="log", xlabel=_AXES[axis], ylabel="ms a step")
        ax.minorticks_off()
        values = [point["value"] for point in points]
        ax.set_xticks(values, list(map(str, values)))
    axes[0].legend(frameon=False, fontsize="small")
    return figure
