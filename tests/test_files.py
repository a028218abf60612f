"""Files, folders and data set objects become tensors, or one sentence that says why not."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from dissensus.data.files import load
from dissensus.data.frames import read_table
from dissensus.data.images import as_images, match_images
from dissensus.data.tables import Number, TableEncoder
from dissensus.data.toy import BUILT_IN
from dissensus.recipes.starting import look_at

RNG = np.random.default_rng(0)


def pixels(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def save_npz(path, **arrays):
    np.savez(path, **arrays)
    return path


def save_csv(path, text):
    path.write_text(text)
    return path


def save_pictures(folder, count, size=(6, 4), mode="RGB"):
    folder.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    arrays = [pixels(*shape) for _ in range(count)]
    for number, array in enumerate(arrays):
        Image.fromarray(array).save(folder / f"{number:02d}.png")
    return arrays


class TestArrays:
    def test_images_with_channels_last_come_out_channels_first(self, tmp_path):
        x = pixels(5, 6, 7, 3)
        loaded = load(save_npz(tmp_path / "a.npz", x=x, y=np.arange(5)))
        assert loaded.x.dtype == torch.uint8
        np.testing.assert_array_equal(loaded.x.numpy(), x.transpose(0, 3, 1, 2))
        assert loaded.y.tolist() == [0, 1, 2, 3, 4]
        assert loaded.classes is None

    @pytest.mark.parametrize("keys", [("X", "y"), ("images", "labels"), ("data", "targets"), ("inputs", "target")])
    def test_usual_names_are_found(self, tmp_path, keys):
        loaded = load(save_npz(tmp_path / "a.npz", **{keys[0]: np.ones((3, 2)), keys[1]: np.zeros(3)}))
        assert (loaded.x.shape, loaded.x.dtype) == ((3, 2), torch.float32)
        assert loaded.y.dtype == torch.float32

    @pytest.mark.parametrize("names", ["x_{},y_{}", "{}_images,{}_labels"])
    def test_a_split_is_named_after_a_hash(self, tmp_path, names):
        arrays = {}
        for number, split in enumerate(("train", "test")):
            x, y = names.format(split, split).split(",")
            arrays |= {x: pixels(4 + number, 3, 3), y: np.full((4 + number, 1), number)}
        path = save_npz(tmp_path / "a.npz", **arrays)
        loaded = load(f"{path}#test")
        assert len(loaded) == 5
        assert loaded.y.tolist() == [1] * 5
        with pytest.raises(ValueError, match=r"Read one part of it, such as .*#test"):
            load(path)

    def test_text_labels_become_numbered_classes(self, tmp_path):
        loaded = load(save_npz(tmp_path / "a.npz", x=np.ones((3, 2)), y=np.array(["cat", "ant", "cat"])))
        assert loaded.y.tolist() == [1, 0, 1]
        assert loaded.classes == ("ant", "cat")

    def test_the_target_of_an_npy_file_lies_beside_it(self, tmp_path):
        np.save(tmp_path / "x.npy", np.ones((4, 2)))
        np.save(tmp_path / "y.npy", np.arange(4))
        assert load(tmp_path / "x.npy").y is None
        assert load(tmp_path / "x.npy", "y.npy").y.tolist() == [0, 1, 2, 3]

    def test_objects_are_never_unpickled(self, tmp_path):
        class Bomb:
            def __reduce__(self):
                return (pytest.fail, ("unpickled",))

        np.savez(tmp_path / "a.npz", x=np.array([[Bomb()]], dtype=object))
        with pytest.raises(ValueError, match="Python objects, which are not read"):
            load(tmp_path / "a.npz")

    @pytest.mark.parametrize(
        ("arrays", "words"),
        [
            ({"a": np.ones((2, 2)), "b": np.ones(2)}, "holds a, b; none of them is called x"),
            ({"x": np.ones(3)}, "an axis of rows"),
            ({"x": np.ones((3, 2)), "y": np.ones(2)}, "one target for each of 3 inputs"),
            ({"x": np.array([["a"]])}, "must be numbers"),
            ({"x": pixels(2, 3, 5, 3)}, "layout"),
            ({"x": pixels(2, 5, 5, 5)}, "layout"),
            ({"x": np.ones((0, 2))}, "no rows"),
        ],
    )
    def test_what_cannot_be_read_is_said(self, tmp_path, arrays, words):
        with pytest.raises(ValueError, match=words):
            load(save_npz(tmp_path / "a.npz", **arrays))

    def test_layout_decides_where_the_shape_does_not(self, tmp_path):
        path = save_npz(tmp_path / "a.npz", x=pixels(2, 3, 5, 3))
        assert load(path, layout="channels_first").x.shape == (2, 3, 5, 3)
        assert load(path, layout="channels_last").x.shape == (2, 3, 3, 5)

    @pytest.mark.parametrize(("start", "length"), [(200, 3800), (532, 1), (30, 1)])
    def test_a_damaged_array_is_named(self, tmp_path, start, length):
        path = tmp_path / "a.npz"
        np.savez_compressed(path, x=np.random.default_rng(0).normal(size=(200, 50)))
        data = bytearray(path.read_bytes())
        data[start : start + length] = bytes(length)
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.npz cannot be read"):
            load(path)

    @pytest.mark.parametrize("data", [b"", b"PK\x03\x04 torn", b"text"])
    def test_damaged_files_are_named(self, tmp_path, data):
        (tmp_path / "a.npz").write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.npz"):
            load(tmp_path / "a.npz")


class TestTables:
    def test_text_columns_become_one_column_a_value(self, tmp_path):
        path = save_csv(tmp_path / "a.csv", "age,sex,y\n1,m,0.5\n2,f,1.5\n3,m,2.5\n")
        loaded = load(path, "y")
        # pandas' own dummies are the reference.
        frame = pd.get_dummies(pd.read_csv(path).drop(columns="y"), columns=["sex"]).astype(np.float32)
        np.testing.assert_array_equal(loaded.x.numpy(), frame.to_numpy())
        assert loaded.columns.features == ("age", "sex=f", "sex=m")
        assert loaded.y.tolist() == [0.5, 1.5, 2.5]

    def test_csv_and_parquet_give_the_same(self, tmp_path):
        frame = pd.DataFrame({"a": [1.5, 2.0], "b": ["u", "v"], "flag": [True, False], "y": [3, 4]})
        frame.to_csv(tmp_path / "a.csv", index=False)
        frame.to_parquet(tmp_path / "a.parquet")
        one, other = load(tmp_path / "a.csv", "y"), load(tmp_path / "a.parquet", "y")
        torch.testing.assert_close(one.x, other.x)
        assert one.y.tolist() == other.y.tolist() == [3, 4]
        assert one.columns == other.columns

    def test_another_table_is_read_in_the_same_way(self, tmp_path):
        first = load(save_csv(tmp_path / "a.csv", "u,v,y\n1,m,0\n2,f,1\n"), "y")
        # Columns in another order, one more of them, no target, and a value that was never seen.
        path = save_csv(tmp_path / "b.csv", "extra,v,u\n9,f,5\n9,new,6\n")
        second = load(path, "y", columns=first.columns, strict=False)
        assert second.x.tolist() == [[5, 1, 0], [6, 0, 0]]
        assert second.y is None
        assert "'new'" in second.notes[0]

    @pytest.mark.parametrize("separator", [",", ";", "\t"])
    def test_the_separator_is_found(self, tmp_path, separator):
        path = save_csv(tmp_path / "a.csv", "u,v,y\n1.5,2,a\n3,4,b\n".replace(",", separator))
        loaded = load(path, "y")
        assert loaded.x.tolist() == [[1.5, 2], [3, 4]]
        assert loaded.classes == ("a", "b")

    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ('u;"a,b,c"\n1;2\n', ["u", "a,b,c"]),
            ('"a;b;c",u\n1,2\n', ["a;b;c", "u"]),
            ("price,eur;kg\n1;2\n3;4\n", ["price,eur", "kg"]),
            ("lat;lon,u,v\n1;2,3,4\n", ["lat;lon", "u", "v"]),
            ("1,250;2,250\n1,500;3,500\n", ["0", "1"]),
            ("1,250\t1\n2,500\t2\n", ["0", "1"]),
            ("u\nDoe\n", ["u"]),
        ],
    )
    def test_separators_inside_quotes_and_numbers_are_none(self, tmp_path, text, names):
        frame, _ = read_table(save_csv(tmp_path / "a.csv", text))
        assert list(frame.columns) == names

    @pytest.mark.parametrize(
        "text",
        ["u;v;y\n0,125;1;0\n2,250;2;1\n", "u\tv\n1,5\t1\n2,5\t3\n", "u;y\n1234,567;0\n2;1\n", "0,125;1\n0,5;2\n"],
    )
    def test_decimal_commas_are_told(self, tmp_path, text):
        with pytest.raises(ValueError, match=r"cannot be read as a table: Its numbers have decimal commas \([0-9,]+\)"):
            load(save_csv(tmp_path / "a.csv", text))

    def test_commas_that_may_stand_between_thousands_do(self, tmp_path):
        loaded = load(save_csv(tmp_path / "a.csv", "u;w;y\n1,234,567;a 1,5;1\n2,000;b;0\n"), "y")
        assert loaded.x[:, loaded.columns.features.index("u")].tolist() == [1234567, 2000]
        assert "commas in its numbers stand between thousands: 1,234,567" in loaded.notes[0]

    def test_decimal_commas_far_down_are_told(self, tmp_path):
        text = "a;b;y\n" + "".join(f"{row};{row};u\n" for row in range(12_000)) + "199,5;3,25;v\n" * 200
        with pytest.raises(ValueError, match=r"decimal commas \(199,5\)"):
            load(save_csv(tmp_path / "a.csv", text))

    def test_endings_may_be_written_large(self, tmp_path):
        pd.DataFrame({"u": [1.5, 2], "y": [0, 1]}).to_parquet(tmp_path / "a.PARQUET")
        save_csv(tmp_path / "b.TSV", "u,1\ty\n1.5\t0\n2\t1\n")
        assert load(tmp_path / "a.PARQUET", "y").x.tolist() == load(tmp_path / "b.TSV", "y").x.tolist() == [[1.5], [2]]

    def test_words_stay_words_in_a_file_where_all_look_like_numbers(self, tmp_path):
        first = load(save_csv(tmp_path / "a.csv", "w,v\n007,1.5\nx,2.5\n"))
        second = load(save_csv(tmp_path / "b.csv", "w,v\n007,1.5\n007,3.5\n"), columns=first.columns)
        assert second.x.tolist() == [[1, 0, 1.5], [1, 0, 3.5]]

    def test_a_table_without_names_gets_numbers(self, tmp_path):
        loaded = load(save_csv(tmp_path / "a.csv", "1,2,0\n3,4,1\n"), "2")
        assert loaded.x.tolist() == [[1, 2], [3, 4]]
        assert "first line holds numbers" in loaded.notes[0]

    def test_missing_values_are_filled_in_dropped_or_refused(self, tmp_path):
        path = save_csv(tmp_path / "a.csv", "u,v,y\n1,2,0\n,4,1\n5,6,1\n")
        loaded = load(path, "y")
        assert loaded.x.tolist() == [[1, 0, 2], [3, 1, 4], [5, 0, 6]]
        assert loaded.columns.features == ("u", "u missing", "v")
        with pytest.raises(ValueError, match="1 of 3 rows have missing values; the first is row 1"):
            load(path, "y", missing="error")
        loaded = load(path, "y", missing="drop")
        assert loaded.x.tolist() == [[1, 2], [5, 6]]
        assert loaded.y.tolist() == [0, 1]
        assert loaded.notes == ("1 of 3 rows with missing values left out",)
        assert len(load(path, "y", drop=["u"])) == 3

    def test_rows_without_a_target_are_left_out(self, tmp_path):
        path = save_csv(tmp_path / "a.csv", "u,y\n1.5,\n2,1\n5,?\n4,0\n")
        loaded = load(path, "y")
        assert (loaded.x.tolist(), loaded.y.tolist()) == ([[2], [4]], [1, 0])
        assert "2 of 4 rows with no target left out" in loaded.notes
        with pytest.raises(ValueError, match="2 of 4 rows have no target"):
            load(path, "y", missing="error")

    def test_what_stands_for_missing_does_so_in_every_kind_of_file(self, tmp_path):
        frame = pd.DataFrame({"u": [1.0, None, 3.0], "w": ["a", "NA", "b"], "y": ["p", "q", "p"]})
        frame.to_csv(tmp_path / "a.csv", index=False)
        frame.to_parquet(tmp_path / "a.parquet")
        one, other = load(tmp_path / "a.csv", "y"), load(tmp_path / "a.parquet", "y")
        assert one.columns == other.columns
        assert one.columns.features == ("u", "u missing", "w=a", "w=b", "w missing")
        torch.testing.assert_close(one.x, other.x)

    def test_numbers_with_commas_and_question_marks_are_numbers(self, tmp_path):
        path = save_csv(tmp_path / "a.csv", 'u,y\n"12,000",0\n?,1\n"1,500",0\n')
        loaded = load(path, "y")
        assert loaded.x.tolist() == [[12000, 0], [6750, 1], [1500, 0]]
        target = load(save_csv(tmp_path / "b.csv", 'u,y\n1.5,"12,000"\n2,"1,500"\n'), "y")
        assert target.y.tolist() == [12000, 1500]

    def test_columns_that_share_the_targets_name_are_no_features(self, tmp_path):
        loaded = load(save_csv(tmp_path / "a.csv", "label,u,label\n1,1.5,1\n0,2,1\n"), "label")
        assert loaded.columns.features == ("u",)

    @pytest.mark.parametrize(
        ("text", "options", "words"),
        [
            ("u,y\n1,2\n", {"target": "z"}, "no column 'z'; its columns are u, y"),
            ("u,y\n", {}, "no rows"),
            ("", {}, "cannot be read as a table"),
            ("u,y\n1,2\n", {"target": "y", "drop": ["u"]}, "There is no column left"),
            ("u,y\n1,2\n", {"drop": ["w"]}, "no column 'w'"),
            ("u,y\n1,2\n", {"size": 8}, "no use for size = 8"),
            ("u\n" + "".join(f"t{i}\n" for i in range(101)), {}, "names rows, no two alike"),
            ("u,y\n1,inf\ninf,3\n", {"target": "y"}, "Row 1 cannot be read: column 'u' must hold finite numbers"),
        ],
    )
    def test_what_cannot_be_read_is_said(self, tmp_path, text, options, words):
        with pytest.raises(ValueError, match=words):
            load(save_csv(tmp_path / "a.csv", text), **options)

    def test_text_where_training_had_numbers_is_named(self, tmp_path):
        path = save_csv(tmp_path / "a.csv", "u\n1\nmany\n")
        with pytest.raises(ValueError, match=r"a\.csv: Row 1 cannot be read: column 'u' must hold numbers.*'many'"):
            load(path, columns=TableEncoder((Number("u", 0.0),)))


class TestPictures:
    def test_subfolders_are_classes(self, tmp_path):
        cats, dogs = save_pictures(tmp_path / "cat", 2), save_pictures(tmp_path / "dog", 3)
        loaded = load(tmp_path)
        np.testing.assert_array_equal(loaded.x.numpy(), np.stack(cats + dogs).transpose(0, 3, 1, 2))
        assert loaded.y.tolist() == [0, 0, 1, 1, 1]
        assert loaded.classes == ("cat", "dog")
        assert loaded.names[0] == "cat/00.png"

    def test_a_flat_folder_has_no_labels(self, tmp_path):
        save_pictures(tmp_path, 3)
        (tmp_path / "notes.md").write_text("not an image")
        loaded = load(tmp_path)
        assert (len(loaded), loaded.y, loaded.classes) == (3, None, None)

    def test_grey_pictures_have_one_channel(self, tmp_path):
        arrays = save_pictures(tmp_path, 2, mode="L")
        np.testing.assert_array_equal(load(tmp_path).x.numpy()[:, 0], np.stack(arrays))

    def test_size_covers_and_crops_the_middle(self, tmp_path):
        # 12 x 6 pixels: left and right quarter black, the middle white; a square of the middle is all white.
        array = np.zeros((6, 12, 3), np.uint8)
        array[:, 3:9] = 255
        Image.fromarray(array).save(tmp_path / "a.png")
        assert bool((load(tmp_path, size=6).x == 255).all())

    def test_a_list_names_files_and_labels(self, tmp_path):
        save_pictures(tmp_path / "pictures", 3)
        (tmp_path / "list.txt").write_text("02.png 5\n00.png 1\n")
        loaded = load(tmp_path / "list.txt", root=tmp_path / "pictures")
        assert loaded.names == ("02.png", "00.png")
        assert loaded.classes == ("1", "5")
        assert loaded.y.tolist() == [1, 0]

    def test_pictures_of_different_sizes_need_a_size(self, tmp_path):
        save_pictures(tmp_path / "a", 1, size=(6, 4))
        save_pictures(tmp_path / "b", 1, size=(5, 5))
        with pytest.raises(ValueError, match=r"5 x 5 pixels and a/00\.png 6 x 4\. Set size"):
            load(tmp_path)
        assert load(tmp_path, size=4).x.shape == (2, 3, 4, 4)

    def test_what_cannot_be_read_is_said(self, tmp_path):
        with pytest.raises(ValueError, match="holds no images"):
            load(tmp_path)
        save_pictures(tmp_path / "a", 1)
        (tmp_path / "a" / "torn.png").write_bytes(b"\x89PNG torn")
        with pytest.raises(ValueError, match=r"torn\.png cannot be read as an image"):
            load(tmp_path)
        save_pictures(tmp_path, 1)
        with pytest.raises(ValueError, match="both images and subfolders"):
            load(tmp_path)
        (tmp_path / "list.txt").write_text("nowhere.png 1\n")
        with pytest.raises(ValueError, match="1 of the 1 images"):
            load(tmp_path / "list.txt")

    def test_deep_pictures_are_refused(self, tmp_path):
        Image.fromarray(np.ones((4, 4), np.uint16)).save(tmp_path / "a.png")
        with pytest.raises(ValueError, match="8 bits"):
            load(tmp_path)

    def test_parquet_with_encoded_images(self, tmp_path):
        arrays = save_pictures(tmp_path, 2)
        cells = [{"bytes": (tmp_path / f"{n:02d}.png").read_bytes(), "path": None} for n in range(2)]
        pd.DataFrame({"img": cells, "label": [7, 3]}).to_parquet(tmp_path / "a.parquet")
        loaded = load(tmp_path / "a.parquet")
        np.testing.assert_array_equal(loaded.x.numpy(), np.stack(arrays).transpose(0, 3, 1, 2))
        assert loaded.y.tolist() == [7, 3]
        pd.DataFrame({"img": [None, *cells], "label": [1, 7, 3]}).to_parquet(tmp_path / "b.parquet")
        with pytest.raises(ValueError, match=r"row 0 of b\.parquet has no image"):
            load(tmp_path / "b.parquet")

    def test_hidden_files_are_no_pictures_to_look_at(self, tmp_path):
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            save_pictures(tmp_path / name, 4)
            (tmp_path / name / "._00.png").write_bytes(b"what a Mac leaves")
        found, _ = look_at(tmp_path)
        assert "8 rows of images of" in found

    def test_pictures_too_large_for_pillow_are_refused(self, tmp_path, monkeypatch):
        save_pictures(tmp_path, 1)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
        with pytest.raises(ValueError, match=r"00\.png cannot be read as an image"):
            load(tmp_path)


class Items(list):
    """A data set object: a length, items, and what else is set on it."""


class TestItems:
    def test_pairs_of_picture_and_label_as_torchvision_gives_them(self):
        arrays = [pixels(4, 5, 3) for _ in range(3)]
        source = Items((Image.fromarray(a), n) for n, a in enumerate(arrays))
        source.classes = ["ant", "bee", "cow"]
        loaded = load(source)
        np.testing.assert_array_equal(loaded.x.numpy(), np.stack(arrays).transpose(0, 3, 1, 2))
        assert loaded.y.tolist() == [0, 1, 2]
        assert loaded.classes == ("ant", "bee", "cow")

    def test_dicts_as_hugging_face_gives_them(self):
        source = Items({"img": Image.fromarray(pixels(4, 4)), "fine_label": n} for n in (1, 0))
        source.features = {"img": None, "fine_label": SimpleNamespace(names=["no", "yes"])}
        loaded = load(source)
        assert loaded.x.shape == (2, 1, 4, 4)
        assert loaded.classes == ("no", "yes")
        assert loaded.y.tolist() == [1, 0]

    def test_tensors_stay_what_they_are(self):
        source = torch.utils.data.TensorDataset(torch.rand(4, 3, 8, 8), torch.arange(4))
        loaded = load(source)
        torch.testing.assert_close(loaded.x, source.tensors[0])
        assert loaded.y.tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            (Items(), "empty"),
            (3, "a path or an object with a length"),
            (Items([{"a": 1}]), "Items of Items hold a"),
            (Items([(np.ones(2), 0), (np.ones(3), 0)]), "one shape"),
            (Items([(np.ones(2), 0), (Image.fromarray(pixels(2, 2)), 0)]), "some are arrays"),
        ],
    )
    def test_what_cannot_be_read_is_said(self, source, words):
        with pytest.raises(ValueError, match=words):
            load(source)


class TestMatching:
    @pytest.mark.parametrize(("before", "after"), [((28, 28), 32), ((64, 64), 32), ((50, 30), 16)])
    def test_resizing_is_pillows(self, before, after):
        array = pixels(3, *before, 3)
        found, _ = match_images(torch.from_numpy(array).movedim(3, 1), 3, after, after)
        scale = after / min(before)
        high, wide = (max(after, round(side * scale)) for side in before)
        top, left = (high - after) // 2, (wide - after) // 2
        for image, one in zip(found, array, strict=True):
            large = Image.fromarray(one).resize((wide, high), Image.Resampling.BILINEAR)
            wanted = np.asarray(large)[top : top + after, left : left + after]
            difference = np.abs(image.movedim(0, 2).numpy().astype(int) - wanted)
            assert difference.max() <= 1  # Pillow rounds between its two passes.

    def test_grey_is_pillows(self):
        array = pixels(4, 9, 9, 3)
        found, notes = match_images(torch.from_numpy(array).movedim(3, 1), 1, 9, 9)
        wanted = np.stack([np.asarray(Image.fromarray(one).convert("L")) for one in array])
        assert np.abs(found[:, 0].numpy().astype(int) - wanted).max() <= 1
        assert notes == ("colour made grey",)

    def test_images_that_fit_are_not_touched(self):
        images = torch.from_numpy(pixels(2, 3, 8, 8))
        found, notes = match_images(images, 3, 8, 8)
        assert found is images
        assert notes == ()

    def test_other_channels_are_refused(self):
        with pytest.raises(ValueError, match="4 channels"):
            match_images(torch.zeros(1, 4, 8, 8), 3, 8, 8)
        with pytest.raises(ValueError, match="3 or 4 axes"):
            as_images(torch.zeros(2, 2))


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_set_is_whole(name):
    loaded = BUILT_IN[name]()
    assert len(loaded.x) == len(loaded.y) > 100
    assert bool(torch.isfinite(loaded.x.float()).all())
    assert BUILT_IN[name].__doc__.startswith(f"{len(loaded):,}".replace(",", " "))


def test_unknown_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="There is no file or folder"):
        load(tmp_path / "nothing.npz")
    (tmp_path / "a.pkl").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no known kind.*\.npz"):
        load(tmp_path / "a.pkl")
