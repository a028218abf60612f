"""Arrays in files are read row by row, as the tensors that they would be in memory."""

import numpy as np
import pytest
import torch

import dissensus as ds
from dissensus.data.sources import arrays_of, check_pair
from dissensus.data.trees import OnDisk, as_tensor, rows_of


@pytest.fixture(params=["f4", "f8", "i4", "u1", "f2"])
def stored(request, tmp_path):
    values = np.random.default_rng(0).integers(0, 100, (50, 3)).astype(request.param)
    np.save(tmp_path / "x.npy", values)
    return values, tmp_path / "x.npy"


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_rows_are_those_of_the_array_in_memory(stored, mode):
    values, path = stored
    wanted, rows = as_tensor(values, "x"), rows_of(np.load(path, mmap_mode=mode), "x")
    assert isinstance(rows, OnDisk)
    assert (rows.shape, rows.dtype, len(rows), rows.nbytes) == (wanted.shape, wanted.dtype, 50, wanted.nbytes)
    chosen = torch.tensor([7, 3, 3, 49])
    for got, want in (
        (rows[2:9], wanted[2:9]),
        (rows[chosen], wanted[chosen]),
        (torch.cat(list(rows.split(8))), wanted),
        (rows.to(torch.device("cpu")), wanted),
    ):
        assert torch.equal(got, want)
        assert got.dtype == want.dtype
        got.zero_()
    assert np.array_equal(np.load(path), values), "rows are copies"


def test_views_of_a_file_are_in_the_file_and_copies_are_not(stored):
    values, path = stored
    mapped = np.load(path, mmap_mode="r")
    for view, want in ((mapped[5:], values[5:]), (np.asarray(mapped)[::2], values[::2]), (mapped.T, values.T)):
        rows = rows_of(view, "x")
        assert isinstance(rows, OnDisk)
        assert torch.equal(rows[:2], as_tensor(want[:2], "x"))
    for array in (mapped.copy(), mapped + 1, values, torch.from_numpy(values)):
        assert isinstance(rows_of(array, "x"), torch.Tensor)


@pytest.mark.parametrize("labels", [["cat", "dog"], np.array(["cat", "dog"]), np.array([b"cat", b"dog"])], ids=str)
def test_names_of_classes_are_refused_with_a_way_to_number_them(labels):
    with pytest.raises(ValueError, match=r"`y` must be .* of strings. Number classes .*return_inverse=True"):
        as_tensor(labels, "y")
    x = torch.zeros(2, 3)
    for use in (
        lambda: ds.fit(ds.DeepEnsemble(lambda: torch.nn.Linear(3, 2), 2), (x, labels), epochs=1),
        lambda: ds.linear_probe(None, (x, labels), (x, torch.arange(2))),
    ):
        with pytest.raises(ValueError, match="Number classes from 0"):
            use()


def test_what_is_no_number_is_refused():
    for values in (np.array([None, 1]), np.array(["2020-01-01"], "datetime64[D]")):
        with pytest.raises(ValueError, match=f"of dtype {values.dtype}".replace("[", r"\[")):
            as_tensor(values, "x")


def test_changes_that_only_the_map_has_are_kept(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((50, 3), np.float32))
    private = np.load(tmp_path / "x.npy", mmap_mode="c")
    private[7] = 5.0
    rows = rows_of(private, "x")
    for _ in range(2):
        assert rows[7:8].tolist() == [[5.0] * 3]


def test_rows_that_are_not_finite_are_found_wherever_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr("dissensus.data.trees._AT_ONCE", 4 * 3 * 7)
    values = np.zeros((50, 3), np.float32)
    values[[20, 44], 1] = np.nan
    np.save(tmp_path / "x.npy", values)
    for x in (values, np.load(tmp_path / "x.npy", mmap_mode="r")):
        inputs, targets, _ = arrays_of((x, np.zeros(50)))
        with pytest.raises(ValueError, match="2 rows hold NaN or infinity, the first is row 20"):
            check_pair(inputs, targets, "training")


def test_predicting_from_a_file_is_predicting_from_memory(tmp_path):
    ens = ds.DeepEnsemble(lambda: torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(3, 2)), 2)
    values = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    before = values.copy()
    got = ds.predict(ens, np.load(tmp_path / "x.npy", mmap_mode="r"), batch_size=16)
    torch.testing.assert_close(got, ds.predict(ens, before, batch_size=16))
