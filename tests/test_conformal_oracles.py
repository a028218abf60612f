"""The same numbers as MAPIE and crepes, where they compute the same."""

import numpy as np
import pytest

from dissensus import conformal
from dissensus.conformal.coverage import _class_scores

RNG = np.random.default_rng(0)


def class_data(num, seed, classes=5):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.ones(classes), num)
    y = np.array([rng.choice(classes, p=row) for row in probs])
    return probs, y


class GivenProbabilities:
    """A fitted classifier to MAPIE: rows are the probabilities themselves."""

    def __new__(cls, classes):
        from sklearn.base import BaseEstimator, ClassifierMixin

        class Given(ClassifierMixin, BaseEstimator):
            def __init__(self):
                self.classes_ = np.arange(classes)
                self.fitted_ = True

            def fit(self, x, y):
                return self

            def predict_proba(self, x):
                return np.asarray(x)

            def predict(self, x):
                return np.asarray(x).argmax(1)

        return Given()


class GivenColumn:
    """A fitted regressor to MAPIE: it predicts one column of its input."""

    def __new__(cls, column):
        from sklearn.base import BaseEstimator, RegressorMixin

        class Given(RegressorMixin, BaseEstimator):
            def __init__(self, column=column):
                self.column = column
                self.fitted_ = True

            def fit(self, x, y):
                return self

            def predict(self, x):
                return np.asarray(x)[:, self.column]

        return Given()


@pytest.mark.slow
@pytest.mark.parametrize("coverage", [0.8, 0.9])
def test_sets_are_mapies(coverage):
    classification = pytest.importorskip("mapie.classification")
    (cal, y), (new, _) = class_data(99, 0), class_data(300, 1)
    mapie = classification.SplitConformalClassifier(
        GivenProbabilities(5), confidence_level=coverage, conformity_score="lac", prefit=True
    )
    mapie.conformalize(cal, y)
    np.testing.assert_array_equal(conformal.sets(cal, y, new, coverage), mapie.predict_set(new)[1][:, :, 0])


@pytest.mark.slow
def test_the_adaptive_score_is_mapies_before_it_draws_at_random():
    scores = pytest.importorskip("mapie.conformity_scores")
    cal, y = class_data(300, 0)
    theirs, _ = scores.APSConformityScore.get_true_label_cumsum_proba(y, cal, np.arange(5))
    ours = _class_scores(cal, "aps", 0.0, 1)[np.arange(300), y]
    np.testing.assert_allclose(ours, theirs[:, 0], rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_sets_and_p_values_are_crepes(per_class, method):
    crepes = pytest.importorskip("crepes")
    (cal, y), (new, _) = class_data(199, 2), class_data(300, 3)
    slope = 0.01 if method == "raps" else 0.0
    scores, others = (_class_scores(part, method, slope, 1) for part in (cal, new))
    own = scores[np.arange(199), y]
    theirs = crepes.ConformalClassifier()
    theirs.fit(own, bins=y if per_class else None)
    bins = np.tile(np.arange(5), (300, 1)) if per_class else None
    found = np.stack(
        [
            theirs.predict_p(others[:, [c]], bins=None if bins is None else bins[:, c], smoothing=False)[:, 0]
            for c in range(5)
        ],
        axis=1,
    )
    ours = np.stack([conformal.p_values(own[y == c] if per_class else own, others[:, c]) for c in range(5)], axis=1)
    np.testing.assert_allclose(ours, found, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(
        conformal.sets(cal, y, new, 0.9, method=method, per_class=per_class), found > 0.1 + 1e-9
    )


@pytest.mark.slow
def test_alarms_within_classes_have_crepes_p_values():
    crepes = pytest.importorskip("crepes")
    scores, labels = np.round(RNG.normal(size=300), 1), RNG.integers(0, 3, 300)  # with ties
    new, own = np.round(RNG.normal(size=100), 1), RNG.integers(0, 3, 100)
    theirs = crepes.ConformalClassifier()
    theirs.fit(scores, bins=labels)
    alarm = conformal.Alarm.of_scores(scores, labels=labels, false_alarms=0.1)
    np.testing.assert_allclose(
        alarm.p_values_of(new, own), theirs.predict_p(new[:, None], bins=own, smoothing=False)[:, 0], rtol=0, atol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [False, True])
def test_normalised_intervals_are_crepes(grouped):
    crepes = pytest.importorskip("crepes")
    # Of 199, crepes takes one more than it must: (1 - 0.9) * 200 is a hair below 20.
    mean, sd, y = RNG.normal(size=200), RNG.uniform(0.5, 2, 200), RNG.normal(size=200)
    new, wide = RNG.normal(size=50), RNG.uniform(0.5, 2, 50)
    groups, own = (np.arange(200) % 2, np.arange(50) % 2) if grouped else (None, None)
    theirs = crepes.ConformalRegressor()
    theirs.fit(y - mean, sigmas=sd, bins=groups)
    wanted = theirs.predict_int(new, sigmas=wide, bins=own, confidence=0.9)
    ours = conformal.intervals((mean, sd), y, (new, wide), 0.9, groups_cal=groups, groups=own)
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_cqr_intervals_are_mapies():
    regression = pytest.importorskip("mapie.regression")
    low, y = RNG.normal(size=99), RNG.normal(size=99)
    high = low + RNG.uniform(0.1, 2, 99)
    new_low = RNG.normal(size=50)
    new_high = new_low + RNG.uniform(0.1, 2, 50)
    mapie = regression.ConformalizedQuantileRegressor(
        [GivenColumn(0), GivenColumn(1), GivenColumn(2)], confidence_level=0.9, prefit=True
    )
    mapie.conformalize(np.stack([low, high, (low + high) / 2], 1), y)
    _, theirs = mapie.predict_interval(
        np.stack([new_low, new_high, (new_low + new_high) / 2], 1), symmetric_correction=True
    )
    ours = conformal.intervals((low, high), y, (new_low, new_high), 0.9, method="cqr")
    np.testing.assert_allclose(ours, theirs[:, :, 0], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_plain_intervals_are_mapies():
    regression = pytest.importorskip("mapie.regression")
    mean, y, new = RNG.normal(size=99), RNG.normal(size=99), RNG.normal(size=50)
    mapie = regression.SplitConformalRegressor(GivenColumn(0), confidence_level=0.9, prefit=True)
    mapie.conformalize(mean[:, None], y)
    _, theirs = mapie.predict_interval(new[:, None])
    ours = conformal.intervals((mean, np.ones(99)), y, (new, np.ones(50)), 0.9)
    np.testing.assert_allclose(ours, theirs[:, :, 0], rtol=0, atol=1e-12)


def test_the_chosen_scores_auroc_is_scikit_learns():
    import torch
    from sklearn.metrics import roc_auc_score

    import dissensus as ds

    ens = ds.DeepEnsemble(lambda: torch.nn.Linear(2, 3), num_members=4)
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    alarm = ds.Alarm.calibrate(ens, x, examples=3 * x[:50], false_alarms=0.1)
    choosing = np.random.default_rng(0).permutation(200)[:50]
    for name, value in alarm.aurocs.items():
        known = ds.predict_scores(ens, x, [name])[name].double().numpy()[choosing]
        strange = ds.predict_scores(ens, 3 * x[:50], [name])[name].double().numpy()
        wanted = roc_auc_score([0] * 50 + [1] * 50, np.concatenate([known, strange]))
        assert value == pytest.approx(wanted, abs=1e-12)
