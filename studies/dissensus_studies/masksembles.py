"""Study `masksembles`: from one network to an ensemble by a dial.

Laws of masks against simulation; diversity, accuracy and calibration for scales from 1 to 5, members as large as the single network,
with single networks, MC dropout and a deep ensemble of as many members at the ends of the dial.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise, product
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dissensus import masks, metrics
from dissensus.architectures import resnet18
from dissensus.members import BatchEnsemble, DeepEnsemble, Masksembles, MCDropout, Members
from dissensus.randomness import derive, seeded
from dissensus_studies.harness.arm_log import Arm, Arms, Record, file_name
from dissensus_studies.harness.claims import Claim, verdict_over
from dissensus_studies.harness.figures import sweep
from dissensus_studies.harness.image_arms import (
    BATCH_SIZE,
    fit_images,
    measure,
    on_pixels,
    record_of,
    save_outputs,
    summary_line,
)
from dissensus_studies.harness.image_study import ImageStudy, Page, Work, arms_table, at
from dissensus_studies.harness.statistics import Summary, ece_floor
from dissensus_studies.recorded import as_floats, made, value_of, whole_runs, with_half

NUM_MEMBERS = 4
SCALES = (1.0, 2.0, 3.0, 4.0, 5.0)
DROPOUT = 0.2
EPOCHS, QUICK_EPOCHS = 40, 10
RATE = 0.1
REPEATS = 3
QUICK_BATCH = 32
BINS = 15

Kind = Literal["deep", "masks", "dropout", "batch"]


@dataclass(frozen=True)
class MaskSetting:
    """One ensemble of the study."""

    kind: Kind  # Deep ensemble, masks, MC dropout or BatchEnsemble.
    scale: float | None = None  # Of the masks.
    grow: bool = True  # Whether masked layers are widened, so that members are as large as the single network.
    # Whether members of masks train on shares of a batch, as the document's, or on all of it, as a deep ensemble's do.
    batches: Literal["split", "whole"] = "split"
    seed: int = 0  # Of the run.

    @property
    def family(self) -> str:
        """What it is but for the seed, such as "thin masks S=2, whole batches"."""
        names = {"deep": "deep ensemble", "dropout": f"MC dropout p={DROPOUT:g}", "batch": "BatchEnsemble"}
        if self.kind != "masks":
            return names[self.kind]
        last = ", whole batches" if self.batches == "whole" else ""
        return f"{'' if self.grow else 'thin '}masks S={self.scale:g}{last}"

    @property
    def name(self) -> str:
        """Name of the arm."""
        return f"{self.family} seed={self.seed}"


def settings_of(quick: bool, seed: int) -> list[MaskSetting]:
    """Return all ensembles in order of importance: everything once, then again with other seeds."""
    # The ends of the dial first: they are what the claims are about.
    scales = (SCALES[0], SCALES[-1], *SCALES[1:-1])
    once = [
        MaskSetting("deep"),
        *(MaskSetting("masks", scale) for scale in scales),
        MaskSetting("dropout"),
        *(MaskSetting("masks", scale, batches="whole") for scale in scales[1:]),
        MaskSetting("batch"),
        *(MaskSetting("masks", scale, grow=False) for scale in SCALES[1:]),
    ]
    if quick:
        # A few hundred images make so few steps that a quarter of each batch would not train a member.
        masks = [MaskSetting("masks", scale, batches="whole") for scale in SCALES]
        once = [MaskSetting("deep"), *masks, MaskSetting("dropout")]
    return [replace(each, seed=seed + repeat) for repeat in range(1 if quick else REPEATS) for each in once]


def train_and_measure(setting: MaskSetting, work: Work) -> Record:
    """Train one ensemble; return its record."""
    sets, quick = work.sets, work.quick
    network = small_network if quick else resnet18
    members = make_members(setting, lambda: on_pixels(network(sets.num_classes), sets), NUM_MEMBERS)
    epochs, batch_size = (QUICK_EPOCHS, QUICK_BATCH) if quick else (EPOCHS, BATCH_SIZE)
    training: dict[str, Any] = {
        "all_train": True,
        "watch": "nothing",
        "lr": RATE,
        "batch_size": batch_size,
        "part": "net",
    }
    run = fit_images(members, sets, seed=setting.seed, epochs=work.epochs or epochs, **training)
    record = measure(members, sets, name=setting.name, seed=setting.seed)
    logits = save_outputs(members, sets, work.output / "outputs" / f"{file_name(setting.name)}.npz")
    record |= {
        **record_of(setting, run),
        "family": setting.family,
        "parameters": sum(parameter.numel() for parameter in members.parameters()),
        "member_parameters": sum(parameter.numel() for parameter in members.member(0).parameters()),
        **ensemble_numbers(logits, sets.test.y),
    }
    record["line"] = f"{summary_line(record)}, diversity {record['diversity']:.4f}"
    return record


def small_network(classes: int) -> nn.Module:
    """Make the network of the quick study: three convolutions and two linear layers, on images of a quarter of the area."""
    layers: list[nn.Module] = [nn.AvgPool2d(2)]
    for before, width, stride in ((3, 16, 1), (16, 32, 2), (32, 32, 2)):
        convolution = nn.Conv2d(before, width, kernel_size=3, stride=stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes)]
    return nn.Sequential(*layers, *head)


# What image studies train, by the name that users say.
NETWORKS: Mapping[str, Callable[[int], nn.Module]] = {"small": small_network, "resnet18": resnet18}


def make_members(setting: MaskSetting, make: Callable[[], nn.Module], num_members: int) -> Members:
    """Make an untrained ensemble; all kinds of one seed start from the same first network."""
    if setting.kind == "deep":
        return DeepEnsemble(make, num_members, setting.seed)
    if setting.kind == "batch":
        return BatchEnsemble(make, num_members, setting.seed)
    with seeded(derive(setting.seed, "initial weights", 0)):
        net = make()
    if setting.kind == "dropout":
        return MCDropout(with_dropout(net, DROPOUT), num_members, setting.seed)
    assert setting.scale is not None
    return Masksembles(net, num_members, setting.scale, seed=setting.seed, grow=setting.grow, batches=setting.batches)


def with_dropout(net: nn.Module, rate: float) -> nn.Module:
    """Put dropout where masks would be, in place; return the network."""
    for layer in Masksembles(net, 2, 1.0, grow=True).masked_layers:
        parent, _, name = layer.name.rpartition(".")
        owner = net.get_submodule(parent)
        setattr(owner, name, nn.Sequential(owner.get_submodule(name), nn.Dropout(rate)))
    return net


def ensemble_numbers(logits: Tensor, labels: Tensor) -> Record:
    """Return accuracy and diversity of every pair of members, calibration of the ensemble and of its members."""
    predictions, probs = logits.argmax(-1), logits.double().softmax(-1)
    accuracies = [float(accuracy) for accuracy in (predictions == labels).double().mean(1)]
    pairs: list[dict[str, Any]] = [
        {
            "members": [a, b],
            "accuracy": (accuracies[a] + accuracies[b]) / 2,
            "disagreement": metrics.disagreement(predictions[a], predictions[b]),
            "diversity": metrics.pair_diversity(predictions[a], predictions[b], labels),
        }
        for a, b in combinations(range(len(logits)), 2)
    ]
    return {
        "pairs": pairs,
        "diversity": sum(pair["diversity"] for pair in pairs) / len(pairs),
        "curve": _curve(probs.mean(0), labels),
        "member_curve": _curve(probs[0], labels),
        "member_ece": sum(float(metrics.ece(member, labels, BINS)) for member in probs) / len(probs),
        "ece": float(metrics.ece(probs.mean(0), labels, BINS)),
        "ece_floor": ece_floor(probs.mean(0).amax(-1).numpy(force=True), BINS),
    }


def _curve(probs: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """Return a reliability curve, as figures of the results draw it from the record."""
    found = metrics.reliability_curve(probs, labels, bins=BINS)
    return {n: [round(float(each), 6) for each in getattr(found, n)] for n in ("confidence", "accuracy", "weight")}


ONES = 32
LAW_SCALES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
NUM_MASKS = (8, 4, 2)


def simulate(scale: float, num_masks: int, draws: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw masks as the document does, each of `ONES` of the slots; return trimmed widths and overlaps of the first two."""
    keys = np.random.default_rng(0).random((draws, num_masks, round(ONES * scale)))
    on = keys.argsort(-1).argsort(-1) < ONES
    shared = (on[:, 0] & on[:, 1]).sum(1)
    return on.any(1).sum(1), shared / (2 * ONES - shared)


def laws(draws: int) -> list[dict[str, float]]:
    """Return width and overlap for each scale and number of masks, expected and simulated."""
    rows = []
    for num_masks, scale in product(NUM_MASKS, LAW_SCALES):
        width, overlap = (float(found.mean()) for found in simulate(scale, num_masks, draws))
        expected = {
            "expected_width": masks.expected_width(ONES, scale, num_masks),
            "expected_overlap": masks.expected_iou(scale),
        }
        rows.append({"num_masks": num_masks, "scale": scale, **expected, "width": width, "overlap": overlap})
    return rows


DEEP = "deep ensemble"
WHOLE = ", whole batches"
# How far simulated overlaps may lie from the approximation, which is a little low for few ones.
OVERLAP_TOLERANCE = 0.01
# And simulated widths from what is expected of them: chance alone.
WIDTH_TOLERANCE = 0.005
# Masks that reach so much of an ensemble's diversity come close to it.
CLOSE = 0.8
_HOW = (
    f"ResNet-18 for small images, {EPOCHS} epochs of one cycle (quick: a small network on a few hundred digits, to see that it runs); "
    "masked layers are widened so that a member keeps the network's own channels. With masks each example of a batch meets one member, "
    "except where whole batches are named. MC dropout drops at the same places and has as many draws as there are masks."
)
NUMBERS: Mapping[str, Callable[[Record], float]] = {
    "accuracy": lambda record: value_of(record["test"]["accuracy"]),
    "mean member": lambda record: fmean(record["members"]),
    "diversity": itemgetter("diversity"),
    "ECE": itemgetter("ece"),
    "NLL": lambda record: value_of(record["test"]["nll"]),
}
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
    if names[1.0] not in families:
        names[1.0] = "masks S=1"
    return {scale: families[name] for scale, name in names.items() if name in families}


def mask_claims(families: Families, measured_laws: Sequence[Mapping[str, float]]) -> list[Claim]:
    """Judge what the document says, as far as its arms are there."""
    gap = max(abs(row["overlap"] - row["expected_overlap"]) for row in measured_laws)
    law, text = "The overlap of masks is 1 / (2 S - 1) in a wide range of S.", "The mean simulated overlap differs by"
    widths = max(abs(row["width"] / row["expected_width"] - 1) for row in measured_laws)
    size = f"Simulated widths differ by {widths:.2%} at most."
    claims = [
        Claim.checked("Of M S channels M S (1 - (1 - 1 / S)^N) are used (equation 4).", size, widths < WIDTH_TOLERANCE),
        Claim.checked(law, f"{text} {gap:.4f} at most.", gap < OVERLAP_TOLERANCE),
    ]
    for words, batches in (("", ""), (", members on whole batches", WHOLE)):
        scales = scale_families(families, batches)
        if any(scale > 1.0 for scale in scales):
            claims += _dial_claims(scales, families.get(DEEP, ()), words)
    return claims


def _dial_claims(scales: Mapping[float, Sequence[Record]], deep: Sequence[Record], words: str) -> Iterator[Claim]:
    """Judge what the document says of masks over scales."""
    by_seed = {scale: [record["diversity"] for record in found] for scale, found in scales.items()}
    diversity = {scale: fmean(values) for scale, values in by_seed.items()}
    error = {scale: fmean(record["ece"] for record in found) for scale, found in scales.items()}
    if 1.0 in diversity:
        statement = f"At S = 1 the members are one model: diversity 0{words}."
        yield Claim.checked(statement, f"Diversity {diversity[1.0]:.4f}.", diversity[1.0] == 0.0)
    steps = [_higher(after, before) for before, after in pairwise(by_seed.values())]
    yield Claim(f"Diversity rises with S{words}.", _listed(diversity), verdict_over(steps))
    if not deep:
        return
    best, single, of_deep = (fmean(record[name] for record in deep) for name in ("diversity", "member_ece", "ece"))
    most, last, least = max(diversity.values()), error[max(error)], min(error[min(error)], single)
    statement = f"Ensembles have the largest diversity, and masks come close to it{words}."
    share = f"Deep ensemble {best:.3f}, masks {most:.3f} at most: {most / best:.0%} of it; {CLOSE:.0%} would be close."
    yield Claim.checked(statement, share, CLOSE * best < most <= best)
    floor = max(record.get("ece_floor", 0.0) for record in deep)
    chance = f"a single network {single:.4f}; by chance alone {floor:.4f}."
    statement, falls = f"The calibration error falls with S{words}.", f"{_listed(error)}; {chance}"
    yield Claim.checked(statement, falls, last < least, noise=abs(last - least) < floor)
    statement = f"It falls towards that of the deep ensemble{words}."
    near, compared = abs(last - of_deep) < abs(single - of_deep) / 2, (last, of_deep, single)
    beside = f"{last:.4f} at S = {max(error):g}, deep ensemble {of_deep:.4f}, {chance}"
    yield Claim.checked(statement, beside, near, noise=max(compared) - min(compared) < floor)


def _higher(after: Sequence[float], before: Sequence[float]) -> bool | None:
    """Return whether the first are higher, seed by seed; None where seeds do not tell. One seed tells what it can."""
    steps = Summary.of(new - old for new, old in zip(after, before, strict=False))
    if len(steps.values) == 1:
        return steps.mean > 0
    return None if steps.sign == 0 else steps.sign > 0


def _listed(values: Mapping[float, float]) -> str:
    return ", ".join(f"{value:.4f} at S = {scale:g}" for scale, value in values.items())


def page(work: Work, found: Arms) -> Page:
    """Return what the study makes of its records."""
    families = in_order(found)
    measured_laws = laws(draws=1000 if work.quick else 5000)
    runs = min(map(len, families.values()))
    columns: dict[str, Callable[[Record], object]] = {
        **NUMBERS,
        "ECE of a member": itemgetter("member_ece"),
        "parameters": itemgetter("parameters"),
        "of a member": itemgetter("member_parameters"),
        "s": at("training", "seconds"),
    }
    masked = [
        (name, scale, record)
        for name, batches in (("masks", ""), ("whole batches", WHOLE))
        for scale, records in scale_families(families, batches).items()
        for record in records
    ]
    levels = {name: records for name, records in families.items() if "masks" not in name}
    title = "Accuracy, diversity and calibration over the scale"
    return Page(
        mask_claims(families, measured_laws),
        f"Means over {runs} run{'s' if runs > 1 else ''} and all pairs of members are compared as they are. Diversity is the share of "
        "test images on which two members predict different classes, divided by the error rate of the pair.",
        arms_table(found.done, columns, "Test images."),
        sweep("masksembles_scales", title, masked, NUMBERS, "scale S", levels=levels).section if masked else None,
        [_HOW],
        {"laws": measured_laws},
    )


run = ImageStudy(
    "From one network to an ensemble by a dial",
    f"One network with {NUM_MEMBERS} masks over its channels is an ensemble. The scale S says how little the masks overlap: at 1 "
    "all members are one network, at large S they share next to nothing.",
    lambda work: [
        Arm(each.name, partial(train_and_measure, each, work), each.family)
        for each in settings_of(work.quick, work.seed)
    ],
    page,
).run


# What the record's arms make of the page, once the ends of the dial and the deep ensemble were trained for the study's own epochs: rows
# of its table, lines of its figures, verdicts. Until then it keeps what it had of shorter runs. Claims are judged on split batches,
# the document's own use of a batch.
TABLE = "masksembles/diversity-and-calibration"
CALIBRATION = "masksembles-calibration"
SINGLE, LAST = "masks S=1", f"masks S={SCALES[-1]:g}"
DROPPED = f"MC dropout p={DROPOUT:g}"
# Families that the page shows, by the names of their rows.
ROWS: Mapping[str, str] = {
    SINGLE: "masks S = 1, the single network",
    **{
        f"masks S={scale:g}{batches}": f"masks S = {scale:g}{batches}"
        for batches in ("", WHOLE)
        for scale in SCALES[1:]
    },
    DROPPED: f"MC dropout, p = {DROPOUT:g}",
    DEEP: DEEP,
}
# Lines of the reliability figure: family, what it is called, which curve and which error of a record, colour.
_DRAWN: Sequence[tuple[str, str, str, str, int]] = (
    (DEEP, "single network", "member_curve", "member_ece", 1),
    (DROPPED, "MC dropout", "curve", "ece", 2),
    *((f"masks S={scale:g}", f"masks S = {scale:g}", "curve", "ece", 5) for scale in SCALES[1:]),
    (DEEP, DEEP, "curve", "ece", 6),
)
_PANELS = ("(accuracy − confidence) × share of images", "accuracy")


def asked_epochs(row: Record) -> int:
    """Return how long an arm of the record was trained."""
    return int(row["setting"]["epochs"] or EPOCHS)


def trained(rows: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the arms that were trained longest by family; empty without the deep ensemble and both ends of the dial."""
    own = whole_runs(rows, "masksembles", "cifar10")
    for epochs in sorted({asked_epochs(row) for row in own if asked_epochs(row) >= EPOCHS}, reverse=True):
        found = [row for row in own if asked_epochs(row) == epochs]
        families = in_order(Arms({row["arm"][0]: {**as_floats(row["numbers"]), "row": row} for row in found}))
        if families.keys() >= {DEEP, SINGLE, LAST}:
            return {name: families[name] for name in ROWS if name in families}
    return {}


def shown(rows: Sequence[Record]) -> list[Record]:
    """Return the record as the page shows it: runs in place of what was read off an earlier page."""
    families = trained(rows)
    if not families:
        return list(rows)
    kept = [row for row in rows if row["table"] != TABLE and row["arm"][0] != CALIBRATION]
    new = [{"table": TABLE, "arm": [ROWS[name]], **_numbers(arms)} for name, arms in families.items()]
    new += [{"table": "masksembles/figures", **line} for line in _reliability(families)]
    return [*kept, *({"study": "masksembles", "source": "run", **row} for row in new)]


def _numbers(arms: Sequence[Record]) -> Record:
    """Return means over seeds, and texts of them with half the width of their interval where there are several."""
    energy = [at("auroc", group, "mean_energy") for group in ("near", "far")]
    own = {name: Summary.of(map(read, arms)) for name, read in NUMBERS.items()}
    own |= {"ECE of a member": Summary.of(arm["member_ece"] for arm in arms)}
    texts = {name: with_half(found) for name, found in own.items()}
    detected = [[value_of(read(arm)) for arm in arms] for read in energy if all(map(read, arms))]
    texts["AUROC of mean energy, near / far"] = " / ".join(with_half(Summary.of(found)) for found in detected)
    means = {name: found.mean for name, found in own.items()} | {"floor": fmean(arm["ece_floor"] for arm in arms)}
    return {"numbers": texts, "means": means}


def _reliability(families: Families) -> Iterator[Record]:
    """Return the lines of the reliability figure: of each ensemble, and of a member of the deep one."""

    def line(panel: str, name: str, colour: int | None, style: str, x: Sequence[float], y: Sequence[float]) -> Record:
        arm, look = [CALIBRATION, panel, name], {"colour": colour, "style": style}
        return {"arm": arm, "line": look, "numbers": {"x": list(x), "y": list(y)}}

    ends = (0.2, 1.0)
    for panel, level in zip(_PANELS, ((0.0, 0.0), ends), strict=True):
        yield line(panel, "", None, "--", ends, level)
        for family, name, curve, error, colour in _DRAWN:
            if arms := families.get(family):
                confidence, accuracy, weight = pooled([arm[curve] for arm in arms])
                gap = panel == _PANELS[0]
                name = f"{name}, ECE {fmean(arm[error] for arm in arms):.3f}" if gap else ""
                heights = (accuracy - confidence) * weight if gap else accuracy
                yield line(panel, name, colour, "o-", confidence.tolist(), heights.tolist())


def pooled(curves: Sequence[Mapping[str, Sequence[float]]]) -> NDArray[np.float64]:
    """Return the reliability curve of all seeds' answers together: confidences, accuracies and weights of its bins."""
    bins: dict[int, list[tuple[float, float, float]]] = {}
    for curve in curves:
        for point in zip(curve["confidence"], curve["accuracy"], curve["weight"], strict=True):
            bins.setdefault(math.ceil(point[0] * BINS), []).append(point)
    points = []
    for _, own in sorted(bins.items()):
        confidences, accuracies, weights = np.array(own).T
        middle = [np.average(each, weights=weights) for each in (confidences, accuracies)]
        points.append([*middle, weights.sum() / len(curves)])
    return np.array(points).T


def epochs_of(rows: Sequence[Record]) -> int:
    """Return for how many epochs the arms of the table were trained."""
    families = trained(rows)
    if families:
        return asked_epochs(families[DEEP][0]["row"])
    return int(next(row["setting"] for row in rows if row["table"] == TABLE).split()[1])


def sentence(rows: Sequence[Record]) -> str:
    """Say what the table rests on."""
    families = trained(rows)
    start = f"ResNet-18 on CIFAR-10, {epochs_of(rows)} epochs of one cycle up to {RATE:g}, bf16"
    if not families:
        row = next(row for row in rows if row["table"] == TABLE)
        return (
            f"{start}, {row['machine']}, torch {row['versions']['torch']}, {row['date']}, one seed. Repeats with other seeds, whole "
            f"batches, BatchEnsemble and thin masks are arms of the study that were not run, nor its own {EPOCHS} epochs."
        )
    seeds = {ROWS[name]: len(arms) for name, arms in families.items()}
    most = max(seeds.values())
    fewer = "; ".join(f"{name}: {count}" for name, count in seeds.items() if count < most)
    return (
        f"{start}: {made([arm['row'] for arms in families.values() for arm in arms])}, {most} seed{'s' if most > 1 else ''}"
        f"{fewer and f' ({fewer})'}.{' ± is half a 95 % interval over seeds.' if most > 1 else ''} BatchEnsemble and thin masks are "
        "arms of the study too."
    )


def batches_sentence(rows: Sequence[Record]) -> str:
    """Say how often members saw an image with split and with whole batches, and what their accuracy was."""
    seen, epochs = (
        {row["arm"][0]: row["numbers"]["mean member"] for row in rows if row["table"] == TABLE},
        epochs_of(rows),
    )
    found = (
        f"**Members see less of a split batch.** In {epochs} epochs a member of a masked network has then seen each image "
        f"{epochs / NUM_MEMBERS:g} times, a member of the deep ensemble {epochs} times; at S = {SCALES[-1]:g} the mean accuracy of "
        f"members is {seen[ROWS[LAST]]}, in the deep ensemble {seen[DEEP]}."
    )
    whole = seen.get(ROWS[f"{LAST}{WHOLE}"])
    return (
        f"{found} On whole batches, where each member sees every image in every epoch, it is {whole}."
        if whole
        else found
    )


def judged_claims(rows: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Return what replaces a claim's line, by table and text, for the claims on trained networks."""
    families = trained(rows)
    if not families:
        return {}
    scales, deep = scale_families(families), families[DEEP]
    places, epochs = ", ".join(f"{scale:g}" for scale in scales), asked_epochs(deep[0]["row"])
    common = {
        "seeds": min(map(len, (*scales.values(), deep))),
        "setting": f"CIFAR-10, ResNet-18, S = {places}, {epochs} epochs",
        "command": "dissensus study masksembles --data DIR",
    }
    return {
        "masksembles/what-the-document-says": {
            claim.statement: {
                "measured": [claim.measured.removesuffix(".")],
                "verdict": claim.verdict,
                "note": claim.verdict,
                **common,
            }
            for claim in _dial_claims(scales, deep, "")
        }
    }
