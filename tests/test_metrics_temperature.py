"""Temperature scaling: recovers what was put in, and never makes the fit worse."""

from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dissensus import metrics
from dissensus.metrics import calibration


def sampled_labels(logits, seed=0):
    return torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(seed))[:, 0]


def random_logits(seed, members=3, batch=60, classes=4, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(members, batch, classes, generator=generator)


def pooled(logits):
    return logits.double().softmax(-1).mean(0)


@pytest.mark.parametrize("true", [0.4, 1.0, 2.5])
def test_the_temperature_of_each_member_is_recovered(true):
    clean = random_logits(0, members=1, batch=100_000, classes=5, scale=2.0)
    labels = sampled_labels(clean[0])
    factors = torch.tensor([true, 2 * true])
    fitted = metrics.fit_temperature(clean * factors[:, None, None], labels)
    torch.testing.assert_close(fitted.value, factors.double(), rtol=0.02, atol=0)
    torch.testing.assert_close(fitted.apply(clean * factors[:, None, None])[1], clean[0], rtol=0.02, atol=1e-6)


def test_the_temperature_of_the_pool_is_recovered():
    logits = random_logits(1, members=4, batch=100_000, classes=5, scale=2.0)
    flattened = pooled(logits).log() / 0.6  # the pool is underconfident: its true distribution is sharper
    fitted = metrics.fit_temperature(logits, sampled_labels(flattened), of="pool")
    assert fitted.value.item() == pytest.approx(0.6, rel=0.02)
    assert fitted.apply(logits).shape == (1, 100_000, 5)


def test_two_classes_have_a_closed_form():
    # Margin m and accuracy a: sigmoid(m / T) = a.
    margin, accuracy = 5.0, 0.9
    logits = torch.tensor([[[margin, 0.0]]]).repeat(1, 100, 1)
    fitted = metrics.fit_temperature(logits, (torch.arange(100) >= 90).long())
    assert fitted.value.item() == pytest.approx(margin / log(accuracy / (1 - accuracy)), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.01, 50), st.sampled_from(["members", "pool"]))
def test_the_likelihood_is_never_worse_after_fitting(seed, scale, of):
    logits = random_logits(seed, scale=scale).double()
    labels = torch.randint(4, (60,), generator=torch.Generator().manual_seed(seed))
    fitted = metrics.fit_temperature(logits, labels, of=of)
    if of == "pool":
        before, after = [pooled(logits)], [pooled(fitted.apply(logits))]
    else:
        before, after = logits.softmax(-1), fitted.apply(logits).softmax(-1)
    for old, new in zip(before, after, strict=True):
        assert metrics.nll(new, labels) <= metrics.nll(old, labels) + 1e-12


@pytest.mark.parametrize("of", ["members", "pool"])
def test_the_order_of_classes_does_not_change(of):
    logits = random_logits(2).double()
    scaled = metrics.fit_temperature(logits, sampled_labels(logits[0]), of=of).apply(logits)
    before = pooled(logits)[None] if of == "pool" else logits
    assert (scaled.argsort(-1) == before.argsort(-1)).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 10))
def test_the_fit_is_a_minimum(seed, scale):
    logits = random_logits(seed, members=1, scale=scale).double()
    labels = sampled_labels(logits[0] / 2, seed)
    best = metrics.fit_temperature(logits, labels).value
    at_best = metrics.nll((logits[0] / best).softmax(-1), labels)
    for factor in (0.99, 1.01):
        nearby = (factor * best).clamp(calibration.LOWEST, calibration.HIGHEST)
        assert metrics.nll((logits[0] / nearby).softmax(-1), labels) >= at_best - 1e-12


def test_members_do_not_influence_each_other():
    logits = random_logits(3)
    labels = sampled_labels(logits[0])
    together = metrics.fit_temperature(logits, labels).value
    alone = torch.cat([metrics.fit_temperature(member[None], labels).value for member in logits])
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


def test_labels_that_determine_nothing_give_an_end_of_the_range_or_one():
    logits = torch.tensor([[[4.0, 0.0], [3.0, 0.0]]])
    right, wrong = torch.tensor([0, 0]), torch.tensor([1, 1])
    assert metrics.fit_temperature(logits, right).value.item() == pytest.approx(calibration.LOWEST)
    assert metrics.fit_temperature(logits, wrong).value.item() == pytest.approx(calibration.HIGHEST)
    assert metrics.fit_temperature(torch.zeros(1, 2, 2), right).value.item() == 1.0


def test_an_end_of_the_range_is_said_to_be_one(caplog):
    logits = torch.tensor([[[4.0, 0.0], [3.0, 0.0]]])
    with caplog.at_level("WARNING", logger="dissensus"):
        assert metrics.fit_temperature(logits, torch.tensor([0, 1])).determined
        assert not caplog.records
        assert not metrics.fit_temperature(logits, torch.tensor([0, 0])).determined
    assert "2 validation labels do not determine a temperature" in caplog.text


@pytest.mark.parametrize(
    ("value", "of", "words"),
    [
        ([0.0], "members", "positive and finite"),
        ([1.0, float("nan")], "members", "positive and finite"),
        ([1.0, 2.0], "pool", "one for the pool"),
        ([[1.0]], "members", "one axis"),
    ],
)
def test_temperatures_that_are_none_are_refused(value, of, words):
    with pytest.raises(ValueError, match=words):
        calibration.Temperature(torch.tensor(value, dtype=torch.float64), of)


@pytest.mark.parametrize("wrong", [0, 1, 500])
def test_few_passes_over_the_data_suffice(wrong, monkeypatch):
    passes = []
    slope = calibration._slope
    monkeypatch.setattr(calibration, "_slope", lambda *arguments: passes.append(1) or slope(*arguments))
    # Almost all right, and the exception hardly wrong: the slope decays over a long way before its root.
    logits = torch.tensor([[[3.0, 0.0]]]).repeat(1, 1000, 1)
    logits[0, :wrong, 0] = 0.01
    metrics.fit_temperature(logits, (torch.arange(1000) < wrong).long())
    assert len(passes) < 60


def test_a_pool_at_temperature_one_is_the_log_of_the_mean_probabilities():
    logits = random_logits(4).double()
    unchanged = metrics.Temperature(value=torch.ones(1), of="pool").apply(logits)
    torch.testing.assert_close(unchanged[0], pooled(logits).log())


def test_enormous_logits_are_fitted():
    logits = torch.tensor([[[3e4, 0.0], [3e4, 0.0], [3e4, 0.0], [0.0, 3e4]]])
    labels = torch.zeros(4, dtype=torch.long)
    for of in ("members", "pool"):
        fitted = metrics.fit_temperature(logits.repeat(2, 1, 1), labels, of=of)
        assert fitted.value.isfinite().all()
        assert fitted.apply(logits.repeat(2, 1, 1)).isfinite().all()


def test_pieces_change_nothing(monkeypatch):
    logits = random_logits(5)
    labels = sampled_labels(logits[0])
    whole = metrics.fit_temperature(logits, labels).value
    monkeypatch.setattr(calibration, "CHUNK_VALUES", 28)
    torch.testing.assert_close(metrics.fit_temperature(logits, labels).value, whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of", ["members", "pool"])
def test_scaled_logits_keep_their_precision(dtype, of):
    logits = random_logits(6).to(dtype)
    assert metrics.fit_temperature(logits, sampled_labels(logits[0].float()), of=of).apply(logits).dtype == dtype


def test_bad_logits_are_refused():
    labels = torch.zeros(60, dtype=torch.long)
    with pytest.raises(ValueError, match="members"):
        metrics.fit_temperature(random_logits(0)[0], labels)
    with pytest.raises(ValueError, match="finite"):
        metrics.fit_temperature(random_logits(0) / 0, labels)
    with pytest.raises(ValueError, match="at least two classes"):
        metrics.fit_temperature(random_logits(0)[..., :1], labels)
    with pytest.raises(ValueError, match="3 members that were fitted"):
        metrics.fit_temperature(random_logits(0), labels).apply(random_logits(0)[:2])


def test_probabilities_in_place_of_logits_are_warned_about():
    with pytest.warns(UserWarning, match="look like probabilities"):
        metrics.fit_temperature(random_logits(0).softmax(-1), torch.zeros(60, dtype=torch.long))
