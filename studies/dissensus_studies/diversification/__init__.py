"""Study `diversification`: do members that disagree on hard training examples detect unknown images, and at what price?

Networks from scratch and heads on frozen backbones: one network, deep ensembles, diverse hyperparameters, A2D and DivDis on other images,
and loss-guided disagreement (LDR) over strengths, sizes, guards, layers and numbers of members drawn; a set with misleading
backgrounds. With `setting="imagenet"`, the document's own configurations on a folder of ImageNet's layout.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dissensus._machine import one_thread
from dissensus.html import Block, Section, Table, Text
from dissensus_studies.diversification.arms import WORKS
from dissensus_studies.diversification.claims import diversification_claims
from dissensus_studies.diversification.data import Material
from dissensus_studies.diversification.figures import (
    baseline_bars,
    baseline_figure,
    example_figure,
    example_table,
    gallery_figure,
    size_figure,
    strength_figure,
    trade_figure,
)
from dissensus_studies.diversification.guards import guard_table, guard_verdict, members_text
from dissensus_studies.diversification.imagenet import run_imagenet
from dissensus_studies.diversification.pretrained import run_pretrained
from dissensus_studies.diversification.reading import SHOWN, Found
from dissensus_studies.diversification.settings import Setting, settings_of
from dissensus_studies.diversification.spurious import spurious_record
from dissensus_studies.diversification.tables import (
    detection_table,
    diversity_table,
    generalisation_table,
    layers_table,
    score_table,
    source_table,
    spurious_table,
    stochastic_table,
    two_stage_table,
)
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


def arms_of(work: Work) -> list[Arm]:
    """Return an arm for every ensemble: it is trained and judged."""
    return [
        Arm(each.name, partial(_record, each, work.material), f"{each.family} M={each.num_members}")
        for each in settings_of(work.quick, work.seed)
    ]


def _record(setting: Setting, material: Material) -> Record:
    work = spurious_record if setting.kind == "spurious" else WORKS[setting.kind]
    return {
        **work(setting, material),
        "setting": asdict(setting),
        "family": setting.family,
        "row": setting.row,
        "device": device_name(),
    }


def _done(
    arms: Sequence[Arm],
    output: Path,
    *,
    settings: Mapping[str, object],
    minutes: float | None,
    only: Sequence[str] | None,
) -> Arms:
    """Do the arms that are asked for; return all that the folder has, also those that an earlier run was asked for."""
    # Small tensors: several threads wait for each other more than they help, and much more on a busy machine.
    with one_thread() if settings["quick"] else nullcontext():
        asked = run_arms(arms, output, settings=settings, minutes=minutes, only=only)
    there = run_arms(arms, output, settings=settings, minutes=0, say=lambda line: None)
    return Arms(there.done, asked.not_run)


def page(work: Work, done: Arms) -> Page:
    """Return what the study makes of its records."""
    found, material = Found.of(done.done.values()), work.material
    claims, verdict = diversification_claims(found), guard_verdict(found)

    def sections(outputs: Outputs) -> list[Section]:
        parts = [_family_section(outputs, found, family, material) for family in found.families]
        parts += _spurious_section(found)
        tables = [block for part in parts for block in part.blocks if isinstance(block, Table)]
        outputs.markdown([claims_table(claims, _JUDGED), *tables])
        example = Section(
            "The two scores on a worked example",
            Text(
                "BMA looks at the members' average, which is the same for members that are all unsure and members that contradict "
                "each other. PDS sums what any member gives to each class: it tells the two apart, and reacts to nothing else."
            ),
            outputs.picture("diversification_example", example_figure(), "predictions of three members in two cases"),
            example_table(),
        )
        guard = [] if verdict is None else [Section("Which guard", Text(verdict.text))]
        return [*guard, example, *parts, Section("All arms", _all_arms(done))]

    return Page(
        claims,
        _JUDGED,
        sections,
        (("arm", "accuracy", "worst member", "C-5 BMA", "C-5 PDS"), _rows(done)),
        _remarks(material, work),
        {"guard": None if verdict is None else asdict(verdict)},
        {"sources": material.source_names},
    )


def _family_section(outputs: Outputs, found: Found, family: str, material: Material) -> Section:
    titles = {
        "nets": "Networks from scratch",
        "heads half": "Heads on a backbone that knows half of the classes",
        "heads whole": "Heads on a backbone of the same training set",
    }
    name = family.replace(" ", "_")
    blocks: list[Block] = [diversity_table(found, family), detection_table(found, family)]
    members = members_text(found, family)
    if members is not None:
        blocks.insert(0, Text(members))
    bars = baseline_bars(found, family)
    if bars:
        caption = (
            "The better one of BMA and PDS, PDS alone for LDR, as the document's figure 4; detectors look at features."
        )
        alt = f"AUROC at severity 5 of every method, {family}"
        blocks.append(outputs.picture(f"diversification_{name}_bars", baseline_figure(bars), alt, caption))
    blocks.append(generalisation_table(found, family))
    for kind, figure, alt in (
        ("strength", strength_figure(found, family), "diversity, members' accuracy and AUROC against the strength"),
        ("size", size_figure(found, family), "AUROC of PDS against the number of members"),
        ("trade", trade_figure(found, family), "AUROC of PDS against the worst member's accuracy, by guard"),
    ):
        if figure is not None:
            blocks.append(outputs.picture(f"diversification_{name}_{kind}", figure, f"{alt}, {family}", _FIGURES[kind]))
    guided = found.one(family, f"ldr={SHOWN:g} share{' A=2' if family != 'nets' else ''} M=5")
    gallery = gallery_figure(guided[0], material.sets) if guided else None
    if gallery is not None:
        alt = f"test images that guarded members differ most and least on, {family}"
        blocks.append(outputs.picture(f"diversification_{name}_gallery", gallery, alt, _FIGURES["gallery"]))
    optional = [
        guard_table(found, family),
        layers_table(found, family),
        score_table(found, family),
        two_stage_table(found, family),
        source_table(found, family, material.source_names),
        stochastic_table(found, family),
    ]
    blocks += [table for table in optional if table is not None and table.rows]
    return Section(titles.get(family, family), *blocks)


_FIGURES = {
    "strength": "As the document's figure 5. Bands are two standard errors over runs where there are several.",
    "size": "As the document's figure 5, strength 0.5; each member takes as many steps as it would alone.",
    "gallery": "As the document's figure 3: most and least different by PDS; strength 0.5, guarded. Last line: other members.",
    "trade": "Numbers are strengths. To the left, members are of no use by themselves.",
}


def _spurious_section(found: Found) -> list[Section]:
    table = spurious_table(found)
    if table is None:
        return []
    section = Section(
        "Backgrounds that mislead",
        Text(
            "Small images of two kinds of objects on two kinds of backgrounds, which go together in 95 % of the training images and in "
            "half of the test images. Four networks from scratch, all in every step; A2D and DivDis disagree on the validation images."
        ),
        table,
    )
    return [section]


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
    {"imagenet": run_imagenet, "pretrained": run_pretrained},
    prepare=lambda work: Material(work.sets, work.output, epochs=work.epochs, quick=work.quick, seed=work.seed),
    do=_done,
).run
