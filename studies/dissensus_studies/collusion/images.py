"""Study `collusion-images`: what becomes of image classifiers between independent and joint training.

ResNets, a VGG and a small network, five or ten members, probability and score averaging: test accuracy, errors and diversity for
beta from 0 to 1; generalisation gaps over training; members left out at random. With `setting="imagenet"`, the document's table
of architectures on a folder of ImageNet's layout.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from dissensus.html import Section, Table, Text
from dissensus_studies.collusion.image_arms import EPOCHS, GAP_EPOCHS, WATCHED_IMAGES, JointSetting, arms_of
from dissensus_studies.collusion.image_claims import image_claims
from dissensus_studies.collusion.image_figures import decomposition_figure, gap_figure, sweep_figure
from dissensus_studies.collusion.imagenet import run_imagenet
from dissensus_studies.harness.arm_log import Arms, Record
from dissensus_studies.harness.image_arms import file_name
from dissensus_studies.harness.image_pages import arms_table, auroc_columns, with_interval
from dissensus_studies.harness.image_study import ImageStudy, Page, Work
from dissensus_studies.harness.outputs import Outputs

Records = Mapping[float, Sequence[Record]]

_JUDGED = (
    "A difference within two standard errors (over runs; for a single run over test images) counts as unresolved. Diversity and gaps "
    "of single runs are compared as they are."
)
# Which of the document's figures shows what a family of arms does.
_FIGURES = {
    "resnet18 M=5": "6 (left) and 17",
    "resnet34 M=5": "6 (left) and 17",
    "resnet18 M=10": "13",
    "resnet18 M=5 scores": "14",
    "cnn M=5": "15",
    "cnn M=10": "15",
    "vgg M=5": "16",
}


def page(work: Work, found: Arms) -> Page:
    """Return what the study makes of its records."""
    sweeps, gaps, dropped = _sorted_out(found)
    names = ("accuracy", "member_accuracy", "ensemble_error", "diversity")
    return Page(
        image_claims(sweeps, gaps, dropped),
        _JUDGED,
        lambda outputs: [
            *(_sweep_section(outputs, name, records) for name, records in sweeps.items() if len(records) > 1),
            *(_gap_section(outputs, name, records) for name, records in gaps.items()),
            *_dropout_section(outputs, dropped),
            Section("All arms", *_tables(found)),
        ],
        (
            ("arm", "accuracy", "mean member", "ERR", "diversity"),
            [[name, *(record[each] for each in names)] for name, record in found.done.items()],
        ),
        _remarks(found, work),
    )


def _sorted_out(found: Arms) -> tuple[dict[str, Records], dict[str, Records], dict[float, list[Record]]]:
    """Return sweeps over beta, gap arms, and joint training by share of dropped members."""
    sweeps: dict[str, dict[float, list[Record]]] = {}
    gaps: dict[str, dict[float, list[Record]]] = {}
    dropped: dict[float, list[Record]] = {}
    with_dropout = {r["family"] for r in found.done.values() if r["setting"]["member_dropout"] > 0.0}
    for record in found.done.values():
        setting = JointSetting(**record["setting"])
        if setting.member_dropout == 0.0:
            kind = gaps if setting.experiment == "gap" else sweeps
            kind.setdefault(setting.family, {}).setdefault(setting.beta, []).append(record)
        if setting.family in with_dropout and setting.beta == 1.0:
            dropped.setdefault(setting.member_dropout, []).append(record)
    return dict(sweeps), dict(gaps), dropped


def _sweep_section(outputs: Outputs, family: str, records: Records) -> Section:
    every = [record for found in records.values() for record in found]
    count = min(len(found) for found in records.values())
    runs = "One run" if count == 1 else f"{count} runs, with bands of two standard errors over runs,"
    picture = outputs.picture(
        f"collusion_{file_name(family).lower()}",
        sweep_figure(every, "beta", "beta"),
        f"test accuracy, error and diversity of {family} against beta",
        f"{_as_figure(_FIGURES.get(family))}{runs} for each beta.",
    )
    return Section(family, picture)


def _as_figure(number: str | None) -> str:
    return f"As the document's figure {number}. " if number else ""


def _gap_section(outputs: Outputs, family: str, records: Records) -> Section:
    name = file_name(family).lower()
    return Section(
        family.replace("gap", "Generalisation gap,", 1),
        Text(
            "Adam without decay, trained to the end on all training images. After every epoch the ensemble is looked at on test images "
            f"and, in the same way, on up to {WATCHED_IMAGES} training images. The dotted lines are the errors as they were trained on, "
            "augmented and with dropout, averaged over the epoch."
        ),
        outputs.picture(
            f"collusion_{name}",
            gap_figure(records),
            f"generalisation gap, training and test error over epochs of {family}",
            _as_figure("5 (left panel) and 10 (right panel)"),
        ),
        outputs.picture(
            f"collusion_{name}_parts",
            decomposition_figure(records),
            f"member error and diversity over epochs of {family}, on training and test images",
            _as_figure("11 (left panel) and 12 (right panel)"),
        ),
    )


def _dropout_section(outputs: Outputs, dropped: Records) -> list[Section]:
    if len(dropped) < 2:
        return []
    every = [record for found in dropped.values() for record in found]
    family = every[0]["family"]
    picture = outputs.picture(
        "collusion_dropout",
        sweep_figure(every, "member_dropout", "share of members left out"),
        f"test accuracy, error and diversity of joint {family} against the share of dropped members",
        f"{_as_figure('18')}{family}, beta = 1: int(p M) members, drawn anew, are left out of every batch.",
    )
    return [Section("Leaving members out of training batches", picture)]


def _tables(found: Arms) -> list[Table]:
    columns: dict[str, Callable[[Record], object]] = {
        "accuracy": lambda record: with_interval(record["test"]["accuracy"]),
        "mean member": lambda record: with_interval(record["test"].get("member_accuracy")),
        "ERR": itemgetter("ensemble_error"),
        "member error": itemgetter("member_error"),
        "diversity": itemgetter("diversity"),
        "ECE": lambda record: with_interval(record["test"]["ece"]),
        "epochs": lambda record: record["training"]["epochs"],
        "s": lambda record: round(record["training"]["seconds"], 1),
    }
    names = ("verdict", "diversity_ratio", "bias_share", "class_share", "kept_mean", "codependence")
    diagnosed = {name: record for name, record in found.done.items() if "diagnosis" in record}
    tables = [
        arms_table(
            found.done,
            columns,
            "Test images; intervals are 95 % over images. Accuracy and ECE are of averaged probabilities, ERR and diversity of what "
            "each arm averages.",
        ),
        arms_table(
            diagnosed,
            {name.replace("_", " "): _diagnosed(name) for name in names},
            "What dissensus.diagnose says of the test outputs alone",
        ),
        *(
            arms_table(found.done, auroc_columns(found.done, score), f"AUROC of {score} for unknown images")
            for score in ("bma", "mutual_information")
        ),
    ]
    return [table for table in tables if table.rows]


def _diagnosed(name: str) -> Callable[[Record], object]:
    def read(record: Record) -> object:
        value = record["diagnosis"].get(name)
        return round(value, 4) if isinstance(value, float) else value

    return read


def _remarks(found: Arms, work: Work) -> list[str]:
    """Say in what the run differs from the document's."""
    settings = [JointSetting(**record["setting"]) for record in found.done.values()]
    runs = Counter((each.family, each.beta, each.member_dropout) for each in settings)
    repeats: dict[str, int] = {}
    for (family, _, dropped), count in runs.items():
        name = f"{family} with dropped members" if dropped else family
        repeats[name] = min(repeats.get(name, count), count)
    length = f"Shorter than the document's {EPOCHS} epochs ({GAP_EPOCHS} for gaps); rate drops stand at the same shares of the run."
    shorter = work.quick or work.epochs not in (None, EPOCHS)
    return [
        "Learning rates: the document averages its loss over members and takes 0.1; here losses are summed, so 0.1 divided by the "
        "number of members, with the decay of weights multiplied by it, takes the same steps.",
        *([length] if shorter else []),
        "Runs: the document has six of its main figures, five of dropped members and three of the others; here "
        + ", ".join(f"{count} of {name}" for name, count in repeats.items())
        + ".",
    ]


run = ImageStudy(
    "Learner collusion on images",
    "Members are trained between each for itself (beta = 0) and all as one model (beta = 1). What does that do to the ensemble, "
    "to its members, and to the difference between training and test error?",
    arms_of,
    page,
    {"imagenet": run_imagenet},
).run
