"""Labelled sets to adapt to: found under any of their names and layouts, or named with the reason why not."""

import numpy as np
import pytest
from dissensus_studies.anchoring.adaptation import load_tasks
from PIL import Image


def pictures(folder, count=4):
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(np.full((40, 50, 3), 50 * number, np.uint8)).save(folder / f"{number}.jpg")


def load(folder, **options):
    return load_tasks(folder, **options)


class TestTasks:
    def save(self, path, count, classes=2):
        images = np.zeros((count, 32, 32, 3), np.uint8)
        np.savez(path, x=images, y=np.arange(count) % classes)

    def test_parts_and_halves_are_found(self, tmp_path):
        self.save(tmp_path / "cifar100_train_1of2.npz", 6)
        self.save(tmp_path / "cifar100_train_2of2.npz", 4)
        self.save(tmp_path / "cifar100_test.npz", 3)
        self.save(tmp_path / "mnist_test.npz", 8)
        found = load_tasks(tmp_path).found
        assert [len(found["cifar100"].train.x), len(found["cifar100"].test.x)] == [10, 3]
        assert found["mnist"].train.y.tolist() == found["mnist"].test.y.tolist() == [0, 0, 1, 1]
        assert "half" in found["mnist"].notes[-1]

    def test_folders_of_classes_are_found(self, tmp_path):
        for part in ("train", "test"):
            for name in ("a", "b"):
                pictures(tmp_path / "pets" / part / name, 2)
        assert load_tasks(tmp_path).found["pets"].train.x.shape == (4, 3, 32, 32)

    def test_classes_of_both_parts_go_by_their_names(self, tmp_path):
        brightness = {"a": 0, "b": 100, "c": 200}

        def save(part, names):
            for name in names:
                folder = tmp_path / "pets" / part / name
                folder.mkdir(parents=True)
                picture = np.full((32, 32, 3), brightness.get(name, 50), np.uint8)
                Image.fromarray(picture).save(folder / "1.png")

        save("train", "abc")
        save("test", "ac")
        task = load_tasks(tmp_path).found["pets"]
        for part in (task.train, task.test):
            assert part.x.float().mean((1, 2, 3)).tolist() == [100.0 * label for label in part.y]
        save("test", "d")
        assert "class 'd', which the training images lack" in load_tasks(tmp_path).missing["pets"]

    def test_what_is_missing_or_left_out_is_told_apart(self, tmp_path):
        self.save(tmp_path / "cifar10_test.npz", 4)
        found = load_tasks(tmp_path, without=("cifar10",))
        assert not found.found
        assert "cifar10" not in found.missing
        assert "not found" in found.missing["food101"]


class TestLayouts:
    @pytest.mark.parametrize(
        "layout", ["dtd", "dtd/images", "dtd/dtd/images", "DTD/Images", "dtd/train", "dtd/images/test", "dtd/jpg"]
    )
    def test_classes_may_lie_deeper(self, tmp_path, layout):
        for name in ("banded", "dotted", "woven"):
            pictures(tmp_path / layout / name)
        (tmp_path / layout.split("/")[0] / "labels").mkdir()
        task = load(tmp_path).found["dtd"]
        assert task.train.y.tolist() == task.test.y.tolist() == [0, 0, 1, 1, 2, 2]

    @pytest.mark.parametrize(("train", "test"), [("train", "val"), ("cars_train", "cars_test"), ("Train", "Test")])
    def test_parts_are_told_from_classes(self, tmp_path, train, test):
        for part in (train, test):
            for name in ("audi", "bmw"):
                pictures(tmp_path / "stanford_cars" / part / part / name, 2)
        task = load(tmp_path).found["cars"]
        assert task.train.y.tolist() == task.test.y.tolist() == [0, 0, 1, 1]
        assert not task.notes

    def test_a_class_called_train_is_no_part(self, tmp_path):
        for name in ("bus", "train", "tram"):
            pictures(tmp_path / "cifar100" / name)
        assert load(tmp_path).found["cifar100"].train.y.tolist() == [0, 0, 1, 1, 2, 2]

    @pytest.mark.parametrize(
        ("written", "name"),
        [
            ("UCF101", "ucf101"),
            ("UCF-101-midframes", "ucf101"),
            ("food-101", "food101"),
            ("Flowers102", "flowers102"),
            ("flowers-102", "flowers102"),
            ("oxford_flowers", "flowers102"),
            ("stanford-cars", "cars"),
            ("oxford-iiit-pet", "pets"),
            ("OxfordPets", "pets"),
            ("FashionMNIST", "fashion_mnist"),
        ],
    )
    def test_names_are_found_as_they_are_usually_written(self, tmp_path, written, name):
        for each in ("a", "b"):
            pictures(tmp_path / written / each)
        assert list(load(tmp_path).found) == [name]

    def test_files_are_found_as_they_are_usually_written(self, tmp_path):
        images, labels = np.zeros((6, 32, 32, 3), np.uint8), np.arange(6) % 2
        for name in ("Food-101_Train_2of2", "Food-101_Train_1of2", "Food-101-Test"):
            np.savez(tmp_path / f"{name}.npz", x=images, y=labels)
        assert len(load(tmp_path).found["food101"].train.x) == 12


class TestUnusable:
    def reason(self, folder, name):
        tasks = load(folder)
        assert name not in tasks.found
        return tasks.missing[name]

    def test_images_without_classes(self, tmp_path):
        pictures(tmp_path / "oxford-iiit-pet" / "images")
        assert "not in folders of their classes" in self.reason(tmp_path, "pets")

    def test_one_class(self, tmp_path):
        np.savez(tmp_path / "mnist.npz", x=np.zeros((9, 28, 28), np.uint8), y=np.zeros(9, np.int64))
        assert "of one class" in self.reason(tmp_path, "mnist")

    def test_too_few_images(self, tmp_path):
        np.savez(tmp_path / "mnist.npz", x=np.zeros((4, 28, 28), np.uint8), y=np.arange(4))
        assert "are the least" in self.reason(tmp_path, "mnist")

    def test_images_that_are_not_bytes(self, tmp_path):
        np.savez(tmp_path / "mnist.npz", x=np.zeros((9, 28, 28, 3), np.float32), y=np.arange(9) % 2)
        assert "uint8" in self.reason(tmp_path, "mnist")

    def test_a_broken_file(self, tmp_path):
        (tmp_path / "mnist.npz").write_bytes(b"PK\x03\x04 cut off")
        assert "cannot be used" in self.reason(tmp_path, "mnist")

    def test_another_file_of_the_set_is_taken_instead(self, tmp_path):
        pictures(tmp_path / "textures")
        np.savez(tmp_path / "dtd10_32.npz", x=np.zeros((8, 32, 32, 3), np.uint8), y=np.arange(8) % 2)
        assert len(load(tmp_path).found["dtd"].train.x) == 4

    def test_few_images_of_many_classes_are_judged_by_what_was_trained_on(self, tmp_path):
        for part, shift in (("train", 0), ("test", 7)):
            x, y = np.zeros((100, 32, 32, 3), np.uint8), (np.arange(100) + shift) % 100
            np.savez(tmp_path / f"cifar100_{part}.npz", x=x, y=y)
        task = load(tmp_path, limit=40).found["cifar100"]
        assert set(task.test.y.tolist()) <= set(task.train.y.tolist())
        assert "not trained on left out" in task.notes[-1]
