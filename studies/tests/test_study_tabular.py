"""The study of tables: fair splits, records that a stopped run goes on from, and a page made from records alone."""

import functools
from pathlib import Path

import numpy as np
import pytest
from dissensus_studies import tabular
from dissensus_studies.tabular import defaults as tabular_defaults


@pytest.mark.parametrize("name", tabular.WITHOUT_DATA)
def test_unlike_rows_are_kept_from_training(name):
    table = tabular.TABLES[name](Path(), 0)
    parts = tabular.split(table, 0)
    rows = [set(part.index) for part in (parts.train.x, parts.unlike["far"])]
    assert not rows[0] & rows[1]
    assert len(parts.train.y) <= tabular.TRAINING_ROWS
    assert set(np.unique(parts.test.y)) <= set(np.unique(parts.train.y)) or not table.classes
    shuffled = parts.unlike["shuffled"]
    for column in shuffled:
        assert sorted(map(str, shuffled[column])) == sorted(map(str, parts.test.x[column]))
    wrong = parts.unlike["wrong unit"]
    differs = (wrong.map(str) != parts.test.x.astype(wrong.dtypes).map(str)).sum(axis=1)
    assert (differs <= 1).all()


def test_a_forest_is_measured_and_a_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "CLASSIFIERS", {"random forest": tabular.CLASSIFIERS["random forest"]})
    records = tmp_path / "records.jsonl"
    tables = {"wine cultivars": functools.partial(tabular.TABLES["wine cultivars"], Path())}
    first = tabular.measure_all(records, tables, tabular.methods_of, [0])
    assert first[0]["error"] < 0.15
    assert 0 <= first[0]["nll"] < 0.6
    assert set(first[0]["auroc"]) == {"far", "shuffled", "wrong unit"}
    assert tabular.measure_all(records, tables, tabular.methods_of, [0]) == first
    assert len(records.read_text().splitlines()) == 1


def test_regressors_get_a_scale_from_rows_they_were_not_trained_on():
    parts = tabular.split(tabular.TABLES["diabetes"](Path(), 0), 0)
    found = tabular.measure(tabular.REGRESSORS["boosting"](0), parts)
    assert 0.5 < found["error"] < 1.2
    assert 0.75 < found["covered"] <= 1
    # A normal distribution of this error has this NLL at its best.
    assert found["nll"] > 0.5 * np.log(2 * np.pi * found["error"] ** 2)


def test_changes_are_compared_table_by_table():
    trials = [
        {"method": method, "table": table, "seed": seed, "nll": nll, "seconds": seconds}
        for method, nlls, seconds in (("{}", (1.0, 2.0, 5.0), 2.0), ("a", (1.5, 1.5, 5.3), 3.0))
        for (table, seed), nll in zip((("x", 0), ("x", 1), ("y", 0)), nlls, strict=True)
    ]
    (name, mean, error, ratio) = tabular.compared(trials)[1]
    # Table x changes by (0.5 - 0.5) / 2 = 0, table y by 0.3.
    assert (name, ratio) == ("a", 1.5)
    np.testing.assert_allclose((mean, error), (0.15, 0.15))


def test_every_change_of_the_settings_is_an_estimator_of_its_own():
    for classes in (True, False):
        made = [make(3).get_params() for make in tabular_defaults.changed(classes).values()]
        assert [{name: each[name] for name in tabular_defaults.BASE} for each in made] == [
            {**tabular_defaults.BASE, **change} for change in tabular_defaults.CHANGES
        ]


def test_the_defaults_are_those_that_were_taken():
    taken = {**tabular_defaults.BASE, **tabular_defaults.CHANGES[-1]}
    for estimator in (tabular.EnsembleClassifier(), tabular.EnsembleRegressor()):
        assert {name: estimator.get_params()[name] for name in taken} == taken


@pytest.mark.parametrize("name", tabular_defaults.TABLES)
def test_tables_that_defaults_were_chosen_on_are_made_by_their_seed(name):
    first, again, other = (tabular_defaults.TABLES[name](seed) for seed in (0, 0, 1))
    assert first.x.equals(again.x)
    np.testing.assert_array_equal(first.y, again.y)
    assert not first.x.equals(other.x)
    assert first.classes == ("classes" in name or name in ("quantiles", "ten squares"))
