"""What every image study is: options in; arms run and kept, `results.json`, a figure and a page out.

A study gives its arms and what it makes of their records (`Page`): claims, one table of all arms, one figure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any

from dissensus.html import Section, Table, Text
from dissensus_studies.harness.arm_log import Arm, Arms, Record, run_arms
from dissensus_studies.harness.claims import Claim, claims_table
from dissensus_studies.harness.image_sets import ImageSets, load_images
from dissensus_studies.harness.outputs import Outputs, print_table


@dataclass(frozen=True)
class Work:
    """What an image study is asked for, its images, and what else it prepares: what arms are made of."""

    output: Path  # Folder for the results. A study that was interrupted goes on from what `arms.jsonl` there has.
    quick: bool = False  # Few epochs of a small network.
    seed: int = 0  # Of the first repeat; others follow it.
    # Folder with an image set (see `load_images`); digits that come along, in the quick form, without one.
    data: Path | None = None
    epochs: int | None = None  # Epochs instead of the study's own.
    minutes: float | None = None  # Begin no arm after this time.
    limit: int | None = None  # Train on so many images, and take at most as many of each other set.
    arms: Sequence[str] | None = None  # Run only arms whose names fit; see `arm_log.chosen`.
    known: str | None = None  # Which image set of the folder.
    # What only some studies have.
    # For the setting "pretrained": a network that was trained elsewhere, `"module:function"`.
    backbone: str | None = None
    seconds: float | None = None  # Train each arm for about so long.
    network: str | None = None  # Of which networks ensembles are made.
    repeats: int | None = None  # Run so many seeds.
    sets: ImageSets = field(kw_only=True)
    material: Any = None  # What `prepare` of the study makes.

    @property
    def identity(self) -> dict[str, object]:
        """The settings under which arms are the same arms: others begin anew."""
        asked = {name: getattr(self, name) for name in ("epochs", "limit", "quick", "backbone", "seconds", "network")}
        found = {"data": self.sets.name, **asked, "images": len(self.sets.train.x)}
        return {name: value for name, value in found.items() if value is not None or name in ("epochs", "limit")}


@dataclass(frozen=True)
class Page:
    """What a study makes of its records."""

    claims: Sequence[Claim]  # Of the document, if there is one.
    judged: str  # How claims were judged.
    table: Table  # Of all arms; the screen shows it too.
    # Draws the section with the figure, where there are arms for it.
    figure: Callable[[Outputs], Section] | None = None
    remarks: Sequence[str] = ()  # In what the run differs from the document's.
    results: Mapping[str, Any] = field(default_factory=dict)  # Further parts of `results.json`.
    settings: Mapping[str, Any] = field(default_factory=dict)  # Further settings there.


@dataclass(frozen=True)
class ImageStudy:
    """An image study."""

    title: str  # Of its page.
    lead: str  # What the page opens with.
    arms: Callable[[Work], Sequence[Arm]]  # Its arms, in order of importance.
    page: Callable[[Work, Arms], Page]  # What it makes of what was done.
    prepare: Callable[[Work], Any] = lambda work: None  # Makes the material of its arms.
    options: Sequence[str] = ()  # What it can be asked for that not every study can.
    do: Callable[..., Arms] = run_arms  # Does the arms; `run_arms` unless a study does it another way.

    def run(
        self, output: Path, *, quick: bool = False, seed: int = 0, data: Path | None = None, **options: Any
    ) -> Path:
        """Run the study into a folder: read the images, do the arms, write what comes of them; return the path of its page.

        `options` are those of `Work`.
        """
        of_some = {"backbone", "seconds", "network", "repeats"} - {*self.options}
        taken = {each.name for each in fields(Work)} - {"sets", "material", *of_some}
        options = {name: value for name, value in options.items() if value is not None}
        if lacking := [name for name in options if name not in taken]:
            raise ValueError(f"This study has no option {lacking[0]}. Leave it out.")
        quick = quick or data is None
        sets = load_images(data, quick=quick, known=options.get("known"), limit=options.get("limit"))
        work = Work(output, quick, seed, data, **options, sets=sets)
        work = replace(work, material=self.prepare(work))
        found = self.do(self.arms(work), work.output, settings=work.identity, minutes=work.minutes, only=work.arms)
        if not found.done:
            raise ValueError("No arm was finished: there is nothing to show. Give more minutes, or fewer epochs.")
        page, outputs = self.page(work, found), Outputs(work.output)
        # Before anything is drawn: a figure that fails must not cost the numbers.
        outputs.results(
            {
                "arms": found.done,
                "not_run": found.not_run,
                "claims": page.claims,
                "sets": sets.describe(),
                "settings": {**work.identity, "seed": work.seed, **page.settings},
                **page.results,
            }
        )
        print_table(page.table)
        said = [Section("What the document says", claims_table(list(page.claims), page.judged))] if page.claims else []
        drawn = [page.figure(outputs)] if page.figure else []
        outputs.sections += [*said, *drawn, Section("All arms", page.table), sets_section(sets, found, page.remarks)]
        return outputs.page(self.title, self.lead)


def with_interval(value: Sequence[float | None] | None) -> str | None:
    """Return `[value, low, high]` of a record as text; None stays None.

    Example:
        >>> with_interval([0.91234, 0.9, 0.92]).split()
        ['0.9123', '[0.9000,', '0.9200]']
    """
    if value is None or value[0] is None:
        return None
    middle, *ends = (None if each is None else f"{each:.4f}" for each in value)
    # Spaces that do not break keep a value and its interval on one line.
    return middle if None in ends or not ends else f"{middle}\u00a0[{ends[0]},\u00a0{ends[1]}]"


def at(*keys: str) -> Callable[[Any], Any]:
    """Return what reads a place of a record, keys one inside the other; it gives None where there is nothing."""
    return lambda record: reduce(lambda found, key: (found or {}).get(key), keys, record)


def arms_table(
    records: Mapping[str, Record], columns: Mapping[str, Callable[[Record], object]], caption: str = ""
) -> Table:
    """Return a row for each arm: its name, and what each column's function makes of its record, `[value, low, high]` as text."""
    cells = {name: [read(record) for read in columns.values()] for name, record in records.items()}
    rows = [(name, *(with_interval(v) if isinstance(v, list) else v for v in own)) for name, own in cells.items()]
    return Table(("arm", *columns), rows, caption)


def sets_section(sets: ImageSets, arms: Arms, remarks: Sequence[str] = ()) -> Section:
    """Return the section about what the study ran on, how long it took, and what it did not get to."""
    device = ", ".join(sorted({record["made"]["device"] for record in arms.done.values() if "made" in record}))
    minutes = sum(float(record["arm_seconds"]) for record in arms.done.values()) / 60
    took = f"{len(arms.done)} arms took {minutes:.1f} minutes{device and f' on {device}'}."
    text = Text(took, *remarks, *(f"Images: {note}." for note in sets.notes))
    lists = [Table(("set", "part", "images", "remark"), sets.describe(), "Sets")]
    if arms.not_run:
        lists.append(Table(("arm", "why"), list(arms.not_run.items()), "Arms that were not run"))
    return Section("What it ran on", text, *lists)
