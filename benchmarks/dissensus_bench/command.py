"""The command `dissensus bench`."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to a command line."""
    app.command()(bench)


def bench(
    device: Annotated[str, typer.Option(help="Where to measure: cpu, cuda or auto.")] = "auto",
    cases: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="small-mlps, heads, ldr-imagenet-size, resnet, inference, masksembles, scaling, two-inputs,"
            " transformers, with commas.",
            show_default="all",
        ),
    ] = None,
    engines: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="eager, captured, compiled, auto, with commas.", show_default="each case's own"
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller and fewer, in under a minute.")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the results.")] = Path(
        "runs/bench"
    ),
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare ratios with this results.json; exit code 1 if one is 1.5 times worse.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure speed beside a plain loop, vmap by hand and other libraries, in one run.

    Prints ratios and writes results.json, figures and report.html. Libraries that are not installed are named.
    """
    from dissensus_bench.one_run import run

    slower = run(output, device=device, cases=_names(cases), engines=_names(engines), quick=quick, check=check)
    if check is not None:
        for worse in slower:
            typer.echo(f"Slower than stored: {worse}", err=True)
        if slower:
            raise typer.Exit(1)
        typer.echo(f"No ratio is 1.5 times worse than in {check}.")


def _names(given: str | None) -> list[str] | None:
    return None if given is None else [name.strip() for name in given.split(",") if name.strip()]
