"""Study `diversification`: do members that disagree on hard training examples detect unknown images, and at what price?

Networks from scratch and heads on frozen backbones: one network, deep ensembles, diverse hyperparameters, A2D and DivDis on other images,
and loss-guided disagreement (LDR) over strengths, sizes, guards, layers and numbers of members drawn; a set with misleading
backgrounds. With `setting="pretrained"`, heads on a network that was trained elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dissensus._machine import one_thread
from dissensus_studies.diversification.arms import record_of, with_values
from dissensus_studies.diversification.data import Material, Pretrained
from dissensus_studies.diversification.recorded import BMA, PDS, guided_claims, judged
from dissensus_studies.diversification.settings import pretrained_settings, settings_of
from dissensus_studies.harness.arm_log import Arm, Arms, Record, run_arms
from dissensus_studies.harness.claims import Claim
from dissensus_studies.harness.figures import Drawing, sweep
from dissensus_studies.harness.image_study import ImageStudy, Page, Work, arms_table, at
from dissensus_studies.recorded import framed

_JUDGED = (
    "A difference counts beyond its 95 % interval over seeds, by Student's law; one seed has none, and all is within noise. Loss-guided "
    "members are those of strength 0.5 in the document's form, without a guard; guarded is the default of this library."
)
_PARTS = ("C-5", "near", "far")
_COLUMNS: Mapping[str, Callable[[Record], object]] = {
    "worst member": lambda record: min(record.get("members", [None])),
    "accuracy": at("test", "accuracy"),
    "NLL": at("test", "nll"),
    "ECE": at("test", "ece"),
    "different answers": at("unique", "test"),
    **{f"{part} {name}": at("auroc", part, score) for part in _PARTS for name, score in (("BMA", BMA), ("PDS", PDS))},
    "worst group": at("worst_group", "ensemble"),
}


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
    judged_arms = [with_values(record) for record in done.done.values() if "auroc" in record]
    table = arms_table(
        done.done,
        _COLUMNS,
        "AUROCs are for corrupted images at severity 5 and for unknown ones, by the mixture (BMA) and by predictive diversity (PDS); "
        "the worst group is of images whose backgrounds mislead.",
    )
    drawing = _strengths(judged_arms)
    return Page(
        _claims(judged_arms),
        _JUDGED,
        table,
        drawing.section if drawing else None,
        _remarks(work.material, work),
        settings={"sources": work.material.source_names},
    )


def _claims(records: Sequence[Record]) -> list[Claim]:
    """Judge the document's statements as the record's page does, for each family of ensembles."""
    claims = []
    for family in dict.fromkeys(record["family"] for record in records):
        frame = framed([record for record in records if record["family"] == family]).set_index("setting.seed")
        for statement, (cases, measured) in guided_claims(frame).items():
            verdict = ": ".join(dict.fromkeys(judged(cases)))
            claims.append(Claim(f"{statement} ({family})", measured, verdict))
    return claims


def _strengths(records: Sequence[Record]) -> Drawing | None:
    """Return the AUROC of predictive diversity against the strength, for five loss-guided members with and without the guard."""
    points = [
        (f"{record['family']}, {setting['guard']}", setting["strength"], record)
        for record in records
        if (setting := record["setting"])["method"] == "ldr"
        and setting["strength"]
        and setting["guard"] in ("none", "share")
        and (setting["num_members"], setting["layers"], setting["active"] in (0, 2)) == (5, 2, True)
    ]
    if len({strength for _, strength, _ in points}) < 2:
        return None
    columns = {f"AUROC of PDS, {part}": at("auroc", part, PDS) for part in _PARTS if part in records[0]["auroc"]}
    return sweep(
        "diversification_strength", "Detection against the strength", points, columns, "strength", xscale="log"
    )


def _remarks(material: Material, work: Work) -> list[str]:
    """Say in what the run differs from the document's."""
    sources = " or ".join(material.source_names)
    if isinstance(material, Pretrained):
        return [
            f"Heads of one hidden layer on cached features, trained for {material.head_epochs} epochs; where two of M are drawn a step, "
            f"for M/2 times as many. Labels of one task are the backbone's own answers. A2D and DivDis disagree on {sources} (source=2); "
            "no arm is judged by the first, those that disagree on the second are not to be judged by it."
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


STUDY = ImageStudy(
    "Loss-guided diversification",
    "Members are made to disagree on training images that the ensemble finds hard. Do they then know better what they do not know, "
    "and what becomes of the members?",
    arms_of,
    page,
    Material,
    ("backbone",),
    _done,
)


def run(
    output: Path,
    *,
    quick: bool = False,
    seed: int = 0,
    data: Path | None = None,
    setting: str | None = None,
    **options: Any,
) -> Path:
    """Run the study, or its setting `pretrained`: other arms, on features of a network that was trained elsewhere."""
    if setting not in (None, "pretrained"):
        raise ValueError(f"`setting` must be 'pretrained' or left out; got {setting!r}.")
    backbone = options.get("backbone")
    if setting is None and backbone is not None:
        raise ValueError("`backbone` is for setting='pretrained'; the other settings train or load their own.")
    asked: dict[str, Any] = {"quick": quick, "seed": seed, "data": data, **options}
    if setting is None:
        return STUDY.run(output, **asked)
    if data is None or backbone is None:
        raise ValueError(
            "The pretrained setting needs a folder with CIFAR-100 and a network: name them with `data` and `backbone`."
        )
    title, lead = (
        "Heads on a pretrained backbone",
        "What disagreement gives and costs where the backbone knows more than the task.",
    )
    study = replace(STUDY, title=title, lead=lead, prepare=Pretrained)
    return study.run(output, **{**asked, "known": options.get("known") or "cifar100"})
