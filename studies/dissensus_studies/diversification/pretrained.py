"""Heads on a network that was pretrained elsewhere: `dissensus study diversification --setting pretrained --backbone MODULE:FUNCTION`.

The document's regime: a backbone that knows far more than the training set, frozen, and small heads on its features. CIFAR-100 with its
hundred classes is the main task; the guard of loss-guided disagreement is also looked at with ten classes (the images of ten superclasses)
and with as many as the backbone itself was trained for (its own answers are the labels).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dissensus.architectures import mlp
from dissensus.data.features import CachedFeatures
from dissensus.html import Section, Text
from dissensus.members import DeepEnsemble
from dissensus.predictions import predict
from dissensus.training import Run, fit
from dissensus_studies.choosing import reserved
from dissensus_studies.diversification.arms import (
    HEAD_BATCH,
    HEAD_RATE,
    head_epochs,
    head_training,
    objective_of,
    two_stage,
)
from dissensus_studies.diversification.data import features_of
from dissensus_studies.diversification.measures import Judged, Scored, quality_record
from dissensus_studies.diversification.settings import Setting, ldr
from dissensus_studies.harness.arm_log import Arm, Arms, Record, run_arms
from dissensus_studies.harness.image_pages import arms_table, sets_section
from dissensus_studies.harness.image_sets import ImageSets, image_folder, load_images
from dissensus_studies.harness.image_study import Options
from dissensus_studies.harness.outputs import Outputs, print_table
from dissensus_studies.harness.statistics import ece_floor

EPOCHS, HIDDEN = 10, 256
STRENGTHS, REPEATS = (0.1, 0.5, 1.0, 5.0), 3
# Superclasses of the task with ten classes.
FEW = 10
# Scores that the tables show; the record has all of them.
SHOWN = {"BMA": "bma", "PDS": "predictive_diversity", "MI": "mutual_information", "energy": "mean_energy"}
FORMS = ("none", "share")


class Task(NamedTuple):
    """Labelled features, what heads on them are judged by (unknown images where detection is looked at), features to disagree on."""

    train: tuple[Tensor, Tensor]
    judged: Judged
    num_classes: int
    source: Tensor


def load_backbone(name: str, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Return a backbone up to its features, from uint8 images, and its own last layer: what `"module:function"` returns."""
    module, _, function = name.partition(":")
    try:
        body, head = getattr(import_module(module), function)()
    except (ImportError, AttributeError, TypeError, ValueError) as problem:
        raise ValueError(
            f"`backbone` must be module:function, a function that returns two networks, images to features and features to logits; "
            f"{name!r} gave {type(problem).__name__}: {problem}"
        ) from problem
    return body.eval().to(device), head.eval().to(device)


def make_tasks(
    sets: ImageSets, elsewhere: Tensor, backbone: tuple[nn.Module, nn.Module], coarse: Tensor, device: torch.device
) -> dict[int, Task]:
    """Return the tasks by what they are called after: ten superclasses, the backbone's own answers, and the classes of the set."""
    body, head = backbone
    read = partial(features_of, body, device=device, batch_size=500)
    train, labels = read(sets.all_train.x), sets.all_train.y.to(device)
    known = Judged(read(sets.test.x), sets.test.y.to(device), {}, {})
    source, unknown = read(elsewhere), {name: read(x) for name, x in sets.ood.items()}
    groups = coarse.to(device)[labels], coarse.to(device)[known.labels]
    few, few_test = (group < FEW for group in groups)
    with torch.no_grad():
        own, own_test = (head(x).argmax(-1) for x in (train, known.test))
        outputs = int(head(known.test[:2]).shape[-1])
    superclasses = Judged(known.test[few_test], groups[1][few_test], {}, {})
    everything = replace(known, ood=unknown, groups=sets.ood_groups)
    return {
        FEW: Task((train[few], groups[0][few]), superclasses, FEW, source),
        outputs: Task((train, own), replace(known, labels=own_test), outputs, source),
        len(coarse): Task((train, labels), everything, len(coarse), source),
    }


def settings_of(classes: int, backbone_classes: int, seed: int) -> Iterator[Setting]:
    """Return the ensembles in order of importance: all methods, the guard by number of classes, other sizes."""

    def base(number: int, repeat: int) -> Setting:
        return Setting("heads", backbone=f"pretrained C={number}", seed=seed + repeat)

    repeats = range(REPEATS)
    for repeat in repeats:
        yield from _methods(base(classes, repeat), STRENGTHS)
    for number in (FEW, backbone_classes):
        for repeat in repeats:
            yield base(number, repeat)
            yield from ldr(replace(base(number, repeat), active=2), (0.5, 5.0), FORMS)
    for size, strengths in ((2, (0.5, 5.0)), (10, (0.5, 5.0)), (50, (0.5,))):
        for repeat in repeats:
            sized = replace(base(classes, repeat), num_members=size)
            found = _methods(sized, strengths)
            # All pairs of fifty members are 1225.
            yield from (each for each in found if size < 50 or each.method in ("deep", "ldr"))
    for size, strengths in ((2, (0.1, 1.0)), (10, (0.1, 1.0)), (50, (5.0,))):
        for repeat in repeats:
            sized = replace(base(classes, repeat), num_members=size, active=2 if size > 2 else 0)
            yield from ldr(sized, strengths, FORMS)


def _methods(base: Setting, strengths: Sequence[float]) -> Iterator[Setting]:
    pair = replace(base, active=2 if base.num_members > 2 else 0)
    yield base
    yield from ldr(pair, strengths, FORMS)
    yield replace(base, method="a2d", strength=0.1)
    yield replace(base, method="divdis", strength=1.0)
    yield replace(pair, method="two-stage", strength=0.5)
    yield replace(base, method="joint", strength=0.4)


def run_pretrained(options: Options) -> Path:
    """Run the setting."""
    backbone = options.backbone
    if options.data is None or backbone is None:
        raise ValueError(
            "The pretrained setting needs a folder with CIFAR-100 and a network: name them with `data` and `backbone`."
        )
    coarse, device = superclasses(options.data), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sets, elsewhere = reserved(load_images(options.data, known=options.known or "cifar100", limit=options.limit))
    parts = load_backbone(backbone, device)
    tasks = make_tasks(sets, elsewhere, parts, coarse, device)
    outputs = [layer.out_features for layer in parts[1].modules() if isinstance(layer, nn.Linear)][-1]
    done = run_arms(
        [
            Arm(
                each.name,
                partial(_work, each, tasks, options.epochs or EPOCHS),
                f"{each.family} M={each.num_members} A={each.active}",
            )
            for each in settings_of(len(coarse), outputs, options.seed)
        ],
        options.output,
        settings=sets.identity(epochs=options.epochs, limit=options.limit, quick=False) | {"backbone": backbone},
        minutes=options.minutes,
        only=options.arms,
    )
    if not done.done:
        raise ValueError("No arm was finished: there is nothing to show. Give more minutes, or fewer epochs.")
    return _report(Outputs(options.output), done, sets)


def superclasses(data: Path) -> Tensor:
    """Return the superclass of each class of CIFAR-100, from the labels `y` and `y_coarse` of its test file."""
    path = image_folder(data) / "cifar100_test.npz"
    if not path.is_file():
        raise ValueError(f"The pretrained setting trains on CIFAR-100; there is no {path.name} in {path.parent}.")
    with np.load(path, allow_pickle=False) as arrays:
        if "y_coarse" not in arrays.files:
            raise ValueError(f"{path.name} must hold the superclasses, y_coarse, beside the classes, y.")
        fine, coarse = (torch.from_numpy(arrays[name].astype(np.int64)) for name in ("y", "y_coarse"))
    found = torch.zeros(int(fine.max()) + 1, dtype=torch.int64)
    found[fine] = coarse
    return found


def _work(setting: Setting, tasks: Mapping[int, Task], epochs: int) -> Record:
    task = tasks[int(setting.backbone.rpartition("=")[2])]
    make = partial(mlp, task.train[0].shape[1], [HIDDEN], task.num_classes, activation=nn.GELU)
    members = DeepEnsemble(make, setting.num_members, setting.seed)
    run, extra = _train(members, setting, task, epochs)
    logits = task.judged.map(partial(predict, members, batch_size=4096))
    record: Record = _rounded(quality_record(logits, diagnosed=False)) | extra
    confidence = logits.test.float().softmax(-1).mean(0).amax(-1)
    record["test"]["ece_floor"] = round(ece_floor(confidence.cpu().numpy()), 5)
    record["auroc"] = _detection(logits) if logits.ood else {}
    record |= {
        "training": {"epochs": run.epoch, "steps": run.step, "seconds": round(run.seconds, 3), "engine": run.engine},
        "setting": asdict(setting),
        "family": setting.family,
        "row": setting.row,
    }
    record["line"] = (
        f"accuracy {record['test']['accuracy']:.4f}, members {min(record['members']):.4f}-{max(record['members']):.4f}, "
        f"nll {record['test']['nll']:.4f}, {run.step} steps in {run.seconds:.1f} s ({run.engine})"
    )
    return record


def _train(members: DeepEnsemble, setting: Setting, task: Task, epochs: int) -> tuple[Run, Record]:
    """Train heads as the document does: AdamW, ten epochs, so many more where two are drawn that each takes as many steps."""
    chosen, length = head_training(setting, len(task.train[0])), head_epochs(setting, epochs)
    if setting.method == "two-stage":
        return two_stage(setting, members, CachedFeatures(*task.train), (epochs, length), chosen)
    return fit(members, task.train, objective=objective_of(setting, (task.source,)), epochs=length, **chosen), {}


def _detection(logits: Judged) -> dict[str, dict[str, float]]:
    scored = Scored.of(logits)
    return {
        part: {name: round(value, 4) for name, value in zip(scored.names, ranks.auroc.tolist(), strict=True)}
        for part, ranks in scored.ranks(logits.groups).items()
    }


def _rounded(record: Record) -> Record:
    """Keep the values of a record, without their intervals over images: there are several seeds."""

    def value(entry: Any) -> Any:
        return round(entry[0], 5) if isinstance(entry, list) else {k: value(v) for k, v in entry.items()}

    return {key: entry if key == "members" else value(entry) for key, entry in record.items() if entry}


def _report(outputs: Outputs, done: Arms, sets: ImageSets) -> Path:
    records = list(done.done.values())
    plain = {_shared(record): min(record["members"]) for record in records if record["setting"]["method"] == "deep"}
    columns = {
        "accuracy": lambda record: record["test"]["accuracy"],
        "worst member": lambda record: min(record["members"]),
        "worst member − independent": lambda record: min(record["members"]) - plain.get(_shared(record), nan),
        "NLL": lambda record: record["test"]["nll"],
        "ECE": lambda record: record["test"]["ece"],
        "ECE floor": lambda record: record["test"]["ece_floor"],
        "different answers": lambda record: record["unique"]["test"],
        **{f"{group} {word}": _auroc(group, score) for group in ("near", "far") for word, score in SHOWN.items()},
    }
    table = arms_table(done.done, columns)
    how = (
        f"Heads of one hidden layer, {HIDDEN} wide, trained by AdamW at {HEAD_RATE:g} for {EPOCHS} epochs in batches of {HEAD_BATCH} "
        "unless said otherwise; where two of M are drawn a step, for M/2 times as many. Labels of the last task are the backbone's own "
        "answers. A2D and DivDis disagree on images that no arm is judged by. Mean seconds an arm: "
        f"{fmean(record['arm_seconds'] for record in records):.1f}."
    )
    outputs.sections += [Section("All arms", table), Section("How it was done", Text(how)), sets_section(sets, done)]
    outputs.results({"arms": done.done, "not_run": done.not_run, "sets": sets.describe()})
    print_table(table.columns[:5], [row[:5] for row in table.rows])
    return outputs.page(
        "Heads on a pretrained backbone",
        "What disagreement gives and costs where the backbone knows more than the task.",
    )


def _shared(record: Record) -> tuple[str, int, int]:
    """Return what an arm shares with the independent heads that it is compared with: the task, their number and the seed."""
    setting = record["setting"]
    return setting["backbone"], setting["num_members"], setting["seed"]


def _auroc(group: str, score: str) -> Callable[[Record], object]:
    return lambda record: record["auroc"].get(group, {}).get(score)
