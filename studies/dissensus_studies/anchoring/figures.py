"""Records of `anchoring` in, its figures as lines out."""

from collections.abc import Mapping, Sequence

from dissensus_studies.anchoring.qualities import (
    ADAPTATION,
    CALIBRATION,
    CLEAN,
    DETECTION,
    ROBUSTNESS,
    Quality,
    Records,
    measured,
)
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.figures import Drawing, Line, Panel

# Each is better when it is larger.
QUALITIES: Sequence[Quality] = (
    ROBUSTNESS,
    Quality("1 - smooth ECE under corruption", lambda record: 1 - CALIBRATION.read(record), CALIBRATION.error),
    ADAPTATION,
    DETECTION,
)
BANDS = "Bands are two standard errors to either side, over runs or over images, whichever is larger."


def drawings(records: Mapping[tuple[str, str], Records]) -> list[Drawing]:
    """Return the figures that there are arms for: qualities against the masking probability, and against the weight of mining.

    Args:
        records: (architecture, row) to the records of all seeds.
    """
    found = []
    for architecture in dict.fromkeys(architecture for architecture, _ in records):
        plain = records.get((architecture, "plain"), ())
        alphas = {
            own[0]["setting"]["alpha"]: own
            for (other, row), own in records.items()
            if other == architecture and " " not in row and row != "plain"
        }
        if plain and len(alphas) > 1:
            panels = [*alpha_panels(plain, alphas), change_panel(plain, alphas)]
            title = f"How much to mask, {architecture}"
            found.append(Drawing(f"anchoring_alpha_{architecture}", title, panels, BANDS))
    mined: dict[str, dict[float, list[Record]]] = {}
    for record in (record for own in records.values() for record in own if record["setting"]["tail_weight"]):
        setting = record["setting"]
        mined.setdefault(setting["tails"], {}).setdefault(setting["tail_weight"], []).append(record)
    masked = records.get(("resnet18", "alpha=0.25"), ())
    panels = tail_panels(masked, mined) if masked and mined else []
    if panels:
        caption = f"Masking probability 1/4; the dashed line is without mining. {BANDS}"
        found.append(Drawing("anchoring_tails", "Hard-delta mining", panels, caption))
    return found


def alpha_panels(plain: Records, anchored: Mapping[float, Records]) -> list[Panel]:
    """Return clean accuracy and every quality that was measured against the masking probability, 0 for none."""
    ends = [min(anchored), max(anchored)]
    return [
        Panel(
            quality.name,
            "masking probability",
            [
                _line("anchored", quality, sorted(anchored), [anchored[alpha] for alpha in sorted(anchored)]),
                _line("plain", quality, ends, [plain, plain], 1, "--"),
            ],
        )
        for quality in (CLEAN, *QUALITIES)
        if measured(quality, plain, *anchored.values())
    ]


def _line(
    name: str,
    quality: Quality,
    x: Sequence[float],
    groups: Sequence[Records],
    colour: int | None = 0,
    style: str = "o-",
) -> Line:
    """Return means over runs with two standard errors to either side."""
    means = [quality.summary(records).mean for records in groups]
    low, high = (
        [mean + sign * quality.standard_error(records) for mean, records in zip(means, groups, strict=True)]
        for sign in (-2, 2)
    )
    return Line(name, x, means, low, high, colour, style)


def tail_panels(masked: Records, mined: Mapping[str, Mapping[float, Records]]) -> list[Panel]:
    """Return mean AUROC and corruption accuracy, where measured, against the weight of mining, a line for each way to find tails."""
    groups = [records for by_weight in mined.values() for records in by_weight.values()]
    weights = [weight for by_weight in mined.values() for weight in by_weight]
    ends = [min(weights) / 1.5, max(weights) * 1.5]
    return [
        Panel(
            quality.name,
            "weight of the tail term",
            [
                *(
                    Line(tails, sorted(own), [quality.summary(own[w]).mean for w in sorted(own)], colour=colour)
                    for colour, (tails, own) in enumerate(mined.items())
                ),
                _line("no mining", quality, ends, [masked, masked], None, "--"),
            ],
            {"xscale": "log"},
        )
        for quality in (DETECTION, ROBUSTNESS)
        if measured(quality, masked, *groups)
    ]


def change_panel(plain: Records, anchored: Mapping[float, Records]) -> Panel:
    """Return by how many per cent each quality is better than the plain network's; those without value there are left out."""
    alphas = sorted(anchored)
    zero = Line("plain", [alphas[0], alphas[-1]], [0.0, 0.0], colour=None, style="--")
    lines = [zero]
    for quality in QUALITIES:
        if measured(quality, plain, *anchored.values()) and (before := quality.summary(plain).mean) != 0:
            changes = [100 * (quality.summary(anchored[alpha]).mean / before - 1) for alpha in alphas]
            lines.append(Line(quality.name, alphas, changes, colour=len(lines) - 1))
    return Panel("change against the plain network, %", "masking probability", lines)
