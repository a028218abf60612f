"""The demo: its data, and the whole of it, small."""

import contextlib
import io

import pytest
import torch

from dissensus import demo
from dissensus.demo import CORRUPTIONS, KNOWN, NEW, load
from dissensus.evaluation.tables import short


@pytest.fixture(scope="module")
def digits():
    return load(seed=0)


def test_every_image_is_used_once_and_new_digits_never_in_training(digits):
    (train, learned_digits), (test, tested_digits), (new, new_digits) = digits.train, digits.test, digits.new
    assert len(train) + len(test) + len(new) == 1797
    assert set(learned_digits.tolist()) == set(tested_digits.tolist()) == set(range(KNOWN))
    assert set(new_digits.tolist()) == set(range(KNOWN, 10))
    learned = {image.numpy().tobytes() for image in train}
    tested = {image.numpy().tobytes() for image in test}
    assert not learned & tested


def test_the_seed_decides_split_and_corruptions(digits):
    again, other = load(seed=0), load(seed=1)
    for name, (images, _) in digits.corrupted.items():
        assert torch.equal(images, again.corrupted[name][0])
        assert not torch.equal(images, other.corrupted[name][0])
    assert not torch.equal(digits.train[0], other.train[0])


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_change_every_image_stay_in_range_and_leave_their_input_alone(name, digits):
    images = digits.test[0].clone()
    changed = CORRUPTIONS[name](images, torch.Generator().manual_seed(0))
    assert torch.equal(images, digits.test[0])
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
    accuracy = result.evaluation.number("accuracy").value
    assert accuracy >= max(0.95, result.evaluation.number("member_accuracy").value)


def test_the_demo_is_less_certain_about_unknown_digits(small_demo):
    found = small_demo[0].evaluation
    kinds = ("total_entropy", "expected_entropy", "mutual_information")
    known = [found.number("mean", score=kind).value for kind in kinds]
    for name in (NEW, *CORRUPTIONS):
        total, data, knowledge = (found.number("mean", name, score=kind).value for kind in kinds)
        assert total > 2 * known[0]
        assert knowledge > 2 * known[2]
        assert total == pytest.approx(data + knowledge, abs=1e-4)
    assert found.number("auroc", NEW, score="total_entropy").value > 0.9
    assert min(found.number("auroc", name, score="mutual_information").value for name in CORRUPTIONS) > 0.7


def test_the_demo_prints_and_writes_its_numbers(small_demo):
    result, printed = small_demo
    found, page = result.evaluation, result.page.read_text(encoding="utf-8")
    for score in found.score_names:
        value = short(found.number("auroc", NEW, score=score).value)
        assert value in printed
        assert value in page
    for name in CORRUPTIONS:
        assert short(found.number("accuracy", name).value) in printed
        assert short(found.number("mean", name, score="mutual_information").value) in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 120
    assert str(result.page) in printed
    assert result.page.name == "report.html"


def test_the_page_is_the_report_after_a_picture_of_the_data(small_demo):
    page = small_demo[0].page.read_text(encoding="utf-8")
    titles = ["What the ensemble is shown", "Main numbers", "Telling known from unknown", "Disputed inputs"]
    assert all(f">{title}</h2>" in page for title in titles)
    assert page.index(titles[0]) < page.index(titles[1])
    assert page.count("<svg ") == page.count('role="img"') > 20


@pytest.mark.parametrize("missing", ["sklearn", "matplotlib"])
def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch, tmp_path, missing):
    monkeypatch.setattr("dissensus._signatures.find_spec", lambda name: None if name == missing else object())
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dissensus\[demo\]'"):
        demo.run(tmp_path)


def test_one_member_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"at least 2 members.*got 1"):
        demo.run(tmp_path, num_members=1)


def test_a_folder_that_cannot_be_made_is_noticed_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "fit", lambda *_, **__: pytest.fail("training began"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        demo.run(tmp_path / "file" / "report")
