"""Study `anchoring`: what references, masked or not, do to a network's calibration, robustness, detection and adaptation.

Plain, anchored and masked networks on one image set: accuracy on clean and corrupted images, smooth ECE, AUROC for unknown images,
linear probes on other labelled sets; and hard-delta mining at a masking probability of 1/4. With `setting="imagenet"`, the document's
tables 10 and 11 on a folder of ImageNet's layout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dissensus.data.adaptation import Labelled, Task, Tasks, load_tasks
from dissensus.data.builtin import digits
from dissensus.data.images import match_images
from dissensus.html import Section, Table, Text
from dissensus.studies.anchoring_arms import (
    ANCHORS,
    CORRUPTIONS,
    EPOCHS,
    QUICK_CORRUPTIONS,
    SCORES,
    SHORT,
    AnchorSetting,
    anchor_arm,
    corrupted,
    mean_adaptation,
    mean_auroc,
    settings_of,
)
from dissensus.studies.anchoring_claims import SINGLE_RUN_NOISE, anchoring_claims
from dissensus.studies.anchoring_figures import alpha_figure, radar_figure, tail_figure
from dissensus.studies.anchoring_tables import (
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
    smooth_ece,
)
from dissensus.studies.arm_log import Arms, Record, run_arms
from dissensus.studies.claims import claims_table
from dissensus.studies.image_pages import arms_table, sets_section, with_interval
from dissensus.studies.image_sets import SHAPE, ImageSets, load_images
from dissensus.studies.outputs import Outputs, print_table

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
    """Run the study; see `dissensus.studies.Study.run`.

    Args:
        output: Folder for the results. A study that was interrupted goes on from what `arms.jsonl` there has.
        quick: Four small networks for a few epochs.
        seed: Of the first repeat; others follow it.
        data: Folder with an image set (see `image_sets.load_images`) and labelled sets to adapt to (see
            `data.adaptation.load_tasks`); digits that come along without one.
        epochs: Epochs instead of 200.
        minutes: Begin no arm after this time.
        limit: Train on so many images, and take at most as many of each other set.
        arms: Run only arms whose names fit; see `arm_log.chosen`. "wrn" is the wide residual network.
        known: Which image set of the folder.
        setting: "imagenet" for tables 10 and 11.
    """
    if setting == "imagenet":
        from dissensus.studies.anchoring_imagenet import run_imagenet

        return run_imagenet(
            output, data=data, epochs=epochs, minutes=minutes, limit=limit, arms=arms, seed=seed
        )
    if setting is not None:
        raise ValueError(f"`setting` must be 'imagenet' or left out; got {setting!r}.")
    quick = quick or data is None
    sets = load_images(data, quick=quick, known=known, limit=limit)
    tasks = _tasks(data, sets, limit, quick)
    outputs = Outputs(output)
    wanted = [
        anchor_arm(each, sets, tasks.found, epochs=epochs, quick=quick) for each in settings_of(quick, seed)
    ]
    identity = sets.identity(epochs=epochs, limit=limit, quick=quick)
    found = run_arms(wanted, output, settings=identity, minutes=minutes, only=arms)
    if not found.done:
        raise ValueError("No arm was finished: there is nothing to show. Give more minutes, or fewer epochs.")
    records = by_row(found)
    claims = anchoring_claims(records)
    published = published_tables(sets.name, records)
    outputs.sections += [
        Section("What the document says", claims_table(claims, _JUDGED)),
        *_alpha_sections(outputs, records),
        *_tail_sections(outputs, records),
        Section("The document's tables beside ours", _beside_text(), *published),
        Section("All arms", *_tables(found)),
        _task_section(tasks),
        sets_section(sets, found, _remarks(epochs, quick)),
    ]
    text = "\n".join(as_markdown(table) for table in [claims_table(claims), *published])
    (output / "tables.md").write_text(text, encoding="utf-8")
    outputs.results(
        {
            "arms": found.done,
            "not_run": found.not_run,
            "claims": claims,
            "sets": sets.describe(),
            "tasks": {name: list(task.notes) for name, task in tasks.found.items()},
            "settings": {**identity, "seed": seed, "score": SCORES[0], "anchors": [1, ANCHORS]},
        }
    )
    print_table(("arm", "accuracy", "corrupted", "smooth ECE", "AUROC", "adaptation"), _rows(found))
    return outputs.page(
        "Masked anchoring",
        "A network that sees every input through a reference, and sometimes without it: what does that change on clean, corrupted, "
        "unknown and new images?",
    )


_JUDGED = (
    "With several runs a difference counts beyond two standard errors; between single runs beyond "
    f"{SINGLE_RUN_NOISE}, by which runs of one seed differed. AUROC is that of the score {SCORES[0]} with one reference, averaged over the "
    "unknown sets that were there; adaptation is averaged over the labelled sets that were there."
)


def by_row(found: Arms) -> dict[Row, list[Record]]:
    """Return the records of all seeds of each architecture and row."""
    rows: dict[Row, list[Record]] = {}
    for record in found.done.values():
        setting = AnchorSetting(**record["setting"])
        rows.setdefault((setting.architecture, setting.row), []).append(record)
    return rows


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
        folder = data / "images" if (data / "images").is_dir() else data
        return load_tasks(folder, SHAPE, without=(sets.name,), limit=few)
    loaded = digits()
    assert loaded.y is not None
    x, _ = match_images(loaded.x, *SHAPE)
    halves = [Labelled(x[start::2][:few], loaded.y[start::2][:few]) for start in (0, 1)]
    task = Task(halves[0], halves[1], ("all ten digits",))
    return Tasks({"digits": task}, {})


def _of(records: Records, architecture: str, row: str) -> Sequence[Record]:
    return records.get((architecture, row), ())


def _alpha_sections(outputs: Outputs, records: Records) -> list[Section]:
    """Show every quality against the masking probability, and improvements over the plain network as a radar."""
    sections = []
    for architecture in dict.fromkeys(architecture for architecture, _ in records):
        plain = _of(records, architecture, "plain")
        alphas = {
            found[0]["setting"]["alpha"]: found
            for (other, row), found in records.items()
            if other == architecture and " " not in row and row != "plain"
        }
        if not plain or len(alphas) < 2:
            continue
        named = {
            f"alpha = {alpha:g}" if alpha else "anchored": found for alpha, found in sorted(alphas.items())
        }
        sections.append(
            Section(
                f"How much to mask, {architecture}",
                outputs.picture(
                    f"anchoring_alpha_{architecture}",
                    alpha_figure(plain, alphas),
                    "clean and corruption accuracy, calibration, adaptation and detection against the masking probability",
                    "Bands are two standard errors over runs.",
                ),
                outputs.picture(
                    f"anchoring_radar_{architecture}",
                    radar_figure(plain, named),
                    "improvement over the plain network in four qualities",
                    "Improvement over the plain network, in per cent of its value.",
                ),
            )
        )
    return sections


def _tail_sections(outputs: Outputs, records: Records) -> list[Section]:
    """Show what hard-delta mining changes, by its weight and by how tails are found."""
    mined: dict[str, dict[float, list[Record]]] = {}
    for found in records.values():
        for record in found:
            setting = AnchorSetting(**record["setting"])
            if setting.tail_weight:
                mined.setdefault(setting.tails, {}).setdefault(setting.tail_weight, []).append(record)
    masked = _of(records, "resnet18", "alpha=0.25")
    if not mined or not masked:
        return []
    return [
        Section(
            "Hard-delta mining",
            outputs.picture(
                "anchoring_tails",
                tail_figure(masked, mined),
                "mean AUROC and corruption accuracy against the weight of the tail term",
                "Masking probability 1/4; the dashed line is without mining.",
            ),
        )
    ]


def _tables(found: Arms) -> list[Table]:
    columns = {
        "accuracy": lambda record: with_interval(record["test"]["accuracy"]),
        "smooth ECE": lambda record: with_interval(record["test"].get("smooth_ece")),
        "corrupted accuracy": lambda record: with_interval(record["corrupted"]["all"]["accuracy"]),
        "corrupted smooth ECE": lambda record: with_interval(record["corrupted"]["all"]["smooth_ece"]),
        "mean AUROC": lambda record: f"{mean_auroc(record):.4f}",
        f"mean AUROC, {ANCHORS} references": _several,
        "adaptation": lambda record: f"{mean_adaptation(record):.4f}",
        "s": lambda record: round(record["training"]["seconds"], 1),
    }
    tables = [arms_table(found.done, columns, "Intervals are 95 % over images.")]
    parts = list(dict.fromkeys(part for record in found.done.values() for part in record["auroc"]))
    for score in SCORES:
        scored = {part: _auroc(part, score) for part in parts}
        tables.append(arms_table(found.done, scored, f"AUROC of {score}, one reference"))
    return tables


def _several(record: Record) -> str | None:
    return f"{mean_auroc(record['anchors']):.4f}" if "anchors" in record else None


def _auroc(part: str, score: str) -> Callable[[Record], object]:
    return lambda record: with_interval(record["auroc"].get(part, {}).get(score))


def _rows(found: Arms) -> list[list[object]]:
    return [
        [
            name,
            record["test"]["accuracy"][0],
            corrupted(record, "accuracy"),
            corrupted(record, "smooth_ece"),
            mean_auroc(record),
            mean_adaptation(record),
        ]
        for name, record in found.done.items()
    ]


def _task_section(tasks: Tasks) -> Section:
    rows: list[tuple[object, ...]] = [
        (name, len(task.train.x), len(task.test.x), int(task.train.y.max()) + 1, ", ".join(task.notes))
        for name, task in tasks.found.items()
    ]
    rows += [(name, None, None, None, reason) for name, reason in tasks.missing.items()]
    return Section(
        "Sets to adapt to",
        Text(
            "A linear classifier on the features before the last layer, by L-BFGS, its regularisation chosen on a fifth of the "
            "training images; ECE with 15 bins. The document does not give its own way."
        ),
        Table(("set", "training images", "test images", "classes", "remark"), rows),
    )


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
