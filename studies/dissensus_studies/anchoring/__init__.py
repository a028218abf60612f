"""Study `anchoring`: what references, masked or not, do to a network's calibration, robustness, detection and adaptation.

Plain, anchored and masked networks on one image set: accuracy on clean and corrupted images, smooth ECE, AUROC for unknown images,
linear probes on other labelled sets; and hard-delta mining at a masking probability of 1/4.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dissensus.data.images import match_images
from dissensus.data.toy import digits
from dissensus.html import Section, Table, Text
from dissensus_studies.anchoring.adaptation import ADAPTATION, UNUSABLE, Task, Tasks, load_tasks
from dissensus_studies.anchoring.arms import ANCHORS, EPOCHS, SCORES, SHORT, AnchorSetting, arms_of
from dissensus_studies.anchoring.records import (
    QUALITIES,
    Row,
    Rows,
    anchoring_claims,
    by_severity,
    mean_auroc,
    published_tables,
    same_sets,
)
from dissensus_studies.harness.arm_log import Arms, Record, print_now
from dissensus_studies.harness.claims import claims_table
from dissensus_studies.harness.figures import Drawing, sweep
from dissensus_studies.harness.image_pages import arms_table, auroc_columns, with_interval
from dissensus_studies.harness.image_sets import image_folder
from dissensus_studies.harness.image_study import ImageStudy, Page, Work
from dissensus_studies.harness.labelled import SHAPE, Images
from dissensus_studies.harness.statistics import Value

_JUDGED = (
    "A difference counts beyond two standard errors, over runs or over the images judged, whichever is larger; between single runs "
    f"beyond what runs differed by on CIFAR-10 ({', '.join(f'{each.name} {each.between_runs}' for each in QUALITIES)}). Means are over "
    "the unknown and labelled sets that were there."
)
_QUALITIES = {each.name: each.value for each in QUALITIES}
_BESIDE = (
    f"AUROC of the score {SCORES[0]} with one reference, the first training image; the document does not say which score it "
    "uses. Corruptions are our own, in the manner of CIFAR-10-C: accuracies and errors are close to, and not the same as, those on "
    "the published files. Empty cells: sets that were not there."
)
_HOW = (
    f"The document trains {EPOCHS} epochs; runs of fewer than {SHORT} use a one-cycle schedule, the same for every arm. References are all "
    f"training images without augmentation; answers are given with the first of them, and in a further column with the first {ANCHORS}."
)
_PROBES = (
    "A linear classifier on the features before the last layer, by L-BFGS, its regularisation chosen on a fifth of the training "
    "images; ECE with 15 bins. The document does not give its own way."
)


def page(work: Work, found: Arms) -> Page:
    """Return what the study makes of its records."""
    tasks: Tasks = work.material
    same, notes = same_sets(found.done)
    compared = replace(found, done=same)
    records = by_row(compared)
    claims = anchoring_claims(records)
    beside = [
        *published_tables(work.sets.name, by_row(found)),
        by_severity(records, "accuracy", "Accuracy under corruption, mean over corruptions and runs"),
        by_severity(records, "smooth_ece", "Smooth ECE under corruption, mean over corruptions and runs"),
    ]
    adapted = tasks_table(tasks, found)
    rows = [[name, *(read(record) for read in _QUALITIES.values())] for name, record in same.items()]
    return Page(
        claims,
        _JUDGED,
        lambda outputs: [
            *(drawing.section(outputs) for drawing in drawings(records)),
            Section("The document's tables beside ours", Text(_BESIDE), *beside[:-2]),
            Section("Under corruption, by severity", *beside[-2:]),
            Section("All arms", *([Text(*notes)] if notes else []), *arms_tables(found, compared)),
            Section("Sets to adapt to", Text(_PROBES), adapted),
        ],
        (("arm", "accuracy", "corrupted", "smooth ECE", "AUROC", "adaptation"), rows),
        [_HOW],
        {"tasks": {name: list(task.notes) for name, task in tasks.found.items()}, "tasks_missing": dict(tasks.missing)},
        {"score": SCORES[0], "anchors": [1, ANCHORS]},
        [claims_table(claims), *beside, adapted],
    )


def drawings(records: Rows) -> list[Drawing]:
    """Return every quality against the masking probability and against the weight of mining, as far as there are arms."""
    found = []
    for architecture in dict.fromkeys(architecture for architecture, _ in records):
        own = {row: each for (other, row), each in records.items() if other == architecture}
        settings = [(row, record["setting"], record) for row, each in own.items() for record in each]
        masked = [("anchored", s["alpha"], r) for row, s, r in settings if " " not in row and row != "plain"]
        mined = [(s["tails"], s["tail_weight"], r) for row, s, r in settings if "tail=" in row]
        draw = partial(sweep, columns=_QUALITIES)
        if masked and "plain" in own:
            name, title = f"anchoring_alpha_{architecture}", f"How much to mask, {architecture}"
            found.append(draw(name, title, masked, xlabel="masking probability", levels={"plain": own["plain"]}))
        if mined and "alpha=0.25" in own:
            name, title = f"anchoring_tails_{architecture}", f"Hard-delta mining, {architecture}"
            levels = {"no mining": own["alpha=0.25"]}
            found.append(draw(name, title, mined, xlabel="weight of the tail term", levels=levels, xscale="log"))
    return found


def by_row(found: Arms) -> dict[Row, list[Record]]:
    """Return the records of all seeds of each architecture and row."""
    rows: dict[Row, list[Record]] = {}
    for record in found.done.values():
        setting = AnchorSetting(**record["setting"])
        rows.setdefault((setting.architecture, setting.row), []).append(record)
    return rows


def arms_tables(found: Arms, compared: Arms) -> list[Table]:
    """Return a table of all arms, with means over the sets that all of them have (`compared`), and one for each score."""
    reads = {each.name: each.read for each in QUALITIES}
    reads["smooth ECE"] = lambda record: record["test"].get("smooth_ece", [None])
    reads[f"mean AUROC, {ANCHORS} references"] = lambda record: mean_auroc(record.get("anchors", {"auroc": {}}))
    columns: dict[str, Callable[[Record], object]] = {name: _in_text(read) for name, read in reads.items()}
    columns["s"] = lambda record: record["training"]["seconds"]
    scored = {score: auroc_columns(found.done, score) for score in SCORES}
    return [
        arms_table(compared.done, columns, "Intervals are 95 % over images."),
        *(arms_table(found.done, own, f"AUROC of {score}, one reference") for score, own in scored.items() if own),
    ]


def _in_text(read: Callable[[Record], Value]) -> Callable[[Record], object]:
    return lambda record: with_interval(read(record))


def tasks_table(tasks: Tasks, found: Arms) -> Table:
    """Return which sets networks were adapted to, and why others were not; records may be of another machine."""
    used = Counter(name for record in found.done.values() for name in record["adaptation"])
    remarks = {**dict.fromkeys(used, "not in the folder any more"), **tasks.missing}
    remarks |= {name: ", ".join(task.notes) for name, task in tasks.found.items()}
    for record in found.done.values():
        remarks |= record.get("adaptation_skipped", {})
    rows = [(name, f"{used[name]} of {len(found.done)}", remark) for name, remark in remarks.items()]
    return Table(("set", "used by arms", "remark"), rows, "Sets to adapt to")


def tasks_of(work: Work) -> Tasks:
    """Return the sets to adapt to; say which they are before any time is spent on training, and which cannot be used."""
    few = work.limit or (1000 if work.quick else None)
    if work.data is not None:
        tasks = load_tasks(image_folder(work.data), without=(work.sets.name,), limit=few)
    else:
        loaded = digits()
        assert loaded.y is not None
        x, _ = match_images(loaded.x, *SHAPE)
        halves = (Images(x[start::2][:few], loaded.y[start::2][:few]) for start in (0, 1))
        tasks = Tasks({"digits": Task(*halves, ("all ten digits",))}, dict.fromkeys(ADAPTATION, "no folder was given"))
    print_now(f"sets to adapt to: {', '.join(tasks.found) or 'none'}")
    for name, reason in tasks.missing.items():
        if reason.startswith(UNUSABLE):
            print_now(f"{name} {reason}")
    return tasks


run = ImageStudy(
    "Masked anchoring",
    "A network that sees every input through a reference, and sometimes without it: what does that change on clean, corrupted, "
    "unknown and new images?",
    arms_of,
    page,
    prepare=tasks_of,
).run
