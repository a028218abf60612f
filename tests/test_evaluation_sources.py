"""One evaluation, however its data is handed over: arrays, files, folders, data set objects, suites, published files."""

import numpy as np
import pytest
import torch
from evaluation_cases import as_floats, classifier, image_classifier, images, labelled
from PIL import Image
from torch.utils.data import Dataset

from dissensus.data.corruptions import corrupt
from dissensus.data.files import load
from dissensus.data.suites import OPENOOD_CIFAR10, load_suite
from dissensus.evaluation import evaluate

NAMES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def ensemble():
    return image_classifier()


@pytest.fixture(scope="module")
def known():
    return images(30)


@pytest.fixture(scope="module")
def expected(ensemble, known):
    return measured(ensemble, known)


def measured(ensemble, known, ood=None, **options):
    return evaluate(ensemble, known, ood, **{"transform": as_floats, "bootstrap": 0, **options})


def as_pictures(x):
    return [Image.fromarray(image) for image in x.movedim(1, -1).numpy()]


class Pictures(Dataset):
    """Items as those of torchvision without a transform: (picture, label)."""

    def __init__(self, x, y):
        self.items = list(zip(as_pictures(x), y.tolist(), strict=True))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Rows:
    """Items as those of Hugging Face: {"image": ..., "label": ...}."""

    def __init__(self, x, y):
        self.items = [{"image": a, "label": b} for a, b in zip(as_pictures(x), y.tolist(), strict=True)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def save_folder(folder, x, y):
    for number, (picture, label) in enumerate(zip(as_pictures(x), y.tolist(), strict=True)):
        path = folder / "known" / NAMES[label] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    return folder / "known"


def save_parquet(folder, x, y):
    import io

    import pandas as pd

    def encoded(picture):
        file = io.BytesIO()
        picture.save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    frame = pd.DataFrame({"image": [encoded(picture) for picture in as_pictures(x)], "label": y.numpy()})
    frame.to_parquet(folder / "known.parquet")
    return str(folder / "known.parquet")


def save_npz(folder, x, y):
    np.savez(folder / "known.npz", x=x.movedim(1, -1).numpy(), y=y.numpy())
    return str(folder / "known.npz")


HANDED_OVER = {
    "npz": save_npz,
    "loaded npz": lambda *given: load(save_npz(*given)),
    "parquet": save_parquet,
    "pictures": lambda folder, x, y: Pictures(x, y),
    "rows": lambda folder, x, y: Rows(x, y),
}


@pytest.mark.parametrize("source", HANDED_OVER)
def test_the_source_changes_nothing(ensemble, known, expected, tmp_path, source):
    data = HANDED_OVER[source](tmp_path, *known)
    assert measured(ensemble, data).numbers == expected.numbers


@pytest.mark.parametrize("source", HANDED_OVER)
def test_unknown_and_shifted_sets_come_from_the_same_sources(ensemble, known, tmp_path, source):
    x, y = images(20, seed=4)
    other = HANDED_OVER[source](tmp_path, x, y)
    assert measured(ensemble, known, {"other": other}).numbers == (measured(ensemble, known, {"other": x}).numbers)
    assert measured(ensemble, known, shifted={"other": other}).numbers == (
        measured(ensemble, known, shifted={"other": (x, y)}).numbers
    )


def test_labels_that_are_names_are_numbered_by_the_class_names(ensemble, known, expected, tmp_path):
    folder = save_folder(tmp_path, *known)
    order = [path.name for path in sorted(folder.glob("*/*"), key=lambda path: (path.parent.name, path.name))]
    x, y = known
    rows = torch.tensor([int(name[:3]) for name in order])
    result = measured(ensemble, folder, class_names=NAMES)
    assert result.numbers == measured(ensemble, (x[rows], y[rows])).numbers
    assert result.number("accuracy").value == pytest.approx(expected.number("accuracy").value)
    assert result.class_names == NAMES


def test_classes_of_the_known_data_name_the_outputs_unless_others_are_given(ensemble, known, tmp_path):
    result = measured(ensemble, save_folder(tmp_path, *known))
    assert result.class_names == tuple(sorted(NAMES))


def test_a_table_needs_to_be_told_its_target(tmp_path):
    x, y = labelled(40)
    lines = [f"{a},{b},{label}" for (a, b), label in zip(x.tolist(), y.tolist(), strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,species", *lines]))
    members = classifier(2)
    result = evaluate(members, load(tmp_path / "table.csv", target="species"), bootstrap=0)
    assert result.number("accuracy").value == evaluate(members, (x, y), bootstrap=0).number("accuracy").value
    with pytest.raises(ValueError, match=r"Set 'id' must have targets.*load\(path, target=\.\.\.\)"):
        evaluate(members, str(tmp_path / "table.csv"), bootstrap=0)


def test_what_cannot_be_read_is_named_with_its_set(ensemble, known, tmp_path):
    with pytest.raises(ValueError, match="Set 'id' cannot be read: There is no file or folder"):
        measured(ensemble, tmp_path / "missing.npz")
    with pytest.raises(ValueError, match="Set 'far' cannot be read: There is no file or folder"):
        measured(ensemble, known, {"far": str(tmp_path / "missing.npz")})


def test_classes_that_do_not_fit_the_outputs_are_refused(ensemble, known, tmp_path):
    x, y = known
    folder = save_folder(tmp_path, x[y < 2], y[y < 2])
    with pytest.raises(ValueError, match=r"each of the 3 outputs.*got 2 names: green, red.*what the known data"):
        measured(ensemble, folder)
    assert measured(ensemble, folder, class_names=NAMES).class_names == NAMES
    with pytest.raises(ValueError, match="Classes of set 'id' must be among red, black, white; got green"):
        measured(ensemble, folder, class_names=("red", "black", "white"))


def test_a_suite_brings_its_groups_along(ensemble, known, tmp_path):
    for seed, name in enumerate(("cifar100", "tin", "svhn")):
        save = images(12, seed=seed + 2)[0].movedim(1, -1).numpy()
        np.savez(tmp_path / f"{name}.npz", x=save)
    suite = load_suite(OPENOOD_CIFAR10, tmp_path, (3, 16, 16))
    assert suite.grouped == {"near": ("cifar100", "tiny_imagenet"), "far": ("svhn",)}
    result = measured(ensemble, known, suite)
    single = [result.number("auroc", name, score="bma").value for name in ("cifar100", "tiny_imagenet", "svhn")]
    assert result.number("auroc", "near", score="bma").value == pytest.approx(sum(single[:2]) / 2)
    assert result.number("auroc", "far", score="bma").value == single[2]
    chosen = measured(ensemble, known, suite, groups={"all": suite.sets})
    assert list(chosen.groups) == ["all"]


def test_one_set_may_be_a_group_by_its_name(ensemble, known):
    result = measured(ensemble, known, {"other": images(9, seed=2)[0]}, groups={"near": "other"})
    assert result.groups == {"near": ("other",)}


def save_published(folder, x, names, labels=None):
    """Files as CIFAR-10-C has them: all images at severity 1, then at 2, and so on."""
    folder.mkdir(exist_ok=True)
    for name in names:
        parts = [corrupt(x, name, severity, seed=7) for severity in (1, 2, 3, 4, 5)]
        np.save(folder / f"{name}.npy", torch.cat(parts).movedim(1, -1).numpy())
    if labels is not None:
        np.save(folder / "labels.npy", np.tile(labels.numpy(), 5))
    return folder


def test_published_files_take_the_place_of_corruptions_made_here(ensemble, known, tmp_path):
    names = ("fog", "contrast")
    folder = save_published(tmp_path / "published", known[0], names, known[1])
    options = {"corruptions": names, "severities": (1, 4), "batch_size": 7}
    read = measured(ensemble, known, corruption_folder=folder, **options)
    made = measured(ensemble, known, seed=7, **options)
    assert read.numbers == made.numbers
    assert read.numbers != measured(ensemble, known, seed=8, **options).numbers


def test_published_files_of_other_images_are_refused(ensemble, known, tmp_path):
    x, y = known
    options = {"corruptions": "fog", "severities": 1}
    folder = save_published(tmp_path / "labelled", x, ["fog"], (y + 1) % 3)
    with pytest.raises(ValueError, match=r"must be those of labels\.npy.*row 0 differs"):
        measured(ensemble, known, corruption_folder=folder, **options)
    short = save_published(tmp_path / "short", x[:20], ["fog"])
    with pytest.raises(ValueError, match=r"fog\.npy must hold a copy of every known image; rows 14 to 27"):
        measured(ensemble, known, corruption_folder=short, batch_size=14, **options)
    with pytest.raises(ValueError, match=r"must hold snow\.npy"):
        measured(ensemble, known, corruption_folder=short, corruptions="snow")


def test_frost_comes_from_the_users_pictures(ensemble, known, tmp_path):
    Image.new("RGB", (200, 200), (250, 250, 250)).save(tmp_path / "white.png")
    options = {"corruptions": ("frost", "fog"), "severities": 5}
    grown = measured(ensemble, known, **options)
    given = measured(ensemble, known, frost_folder=tmp_path, **options)
    assert given.number("confidence", "fog", severity=5) == grown.number("confidence", "fog", severity=5)
    copy = corrupt(known[0], "frost", 5, frost_folder=str(tmp_path))
    expected = measured(ensemble, (copy, known[1])).number("nll").value
    assert given.number("nll", "frost", severity=5).value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("option", ["corruption_folder", "frost_folder"])
def test_a_folder_without_corruptions_is_refused(ensemble, known, tmp_path, option):
    with pytest.raises(ValueError, match="are for `corruptions`, of which none is named"):
        measured(ensemble, known, **{option: tmp_path})
