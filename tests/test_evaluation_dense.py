"""Evaluation of outputs with positions: the metrics of every position, flattened by hand, and scores pooled over an input's own."""

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import metrics, scores
from dissensus.evaluation.estimates import draw_counts

IGNORED = -100


class Segments(nn.Module):
    """Class logits for every pixel, `(batch, 3, height, width)`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x):
        return 3 * self.layer(x)


class Tags(nn.Module):
    """Class logits for every token, `(batch, tokens, 4)`."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 6), nn.Linear(6, 4)

    def forward(self, ids):
        return 4 * self.out(self.embed(ids))


def images(count=14, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count, 6, 5), generator=g)
    y[torch.rand(y.shape, generator=g) < 0.2] = IGNORED
    return torch.rand(count, 1, 6, 5, generator=g), y


def tokens(count=14, length=7):
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (count, length), generator=g)
    y[:, -2:] = IGNORED
    return torch.randint(0, 10, (count, length), generator=g), y


CASES = {"pixels": (Segments, images, 2), "tokens": (Tags, tokens, 3)}


def by_hand(ens, x, y, axis):
    """Return logits `(members, positions, classes)` and labels of the positions that count."""
    logits = ds.predict(ens, x).movedim(axis, -1).flatten(1, -2)
    counted = (y != IGNORED).flatten()
    return logits[:, counted], y.flatten()[counted]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch_size", [3, 1024])
def test_metrics_are_those_of_all_positions(case, batch_size):
    make, data, axis = CASES[case]
    ens, (x, y) = ds.DeepEnsemble(make, 3, seed=2), data()
    result = ds.evaluate(ens, (x, y), batch_size=batch_size, bootstrap=50)
    logits, labels = by_hand(ens, x, y, axis)
    probs = logits.softmax(-1).mean(0)
    assert result.number("accuracy").value == pytest.approx(float(metrics.accuracy(probs, labels)))
    assert result.number("nll").value == pytest.approx(float(metrics.nll(probs, labels)), rel=1e-5)
    assert result.number("brier").value == pytest.approx(float(metrics.brier(probs, labels)), rel=1e-5)
    assert result.number("ece").value == pytest.approx(float(metrics.ece(probs, labels)), rel=1e-4)
    for member in range(3):
        wanted = float(metrics.accuracy(logits[member].softmax(-1), labels))
        assert result.number("accuracy", member=member).value == pytest.approx(wanted)
    said, shares = probs.argmax(-1), []
    for label in range(probs.shape[-1]):
        both, either = (said == label) & (labels == label), (said == label) | (labels == label)
        shares.append(float(both.sum() / either.sum()))
    assert result.number("mean_iou").value == pytest.approx(np.mean(shares), rel=1e-5)
    for metric in ("accuracy", "nll", "ece", "mean_iou"):
        number = result.number(metric)
        assert number.low <= number.value <= number.high
    assert "mean IoU" in str(result.table())


@pytest.mark.parametrize("over", ["mean", "max", 0.1])
def test_scores_are_pooled_over_the_positions_of_an_input(over):
    ens, (x, y) = ds.DeepEnsemble(Segments, 3, seed=2), images()
    far = {"far": 5 * images(9, seed=1)[0]}
    result = ds.evaluate(ens, (x, y), far, over=over, scores=["mutual_information"], bootstrap=0)

    def pooled(given, counted):
        found = scores.mutual_information(ds.predict(ens, given), class_axis=2).flatten(1)
        rows = [row[keep] for row, keep in zip(found, counted.flatten(1), strict=True)]
        pool = {"mean": torch.mean, "max": torch.max, 0.1: lambda row: (row > 0.1).float().mean()}[over]
        return torch.stack([pool(row) for row in rows])

    known = pooled(x, y != IGNORED)
    unknown = pooled(far["far"], torch.ones(9, 6, 5, dtype=torch.bool))
    assert result.number("mean", score="mutual_information").value == pytest.approx(float(known.mean()), rel=1e-4)
    wanted = float(metrics.auroc(unknown, known))
    assert result.number("auroc", "far", score="mutual_information").value == pytest.approx(wanted, abs=1e-6)


def test_class_weights_count_positions_by_their_class():
    ens, (x, y) = ds.DeepEnsemble(Segments, 2, seed=2), images()
    weights = (1.0, 0.5, 4.0)
    result = ds.evaluate(ens, (x, y), class_weights=weights, bootstrap=0)
    logits, labels = by_hand(ens, x, y, 2)
    right = (logits.softmax(-1).mean(0).argmax(-1) == labels).double()
    share = torch.tensor(weights).double()[labels]
    assert result.number("accuracy").value == pytest.approx(float((share * right).sum() / share.sum()))


def test_a_resample_in_which_no_position_counts_says_nothing(tmp_path):
    """With labels on one input in four, some resamples of four inputs hold none: their values are the estimates."""
    ens, (x, y) = ds.DeepEnsemble(Segments, 3, seed=2), images(4)
    y[1:] = IGNORED
    result = ds.evaluate(ens, (x, y), bootstrap=100)
    named = enumerate(result.numbers[: len(result.replicates)])
    rows = {number.metric: (place, number) for place, number in named if number.score is number.member is None}
    drawn = torch.cat([draws["id"][0] for draws in draw_counts({"id": 4}, 100, result.seed)])
    assert (drawn == 0).any()
    # Other inputs add nothing: every resample has the value of the first, and so has one without it.
    for metric in ("accuracy", "nll", "brier", "ece", "mean_iou"):
        place, number = rows[metric]
        np.testing.assert_allclose(result.replicates[place], number.value, rtol=1e-5)
        assert number.low == pytest.approx(number.value, rel=1e-5)
    assert ds.Evaluation.load(result.save(tmp_path / "evaluation.json")) == result


def test_maps_of_numbers_have_the_errors_of_their_pixels():
    class Depth(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x):
            return self.layer(x)[:, 0]

    x = images()[0]
    ens, y = ds.DeepEnsemble(Depth, 3, seed=2), torch.rand(14, 6, 5)
    result = ds.evaluate(ens, (x, y), loss="mse", bootstrap=20)
    maps = ds.predict(ens, x)
    wanted = (maps.mean(0) - y).square().mean().sqrt()
    assert result.number("rmse").value == pytest.approx(float(wanted), rel=1e-5)
    assert result.number("rmse", member=1).value == pytest.approx(float((maps[1] - y).square().mean().sqrt()), rel=1e-5)
    assert result.number("mae").value == pytest.approx(float((maps.mean(0) - y).abs().mean()), rel=1e-5)
    spread = maps.var(0, correction=0).flatten(1).mean(1)
    assert result.number("mean", score="knowledge_variance").value == pytest.approx(float(spread.mean()), rel=1e-4)


def test_what_is_kept_does_not_grow_with_pixels():
    from dissensus.evaluation._tasks import Classification, Dense
    from dissensus.objectives.likelihoods import LIKELIHOODS

    sizes = []
    for side in (4, 32):
        outputs, y = torch.randn(3, 5, 3, side, side), torch.randint(0, 3, (5, side, side))
        task = Dense.of(Classification(("bma",), None, LIKELIHOODS["cross_entropy"]), outputs, y)
        columns = task.columns(outputs, y)
        # Those two are of a batch only.
        sizes.append(sum(t.numel() for name, t in columns.items() if name not in ("map", "dispute")))
    assert sizes[0] == sizes[1]


def test_padded_batches_of_tokens_are_evaluated_as_they_come():
    ens, (x, y) = ds.DeepEnsemble(Tags, 3, seed=2), tokens()
    short = [(x[:6, :5], y[:6, :5]), (x[6:], y[6:])]

    class Loader(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return short[index]

    loader = torch.utils.data.DataLoader(Loader(), batch_size=None)
    result, whole = ds.evaluate(ens, loader, bootstrap=0), ds.evaluate(ens, (x, y), bootstrap=0)
    for metric in ("accuracy", "nll", "ece", "mean_iou"):
        assert result.number(metric).value == pytest.approx(whole.number(metric).value, rel=1e-5)


def test_the_page_shows_maps_over_images(tmp_path):
    pytest.importorskip("matplotlib")
    ens, (x, y) = ds.DeepEnsemble(Segments, 3, seed=2), images()
    result = ds.evaluate(ens, (x, y), {"far": 1 - x}, bootstrap=50)
    item = result.gallery[0]
    assert item.image.shape == (3, 6, 10)
    # The most disputed pixel is fully red beside its picture.
    over = item.image[:, :, 5:].astype(int)
    assert (over[0] - over[1]).max() == 255
    found = scores.mutual_information(ds.predict(ens, x), class_axis=2)[item.index].numpy()
    assert (over[0] - over[1]).argmax() == found.argmax()
    result.save(tmp_path / "evaluation.json")
    text = ds.report(result, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "positions of 14 known inputs" in text
    assert "red where members disagree" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id_data": (images()[0], images()[1][:, :4])}, "must have one axis of classes"),
        ({"over": "median"}, "`over` must be 'mean'"),
        ({"class_weights": (1.0, 2.0)}, "one number for each of 3 classes"),
        ({"id_data": (images()[0], images()[1].clamp_min(0) + 2)}, "must be class indices from 0 to 2"),
        ({"loss": "gaussian_nll"}, "maps of class logits and of point predictions"),
        ({"id_data": (images()[0], torch.full_like(images()[1], -100))}, "No label of set 'id' counts"),
    ],
)
def test_what_cannot_be_read_gets_a_sentence(change, words):
    arguments = {"id_data": images(), "bootstrap": 0} | change
    with pytest.raises(ValueError, match=words):
        ds.evaluate(ds.DeepEnsemble(Segments, 2), **arguments)


def rows(outputs):
    return ds.DeepEnsemble(lambda: nn.Linear(2, outputs), 2), torch.rand(8, 2)


def depths():
    return ds.DeepEnsemble(lambda: nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Flatten(1, 2)), 2), images(8)[0]


@pytest.mark.parametrize(
    ("option", "fits"),
    [
        ({"over": "max"}, ["labels", "depths", "masks", "segments"]),
        ({"over": 0.3}, ["labels", "depths", "masks", "segments"]),
        ({"class_axis": 2}, ["segments"]),
        ({"ignore_index": 0}, ["masks", "segments"]),
        ({"class_weights": (1.0, 2.0, 1.0)}, ["segments"]),
        ({"class_weights": (1.0, 2.0)}, ["masks"]),
    ],
)
def test_arguments_that_outputs_have_no_use_for_are_refused(option, fits):
    g = torch.Generator().manual_seed(0)
    cases = {
        "classes": (*rows(3), torch.randint(3, (8,), generator=g), "cross_entropy"),
        "labels": (*rows(3), torch.randint(2, (8, 3), generator=g), "binary_cross_entropy"),
        "numbers": (*rows(1), torch.rand(8, generator=g), "mse"),
        "densities": (*rows(2), torch.rand(8, generator=g), "gaussian_nll"),
        "quantiles": (*rows(3), torch.rand(8, generator=g), "pinball"),
        "depths": (*depths(), torch.rand(8, 6, 5, generator=g), "mse"),
        "masks": (
            ds.DeepEnsemble(lambda: nn.Conv2d(1, 1, 3, padding=1), 2),
            images(8)[0],
            torch.randint(2, (8, 1, 6, 5), generator=g),
            "binary_cross_entropy",
        ),
        "segments": (ds.DeepEnsemble(Segments, 2), images(8)[0], images(8)[1].clamp_min(0), "cross_entropy"),
    }
    (name,) = option
    for case, (ens, x, y, loss) in cases.items():
        if case in fits:
            ds.evaluate(ens, (x, y), loss=loss, bootstrap=0, **option)
        elif name == "class_weights" and case in ("masks", "segments"):
            continue  # their number is another matter
        else:
            with pytest.raises(ValueError, match=f"`{name}` is for .* Leave it out"):
                ds.evaluate(ens, (x, y), loss=loss, bootstrap=0, **option)


@pytest.mark.parametrize("form", [torch.Tensor.long, torch.Tensor.float])
def test_maps_of_yes_or_no_are_trained_and_read_as_two_classes(form):
    """One sigmoid a pixel gives what two classes with logits (0, z) give."""

    class TwoClasses(nn.Module):
        def __init__(self, one):
            super().__init__()
            self.one = one

        def forward(self, x):
            z = self.one(x)
            return torch.cat([torch.zeros_like(z), z], 1)

    x = images()[0]
    y = (x > 0.6).long()
    ens = ds.DeepEnsemble(lambda: nn.Conv2d(1, 1, 3, padding=1), 3, seed=2)
    objective = ds.objectives.Independent("binary_cross_entropy")
    run = ds.fit(ens, (x, form(y)), objective=objective, validation=(x, form(y)), epochs=20, lr=0.05, device="cpu")
    last = run.history.rows[-1]
    assert last["loss"] < 0.9 * run.history.rows[0]["loss"]
    probs = ds.predict(ens, x).sigmoid().mean(0)
    wanted = nn.functional.binary_cross_entropy(probs, y.float()).item()
    assert run.history["ensemble_loss"][-1] == pytest.approx(wanted, rel=1e-4)
    found = ds.evaluate(ens, (x, form(y)), {"far": 4 * x}, loss="binary_cross_entropy", bootstrap=50)
    pair = ds.DeepEnsemble.from_members([TwoClasses(ens.member(j)) for j in range(3)])
    two = ds.evaluate(pair, (x, y[:, 0]), {"far": 4 * x}, bootstrap=50)
    for number in two.numbers:
        own = found.number(number.metric, number.set, score=number.score, member=number.member)
        assert own.value == pytest.approx(number.value, rel=1e-4, abs=1e-5)
    assert [item.index for item in found.gallery] == [item.index for item in two.gallery]
    with pytest.raises(ValueError, match="class indices from 0 to 1"):
        ds.evaluate(ens, (x, 2 * form(y)), loss="binary_cross_entropy", bootstrap=0)
