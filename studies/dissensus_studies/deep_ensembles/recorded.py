"""Arms of the practicals in the record in; tables of the page and verdicts on claims out."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from dissensus_studies.deep_ensembles import regression, spirals
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.claims import Claim, in_one_word
from dissensus_studies.harness.statistics import Summary
from dissensus_studies.recorded import as_floats, made

BY_MEMBERS = "deep-ensembles/adversarial-training-ensembles-number-of-members"
SEEDS = "deep-ensembles/regression-over-seeds"
SPIRALS = "deep-ensembles/classification-of-spirals"
# Columns of the tables by what repeats measured; of some the median stands in brackets.
BY_COLUMN = {
    "NLL": "nll",
    "NLL, attacked": "nll_attacked",
    "RMSE (median)": "rmse",
    "wild": "wild",
    "sd inside (median)": "sd_inside",
    "sd outside (median)": "sd_outside",
    "covered inside": "coverage_inside",
    "beside": "coverage_near",
    "outside": "coverage_outside",
}
FITS = {
    "train accuracy": "train_accuracy",
    "train NLL": "train_nll",
    "test accuracy": "test_accuracy",
    "test NLL": "test_nll",
    "test ECE": "test_ece",
    "accuracy, attacked": "attacked_accuracy",
    "NLL, attacked": "attacked_nll",
}
PLANE = {
    "confidence beyond radius 1.5": "confidence_far",
    "of one net": "confidence_far_member",
    "on the data": "confidence_data",
    "entropy at boundaries": "entropy_boundary",
    "elsewhere in the disc": "entropy_elsewhere",
    "knowledge beyond radius 1": "knowledge_far",
    "on the data (2)": "knowledge_data",
    "agreed corners, of 4": "agreed_corners",
    "data uncertainty in the disc": "data_uncertainty_inside",
}
# Means alone; a spread of shares and counts over ensembles says little.
_ALONE = ("wild", "agreed_corners")
# Lines of the table of seeds: what it is called, what a run keeps, and what the document's own run had.
OF_SEEDS = {
    "final NLL of the best of six nets, nats": ("best_net", "3.03"),
    "final NLL of the worst of six nets, nats": ("worst_net", "9.23"),
    "mean sd of the mixture over \\|x\\| ≤ 4": ("sd_inside", ""),
    "mean sd of the mixture over 5 ≤ \\|x\\| ≤ 6": ("sd_outside", ""),
}
_QUARTILES = {"least": 0.0, "first quartile": 0.25, "median": 0.5, "third quartile": 0.75, "largest": 1.0}


def arms(rows: Sequence[Record], study: str) -> list[Record]:
    """Return what the arms of a practical measured, `"regression"` or `"spirals"`; short runs do not count."""
    return [as_floats(row["numbers"]) for row in lines_of(rows, study)]


def lines_of(rows: Sequence[Record], study: str) -> list[Record]:
    """Return the lines of those arms."""
    own = (row for row in rows if row["table"] == "deep-ensembles/runs" and row["arm"][0].startswith(study))
    return [row for row in own if not row["setting"]["quick"]]


def _regression(rows: Sequence[Record]) -> dict[tuple[str, int], dict[str, Summary]]:
    """Return what ensembles of each arm and size measured, repeat by repeat."""
    found = (each for each in arms(rows, "regression") if "arm" in each)
    return {(each["arm"], int(each["members"])): _summaries(each) for each in found}


def _spirals(rows: Sequence[Record]) -> dict[str, dict[str, Summary]]:
    """Return what the ensembles of each arm measured, initialisation by initialisation."""
    return {each["arm"]: _summaries(each) for each in arms(rows, "spirals")}


def _summaries(arm: Record) -> dict[str, Summary]:
    return {name: Summary(tuple(values)) for name, values in arm["repeats"].items()}


def shown(rows: Sequence[Record]) -> list[Record]:
    """Return the record as the page shows it: what arms measured in place of what was read off an earlier page."""
    found = list(rows)
    for table, lines in _tables(rows).items():
        if lines:
            new = [{"study": "deep-ensembles", "table": table, "arm": arm, "numbers": own} for arm, own in lines]
            kept = (row for row in found if row["table"] != table or row["arm"] == ["document"])
            found = [*kept, *new]
    return found


def _tables(rows: Sequence[Record]) -> dict[str, list[tuple[list[str], dict[str, object]]]]:
    by_members, by_arm = _regression(rows), _spirals(rows)
    of_seeds = [each["seeds"] for each in arms(rows, "regression") if "seeds" in each]
    return {
        BY_MEMBERS: [([arm, str(count)], _cells(own, BY_COLUMN)) for (arm, count), own in by_members.items()],
        SPIRALS: [([arm], _cells(own, FITS)) for arm, own in by_arm.items()],
        f"{SPIRALS}-2": [([arm], _cells(own, PLANE)) for arm, own in by_arm.items()],
        SEEDS: [
            ([title], {"document": theirs} | _quartiles(own[name]))
            for own in of_seeds
            for title, (name, theirs) in OF_SEEDS.items()
        ],
    }


def _cells(found: Mapping[str, Summary], columns: Mapping[str, str]) -> dict[str, object]:
    """Return each column's mean and standard error as a table has them, and the median where it stands in brackets."""
    cells: dict[str, object] = {}
    for title, name in columns.items():
        mean, error = str(found[name]).split("\u00a0±\u00a0")
        alone = f"{found[name].mean:.{3 if name == 'wild' else 1}f}"
        median = [_three_digits(found[name].median)] if "(median)" in title else []
        cells[title] = alone if name in _ALONE else [mean, error, *median]
    return cells


def _quartiles(values: Sequence[float]) -> dict[str, object]:
    return {title: _three_digits(np.quantile(values, level)) for title, level in _QUARTILES.items()}


def _three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):g}"


def judged_claims(rows: Sequence[Record]) -> dict[str, dict[str, Record]]:
    """Return what replaces a claim's line, by table and text: verdicts of the studies themselves on the arms of the record."""
    found: dict[str, dict[str, Record]] = {}
    if by_members := _regression(rows):
        nets = len(by_members["Gaussian", 1]["nll"].values)
        common = {
            "seeds": nets,
            "setting": f"noisy cubic, as the document, {nets} fresh samples; {made(lines_of(rows, 'regression'))}",
            "command": "dissensus study practical-regression",
        }
        found[f"{BY_MEMBERS}-2"] = _judged(regression.regression_claims(by_members), common)
    if by_arm := _spirals(rows):
        nets = len(by_arm[spirals.PRACTICAL]["train_nll"].values)
        common = {
            "seeds": nets,
            "setting": f"spirals, as the document, {nets} initialisations; {made(lines_of(rows, 'spirals'))}",
            "command": "dissensus study practical-classification",
        }
        found[f"{SPIRALS}-3"] = _judged(spirals.classification_claims(by_arm), common)
    return found


def _in_a_cell(text: str) -> str:
    """Return a text without what breaks a table, and without the p-values of sign tests, whose counts say enough."""
    short = re.sub(r", p = [^)]*", "", text).replace("median difference", "median")
    return short.replace("|", "\\|").replace("unresolved", "within noise")


def _judged(claims: Sequence[Claim], common: Record) -> dict[str, Record]:
    return {
        _in_a_cell(claim.statement): {
            "measured": [_in_a_cell(claim.measured)],
            "verdict": in_one_word(claim.verdict),
            "note": claim.verdict.replace("unresolved", "within noise"),
            **common,
        }
        for claim in claims
    }
