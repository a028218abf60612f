"""Study `diversification`: do members that disagree on hard training examples detect unknown images, and at what price?

Networks from scratch and heads on frozen backbones: one network, deep ensembles, diverse hyperparameters, A2D and DivDis on other images,
and loss-guided disagreement (LDR) over strengths, sizes, guards, layers and numbers of members drawn; a set with misleading
backgrounds. With `setting="pretrained"`, heads on a network that was trained elsewhere.
"""

from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

from dissensus._machine import one_thread
from dissensus.html import Block, Section, Table, Text
from dissensus_studies.diversification.arms import WORKS
from dissensus_studies.diversification.claims import diversification_claims
from dissensus_studies.diversification.data import Material
from dissensus_studies.diversification.figures import (
    baseline_bars,
    baseline_figure,
    gallery_figure,
    size_figure,
    strength_figure,
    trade_figure,
    trade_points,
)
from dissensus_studies.diversification.guards import guard_table, guard_verdict
from dissensus_studies.diversification.pretrained import run_pretrained
from dissensus_studies.diversification.reading import SHOWN, Found
from dissensus_studies.diversification.settings import Setting, settings_of
from dissensus_studies.diversification.spurious import spurious_record
from dissensus_studies.diversification.tables import family_tables, spurious_table
from dissensus_studies.harness.arm_log import Arm, Arms, Record, run_arms
from dissensus_studies.harness.claims import claims_table
from dissensus_studies.harness.image_arms import device_name
from dissensus_studies.harness.image_pages import arms_table, with_interval
from dissensus_studies.harness.image_study import ImageStudy, Page, Work
from dissensus_studies.harness.outputs import Outputs

_JUDGED = (
    "With several runs a difference counts beyond two standard errors over runs; for single runs over images. LDR is loss-guided "
    "disagreement at strength 0.5; 'published' is the document's form, 'guarded' the default of this library."
)
_TITLES = {
    "nets": "Networks from scratch",
    "heads half": "Heads on a backbone that knows half of the classes",
    "heads whole": "Heads on a backbone of the same training set",
}


def arms_of(work: Work) -> list[Arm]:
    """Return an arm for every ensemble: it is trained and judged."""
    return [
        Arm(each.name, partial(_record, each, work.material), f"{each.family} M={each.num_members}")
        for each in settings_of(work.quick, work.seed)
    ]


def _record(setting: Setting, material: Material) -> Record:
    work = spurious_record if setting.kind == "spurious" else WORKS[setting.kind]
    named = {"setting": asdict(setting), "family": setting.family, "row": setting.row, "device": device_name()}
    return work(setting, material) | named


def _done(arms: list[Arm], *place: Any, settings: Record, **asked: Any) -> Arms:
    """Do the arms that are asked for; return all that the folder has, also those that an earlier run was asked for."""
    # Small tensors: several threads wait for each other more than they help, and much more on a busy machine.
    with one_thread() if settings["quick"] else nullcontext():
        done = run_arms(arms, *place, settings=settings, **asked)
    return Arms(run_arms(arms, *place, settings=settings, minutes=0, say=lambda line: None).done, done.not_run)


def page(work: Work, done: Arms) -> Page:
    """Return what the study makes of its records."""
    found, material = Found.of(done.done.values()), work.material
    claims, verdict = diversification_claims(found), guard_verdict(found)

    def sections(outputs: Outputs) -> list[Section]:
        parts = [Section("Which guard", Text(verdict.text))] if verdict is not None else []
        parts += [_family_section(outputs, found, family, material) for family in found.families]
        backgrounds = spurious_table(found)
        if backgrounds.rows:
            parts.append(Section("Backgrounds that mislead", _BACKGROUNDS, backgrounds))
        outputs.markdown(
            [claims_table(claims, _JUDGED), *(b for part in parts for b in part.blocks if isinstance(b, Table))]
        )
        return [*parts, Section("All arms", _all_arms(done))]

    return Page(
        claims,
        _JUDGED,
        sections,
        (("arm", "accuracy", "worst member", "C-5 BMA", "C-5 PDS"), _rows(done)),
        _remarks(material, work),
        {"guard": None if verdict is None else asdict(verdict)},
        {"sources": material.source_names},
    )


_BACKGROUNDS = Text(
    "Small images of two kinds of objects on two kinds of backgrounds, which go together in 95 % of the training images and in "
    "half of the test images. Four networks from scratch, all in every step; A2D and DivDis disagree on the validation images."
)


def _family_section(outputs: Outputs, found: Found, family: str, material: Material) -> Section:
    bars, points = baseline_bars(found, family), trade_points(found, family)
    guided = found.one(family, f"ldr={SHOWN:g} share{' A=2' if family != 'nets' else ''} M=5")
    figures = {
        "bars": (
            baseline_figure(bars) if bars else None,
            "AUROC at severity 5 of every method",
            "The better one of BMA and PDS, PDS alone for LDR, as the document's figure 4; detectors look at features.",
        ),
        "strength": (
            strength_figure(found, family),
            "diversity, members' accuracy and AUROC against the strength",
            "As the document's figure 5. Bands are two standard errors over runs where there are several.",
        ),
        "size": (
            size_figure(found, family),
            "the same against the number of members",
            "As the document's figure 5, strength 0.5; each member takes as many steps as it would alone.",
        ),
        "trade": (
            trade_figure(points) if sum(map(len, points.values())) > 2 else None,
            "AUROC of PDS against the worst member's accuracy, by guard",
            "Numbers are strengths. To the left, members are of no use by themselves.",
        ),
        "gallery": (
            gallery_figure(guided[0], material.sets) if guided else None,
            "test images that guarded members differ most and least on",
            "As the document's figure 3: most and least different by PDS; strength 0.5, guarded. Last line: other members.",
        ),
    }
    tables = [*family_tables(found, family, material.source_names), guard_table(found, family)]
    blocks: list[Block] = [table for table in tables if table.rows]
    for kind, (figure, alt, caption) in figures.items():
        if figure is not None:
            name = f"diversification_{family.replace(' ', '_')}_{kind}"
            blocks.append(outputs.picture(name, figure, f"{alt}, {family}", caption))
    return Section(_TITLES.get(family, family), *blocks)


def _all_arms(found: Arms) -> Table:
    columns = {
        "accuracy": lambda record: with_interval(record.get("test", {}).get("accuracy")),
        "worst member": lambda record: min(record["members"]) if record.get("members") else None,
        "NLL": lambda record: with_interval(record.get("test", {}).get("nll")),
        "ECE": lambda record: with_interval(record.get("test", {}).get("ece")),
        "#unique": lambda record: record.get("unique", {}).get("test", [None])[0],
        "colluding": lambda record: {True: "yes", False: "no"}.get(record.get("finding", {}).get("colluding")),
        "epochs": lambda record: record["training"]["epochs"],
        "s": lambda record: round(record["training"]["seconds"], 1),
        "s an epoch": lambda record: record["training"].get("epoch_seconds"),
    }
    return arms_table(found.done, columns, "Test images; intervals are 95 % over images.")


def _rows(found: Arms) -> list[list[object]]:
    rows: list[list[object]] = []
    for name, record in found.done.items():
        shown = record.get("auroc", {}).get("C-5", {})
        # The diversity of one member's predictions is constant: there is nothing to rank by.
        names = ("bma", "predictive_diversity" if len(record.get("members", ())) > 1 else "")
        scores = [shown.get(score, [None])[0] for score in names]
        if "test" in record:
            rows.append([name, record["test"]["accuracy"][0], min(record["members"]), *scores])
    return rows


def _remarks(material: Material, work: Work) -> list[str]:
    """Say in what the run differs from the document's."""
    return [
        f"Methods that need other images disagree on the first half of {' or '.join(material.source_names)}; the second half is judged by.",
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


run = ImageStudy(
    "Loss-guided diversification",
    "Members are made to disagree on training images that the ensemble finds hard. Do they then know better what they do not know, "
    "and what becomes of the members?",
    arms_of,
    page,
    {"pretrained": run_pretrained},
    prepare=lambda work: Material(work.sets, work.output, epochs=work.epochs, quick=work.quick, seed=work.seed),
    do=_done,
).run
