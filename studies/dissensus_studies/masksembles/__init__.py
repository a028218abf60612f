"""Study `masksembles`: from one network to an ensemble by a dial.

Expected width and overlap of masks against simulation; diversity against accuracy for scales from 1 to 5, members as large as
the single network; calibration. Single networks, MC dropout and a deep ensemble of as many members stand at the ends of the
dial.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from statistics import fmean

from dissensus.html import Section, Table
from dissensus_studies.harness.arm_log import Arms, Record
from dissensus_studies.harness.claims import Claim
from dissensus_studies.harness.figures import Drawing, sweep
from dissensus_studies.harness.image_pages import arms_table, with_interval
from dissensus_studies.harness.image_study import ImageStudy, Page, Work
from dissensus_studies.harness.statistics import Summary
from dissensus_studies.masksembles.arms import EPOCHS, NUM_MEMBERS, SCALES, arms_of
from dissensus_studies.masksembles.laws import laws

DEEP = "deep ensemble"
WHOLE = ", whole batches"
# How far simulated overlaps may lie from the approximation, which is a little low for few ones.
OVERLAP_TOLERANCE = 0.01
NUMBERS: Mapping[str, Callable[[Record], float]] = {
    "accuracy": lambda record: record["test"]["accuracy"][0],
    "mean member": lambda record: fmean(record["members"]),
    "diversity": itemgetter("diversity"),
    "ECE": itemgetter("ece"),
    "NLL": lambda record: record["test"]["nll"][0],
}
_LAWS = (
    ("width", "expected", "expected_width"),
    ("width", "simulated", "width"),
    ("overlap", "expected", "expected_overlap"),
    ("overlap", "simulated", "overlap"),
)

Families = Mapping[str, Sequence[Record]]


def in_order(found: Arms) -> dict[str, list[Record]]:
    """Return the records of all seeds by what was trained: masks by their scale, then what they are compared with."""
    families: dict[str, list[Record]] = {}
    for record in sorted(found.done.values(), key=lambda record: record["setting"]["scale"] or math.inf):
        families.setdefault(record["family"], []).append(record)
    return families


def scale_families(families: Families, batches: str = "") -> dict[float, Sequence[Record]]:
    """Return the records of grown masks by scale, in order; at scale 1 whole batches are the same as shares of them."""
    names = {scale: f"masks S={scale:g}{batches}" for scale in SCALES}
    if batches and names[1.0] not in families:
        names[1.0] = "masks S=1"
    return {scale: families[name] for scale, name in names.items() if name in families}


def mask_claims(families: Families, measured_laws: Sequence[Mapping[str, float]]) -> list[Claim]:
    """Judge what the document says, as far as its arms are there."""
    gap = max(abs(row["overlap"] - row["expected_overlap"]) for row in measured_laws)
    claims = [
        Claim.checked(
            "The overlap of masks is 1 / (2 S - 1) in a wide range of S.",
            f"The mean simulated overlap differs by {gap:.4f} at most.",
            gap < OVERLAP_TOLERANCE,
        )
    ]
    for words, batches in (("", ""), (", members on whole batches", WHOLE)):
        scales = scale_families(families, batches)
        if any(scale > 1.0 for scale in scales):
            claims += _dial_claims(scales, families.get(DEEP, ()), words)
    return claims


def _dial_claims(scales: Mapping[float, Sequence[Record]], deep: Sequence[Record], words: str) -> list[Claim]:
    """Judge what the document says of masks over scales."""
    diversity, error = (
        {scale: fmean(record[name] for record in found) for scale, found in scales.items()}
        for name in ("diversity", "ece")
    )
    claims = []
    if 1.0 in diversity:
        one = diversity[1.0]
        statement = f"At S = 1 the members are one model: diversity 0{words}."
        claims.append(Claim.checked(statement, f"Diversity {one:.4f}.", one == 0.0))
    rises = all(after > before for before, after in pairwise(diversity.values()))
    claims.append(Claim.checked(f"Diversity rises with S{words}.", _listed(diversity), rises))
    if not deep:
        return claims
    best, single, of_deep = (fmean(record[name] for record in deep) for name in ("diversity", "member_ece", "ece"))
    most, last = max(diversity.values()), max(error)
    floor = max(record.get("ece_floor", 0.0) for record in deep)
    chance = f"a single network {single:.4f}; by chance alone {floor:.4f}."
    least, compared = min(error[min(error)], single), (error[last], of_deep, single)
    return [
        *claims,
        Claim.checked(
            f"Ensembles have the largest diversity, and masks come close to it{words}.",
            f"Deep ensemble {best:.3f}, masks {most:.3f} at most: {most / best:.0%} of it.",
            0.5 * best < most <= best,
        ),
        Claim.checked(
            f"The calibration error falls with S{words}.",
            f"{_listed(error)}; {chance}",
            error[last] < least,
            noise=abs(error[last] - least) < floor,
        ),
        Claim.checked(
            f"It falls towards that of the deep ensemble{words}.",
            f"{error[last]:.4f} at S = {last:g}, deep ensemble {of_deep:.4f}, {chance}",
            abs(error[last] - of_deep) < abs(single - of_deep) / 2,
            noise=max(compared) - min(compared) < floor,
        ),
    ]


def _listed(values: Mapping[float, float]) -> str:
    return ", ".join(f"{value:.4f} at S = {scale:g}" for scale, value in values.items())


def page(work: Work, found: Arms) -> Page:
    """Return what the study makes of its records."""
    families = in_order(found)
    measured_laws = laws(draws=1000 if work.quick else 5000)
    runs = min(map(len, families.values()))
    rows = [[name, *(fmean(map(read, records)) for read in NUMBERS.values())] for name, records in families.items()]
    return Page(
        mask_claims(families, measured_laws),
        f"Means over {runs} run{'s' if runs > 1 else ''} and all pairs of members are compared as they are. Diversity is the share of "
        "test images on which two members predict different classes, divided by the error rate of the pair.",
        lambda outputs: [
            *(drawing.section(outputs) for drawing in _drawings(families, measured_laws)),
            Section("All arms", *_tables(families, found)),
        ],
        (("arm", *NUMBERS), rows),
        _remarks(work),
        {"laws": measured_laws},
    )


def _drawings(families: Families, measured_laws: Sequence[Mapping[str, float]]) -> list[Drawing]:
    """Return the laws of masks against simulation, and what masks do over the scale beside other kinds."""
    points = [(f"{row['num_masks']:g} masks", row["scale"], dict(row)) for row in measured_laws]
    columns = {f"{name} of masks, {part}": itemgetter(key) for name, part, key in _LAWS}
    found = [sweep("masksembles_laws", "Figure 1: theory and simulation", points, columns, "scale S")]
    masked = [
        (name, scale, record)
        for name, batches in (("masks", ""), ("whole batches", WHOLE))
        for scale, records in scale_families(families, batches).items()
        for record in records
    ]
    levels = {name: records for name, records in families.items() if "masks" not in name}
    if masked:
        title = "Accuracy, diversity and calibration over the scale"
        found.append(sweep("masksembles_scales", title, masked, NUMBERS, "scale S", levels=levels))
    return found


def _tables(families: Families, found: Arms) -> list[Table]:
    columns: dict[str, Callable[[Record], object]] = {
        "accuracy": lambda record: with_interval(record["test"]["accuracy"]),
        "mean member": lambda record: with_interval(record["test"].get("member_accuracy")),
        "diversity": lambda record: round(record["diversity"], 4),
        "ECE": lambda record: with_interval(record["test"]["ece"]),
        "ECE of a member": lambda record: round(record["member_ece"], 4),
        "NLL": lambda record: with_interval(record["test"]["nll"]),
        "parameters": itemgetter("parameters"),
        "of a member": itemgetter("member_parameters"),
        "s": lambda record: round(record["training"]["seconds"], 1),
    }
    tables = [arms_table(found.done, columns, "Test images; intervals are 95 % over images.")]
    rows = [
        (name, *(str(Summary(tuple(map(read, records)))) for read in NUMBERS.values()))
        for name, records in families.items()
        if len(records) > 1
    ]
    return [*tables, Table(("arm", *NUMBERS), rows, "Means over runs ± standard errors")] if rows else tables


def _remarks(work: Work) -> list[str]:
    network = (
        "A small convolutional network; masks act behind every activation but the stem's"
        if work.quick
        else f"ResNet-18 for small images, {work.epochs or EPOCHS} epochs of one cycle up to a rate of 0.1, batches of 128; masks act "
        "inside its blocks"
    )
    easy = "On a few hundred easy digits single errors decide: this version shows that the study runs."
    return [
        f"{network}, and the layers are widened so that a member keeps the network's own channels.",
        *([easy] if work.quick else []),
        "With masks each example of a batch meets one member, so a member sees a quarter of what a member of the deep ensemble sees, "
        "except where whole batches are named. MC dropout drops at the same places and has as many draws as there are masks.",
    ]


run = ImageStudy(
    "From one network to an ensemble by a dial",
    f"One network with {NUM_MEMBERS} masks over its channels is an ensemble. The scale S says how little the masks overlap: at 1 "
    "all members are one network, at large S they share next to nothing.",
    arms_of,
    page,
).run
