"""Study `masksembles`: from one network to an ensemble by a dial.

Expected width and overlap of masks against simulation; diversity against accuracy for scales from 1 to 5, members as large as
the single network; calibration. Single networks, MC dropout and a deep ensemble of as many members stand at the ends of the
dial. With `setting="imagenet"`, the calibration curves on a folder of ImageNet's layout.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from dissensus.html import Section, Table
from dissensus_studies.arm_log import Arms, Record, run_arms
from dissensus_studies.claims import Claim, claims_table
from dissensus_studies.image_pages import arms_table, over_seeds, sets_section, with_interval
from dissensus_studies.image_sets import ImageSets, imagenet_folder, load_images
from dissensus_studies.masksembles_arms import EPOCHS, NUM_MEMBERS, SCALES, mask_arm, settings_of
from dissensus_studies.masksembles_figures import calibration_figure, diversity_figure, laws, laws_figure
from dissensus_studies.outputs import Outputs, print_table
from dissensus_studies.repeats import Summary

DEEP = "deep ensemble"
WHOLE = ", whole batches"
# How far simulated overlaps may lie from the approximation, which is a little low for few ones.
OVERLAP_TOLERANCE = 0.01

Families = Mapping[str, Sequence[Record]]


def run(
    output: Path,
    *,
    quick: bool = False,
    seed: int = 0,
    data: Path | None = None,
    epochs: int | None = None,
    minutes: float | None = None,
    limit: int | None = None,
    arms: Sequence[str] | None = None,
    known: str | None = None,
    setting: str | None = None,
) -> Path:
    """Run the study; see `dissensus_studies.Study.run`.

    Args:
        output: Folder for the results. A study that was interrupted goes on from what `arms.jsonl` there has.
        quick: Few epochs of a narrow network.
        seed: Of the first repeat; others follow it.
        data: Folder with an image set (see `image_sets.load_images`); digits that come along without one.
        epochs: Epochs instead of 40.
        minutes: Begin no arm after this time.
        limit: Train on so many images.
        arms: Run only arms whose names fit; see `arm_log.chosen`.
        known: Which image set of the folder.
        setting: "imagenet" for calibration on ImageNet.
    """
    if setting == "imagenet":
        from dissensus_studies.masksembles_imagenet import run_imagenet

        folder = imagenet_folder(data, known=known, quick=quick)
        return run_imagenet(
            output, data=folder, epochs=epochs, minutes=minutes, limit=limit, arms=arms, seed=seed
        )
    if setting is not None:
        raise ValueError(f"`setting` must be 'imagenet' or left out; got {setting!r}.")
    quick = quick or data is None
    sets = load_images(data, quick=quick, known=known, limit=limit)
    outputs = Outputs(output)
    wanted = [mask_arm(each, sets, output, epochs=epochs, quick=quick) for each in settings_of(quick, seed)]
    identity = sets.identity(epochs=epochs, limit=limit, quick=quick)
    found = run_arms(wanted, output, settings=identity, minutes=minutes, only=arms)
    if not found.done:
        raise ValueError("No arm was finished: there is nothing to show. Give more minutes, or fewer epochs.")
    families = in_order(found)
    measured_laws = laws(draws=1000 if quick else 5000)
    claims = mask_claims(families, measured_laws)
    outputs.sections += [
        Section("What the document says", claims_table(claims, _judged(families))),
        _laws_section(outputs, measured_laws),
        *_diversity_section(outputs, families, sets),
        *_calibration_section(outputs, families),
        Section("All arms", *_tables(families, found)),
        sets_section(sets, found, _remarks(epochs, quick)),
    ]
    outputs.results(
        {
            "arms": found.done,
            "not_run": found.not_run,
            "claims": claims,
            "laws": measured_laws,
            "sets": sets.describe(),
            "settings": {**identity, "seed": seed},
        }
    )
    print_table(("arm", "accuracy", "mean member", "diversity", "ECE", "NLL"), _rows(families))
    return outputs.page(
        "From one network to an ensemble by a dial",
        f"One network with {NUM_MEMBERS} masks over its channels is an ensemble. The scale S says how little the masks overlap: at 1 "
        "all members are one network, at large S they share next to nothing.",
    )


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
        if sum(scale > 1.0 for scale in scales):
            claims += _dial_claims(scales, families.get(DEEP, ()), words)
    return claims


def _dial_claims(scales: Mapping[float, Sequence[Record]], deep: Sequence[Record], words: str) -> list[Claim]:
    """Judge what the document says of masks over scales."""
    diversity = {scale: fmean(record["diversity"] for record in found) for scale, found in scales.items()}
    error = {scale: fmean(record["ece"] for record in found) for scale, found in scales.items()}
    claims = []
    if 1.0 in diversity:
        claims.append(
            Claim.checked(
                f"At S = 1 the members are one model: diversity 0{words}.",
                f"Diversity {diversity[1.0]:.4f}.",
                diversity[1.0] == 0.0,
            )
        )
    claims.append(
        Claim.checked(f"Diversity rises with S{words}.", _listed(diversity), _rises(list(diversity.values())))
    )
    return claims + (_against_deep(diversity, error, deep, words) if deep else [])


def _against_deep(
    diversity: Mapping[float, float], error: Mapping[float, float], deep: Sequence[Record], words: str
) -> list[Claim]:
    best, most = fmean(record["diversity"] for record in deep), max(diversity.values())
    single = fmean(record["member_ece"] for record in deep)
    floor = max(record.get("ece_floor", 0.0) for record in deep)
    of_deep = fmean(record["ece"] for record in deep)
    last = max(error)
    return [
        Claim.checked(
            f"Ensembles have the largest diversity, and masks come close to it{words}.",
            f"Deep ensemble {best:.3f}, masks {most:.3f} at most: {most / best:.0%} of it.",
            0.5 * best < most <= best,
        ),
        Claim.checked(
            f"The calibration error falls with S{words}.",
            f"{_listed(error)}; a single network {single:.4f}; by chance alone {floor:.4f}.",
            error[last] < min(error[min(error)], single),
            noise=abs(error[last] - min(error[min(error)], single)) < floor,
        ),
        Claim.checked(
            f"It falls towards that of the deep ensemble{words}.",
            f"{error[last]:.4f} at S = {last:g}, deep ensemble {of_deep:.4f}, a single network {single:.4f}; by chance alone {floor:.4f}.",
            abs(error[last] - of_deep) < abs(single - of_deep) / 2,
            noise=max(error[last], of_deep, single) - min(error[last], of_deep, single) < floor,
        ),
    ]


def _rises(values: Sequence[float]) -> bool:
    return all(after > before for before, after in pairwise(values))


def _listed(values: Mapping[float, float]) -> str:
    return ", ".join(f"{value:.4f} at S = {scale:g}" for scale, value in values.items())


def _judged(families: Families) -> str:
    runs = min(map(len, families.values()))
    return (
        f"Means over {runs} run{'s' if runs > 1 else ''} and all pairs of members are compared as they are. Diversity is the share of "
        "test images on which two members predict different classes, divided by the error rate of the pair."
    )


def _laws_section(outputs: Outputs, measured: Sequence[Mapping[str, float]]) -> Section:
    return Section(
        "Figure 1: theory and simulation",
        outputs.picture(
            "masksembles_laws",
            laws_figure(measured),
            "width after trimming and overlap of masks over the scale",
            "32 ones a mask. Lines: the expected width M S (1 - (1 - 1/S)^N), and 1 / (2 S - 1). Marks: masks drawn as the "
            "document draws them; bars are standard deviations.",
        ),
    )


def _diversity_section(outputs: Outputs, families: Families, sets: ImageSets) -> list[Section]:
    single = [
        accuracy
        for record in families.get(DEEP, families.get("masks S=1", ()))
        for accuracy in record["members"]
    ]
    if not single:
        return []
    split = any(scale > 1.0 for scale in scale_families(families))
    shown = {
        name: found
        for name, found in families.items()
        if not name.startswith("thin") and not (split and name.endswith(WHOLE))
    }
    figure = diversity_figure(shown, single, sets.num_classes)
    return [
        Section(
            "Figure 2: diversity against accuracy",
            outputs.picture(
                "masksembles_diversity",
                figure,
                "diversity of pairs of members against their accuracy",
                "Every point is a pair. Dashes: what that pair would have if one member were a noisy copy of the other (worst), or "
                "erred independently of it (best).",
            ),
        )
    ]


def _calibration_section(outputs: Outputs, families: Families) -> list[Section]:
    curves = {}
    if DEEP in families:
        curves["single network"] = families[DEEP][0]["member_curve"]
    order = [name for name in families if name.startswith("MC")]
    batches = "" if any(scale > 1.0 for scale in scale_families(families)) else WHOLE
    order += [f"masks S={scale:g}{batches}" for scale in scale_families(families, batches) if scale > 1.0]
    order += [DEEP] if DEEP in families else []
    curves |= {name: families[name][0]["curve"] for name in order}
    if not curves:
        return []
    return [
        Section(
            "Figure 3: calibration",
            outputs.picture(
                "masksembles_calibration",
                calibration_figure(curves),
                "accuracy against confidence",
                "The first run of each. Above the diagonal predictions are too careful, below it too sure; the right side weighs the "
                "difference by how many images there are.",
            ),
        )
    ]


def _tables(families: Families, found: Arms) -> list[Table]:
    columns = {
        "accuracy": lambda record: with_interval(record["test"]["accuracy"]),
        "mean member": lambda record: with_interval(record["test"].get("member_accuracy")),
        "diversity": lambda record: round(record["diversity"], 4),
        "ECE": lambda record: with_interval(record["test"]["ece"]),
        "ECE of a member": lambda record: round(record["member_ece"], 4),
        "NLL": lambda record: with_interval(record["test"]["nll"]),
        "parameters": lambda record: record["parameters"],
        "of a member": lambda record: record["member_parameters"],
        "s": lambda record: round(record["training"]["seconds"], 1),
    }
    tables = [arms_table(found.done, columns, "Test images; intervals are 95 % over images.")]
    if max(map(len, families.values())) > 1:
        rows = [
            (name, *map(str, _summaries(records))) for name, records in families.items() if len(records) > 1
        ]
        tables.append(
            Table(
                ("arm", "accuracy", "mean member", "diversity", "ECE", "NLL"),
                rows,
                "Means over runs ± standard errors",
            )
        )
    return tables


def _summaries(records: Sequence[Record]) -> list[Summary]:
    reads = (
        lambda record: record["test"]["accuracy"][0],
        lambda record: fmean(record["members"]),
        lambda record: record["diversity"],
        lambda record: record["ece"],
        lambda record: record["test"]["nll"][0],
    )
    return [over_seeds([(0, record) for record in records], read)[0] for read in reads]


def _rows(families: Families) -> list[list[object]]:
    return [[name, *(summary.mean for summary in _summaries(records))] for name, records in families.items()]


def _remarks(epochs: int | None, quick: bool) -> list[str]:
    trained = epochs or EPOCHS
    network = (
        "A small convolutional network; masks act behind every activation but the stem's"
        if quick
        else f"ResNet-18 for small images, {trained} epochs of one cycle up to a rate of 0.1, batches of 128; masks act inside its blocks"
    )
    return [
        f"{network}, and the layers are widened so that a member keeps the network's own channels.",
        *(
            ["On a few hundred easy digits single errors decide: this version shows that the study runs."]
            if quick
            else []
        ),
        "With masks each example of a batch meets one member, so a member sees a quarter of what a member of the deep ensemble sees, "
        "except where whole batches are named. MC dropout drops at the same places and has as many draws as there are masks.",
    ]
