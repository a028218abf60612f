"""The document's tables 6 to 11 beside what was measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from dissensus.html import Table
from dissensus_studies.arm_log import Record

# Rows are named as those of `AnchorSetting.row`.
Row = tuple[str, str]


@dataclass(frozen=True)
class Published:
    """A table of the document.

    Attributes:
        title: What it shows.
        known: The data that networks were trained on.
        columns: What our sets or severities are called, to what the document calls them.
        rows: (architecture, row) to its numbers; None where the document has none.
        digits: Digits behind the point.
        part: Where a record has the columns that are ours alone: `"auroc"` or `"adaptation"`; None if there are none.
    """

    title: str
    known: str
    columns: Mapping[str, str]
    rows: Mapping[Row, Sequence[float | None]]
    digits: int = 2
    part: str | None = None


_OOD = {
    "lsun_crop": "LSUN (C)",
    "lsun_resize": "LSUN (R)",
    "isun": "iSUN",
    "textures": "Textures",
    "places": "Places365",
}
_SMALL = {**_OOD, "tiny_imagenet": "Tiny ImageNet"}
_SEVERITIES = {str(level): f"severity {level}" for level in range(1, 6)}
_R18, _WRN = "resnet18", "wrn-40-2"

OOD_CIFAR10 = Published(
    "Table 6: AUROC in per cent of networks trained on CIFAR-10",
    "cifar10",
    {**_SMALL, "cifar100": "CIFAR-100"},
    {
        (_R18, "plain"): (97.4, 94.63, 94.05, 87.49, 90.65, 95.87, 87.16),
        (_R18, "anchored"): (95.98, 93.65, 92.65, 84.81, 90.69, 95.11, 86.77),
        (_R18, "alpha=0.0625"): (97.1, 93.91, 93.26, 88.97, 92.12, 96.02, 87.55),
        (_R18, "alpha=0.125"): (98.19, 96.55, 96.12, 91.47, 94.59, 97.1, 90.14),
        (_R18, "alpha=0.25"): (98.11, 96.36, 95.69, 90.02, 93.1, 96.42, 89.64),
    },
    part="auroc",
)
CALIBRATION_CIFAR10 = Published(
    "Table 7: smooth ECE under corruption of networks trained on CIFAR-10",
    "cifar10",
    _SEVERITIES,
    {
        (_R18, "plain"): (0.07, 0.1, 0.14, 0.18, 0.25),
        (_R18, "anchored"): (0.06, 0.09, 0.13, 0.17, 0.24),
        (_R18, "alpha=0.0625"): (0.06, 0.08, 0.11, 0.15, 0.21),
        (_R18, "alpha=0.125"): (0.04, 0.06, 0.08, 0.12, 0.17),
        (_R18, "alpha=0.25"): (0.04, 0.06, 0.08, 0.11, 0.17),
    },
    digits=3,
)
OOD_CIFAR100 = Published(
    "Table 8, top: AUROC in per cent of networks trained on CIFAR-100",
    "cifar100",
    {**_SMALL, "cifar10": "CIFAR-10"},
    {
        (_R18, "plain"): (81.01, 76.1, 76.19, 66.63, 75.79, 81.01, 74.96),
        (_R18, "anchored"): (81.36, 85.25, 85.73, 83.7, 85.56, 85.11, 78.37),
        (_R18, "alpha=0.0625"): (90.34, 86.52, 86.67, 83.11, 86.07, 90.79, 78.68),
        (_R18, "alpha=0.125"): (92.31, 79.21, 78.37, 76.63, 84.16, 89.58, 80.01),
        (_R18, "alpha=0.25"): (89.86, 88.58, 87.76, 87.87, 88.58, 90.29, 79.43),
        (_WRN, "plain"): (96.40, 79.69, 77.32, 78.20, 82.67, 94.77, 77.30),
        (_WRN, "anchored"): (97.1, 80.38, 79.36, 82.58, 81.96, 95.76, 76.42),
        (_WRN, "alpha=0.25"): (97.55, 69.05, 68.72, 65.73, 81.49, 95.18, 78.23),
    },
    part="auroc",
)
_TASKS = {
    "ucf101": "UCF101",
    "food101": "Food101",
    "flowers102": "Flowers102",
    "cars": "Stanford Cars",
    "pets": "Oxford Pets",
    "dtd": "DTD",
    "cifar10": "CIFAR-10",
}
ADAPTATION_ACCURACY = Published(
    "Table 8, bottom: accuracy in per cent of linear probes on networks trained on CIFAR-100",
    "cifar100",
    _TASKS,
    {
        (_R18, "plain"): (25.27, 16.67, 52.54, 5.61, 22.29, 24.65, None),
        (_R18, "anchored"): (25.48, 16.34, 53.11, 6.02, 23.99, 25.95, 76.24),
        (_R18, "alpha=0.0625"): (29.69, 18.45, 57.49, 6.58, 25.21, 27.36, 78.41),
        (_R18, "alpha=0.125"): (29.29, 18.25, 55.3, 6.39, 26.36, 27.78, 77.42),
        (_R18, "alpha=0.25"): (28.58, 17.95, 55.66, 6.57, 24.97, 27.48, 77.48),
        (_WRN, "plain"): (27.20, 20.80, 54.61, 6.75, 26.63, 24.47, 76.92),
        (_WRN, "anchored"): (25.96, 21.54, 53.67, 5.86, 25.62, 24.53, 78.31),
        (_WRN, "alpha=0.25"): (31.75, 24.11, 58.99, 7.29, 30.23, 27.01, 80.19),
    },
    part="adaptation",
)
ADAPTATION_ECE = Published(
    "Table 8, bottom: ECE of linear probes on networks trained on CIFAR-100",
    "cifar100",
    _TASKS,
    {
        (_R18, "plain"): (0.393, 0.293, 0.292, 0.481, 0.419, 0.406, None),
        (_R18, "anchored"): (0.392, 0.302, 0.294, 0.477, 0.417, 0.402, 0.074),
        (_R18, "alpha=0.0625"): (0.365, 0.335, 0.261, 0.476, 0.397, 0.384, 0.084),
        (_R18, "alpha=0.125"): (0.369, 0.409, 0.271, 0.477, 0.405, 0.382, 0.086),
        (_R18, "alpha=0.25"): (0.374, 0.404, 0.27, 0.475, 0.402, 0.39, 0.083),
        (_WRN, "plain"): (0.406, 0.03, 0.29, 0.411, 0.403, 0.411, 0.013),
        (_WRN, "anchored"): (0.408, 0.025, 0.288, 0.394, 0.385, 0.41, 0.013),
        (_WRN, "alpha=0.25"): (0.388, 0.017, 0.263, 0.394, 0.382, 0.401, 0.011),
    },
    digits=3,
    part="adaptation",
)
CALIBRATION_CIFAR100 = Published(
    "Table 9: smooth ECE under corruption of networks trained on CIFAR-100",
    "cifar100",
    _SEVERITIES,
    {
        (_R18, "plain"): (0.07, 0.1, 0.11, 0.14, 0.18),
        (_R18, "anchored"): (0.08, 0.1, 0.12, 0.15, 0.19),
        (_R18, "alpha=0.0625"): (0.1, 0.13, 0.16, 0.19, 0.24),
        (_R18, "alpha=0.125"): (0.1, 0.13, 0.14, 0.17, 0.22),
        (_R18, "alpha=0.25"): (0.08, 0.11, 0.13, 0.15, 0.19),
        (_WRN, "plain"): (0.19, 0.24, 0.26, 0.29, 0.34),
        (_WRN, "anchored"): (0.17, 0.22, 0.24, 0.27, 0.32),
        (_WRN, "alpha=0.25"): (0.12, 0.16, 0.19, 0.22, 0.27),
    },
    digits=3,
)
_REGNET, _VIT = "regnet", "vit-b-16"
CALIBRATION_IMAGENET_C = Published(
    "Table 10, left: smooth ECE on ImageNet-C",
    "imagenet",
    _SEVERITIES,
    {
        (_R18, "plain"): (0.084, 0.093, 0.106, 0.124, 0.144),
        (_R18, "anchored"): (0.083, 0.092, 0.109, 0.132, 0.152),
        (_R18, "alpha=0.025"): (0.082, 0.089, 0.098, 0.114, 0.13),
        (_R18, "alpha=0.05"): (0.081, 0.087, 0.096, 0.111, 0.124),
        (_R18, "alpha=0.1"): (0.082, 0.087, 0.094, 0.106, 0.127),
        (_REGNET, "plain"): (0.083, 0.095, 0.108, 0.129, 0.155),
        (_REGNET, "anchored"): (0.088, 0.101, 0.118, 0.146, 0.169),
        (_REGNET, "alpha=0.1"): (0.083, 0.092, 0.102, 0.12, 0.145),
        (_VIT, "plain"): (0.095, 0.103, 0.116, 0.12, 0.112),
        (_VIT, "anchored"): (0.096, 0.107, 0.117, 0.111, 0.096),
        (_VIT, "alpha=0.1"): (0.114, 0.116, 0.114, 0.114, 0.112),
    },
    digits=3,
)
CALIBRATION_IMAGENET_CBAR = Published(
    "Table 10, right: smooth ECE on ImageNet-C-bar",
    "imagenet",
    _SEVERITIES,
    {
        (_R18, "plain"): (0.101, 0.138, 0.183, 0.226, 0.239),
        (_R18, "anchored"): (0.1, 0.141, 0.184, 0.223, 0.235),
        (_R18, "alpha=0.025"): (0.096, 0.134, 0.174, 0.211, 0.224),
        (_R18, "alpha=0.05"): (0.092, 0.125, 0.165, 0.21, 0.223),
        (_R18, "alpha=0.1"): (0.09, 0.126, 0.17, 0.217, 0.228),
        (_REGNET, "plain"): (0.11, 0.141, 0.174, 0.209, 0.22),
        (_REGNET, "anchored"): (0.114, 0.146, 0.179, 0.215, 0.228),
        (_REGNET, "alpha=0.1"): (0.097, 0.122, 0.16, 0.195, 0.206),
        (_VIT, "plain"): (0.117, 0.12, 0.115, 0.135, 0.144),
        (_VIT, "anchored"): (0.122, 0.123, 0.118, 0.138, 0.144),
        (_VIT, "alpha=0.1"): (0.13, 0.135, 0.128, 0.129, 0.134),
    },
    digits=3,
)
OOD_IMAGENET = Published(
    "Table 11: AUROC in per cent of networks trained on ImageNet",
    "imagenet",
    {**_OOD, "ninco": "NINCO"},
    {
        (_R18, "plain"): (97.0, 95.07, 95.35, 86.25, 80.9, 75.76),
        (_R18, "anchored"): (96.16, 93.29, 93.86, 86.79, 80.63, 75.67),
        (_R18, "alpha=0.025"): (96.88, 92.27, 92.49, 86.42, 79.94, 76.4),
        (_R18, "alpha=0.05"): (95.59, 90.36, 91.07, 87.19, 80.18, 75.27),
        (_R18, "alpha=0.1"): (94.94, 92.37, 93.02, 86.14, 79.93, 75.03),
        (_REGNET, "plain"): (98.79, 97.61, 97.77, 88.37, 83.03, 80.18),
        (_REGNET, "anchored"): (98.77, 98.04, 98.01, 87.6, 83.39, 80.44),
        (_REGNET, "alpha=0.1"): (97.93, 95.68, 95.95, 88.78, 82.92, 79.18),
        (_VIT, "plain"): (91.59, 87.34, 86.92, 79.24, 65.72, 65.98),
        (_VIT, "anchored"): (89.26, 85.05, 85.32, 78.68, 68.47, 69.66),
        (_VIT, "alpha=0.1"): (89.42, 86.37, 85.81, 78.99, 67.87, 70.79),
    },
    part="auroc",
)

Read = Callable[[Record, str], float | None]


def auroc_of(score: str) -> Read:
    """Return a reader of the AUROC of a score on a set, in per cent."""

    def read(record: Record, name: str) -> float | None:
        found = record["auroc"].get(name, {}).get(score)
        return None if found is None or found[0] is None else 100 * found[0]

    return read


def smooth_ece(record: Record, severity: str, part: str = "corrupted") -> float | None:
    """Return the smooth ECE at a severity, averaged over corruptions."""
    found = record.get(part, {}).get(severity, {}).get("smooth_ece")
    return None if found is None else found[0]


def adaptation(metric: str, factor: float = 1.0) -> Read:
    """Return a reader of a metric of the linear probe on a set."""

    def read(record: Record, name: str) -> float | None:
        found = record["adaptation"].get(name)
        return None if found is None else factor * found[metric]

    return read


def beside(published: Published, records: Mapping[Row, Sequence[Record]], read: Read) -> Table:
    """Return a table of the document with our means over seeds, and our further columns behind its own.

    Args:
        published: The table.
        records: (architecture, row) to the records of all seeds.
        read: The quantity, of a record and a column.
    """
    ours = {name for found in records.values() for record in found for name in _names(record, published)}
    further = [name for name in sorted(ours - set(published.columns)) if _any(records, read, name)]
    head: list[str] = []
    for title in published.columns.values():
        head += [title, "ours"] if published.rows else [title]
    rows = []
    for row in dict.fromkeys([*published.rows, *records]):
        numbers = published.rows.get(row, [None] * len(published.columns))
        cells: list[object] = [*row]
        for number, name in zip(numbers, published.columns, strict=True):
            mean = _shown(_mean(records.get(row, ()), read, name), published.digits)
            cells += [_shown(number, published.digits), mean] if published.rows else [mean]
        cells += [_shown(_mean(records.get(row, ()), read, name), published.digits) for name in further]
        rows.append(cells)
    return Table(
        ("architecture", "row", *head, *(f"{name}, ours" for name in further)), rows, published.title
    )


def by_severity(records: Mapping[Row, Sequence[Record]], metric: str, title: str, digits: int = 4) -> Table:
    """Return a metric under corruption, mean over corruptions and runs: a row for each network, a column for each severity.

    Args:
        records: (architecture, row) to the records of all seeds.
        metric: Such as "accuracy" or "smooth_ece".
        title: What the table shows.
        digits: Digits behind the point.
    """
    levels = sorted(
        {level for found in records.values() for record in found for level in record["corrupted"]}
    )
    rows = [
        (*row, len(found), *(_shown(_mean(found, _under(metric), level), digits) for level in levels))
        for row, found in records.items()
    ]
    names = [f"severity {level}" if level.isdigit() else "mean of all" for level in levels]
    return Table(("architecture", "row", "runs", *names), rows, title)


def _under(metric: str) -> Read:
    def read(record: Record, level: str) -> float | None:
        found = record["corrupted"].get(level, {}).get(metric)
        return None if found is None else found[0]

    return read


def as_markdown(table: Table) -> str:
    """Return a table as Markdown, its caption above it."""
    lines = [
        "| " + " | ".join(map(str, cells)) + " |" for cells in (table.columns, ["---"] * len(table.columns))
    ]
    lines += [
        "| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |" for row in table.rows
    ]
    head = [f"**{table.caption}**", ""] if table.caption else []
    return "\n".join([*head, *lines, ""])


def _names(record: Record, published: Published) -> list[str]:
    found = {} if published.part is None else record.get(published.part, {})
    return [name for name in found if name not in ("near", "far")]


def _any(records: Mapping[Row, Sequence[Record]], read: Read, name: str) -> bool:
    return any(_mean(found, read, name) is not None for found in records.values())


def _mean(records: Sequence[Record], read: Read, name: str) -> float | None:
    values = [value for record in records if (value := read(record, name)) is not None]
    return fmean(values) if values else None


def _shown(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
