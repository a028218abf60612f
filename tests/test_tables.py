"""What each column of a table is, and that it is the same ever after."""

import datetime
import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissensus.data.tables import Category, LeftOut, TableEncoder, columns_of, number_of

ROWS = 120
RNG = np.random.default_rng(0)


def kinds(encoder):
    return {column.name: column.kind for column in encoder.columns}


def messy():
    """Columns as people have them: an index, an identifier, thousands with commas, holes, dates, words."""
    y = RNG.integers(0, 2, ROWS)
    incomes = [f"{value:,}" if row % 7 else "?" for row, value in enumerate(RNG.integers(1000, 90000, ROWS))]
    frame = pd.DataFrame(
        {
            "Unnamed: 0": range(ROWS),
            "customer_id": [f"c{row}" for row in range(ROWS)],
            "income": incomes,
            "age": np.where(RNG.random(ROWS) < 0.1, np.nan, RNG.integers(18, 90, ROWS)),
            "town": RNG.choice(np.array(["Ulm", "Bonn", None, "NA"], dtype=object), ROWS),
            "joined": pd.date_range("2020-01-01", periods=ROWS, freq="3D").strftime("%Y-%m-%d"),
            "seen": pd.date_range("2020-01-01", periods=ROWS, freq="7h"),
            "open": RNG.choice(np.array([True, False, None], dtype=object), ROWS),
            "unit": "kg",
            "void": np.nan,
            "result": np.where(y, "yes", "no"),
            "again": y,
        }
    )
    return frame, y


def test_every_column_is_read_as_what_it_is():
    frame, y = messy()
    encoder = TableEncoder.fit(frame, y)
    assert kinds(encoder) == {
        "Unnamed: 0": "left out",
        "customer_id": "left out",
        "income": "number",
        "age": "number",
        "town": "category",
        "joined": "date",
        "seen": "date",
        "open": "number",
        "unit": "left out",
        "void": "left out",
        "result": "category",
        "again": "left out",
    }
    remarks = {name: remark for name, _, remark in encoder.rows()}
    assert remarks["again"] == "a copy of the target"
    assert "determines the target" in remarks["result"]
    assert remarks["income"] == "missing values filled in"
    assert "Unnamed: 0" in encoder.explain()
    x = encoder.transform(frame)
    assert x.shape == (ROWS, len(encoder.features))
    assert np.isfinite(x).all()


def test_pandas_polars_lists_and_json_make_no_difference():
    frame, y = messy()
    encoder = TableEncoder.fit(frame, y)
    x = encoder.transform(frame)
    again = TableEncoder.from_json(json.loads(json.dumps(encoder.to_json())))
    assert again == encoder
    plain = {name: [None if v is pd.NaT else v for v in frame[name].astype(object)] for name in frame}
    plain["seen"] = [str(value) for value in frame["seen"]]
    np.testing.assert_allclose(again.transform(plain), x)
    polars = pytest.importorskip("polars")
    other = polars.from_pandas(frame)
    assert TableEncoder.fit(other, y) == encoder
    np.testing.assert_array_equal(encoder.transform(other), x)


@given(st.lists(st.one_of(st.none(), st.floats(-1e30, 1e30)), min_size=2, max_size=30))
def test_numbers_are_kept_and_holes_filled_with_the_median(values):
    numbers = np.array([math.nan if value is None else value for value in values])
    known = numbers[~np.isnan(numbers)]
    encoder = TableEncoder.fit({"u": numbers, "v": np.arange(len(numbers)) / 2}, keep=["u", "v"])
    x = encoder.transform({"u": numbers, "v": numbers}, np.float64)
    if not len(known):
        assert kinds(encoder)["u"] == "left out"
        return
    expected = np.where(np.isnan(numbers), np.median(known), numbers)
    np.testing.assert_array_equal(x[:, 0], expected)
    if np.isnan(numbers).any():
        np.testing.assert_array_equal(x[:, 1], np.isnan(numbers))


def test_categories_are_pandas_dummies_and_unseen_ones_none():
    words = RNG.choice(["a", "b", "c"], 30)
    encoder = TableEncoder.fit({"w": words})
    np.testing.assert_array_equal(
        encoder.transform({"w": words}), pd.get_dummies(pd.Series(words)).to_numpy(np.float32)
    )
    assert encoder.transform({"w": ["new"]}).tolist() == [[0, 0, 0]]
    assert encoder.unseen({"w": ["new", "a", None]}) == {"w": ("new",)}


def test_many_categories_keep_the_frequent_ones():
    words = [f"w{number}" for number in range(150) for _ in range(2 + (number < 100))]
    column = TableEncoder.fit({"w": words}).columns[0]
    assert isinstance(column, Category)
    assert set(column.levels) == {f"w{number}" for number in range(100)}
    assert column.rarer == 50


def test_dates_are_days_and_places_in_year_week_and_day():
    days = pd.date_range("2021-03-01", periods=40, freq="30h")
    encoder = TableEncoder.fit({"d": days.to_numpy()})
    x = encoder.transform({"d": [str(day) for day in days]}, np.float64)
    np.testing.assert_allclose(x[:, 0], np.arange(40) * 1.25, atol=1e-9)
    hours = 2 * np.pi * np.array([day.hour for day in days]) / 24
    np.testing.assert_allclose(x[:, encoder.features.index("d sine of day")], np.sin(hours), atol=1e-9)
    # The first of January 1970 was a Thursday: seven days make a week.
    same = encoder.transform({"d": ["2022-05-04", "2022-05-11"]}, np.float64)
    place = encoder.features.index("d cosine of week")
    np.testing.assert_allclose(same[0, place], same[1, place])


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("31/12/2020", "2020-12-31"),
        ("12/31/2020", "2020-12-31"),
        ("31.12.2020", "2020-12-31"),
        ("Dec 31, 2020", "2020-12-31"),
    ],
)
def test_dates_are_read_as_people_write_them(text, day):
    one = TableEncoder.fit({"d": [text, text.replace("2020", "2021")]})
    other = TableEncoder.fit({"d": [day, day.replace("2020", "2021")]})
    np.testing.assert_allclose(one.transform({"d": [text]}), other.transform({"d": [day]}))


def test_identifiers_are_found_in_a_part_of_the_rows_too():
    some = RNG.permutation(1000)[:300]
    values = RNG.integers(0, 1000, 300)
    encoder = TableEncoder.fit({"order": some, "value": values, "place": RNG.random(300)})
    assert kinds(encoder) == {"order": "left out", "value": "number", "place": "number"}
    assert kinds(TableEncoder.fit({"order": some, "value": values}, keep=["order"]))["order"] == "number"
    # Where there is nothing else, it is read.
    assert kinds(TableEncoder.fit({"order": some})) == {"order": "number"}


@pytest.mark.parametrize("target", ["number", "words"])
def test_what_gives_the_target_away_is_said(target):
    y = RNG.random(100) if target == "number" else np.where(np.arange(100) < 50, "low", "high").astype(object)
    table = {
        "noise": RNG.random(100),
        "leak": 3 * y + 1 if target == "number" else np.arange(100) // 50 + RNG.random(100) / 2,
    }
    notes = {column.name: column.note for column in TableEncoder.fit(table, y).columns}
    assert notes["noise"] == ""
    assert notes["leak"].startswith("CAREFUL")


def test_rows_that_cannot_be_read_are_named_each():
    encoder = TableEncoder.fit({"u": [1.0, 2.5], "d": ["2020-01-01", "2020-02-01"], "b": [True, False]})
    table = {"u": ["1", "many", "inf"], "d": ["2020-01-01", None, "soon"], "b": ["true", "FALSE", "perhaps"]}
    _, problems = encoder.encode(table)
    assert list(problems) == [1, 2]
    assert "'many'" in problems[1]
    with pytest.raises(ValueError, match=r"Row 1 cannot be read: column 'u'.*\(2 rows are like that\)"):
        encoder.transform(table)
    with pytest.raises(ValueError, match="no column 'd'; its columns are u, b"):
        encoder.encode({"u": [1], "b": [True]})


def test_a_few_words_among_numbers_stand_for_missing_values():
    numbers = [f"{value:.2f}" for value in RNG.random(60)]
    encoder = TableEncoder.fit({"u": [*numbers, "unknown", "unknown"]})
    assert kinds(encoder) == {"u": "number"}
    assert "'unknown' read as missing" in encoder.columns[0].note
    assert encoder.transform({"u": ["unknown"]})[0, 1] == 1
    # Few different numbers beside words are names of kinds.
    assert kinds(TableEncoder.fit({"u": ["1", "2", "3"] * 20 + ["A"]})) == {"u": "category"}


def test_only_training_rows_decide_what_is_filled_in():
    table = {"u": np.array([1.0, 3.0, np.nan, 100.0]), "w": np.array(["a", "b", "a", "c"], dtype=object)}
    encoder = TableEncoder.fit(table).refit(table, [0, 1, 2])
    assert encoder.features == ("u", "u missing", "w=a", "w=b")
    assert encoder.transform(table).tolist()[2:] == [[2, 1, 1, 0], [100, 0, 0, 0]]


@pytest.mark.parametrize(
    ("text", "number"),
    [("12,000", 12000), ("-1,234.5", -1234.5), ("1,23", None), ("1_0", None), ("x", None), (" 7", 7)],
)
def test_texts_as_numbers(text, number):
    assert number_of(text) == number


def test_tables_are_tables():
    assert list(columns_of(np.ones((2, 3)))) == ["0", "1", "2"]
    with pytest.raises(ValueError, match="rows and columns"):
        columns_of(np.ones(3))
    with pytest.raises(ValueError, match="no column 'z'"):
        TableEncoder.fit({"u": [1.5, 2]}, drop=["z"])
    assert LeftOut("u", "why").features == ()


def test_a_parquet_file_is_not_kept_while_it_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    from dissensus.data.frames import table_parts

    rows = 1 << 16
    column = pyarrow.array(np.random.default_rng(0).normal(size=rows))
    table = pyarrow.table({"a": column, "b": column})
    with parquet.ParquetWriter(tmp_path / "t.parquet", table.schema) as writer:
        for _ in range(12):
            writer.write_table(table)
    before, most, count = pyarrow.total_allocated_bytes(), 0, 0
    for part in table_parts(tmp_path / "t.parquet", (), rows // 4):
        count += len(part.frame)
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert count == 12 * rows
    # Of twelve groups; with buffers for what was read it was seventeen of them.
    assert most < 6 * table.nbytes


MOMENTS = st.datetimes(datetime.datetime(1990, 1, 1), datetime.datetime(2060, 1, 1))
TEXTS = [
    "2",
    "2.0",
    " 3",
    "true",
    "False",
    "a",
    "NA",
    "1.#QNAN",
    "1,000",
    "20240601",
    "2024-06-02",
    "03.06.2024",
    "inf",
]
CELLS = st.one_of(
    *[st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([20240601, 10**16]), st.sampled_from(TEXTS)],
    *[st.sampled_from([0.0, 0.5, 2.0, math.nan, math.inf, 20240601.0]), MOMENTS, st.dates(datetime.date(1990, 1, 1))],
)
KNOWN = {
    "number": [1.0, 2.5, None],
    "truth": [True, False, None],
    "word": ["2", "a", "True"],
    "day": ["2024-06-01", None, "2024-07-01"],
    "written": ["01.06.2024", "13.07.2024", None],
}
READER = TableEncoder.fit(KNOWN, keep=list(KNOWN))


@given(rows=st.lists(st.tuples(*[CELLS] * len(KNOWN)), min_size=1, max_size=6), frame=st.booleans())
def test_a_value_is_read_the_same_whatever_stands_beside_it(rows, frame):
    columns = {name: list(values) for name, values in zip(KNOWN, zip(*rows, strict=True), strict=True)}
    whole, problems = READER.codes(pd.DataFrame(columns) if frame else columns)
    alone = [READER.codes({name: [cell] for name, cell in zip(KNOWN, row, strict=True)}) for row in rows]
    np.testing.assert_array_equal(whole, np.concatenate([codes for codes, _ in alone]))
    assert problems == {row: own[0] for row, (_, own) in enumerate(alone) if own}


def test_whole_numbers_in_a_column_of_dates_are_read_or_refused():
    encoder = TableEncoder.fit({"d": ["2024-06-01", "2024-06-11"]})
    assert encoder.transform({"d": [20240601, 20240603]})[:, 0].tolist() == [0, 2]
    _, problems = encoder.encode({"d": [1700000000, 20240601]})
    assert list(problems) == [0]


def test_what_is_left_without_a_known_value_is_no_feature():
    with pytest.raises(ValueError, match="no column left for features"):
        TableEncoder.fit({"u": [1.0, 2.0, None]}).refit({"u": [1.0, 2.0, None]}, [2])


def test_columns_that_share_a_name_are_numbered_and_labels_too():
    from dissensus.data.frames import label_indices, unique_names

    assert unique_names(["a", "label", "label"]) == ["a", "label", "label.1"]
    assert unique_names(["a", "a", "a.1", "a"]) == ["a", "a.2", "a.1", "a.3"]
    indices, classes = label_indices(["cat", "ant", "cat"])
    assert (indices.tolist(), classes) == ([1, 0, 1], ("ant", "cat"))
