"""The linear probe is logistic regression on frozen features, with a strength that validation data chose."""

import numpy as np
import pytest
import torch
from backbone_cases import small_backbone
from torch import nn

import dissensus as ds
from dissensus import metrics
from dissensus.probing import STRENGTHS, linear_probe


def task(count=600, features=8, classes=4, seed=0, noise=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.1, 5, features, dtype=dtype)
    x = torch.randn(count, features, generator=generator, dtype=dtype) * spread + 3
    weights = torch.randn(features, classes, generator=torch.Generator().manual_seed(7), dtype=dtype) / spread[:, None]
    y = ((x - 3) @ weights + noise * torch.randn(count, classes, generator=generator, dtype=dtype)).argmax(1)
    return (x[: count // 2], y[: count // 2]), (x[count // 2 :], y[count // 2 :])


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("standardise", [True, False])
@pytest.mark.parametrize("strength", [1e-3, 0.1, 10.0])
def test_it_is_scikit_learns_logistic_regression(strength, standardise, classes):
    linear_model = pytest.importorskip("sklearn.linear_model")
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    train, test = task(classes=classes)
    probe = linear_probe(None, train, test, strengths=[strength], standardise=standardise, max_steps=2000)
    scaler = preprocessing.StandardScaler(with_mean=standardise, with_std=standardise).fit(train[0].numpy())
    peer = linear_model.LogisticRegression(C=strength, tol=1e-9, max_iter=20000)
    peer.fit(scaler.transform(train[0].numpy()), train[1].numpy())
    wanted = torch.tensor(peer.predict_proba(scaler.transform(test[0].numpy())))
    torch.testing.assert_close(probe.probs, wanted, rtol=0, atol=2e-3)
    assert probe.accuracy == pytest.approx(peer.score(scaler.transform(test[0].numpy()), test[1].numpy()), abs=0.004)
    assert probe.strength == strength
    assert probe.curve == ()


def test_the_gradient_vanishes_at_the_solution():
    train, test = task(dtype=torch.float64)
    probe = linear_probe(None, train, test, strengths=[0.5], standardise=False, max_steps=2000)
    x, y = train
    weight = probe.head.weight.detach().requires_grad_()
    loss = nn.functional.cross_entropy(x @ weight.T + probe.head.bias.detach(), y)
    loss = loss + weight.square().sum() / (2 * 0.5 * len(x))
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.abs().max() < 1e-4


def test_numbers_are_those_of_its_probabilities():
    train, test = task()
    probe = linear_probe(None, train, test, strengths=[1.0])
    assert probe.accuracy == metrics.accuracy(probe.probs, test[1])
    assert probe.ece == metrics.ece(probe.probs, test[1])
    assert probe.nll == pytest.approx(metrics.nll(probe.probs, test[1]))
    torch.testing.assert_close(probe.head(test[0]).softmax(-1), probe.probs)


def test_validation_data_decide_the_strength():
    # A little of the signal in every feature: the difference of the class means, where strong regularisation leads, is
    # best, and separating few examples by the widest margin is not.
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(4080) % 2
    x = torch.randn(4080, 120, generator=generator) + 0.15 * (2.0 * y[:, None] - 1)
    few, many = (x[:80], y[:80]), (x[80:], y[80:])
    probe = linear_probe(None, few, many, validation=many, refit=False)
    assert [tried.strength for tried in probe.curve] == sorted(STRENGTHS)
    best, weakest = max(tried.accuracy for tried in probe.curve), probe.curve[-1]
    assert probe.accuracy == pytest.approx(best, abs=0.01)
    assert probe.strength < 1
    assert best > weakest.accuracy + 0.01
    for tried in probe.curve:
        alone = linear_probe(None, few, many, strengths=[tried.strength])
        assert alone.accuracy == pytest.approx(tried.accuracy, abs=0.01)


@pytest.mark.parametrize("strengths", [[1.0], [0.1, 1.0]])
@pytest.mark.parametrize("refit", [True, False])
def test_validation_labels_that_training_does_not_have_are_refused(strengths, refit):
    train, test = task(count=60)
    x, y = test
    with pytest.raises(ValueError, match="validation labels"):
        linear_probe(None, train, test, validation=(x, y + 9), strengths=strengths, refit=refit)


def test_what_is_held_out_is_not_trained_on_before_the_choice():
    train, test = task(count=400)
    probe = linear_probe(None, train, test, validation_share=0.5, refit=False, seed=3)
    whole = linear_probe(None, train, test, strengths=[probe.strength])
    again = linear_probe(None, train, test, validation_share=0.5, seed=3)
    assert not torch.equal(probe.head.weight, whole.head.weight)
    assert again.strength == probe.strength
    torch.testing.assert_close(again.probs, whole.probs, rtol=0, atol=1e-3)


def test_the_seed_decides_what_is_held_out():
    train, test = task(count=200)
    first, again, other = (linear_probe(None, train, test, seed=seed) for seed in (0, 0, 1))
    assert first.curve == again.curve
    assert first.curve != other.curve


@pytest.mark.parametrize("given", ["inputs", "cached", "heads"])
def test_features_come_from_the_backbone(given):
    net = small_backbone()
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    train, test = (x[:200], y[:200]), (x[200:], y[200:])
    if given == "cached":
        train, test = ds.cache_features(net, train), ds.cache_features(net, test)
    backbone = ds.HeadEnsemble(net, (6, 2), 2) if given == "heads" else net
    probe = ds.linear_probe(backbone, train, test, strengths=[1.0])
    features = small_backbone().eval()(x).detach()
    wanted = linear_probe(None, (features[:200], y[:200]), (features[200:], y[200:]), strengths=[1.0])
    torch.testing.assert_close(probe.probs, wanted.probs, rtol=0, atol=1e-4)


def test_sgd_ends_near_the_solution():
    train, test = task(count=2000, dtype=torch.float32)
    exact = linear_probe(None, train, test, strengths=[0.1])
    close = linear_probe(None, train, test, strengths=[0.1], method="sgd", epochs=60, batch_size=64, lr=0.05)
    assert (close.probs - exact.probs).abs().mean() < 0.01
    assert close.accuracy == pytest.approx(exact.accuracy, abs=0.01)
    chosen = linear_probe(None, train, test, method="sgd", epochs=5, batch_size=64)
    assert len(chosen.curve) == len(STRENGTHS)


def test_a_feature_that_never_varies_does_no_harm():
    train, test = task(dtype=torch.float32)
    padded = [(torch.cat([x, torch.full((len(x), 1), 5.0)], 1), y) for x, y in (train, test)]
    plain, with_constant = linear_probe(None, train, test), linear_probe(None, *padded)
    torch.testing.assert_close(plain.probs, with_constant.probs, rtol=0, atol=5e-3)


def test_the_global_generators_are_left_alone():
    train, test = task()
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    linear_probe(None, train, test, strengths=[1.0])
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "newton"}, "'lbfgs' or 'sgd'"),
        ({"strengths": []}, "positive numbers, at least one"),
        ({"strengths": [1.0, 0.0]}, "positive numbers"),
        ({"strengths": 1.0}, r"`strengths` must be a list or tuple, each a number.*got 1.0"),
        ({"strengths": np.ones((2, 2))}, "`strengths` must be finite positive numbers"),
        ({"strengths": torch.tensor(1.0)}, "`strengths` must be finite positive numbers"),
        ({"strengths": "a"}, "`strengths` must be a list or tuple"),
        ({"strengths": [1.0, "a"]}, "`strengths` must be finite positive numbers"),
        ({"strengths": [float("nan")]}, "`strengths` must be finite positive numbers"),
        ({"validation_share": 1.0}, "above 0 and below 1"),
        ({"validation_share": "a"}, "must be a number; got 'a'"),
        ({"max_steps": 0}, "max_steps"),
        ({"max_steps": 2.5}, "`max_steps` must be a whole number"),
        ({"epochs": 0}, "`epochs` must be a whole number"),
        ({"batch_size": "a"}, "`batch_size` must be a whole number"),
        ({"device": "gpu"}, "`device` must be 'auto'"),
    ],
)
def test_bad_arguments_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        linear_probe(None, *task(), **options)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_strengths_may_be_an_array(kind):
    train, test = task()
    probe = linear_probe(None, train, test, strengths=kind([0.01, 1.0]))
    assert [tried.strength for tried in probe.curve] == pytest.approx([0.01, 1.0])
    wanted = linear_probe(None, train, test, strengths=[0.01, 1.0])
    torch.testing.assert_close(probe.probs, wanted.probs, rtol=1e-4, atol=1e-4)


def test_an_anchored_network_is_probed_on_its_features():
    (x, y), (x_test, y_test) = task(dtype=torch.float32)
    ens = ds.Anchored(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), x[:20], num_members=2)
    with pytest.raises(ValueError, match=r"got Anchored\. .* ds\.cut\(ens\.member\(0\), 1\)"):
        linear_probe(ens, (x, y), (x_test, y_test))
    backbone, _ = ds.cut(ens.member(1), 1)
    net = ens.inner.member(0)
    pairs = [torch.cat([x[1].expand_as(each), each - x[1]], 1) for each in (x, x_test)]
    features, test_features = (net[:2](pair).detach() for pair in pairs)
    wanted = linear_probe(None, (features, y), (test_features, y_test), strengths=[1.0])
    probe = linear_probe(backbone, (x, y), (x_test, y_test), strengths=[1.0])
    torch.testing.assert_close(probe.probs, wanted.probs)


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        linear_probe(None, *task(), device="cuda")


def test_the_device_may_be_left_to_it():
    train, test = task()
    assert linear_probe(None, train, test, strengths=[1.0], device="auto").accuracy > 0.5


@pytest.mark.parametrize("name", ["test", "validation"])
def test_features_of_another_width_are_refused(name):
    train, (x, y) = task()
    sets = {"test": (x, y), "validation": (x, y), name: (x[:, :7], y)}
    with pytest.raises(ValueError, match=f"The {name} inputs must have as many features.*8; got 7"):
        linear_probe(None, train, **sets)


def test_data_that_no_probe_can_be_fitted_on_is_refused():
    (x, y), (x_test, y_test) = task()
    with pytest.raises(ValueError, match="one class label for each input"):
        linear_probe(None, (x, x), (x_test, y_test))
    with pytest.raises(ValueError, match="one class label for each input"):
        linear_probe(None, x, (x_test, y_test))
    with pytest.raises(ValueError, match="test labels must lie in 0 to 3"):
        linear_probe(None, (x, y), (x_test, y_test + 4))
    two = (x[:2], torch.arange(2))
    with pytest.raises(ValueError, match="leaves one side empty"):
        linear_probe(None, two, two)
    for labels in (y * 0, y - 1):
        with pytest.raises(ValueError, match="two classes or more from 0"):
            linear_probe(None, (x, labels), (x, labels))
    with pytest.raises(ValueError, match=r"got DeepEnsemble\. .* ds\.cut\(ens\.member\(0\), 1\)"):
        linear_probe(ds.DeepEnsemble(lambda: nn.Linear(8, 8), 2), (x, y), (x_test, y_test))
    other = ds.cache_features(nn.Linear(8, 8).double(), (x, y))
    with pytest.raises(ValueError, match="another backbone"):
        linear_probe(nn.Linear(8, 8).double(), other, other)
