"""Study `anchoring`: what references, masked or not, do to a network's calibration, robustness, detection and adaptation.

Plain, anchored and masked networks on one image set: accuracy on clean and corrupted images, smooth ECE, AUROC for unknown images,
linear probes on other labelled sets; and hard-delta mining at a masking probability of 1/4. With `setting="imagenet"`, the document's
tables 10 and 11 on a folder of ImageNet's layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dissensus.data.images import match_images
from dissensus.data.toy import digits
from dissensus.html import Section, Table, Text
from dissensus_studies.adaptation import ADAPTATION, UNUSABLE, Labelled, Task, Tasks, load_tasks
from dissensus_studies.anchoring_arms import (
    ANCHORS,
    CORRUPTIONS,
    EPOCHS,
    QUICK_CORRUPTIONS,
    SCORES,
    SHORT,
    anchor_arm,
    settings_of,
)
from dissensus_studies.anchoring_claims import anchoring_claims
from dissensus_studies.anchoring_qualities import (
    CALIBRATION_NOISE,
    DETECTION_NOISE,
    ROBUSTNESS_NOISE,
    SINGLE_RUN_NOISE,
    same_sets,
)
from dissensus_studies.anchoring_sections import (
    alpha_sections,
    arms_tables,
    by_row,
    summary_rows,
    tail_sections,
    task_section,
    tasks_table,
)
from dissensus_studies.anchoring_tables import (
    ADAPTATION_ACCURACY,
    ADAPTATION_ECE,
    CALIBRATION_CIFAR10,
    CALIBRATION_CIFAR100,
    OOD_CIFAR10,
    OOD_CIFAR100,
    Row,
    adaptation,
    as_markdown,
    auroc_of,
    beside,
    by_severity,
    smooth_ece,
)
from dissensus_studies.arm_log import Arms, Record, print_now, run_arms
from dissensus_studies.claims import claims_table
from dissensus_studies.image_pages import sets_section
from dissensus_studies.image_sets import SHAPE, ImageSets, imagenet_folder, load_images
from dissensus_studies.outputs import Outputs, print_table

Records = Mapping[Row, Sequence[Record]]


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
        quick: Four small networks for a few epochs.
        seed: Of the first repeat; others follow it.
        data: Folder with an image set (see `image_sets.load_images`) and labelled sets to adapt to (see
            `adaptation.load_tasks`); digits that come along without one.
        epochs: Epochs instead of 200.
        minutes: Begin no arm after this time.
        limit: Train on so many images, and take at most as many of each other set.
        arms: Run only arms whose names fit; see `arm_log.chosen`. "wrn" is the wide residual network.
        known: Which image set of the folder.
        setting: "imagenet" for tables 10 and 11.
    """
    if setting == "imagenet":
        from dissensus_studies.anchoring_imagenet import run_imagenet

        folder = imagenet_folder(data, known=known, quick=quick)
        return run_imagenet(
            output, data=folder, epochs=epochs, minutes=minutes, limit=limit, arms=arms, seed=seed
        )
    if setting is not None:
        raise ValueError(f"`setting` must be 'imagenet' or left out; got {setting!r}.")
    quick = quick or data is None
    sets = load_images(data, quick=quick, known=known, limit=limit)
    tasks = _tasks(data, sets, limit, quick)
    _say_tasks(tasks)
    outputs = Outputs(output)
    wanted = [
        anchor_arm(each, sets, tasks.found, epochs=epochs, quick=quick) for each in settings_of(quick, seed)
    ]
    identity = sets.identity(epochs=epochs, limit=limit, quick=quick)
    found = run_arms(wanted, output, settings=identity, minutes=minutes, only=arms)
    if not found.done:
        raise ValueError("No arm was finished: there is nothing to show. Give more minutes, or fewer epochs.")
    found = with_test_sizes(found, tasks)
    same, notes = same_sets(found.done)
    compared = replace(found, done=same)
    records, claims = by_row(compared), anchoring_claims(by_row(compared))
    published = published_tables(sets.name, by_row(found))
    severities = severity_tables(records)
    tables = [claims_table(claims), *published, *severities, tasks_table(tasks, found)]
    (output / "tables.md").write_text("\n".join(map(as_markdown, tables)), encoding="utf-8")
    # Before anything is drawn: a figure that fails must not cost the numbers.
    outputs.results(
        {
            "arms": found.done,
            "not_run": found.not_run,
            "claims": claims,
            "sets": sets.describe(),
            "tasks": {name: list(task.notes) for name, task in tasks.found.items()},
            "tasks_missing": dict(tasks.missing),
            "settings": {**identity, "seed": seed, "score": SCORES[0], "anchors": [1, ANCHORS]},
        }
    )
    print_table(("arm", "accuracy", "corrupted", "smooth ECE", "AUROC", "adaptation"), summary_rows(compared))
    outputs.sections += [
        Section("What the document says", claims_table(claims, _JUDGED)),
        *alpha_sections(outputs, records),
        *tail_sections(outputs, records),
        Section("The document's tables beside ours", _beside_text(), *published),
        Section("Under corruption, by severity", *severities),
        Section("All arms", *([Text(*notes)] if notes else []), *arms_tables(found, compared)),
        task_section(tasks, found),
        sets_section(sets, found, _remarks(epochs, quick)),
    ]
    return outputs.page(
        "Masked anchoring",
        "A network that sees every input through a reference, and sometimes without it: what does that change on clean, corrupted, "
        "unknown and new images?",
    )


_JUDGED = (
    "A difference counts beyond two standard errors, over runs or over the images judged (from the 95 % intervals; binomial for "
    f"linear probes), whichever is larger; between single runs, but for clean accuracy, {SINGLE_RUN_NOISE} is the least "
    f"({ROBUSTNESS_NOISE} for accuracy under corruption, {CALIBRATION_NOISE} for smooth ECE, {DETECTION_NOISE} for AUROC), by which "
    "runs differed on CIFAR-10. AUROC is that of the "
    f"score {SCORES[0]} with one reference, averaged over the unknown sets that were there; adaptation is averaged over the labelled "
    "sets that were there."
)


def severity_tables(records: Records) -> list[Table]:
    """Return accuracy and smooth ECE of all networks at each severity."""
    return [
        by_severity(records, "accuracy", "Accuracy under corruption, mean over corruptions and runs"),
        by_severity(records, "smooth_ece", "Smooth ECE under corruption, mean over corruptions and runs"),
    ]


def with_test_sizes(found: Arms, tasks: Tasks) -> Arms:
    """Return arms whose linear probes tell on how many images they were judged, which older records do not.

    Arms of one study have the same settings, so they were judged on as many images as are there now.
    """
    done = {}
    for arm, record in found.done.items():
        adapted = {
            name: {"images": len(tasks.found[name].test.x), **each} if name in tasks.found else each
            for name, each in record["adaptation"].items()
        }
        done[arm] = {**record, "adaptation": adapted}
    return replace(found, done=done)


def published_tables(known: str, records: Records) -> list[Table]:
    """Return the document's tables about this image set beside ours; tables without published numbers where it has none."""
    main = {row: found for row, found in records.items() if "tail=" not in row[1]}
    ood, calibration = (
        (OOD_CIFAR100, CALIBRATION_CIFAR100) if known == "cifar100" else (OOD_CIFAR10, CALIBRATION_CIFAR10)
    )
    if known not in ("cifar10", "cifar100"):
        ood = replace(ood, title="AUROC in per cent", columns={}, rows={})
        calibration = replace(calibration, title="Smooth ECE under corruption", rows={})
    accuracy, error = ADAPTATION_ACCURACY, ADAPTATION_ECE
    if known != "cifar100":
        accuracy = replace(accuracy, title="Accuracy in per cent of linear probes", columns={}, rows={})
        error = replace(error, title="ECE of linear probes", columns={}, rows={})
    return [
        beside(ood, main, auroc_of(SCORES[0])),
        beside(calibration, main, smooth_ece),
        beside(accuracy, main, adaptation("accuracy", 100.0)),
        beside(error, main, adaptation("ece")),
    ]


def _tasks(data: Path | None, sets: ImageSets, limit: int | None, quick: bool) -> Tasks:
    few = limit or (1000 if quick else None)
    if data is not None:
        inner = data / "images"
        folder = inner if inner.is_dir() and any(inner.glob("*.npz")) else data
        return load_tasks(folder, SHAPE, without=(sets.name,), limit=few)
    loaded = digits()
    assert loaded.y is not None
    x, _ = match_images(loaded.x, *SHAPE)
    halves = [Labelled(x[start::2][:few], loaded.y[start::2][:few]) for start in (0, 1)]
    task = Task(halves[0], halves[1], ("all ten digits",))
    return Tasks({"digits": task}, {each.name: "no folder was given" for each in ADAPTATION.sets})


def _say_tasks(tasks: Tasks) -> None:
    """Name the sets to adapt to, and why others are not among them, before any time is spent on training."""
    print_now(f"sets to adapt to: {', '.join(tasks.found) or 'none'}")
    absent = [name for name, reason in tasks.missing.items() if not reason.startswith(UNUSABLE)]
    if absent:
        print_now(f"not there: {', '.join(absent)}")
    for name, reason in tasks.missing.items():
        if name not in absent:
            print_now(f"{name} {reason}")


def _beside_text() -> Text:
    return Text(
        f"AUROC of the score {SCORES[0]} with one reference, the first training image; the document does not say which score it "
        "uses. Corruptions are our own, in the manner of CIFAR-10-C: accuracies and errors are close to, and not the same as, those on "
        "the published files. Empty cells: sets that were not there."
    )


def _remarks(epochs: int | None, quick: bool) -> list[str]:
    """Say in what the run differs from the document's."""
    shorter = quick or (epochs is not None and epochs != EPOCHS)
    names = QUICK_CORRUPTIONS if quick else CORRUPTIONS
    return [
        *([f"Shorter than the document's {EPOCHS} epochs."] if shorter else []),
        *(
            [f"Runs of fewer than {SHORT} epochs use a one-cycle schedule, the same for every arm."]
            if quick or (epochs or EPOCHS) < SHORT
            else []
        ),
        f"{len(names)} corruptions of a part of the test images; references are all training images without augmentation; answers are "
        f"given with the first of them, and in a further column with the first {ANCHORS}.",
    ]
