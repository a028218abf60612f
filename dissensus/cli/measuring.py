"""`dissensus evaluate` and `diagnose`: a trained run and data in, tables and files out."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dissensus.cli.options import (
    DIAGNOSIS,
    EVALUATION,
    UNDERTRAINED,
    AllowImport,
    BatchSize,
    Device,
    RunFolder,
    is_undertrained,
    load_trained,
    note,
)
from dissensus.cli.sets import corruption_names, known_data, sets_of, severity_numbers

if TYPE_CHECKING:
    from dissensus.cli.sets import RunSets
    from dissensus.evaluation import Evaluation
    from dissensus.recipes import LoadedRun


def evaluate(
    run: RunFolder,
    ood: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DATA", help="Unknown inputs to tell from the known ones; may be repeated."),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SUITE=DIR", help="A named suite of unknown sets in a folder, such as openood-cifar10=DIR."
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SET,SET", help="Unknown sets to average, such as near=cifar100,tin; may be repeated."
        ),
    ] = None,
    corruptions: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Corrupt the known images: standard, extra, cbar, all, or names with commas."
        ),
    ] = None,
    severities: Annotated[str, typer.Option(metavar="NUMBERS", help="Severities of the corruptions.")] = "1,2,3,4,5",
    corruption_folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Read corrupted images from files such as CIFAR-10-C's; --data is the test set they were made of.",
            show_default=False,
        ),
    ] = None,
    frost_folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Take frost from these pictures.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="Known inputs with targets; by default what the recipe held out.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder for evaluation.json.", show_default="RUN"),
    ] = None,
    bootstrap: Annotated[int, typer.Option(min=0, help="Resamples behind the intervals.")] = 1000,
    seed: Annotated[int, typer.Option(help="Decides resamples and corruptions.")] = 0,
    batch_size: BatchSize = 1024,
    device: Device = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Measure a run in one pass: predictions, every score, every set.

    Known inputs are the rows that the recipe held out as its test part. Classes that the recipe left out are unknown
    inputs without being named.
    """
    loaded_run = load_trained(run, device, allow_import)
    result = evaluate_run(
        loaded_run,
        run,
        sets_of(loaded_run, run, data, ood or (), suite or (), group or ()),
        corruptions=corruption_names(corruptions),
        severities=severity_numbers(severities),
        corruption_folder=corruption_folder,
        frost_folder=frost_folder,
        bootstrap=bootstrap,
        seed=seed,
        batch_size=batch_size,
    )
    if data is not None:
        result = replace(result, data=Path(data).name)
    typer.echo(result.table())
    path = result.save((output or run) / EVALUATION)
    typer.echo(f"\nEverything measured: {path}\nNext: dissensus report {path.parent} -o report.html")


def evaluate_run(run: "LoadedRun", folder: Path, sets: "RunSets", **options: Any) -> "Evaluation":
    """Evaluate a run on known and unknown inputs, and say what there is to keep in mind about it.

    Args:
        run: The run.
        folder: Its folder.
        sets: What `sets_of` returned.
        **options: Of `dissensus.evaluation.evaluate`.
    """
    from dissensus.evaluation import evaluate as evaluate_members
    from dissensus.recipes.alarms import check_alarm, load_calibration
    from dissensus.training.history import History

    known, unknown, groups = sets
    result = evaluate_members(
        run.ensemble,
        known,
        ood=unknown,
        groups=groups,
        transform=run.preprocessing,
        loss=run.recipe.likelihood.name,
        class_names=run.preprocessing.classes,
        name=folder.resolve().name,
        **options,
    )
    calibration = load_calibration(folder, run)
    return replace(
        result,
        remarks=(UNDERTRAINED,) if is_undertrained(History.load(folder / "history.csv")) else (),
        alarm=None if calibration is None else check_alarm(run, calibration, known, unknown),
        data=Path(run.recipe.data.path).name,
        target=run.preprocessing.target or "",
    )


def diagnose(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|PREDICTIONS",
            help="Folder of a trained run; or member outputs and targets in .npz, .parquet or .csv.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Held-out inputs with targets; by default what the recipe held out."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="Loss of predictions: mse, cross_entropy, brier, ...", show_default="from the targets"),
    ] = None,
    average: Annotated[
        str | None,
        typer.Option(help="What the ensemble averages: probs or scores.", show_default="as trained, or probs"),
    ] = None,
    drop_per: Annotated[
        str, typer.Option(help="Drop other members for each example, or for the whole set.")
    ] = "example",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Folder for the results.", show_default="RUN, or beside PREDICTIONS"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which members are dropped.")] = 0,
    batch_size: BatchSize = 1024,
    device: Device = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Tell whether members know different things, or only cancel each other (collude).

    Prints the verdict and how to read it; writes diagnosis.json and diagnosis.html with drop curves, offsets, errors over
    training and diversity of pairs. A run's diagnosis is also a section of its `dissensus report`.
    """
    from dissensus.recipes.diagnosing import diagnose_predictions, diagnose_run
    from dissensus.reporting.diagnosis import write_diagnosis

    if source.is_dir():
        if loss is not None:
            raise ValueError("The loss of a run is in its recipe; leave --loss out.")
        loaded_run = load_trained(source, device, allow_import)
        known, _ = known_data(loaded_run, source, data)
        note("held-out inputs", known.notes)
        finding = diagnose_run(
            loaded_run,
            source,
            (known.x, loaded_run.preprocessing.targets_in_units(known)),
            average=average,
            drop_per=drop_per,
            seed=seed,
            batch_size=batch_size,
        )
    else:
        finding = diagnose_predictions(source, loss=loss, average=average, drop_per=drop_per, seed=seed)
    typer.echo(finding.explain())
    folder = output or (source if source.is_dir() else source.parent)
    path = finding.save(folder / DIAGNOSIS)
    page = write_diagnosis(finding, folder / "diagnosis.html", f"Diagnosis of {source.resolve().stem}")
    typer.echo(f"\nEverything measured: {path}\nPage with pictures: {page}")
