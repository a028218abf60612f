"""Study `diversification`: do members that disagree on hard training examples detect unknown images, and at what price?

Networks from scratch and heads on frozen backbones: one network, deep ensembles, diverse hyperparameters, A2D and DivDis on other images,
and loss-guided disagreement (LDR) over strengths, sizes, guards, layers and numbers of members drawn; a set with misleading
backgrounds. With `setting="pretrained"`, heads on a network that was trained elsewhere.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dissensus._machine import one_thread
from dissensus.html import Section, Text
from dissensus_studies.diversification import report
from dissensus_studies.diversification.arms import record_of
from dissensus_studies.diversification.data import Material, Pretrained
from dissensus_studies.diversification.figures import family_pictures
from dissensus_studies.diversification.measures import PDS
from dissensus_studies.diversification.report import Family, auroc, where
from dissensus_studies.diversification.settings import pretrained_settings, settings_of
from dissensus_studies.harness.arm_log import Arm, Arms, Record, run_arms
from dissensus_studies.harness.claims import claims_table
from dissensus_studies.harness.image_study import ImageStudy, Options, Page, Work
from dissensus_studies.harness.outputs import Outputs

_JUDGED = (
    "With several runs a difference counts beyond two standard errors over runs; for single runs over images. `ldr` is loss-guided "
    "disagreement (0.5 where no strength is named), `none` without a guard: the document's form; `share` is the default of this library."
)
_TITLES = {
    "nets": "Networks from scratch",
    "heads half": "Heads on a backbone that knows half of the classes",
    "heads whole": "Heads on a backbone of the same training set",
}
# What the screen shows of each arm.
_COLUMNS: Mapping[str, report.Place] = {
    "accuracy": ("test", "accuracy"),
    "worst member": report.WORST_MEMBER,
    "C-5 BMA": auroc("C-5", report.BMA),
    "C-5 PDS": auroc("C-5", PDS),
}
_BACKGROUNDS = Text(
    "Small images of two kinds of objects on two kinds of backgrounds, which go together in 95 % of the training images and in "
    "half of the test images. Four networks from scratch, all in every step; A2D and DivDis disagree on the validation images."
)


def arms_of(work: Work) -> list[Arm]:
    """Return an arm for every ensemble: it is trained and judged."""
    material: Material = work.material
    if isinstance(material, Pretrained):
        wanted = pretrained_settings(len(material.coarse), material.outputs, work.seed)
    else:
        wanted = settings_of(work.quick, work.seed)
    return [
        Arm(each.name, partial(record_of, each, material), f"{each.family} M={each.num_members} A={each.active}")
        for each in wanted
    ]


def _done(arms: list[Arm], output: Path, *, settings: Record, **asked: Any) -> Arms:
    """Do the arms that are asked for; return all that the folder has, also those that an earlier run was asked for."""
    # Small tensors: several threads wait for each other more than they help, and much more on a busy machine.
    with one_thread() if settings["quick"] else nullcontext():
        done = run_arms(arms, output, settings=settings, **asked)
    return Arms(run_arms(arms, output, settings=settings, minutes=0, say=lambda line: None).done, done.not_run)


def page(work: Work, done: Arms) -> Page:
    """Return what the study makes of its records."""
    rows, material = report.rows_of(done.done.values()), work.material
    claims = report.diversification_claims(rows)
    tables = [(family, [t for t in report.family_tables(family) if t.rows]) for family in Family.all_of(rows)]
    spurious = where(rows, kind="spurious")
    backgrounds = (
        [Section("Backgrounds that mislead", _BACKGROUNDS, report.spurious_table(spurious))] if spurious else []
    )

    def sections(outputs: Outputs) -> list[Section]:
        found = []
        for family, own in tables:
            # Of networks, those of the single one; of heads, those of their backbone.
            nets = where(rows, kind=("nets", "backbone"), backbone=family.base.backbone).values()
            detectors = [record["detectors"].get("C-5", {}) for net in nets for record in net if "detectors" in record]
            pictures = family_pictures(outputs, family, detectors[0] if detectors else {}, material.sets)
            found.append(Section(_TITLES.get(family.name, family.name), *own, *pictures))
        return [*found, *backgrounds]

    screen = [
        [name, *((report.value_at(record, place) or [None])[0] for place in _COLUMNS.values())]
        for name, record in done.done.items()
    ]
    return Page(
        claims,
        _JUDGED,
        sections,
        (("arm", *_COLUMNS), screen),
        _remarks(material, work),
        settings={"sources": material.source_names},
        tables=[claims_table(claims, _JUDGED), *(table for _, own in tables for table in own)],
    )


def _remarks(material: Material, work: Work) -> list[str]:
    """Say in what the run differs from the document's."""
    sources = " or ".join(material.source_names)
    if isinstance(material, Pretrained):
        return [
            f"Heads of one hidden layer on cached features, trained for {material.head_epochs} epochs; where two of M are drawn a step, "
            f"for M/2 times as many. Labels of one task are the backbone's own answers. A2D and DivDis disagree on {sources}, which no arm "
            "is judged by."
        ]
    return [
        f"Methods that need other images disagree on the first half of {sources}; the second half is judged by.",
        f"{len(material.corruptions)} corruptions of a part of the test images, by our own code in the manner of CIFAR-10-C. AUROCs are "
        "taken for each corruption and averaged.",
        "The backbone is a network trained here, not one trained on a larger set; its last features are cached in four augmented passes. "
        "Heads are two layers of the features' width unless said otherwise, trained by AdamW at 0.001 with a cosine schedule.",
        "Where a step draws few members, heads train for so many more epochs that each takes as many steps as alone; the document keeps "
        "the number of epochs ('fixed').",
        f"Networks from scratch train for {material.epochs} epochs in one cycle{' (a small network)' if work.quick else ''}; all members "
        "are in every step.",
        *(["Short: shorter than the study's own 30 epochs."] if work.epochs is not None and work.epochs < 30 else []),
    ]


def run_pretrained(asked: Options) -> Path:
    """Run the setting `pretrained`: the same study with other arms, on features of a network that was trained elsewhere."""
    if asked.data is None or asked.backbone is None:
        raise ValueError(
            "The pretrained setting needs a folder with CIFAR-100 and a network: name them with `data` and `backbone`."
        )
    title, lead = (
        "Heads on a pretrained backbone",
        "What disagreement gives and costs where the backbone knows more than the task.",
    )
    study = replace(STUDY, title=title, lead=lead, prepare=Pretrained)
    return study.run_with(replace(asked, known=asked.known or "cifar100"))


def _prepare(work: Work) -> Material:
    if work.backbone is not None:
        raise ValueError("`backbone` is for setting='pretrained'; the other settings train or load their own.")
    return Material(work)


STUDY = ImageStudy(
    "Loss-guided diversification",
    "Members are made to disagree on training images that the ensemble finds hard. Do they then know better what they do not know, "
    "and what becomes of the members?",
    arms_of,
    page,
    _prepare,
    {"pretrained": run_pretrained},
    ("setting", "backbone"),
    _done,
)
run = STUDY.run
