"""Commands that train a run from a recipe, and score, evaluate and report it. Each imports what it needs when it runs."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from dissensus.data.files import Loaded
    from dissensus.recipes import LoadedRun, Recipe
    from dissensus.training import Run

EVALUATION = "evaluation.json"

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")]
AllowImport = Annotated[
    bool,
    typer.Option(
        "--allow-import", help="Let the recipe import its network from a module; runs that module's code."
    ),
]
Device = Annotated[str, typer.Option(help="Where to run: auto, cpu, cuda, cuda:1, ...")]
BatchSize = Annotated[int, typer.Option(min=1, help="Inputs that go through the members at once.")]


def register(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    for command in (train, score, evaluate, diagnose, report):
        app.command()(command)


def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A recipe in TOML, or the folder of a run to go on with.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder for the run.", show_default="runs/RECIPE"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="TABLE.KEY=VALUE", help="Change a setting of the recipe; may be repeated."
        ),
    ] = None,
    allow_import: AllowImport = False,
) -> None:
    """Train an ensemble as a recipe says.

    Writes the resolved recipe, checkpoints, history.csv and the trained ensemble into the run's folder.
    """
    from dissensus.recipes import Recipe
    from dissensus.training import DivergedError

    if recipe.is_dir():
        output, recipe = output or recipe, recipe / "recipe.toml"
    folder = output or Path("runs") / recipe.stem
    described = Recipe.read(recipe, change or ())
    try:
        run = described.train(folder, resume=resume, allow_import=allow_import)
    except DivergedError as problem:
        raise ValueError(str(problem)) from None
    except KeyboardInterrupt:
        _say(f"\nInterrupted. Go on with: dissensus train {folder} --resume")
        raise typer.Exit(130) from None
    typer.echo(_summary(run, described))
    typer.echo(f"Run: {folder}\nNext: dissensus evaluate {folder}")


def _summary(run: "Run", recipe: "Recipe") -> str:
    lines = [
        f"Trained {run.members.num_members} members for {run.epoch} epochs ({run.step} steps) in {run.seconds:.1f} s"
        + (", stopped early." if run.stopped_early else ".")
    ]
    if run.dropped:
        lines.append(
            f"Dropped because their loss was not finite: {', '.join(f'member {m}' for m in run.dropped)}."
        )
    columns = run.history.columns
    if "ensemble_loss" in columns:
        steps = list(dict.fromkeys(row["step"] for row in run.history))
        at = steps.index(run.best_step) if run.best_step in steps else -1
        shown = {
            "accuracy": ("ensemble_accuracy", "validation_accuracy"),
            recipe.likelihood.name: ("ensemble_loss", "validation_loss"),
        }
        numbers = [
            f"{name} {run.history.by_epoch(whole)[at]:.4f} (members alone {run.history.by_epoch(one)[at]:.4f})"
            for name, (whole, one) in shown.items()
            if whole in columns
        ]
        kept = "last" if run.best_step is None else "best"
        scaled = recipe.likelihood.kind != "classes" and recipe.data.standardise_target
        lines.append(
            f"Validation, {kept} check: {', '.join(numbers)}{', of standardised targets' if scaled else ''}."
        )
    return "\n".join(lines)


def score(
    run: RunFolder,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="A file or folder of inputs; FILE.npz#test for a split.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write: .csv or .parquet.")
    ],
    batch_size: BatchSize = 1024,
    device: Device = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Predict inputs with a run, and say how uncertain each prediction is.

    Writes one row an input: prediction, confidence and every score. A score is higher where the ensemble is less certain.
    """
    from dissensus.recipes.scoring import check_table_path, score_inputs, write_table

    check_table_path(output)
    loaded_run = _load(run, device, allow_import)
    loaded = loaded_run.preprocessing.read(data)
    _note(data, loaded.notes)
    table = score_inputs(loaded_run, loaded, batch_size=batch_size)
    write_table(table, output)
    typer.echo(f"{len(loaded)} inputs scored: {output}")
    by = "total_entropy" if "total_entropy" in table else "total_variance"
    if by in table:
        worst = sorted(range(len(loaded)), key=lambda row: -table[by][row])[:5]
        typer.echo(
            f"Least certain by {by}: {', '.join(str(table.get('file', table['row'])[row]) for row in worst)}"
        )


def evaluate(
    run: RunFolder,
    ood: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DATA", help="Unknown inputs to tell from the known ones; may be repeated."
        ),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SUITE=DIR",
            help="A named suite of unknown sets in a folder, such as openood-cifar10=DIR.",
        ),
    ] = None,
    corruptions: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Corrupt the known images: standard, extra, cbar, all, or names with commas.",
        ),
    ] = None,
    severities: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Severities of the corruptions.")
    ] = "1,2,3,4,5",
    data: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Known inputs with targets; by default what the recipe held out."),
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
    from dissensus.evaluation import evaluate as evaluate_members

    loaded_run = _load(run, device, allow_import)
    known, unknown, groups = _sets(loaded_run, data, ood or (), suite or ())
    result = evaluate_members(
        loaded_run.ensemble,
        known,
        ood=unknown,
        groups=groups,
        corruptions=_corruption_names(corruptions),
        severities=_numbers(severities),
        transform=loaded_run.preprocessing,
        loss=loaded_run.recipe.likelihood.name,
        class_names=loaded_run.preprocessing.classes,
        name=run.resolve().name,
        bootstrap=bootstrap,
        seed=seed,
        batch_size=batch_size,
    )
    typer.echo(result.table())
    path = result.save((output or run) / EVALUATION)
    typer.echo(f"\nEverything measured: {path}\nNext: dissensus report {path.parent} -o report.html")


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
        typer.Option(
            metavar="DATA", help="Held-out inputs with targets; by default what the recipe held out."
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="Loss of predictions: mse, cross_entropy, brier, ...", show_default="from the targets"
        ),
    ] = None,
    average: Annotated[
        str | None,
        typer.Option(
            help="What the ensemble averages: probs or scores.", show_default="as trained, or probs"
        ),
    ] = None,
    drop_per: Annotated[
        str, typer.Option(help="Drop other members for each example, or for the whole set.")
    ] = "example",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder for the results.",
            show_default="RUN, or beside PREDICTIONS",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which members are dropped.")] = 0,
    batch_size: BatchSize = 1024,
    device: Device = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Tell whether members know different things, or only cancel each other (collude).

    Prints the verdict and how to read it; writes diagnosis.json and diagnosis.html with drop curves, offsets, errors over
    training and diversity of pairs.
    """
    from dissensus.recipes.diagnosing import diagnose_predictions, diagnose_run
    from dissensus.reporting.diagnosis import write_diagnosis

    if source.is_dir():
        if loss is not None:
            raise ValueError("The loss of a run is in its recipe; leave --loss out.")
        loaded_run = _load(source, device, allow_import)
        known, _ = _known(loaded_run, data)
        _note("held-out inputs", known.notes)
        finding = diagnose_run(
            loaded_run,
            source,
            (known.x, _targets(loaded_run, known)),
            average=average,
            drop_per=drop_per,
            seed=seed,
            batch_size=batch_size,
        )
    else:
        finding = diagnose_predictions(source, loss=loss, average=average, drop_per=drop_per, seed=seed)
    typer.echo(finding.explain())
    folder = output or (source if source.is_dir() else source.parent)
    path = finding.save(folder / "diagnosis.json")
    page = write_diagnosis(finding, folder / "diagnosis.html", f"Diagnosis of {source.resolve().stem}")
    typer.echo(f"\nEverything measured: {path}\nPage with pictures: {page}")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of evaluated runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page about evaluated runs, side by side if there are several."""
    from dissensus.evaluation import Evaluation
    from dissensus.reporting import report as write_report

    results = []
    for run in runs:
        path = run if run.is_file() else run / EVALUATION
        if not path.exists():
            raise ValueError(f"{run} has not been evaluated yet. First run: dissensus evaluate {run}")
        results.append(Evaluation.load(path))
    page = write_report(results, output)
    typer.echo(f"Page with pictures: {page}")


def _load(folder: Path, device: str, allow_import: bool) -> "LoadedRun":
    import torch

    from dissensus.recipes import load_run

    run = load_run(folder, allow_import=allow_import)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        run.ensemble.to(torch.device(device))
    except (RuntimeError, AssertionError) as problem:
        raise ValueError(f"The device {device!r} cannot be used: {str(problem).splitlines()[0]}") from None
    return run


def _sets(
    run: "LoadedRun", data: str | None, ood: Sequence[str], suites: Sequence[str]
) -> tuple[tuple["Tensor", "Tensor"], dict[str, "Tensor"], dict[str, list[str]]]:
    """Return known inputs with targets, unknown ones by name, and the groups of these."""
    known, left_out = _known(run, data)
    _note("known inputs", known.notes)
    unknown: dict[str, Tensor] = {}
    groups: dict[str, list[str]] = {}
    if left_out is not None:
        unknown["left_out"] = left_out.x
    for name, source in map(_named, ood):
        loaded = run.preprocessing.read(source)
        _note(name, loaded.notes)
        unknown[name] = loaded.x
    for name, folder in map(_named, suites):
        found = _suite(run, name, folder)
        unknown |= found.sets
        for each, group in found.groups.items():
            groups.setdefault(group, []).append(each)
    return (known.x, _targets(run, known)), unknown, groups


def _known(run: "LoadedRun", data: str | None) -> tuple["Loaded", "Loaded | None"]:
    if data is not None:
        return run.preprocessing.read(data), None
    sets = run.recipe.load_sets()
    if sets.test is None:
        raise ValueError(
            "The recipe held no rows out to test on. Name test data with --data, or train with test = 0.2 under [data]."
        )
    return sets.test, sets.left_out


def _targets(run: "LoadedRun", known: "Loaded") -> "Tensor":
    if run.preprocessing.classes is not None:
        return run.preprocessing.targets(known)
    if known.y is None:
        raise ValueError("The known inputs have no targets.")
    return known.y.float().reshape(len(known.y), -1)


def _suite(run: "LoadedRun", name: str, folder: str) -> Any:
    from dissensus.data.suites import SUITES, load_suite

    if name not in SUITES:
        raise ValueError(f"There is no suite {name!r}; there are {', '.join(SUITES)}.")
    if len(run.preprocessing.shape) != 3:
        raise ValueError(f"The suite {name} holds images; this run was trained on features.")
    channels, height, width = run.preprocessing.shape
    found = load_suite(SUITES[name], folder, (channels, height, width))
    _say(found.explain())
    return found


def _named(given: str) -> tuple[str, str]:
    name, equals, source = given.partition("=")
    if not name or not equals or not source:
        raise ValueError(f"Sets are given as NAME=DATA, such as svhn=svhn.npz; got {given!r}.")
    return name, source


def _corruption_names(given: str | None) -> tuple[str, ...] | None:
    from dissensus.data.corruptions import CBAR, CORRUPTIONS, EXTRA, STANDARD

    if given is None:
        return None
    families = {"standard": STANDARD, "extra": EXTRA, "cbar": CBAR, "all": tuple(CORRUPTIONS)}
    names = [name for part in given.split(",") for name in families.get(part.strip(), (part.strip(),))]
    unknown = [name for name in names if name not in CORRUPTIONS]
    if unknown:
        raise ValueError(
            f"There is no corruption {unknown[0]!r}; there are {', '.join(families)} and {', '.join(CORRUPTIONS)}."
        )
    return tuple(dict.fromkeys(names))


def _numbers(given: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise ValueError(f"Severities are whole numbers with commas, such as 1,3,5; got {given!r}.") from None


def _note(name: str, notes: Iterable[str]) -> None:
    for note in notes:
        _say(f"{name}: {note}")


def _say(text: str) -> None:
    """Tell the user something that is not a result."""
    typer.echo(text, err=True)
