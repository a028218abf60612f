"""`dissensus evaluate`, `diagnose` and `report`: a trained run and data in, tables, files and pages out."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from dissensus._files import checkpoint_digest
from dissensus.cli.options import (
    UNDERTRAINED,
    AllowImport,
    BatchSize,
    Device,
    RunFolder,
    is_undertrained,
    load_trained,
    note,
    say,
)

if TYPE_CHECKING:
    from torch import Tensor

    from dissensus.data.files import Loaded
    from dissensus.data.suites import LoadedSuite
    from dissensus.diagnostics import Finding
    from dissensus.evaluation import Evaluation
    from dissensus.recipes import LoadedRun

    RunSets = tuple[tuple[Tensor, Tensor], dict[str, Tensor], dict[str, list[str]]]

EVALUATION = "evaluation.json"
DIAGNOSIS = "diagnosis.json"
# As many training examples as tell the two kinds of ensembles apart, and are predicted in no time.
_LARGEST_TRAINING_SAMPLE = 2000


def evaluate(
    run: RunFolder,
    ood: Annotated[
        list[str] | None,
        Option(metavar="NAME=DATA", help="Unknown inputs to tell from the known ones; may be repeated."),
    ] = None,
    suite: Annotated[
        list[str] | None,
        Option(metavar="SUITE=DIR", help="A named suite of unknown sets in a folder, such as openood-cifar10=DIR."),
    ] = None,
    group: Annotated[
        list[str] | None,
        Option(metavar="NAME=SET,SET", help="Unknown sets to average, such as near=cifar100,tin; may be repeated."),
    ] = None,
    corruptions: Annotated[
        str | None,
        Option(metavar="NAMES", help="Corrupt the known images: standard, extra, cbar, all, or names with commas."),
    ] = None,
    severities: Annotated[str, Option(metavar="NUMBERS", help="Severities of the corruptions.")] = "1,2,3,4,5",
    corruption_folder: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Read corrupted images from files such as CIFAR-10-C's; --data is the test set they were made of.",
            show_default=False,
        ),
    ] = None,
    frost_folder: Annotated[
        Path | None, Option(metavar="DIR", help="Take frost from these pictures.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, Option(metavar="DATA", help="Known inputs with targets; by default what the recipe held out.")
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="DIR", help="Folder for evaluation.json.", show_default="RUN")
    ] = None,
    bootstrap: Annotated[int, Option(min=0, help="Resamples behind the intervals.")] = 1000,
    seed: Annotated[int, Option(help="Decides resamples and corruptions.")] = 0,
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
        data,
        corruptions=None if corruptions is None else corruption_names(corruptions),
        severities=severity_numbers(severities),
        corruption_folder=corruption_folder,
        frost_folder=frost_folder,
        bootstrap=bootstrap,
        seed=seed,
        batch_size=batch_size,
    )
    typer.echo(result.table())
    path = result.save((output or run) / EVALUATION)
    typer.echo(f"\nEverything measured: {path}\nNext: dissensus report {path.parent} -o report.html")


def evaluate_run(
    run: "LoadedRun", folder: Path, sets: "RunSets", data: str | None = None, **options: Any
) -> "Evaluation":
    """Evaluate a run on known and unknown inputs, and say what there is to keep in mind about it; options are of `ds.evaluate`."""
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
        data=Path(data or run.recipe.data.path).name,
        target=run.preprocessing.target or "",
        ensemble=checkpoint_digest(folder, "ensemble"),
    )


def diagnose(
    source: Annotated[
        Path,
        Argument(
            metavar="RUN|PREDICTIONS",
            help="Folder of a trained run; or member outputs and targets in .npz, .parquet or .csv.",
        ),
    ],
    data: Annotated[
        str | None, Option(metavar="DATA", help="Held-out inputs with targets; by default what the recipe held out.")
    ] = None,
    loss: Annotated[
        str | None, Option(help="Loss of predictions: mse, cross_entropy, brier, ...", show_default="from the targets")
    ] = None,
    average: Annotated[
        str | None, Option(help="What the ensemble averages: probs or scores.", show_default="as trained, or probs")
    ] = None,
    drop_per: Annotated[str, Option(help="Drop other members for each example, or for the whole set.")] = "example",
    output: Annotated[
        Path | None,
        Option(
            "--output", "-o", metavar="DIR", help="Folder for the results.", show_default="RUN, or beside PREDICTIONS"
        ),
    ] = None,
    seed: Annotated[int, Option(help="Decides which members are dropped.")] = 0,
    batch_size: BatchSize = 1024,
    device: Device = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Tell whether members know different things, or only cancel each other (collude).

    Prints the verdict and how to read it; writes diagnosis.json and diagnosis.html with drop curves, offsets, errors over
    training and diversity of pairs. A run's diagnosis is also a section of its `dissensus report`.
    """
    from dissensus.diagnostics import diagnose as diagnose_members
    from dissensus.diagnostics.measuring import read_predictions
    from dissensus.reporting.diagnosis import write_diagnosis

    options: dict[str, Any] = {"drop_per": drop_per, "seed": seed}
    if source.is_dir():
        if loss is not None:
            raise ValueError("The loss of a run is in its recipe; leave --loss out.")
        loaded_run = load_trained(source, device, allow_import)
        known, _ = known_data(loaded_run, source, data)
        finding = diagnose_run(loaded_run, source, known, average, batch_size, **options)
        finding = replace(finding, ensemble=checkpoint_digest(source, "ensemble"))
    else:
        found = read_predictions(source)
        options |= {"average": average or "probs", "training": found.training}
        finding = diagnose_members(found.outputs, found.targets, loss or found.loss, **options)
    typer.echo(finding.explain())
    folder = output or (source if source.is_dir() else source.parent)
    path = finding.save(folder / DIAGNOSIS)
    page = write_diagnosis(finding, folder / "diagnosis.html", f"Diagnosis of {source.resolve().stem}")
    typer.echo(f"\nEverything measured: {path}\nPage with pictures: {page}")


def diagnose_run(
    run: "LoadedRun", folder: Path, known: "Loaded", average: Any, batch_size: int, **options: Any
) -> "Finding":
    """Diagnose a run on held-out rows, on some of its training data, and over its history if that was watched."""
    import torch

    from dissensus.diagnostics import diagnose as diagnose_members
    from dissensus.recipes.recipe import rows_of_run
    from dissensus.training.history import History

    history = History.load(folder / "history.csv")
    train = rows_of_run(run, folder, "train")
    assert train is not None
    count = min(len(train), _LARGEST_TRAINING_SAMPLE)
    some = train.rows(torch.linspace(0, len(train) - 1, count, dtype=torch.float64).round().long())
    likelihood = run.recipe.likelihood
    outputs, targets = _outputs_and_targets(run, known, batch_size)
    return diagnose_members(
        outputs,
        targets,
        "mse" if run.preprocessing.classes is None else likelihood.name,
        average or likelihood.average,
        likelihood.member_weights(outputs.double()),
        training=_outputs_and_targets(run, some, batch_size),
        history=history if "train_ensemble_error" in history.columns else None,
        **options,
    )


def _outputs_and_targets(run: "LoadedRun", rows: "Loaded", batch_size: int) -> "tuple[Tensor, Tensor]":
    from dissensus.predictions import predict

    outputs = predict(run.ensemble, run.preprocessing(rows.x), batch_size=batch_size)
    return run.recipe.likelihood.mean_and_scale(outputs)[0], run.preprocessing.targets_in_units(rows)


def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of runs, or evaluations.")],
    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path("report.html"),
    device: Device = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Write one HTML page about runs, side by side if there are several.

    A run that was not evaluated yet is evaluated first, on the rows that its recipe held out; an evaluation that is there is never
    replaced. Arms of a sweep that are not finished are named and left out.
    """
    from dissensus.html import Section, Text
    from dissensus.recipes.sweeps import arms_in
    from dissensus.reporting import report as write_report

    results, unfinished = [], []
    for folder in runs:
        finished, others = arms_in(folder)
        if not finished:
            raise ValueError(f"No arm of the sweep in {folder} is finished. Train it first.")
        results += [_measured(run, device, allow_import) for run in finished]
        unfinished += others
    names = ", ".join(arm.name for arm in unfinished)
    left_out = [f"{len(unfinished)} arms are not finished and left out: {names}."] if unfinished else []
    for text in left_out:
        say(text)
    page = write_report(results, output, first=[Section("Not on this page", Text(text)) for text in left_out])
    typer.echo(f"Page with pictures: {page}")


def _measured(run: Path, device: str, allow_import: bool) -> "Evaluation":
    """Return a run's evaluation, made now unless it is there, with what `dissensus diagnose` found of the same members."""
    from dissensus.diagnostics import Finding
    from dissensus.evaluation import Evaluation

    path = run if run.is_file() else run / EVALUATION
    if not path.exists() and not (run / "recipe.toml").exists():
        raise ValueError(f"{run} is neither a run's folder nor an evaluation. Name folders that dissensus train wrote.")
    if not path.exists():
        loaded = load_trained(run, device, allow_import)
        say(f"{run} has not been evaluated yet; this is done first.")
        evaluate_run(loaded, run, sets_of(loaded, run)).save(path)
    result, ensemble = Evaluation.load(path), checkpoint_digest(run, "ensemble")
    if ensemble and result.ensemble not in ("", ensemble):
        raise ValueError(
            f"{path} is of other members than {run} holds now. Measure these with dissensus evaluate {run}, or name the file itself."
        )
    # It knows the training data and the history, too; unless it is of other members.
    if (run / DIAGNOSIS).exists():
        finding = Finding.load(run / DIAGNOSIS)
        if ensemble and finding.ensemble not in ("", ensemble):
            say(f"{run / DIAGNOSIS} is of other members than the run holds now, and left out.")
        else:
            result = replace(result, diagnosis=finding)
    return result


def sets_of(
    run: "LoadedRun",
    folder: Path,
    data: str | None = None,
    ood: Iterable[str] = (),
    suites: Iterable[str] = (),
    groups: Iterable[str] = (),
) -> "RunSets":
    """Return known inputs with targets, unknown ones by name, and the groups of these."""
    known, left_out = known_data(run, folder, data)
    unknown: dict[str, Tensor] = {} if left_out is None else {"left_out": left_out.x}
    grouped: dict[str, list[str]] = {}
    for given in ood:
        name, source = _named(given, "Sets are given as NAME=DATA, such as svhn=svhn.npz")
        _check_new([name], unknown)
        loaded = run.preprocessing.read(source)
        note(name, *loaded.notes)
        unknown[name] = loaded.x
    for given in suites:
        found = _suite(run, *_named(given, "Suites are given as SUITE=DIR, such as openood-cifar10=ood"))
        _check_new(found.sets, unknown)
        unknown |= found.sets
        for group, names in found.grouped.items():
            grouped.setdefault(group, []).extend(names)
    for given in groups:
        group, listed = _named(given, "Groups are given as NAME=SET,SET, such as near=cifar100,tin")
        grouped.setdefault(group, []).extend(name.strip() for name in listed.split(","))
    return (known.x, run.preprocessing.targets_in_units(known)), unknown, grouped


def _check_new(names: Iterable[str], taken: Iterable[str]) -> None:
    if twice := set(names) & set(taken):
        raise ValueError(f"Every set needs a name of its own; {min(twice)!r} is given twice. Rename or leave out one.")


def known_data(run: "LoadedRun", folder: Path, data: str | None) -> tuple["Loaded", "Loaded | None"]:
    """Return the inputs to test on, and those of classes that were left out, unless data is named."""
    from dissensus.recipes.recipe import left_out_rows, rows_of_run

    advice = "Restore the file, or name other data with --data."
    known = run.preprocessing.read(data) if data else rows_of_run(run, folder, "test", advice)
    if known is None:
        raise ValueError("No rows were held out to test on. Name some with --data, or train with test = 0.2 in [data].")
    note("known inputs", *known.notes)
    return known, None if data else left_out_rows(run)


def _suite(run: "LoadedRun", name: str, folder: str) -> "LoadedSuite":
    from dissensus.data.suites import SUITES, load_suite

    if name not in SUITES:
        raise ValueError(f"There is no suite {name!r}; there are {', '.join(SUITES)}.")
    if len(run.preprocessing.shape) != 3:
        raise ValueError(f"The suite {name} holds images; this run was trained on features.")
    channels, height, width = run.preprocessing.shape
    found = load_suite(SUITES[name], folder, (channels, height, width))
    say(found.explain())
    return found


def _named(given: str, wanted: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not name or not equals or not value:
        raise ValueError(f"{wanted}; got {given!r}.")
    return name, value


def corruption_names(given: str) -> tuple[str, ...]:
    """Return names of corruptions, each once, of names and families with commas between."""
    from dissensus.evaluation.corrupting import corruption_families

    families = corruption_families()
    names = [name for part in given.split(",") for name in families.get(part.strip(), (part.strip(),))]
    return tuple(dict.fromkeys(names))


def severity_numbers(given: str) -> tuple[int, ...]:
    """Return the numbers of a list with commas."""
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise ValueError(f"Severities are whole numbers with commas, such as 1,3,5; got {given!r}.") from None
