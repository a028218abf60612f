"""Cached features are the backbone's, survive a kill, are known for what they are, and train heads as the data would."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from backbone_cases import small_backbone
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from training_helpers import x, y

import dissensus as ds
from dissensus import caching
from dissensus.data.augment import Compose, GaussianNoise, HorizontalFlip
from dissensus.data.features import FACTS, FEATURES

NOISE = GaussianNoise(0.1)


def head() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def ensemble(members: int = 3) -> ds.HeadEnsemble:
    return ds.HeadEnsemble(small_backbone(), head, members, seed=4)


class Pictures(Dataset):
    """Items with a random transform, as torchvision's are."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index):
        return x[index] + 0.1 * torch.randn(4), int(y[index])


class Counted(nn.Module):
    """Counts the rows that go through it, and fails after some batches."""

    def __init__(self, stop_after: int = 1000) -> None:
        super().__init__()
        # In a dictionary, as numbers that a module keeps are part of what it is recognised by.
        self.net, self.rows, self.limits = small_backbone(), [], {"stop after": stop_after}

    def forward(self, batch):
        if len(self.rows) == self.limits["stop after"]:
            raise KeyboardInterrupt
        self.rows.append(len(batch))
        return self.net(batch)


class TestFeatures:
    wanted = small_backbone().eval()(x).detach()

    @pytest.mark.parametrize("batch_size", [7, 100, 256])
    @pytest.mark.parametrize("in_file", [False, True])
    def test_are_those_of_the_backbone_in_evaluation(self, tmp_path, batch_size, in_file):
        net = small_backbone().train()
        before = {name: t.clone() for name, t in net.state_dict().items()}
        cached = ds.cache_features(net, (x, y), tmp_path / "c" if in_file else None, batch_size=batch_size)
        torch.testing.assert_close(cached.rows(0, 100), self.wanted)
        assert torch.equal(cached.targets, y)
        assert isinstance(cached.features, np.memmap) == in_file
        assert net.training
        assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())

    @pytest.mark.parametrize(
        "data",
        [(x.numpy(), y.numpy()), TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=9), [x, y]],
        ids=["arrays", "TensorDataset", "DataLoader", "list"],
    )
    def test_are_the_same_for_all_forms_of_data(self, data):
        cached = ds.cache_features(small_backbone(), data)
        torch.testing.assert_close(cached.features, self.wanted)
        assert torch.equal(cached.targets, y)

    @pytest.mark.parametrize("data", [x, TensorDataset(x)], ids=["tensor", "TensorDataset"])
    def test_need_no_targets(self, data):
        cached = ds.cache_features(small_backbone(), data)
        assert cached.targets is None
        torch.testing.assert_close(cached[3], self.wanted[3])
        with pytest.raises(ValueError, match="no targets"):
            ds.fit(ensemble(), cached, epochs=1)

    def test_of_arrays_larger_than_memory_are_read_in_parts(self, tmp_path):
        np.save(tmp_path / "x.npy", x.numpy())
        inputs = np.load(tmp_path / "x.npy", mmap_mode="r")
        cached = ds.cache_features(small_backbone(), (inputs, y), batch_size=16)
        torch.testing.assert_close(cached.features, self.wanted)

    def test_keep_their_shape(self):
        cached = ds.cache_features(nn.Conv2d(1, 2, 3), torch.randn(5, 1, 4, 4))
        assert cached.features.shape == (5, 2, 2, 2)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
    def test_are_kept_in_the_precision_asked_for_and_come_back_for_networks(self, tmp_path, dtype):
        cached = ds.cache_features(small_backbone(), (x, y), tmp_path, dtype=dtype)
        assert cached.stored.dtype == dtype
        assert cached.rows(0, 5).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(cached.rows(0, 100), self.wanted, rtol=1e-3, atol=1e-3, check_dtype=False)

    def test_leave_the_global_generators_alone(self):
        net = small_backbone()
        state = torch.get_rng_state()
        ds.cache_features(net, Pictures(), passes=2)
        assert torch.equal(torch.get_rng_state(), state)


class TestPasses:
    def test_differ_and_lie_one_after_the_other(self):
        cached = ds.cache_features(small_backbone(), (x, y), passes=3, augment=NOISE)
        assert (len(cached), cached.num_examples, cached.passes) == (300, 100, 3)
        blocks = cached.features.reshape(3, 100, 6)
        assert all((blocks[i] - blocks[j]).abs().max() > 1e-3 for i, j in ((0, 1), (0, 2), (1, 2)))
        assert torch.equal(cached.targets, y.repeat(3))

    def test_depend_on_the_seed_and_not_on_the_batch_size(self):
        first, other, again = (
            ds.cache_features(small_backbone(), (x, y), passes=2, augment=NOISE, seed=seed, batch_size=size)
            for seed, size in ((0, 16), (1, 16), (0, 33))
        )
        torch.testing.assert_close(first.features, again.features)
        assert (first.features - other.features).abs().max() > 1e-3

    def test_change_examples_one_by_one(self):
        picture = torch.arange(16.0).reshape(1, 1, 4, 4).repeat(200, 1, 1, 1)
        cached = ds.cache_features(
            nn.Flatten(), picture, passes=2, augment=Compose((HorizontalFlip(), HorizontalFlip(0.0)))
        )
        flipped = (cached.features[:, 0] != 0).reshape(2, 200)
        assert 60 < flipped[0].sum() < 140
        assert not torch.equal(flipped[0], flipped[1])

    def test_of_a_random_dataset_are_functions_of_seed_pass_and_item(self):
        cached = [
            ds.cache_features(small_backbone(), Pictures(), passes=2, batch_size=size, workers=workers)
            for size, workers in ((7, 0), (30, 0), (8, 1))
        ]
        for other in cached[1:]:
            torch.testing.assert_close(cached[0].features, other.features)
        assert (cached[0].features[:30] - cached[0].features[30:]).abs().max() > 1e-3

    def test_over_the_same_arrays_are_refused(self):
        with pytest.raises(ValueError, match="Pass `augment`"):
            ds.cache_features(small_backbone(), (x, y), passes=2)


class TestFiles:
    def test_a_second_call_runs_the_backbone_on_one_row_only(self, tmp_path):
        net = Counted()
        first = ds.cache_features(net, (x, y), tmp_path)
        net.rows.clear()
        second = ds.cache_features(net, (x, y), tmp_path)
        assert net.rows == [1]
        assert np.array_equal(first.features, second.features)
        assert np.array_equal(ds.CachedFeatures.open(tmp_path).features, first.features)
        second.verify()

    def test_hold_nothing_that_runs_code(self, tmp_path):
        ds.cache_features(small_backbone(), (x, y), tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [FACTS, FEATURES, "targets.npy"]
        np.load(tmp_path / FEATURES, allow_pickle=False)
        json.loads((tmp_path / FACTS).read_text())

    @pytest.mark.parametrize("stop", [1, 4, 9])
    @pytest.mark.parametrize("passes", [1, 2])
    def test_an_interrupted_cache_goes_on_where_it_stopped(self, tmp_path, monkeypatch, stop, passes):
        monkeypatch.setattr(caching, "_NOTE_EVERY", 0.0)
        options = dict(batch_size=10, passes=passes, augment=NOISE)
        whole = ds.cache_features(small_backbone(), (x, y), **options)

        # Two passes more than the rows that are kept: the first batch, and its first row, show what the backbone gives.
        net = Counted(stop_after=stop + 2)
        with pytest.raises(KeyboardInterrupt):
            ds.cache_features(net, (x, y), tmp_path, **options)
        with pytest.raises(ValueError, match=rf"{10 * stop} of {100 * passes} rows"):
            ds.CachedFeatures.open(tmp_path)
        net = Counted()
        cached = ds.cache_features(net, (x, y), tmp_path, **options)
        # One row more, which is compared with what is stored.
        assert sum(net.rows) == 1 + 100 * passes - 10 * stop
        np.testing.assert_array_equal(cached.features, whole.features.numpy())
        cached.verify()

    def test_a_killed_process_loses_nothing_that_was_noted(self, tmp_path):
        code = f"""
import sys, time
sys.path.insert(0, {str(os.path.dirname(__file__))!r})
import torch
from torch import nn
import dissensus as ds
from dissensus import caching
from backbone_cases import small_backbone
from training_helpers import x, y
caching._NOTE_EVERY = 0.0
original = caching._Job._features
def slow(self, *arguments):
    time.sleep(0.2)
    return original(self, *arguments)
caching._Job._features = slow
ds.cache_features(small_backbone(), (x, y), {str(tmp_path)!r}, batch_size=5)
"""
        process = subprocess.Popen([sys.executable, "-c", code])
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                if (tmp_path / FACTS).exists() and json.loads((tmp_path / FACTS).read_text())["done"] >= 15:
                    break
                assert process.poll() is None, "it ended before it was killed"
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
        done = json.loads((tmp_path / FACTS).read_text())["done"]
        assert 15 <= done < 100
        rows = []
        net = small_backbone()
        net.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
        cached = ds.cache_features(net, (x, y), tmp_path, batch_size=5)
        assert sum(rows) == 1 + 100 - done
        straight = ds.cache_features(small_backbone(), (x, y), batch_size=5)
        np.testing.assert_array_equal(cached.features, straight.features.numpy())
        cached.verify()

    @pytest.mark.parametrize(
        ("changed", "match"),
        [
            (dict(data=(x + 1e-6, y)), "data is"),
            (dict(data=(x, y.flip(0))), "data is"),
            (dict(data=(x[:50], y[:50])), "data is"),
            (dict(passes=2, augment=NOISE), "augment is"),
            (dict(dtype=torch.float16), "dtype is float32 there and float16 here"),
            (dict(precision="bf16"), "precision is fp32 there and bf16 here"),
        ],
    )
    def test_of_other_data_or_settings_are_refused_and_left_alone(self, tmp_path, changed, match):
        cached = ds.cache_features(small_backbone(), (x, y), tmp_path)
        data = changed.pop("data", (x, y))
        with pytest.raises(ValueError, match=match):
            ds.cache_features(small_backbone(), data, tmp_path, **changed)
        cached.verify()

    @pytest.mark.parametrize("change", ["weight", "statistics", "layer"])
    def test_of_another_backbone_are_refused(self, tmp_path, change):
        ds.cache_features(small_backbone(), (x, y), tmp_path)
        other = small_backbone()
        if change == "weight":
            with torch.no_grad():
                other[0].weight[2, 3] += 1e-6
        elif change == "statistics":
            other[1].running_mean += 1e-6
        else:
            other[2] = nn.ReLU()
        with pytest.raises(ValueError, match="backbone is"):
            ds.cache_features(other, (x, y), tmp_path)

    def test_of_another_dataset_are_refused(self, tmp_path):
        ds.cache_features(small_backbone(), Pictures(), tmp_path)

        class Others(Pictures):
            def __getitem__(self, index):
                return super().__getitem__(index)[0] + 1, 0

        with pytest.raises(ValueError, match="data is 30 items"):
            ds.cache_features(small_backbone(), Others(), tmp_path)

    def test_that_were_damaged_are_noticed(self, tmp_path):
        cached = ds.cache_features(small_backbone(), (x, y), tmp_path)
        file = np.load(tmp_path / FEATURES, mmap_mode="r+")
        file[17, 3] += 1
        file.flush()
        with pytest.raises(ValueError, match="not those that were written"):
            cached.verify()
        with open(tmp_path / FEATURES, "r+b") as raw:
            raw.truncate(500)
        with pytest.raises(ValueError, match="cannot be read"):
            ds.CachedFeatures.open(tmp_path)
        np.save(tmp_path / FEATURES, np.zeros((100, 5), np.float32))
        with pytest.raises(ValueError, match=r"shaped \(100, 5\), and cache.json says"):
            ds.cache_features(small_backbone(), (x, y), tmp_path)
        (tmp_path / FACTS).write_text("{}")
        with pytest.raises(ValueError, match="not what a feature cache writes"):
            ds.CachedFeatures.open(tmp_path)

    def test_that_are_not_there(self, tmp_path):
        with pytest.raises(ValueError, match="no feature cache"):
            ds.CachedFeatures.open(tmp_path)


class TestRefused:
    @pytest.mark.parametrize(
        ("data", "options", "match"),
        [
            ((x[:0], y[:0]), {}, "nothing to cache"),
            ((x, y[:5]), {}, "one target for each of 100 inputs; got targets shaped"),
            (DataLoader(TensorDataset(x, y), shuffle=True), {}, "in order"),
            ((x, y), {"passes": 0}, "`passes` must be a whole number of at least 1"),
            ((x, y), {"dtype": torch.bfloat16}, "must be torch.float16"),
            ((x, y), {"precision": "tf32"}, "'fp32' or 'bf16'"),
        ],
    )
    def test_bad_arguments(self, data, options, match):
        with pytest.raises(ValueError, match=match):
            ds.cache_features(small_backbone(), data, **options)

    def test_features_of_features(self):
        cached = ds.cache_features(small_backbone(), (x, y))
        with pytest.raises(ValueError, match="features already"):
            ds.cache_features(small_backbone(), cached)

    def test_features_that_are_not_finite(self):
        class Large(nn.Module):
            def forward(self, x):
                return x * 1e6

        assert bool(torch.isfinite(ds.cache_features(Large(), x).features).all())
        with pytest.raises(ValueError, match=r"row \d+ are not, as float16"):
            ds.cache_features(Large(), x, dtype=torch.float16)

    @pytest.mark.parametrize("answer", [torch.sum, torch.std_mean, torch.argmax, lambda x: x[1:]])
    def test_a_backbone_that_does_not_give_real_rows(self, answer):
        class Odd(nn.Module):
            def forward(self, x):
                return answer(x)

        with pytest.raises(
            ValueError, match=r"one tensor (of real numbers with a row for each of 100 inputs|to score; got tuple)"
        ):
            ds.cache_features(Odd(), x)
