"""Corrupted copies of images: the same images at every batch size, averaged and never pooled, paired with clean ones."""

import numpy as np
import pytest
import torch
from evaluation_cases import CLASSES, as_floats, image_classifier, images
from torch import nn

import dissensus as ds
from dissensus import metrics
from dissensus.data.corruptions import CBAR, CORRUPTIONS, EXTRA, STANDARD, corrupt
from dissensus.evaluation import Evaluation, compare, evaluate
from dissensus.evaluation.corrupting import corruptor_of
from dissensus.scores import all_scores

NAMES = ("gaussian_noise", "contrast", "pixelate")
LEVELS = (1, 4)
SCORES = ("mutual_information", "bma")


@pytest.fixture(scope="module")
def ensemble():
    return image_classifier()


@pytest.fixture(scope="module")
def data():
    return images(90)


def run(ensemble, data, **options):
    options = {"corruptions": NAMES, "severities": LEVELS, "scores": SCORES, "bootstrap": 40, **options}
    return evaluate(ensemble, data, transform=as_floats, seed=3, **options)


@pytest.fixture(scope="module")
def result(ensemble, data):
    return run(ensemble, data, batch_size=32)


def predicted(ensemble, data, name, level):
    copy = corrupt(data[0], name, level, seed=3)
    return ds.predict(ensemble, as_floats(copy))


def test_every_number_of_every_corruption_is_the_metric_of_its_predictions(ensemble, data, result):
    labels = data[1]
    clean = ds.predict(ensemble, as_floats(data[0]))
    seen = set()
    for name in NAMES:
        for level in LEVELS:
            logits = predicted(ensemble, data, name, level)
            probs = logits.softmax(-1).mean(0)
            want = {
                (metric, None): metrics.CLASSIFICATION_METRICS[metric](probs, labels)
                for metric in ("accuracy", "nll", "brier", "ece", "smooth_ece")
            }
            want["disagreement", None] = metrics.mean_disagreement(logits.argmax(-1))
            want["confidence", None] = float(probs.amax(-1).mean())
            want["member_accuracy", None] = np.mean([metrics.accuracy(own, labels) for own in logits.softmax(-1)])
            for score in SCORES:
                pair = [all_scores(part, [score])[score] for part in (logits, clean)]
                want["auroc", score] = metrics.auroc(*pair)
                want["mean", score] = float(pair[0].mean())
            for (metric, score), value in want.items():
                number = result.number(metric, name, score=score, severity=level)
                assert number.value == pytest.approx(value, rel=1e-4, abs=1e-5), number
                assert number.kind == "corruption"
                seen.add(number.key)
    assert seen == {number.key for number in result.numbers if number.kind == "corruption"}


def test_averages_are_means_over_corruptions_and_not_pooled(result):
    for metric, score in (("accuracy", None), ("smooth_ece", None), ("auroc", "bma"), ("mean", "bma")):
        cells = {
            (name, level): result.number(metric, name, score=score, severity=level).value
            for name in NAMES
            for level in LEVELS
        }
        for level in LEVELS:
            mean = np.mean([cells[name, level] for name in NAMES])
            assert result.number(metric, "corruptions", score=score, severity=level).value == pytest.approx(mean)
        overall = result.number(metric, "corruptions", score=score)
        assert overall.value == pytest.approx(np.mean(list(cells.values())))


def test_averages_have_intervals_that_know_the_corruptions_share_their_images(result):
    single = [result.number("accuracy", name, severity=4) for name in NAMES]
    average = result.number("accuracy", "corruptions", severity=4)
    assert average.low < average.value < average.high
    # Never wider than the mean width: equal to it if all corruptions erred on the same images.
    assert average.high - average.low < 1.1 * np.mean([number.high - number.low for number in single])
    # All corruptions see the same images, so their errors do not average out as independent ones would.
    independent = sum((number.high - number.low) ** 2 for number in single) ** 0.5 / len(single)
    assert average.high - average.low > independent
    assert result.number("smooth_ece", "corruptions", severity=4).low is None


def test_replicates_belong_to_the_numbers_before_the_single_corruptions(result):
    with_replicates = result.numbers[: len(result.replicates)]
    assert {number.kind for number in with_replicates} == {"id", "corruptions"}
    for number, own in zip(with_replicates, result.replicates, strict=True):
        assert abs(own.mean() - number.value) <= 6 * max(own.std(), 1e-6) / 40**0.5 + 0.02, number
    assert (result.replicates.std(1) > 0).mean() > 0.9


@pytest.mark.parametrize("batch_size", [1, 1000])
def test_the_size_of_batches_changes_nothing(ensemble, data, result, batch_size):
    other = run(ensemble, data, batch_size=batch_size)
    assert [n.key for n in other.numbers] == [n.key for n in result.numbers]
    np.testing.assert_allclose(
        [n.value for n in other.numbers], [n.value for n in result.numbers], rtol=1e-4, atol=1e-5
    )
    assert [(item.set, item.most, item.index) for item in other.gallery] == [
        (item.set, item.most, item.index) for item in result.gallery
    ]


def test_corruptions_survive_saving_and_stand_in_the_table(result, tmp_path):
    again = Evaluation.load(result.save(tmp_path / "e.json"))
    assert again == result
    text = result.table()
    assert "mean over corruptions" in text
    assert "AUROC of mutual information" in text


def test_images_from_0_to_1_are_those_of_256_steps(ensemble, data, result):
    other = evaluate(
        ensemble,
        (data[0].float() / 255, data[1]),
        transform=lambda x: as_floats((255 * x).round().to(torch.uint8)),
        **{"seed": 3, "corruptions": NAMES, "severities": LEVELS, "scores": SCORES, "bootstrap": 40},
    )
    assert [n.key for n in other.numbers] == [n.key for n in result.numbers]
    np.testing.assert_allclose(
        [n.value for n in other.numbers], [n.value for n in result.numbers], rtol=1e-5, atol=1e-6
    )


def test_the_table_of_severities_is_by_total_entropy_where_it_was_computed(ensemble, data):
    result = run(ensemble, data, scores=("bma", "total_entropy"), severities=(5,), bootstrap=0)
    assert "AUROC of total entropy" in result.table()


def test_averages_can_be_compared(ensemble, data, result):
    other = evaluate(
        ds.DeepEnsemble.from_members([ensemble.member(0)]),
        data,
        corruptions=NAMES,
        severities=LEVELS,
        scores=["bma"],
        bootstrap=40,
        transform=as_floats,
        seed=3,
    )
    one = compare(result, other).difference("accuracy", "corruptions", severity=4)
    assert one.low <= one.value <= one.high


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("standard", STANDARD),
        ("extra", EXTRA),
        ("cbar", CBAR),
        ("c-bar", CBAR),
        ("all", tuple(CORRUPTIONS)),
        (("extra", "fog"), (*EXTRA, "fog")),
    ],
)
def test_a_word_stands_for_a_family(word, names):
    assert corruptor_of(word, 3, 0, None, None).cells == tuple((name, 3) for name in names)


def test_a_corruption_that_its_family_already_has_is_refused():
    with pytest.raises(ValueError, match=r"each corruption once.*got standard, fog"):
        corruptor_of(("standard", "fog"), 3, 0, None, None)


def test_a_single_name_may_come_alone(ensemble, data):
    result = run(ensemble, data, corruptions="contrast", severities=[5], bootstrap=0)
    assert result.number("accuracy", "corruptions").value == result.number("accuracy", "contrast", severity=5).value


def test_the_gallery_keeps_the_most_and_least_disputed_images_with_their_votes(ensemble, data, result):
    x, y = data
    logits = ds.predict(ensemble, as_floats(x))
    dispute = all_scores(logits, ["mutual_information"])["mutual_information"]
    order = dispute.argsort(descending=True, stable=True)
    most = [item for item in result.gallery if item.most]
    least = [item for item in result.gallery if not item.most]
    assert [item.index for item in most] == order[:6].tolist()
    assert {item.index for item in least} == set(dispute.argsort(stable=True)[:6].tolist())
    for item in result.gallery:
        assert item.set == "id"
        assert item.label == int(y[item.index])
        assert item.votes == tuple(logits[:, item.index].argmax(-1).tolist())
        assert item.predicted == int(logits.softmax(-1).mean(0)[item.index].argmax())
        assert item.dispute == pytest.approx(float(dispute[item.index]), rel=1e-4, abs=1e-6)
        np.testing.assert_array_equal(item.image, x[item.index].numpy())


def test_large_and_normalised_images_are_made_small_and_visible():
    ensemble = ds.DeepEnsemble(
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, CLASSES)), num_members=2
    )
    x = torch.randn(12, 1, 200, 100)
    result = evaluate(ensemble, (x, torch.zeros(12, dtype=torch.long)), bootstrap=0)
    assert {item.shape for item in result.gallery} == {(1, 96, 48)}
    assert all(item.image.min() < 100 < 150 < item.image.max() for item in result.gallery)


def test_the_gallery_does_not_depend_on_the_scores_that_are_asked_for(ensemble, data, result):
    few = evaluate(ensemble, data, scores=["bma"], transform=as_floats, bootstrap=0)
    shown = [item for item in result.gallery if item.set == "id"]
    assert [(item.index, item.dispute) for item in few.gallery] == [(item.index, item.dispute) for item in shown]


def test_inputs_that_are_no_images_make_no_gallery():
    ensemble = ds.DeepEnsemble(lambda: nn.Sequential(nn.Flatten(), nn.Linear(10, CLASSES)), num_members=2)
    result = evaluate(ensemble, (torch.randn(20, 5, 2), torch.zeros(20, dtype=torch.long)), bootstrap=0)
    assert result.gallery == ()
