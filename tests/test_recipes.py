"""Recipes: everything they can name, what they refuse, and that a run comes back as it was."""

import json
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipe_cases import recipe, save_blobs, save_line
from torch import nn

from dissensus.architectures import ARCHITECTURES
from dissensus.data.files import Loaded
from dissensus.data.suites import SUITES
from dissensus.data.toy import BUILT_IN
from dissensus.recipes import AUGMENTATIONS, KINDS, OBJECTIVES, SCHEDULES, Preprocessing, Recipe, load_run
from dissensus.recipes.alarms import scorable
from dissensus.recipes.choices import build_augment, build_schedule, member_factory, resolve_model
from dissensus.recipes.data import DataSettings, load_sets, split_rows

ROOT = Path(__file__).parents[1]


@pytest.fixture
def blobs(tmp_path):
    return save_blobs(tmp_path)


@pytest.fixture
def line(tmp_path):
    return save_line(tmp_path)


class TestNames:
    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_every_architecture_gets_its_sizes_from_the_data(self, name):
        options = {"hidden": [4]} if name == "mlp" else {}
        net = member_factory(resolve_model({"name": name, **options}), (1, 32, 32), 7)().eval()
        assert net(torch.zeros(2, 1, 32, 32)).shape == (2, 7)

    @pytest.mark.parametrize("name", OBJECTIVES)
    def test_every_objective_trains(self, name, blobs):
        options = {"weight": 0.1} if name == "norm_penalty" else {}
        data = {"unlabelled": "blobs.npz"} if name == "disagree" else {}
        tables = {"objective": {"name": name, **options}, "data": {"path": "blobs.npz", **data}}
        if name in ("hard_delta", "masked_uniform"):
            tables["ensemble"] = {"kind": "anchored"}
        run = recipe(blobs, **tables, training={"epochs": 1}).train(blobs / "run")
        assert np.isfinite(run.history["loss"]).all()

    @pytest.mark.parametrize("name", SCHEDULES)
    def test_every_schedule_can_be_named(self, name, blobs):
        options = {"step": {"every": 5}, "multi_step": {"milestones": [1, 2]}, "cyclic": {"cycles": 2}}.get(name, {})
        resolved = recipe(blobs, training={"schedule": {"name": name, **options}}).training["schedule"]
        assert isinstance(build_schedule(resolved), SCHEDULES[name])

    @pytest.mark.parametrize("name", AUGMENTATIONS)
    def test_every_augmentation_can_be_named(self, name, blobs):
        options = {"gaussian_noise": {"scale": 0.1}, "rotation": {"degrees": 10}}.get(name, {})
        resolved = recipe(blobs, augment={name: options}).augment
        assert isinstance(build_augment(resolved, 3).steps[0], AUGMENTATIONS[name])

    @pytest.mark.parametrize("name", KINDS)
    def test_every_kind_can_be_named(self, name, blobs):
        assert recipe(blobs, ensemble={"kind": name}).ensemble["kind"] == name

    def test_a_masked_target_is_an_objective_around_the_one_that_is_named(self, blobs):
        def losses(folder, objective, **ensemble):
            kind = {"kind": "anchored", "mask_probability": 1.0, **ensemble}
            described = recipe(blobs, objective=objective, ensemble=kind, training={"epochs": 1})
            return described.train(blobs / folder).history["loss"]

        label, uniform = (losses(each, {}, masked_target=each) for each in ("label", "uniform"))
        np.testing.assert_array_equal(losses("by name", {"name": "masked_uniform"}), uniform)
        assert not np.allclose(label, uniform)
        assert Recipe.read(blobs / "uniform" / "recipe.toml").ensemble["masked_target"] == "uniform"

    def test_anchored_networks_have_a_temperature(self, blobs):
        kind = {"kind": "anchored", "anchors": 3}
        for name in ("without", "exponential", "deviation"):
            heat = {} if name == "without" else {"temperature": name}
            recipe(blobs, ensemble={**kind, **heat}, training={"epochs": 1}).train(blobs / name)
            ensemble, described, _ = load_run(blobs / name)
            assert ensemble.temperature == described.ensemble.get("temperature") == heat.get("temperature")

    def test_a_masked_target_goes_inside_hard_delta_mining(self, blobs):
        ensemble = {"kind": "anchored", "masked_target": "uniform"}
        objective = recipe(blobs, objective={"name": "hard_delta"}, ensemble=ensemble).build_objective()
        assert isinstance(objective, OBJECTIVES["hard_delta"])
        assert isinstance(objective.inner, OBJECTIVES["masked_uniform"])

    def test_augmentations_keep_their_order_and_can_be_switched_off(self, blobs):
        wanted = {"horizontal_flip": True, "mixup": False, "random_crop": {"padding": 2}}
        assert list(recipe(blobs, augment=wanted).augment) == ["horizontal_flip", "random_crop"]

    def test_optimizers_of_torch_go_by_their_class_name(self, blobs):
        run = recipe(blobs, training={"optimizer": "RAdam", "epochs": 1}).train(blobs / "run")
        assert run.step == 6

    def test_an_activation_goes_by_its_name(self):
        net = member_factory(resolve_model({"name": "mlp", "hidden": [4], "activation": "tanh"}), (2,), 2)()
        assert any(isinstance(module, nn.Tanh) for module in net)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"training": {"epoch": 3}}, r"unknown key 'epoch' in \[training\]; did you mean 'epochs'"),
        ({"trainign": {}}, "unknown key 'trainign' in the recipe; did you mean 'training'"),
        ({"training": {"epochs": "many"}}, "must be a whole number"),
        ({"training": {"optimizer": "adamm"}}, "class of torch.optim"),
        ({"training": {"seed": 1}}, r"'seed' stands in \[training\]; it belongs into \[ensemble\]"),
        ({"training": {"callback": 1}}, "unknown key 'callback'"),
        ({"training": {"schedule": "cosin"}}, "did you mean 'cosine'"),
        ({"training": {"schedule": {"name": "step"}}}, "needs every"),
        ({"model": {"name": "mpl"}}, "did you mean 'mlp'"),
        ({"model": {"hiden": [3]}}, "did you mean 'hidden'"),
        ({"model": {"activation": "rellu"}}, "did you mean 'relu'"),
        ({"ensemble": {"members": 0}}, "members in .* whole number"),
        ({"ensemble": {"kind": "dep"}}, "did you mean 'deep'"),
        ({"ensemble": {"execution": "fast"}}, "'auto' or 'vectorised' or 'loop'"),
        ({"ensemble": {"kind": "anchored", "masked_target": "labels"}}, "'label' or 'uniform'"),
        (
            {"ensemble": {"kind": "anchored", "masked_target": "uniform"}, "objective": {"name": "joint", "beta": 0.5}},
            "Joint compares networks",
        ),
        ({"ensemble": {"kind": "anchored", "temperature": "hot"}}, "'exponential' or 'deviation'"),
        ({"ensemble": {"masked_target": "uniform"}}, "unknown key 'masked_target'"),
        ({"objective": {"name": "adversarail"}}, "did you mean 'adversarial'"),
        ({"objective": {"name": "adversarial", "loss": "mse"}}, r"\[objective\.inner\]"),
        ({"objective": {"inner": {}}}, "wraps no other objective"),
        (
            {"objective": {"name": "adversarial", "inner": {"los": 1}}},
            r"'los' in \[objective\.inner\]; did you mean 'loss'",
        ),
        ({"objective": {"name": "adversarial", "epsilon": -1}}, "must be a number of at least 0"),
        ({"objective": {"loss": "crossentropy"}}, "cross_entropy"),
        ({"augment": {"flip": True}}, "horizontal_flip"),
        ({"augment": {"horizontal_flip": 3}}, "true, false or a table"),
        ({"data": {"validation": 0.5, "test": 0.5}}, "nothing is left"),
        ({"data": {"test": 1.5}}, "share from 0 to 1"),
        ({"data": {"pth": "x"}}, "did you mean 'path'"),
    ],
)
def test_slips_in_a_recipe_are_found_before_anything_runs(blobs, tables, words):
    with pytest.raises(ValueError, match=words):
        recipe(blobs, **tables)


def test_a_network_is_that_of_the_file_beside_the_recipe(tmp_path):
    for width in (3, 5):
        folder = tmp_path / str(width)
        folder.mkdir()
        (folder / "beside_recipe.py").write_text(
            "from torch import nn\nfrom beside_sizes import W\ndef make(): return nn.Linear(2, W)\n"
        )
        (folder / "beside_sizes.py").write_text(f"W = {width}\n")
    for width in (3, 5, 3):
        model = {"name": "beside_recipe:make", "folder": str(tmp_path / str(width))}
        for _ in range(2):
            assert member_factory(model, (2,), width, allow_import=True)().out_features == width
    # A module of the standard library stays what it is for all others.
    (tmp_path / "3" / "json.py").write_text("")
    member_factory(model, (2,), 3, allow_import=True)
    assert sys.modules["json"] is json


def test_networks_of_a_first_recipe_stay_whole_after_a_second(tmp_path):
    for width, text in (
        (3, "class Net(nn.Linear): pass\ndef make(): return Net(2, 3)\n"),
        (5, "def make(): return nn.Linear(2, 5)\n"),
    ):
        (tmp_path / str(width)).mkdir()
        (tmp_path / str(width) / f"nets_of_{width}.py").write_text(f"from torch import nn\n{text}")

    def make(width):
        model = {"name": f"nets_of_{width}:make", "folder": str(tmp_path / str(width))}
        return member_factory(model, (2,), width, allow_import=True)()

    first = make(3)
    make(5)
    assert sys.modules[type(first).__module__].Net is type(first)
    assert isinstance(make(3), type(first))


def test_a_network_may_lie_in_a_folder_without_init(tmp_path):
    for width in (3, 5):
        folder = tmp_path / str(width) / "experiments_here"
        folder.mkdir(parents=True)
        (folder / "nets.py").write_text(f"from torch import nn\ndef make(): return nn.Linear(2, {width})\n")
    for width in (3, 5, 3):
        model = {"name": "experiments_here.nets:make", "folder": str(tmp_path / str(width))}
        assert member_factory(model, (2,), width, allow_import=True)().out_features == width


@pytest.mark.parametrize("missing", ["data", "model"])
def test_what_a_recipe_needs_is_named(missing):
    tables = {"data": {"path": "digits"}, "model": {"name": "mlp", "hidden": []}}
    with pytest.raises(ValueError, match=rf"needs the table \[{missing}\]"):
        Recipe.from_tables({name: table for name, table in tables.items() if name != missing})


def test_a_file_that_is_no_toml_is_named(tmp_path):
    (tmp_path / "a.toml").write_text("[data\n")
    with pytest.raises(ValueError, match=r"a\.toml is not valid TOML"):
        Recipe.read(tmp_path / "a.toml")
    with pytest.raises(ValueError, match="There is no recipe"):
        Recipe.read(tmp_path / "b.toml")


def test_a_recipe_may_begin_with_a_byte_order_mark(blobs):
    from dissensus.recipes.sweeps import sweep_of

    text = '[data]\npath = "blobs.npz"\n[model]\nname = "mlp"\nhidden = [4]\n[sweep]\nrepeats = 2\n'
    (blobs / "marked.toml").write_text(text, encoding="utf-8-sig")
    assert Recipe.read(blobs / "marked.toml").model["name"] == "mlp"
    assert sweep_of(blobs / "marked.toml") == {"repeats": 2}


def test_the_resolved_recipe_says_the_same(blobs):
    first = recipe(
        blobs,
        data={"leave_out": [2], "unlabelled": "more.npz", "test": "other.npz"},
        objective={"name": "virtual_adversarial", "inner": {"label_smoothing": 0.1}},
        training={"schedule": {"name": "multi_step", "milestones": [1, 2]}, "optimizer_options": {"betas": [0.8, 0.9]}},
        augment={"gaussian_noise": {"scale": 0.1}},
    )
    # Read from another folder: paths must not depend on it.
    second = Recipe.from_tables(tomllib.loads(first.to_toml()), "elsewhere")
    assert second == first
    assert first.data.path == str(blobs / "blobs.npz")


def test_the_recipes_of_examples_and_docs_are_recipes():
    page = "".join((ROOT / "docs" / name).read_text() for name in ("recipes.md", "recipe-keys.md"))
    shown = [Recipe.from_tables(tomllib.loads(block)) for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    assert len(shown) == 3
    assert shown[0] == Recipe.read(ROOT / "examples" / "digits.toml")


def test_the_docs_name_everything_a_recipe_can():
    page = (ROOT / "docs" / "recipe-keys.md").read_text()
    names = [f.name for f in fields(DataSettings)]
    for name in (*names, *ARCHITECTURES, *OBJECTIVES, *SCHEDULES, *AUGMENTATIONS, *BUILT_IN, *SUITES):
        assert f"`{name}`" in page, name


class TestRows:
    @given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.floats(0, 0.4), st.floats(0, 0.4))
    def test_parts_are_disjoint_whole_and_balanced(self, labels, first, second):
        parts = split_rows([str(label) for label in labels], [first, second], seed=1)
        assert sorted(torch.cat(parts).tolist()) == list(range(len(labels)))
        for label in set(labels):
            rows = {i for i, other in enumerate(labels) if other == label}
            for part, share in zip(parts[1:], (first, second), strict=True):
                assert abs(len(rows & set(part.tolist())) - share * len(rows)) <= 0.5

    def test_the_seed_of_the_ensemble_does_not_move_the_test_rows(self, blobs):
        one, other = (recipe(blobs, data={"test": 0.3}, ensemble={"seed": s}).load_sets() for s in (0, 1))
        assert torch.equal(one.test.x, other.test.x)
        moved = recipe(blobs, data={"test": 0.3, "seed": 1}).load_sets()
        assert not torch.equal(one.test.x, moved.test.x)

    def test_classes_that_are_left_out_are_nowhere_but_there(self, blobs):
        sets = recipe(blobs, data={"leave_out": ["1"], "test": 0.3}).load_sets()
        assert sets.classes == ("0", "2")
        assert set(sets.left_out.y.tolist()) == {1}
        assert all(1 not in part.y.tolist() for part in (sets.train, sets.validation, sets.test))
        assert len(sets.train) + len(sets.validation) + len(sets.test) + len(sets.left_out) == 90

    def test_files_of_their_own_are_read_for_validation_and_test(self, blobs):
        np.savez(blobs / "more.npz", x=np.zeros((4, 2)), y=np.array([0, 1, 2, 2]))
        sets = recipe(blobs, data={"validation": "more.npz", "test": "more.npz", "leave_out": [2]}).load_sets()
        assert sets.validation.y.tolist() == sets.test.y.tolist() == [0, 1]
        assert len(sets.train) == 60

    def test_numbers_sort_as_numbers(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=np.zeros((4, 1)), y=np.array([10, 9, 2, 10]))
        settings = DataSettings(str(tmp_path / "a.npz"), validation=0.0)
        assert load_sets(settings, classification=True).classes == ("2", "9", "10")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"leave_out": [5]}, "names the class '5', which the data does not hold; it holds 0, 1, 2"),
            ({"leave_out": [0, 1]}, "two classes or more"),
            ({"target": "z"}, "none of them is called z"),
        ],
    )
    def test_what_cannot_be_split_is_said(self, blobs, options, words):
        with pytest.raises(ValueError, match=words):
            recipe(blobs, data=options).load_sets()

    def test_values_are_no_classes(self, line):
        with pytest.raises(
            ValueError, match=r"For regression choose a loss such as 'gaussian_nll' under \[objective\]"
        ):
            recipe(line, "line.csv", data={"target": "y"}, objective={"loss": "brier"}).load_sets()

    def test_words_are_no_values(self, tmp_path):
        (tmp_path / "a.csv").write_text("u,y\n1.5,low\n2,high\n3,low\n")
        with pytest.raises(ValueError, match="one for numbers, but the target y holds the classes high, low"):
            recipe(tmp_path, "a.csv", data={"target": "y"}, objective={"loss": "mse"}).load_sets()

    @pytest.mark.parametrize("kind", ["fractions", "many numbers", "few numbers", "words"])
    def test_the_targets_say_what_a_recipe_leaves_open(self, tmp_path, kind):
        rows = {
            "fractions": [n / 3 for n in range(60)],
            "many numbers": range(60),
            "few numbers": [0, 1] * 30,
            "words": ["a", "b"] * 30,
        }[kind]
        (tmp_path / "a.csv").write_text("u,y\n" + "".join(f"{n / 7},{y}\n" for n, y in enumerate(rows)))
        described = recipe(tmp_path, "a.csv", data={"target": "y"}, training={"epochs": "auto", "batch_size": "auto"})
        settled = described.settled(described.load_sets())
        regression = kind in ("fractions", "many numbers")
        assert settled.objective["loss"] == ("gaussian_nll" if regression else "cross_entropy")
        assert (settled.training["batch_size"], settled.training["epochs"]) == (16, 500)
        joint = recipe(
            tmp_path,
            "a.csv",
            data={"target": "y"},
            objective={"name": "adversarial", "inner": {"name": "joint", "beta": 0.5}},
        )
        inner = joint.settled(joint.load_sets()).objective["inner"]
        assert inner["loss"] == ("mse" if regression else "cross_entropy")

    def test_only_training_rows_decide_how_a_table_is_read(self, tmp_path):
        rows = [(f"w{n}" if n < 3 else "often", n % 2) for n in range(60)]
        (tmp_path / "a.csv").write_text("w,y\n" + "".join(f"{w},{y}\n" for w, y in rows))
        sets = recipe(tmp_path, "a.csv", data={"target": "y", "test": 0.5}).load_sets()
        assert set(sets.train.columns.columns[0].levels) == set(sets.train.table["w"])
        assert sets.test.columns == sets.train.columns

    def test_targets_must_be_there(self, line):
        with pytest.raises(ValueError, match="has no targets"):
            recipe(line, "line.csv").load_sets()


class TestPreprocessing:
    def learn(self, x, y=None, classes=("a", "b"), **options):
        return Preprocessing.learn(Loaded(x, y), classes, DataSettings("nowhere", **options))

    def test_training_inputs_get_mean_zero_and_variance_one(self):
        x = torch.randn(200, 3) * torch.tensor([1.0, 10.0, 0.1]) + torch.tensor([0.0, 5.0, -3.0])
        seen = self.learn(x)(x)
        torch.testing.assert_close(seen.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
        torch.testing.assert_close(seen.std(0, correction=0), torch.ones(3))

    def test_pixels_are_standardised_channel_by_channel(self):
        x = torch.randint(0, 256, (20, 3, 4, 4), dtype=torch.uint8)
        x[:, 1] //= 4
        seen = self.learn(x)(x)
        torch.testing.assert_close(seen.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
        plain = self.learn(x, standardise=False)(x)
        torch.testing.assert_close(plain, x / 255)

    def test_a_feature_that_never_changes_stays_finite(self):
        x = torch.full((10, 2), 0.1)
        assert bool(torch.isfinite(self.learn(x)(x)).all())

    def test_it_comes_back_from_json(self, line):
        described = recipe(line, "line.csv", data={"target": "y"}, objective={"loss": "mse"})
        first = Preprocessing.learn(described.load_sets().train, None, described.data)
        assert Preprocessing.from_json(first.to_json()) == first

    def test_inputs_of_another_kind_are_refused(self):
        images = self.learn(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))
        with pytest.raises(ValueError, match=r"trained on uint8 images of range 0 to 255; got torch\.float32"):
            images(torch.zeros(2, 1, 8, 8))
        with pytest.raises(ValueError, match="images of 8 x 8 pixels and 1 channel; got 3 features"):
            images(torch.zeros(2, 3))

    def test_labels_are_matched_by_name(self):
        prepared = self.learn(torch.zeros(2, 1), classes=("bee", "cow", "dog"))
        other = Loaded(torch.zeros(3, 1), torch.tensor([1, 0, 2]), ("dog", "bee", "cow"))
        assert prepared.targets(other).tolist() == [0, 2, 1]
        with pytest.raises(
            ValueError, match="holds the classes ant, which the run does not know; it knows bee, cow, dog"
        ):
            prepared.targets(Loaded(torch.zeros(1, 1), torch.tensor([0]), ("ant",)))


def test_rows_too_far_out_for_scores_are_told_from_others():
    inputs = torch.tensor([[1.0, 2.0], [1e30, 0.0], [0.0, 1.0], [0.0, torch.nan], [3.0, 4.0]])
    outputs = torch.zeros(2, 5, 3)
    outputs[1, 2, 0], outputs[0, 4, 1] = 1e25, torch.nan
    assert scorable(inputs, outputs).tolist() == [True, False, False, False, False]
    assert scorable(torch.zeros(5, 2, dtype=torch.uint8), outputs).tolist() == [True, True, False, True, False]
