"""Evaluation of several labels an input, of counts, of quantiles and of losses of one's own, against other libraries and by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import dissensus as ds
from dissensus import objectives as obj
from dissensus import scores
from dissensus.evaluation.tables import label_table

sklearn = pytest.importorskip("sklearn.metrics")
MEMBERS, LABELS = 3, 4


def data(count=90, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return x, (x[:, :LABELS] + torch.randn(count, LABELS, generator=g) > 0.3).long()


@pytest.fixture(scope="module")
def ens():
    return ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, LABELS)), MEMBERS, seed=1)


@pytest.fixture(scope="module")
def result(ens):
    far = {"far": 4 * data(50, seed=2)[0]}
    return ds.evaluate(ens, data(), far, shifted={"later": data(70, 3)}, class_names=list("abcd"), bootstrap=300)


def probabilities(ens, x):
    return ds.predict(ens, x).double().sigmoid().mean(0).numpy()


def test_whole_numbers_shaped_as_outputs_are_several_labels(result):
    assert (result.task, result.loss, result.num_outputs) == ("labels", "binary_cross_entropy", LABELS)


@pytest.mark.parametrize(("name", "seed", "count"), [("id", 0, 90), ("later", 3, 70)])
def test_metrics_are_those_of_scikit_learn(ens, result, name, seed, count):
    x, y = data(count, seed)
    probs, y = probabilities(ens, x), y.numpy()
    wanted = {
        "mean_average_precision": sklearn.average_precision_score(y, probs, average="macro"),
        "macro_auroc": sklearn.roc_auc_score(y, probs, average="macro"),
        "subset_accuracy": sklearn.accuracy_score(y, probs > 0.5),
        "label_accuracy": 1 - sklearn.hamming_loss(y, probs > 0.5),
        "brier": np.mean([sklearn.brier_score_loss(y[:, k], probs[:, k]) for k in range(LABELS)]),
        "nll": np.mean([sklearn.log_loss(y[:, k], probs[:, k]) for k in range(LABELS)]),
    }  # fmt: skip
    for metric, value in wanted.items():
        number = result.number(metric, name)
        assert number.value == pytest.approx(value, rel=1e-5), metric
        assert number.low < number.value < number.high
    for k in range(LABELS):
        for metric, oracle in (
            ("average_precision", sklearn.average_precision_score),
            ("label_auroc", sklearn.roc_auc_score),
        ):
            number = result.number(metric, name, label=k)
            assert number.value == pytest.approx(oracle(y[:, k], probs[:, k]), rel=1e-5)
            assert number.low < number.value < number.high
    right = (ds.predict(ens, x) > 0) == torch.from_numpy(y).bool()
    for member in range(MEMBERS):
        own = result.number("label_accuracy", name, member=member).value
        assert own == pytest.approx(right[member].double().mean().item())


def test_calibration_is_that_of_all_answers(ens, result):
    x, y = data()
    probs, truth = probabilities(ens, x).reshape(-1), y.numpy().reshape(-1)
    wanted = ds.metrics.ece(np.stack([1 - probs, probs], 1), truth)
    assert result.number("ece").value == pytest.approx(wanted, rel=1e-5)
    curve = result.reliability[0]
    assert sum(curve.share) == pytest.approx(1)
    gaps = np.abs(np.array(curve.claimed) - np.array(curve.observed))
    assert float((gaps * np.array(curve.share)).sum()) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("over", ["mean", "max", 0.2])
def test_scores_are_those_of_two_classes_pooled_over_labels(ens, over):
    (x, y), far = data(), 4 * data(50, seed=2)[0]
    names = ["mutual_information", "mean_energy", "total_entropy"]
    found = ds.evaluate(ens, (x, y), {"far": far}, over=over, scores=names, bootstrap=0)
    pool = {"mean": lambda v: v.mean(1), "max": lambda v: v.amax(1), 0.2: lambda v: (v > 0.2).double().mean(1)}[over]
    for name in names:
        known, unknown = (
            pool(scores.SCORES[name](scores.as_two_classes(ds.predict(ens, part)), class_axis=-1)) for part in (x, far)
        )
        assert found.number("mean", score=name).value == pytest.approx(known.mean().item(), rel=1e-4)
        answer = np.r_[np.zeros(len(known)), np.ones(len(unknown))]
        wanted = sklearn.roc_auc_score(answer, np.r_[known, unknown])
        assert found.number("auroc", "far", score=name).value == pytest.approx(wanted, abs=1e-4)


def test_scores_without_targets_are_those_of_evaluation_where_outputs_are_said_to_be_labels(ens):
    x, y = data()
    found = ds.predict_scores(ens, x, ["mutual_information", "mean_energy"], loss="binary_cross_entropy", batch_size=40)
    evaluated = ds.evaluate(ens, (x, y), scores=list(found), bootstrap=0)
    for name, values in found.items():
        wanted = scores.SCORES[name](scores.as_two_classes(ds.predict(ens, x)), class_axis=-1).mean(1)
        torch.testing.assert_close(values, wanted)
        assert evaluated.number("mean", score=name).value == pytest.approx(values.mean().item(), rel=1e-5)
    with pytest.raises(ValueError, match="`class_axis` is where classes are"):
        ds.predict_scores(ens, x, loss="binary_cross_entropy", class_axis=-1)


def test_intervals_are_those_of_resampled_inputs(ens, result):
    """Resamples drawn anew, and scikit-learn's means on them: ends agree up to the noise of the draws."""
    x, y = data()
    probs, y, g = probabilities(ens, x), y.numpy(), np.random.default_rng(0)
    values = []
    for _ in range(1000):
        rows = g.integers(0, len(y), len(y))
        values.append(sklearn.average_precision_score(y[rows], probs[rows], average="macro"))
    low, high = np.quantile(values, [0.025, 0.975])
    number = result.number("mean_average_precision")
    assert (number.low, number.high) == pytest.approx((low, high), abs=0.2 * (high - low))


def test_a_label_that_all_or_none_have_is_left_out_of_ranks_only(ens):
    x, y = data(30)
    y[:, 0], y[:, 1] = 0, 1
    y[:, 2] = 0
    y[5, 2] = 1  # resamples without it say nothing
    found = ds.evaluate(ens, (x, y), bootstrap=200)
    probs = probabilities(ens, x)
    wanted = [sklearn.average_precision_score(y[:, k].numpy(), probs[:, k]) for k in (2, 3)]
    assert found.number("mean_average_precision").value == pytest.approx(np.mean(wanted), rel=1e-5)
    assert np.isfinite(found.replicates).all()
    assert [row[1] for row in label_table([found])[1]][:2] == ["–", "–"]
    with pytest.raises(ValueError, match="no 'average_precision' of set 'id'"):
        found.number("average_precision", label=0)
    nothing = ds.evaluate(ens, (x, torch.zeros_like(y)), bootstrap=20)
    assert "label accuracy" in nothing.table()


def test_weights_of_members_count(ens):
    x, y = data()
    found = ds.evaluate(ens, (x, y), weights=[0.0, 1.0, 0.0], scores=["bma"], bootstrap=0)
    alone = ds.evaluate(ds.DeepEnsemble.from_members([ens.member(1)]), (x, y), scores=["bma"], bootstrap=0)
    for metric in ("nll", "brier", "mean_average_precision", "ece"):
        assert found.number(metric).value == pytest.approx(alone.number(metric).value, rel=1e-5)
    assert alone.diagnosis is None


def test_batches_change_nothing_and_float_answers_count_too(ens, result):
    x, y = data()
    small = ds.evaluate(ens, (x, y.float()), loss="binary_cross_entropy", batch_size=7, bootstrap=0)
    for number in small.numbers:
        again = result.number(number.metric, number.set, score=number.score, member=number.member, label=number.label)
        assert number.value == pytest.approx(again.value, rel=1e-5)


def test_results_are_stored_compared_and_shown(ens, result, tmp_path):
    assert ds.Evaluation.load(result.save(tmp_path / "found.json")) == result
    assert result.diagnosis.loss == "sigmoid"
    other = ds.evaluate(
        ds.DeepEnsemble.from_members([ens.member(0)]),
        data(),
        {"far": 4 * data(50, seed=2)[0]},
        shifted={"later": data(70, 3)},
        bootstrap=300,
        name="one",
    )
    pairs = ds.compare(other, result)
    one = pairs.difference("average_precision", label=2)
    assert one.value == result.number("average_precision", label=2).value - one.first
    for metric, better in (("nll", "first"), ("macro_auroc", "second"), ("label_accuracy", "second")):
        larger = replace(pairs.difference(metric), value=0.2, low=0.1, high=0.3)
        assert larger.better == better
    page = ds.report(result, tmp_path / "one.html").read_text(encoding="utf-8")
    for words in ("Label by label", "answers on 4 labels of 90 known inputs", "subset accuracy", ">d</"):
        assert words in page
    both = ds.report([other, result], tmp_path / "both.html").read_text(encoding="utf-8")
    assert "one: average precision" in both
    assert "knowledge uncertainty" in both


def test_pictures_with_several_labels_are_in_the_gallery(tmp_path):
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(20, 1, 8, 8, generator=g), torch.randint(0, 2, (20, 3), generator=g)
    many = ds.DeepEnsemble(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), 3)
    found = ds.evaluate(many, (x, y), bootstrap=0)
    dispute = scores.mutual_information(scores.as_two_classes(ds.predict(many, x)), class_axis=-1).mean(1)
    assert [item.index for item in found.gallery if item.most] == dispute.argsort(descending=True)[:6].tolist()
    assert "Most disputed" in ds.report(found, tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, y: ((x, y[:, :3]), {}), r"must be shaped \(inputs, 4\)"),
        (lambda x, y: ((x, 2 * y), {}), "must be 0 or 1; got"),
        (lambda x, y: ((x, y[:, 0]), {}), "For one class an input choose loss='cross_entropy'"),
        (lambda x, y: ((x, y.float()), {"loss": "auto"}), "labels or numbers: say which"),
        (lambda x, y: ((x, y), {"corruptions": "fog"}), "for classifiers of images, one class each"),
        (lambda x, y: ((x, y), {"scores": ["total_variance"]}), "`scores` must name each score once"),
    ],
)
def test_what_cannot_be_read_gets_a_sentence(ens, change, words):
    given, options = change(*data())
    with pytest.raises(ValueError, match=words):
        ds.evaluate(ens, given, **{"loss": "binary_cross_entropy", "bootstrap": 0} | options)


class TestCounts:
    x = data()[0]
    y = torch.poisson(x[:, 0].exp(), generator=torch.Generator().manual_seed(0))
    rates = ds.DeepEnsemble(lambda: nn.Linear(6, 1), 3, seed=2)

    def test_errors_are_those_of_rates_and_the_mixture_is_of_poissons(self, tmp_path):
        found = ds.evaluate(self.rates, (self.x, self.y), {"far": 3 * self.x}, loss="poisson", bootstrap=100)
        rates = ds.predict(self.rates, self.x)[..., 0].double().exp()
        truth = self.y.double()
        assert found.number("mae").value == pytest.approx((rates.mean(0) - truth).abs().mean().item(), rel=1e-5)
        assert found.number("rmse").value == pytest.approx(
            (rates.mean(0) - truth).square().mean().sqrt().item(), rel=1e-5
        )
        likely = torch.distributions.Poisson(rates).log_prob(truth).exp().mean(0)
        assert found.number("mixture_nll").value == pytest.approx(-likely.log().mean().item(), rel=1e-5)
        parts = [found.number("mean", score=f"{name}_variance").value for name in ("data", "knowledge", "total")]
        assert parts[0] == pytest.approx(rates.mean().item(), rel=1e-5)
        assert parts[1] == pytest.approx(rates.var(0, correction=0).mean().item(), rel=1e-4)
        assert parts[2] == pytest.approx(parts[0] + parts[1], rel=1e-5)
        assert found.diagnosis.loss == "poisson"
        assert "mixture NLL" in found.table()
        assert "How uncertain it is" in ds.report(found, tmp_path / "counts.html").read_text(encoding="utf-8")


class TestLossesOfOnesOwn:
    x, y = data()[0], data()[0][:, 0]

    @pytest.mark.parametrize("loss", [obj.Pinball((0.1, 0.5, 0.9)), "pinball"])
    def test_quantiles(self, loss, tmp_path):
        ens = ds.DeepEnsemble(lambda: nn.Linear(6, 3), 3, seed=2)
        found = ds.evaluate(ens, (self.x, self.y), {"far": 3 * self.x}, loss=loss, bootstrap=100)
        levels = (0.1, 0.5, 0.9) if loss != "pinball" else (1 / 6, 0.5, 5 / 6)
        mean = ds.predict(ens, self.x).mean(0)
        wanted = sum(sklearn.mean_pinball_loss(self.y, mean[:, k], alpha=level) for k, level in enumerate(levels))
        assert found.number("loss").value == pytest.approx(wanted, rel=1e-5)
        (curve,) = found.reliability
        assert curve.claimed == pytest.approx(levels)
        assert curve.observed == pytest.approx((self.y[:, None] <= mean).double().mean(0).tolist())
        assert "Can its quantiles be believed?" in ds.report(found, tmp_path / "q.html").read_text(encoding="utf-8")

    def test_any_loss_of_any_targets(self, tmp_path):
        """Exponential survival: targets are a time and whether it ended there."""

        def survival(output, target):
            time, ended = target.unbind(1)
            return output[:, 0].exp() * time - ended * output[:, 0]

        g = torch.Generator().manual_seed(0)
        y = torch.stack([torch.rand(90, generator=g), torch.randint(0, 2, (90,), generator=g).float()], 1)
        ens = ds.DeepEnsemble(lambda: nn.Linear(6, 1), 3, seed=2)
        ds.fit(ens, (self.x, y), objective=obj.Independent(survival), epochs=2, device="cpu")
        found = ds.evaluate(ens, (self.x, y), {"far": 3 * self.x}, loss=survival, bootstrap=100)
        outputs = ds.predict(ens, self.x)
        assert found.number("loss").value == pytest.approx(survival(outputs.mean(0), y).mean().item(), rel=1e-5)
        for member in range(3):
            own = survival(outputs[member], y).mean().item()
            assert found.number("loss", member=member).value == pytest.approx(own, rel=1e-5)
        assert found.score_names == ("knowledge_variance",)
        spread = [ds.predict(ens, part).var(0, correction=0)[:, 0] for part in (3 * self.x, self.x)]
        assert found.number("auroc", "far", score="knowledge_variance").value == pytest.approx(
            float(ds.metrics.auroc(*spread)), abs=1e-4
        )
        assert "has a loss" in ds.report(found, tmp_path / "own.html").read_text(encoding="utf-8")
        with pytest.raises(ValueError, match="among knowledge_variance; got mutual_information"):
            ds.evaluate(ens, (self.x, y), loss=survival, scores=["mutual_information"])
        y[3, 0] = torch.nan
        with pytest.raises(ValueError, match="must be finite; row 3 is not"):
            ds.evaluate(ens, (self.x, y), loss=survival)
