"""Study `collusion-images`: what becomes of image classifiers between independent and joint training.

ResNets, a VGG and a small network, five or ten members, probability and score averaging: test accuracy, errors and diversity for
beta from 0 to 1; generalisation gaps over training; members left out at random. With `setting="imagenet"`, the document's table
of architectures on a folder of ImageNet's layout.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dissensus.html import Section, Table, Text
from dissensus_studies.arm_log import Arms, Record, run_arms
from dissensus_studies.claims import claims_table
from dissensus_studies.collusion_image_arms import (
    EPOCHS,
    GAP_EPOCHS,
    WATCHED_IMAGES,
    JointSetting,
    joint_arm,
    settings_of,
)
from dissensus_studies.collusion_image_claims import image_claims
from dissensus_studies.collusion_image_figures import decomposition_figure, gap_figure, sweep_figure
from dissensus_studies.image_pages import arms_table, sets_section, with_interval
from dissensus_studies.image_sets import imagenet_folder, load_images
from dissensus_studies.outputs import Outputs, print_table

Records = Mapping[float, Sequence[Record]]


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
        quick: Few epochs of the small network.
        seed: Of the first repeat; others follow it.
        data: Folder with an image set (see `image_sets.load_images`); digits that come along without one.
        epochs: Epochs of the sweeps instead of 80; gap curves get five for every four.
        minutes: Begin no arm after this time.
        limit: Train on so many images.
        arms: Run only arms whose names fit; see `arm_log.chosen`.
        known: Which image set of the folder.
        setting: "imagenet" for the table of architectures.
    """
    if setting == "imagenet":
        from dissensus_studies.collusion_imagenet import run_imagenet

        folder = imagenet_folder(data, known=known, quick=quick)
        return run_imagenet(
            output, data=folder, epochs=epochs, minutes=minutes, limit=limit, arms=arms, seed=seed
        )
    if setting is not None:
        raise ValueError(f"`setting` must be 'imagenet' or left out; got {setting!r}.")
    # Without a folder there is only the small network's time.
    quick = quick or data is None
    sets = load_images(data, quick=quick, known=known, limit=limit)
    outputs = Outputs(output)
    wanted = [joint_arm(each, sets, output, epochs=epochs, quick=quick) for each in settings_of(quick, seed)]
    identity = sets.identity(epochs=epochs, limit=limit, quick=quick)
    found = run_arms(wanted, output, settings=identity, minutes=minutes, only=arms)
    if not found.done:
        raise ValueError("No arm was finished: there is nothing to show. Give more minutes, or fewer epochs.")
    families, gaps, dropped = _sorted_out(found)
    claims = image_claims(families, gaps, dropped)
    outputs.sections += [
        Section("What the document says", claims_table(claims, _JUDGED)),
        *(_sweep_section(outputs, name, records) for name, records in families.items() if len(records) > 1),
        *(_gap_section(outputs, name, records) for name, records in gaps.items()),
        *_dropout_section(outputs, dropped),
        Section("All arms", *_tables(found)),
        sets_section(sets, found, _remarks(found, epochs, quick)),
    ]
    outputs.results(
        {
            "arms": found.done,
            "not_run": found.not_run,
            "claims": claims,
            "sets": sets.describe(),
            "settings": {**identity, "seed": seed},
        }
    )
    print_table(("arm", "accuracy", "mean member", "ERR", "diversity"), _rows(found))
    return outputs.page(
        "Learner collusion on images",
        "Members are trained between each for itself (beta = 0) and all as one model (beta = 1). What does that do to the ensemble, "
        "to its members, and to the difference between training and test error?",
    )


_JUDGED = (
    "A difference within two standard errors (over runs; for a single run over test images) counts as unresolved. Diversity and gaps "
    "of single runs are compared as they are."
)


def _sorted_out(found: Arms) -> tuple[dict[str, Records], dict[str, Records], dict[float, list[Record]]]:
    """Return sweeps over beta, gap arms, and joint training by share of dropped members."""
    sweeps: dict[str, dict[float, list[Record]]] = {}
    gaps: dict[str, dict[float, list[Record]]] = {}
    for record in found.done.values():
        setting = JointSetting(**record["setting"])
        if setting.member_dropout == 0.0:
            kind = gaps if setting.experiment == "gap" else sweeps
            kind.setdefault(setting.family, {}).setdefault(setting.beta, []).append(record)
    dropped: dict[float, list[Record]] = {}
    with_dropout = {r["family"] for r in found.done.values() if r["setting"]["member_dropout"] > 0.0}
    for record in found.done.values():
        if record["family"] in with_dropout and record["setting"]["beta"] == 1.0:
            dropped.setdefault(record["setting"]["member_dropout"], []).append(record)
    return dict(sweeps), dict(gaps), dropped


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


def _sweep_section(outputs: Outputs, family: str, records: Records) -> Section:
    every = [record for found in records.values() for record in found]
    runs = min(len(found) for found in records.values())
    figure = sweep_figure(every, "beta", "beta")
    return Section(
        family,
        outputs.picture(
            f"collusion_{_plain(family)}",
            figure,
            f"test accuracy, error and diversity of {family} against beta",
            f"{_as_figure(_FIGURES.get(family))}{_runs(runs)} for each beta.",
        ),
    )


def _runs(count: int) -> str:
    return "One run" if count == 1 else f"{count} runs, with bands of two standard errors over runs,"


def _as_figure(number: str | None) -> str:
    return f"As the document's figure {number}. " if number else ""


def _gap_section(outputs: Outputs, family: str, records: Records) -> Section:
    name = _plain(family)
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
    return [
        Section(
            "Leaving members out of training batches",
            outputs.picture(
                "collusion_dropout",
                sweep_figure(every, "member_dropout", "share of members left out"),
                f"test accuracy, error and diversity of joint {family} against the share of dropped members",
                f"{_as_figure('18')}{family}, beta = 1: int(p M) members, drawn anew, are left out of every batch.",
            ),
        )
    ]


def _tables(found: Arms) -> list[Table]:
    columns = {
        "accuracy": lambda record: with_interval(record["test"]["accuracy"]),
        "mean member": lambda record: with_interval(record["test"].get("member_accuracy")),
        "ERR": lambda record: record["ensemble_error"],
        "member error": lambda record: record["member_error"],
        "diversity": lambda record: record["diversity"],
        "ECE": lambda record: with_interval(record["test"]["ece"]),
        "epochs": lambda record: record["training"]["epochs"],
        "s": lambda record: round(record["training"]["seconds"], 1),
    }
    tables = [
        arms_table(
            found.done,
            columns,
            "Test images; intervals are 95 % over images. Accuracy and ECE are of averaged probabilities, ERR and diversity of what "
            "each arm averages.",
        )
    ]
    diagnosed = {name: record for name, record in found.done.items() if "diagnosis" in record}
    if diagnosed:
        tables.append(
            arms_table(
                diagnosed,
                {name.replace("_", " "): _diagnosed(name) for name in _DIAGNOSED},
                "What dissensus.diagnose says of the test outputs alone",
            )
        )
    parts = list(dict.fromkeys(part for record in found.done.values() for part in record["auroc"]))
    for score in ("bma", "mutual_information"):
        scored = {part: _auroc(part, score) for part in parts}
        tables.append(arms_table(found.done, scored, f"AUROC of {score} for unknown images"))
    return tables


_DIAGNOSED = ("verdict", "diversity_ratio", "bias_share", "class_share", "kept_mean", "codependence")


def _diagnosed(name: str) -> Callable[[Record], object]:
    def read(record: Record) -> object:
        value = record["diagnosis"].get(name)
        return round(value, 4) if isinstance(value, float) else value

    return read


def _auroc(part: str, score: str) -> Callable[[Record], object]:
    def read(record: Record) -> object:
        return with_interval(record["auroc"].get(part, {}).get(score))

    return read


def _rows(found: Arms) -> list[list[object]]:
    names = ("accuracy", "member_accuracy", "ensemble_error", "diversity")
    return [[name, *(record[each] for each in names)] for name, record in found.done.items()]


def _remarks(found: Arms, epochs: int | None, quick: bool) -> list[str]:
    """Say in what the run differs from the document's."""
    settings = [JointSetting(**record["setting"]) for record in found.done.values()]
    runs = Counter((each.family, each.beta, each.member_dropout) for each in settings)
    repeats: dict[str, int] = {}
    for (family, _, dropped), count in runs.items():
        name = f"{family} with dropped members" if dropped else family
        repeats[name] = min(repeats.get(name, count), count)
    shorter = quick or (epochs is not None and epochs != EPOCHS)
    return [
        "Learning rates: the document averages its loss over members and takes 0.1; here losses are summed, so 0.1 divided by the "
        "number of members, with the decay of weights multiplied by it, takes the same steps.",
        *(
            [
                f"Shorter than the document's {EPOCHS} epochs ({GAP_EPOCHS} for gaps); rate drops stand at the same shares of the run."
            ]
            if shorter
            else []
        ),
        "Runs: the document has six of its main figures, five of dropped members and three of the others; here "
        + ", ".join(f"{count} of {name}" for name, count in repeats.items())
        + ".",
    ]


def _plain(name: str) -> str:
    return name.replace(" ", "_").replace("=", "").lower()
