"""The demo: its data, its measurements against closed forms, and the whole of it, small."""

import contextlib
import io
from math import log

import pytest
import torch

from dissensus import demo
from dissensus.demo import answers as demo_answers
from dissensus.demo.answers import (
    CORRUPTIONS,
    KNOWN,
    NEW,
    Answers,
    Digits,
    Images,
    detection,
    load,
    make_member,
    quality,
    uncertainty,
)
from dissensus.demo.page import uncertainty_histograms
from dissensus.html import cell_text
from dissensus.members import DeepEnsemble
from dissensus.training import Run


@pytest.fixture(scope="module")
def digits():
    return load(seed=0)


def test_every_image_is_used_once_and_new_digits_never_in_training(digits):
    assert len(digits.train.x) + len(digits.test.x) + len(digits.unknown[NEW].x) == 1797
    assert set(digits.train.y.tolist()) == set(digits.test.y.tolist()) == set(range(KNOWN))
    assert set(digits.unknown[NEW].y.tolist()) == set(range(KNOWN, 10))
    learned = {image.numpy().tobytes() for image in digits.train.x}
    tested = {image.numpy().tobytes() for image in digits.test.x}
    assert not learned & tested


def test_the_seed_decides_split_and_corruptions(digits):
    again, other = load(seed=0), load(seed=1)
    for name, images in digits.unknown.items():
        assert torch.equal(images.x, again.unknown[name].x)
        assert name == NEW or not torch.equal(images.x, other.unknown[name].x)
    assert not torch.equal(digits.train.x, other.train.x)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_change_every_image_stay_in_range_and_leave_their_input_alone(name, digits):
    images = digits.test.x.clone()
    changed = CORRUPTIONS[name](images, torch.Generator().manual_seed(0))
    assert torch.equal(images, digits.test.x)
    assert changed.shape == images.shape
    assert changed.min() >= 0
    assert changed.max() <= 1
    assert ((changed - images).abs().amax((1, 2, 3)) > 0).all()


def test_shift_moves_a_pixel_by_two_in_one_direction():
    images = torch.zeros(64, 1, 8, 8)
    images[:, :, 4, 4] = 1
    moved = CORRUPTIONS["shift"](images, torch.Generator().manual_seed(0))
    places = {tuple(place) for place in torch.nonzero(moved)[:, 2:].tolist()}
    assert places == {(2, 4), (6, 4), (4, 2), (4, 6)}
    assert (moved.sum((1, 2, 3)) == 1).all()


def test_cover_hides_four_by_four_pixels():
    covered = CORRUPTIONS["cover"](torch.zeros(64, 1, 8, 8), torch.Generator().manual_seed(0))
    assert ((covered == 0.5).sum((1, 2, 3)) == 16).all()


def sure_of(classes):
    """Logits `(members, batch, KNOWN)` of members that are sure of these classes, `(members, batch)`."""
    return 100.0 * torch.nn.functional.one_hot(torch.as_tensor(classes), KNOWN)


@pytest.fixture
def ideal():
    """Three members, sure and right about seven known digits, each sure of another class on unknown ones."""
    labels = torch.arange(KNOWN)
    new = Images(torch.zeros(2, 1, 8, 8), torch.tensor([7, 9]))
    corrupted = Images(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]))
    known = Images(torch.zeros(KNOWN, 1, 8, 8), labels)
    unknown = {NEW: new, **dict.fromkeys(CORRUPTIONS, corrupted)}
    split = sure_of([[0, 1], [1, 2], [2, 3]])
    return Answers(
        Digits(known, known, unknown),
        Run(DeepEnsemble(make_member, num_members=3)),
        sure_of([labels.tolist()] * 3),
        dict.fromkeys(unknown, split),
    )


def test_sure_and_right_members_are_perfect(ideal):
    for row in quality(ideal).values():
        assert row == pytest.approx({"accuracy": 1, "NLL": 0, "Brier": 0, "ECE": 0}, abs=1e-6)


def test_members_sure_of_three_classes_share_log_3_nats_of_knowledge_uncertainty(ideal):
    rows = uncertainty(ideal)
    assert rows["known digits"] == pytest.approx(
        {"accuracy": 1, "total": 0, "data": 0, "knowledge": 0}, abs=1e-5
    )
    assert rows[NEW].pop("accuracy") is None
    assert rows[NEW] == pytest.approx({"total": log(3), "data": 0, "knowledge": log(3)}, abs=1e-5)


def test_scores_of_the_ensemble_separate_what_no_single_member_can(ideal):
    rows = detection(ideal)
    alone = rows.pop("one member's entropy")
    assert set(alone.values()) == {0.5}
    assert rows.pop("data uncertainty")[NEW] == 0.5
    assert {value for row in rows.values() for value in row.values()} == {1.0}


def test_histograms_count_every_digit_once():
    figure = uncertainty_histograms({"known": torch.tensor([0.0, 1e-9, 0.3]), "new": torch.rand(50)}, "total")
    shares = [patch.get_data().values.sum() for patch in figure.axes[0].patches]
    assert shares == pytest.approx([1.0] * 4)


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory):
    printed = io.StringIO()
    state = torch.random.get_rng_state()
    with contextlib.redirect_stdout(printed):
        result = demo.run(tmp_path_factory.mktemp("demo"), num_members=3, epochs=15, seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    return result, printed.getvalue()


def test_the_demo_reads_known_digits_and_its_ensemble_beats_its_members(small_demo):
    result, _ = small_demo
    assert result.quality["ensemble"]["accuracy"] >= 0.95
    for metric in ("NLL", "Brier"):
        # Jensen: never worse than the mean of its members.
        assert result.quality["ensemble"][metric] <= result.quality["one member"][metric]


def test_the_demo_is_less_certain_about_unknown_digits(small_demo):
    result, _ = small_demo
    rows = dict(result.uncertainty)
    known = rows.pop("known digits")
    assert list(rows) == [NEW, *CORRUPTIONS]
    for row in rows.values():
        assert row["knowledge"] > 2 * known["knowledge"]
        assert row["total"] > 2 * known["total"]
        assert row["total"] == pytest.approx(row["data"] + row["knowledge"], abs=1e-4)
    assert result.detection["total uncertainty"][NEW] > 0.9
    assert result.detection["knowledge uncertainty"]["all"] > 0.8


def test_the_demo_prints_and_writes_all_its_numbers(small_demo):
    result, printed = small_demo
    page = result.page.read_text(encoding="utf-8")
    for rows in (result.quality, result.uncertainty, result.detection):
        for row in rows.values():
            for value in row.values():
                assert cell_text(value) in printed
                assert f">{cell_text(value)}<" in page
    assert str(result.page) in printed
    assert result.page.name == "report.html"
    assert page.count("<svg ") == page.count('role="img"') == 14


@pytest.mark.parametrize("missing", ["sklearn", "matplotlib"])
def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch, tmp_path, missing):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dissensus\[demo\]'"):
        demo.run(tmp_path)


def test_one_member_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"at least 2 members.*got 1"):
        demo.run(tmp_path, num_members=1)


def test_a_folder_that_cannot_be_made_is_noticed_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_answers, "fit", lambda *_, **__: pytest.fail("training began"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        demo.run(tmp_path / "file" / "report")
