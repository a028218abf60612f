"""Study `diversification`: do members that disagree on hard training examples detect unknown images, and at what price?

Networks from scratch and heads on frozen backbones: one network, deep ensembles, diverse hyperparameters, A2D and DivDis on other images,
and loss-guided disagreement (LDR) over strengths, sizes, guards, layers and numbers of members drawn; a set with misleading
backgrounds. With `setting="imagenet"`, the document's own configurations on a folder of ImageNet's layout.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from dissensus._machine import one_thread
from dissensus.html import Block, Section, Table, Text
from dissensus_studies.anchoring_tables import as_markdown
from dissensus_studies.arm_log import Arm, Arms, run_arms
from dissensus_studies.claims import claims_table
from dissensus_studies.diversification_arms import arm_of
from dissensus_studies.diversification_claims import diversification_claims
from dissensus_studies.diversification_data import Material
from dissensus_studies.diversification_figures import (
    baseline_bars,
    baseline_figure,
    example_figure,
    example_table,
    gallery_figure,
    size_figure,
    strength_figure,
    trade_figure,
)
from dissensus_studies.diversification_guards import guard_table, guard_verdict, members_text
from dissensus_studies.diversification_reading import SHOWN, Found
from dissensus_studies.diversification_settings import settings_of
from dissensus_studies.diversification_spurious import spurious_arm
from dissensus_studies.diversification_tables import (
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
from dissensus_studies.image_pages import arms_table, sets_section, with_interval
from dissensus_studies.image_sets import imagenet_folder, load_images
from dissensus_studies.outputs import Outputs, print_table


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
    backbone: str | None = None,
) -> Path:
    """Run the study; see `dissensus_studies.Study.run`.

    Args:
        output: Folder for the results. A study that was interrupted goes on from what `arms.jsonl` there has.
        quick: A small network for a few epochs, and heads on it.
        seed: Of the first repeat; others follow it.
        data: Folder with an image set (see `image_sets.load_images`); digits that come along without one.
        epochs: Epochs of networks trained from scratch instead of 30; heads train for at most ten, or this number if smaller.
        minutes: Begin no arm after this time.
        limit: Train on so many images, and take at most as many of each other set.
        arms: Run only arms whose names fit; see `arm_log.chosen`. "nets", "heads" and "spurious" are the three parts.
        known: Which image set of the folder.
        setting: "imagenet" for the document's own experiment, "pretrained" for heads on a network that was trained elsewhere.
        backbone: That network, `"module:function"`; see `diversification_pretrained.Features`.
    """
    if setting == "pretrained":
        from dissensus_studies.diversification_pretrained import run_pretrained

        return run_pretrained(
            output,
            data=data,
            backbone=backbone,
            known=known,
            seed=seed,
            epochs=epochs,
            minutes=minutes,
            limit=limit,
            arms=arms,
        )
    if backbone is not None:
        raise ValueError(
            "`backbone` is for setting='pretrained'; the other settings train or load their own."
        )
    if setting == "imagenet":
        from dissensus_studies.diversification_imagenet import run_imagenet

        folder = imagenet_folder(data, known=known, quick=quick)
        return run_imagenet(
            output, data=folder, epochs=epochs, minutes=minutes, limit=limit, arms=arms, seed=seed
        )
    if setting is not None:
        raise ValueError(f"`setting` must be 'imagenet' or 'pretrained', or left out; got {setting!r}.")
    quick = quick or data is None
    sets = load_images(data, quick=quick, known=known, limit=limit)
    outputs = Outputs(output)
    material = Material(sets, output, epochs=epochs, quick=quick, seed=seed)
    identity = sets.identity(epochs=epochs, limit=limit, quick=quick)
    # Small tensors: several threads wait for each other more than they help, and much more on a busy machine.
    with one_thread() if quick else nullcontext():
        arms_done = _done(_all_arms(material, quick, seed), output, identity, minutes, arms)
    if not arms_done.done:
        raise ValueError("No arm was finished: there is nothing to show. Give more minutes, or fewer epochs.")
    found = Found.of(arms_done.done.values())
    claims = diversification_claims(found)
    verdict = guard_verdict(found)
    tables = [Section("What the document says", claims_table(claims, _JUDGED))]
    tables += [_family_section(outputs, found, family, material) for family in found.families]
    tables += [section for section in [_spurious_section(found)] if section is not None]
    outputs.sections += [
        tables[0],
        *([Section("Which guard", Text(verdict.text))] if verdict is not None else []),
        Section(
            "The two scores on a worked example",
            Text(
                "BMA looks at the members' average, which is the same for members that are all unsure and members that contradict "
                "each other. PDS sums what any member gives to each class: it tells the two apart, and reacts to nothing else."
            ),
            outputs.picture(
                "diversification_example", example_figure(), "predictions of three members in two cases"
            ),
            example_table(),
        ),
        *tables[1:],
        Section("All arms", *_all_tables(arms_done)),
        sets_section(sets, arms_done, _remarks(material, epochs, quick)),
    ]
    text = "\n".join(
        as_markdown(block) for part in tables for block in part.blocks if isinstance(block, Table)
    )
    (output / "tables.md").write_text(text, encoding="utf-8")
    outputs.results(
        {
            "arms": arms_done.done,
            "not_run": arms_done.not_run,
            "claims": claims,
            "guard": None if verdict is None else asdict(verdict),
            "sets": sets.describe(),
            "settings": {**identity, "seed": seed, "sources": material.source_names},
        }
    )
    print_table(("arm", "accuracy", "worst member", "C-5 BMA", "C-5 PDS"), _rows(arms_done))
    return outputs.page(
        "Loss-guided diversification",
        "Members are made to disagree on training images that the ensemble finds hard. Do they then know better what they do not know, "
        "and what becomes of the members?",
    )


_JUDGED = (
    "With several runs a difference counts beyond two standard errors over runs; for single runs over images. LDR is loss-guided "
    "disagreement at strength 0.5; 'published' is the document's form, 'guarded' the default of this library."
)


def _done(
    arms: Sequence[Arm],
    output: Path,
    identity: Mapping[str, object],
    minutes: float | None,
    only: Sequence[str] | None,
) -> Arms:
    """Do the arms that are asked for; return all that the folder has, also those that an earlier run was asked for."""
    asked = run_arms(arms, output, settings=identity, minutes=minutes, only=only)
    there = run_arms(arms, output, settings=identity, minutes=0, say=lambda line: None)
    return Arms(there.done, asked.not_run)


def _all_arms(material: Material, quick: bool, seed: int) -> list[Arm]:
    return [
        spurious_arm(each, material) if each.kind == "spurious" else arm_of(each, material)
        for each in settings_of(quick, seed)
    ]


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
        caption = "The better one of BMA and PDS, PDS alone for LDR, as the document's figure 4; detectors look at features."
        alt = f"AUROC at severity 5 of every method, {family}"
        blocks.append(outputs.picture(f"diversification_{name}_bars", baseline_figure(bars), alt, caption))
    blocks.append(generalisation_table(found, family))
    for kind, figure, alt in (
        (
            "strength",
            strength_figure(found, family),
            "diversity, members' accuracy and AUROC against the strength",
        ),
        ("size", size_figure(found, family), "AUROC of PDS against the number of members"),
        ("trade", trade_figure(found, family), "AUROC of PDS against the worst member's accuracy, by guard"),
    ):
        if figure is not None:
            blocks.append(
                outputs.picture(f"diversification_{name}_{kind}", figure, f"{alt}, {family}", _FIGURES[kind])
            )
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


def _spurious_section(found: Found) -> Section | None:
    table = spurious_table(found)
    if table is None:
        return None
    return Section(
        "Backgrounds that mislead",
        Text(
            "Small images of two kinds of objects on two kinds of backgrounds, which go together in 95 % of the training images and in "
            "half of the test images. Four networks from scratch, all in every step; A2D and DivDis disagree on the validation images."
        ),
        table,
    )


def _all_tables(found: Arms) -> list[Table]:
    columns = {
        "accuracy": lambda record: with_interval(record.get("test", {}).get("accuracy")),
        "worst member": lambda record: min(record["members"]) if record.get("members") else None,
        "NLL": lambda record: with_interval(record.get("test", {}).get("nll")),
        "ECE": lambda record: with_interval(record.get("test", {}).get("ece")),
        "#unique": lambda record: record.get("unique", {}).get("test", [None])[0],
        "colluding": lambda record: {True: "yes", False: "no"}.get(
            record.get("finding", {}).get("colluding")
        ),
        "epochs": lambda record: record["training"]["epochs"],
        "s": lambda record: round(record["training"]["seconds"], 1),
        "s an epoch": lambda record: record["training"].get("epoch_seconds"),
    }
    return [arms_table(found.done, columns, "Test images; intervals are 95 % over images.")]


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


def _remarks(material: Material, epochs: int | None, quick: bool) -> list[str]:
    """Say in what the run differs from the document's."""
    return [
        f"Methods that need other images disagree on the first half of {' or '.join(material.source_names)}; the second half is judged by.",
        f"{len(material.corruptions)} corruptions of a part of the test images, by our own code in the manner of CIFAR-10-C. AUROCs are "
        "taken for each corruption and averaged.",
        "The backbone is a network trained here, not one trained on a larger set; its last features are cached in four augmented passes. "
        "Heads are two layers of the features' width unless said otherwise, trained by AdamW at 0.001 with a cosine schedule.",
        "Where a step draws few members, heads train for so many more epochs that each takes as many steps as alone; the document keeps "
        "the number of epochs ('fixed').",
        f"Networks from scratch train for {material.epochs} epochs in one cycle{' (a small network)' if quick else ''}; all members are in "
        "every step.",
        *(["Short: shorter than the study's own 30 epochs."] if epochs is not None and epochs < 30 else []),
    ]
