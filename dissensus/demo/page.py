"""The demo's figures, tables and page."""

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from math import ceil, log10
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dissensus import metrics, plots, scores
from dissensus.demo.answers import (
    CORRUPTIONS,
    ENSEMBLE,
    KNOWN,
    KNOWN_DIGITS,
    NEW,
    ONE_MEMBER,
    ONE_MEMBER_ENTROPY,
    Answers,
    Numbers,
)
from dissensus.html import Headline, Picture, Section, Table, Text, write_page
from dissensus.plots import COLOURS, NOTE_COLOUR, panels
from dissensus.reporting.quality import best_of

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

# More votes than this do not fit under a digit one by one; they are counted instead.
_VOTES_ONE_BY_ONE = 6


def sample_sheet(rows: Mapping[str, Tensor]) -> "matplotlib.figure.Figure":
    """Draw rows of digits, each with its name; `rows` holds images `(columns, 1, 8, 8)`."""
    # Each row becomes one image, with a white pixel around every digit.
    sheet = torch.cat([torch.cat(list(F.pad(images[:, 0], (1, 1, 1, 1))), dim=1) for images in rows.values()])
    figure, (ax,) = panels(width=5.2, height=0.2 + 4.5 * sheet.shape[0] / sheet.shape[1])
    _draw_ink(sheet, ax)
    pitch = len(sheet) / len(rows)
    ax.set_xticks([])
    ax.set_yticks([(number + 0.5) * pitch for number in range(len(rows))], list(rows))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return figure


def votes_sheet(
    images: Tensor, votes: Tensor, names: Sequence[str], *, columns: int = 5
) -> "matplotlib.figure.Figure":
    """Draw digits, each with what it is and what the members say it is; `votes` is `(members, images)`."""
    side = images.shape[-1]
    # In pixels of the digits; two lines of text stand under each.
    across, down = side + 3, side + 6
    rows = ceil(len(images) / columns)
    figure, (ax,) = panels(height=0.1 + 4.7 * rows * down / (columns * across))
    for place, image in enumerate(images):
        left, top = place % columns * across, place // columns * down
        _draw_ink(image[0], ax, left, top)
        middle, bottom = left + side / 2, top + side
        ax.text(middle, bottom + 0.6, vote_text(votes[:, place]), ha="center", va="top", fontsize=11)
        ax.text(middle, bottom + 3.0, names[place], ha="center", va="top", fontsize=9, color=NOTE_COLOUR)
    ax.set(xlim=(-1.5, columns * across - 1.5), ylim=(rows * down, -0.5))
    ax.set_axis_off()
    return figure


def vote_text(votes: Tensor) -> str:
    """Return the members' votes in order, or, if they are many, the two digits with most votes.

    Example:
        >>> vote_text(torch.tensor([3, 3, 5])), vote_text(torch.tensor([3, 3, 5, 3, 3, 3, 3]))
        ('3 3 5', '6× 3, 1× 5')
    """
    ballots = votes.tolist()
    if len(ballots) <= _VOTES_ONE_BY_ONE:
        return " ".join(map(str, ballots))
    return ", ".join(f"{number}× {digit}" for digit, number in Counter(ballots).most_common(2))


def uncertainty_bars(
    data: Sequence[float], knowledge: Sequence[float], names: Sequence[str]
) -> "matplotlib.figure.Figure":
    """Draw data and knowledge uncertainty of each set end to end; together they are the total."""
    figure, (ax,) = panels(height=0.9 + 0.42 * len(names))
    for values, starts, label, colour in (
        (data, [0.0] * len(data), "data", COLOURS[0]),
        (knowledge, data, "knowledge", COLOURS[1]),
    ):
        ax.barh(names, values, left=starts, height=0.62, color=colour, label=label)
    for place, (first, second) in enumerate(zip(data, knowledge, strict=True)):
        ax.annotate(
            f"{first + second:.2f}", (first + second, place), (5, 0), textcoords="offset points", va="center"
        )
    ax.invert_yaxis()
    ax.set(xlabel="mean uncertainty (nats); the number is the total")
    ax.margins(x=0.12)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small", loc="lower right")
    return figure


def member_dots(members: Sequence[float], ensemble: float) -> "matplotlib.figure.Figure":
    """Draw accuracies: a dot for each member, a line for the ensemble."""
    figure, (ax,) = panels(height=2.8)
    ax.plot(range(len(members)), members, "o", color=COLOURS[0])
    ax.axhline(ensemble, color=COLOURS[1], linewidth=1.6)
    ax.text(1.02, ensemble, "ensemble", color=COLOURS[1], va="center", transform=ax.get_yaxis_transform())
    ax.set_xticks(range(len(members)))
    ax.margins(y=0.25)
    ax.set(xlabel="member", ylabel="accuracy", xlim=(-0.5, len(members) - 0.5))
    return figure


def uncertainty_histograms(scores: Mapping[str, Tensor], name: str) -> "matplotlib.figure.Figure":
    """Draw how often each size of an uncertainty occurs in several sets.

    The horizontal axis is logarithmic: known digits differ from unknown ones by orders of magnitude. What is below
    its left end is counted there.
    """
    lowest, highest = 1e-5, max(float(values.max()) for values in scores.values())
    edges = torch.logspace(log10(lowest), log10(highest), 31, dtype=torch.float64)
    edges[-1] = highest
    figure, (ax,) = panels()
    for (label, values), colour in zip(scores.items(), COLOURS, strict=False):
        counts, _ = torch.histogram(values.double().clamp(lowest, highest), edges)
        shares = (counts / len(values)).numpy()
        ax.stairs(shares, edges.numpy(), color=colour, fill=True, alpha=0.2)
        ax.stairs(shares, edges.numpy(), color=colour, linewidth=1.4, label=label)
    ax.set(xscale="log", xlabel=f"{name} (nats)", ylabel="share of digits")
    ax.legend(frameon=False, fontsize="small")
    return figure


def _draw_ink(values: Tensor, ax: "matplotlib.axes.Axes", left: int = 0, top: int = 0) -> None:
    """Draw an image, dark on white, with its upper left corner at a place."""
    height, width = values.shape
    ax.imshow(
        values.numpy(),
        cmap="gray_r",
        vmin=0,
        vmax=1,
        extent=(left, left + width, top + height, top),
        interpolation="nearest",
    )


# How many digits a gallery shows.
_GALLERY = 10


def quality_table(numbers: Numbers, num_members: int) -> Table:
    """Return how good predictions on known digits are, one member's beside the ensemble's."""
    names = {ONE_MEMBER: f"{ONE_MEMBER} (mean of {num_members})", ENSEMBLE: f"{ENSEMBLE} of {num_members}"}
    return _table("model", numbers, names, "Predictions on known digits that were not trained on")


def uncertainty_table(numbers: Numbers) -> Table:
    """Return each set's accuracy and mean uncertainties."""
    names = {NEW: f"{NEW} ({KNOWN} to 9)", **{name: f"known digits, {name}" for name in CORRUPTIONS}}
    return _table("inputs", numbers, names, "Accuracy of the ensemble, and its mean uncertainty in nats")


def detection_table(numbers: Numbers) -> Table:
    """Return how well each score tells known from unknown digits."""
    names = {ONE_MEMBER_ENTROPY: f"{ONE_MEMBER_ENTROPY} (mean)"}
    return _table("score", numbers, names, "AUROC, known against unknown digits (0.5 is chance, 1 perfect)")


def _table(head: str, numbers: Numbers, names: Mapping[str, str], caption: str) -> Table:
    columns = [head, *next(iter(numbers.values()))]
    rows = [[names.get(key, key), *row.values()] for key, row in numbers.items()]
    large = {"accuracy", *next(iter(numbers.values()))} if head == "score" else {"accuracy"}
    best = [
        (row, column)
        for column, name in enumerate(columns[1:], start=1)
        if head != "inputs"
        for row in best_of(
            {at: _as_float(cells[column]) for at, cells in enumerate(rows)}, large=name in large
        )
    ]
    return Table(columns, rows, caption, best)


def _as_float(cell: object) -> float | None:
    return cell if isinstance(cell, float) else None


def write_demo_page(
    path: Path, answers: Answers, quality: Numbers, uncertainty: Numbers, detection: Numbers, *, seed: int
) -> Path:
    """Write the page of the demo."""
    sections = [
        _data(answers),
        _predictions(answers, quality),
        _training(answers),
        _calibration(answers),
        _uncertainty(uncertainty),
        _separation(answers, detection),
        _members(answers),
        _gallery(answers),
        _settings(answers, seed),
    ]
    today = date.today()
    return write_page(
        path,
        "What an ensemble knows about handwritten digits",
        sections,
        _lead(answers, quality, uncertainty),
        subtitle=f"{today.day} {today:%B %Y} · scikit-learn's digits · {len(answers.digits.test.x)} known and "
        f"{len(answers.digits.unknown[NEW].x)} new ones to test on",
        headlines=_headlines(answers.num_members, quality, detection),
    )


def _headlines(num_members: int, quality: Numbers, detection: Numbers) -> list[Headline]:
    """Return accuracy, and how well the default score and the best one tell known from unknown digits."""
    together = {name: float(row["all"] or 0.0) for name, row in detection.items()}
    default, best = "total uncertainty", max(together, key=lambda name: together[name])
    told = {default: "the default score", best: "the best score here"}
    return [
        Headline(
            "known digits read right",
            f"{quality[ENSEMBLE]['accuracy']:.1%}",
            f"by {num_members} networks together",
        ),
        *(
            Headline("AUROC, known against unknown", f"{together[name]:.3f}", f"{name}, {role}")
            for name, role in told.items()
        ),
    ]


def _lead(answers: Answers, quality: Numbers, uncertainty: Numbers) -> str:
    return (
        f"An ensemble of {answers.num_members} small networks learned the digits 0 to {KNOWN - 1} and reads "
        f"{quality[ENSEMBLE]['accuracy']:.1%} of the known digits in a test correctly. About these its members "
        f"disagree by {uncertainty[KNOWN_DIGITS]['knowledge']:.3f} nats on average; about the digits {KNOWN} "
        f"to 9, which they never saw, by {uncertainty[NEW]['knowledge']:.3f} nats."
    )


def _data(answers: Answers) -> Section:
    digits, new = answers.digits, answers.digits.unknown[NEW]
    shown = torch.stack([_nth(digits.test.y, digit, 0) for digit in range(KNOWN)])
    unseen = torch.stack([_nth(new.y, KNOWN + place % (10 - KNOWN), place) for place in range(KNOWN)])
    rows = {"known": digits.test.x[shown], "new": new.x[unseen]}
    rows |= {name: digits.unknown[name].x[shown] for name in CORRUPTIONS}
    return Section(
        "What the ensemble is shown",
        Text(
            f"It learns from {len(digits.train.x)} images of the digits 0 to {KNOWN - 1}, 8 by 8 pixels each, "
            f"and is tested on {len(digits.test.x)} others. Unknown to it are {len(new.x)} images of the digits "
            f"{KNOWN} to 9, and the test images corrupted in three ways: by noise, by a shift of two pixels, and "
            "by a grey cover."
        ),
        Picture(
            sample_sheet(rows),
            f"Five rows of digits: known ones from 0 to {KNOWN - 1}, new ones, and the known ones with noise, "
            "shifted, and partly covered.",
        ),
    )


def _nth(labels: Tensor, digit: int, number: int) -> Tensor:
    """Return where a digit occurs for the nth time, counted from 0."""
    return torch.nonzero(labels == digit)[number, 0]


def _predictions(answers: Answers, quality: Numbers) -> Section:
    return Section(
        "How good the predictions are",
        Text(
            "Accuracy should be high. NLL and Brier score judge the whole prediction, ECE the gap between "
            "confidence and accuracy; these three should be low. The better value is bold."
        ),
        quality_table(quality, answers.num_members),
    )


def _training(answers: Answers) -> Section:
    figure, (ax,) = plots.panels(height=3.4)
    columns = {"loss": "training", "validation_loss": "test, members", "ensemble_loss": "test, ensemble"}
    for (column, name), colour in zip(columns.items(), plots.COLOURS, strict=False):
        plots.training_curves(answers.run.history, ax, column=column, colour=colour)
        ax.lines[-1].set_label(name)
    ax.set(yscale="log", ylabel="cross-entropy (nats)")
    ax.legend(frameon=False, fontsize="small")
    return Section(
        "Training",
        Text(
            "All members train at once, each from its own start and through the data in its own order. The "
            "ensemble's line lies below its members' mean by what averaging their predictions gains."
        ),
        Picture(
            figure,
            "Training loss, the members' test loss and the ensemble's test loss over the steps of training.",
            "Thin lines are single members, thick ones their mean or the ensemble. The test images are only "
            "looked at: nothing is chosen by them.",
        ),
    )


def _calibration(answers: Answers) -> Section:
    sets = {
        "known digits": (answers.known, answers.digits.test.y),
        "corrupted digits": answers.corrupted,
    }
    return Section(
        "Can its confidence be believed?",
        Text(
            "A dot says how often predictions of that confidence were right: on the dashed line confidence is "
            "honest, below it the model claims more than it knows. Dots above short grey bars rest on few digits "
            "and wobble."
        ),
        *(
            _reliability(model, logits, labels, name)
            for name, (together, labels) in sets.items()
            for model, logits in {"member 0": together[[0]], ENSEMBLE: together}.items()
        ),
    )


def _reliability(model: str, logits: Tensor, labels: Tensor, name: str) -> Picture:
    curve = metrics.reliability_curve(logits.softmax(-1).mean(0), labels, bins=10)
    figure, (ax,) = plots.panels()
    plots.reliability(curve, ax, label=model)
    ax.set_title(f"{model}, {name}")
    return Picture(
        figure,
        f"Confidence against accuracy of {model} on {name}; expected calibration error {curve.ece:.3f}.",
    )


def _uncertainty(uncertainty: Numbers) -> Section:
    data, knowledge = (
        [float(row[part] or 0.0) for row in uncertainty.values()] for part in ("data", "knowledge")
    )
    return Section(
        "How uncertain it is, and why",
        Text(
            "Total uncertainty is the entropy of the averaged prediction: a data part, what members doubt each by "
            "itself, and a knowledge part, what they disagree about. Both should be small on known digits and "
            "larger on unknown ones, for which there is no right answer (new) or which are harder (corrupted)."
        ),
        uncertainty_table(uncertainty),
        Picture(
            uncertainty_bars(data, knowledge, list(uncertainty)),
            "Bars of data and knowledge uncertainty, end to end, for each kind of input; numbers as in the table.",
        ),
    )


def _separation(answers: Answers, detection: Numbers) -> Section:
    sets = {"known": answers.known, "new": answers.unknown[NEW], "corrupted": answers.corrupted[0]}
    uncertainties = {
        "total uncertainty": scores.total_entropy,
        "knowledge uncertainty": scores.mutual_information,
    }
    return Section(
        "Telling known from unknown",
        Text(
            "The less known and unknown digits overlap, the better a threshold on the uncertainty tells them "
            "apart. AUROC is the chance that an unknown digit scores higher than a known one; the "
            "best of each column is bold."
        ),
        *(
            Picture(
                uncertainty_histograms({key: score(logits) for key, logits in sets.items()}, name),
                f"Histograms of {name} for known, new and corrupted digits.",
                "On a logarithmic scale; what is below its left end is counted there.",
            )
            for name, score in uncertainties.items()
        ),
        detection_table(detection),
    )


def _members(answers: Answers) -> Section:
    return Section(
        "Members and ensemble",
        Text(
            "Each dot is one member, the line is the ensemble. A line above most dots means that members make "
            "different mistakes, which averaging outvotes."
        ),
        _member_accuracies(answers.known, answers.digits.test.y, "known digits"),
        _member_accuracies(*answers.corrupted, "corrupted digits"),
    )


def _member_accuracies(logits: Tensor, labels: Tensor, name: str) -> Picture:
    probs = logits.softmax(-1)
    members = [metrics.accuracy(own, labels) for own in probs]
    ensemble = metrics.accuracy(probs.mean(0), labels)
    figure = member_dots(members, ensemble)
    figure.axes[0].set_title(name)
    listed = ", ".join(f"{value:.3f}" for value in members)
    return Picture(figure, f"Accuracy on {name}: members {listed}; ensemble {ensemble:.3f}.")


def _gallery(answers: Answers) -> Section:
    sets = {"known": answers.digits.test, **answers.digits.unknown}
    images = torch.cat([part.x for part in sets.values()])
    logits = torch.cat([answers.known, *answers.unknown.values()], dim=1)
    names = [
        f"{digit}, {kind.removesuffix(' digits')}" for kind, part in sets.items() for digit in part.y.tolist()
    ]
    is_known = torch.cat([part.y < KNOWN for part in sets.values()])
    disagreement = scores.mutual_information(logits)
    doubt = scores.total_entropy(logits).masked_fill(is_known, float("inf"))
    alike = disagreement.argsort(stable=True)
    galleries = {
        "Most disputed: members read them differently.": disagreement.argsort(descending=True, stable=True),
        "Least disputed, two of a kind: members read them alike.": _two_of_a_kind(alike, logits),
        "New and least doubted: members are sure, and no answer is right.": doubt.argsort(stable=True),
    }
    return Section(
        "Digits and votes",
        Text(
            "Under each digit stand the votes of the members, then what it really shows and which set it is from. "
            "The last picture is a warning: where a new digit looks like a known one, all members can be sure of "
            "the same wrong answer."
        ),
        *(
            _votes(
                caption, images[best], logits[:, best].argmax(-1), [names[place] for place in best.tolist()]
            )
            for caption, order in galleries.items()
            for best in [order[:_GALLERY]]
        ),
    )


def _two_of_a_kind(order: Tensor, logits: Tensor) -> Tensor:
    """Return the first two inputs of each predicted class, in their order."""
    predicted = logits.softmax(-1).mean(0).argmax(-1)[order]
    places = torch.cat([torch.nonzero(predicted == digit)[:2, 0] for digit in range(KNOWN)])
    return order[places.sort().values]


def _votes(caption: str, images: Tensor, votes: Tensor, names: Sequence[str]) -> Picture:
    read = "; ".join(f"{name}: {vote_text(votes[:, place])}" for place, name in enumerate(names))
    return Picture(
        votes_sheet(images, votes, names), f"{caption} What they are and the votes: {read}.", caption
    )


def _settings(answers: Answers, seed: int) -> Section:
    rows: list[list[object]] = [
        ["members", answers.num_members],
        ["epochs", answers.run.epoch],
        ["steps", answers.run.step],
        ["seed", seed],
        ["Python", platform.python_version()],
        ["PyTorch", torch.__version__],
    ]
    return Section(
        "How this page was made",
        Text("By the command dissensus demo. The seed decides everything that is random."),
        Table(["setting", "value"], rows, "Settings and versions"),
    )
