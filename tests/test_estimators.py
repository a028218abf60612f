"""The estimators: what scikit-learn asks of them, tables as they come, and answers that say how sure they are."""

import copy
import json
import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from dissensus import objectives, predict
from dissensus.estimators import METHODS, EnsembleClassifier, EnsembleRegressor, Features

pd = pytest.importorskip("pandas")
TINY = {"num_members": 3, "hidden": (12,), "epochs": 3, "device": "cpu"}


def people(rows=120, seed=0):
    chance = np.random.default_rng(seed)
    age = chance.integers(18, 80, rows).astype(float)
    frame = pd.DataFrame(
        {
            "age": np.where(chance.random(rows) < 0.1, np.nan, age),
            "town": pd.Series(chance.choice(["Ulm", "Bonn", "Köln"], rows)).mask(chance.random(rows) < 0.1),
            "member": chance.random(rows) < 0.5,
            "since": pd.Timestamp("2021-03-01") + pd.to_timedelta(chance.integers(0, 900, rows), unit="D"),
            "weight": chance.normal(70, 10, rows),
        }
    )
    return frame, np.where(age > 45, "old", "young"), 0.1 * age + frame["weight"].to_numpy()


@pytest.fixture(scope="module")
def classifier():
    frame, labels, _ = people(300)
    return EnsembleClassifier(num_members=3, hidden=(16,), epochs=30, lr=5e-3, device="cpu").fit(frame, labels)


@pytest.fixture(scope="module")
def regressor():
    frame, _, target = people(300)
    return EnsembleRegressor(num_members=3, hidden=(16,), epochs=30, lr=5e-3, device="cpu").fit(frame, target)


# Encoding


def test_pieces_are_linear_inside_a_bin_flat_beside_it_and_go_on_beyond_the_data():
    table = {"x": np.array([0.0, 1.0, 2.0, 4.0, 8.0])}
    features = Features.fit(table, ("x",), 4)
    x = np.array([-1.0, 0.0, 0.5, 3.0, 8.0, 12.0])
    pieces = features.inputs(features.standard({"x": x}))[:, 1:]
    edges = [(0, 1), (1, 2), (2, 4), (4, 8)]
    wanted = np.stack([np.clip((x - low) / (high - low), 0, 1) for low, high in edges], 1)
    wanted[0, 0], wanted[-1, -1] = -1.0, 2.0
    np.testing.assert_allclose(pieces, wanted, atol=1e-12)


def test_standardised_features_and_flags():
    table = {"x": np.array([1.0, 2.0, 6.0]), "yes": np.array([True, False, True]), "same": np.full(3, 7.0)}
    features = Features.fit(table, tuple(table), 0)
    standard = features.standard(table)
    np.testing.assert_allclose(standard[:, 0], (table["x"] - 3) / table["x"].std())
    np.testing.assert_array_equal(standard[:, 1:], [[1, 0], [0, 0], [1, 0]])
    assert features.num_inputs == 3


# Tables as they come


def test_a_frame_of_mixed_columns_is_learned(classifier):
    frame, labels, _ = people(100, seed=1)
    assert classifier.score(frame, labels) > 0.8
    probabilities = classifier.predict_proba(frame)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert classifier.classes_.tolist() == ["old", "young"]
    assert (classifier.predict(frame) == classifier.classes_[probabilities.argmax(1)]).all()


def test_values_that_training_never_saw_are_read_as_none_of_its_own(classifier):
    frame, _, _ = people(20, seed=1)
    answers = [classifier.predict_proba(frame.assign(town=town)) for town in ("Oslo", "Bergen", "Ulm")]
    np.testing.assert_array_equal(answers[0], answers[1])
    assert (answers[0] != answers[2]).any()


def test_polars_and_pandas_give_the_same(classifier):
    polars = pytest.importorskip("polars")
    frame, labels, _ = people(60)
    table = polars.DataFrame(
        {
            name: [None if value is pd.NaT or value != value else value for value in column.tolist()]
            for name, column in frame.items()
        },
        strict=False,
    )
    np.testing.assert_allclose(classifier.predict_proba(table), classifier.predict_proba(frame), atol=1e-12)
    fitted = EnsembleClassifier(**TINY).fit(table, polars.Series(labels))
    other = EnsembleClassifier(**TINY).fit(frame, labels)
    np.testing.assert_allclose(fitted.predict_proba(table), other.predict_proba(frame), atol=1e-12)


def test_arrays_of_words_and_lists_work():
    rows = [["a", 1.0], ["b", 2.0], ["a", 3.0], ["b", 4.0]] * 5
    model = EnsembleClassifier(**TINY).fit(rows, [0, 1] * 10)
    assert model.predict(np.array(rows, dtype=object)).shape == (20,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda frame: frame.assign(age=np.inf), "finite"),
        (lambda frame: frame.drop(columns="age"), "feature names"),
        (lambda frame: frame.assign(age="forty"), "numbers"),
    ],
    ids=["infinite", "column lacking", "words for numbers"],
)
def test_rows_that_cannot_be_read_are_refused(classifier, change, words):
    frame, _, _ = people(5)
    with pytest.raises(ValueError, match=words):
        classifier.predict(change(frame))


@pytest.mark.parametrize(
    "column",
    [
        [np.nan] * 40,
        [True, None, False, True] * 10,
        pd.array([1, None, 3, 4] * 10, dtype="Int64"),
        pd.Categorical([1, 2, None, 2] * 10),
        pd.date_range("2020", periods=40, tz="Europe/Berlin"),
        [day.date() for day in pd.date_range("2020", periods=40)],
        [f"{day}/12/2020" for day in range(1, 21)] * 2,
        [1, "x", 2.5, None] * 10,
        [10**30, 10**29] * 20,
        range(10**17, 10**17 + 40),
        pd.to_timedelta(range(40), unit="h"),
    ],
    ids=[
        "empty",
        "booleans",
        "integers",
        "categories",
        "zone",
        "days",
        "slashes",
        "mixed",
        "huge",
        "numbering",
        "durations",
    ],
)
@pytest.mark.filterwarnings("ignore:Columns that are no features")
def test_columns_of_every_sort_are_read(column):
    frame = pd.DataFrame({"x": np.random.default_rng(0).normal(size=40), "c": column})
    model = EnsembleClassifier(**TINY).fit(frame, [0, 1] * 20)
    for rows in (frame, frame[:1]):
        assert len(model.predict(rows)) == len(rows)
        assert np.isfinite(model.distance(rows)).all()


def test_an_array_after_a_frame_is_read_by_its_places():
    x = np.random.default_rng(0).normal(size=(40, 2))
    named = EnsembleClassifier(**TINY).fit(pd.DataFrame(x, columns=["a", "b"]), [0, 1] * 20)
    with pytest.warns(UserWarning, match="feature names"):
        found = named.predict_proba(x)
    np.testing.assert_array_equal(found, named.predict_proba(pd.DataFrame(x, columns=["a", "b"])))


def test_tables_of_pyarrow_and_lazy_frames_are_read():
    arrow, polars = pytest.importorskip("pyarrow"), pytest.importorskip("polars")
    columns = {"a": np.random.default_rng(0).normal(size=40), "b": ["x", None, "y", "x"] * 10}
    models = [
        EnsembleClassifier(**TINY).fit(table, [0, 1] * 20)
        for table in (arrow.table(columns), polars.DataFrame(columns).lazy(), pd.DataFrame(columns))
    ]
    wanted = models[2].predict_proba(pd.DataFrame(columns))
    for model in models[:2]:
        np.testing.assert_allclose(model.predict_proba(pd.DataFrame(columns)), wanted, atol=1e-12)


def test_rows_that_cannot_be_read_are_named_as_the_caller_counts_them():
    frame = pd.DataFrame({"x": np.arange(40.0) % 7})
    frame.loc[33, "x"] = np.inf
    with pytest.raises(ValueError, match="Row 33 cannot be read"):
        EnsembleClassifier(**TINY).fit(frame, [0, 1] * 20)


def test_rows_are_counted_with_those_of_no_weight():
    frame = pd.DataFrame({"x": np.arange(40.0) % 7})
    frame.loc[33, "x"] = np.inf
    with pytest.raises(ValueError, match="Row 33 cannot be read"):
        EnsembleClassifier(**TINY).fit(frame, [0, 1] * 20, sample_weight=np.arange(40) >= 20)


def test_columns_of_numbers_are_kept_as_those_of_an_array_and_others_left_out_by_name():
    chance = np.random.default_rng(0)
    numbers = np.stack([1900 + chance.permutation(80), np.full(80, 3), chance.normal(size=80)], 1)
    frame = pd.DataFrame(numbers, columns=["year", "same", "x"]).astype({"year": int, "same": int})
    model = EnsembleRegressor(**TINY).fit(frame, numbers[:, 0])
    assert model.features_.encoder.names == ("year", "same", "x")
    plain = EnsembleRegressor(**TINY).fit(numbers, numbers[:, 0])
    np.testing.assert_array_equal(model.predict(frame), plain.predict(numbers))
    frame = frame.assign(unit="kg", name=[f"n{row}" for row in range(80)])
    told = r"'unit' \(it is always 'kg'\), 'name' \(names rows, no two alike\)"
    with pytest.warns(UserWarning, match=told) as said:
        EnsembleRegressor(**TINY).fit(frame, numbers[:, 0])
    assert said[0].filename == __file__


@pytest.mark.parametrize("seed", range(6))
def test_what_columns_are_does_not_hang_on_which_rows_are_held_out(seed):
    # Two words among many numbers stand for missing values, also where none of them is trained on.
    values = [f"{value:.3f}" for value in np.random.default_rng(0).normal(size=40)]
    values[5] = values[17] = "unknown"
    frame = pd.DataFrame({"x": values, "z": np.arange(40.0) % 7})
    model = EnsembleClassifier(**TINY, random_state=seed, validation_fraction=0.5).fit(frame, [0, 1] * 20)
    assert model.features_.encoder.columns[0].empty == ("unknown",)


def test_numbers_and_generators_of_numpy_are_taken():
    x = np.random.default_rng(0).normal(size=(40, 2))
    made = [
        EnsembleClassifier(num_members=2, epochs=1, hidden=hidden, random_state=np.random.default_rng(5), device="cpu")
        for hidden in (np.int64(8), np.array([8]), [8])
    ]
    answers = [model.fit(x, [0, 1] * 20).predict_proba(x) for model in made]
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[0], answers[2])
    with pytest.raises(ValueError, match="`hidden` must be a whole number"):
        EnsembleClassifier(hidden=[8.5]).fit(x, [0, 1] * 20)


# Answers and how sure they are


def test_uncertainty_of_classes_is_in_two_parts(classifier):
    frame, _, _ = people(50, seed=2)
    found = classifier.uncertainty(frame)
    p = classifier.predict_proba(frame)
    np.testing.assert_allclose(found["total"], -(p * np.log(p)).sum(1), atol=1e-9)
    np.testing.assert_allclose(found["total"], found["data"] + found["knowledge"], atol=1e-9)


def test_predictions_are_the_moments_of_the_mixture_in_the_targets_units(regressor):
    frame, _, target = people(50, seed=2)
    mean, std = regressor.predict(frame, return_std=True)
    x = regressor.features_.inputs(regressor.features_.standard(regressor._read(frame)))
    outputs = predict(regressor.ensemble_, torch.from_numpy(x))
    means, scales = objectives.mean_and_scale(outputs)
    means = means[..., 0].numpy() * regressor.target_scale_ + regressor.target_mean_
    scales = scales[..., 0].numpy() * regressor.target_scale_
    np.testing.assert_allclose(mean, means.mean(0))
    np.testing.assert_allclose(std**2, (scales**2 + means**2).mean(0) - means.mean(0) ** 2, rtol=1e-6)
    found = regressor.uncertainty(frame)
    np.testing.assert_allclose(found["total"], std**2)
    np.testing.assert_allclose(found["knowledge"], means.var(0), rtol=1e-9)
    assert regressor.score(frame, target) > 0.5


def test_intervals_cover(regressor):
    frame, _, target = people(400, seed=3)
    ends = regressor.predict_interval(frame, coverage=0.8)
    covered = ((ends[:, 0] <= target) & (target <= ends[:, 1])).mean()
    # 30 rows calibrate: their luck alone moves the coverage by 0.07.
    assert 0.55 < covered < 0.99
    wider = regressor.predict_interval(frame, coverage=0.9)
    assert (wider[:, 1] - wider[:, 0] >= ends[:, 1] - ends[:, 0]).all()


def test_targets_are_scaled_inside():
    x = np.random.default_rng(0).normal(size=(80, 2))
    plain = EnsembleRegressor(**TINY).fit(x, x[:, 0])
    large = EnsembleRegressor(**TINY).fit(x, 1e6 * x[:, 0] + 1e7)
    np.testing.assert_allclose(large.predict(x), 1e6 * plain.predict(x) + 1e7, rtol=1e-4)


@pytest.mark.parametrize("loss", ["mse", "laplace_nll"])
def test_other_likelihoods(loss):
    x = np.random.default_rng(0).normal(size=(120, 2))
    y = x[:, 0] + 0.3 * np.random.default_rng(1).normal(size=120)
    model = EnsembleRegressor(**{**TINY, "epochs": 60}, objective=objectives.Independent(loss)).fit(x, y)
    _, std = model.predict(x, return_std=True)
    assert 0.05 < np.median(std) < 1.5
    assert model.predict_interval(x).shape == (120, 2)


# The alarm


def test_distance_is_that_to_the_nearest_training_rows(classifier):
    frame, _, _ = people(30, seed=4)
    standard = classifier.features_.standard(classifier._read(frame))
    found, _ = NearestNeighbors(n_neighbors=5).fit(classifier.bank_).kneighbors(standard)
    np.testing.assert_allclose(classifier.distance(frame), np.sqrt((found**2).mean(1)), rtol=1e-6)


def test_the_alarm_rings_for_far_rows_and_names_the_column(classifier):
    frame, _, _ = people(40, seed=5)
    assert classifier.is_unfamiliar(frame, false_alarms=0.05).mean() < 0.3
    far = frame.assign(weight=frame["weight"] + 300)
    assert classifier.is_unfamiliar(far, false_alarms=0.05).all()
    shares = pd.DataFrame(classifier.explain_alarm(far))
    assert list(shares) == list(frame)
    assert (shares.idxmax(axis=1) == "weight").all()
    np.testing.assert_allclose(shares.sum(axis=1), 1)


def test_the_alarm_says_where_it_can_never_ring(classifier):
    frame, _, _ = people(5)
    with pytest.warns(UserWarning, match="too few"):
        assert not classifier.is_unfamiliar(frame, false_alarms=0.001).any()


def test_a_monitor_notices_a_shift(classifier):
    monitor = classifier.drift_monitor()
    monitor.update_scores(classifier.distance(people(60, seed=6)[0]))
    assert not monitor.alarm(1000)
    monitor.update_scores(classifier.distance(people(80, seed=7)[0].assign(weight=150.0)))
    assert monitor.alarm(1000)


@pytest.mark.slow
def test_false_alarms_keep_their_rate_over_many_fits():
    rates = []
    for seed in range(150):
        chance = np.random.default_rng(seed)
        x = chance.standard_t(3, size=(160, 3))
        model = EnsembleRegressor(num_members=1, hidden=(4,), epochs=1, random_state=seed, device="cpu")
        p = model.fit(x[:110], x[:110, 0]).p_values(x[110:])
        rates.append((p <= 0.1).mean())
    # 22 held-out rows give p-values in steps of 1/23: the exact rate of those up to 0.1 is 2/23.
    assert abs(np.mean(rates) - 2 / 23) < 4 * np.std(rates) / np.sqrt(len(rates))


# scikit-learn


EXCEPT = {
    f"check_sample_weight_equivalence_on_{kind}_data": "weights scale a loss; rows that repeat also change batches"
    for kind in ("dense", "sparse")
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("estimator", [EnsembleClassifier(), EnsembleRegressor()], ids=lambda e: type(e).__name__)
def test_scikit_learns_own_checks_pass(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(estimator, on_fail=None, on_skip=None, expected_failed_checks=EXCEPT)
    failed = {each["check_name"]: each["exception"] for each in found if each["status"] == "failed"}
    assert not failed


def test_pipelines_searches_and_clones():
    x, y = load_breast_cancer(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), EnsembleClassifier(**{**TINY, "epochs": 20}))
    assert cross_val_score(pipeline, x[:200, :4], y[:200], cv=2).mean() > 0.7
    search = GridSearchCV(EnsembleRegressor(**TINY), {"hidden": [(4,), (8,)]}, cv=2, n_jobs=1)
    search.fit(*load_diabetes(return_X_y=True))
    again = clone(search.best_estimator_)
    assert again.hidden == search.best_params_["hidden"]
    assert not hasattr(again, "ensemble_")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [EnsembleClassifier, EnsembleRegressor])
def test_every_kind_of_ensemble_trains_and_is_stored(kind, method, tmp_path):
    frame, labels, target = people(60)
    model = kind(method=method, num_members=2, hidden=(16,), epochs=2, device="cpu")
    model.fit(frame, labels if kind is EnsembleClassifier else target)
    model.save(tmp_path / "model")
    again = kind.load(tmp_path / "model")
    assert (again.predict(frame) == model.predict(frame)).all()


@pytest.mark.parametrize("objective", ["joint", {"name": "joint", "beta": 0.3}, "adversarial"])
def test_objectives_by_name(objective):
    x, y = load_diabetes(return_X_y=True)
    model = EnsembleRegressor(**TINY, objective=objective).fit(x[:80], y[:80])
    assert np.isfinite(model.predict(x[:5])).all()


def test_what_cannot_be_trained_is_refused():
    x = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.raises(ValueError, match="`method` must be one of deep"):
        EnsembleClassifier(method="shallow").fit(x, [0, 1] * 10)
    with pytest.raises(ValueError, match="got one class"):
        EnsembleClassifier().fit(x, [1] * 20)
    with pytest.raises(ValueError, match="non-zero"):
        EnsembleClassifier().fit(x, [0, 1] * 10, sample_weight=np.zeros(20))
    with pytest.raises(ValueError, match="missing values"):
        EnsembleClassifier().fit(x, np.array(["a", "b", None, "a"] * 5, dtype=object))
    with pytest.raises(ValueError, match="predicts numbers; `y` holds 'a'"):
        EnsembleRegressor().fit(x, ["a", "b"] * 10)
    with pytest.raises(ValueError, match=r"`validation_fraction` must lie in \[0, 1\)"):
        EnsembleRegressor(validation_fraction=1.0).fit(x, x[:, 0])
    with pytest.raises(ValueError, match="`bins` must be 0 or more"):
        EnsembleRegressor(bins=-1).fit(x, x[:, 0])


@pytest.mark.parametrize("weights", [None, (np.arange(40) != 1).astype(float)])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_targets_that_are_no_numbers_are_named_as_the_caller_counts_them(wrong, weights):
    x = np.random.default_rng(0).normal(size=(40, 2))
    y = x[:, 0].copy()
    y[[1, 3]] = 0.0 if weights is None else wrong, wrong
    with pytest.raises(ValueError, match=r"the first in row 3\."):
        EnsembleRegressor(**TINY).fit(x, y, weights)
    if np.isnan(wrong):
        with pytest.raises(ValueError, match=r"missing values, the first in row 3\."):
            EnsembleClassifier(**TINY).fit(x, np.where(np.isnan(y), y, 1.0 * (y > 0)), weights)


def test_words_beside_other_labels_are_refused():
    labels = np.array(["a", 1] * 10, dtype=object)
    with pytest.raises(ValueError, match="words and other labels, such as 'a' and 1"):
        EnsembleClassifier(**TINY).fit(np.random.default_rng(0).normal(size=(20, 2)), labels)


@pytest.mark.parametrize("loss", ["poisson", "cross_entropy", objectives.Pinball((0.1, 0.9))])
def test_losses_that_standardised_targets_cannot_be_told_by_are_refused(loss):
    x = np.random.default_rng(0).normal(size=(40, 2))
    with pytest.raises(ValueError, match="learns by one of the losses gaussian_nll, laplace_nll, mse, mae"):
        EnsembleRegressor(**TINY, objective=objectives.Independent(loss)).fit(x, np.arange(40) % 5)


CHANGED = {"num_members": 4, "hidden": (8,), "method": "packed", "dropout": 0.0, "objective": {"loss": "mse"}}


@pytest.mark.parametrize("name", CHANGED)
def test_what_was_fitted_outlives_changed_settings(name, tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 2))
    model = EnsembleRegressor(**TINY).fit(x, x[:, 0])
    before = model.predict(x, return_std=True)
    model.set_params(**{name: CHANGED[name]})
    model.save(tmp_path)
    loaded = EnsembleRegressor.load(tmp_path)
    for same in (model, loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(same.predict(x, return_std=True), before)
    assert model.fit(x, x[:, 0]).made_of_[name] == CHANGED[name]


def test_without_held_out_rows_answers_come_but_no_guarantees():
    x = np.random.default_rng(0).normal(size=(30, 2))
    model = EnsembleRegressor(**TINY, objective="joint", validation_fraction=0.0).fit(x, x[:, 0])
    assert np.isfinite(model.predict(x, return_std=True)).all()
    for ask in (model.is_unfamiliar, model.p_values, model.predict_interval, lambda x: model.drift_monitor()):
        with pytest.raises(ValueError, match="No training rows were held out"):
            ask(x)


def test_every_class_keeps_a_row_to_train_on():
    x, y = np.random.default_rng(0).normal(size=(60, 2)), np.tile(np.arange(30), 2)
    model = EnsembleClassifier(**TINY, validation_fraction=0.5).fit(x, y)
    counts = np.bincount(model.held_out_y_, minlength=30)
    assert counts.max() == 1  # of two rows a class, one in four classes would be held out whole
    assert 10 < counts.sum() < 30


def test_further_rows_train_further():
    chance = np.random.default_rng(0)
    x = chance.normal(size=(400, 3))
    y = np.where(x[:, 0] > 0, "b", "a")
    model = EnsembleClassifier(num_members=2, hidden=(16,), lr=1e-2, device="cpu")
    model.partial_fit(x[:50], y[:50], classes=["a", "b"])
    before = model.score(x, y)
    for start in [*range(50, 400, 50)] * 2:
        model.partial_fit(x[start : start + 50], y[start : start + 50])
    assert model.score(x, y) > max(before, 0.85)
    assert len(model.bank_) > 300
    with pytest.raises(ValueError, match="not among the classes"):
        model.partial_fit(x[:2], ["c", "a"])


# Weights


def test_rows_of_no_weight_do_not_count():
    x = np.random.default_rng(0).normal(size=(60, 2))
    y, weight = x[:, 0], np.repeat([1.0, 0.0], 30)
    weighted = EnsembleRegressor(**TINY).fit(x, np.where(weight, y, 1e9), sample_weight=weight)
    np.testing.assert_array_equal(weighted.predict(x), EnsembleRegressor(**TINY).fit(x[:30], y[:30]).predict(x))


def test_weights_move_predictions_to_weighted_means():
    # Members that cannot tell rows apart predict the weighted share of a class, and the weighted mean of a target.
    x, y = np.zeros((400, 1)), np.tile([0, 1], 200)
    weight = np.where(y == 1, 3.0, 1.0)
    settings = {"num_members": 2, "hidden": (4,), "epochs": 80, "lr": 1e-2, "device": "cpu"}
    share = EnsembleClassifier(**settings).fit(x, y, sample_weight=weight).predict_proba(x[:1])[0, 1]
    assert abs(share - 0.75) < 0.06
    mean = EnsembleRegressor(**settings).fit(x, y.astype(float), sample_weight=weight).predict(x[:1])[0]
    assert abs(mean - 0.75) < 0.06


# Storage


def test_a_folder_a_skops_file_and_a_pickle_hold_the_same(classifier, regressor, tmp_path):
    frame, _, _ = people(20, seed=8)
    for model in (classifier, regressor):
        model.save(tmp_path / "model")
        for again in (type(model).load(tmp_path / "model"), pickle.loads(pickle.dumps(model))):
            np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
            np.testing.assert_array_equal(again.p_values(frame), model.p_values(frame))
            assert again.get_params()["epochs"] == model.epochs
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"estimator.json", "arrays.safetensors"}
    with pytest.raises(ValueError, match=r"load it with EnsembleRegressor\.load"):
        EnsembleClassifier.load(tmp_path / "model")
    with pytest.raises(ValueError, match=r"holds no estimator\.json"):
        EnsembleClassifier.load(tmp_path)


def test_skops_asks_to_trust_the_class_alone(classifier):
    io = pytest.importorskip("skops.io")
    frame, _, _ = people(20, seed=8)
    stored = io.dumps(classifier)
    trusted = io.get_untrusted_types(data=stored)
    assert trusted == ["dissensus.estimators.EnsembleClassifier"]
    again = io.loads(stored, trusted=trusted)
    np.testing.assert_array_equal(again.predict_proba(frame), classifier.predict_proba(frame))


def test_an_objective_is_stored_by_its_settings(tmp_path):
    x, y = load_diabetes(return_X_y=True)
    model = EnsembleRegressor(**TINY, objective=objectives.Joint(0.3, "mse")).fit(x[:60], y[:60])
    model.save(tmp_path)
    assert json.loads((tmp_path / "estimator.json").read_text())["state"]["objective"]["beta"] == 0.3
    again = EnsembleRegressor.load(tmp_path)
    np.testing.assert_array_equal(again.predict(x), model.predict(x))


def test_an_untrained_estimator_is_stored_too(tmp_path):
    EnsembleClassifier(num_members=7).save(tmp_path)
    assert EnsembleClassifier.load(tmp_path).num_members == 7
