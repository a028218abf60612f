"""Rows of the record in; tables and sentences of the guide on what to choose (docs/choosing.md) out."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import pandas as pd

from dissensus.scores import SCORES
from dissensus_studies.alarms import SHOWN_RATE, mean_shares
from dissensus_studies.choosing import COMBINATIONS, Setting
from dissensus_studies.diversification.recorded import PARTS, kept_heads
from dissensus_studies.harness.arm_log import Record
from dissensus_studies.harness.statistics import Summary
from dissensus_studies.recorded import (
    GROUPS,
    as_floats,
    bare,
    fold,
    framed,
    made,
    markdown,
    mean_text,
    noise_sentence,
    paired,
    span,
    template,
    whole_runs,
)

# Of networks that were trained to the end; and the best near and far AUROC of OpenOOD's CIFAR-10 board, of detectors after training.
ENDED_EPOCHS, OPEN_OOD = 200, (".911", ".947")
TEST_IMAGES = 10_000
# Image sets as pages call them.
DATA = {"fashion_mnist_20k": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
NETWORKS_SAID = {"resnet18": "ResNet-18", "small": "networks of three convolutions"}
# Columns of the table of kinds: means over seeds with half their interval's width; then costs, which have none.
_MEASURED = {
    "accuracy": "test.accuracy",
    "worst member": "worst",
    "NLL": "test.nll",
    "ECE": "test.ece",
    "smooth ECE": "test.smooth_ece",
    "corrupted": "corrupted.all.accuracy",
}
_COSTS: Mapping[str, Mapping[str, tuple[str, float, int]]] = {
    "resnet18": {"thousand images a second": ("images_a_second", 1e3, 0), "GB": ("bytes", 1e9, 1)},
    # Two of these arms ran at a time: how fast they predict is not said.
    "small": {"MB of weights": ("parameter_bytes", 1e6, 2)},
}


def guide(records: Mapping[str, Sequence[Record]]) -> str:
    """Return the guide with its tables and sentences, of the records that it rests on, by name."""
    rows, heads = records["choosing"], records["diversification"]
    long = ended(records["anchoring"])
    parts = {
        **kinds_texts(rows, "resnet18"),
        **{f"small-{name}": text for name, text in kinds_texts(rows, "small").items()},
        "scores": scores_table(rows, heads, long),
        "ended": ended_table(long),
        "ended-how": ended_sentence(long),
        "rings": rings_table(records["alarms"]),
        "rings-how": rings_sentence(records["alarms"]),
        "rings-figure": rings_alt(records["alarms"]),
    }
    text = template("choosing.md")
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part)
    return text


def budgets(rows: Sequence[Record], network: str) -> dict[int, list[Record]]:
    """Return the lines of kinds made of such networks, by the seconds that each was trained for, the longest first."""
    found: dict[int, list[Record]] = {}
    for row in whole_runs(rows, "choosing", "cifar10"):
        setting = row["setting"]
        if setting["epochs"] is None and setting.get("network", "resnet18") == network:
            found.setdefault(int(setting["seconds"]), []).append(row)
    return dict(sorted(found.items(), reverse=True))


def kinds(rows: Iterable[Record]) -> dict[str, pd.DataFrame]:
    """Return the seeds of each kind and objective, the lowest NLL first."""
    frame = framed([as_floats(row["numbers"]) for row in rows])
    families = dict(iter(frame.groupby(frame["family"].map(_short), sort=False)))
    return dict(sorted(families.items(), key=lambda each: each[1]["test.nll"].mean()))


def kinds_table(rows: Sequence[Record], network: str) -> str:
    """Return kinds and objectives that trained for the same seconds, and whose calibration is not told apart; shorter budgets folded."""
    costs = _COSTS[network]
    (_, families), *shorter = ((seconds, kinds(own)) for seconds, own in budgets(rows, network).items())
    arms = {
        name: {"accuracy": seeds["test.accuracy"].mean(), "ECE": seeds["test.ece"].mean()}
        for name, seeds in families.items()
    }
    folded = (fold(f"The same in {seconds} seconds", _one_budget(own, costs)) for seconds, own in shorter)
    return "\n\n".join([_one_budget(families, costs), noise_sentence(arms, TEST_IMAGES), *folded])


def _one_budget(families: Mapping[str, pd.DataFrame], costs: Mapping[str, tuple[str, float, int]]) -> str:
    lines = []
    for name, seeds in families.items():
        numbers = [_over_seeds(seeds, column) for column in _MEASURED.values()]
        best = [_over_seeds(seeds, seeds.filter(like=f"auroc.{group}.").mean().idxmax()) for group in GROUPS]
        paid = [f"{seeds[n].mean() / unit:.{digits}f}" if n in seeds else "" for n, unit, digits in costs.values()]
        head = [name, str(len(seeds)), f"{seeds['training.epochs'].mean():.0f}"]
        lines.append([*head, *numbers, " / ".join(best), *paid])
    return markdown(["kind, objective", "seeds", "epochs", *_MEASURED, "near / far, best score", *costs], lines)


def _over_seeds(seeds: pd.DataFrame, column: str) -> str:
    """Return a column's mean over seeds; nothing where the record has none."""
    found = seeds[column].dropna() if column in seeds else ()
    return mean_text(Summary.of(found)) if len(found) else ""


def kinds_points(rows: Sequence[Record]) -> dict[str, tuple[float, float]]:
    """Return microseconds an image and NLL of what was trained for the longest budget."""
    frame = framed([as_floats(row["numbers"]) for row in next(iter(budgets(rows, "resnet18").values()))])
    frame["cost"] = 1e6 / frame["images_a_second"]
    points = frame.groupby("family", sort=False)[["cost", "test.nll"]].mean()
    return {str(family): (cost, nll) for family, cost, nll in points.itertuples()}


def kinds_texts(rows: Sequence[Record], network: str) -> dict[str, str]:
    """Return the table of kinds made of such networks, and what the guide says around it as far as it follows from the record, by name."""
    found = budgets(rows, network)
    longest, *shorter = found
    families = kinds(found[longest])
    counts = sorted({len(seeds) for seeds in families.values()})
    several = f"{span(counts)} seeds; ± is half a 95 % interval over them."
    repeats = "One seed each: differences of a point or less say nothing." if counts == [1] else several
    folded = f" ({', '.join(map(str, shorter))} in what is folded)" if shorter else ""
    absent = [name for each in COMBINATIONS if (name := _short(Setting(*each).family)) not in families]
    names = list(families)
    return {
        "kinds": kinds_table(rows, network),
        "setting": f"CIFAR-10, {NETWORKS_SAID[network]}, four members, {_machine(found[longest])}: "
        f"**every arm trained for the same {longest} seconds**{_took(found[longest], longest)}{folded}. {repeats}",
        "figure": f"NLL on test images against the microseconds that a prediction of all members takes, after {longest} seconds of "
        f"training; the lowest NLL has {names[0]}, the highest {names[-1]}",
        "absent": f"In the study, but not in the table: {'; '.join(absent) or 'nothing'}.",
        "command": f"dissensus study choosing --network {network} --seconds {longest} --repeats {counts[-1]} --data DIR",
        "compared": "; ".join(filter(None, (_compared(seconds, kinds(own)) for seconds, own in found.items()))),
    }


def _short(family: str) -> str:
    return family.removesuffix(", independent")


def _machine(rows: Sequence[Record]) -> str:
    """Return on what arms were run."""
    names = " and ".join(sorted({row["machine"].removeprefix("NVIDIA ") for row in rows}))
    threads = {int(row["numbers"]["threads"]) for row in rows if "NVIDIA" not in row["machine"]}
    if not threads:
        return f"one {names}, bf16"
    return f"{'one thread' if threads == {1} else f'{span(threads)} threads'} of {names}"


def _took(rows: Sequence[Record], seconds: int) -> str:
    """Say how long training really took, but that of heads, which is the last part of theirs."""
    whole = [row["numbers"] for row in rows if not row["numbers"]["family"].startswith("heads")]
    least, most = (pick(float(each["training"]["seconds"]) for each in whole) for pick in (min, max))
    return f" ({least:.0f} to {most:.0f})" if most - least > 0.1 * seconds else ""


def _compared(seconds: int, families: Mapping[str, pd.DataFrame]) -> str:
    """Say what one network, and four that share the time, are worth after so many seconds; nothing before both were run."""
    if not families.keys() >= {"single", "deep"}:
        return ""
    both = [[_over_seeds(families[n], f"test.{m}") for m in ("accuracy", "nll", "ece")] for n in ("single", "deep")]
    (accuracy, nll, ece), others = both
    told = f"in {seconds} seconds accuracy {accuracy}, NLL {nll}, ECE {ece}, and {', '.join(others)}"
    single, deep = (families[name].set_index("setting.seed") for name in ("single", "deep"))
    gaps = {name: paired(single, deep, f"test.{name}") for name in ("accuracy", "nll", "ece")}
    if len(gaps["nll"].values) < 2:
        return told
    apart = " and ".join(name for name, gap in gaps.items() if gap.sign)
    return f"{told}; seed by seed {f'they differ in {apart}' if apart else 'all within noise'}"


def ended(rows: Iterable[Record]) -> pd.DataFrame:
    """Return the networks of `anchoring` that were trained on CIFAR-10 for the 200 epochs of its document, and each row's together."""
    records = [as_floats(row["numbers"]) for row in whole_runs(rows, "anchoring", "cifar10")]
    records = [
        r for r in records if r["training"]["epochs"] >= ENDED_EPOCHS and r["setting"]["architecture"] == "resnet18"
    ]
    # Values alone, without the ends of their intervals.
    return pd.json_normalize(records).map(lambda each: each[0] if isinstance(each, list) else each)


def ended_table(frame: pd.DataFrame) -> str:
    """Return networks trained to the end, alone (means over seeds) and together as one ensemble."""
    lines = []
    for name, own in frame.groupby("row", sort=False) if len(frame) else ():
        row, together, _ = str(name).partition(" together")
        count = f"{own['together.nets'].iloc[0]:.0f} together" if together else "one network"
        names = ("test.accuracy", "test.nll", "test.ece", "test.smooth_ece", "corrupted.all.accuracy")
        numbers = [_over_seeds(own, each) for each in names]
        found = " / ".join(_over_seeds(own, f"auroc.{group}.mean_energy") for group in GROUPS)
        lines.append([f"{row}, {count}", str(len(own)), *numbers, found])
    header = ["ResNet-18", "runs", "accuracy", "NLL", "ECE", "smooth ECE", "corrupted", "near / far, energy"]
    return markdown(header, lines)


def ended_sentence(frame: pd.DataFrame) -> str:
    """Say what the table of networks trained to the end rests on, and what is published of detectors of one network."""
    near, far = OPEN_OOD
    sets = [name.split(".")[1] for name in frame if name.startswith("auroc.") and name.endswith(".mean_energy")]
    return (
        f"CIFAR-10, all 50 000 training images, {ENDED_EPOCHS} epochs of SGD; corrupted: 19 corruptions at five severities. The best "
        f"detector after training on OpenOOD's CIFAR-10 board has near {near} and far {far}, of one network and on its sets; ours are "
        f"{', '.join(name for name in sets if name not in GROUPS)}."
    )


def scores_table(rows: Sequence[Record], heads: Sequence[Record], long: pd.DataFrame) -> str:
    """Return how each score detects on average: in kinds of the longest budget, in heads that keep members, and in `long`."""
    tabled = pd.concat(kinds(next(iter(budgets(rows, "resnet18").values()))).values())
    groups = {"kinds": tabled[tabled["auroc.near.mutual_information"].notna()], "heads": kept_heads(heads)}
    if "together.nets" in long:
        groups["to the end"] = long[long["together.nets"].notna()]
    found = []
    for score in (name.removeprefix("auroc.near.") for name in tabled if name.startswith("auroc.near.")):
        cells, values = [], []
        for group in groups.values():
            means = [fmean(group[f"auroc.{name}.{score}"]) for name in GROUPS]
            sets = [name for name in group if name.startswith("auroc.") and name.endswith(f".{score}")]
            lowest = group[[name for name in sets if name.split(".")[1] not in PARTS]].min().min()
            cells += [" / ".join(map(bare, means)), bare(lowest, 2)]
            values += means
        found.append((fmean(values), [f"`{score}`", *cells]))
    header = [each for name in groups for each in (f"{name}: near / far", "lowest set")]
    return markdown(["score", *header], [line for _, line in sorted(found, key=lambda each: -each[0])])


def regimes(rows: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the arms of `alarms` by what they were trained on, the least accurate first."""
    found: dict[str, list[Record]] = {}
    for row in rows:
        if row["table"] == "alarms/runs" and not row["setting"]["quick"]:
            arm = as_floats(row["numbers"])
            heads = ", heads" if arm["family"] == "heads" else ""
            name = f"{DATA[row['setting']['data']]}, {row['setting']['images']} images{heads}"
            found.setdefault(name, []).append(arm | {"row": row})
    return dict(sorted(found.items(), key=lambda each: _accuracy(each[1])))


def _accuracy(arms: Sequence[Record]) -> float:
    return fmean(arm["test"]["accuracy"] for arm in arms)


def rings_table(rows: Sequence[Record]) -> str:
    """Return how much of what is unknown rings, by score: of classes held out and of other sets, the mean over parts of the classes."""
    cells: dict[str, list[float]] = {}
    header = ["score"]
    for name, arms in regimes(rows).items():
        header.append(f"{name} (accuracy {bare(_accuracy(arms), 2)})")
        shares = mean_shares(arms)
        for score in SCORES:
            cells.setdefault(score, []).extend(own[score] for own in shares.values())
    lines = [
        [
            f"`{score}`",
            *(f"{bare(near, 2)} / {bare(far, 2)}" for near, far in zip(values[::2], values[1::2], strict=True)),
        ]
        for score, values in sorted(cells.items(), key=lambda each: -fmean(each[1]))
    ]
    return markdown(header, lines)


def rings_alt(rows: Sequence[Record]) -> str:
    """Say in words what the figure of alarms shows."""
    found = regimes(rows)
    means = {
        score: fmean(own[score] for arms in found.values() for own in mean_shares(arms).values()) for score in SCORES
    }
    order = sorted(SCORES, key=lambda score: -means[score])
    return (
        f"Share that rings, by score, in {len(found)} panels: {'; '.join(found)}. On average most rings by {', '.join(order[:3])}, "
        f"least by {', '.join(order[-3:])}"
    )


def rings_sentence(rows: Sequence[Record]) -> str:
    """Say what the table of alarms rests on, and what rang for nothing."""
    arms = [arm for each in regimes(rows).values() for arm in each]
    for_nothing = [fmean(arm["rings"][SHOWN_RATE]["test"].values()) for arm in arms]
    return (
        f"Five networks an ensemble, one for each fifth of the classes that is held out; {made([arm['row'] for arm in arms])}. Of test "
        f"images {bare(min(for_nothing))} to {bare(max(for_nothing))} rang, the mean over scores."
    )
