"""What the command line says about data -> known inputs with targets, unknown ones by name, and corruptions."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dissensus.cli.options import note, say

if TYPE_CHECKING:
    from torch import Tensor

    from dissensus.data.files import Loaded
    from dissensus.data.suites import LoadedSuite
    from dissensus.recipes import LoadedRun

    RunSets = tuple[tuple[Tensor, Tensor], dict[str, Tensor], dict[str, list[str]]]


def sets_of(
    run: "LoadedRun", folder: Path, data: str | None, ood: Sequence[str], suites: Sequence[str], groups: Sequence[str]
) -> "RunSets":
    """Return known inputs with targets, unknown ones by name, and the groups of these."""
    known, left_out = known_data(run, folder, data)
    note("known inputs", known.notes)
    unknown: dict[str, Tensor] = {} if left_out is None else {"left_out": left_out.x}
    grouped: dict[str, list[str]] = {}
    for given in ood:
        name, source = _named(given, "Sets are given as NAME=DATA, such as svhn=svhn.npz")
        _check_new([name], unknown)
        loaded = run.preprocessing.read(source)
        note(name, loaded.notes)
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


def _check_new(names: Iterable[str], taken: Collection[str]) -> None:
    for name in names:
        if name in taken:
            raise ValueError(f"Every set needs a name of its own; {name!r} is given twice. Rename or leave out one.")


def known_data(run: "LoadedRun", folder: Path, data: str | None) -> tuple["Loaded", "Loaded | None"]:
    """Return the inputs to test on, and those of classes that were left out, unless data is named."""
    from dissensus.recipes.runs import left_out_rows, rows_of_run

    if data is not None:
        return run.preprocessing.read(data), None
    known = rows_of_run(run, folder, "test", "Restore the file, or name other data with --data.")
    if known is None:
        raise ValueError(
            "The recipe held no rows out to test on. Name test data with --data, or train with test = 0.2 under [data]."
        )
    return known, left_out_rows(run)


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


def corruption_names(given: str | None) -> tuple[str, ...] | None:
    """Return names of corruptions, each once, of names and families with commas between."""
    from dissensus.data.corruptions import CORRUPTIONS
    from dissensus.evaluation.corrupting import corruption_families

    if given is None:
        return None
    families = corruption_families()
    names = [name for part in given.split(",") for name in families.get(part.strip(), (part.strip(),))]
    unknown = [name for name in names if name not in CORRUPTIONS]
    if unknown:
        raise ValueError(
            f"There is no corruption {unknown[0]!r}; there are {', '.join(families)} and {', '.join(CORRUPTIONS)}."
        )
    return tuple(dict.fromkeys(names))


def severity_numbers(given: str) -> tuple[int, ...]:
    """Return the numbers of a list with commas."""
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise ValueError(f"Severities are whole numbers with commas, such as 1,3,5; got {given!r}.") from None
