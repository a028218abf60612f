"""A cache is opened again for what it was made of, and for nothing else; of loaders and Datasets it takes what they give."""

import functools
import json

import numpy as np
import pytest
import torch
from backbone_cases import Vit, images, small_backbone
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset
from training_helpers import x, y

import dissensus as ds
from dissensus.data.features import FACTS, TARGETS
from dissensus.data.fingerprints import network_digest


class Times(nn.Module):
    """Multiplies features by a plain number."""

    def __init__(self, factor, net=None) -> None:
        super().__init__()
        self.net, self.factor = net or small_backbone(), factor

    def forward(self, x):
        return self.net(x) * self.factor


class Counting(nn.Module):
    """Keeps a count of its passes and its last features, as networks do that are looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.passes, self.last = small_backbone(), 0, None

    def forward(self, x):
        self.passes += 1
        self.last = self.net(x)
        return self.last


class TestBackbones:
    def test_with_another_plain_attribute_are_refused(self, tmp_path):
        cached = ds.cache_features(Times(1), (x, y), tmp_path)
        ds.cache_features(Times(1), (x, y), tmp_path)
        with pytest.raises(ValueError, match="backbone is"):
            ds.cache_features(Times(5), (x, y), tmp_path)
        with pytest.raises(ValueError, match="another backbone"):
            ds.predict(ds.HeadEnsemble(Times(5), (6, 3), 2), cached)

    def test_cut_at_another_token_are_refused(self, tmp_path):
        net = Vit()
        first, second = (ds.cut(net, "blocks.2.norm2", token=token)[0] for token in (0, 1))
        ds.cache_features(first, images(), tmp_path)
        with pytest.raises(ValueError, match="backbone is"):
            ds.cache_features(second, images(), tmp_path)

    @pytest.mark.parametrize(
        ("forward", "match"),
        [
            (lambda self, x: self.net(x) * 5, "first example differs from what is stored by 80%"),
            (lambda self, x: self.net(x)[:, :3], r"shaped \(6,\), and this backbone gives \(3,\)"),
        ],
        ids=["values", "shape"],
    )
    def test_whose_code_was_changed_are_refused(self, tmp_path, monkeypatch, forward, match):
        ds.cache_features(Times(1), (x, y), tmp_path)
        monkeypatch.setattr(Times, "forward", forward)
        with pytest.raises(ValueError, match=match):
            ds.cache_features(Times(1), (x, y), tmp_path)

    def test_that_count_their_passes_are_the_same(self, tmp_path):
        net = Counting()
        cached = ds.cache_features(net, (x, y), tmp_path)
        assert cached.changing == ("passes",)
        ds.fit(ds.HeadEnsemble(net, (6, 3), 2), cached, epochs=1)
        ds.predict(ds.HeadEnsemble(Counting(), (6, 3), 2), ds.cache_features(Counting(), (x, y), tmp_path))
        net.net[0].weight.data.neg_()
        with pytest.raises(ValueError, match="another backbone"):
            ds.predict(ds.HeadEnsemble(net, (6, 3), 2), cached)

    @pytest.mark.parametrize("change", [torch.Tensor.neg_, lambda t: t.mul_(-3), lambda t: t[2].neg_()])
    def test_changed_behind_autograds_back_after_a_run_are_refused(self, change):
        ens = ds.HeadEnsemble(small_backbone(), (6, 3), 2)
        cached = ds.cache_features(ens, (x, y))
        ds.fit(ens, cached, epochs=1)
        change(ens.backbone[0].weight.data)
        with pytest.raises(ValueError, match="another backbone"):
            ds.fit(ens, cached, epochs=1)


class Aug:
    def __init__(self, by):
        self.by = by

    def __call__(self, x, y, noise):
        return x * self.by, y


def scaled(x, y, noise, by=1):
    return x * by, y


class TestAugmentations:
    @pytest.mark.parametrize(
        "make",
        [
            Aug,
            lambda by: functools.partial(scaled, by=by),
            lambda by: lambda x, y, noise: (x * by, y),
            lambda by: [lambda x, y, noise: (x * 2, y), lambda x, y, noise: (x * 3, y)][by - 2],
        ],
        ids=["object", "partial", "closure", "lambda"],
    )
    def test_are_recognised_by_what_they_are(self, tmp_path, make):
        ds.cache_features(small_backbone(), (x, y), tmp_path, augment=make(2))
        ds.cache_features(small_backbone(), (x, y), tmp_path, augment=make(2))
        with pytest.raises(ValueError, match="augment is"):
            ds.cache_features(small_backbone(), (x, y), tmp_path, augment=make(3))

    def test_that_cannot_be_told_are_named_where_a_cache_is_opened_again(self, tmp_path):
        augment = Aug(2.0)
        augment.generator = torch.Generator()
        cached = ds.cache_features(small_backbone(), (x, y), tmp_path, augment=augment)
        with pytest.raises(ValueError, match="cannot be recognised with this `augment`"):
            ds.cache_features(small_backbone(), (x, y), tmp_path, augment=augment)
        assert np.array_equal(ds.CachedFeatures.open(tmp_path).features, cached.features)

    def test_whose_code_was_changed_are_refused(self, tmp_path, monkeypatch):
        ds.cache_features(nn.Flatten(), (x, y), tmp_path, augment=Aug(2))
        monkeypatch.setattr(Aug, "__call__", lambda self, x, y, noise: (x - self.by, y))
        with pytest.raises(ValueError, match="`augment`, makes of the first example differs"):
            ds.cache_features(nn.Flatten(), (x, y), tmp_path, augment=Aug(2))


class TestFiles:
    @pytest.mark.parametrize(
        "data", [(x * torch.tensor([1.0, 1.0, 1.0, -1.0]), y), (x, -y), (x.reshape(100, 2, 2), y), (x.double(), y)]
    )
    def test_of_data_with_other_signs_shapes_or_types_are_refused(self, tmp_path, data):
        net = nn.Flatten()
        ds.cache_features(net, (x, y), tmp_path)
        with pytest.raises(ValueError, match="data is"):
            ds.cache_features(net, data, tmp_path)

    def test_with_other_signs_are_found_damaged(self, tmp_path):
        cached = ds.cache_features(small_backbone(), (x, y), tmp_path)
        file = np.load(tmp_path / "features.npy", mmap_mode="r+")
        file[17, 3] *= -1
        file.flush()
        with pytest.raises(ValueError, match="not those that were written"):
            cached.verify()

    def test_with_other_targets_are_found_damaged(self, tmp_path):
        cached = ds.cache_features(small_backbone(), (x, y), tmp_path)
        cached.verify()
        ds.cache_features(small_backbone(), (x, y)).verify()
        file = np.load(tmp_path / TARGETS, mmap_mode="r+")
        file[[3, 4]] = file[[4, 3]] if file[3] != file[4] else file[[3, 4]] + 1
        file.flush()
        for each in (cached, ds.CachedFeatures.open(tmp_path)):
            with pytest.raises(ValueError, match="features or targets"):
                each.verify()

    def test_of_an_earlier_format_are_refused(self, tmp_path):
        ds.cache_features(small_backbone(), (x, y), tmp_path)
        facts = json.loads((tmp_path / FACTS).read_text())
        (tmp_path / FACTS).write_text(json.dumps({**facts, "format": 1}))
        with pytest.raises(ValueError, match="another version; delete the folder and cache again"):
            ds.cache_features(small_backbone(), (x, y), tmp_path)

    @pytest.mark.parametrize(
        ("given", "kept"),
        [(torch.float16, torch.float16), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
    )
    def test_are_kept_in_the_precision_of_the_backbone_where_numpy_has_it(self, given, kept):
        cached = ds.cache_features(nn.Linear(4, 6).to(given), x.to(given))
        assert cached.features.dtype == kept


def doubled(items):
    return torch.stack([2 * item[0] for item in items]), torch.tensor([int(item[1]) for item in items])


class Lists(Dataset):
    """Items of any form."""

    def __init__(self, form) -> None:
        self.form = form

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.form(x[index], int(y[index]))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(x[i], y[i]) for i in range(20)])


class TestData:
    @pytest.mark.parametrize("dataset", [TensorDataset(x, y), Lists(lambda x, y: (x, y))])
    def test_of_a_loader_is_what_its_collate_function_makes_of_it(self, tmp_path, dataset):
        loader = DataLoader(dataset, batch_size=7, collate_fn=doubled)
        cached = ds.cache_features(small_backbone(), loader, tmp_path)
        torch.testing.assert_close(cached.rows(0, len(dataset)), small_backbone().eval()(2 * x[: len(dataset)]))
        ens = ds.HeadEnsemble(small_backbone(), (6, 3), 2)
        torch.testing.assert_close(ds.predict(ens, cached), ds.predict(ens, loader))
        with pytest.raises(ValueError, match="data is"):
            ds.cache_features(small_backbone(), DataLoader(dataset, batch_size=7), tmp_path)

    @pytest.mark.parametrize(
        ("data", "match"),
        [
            (Lists(lambda x, y: {"image": x, "label": y}), "cannot be called as net"),
            (Lists(lambda x, y: ("word", y)), "tuple of inputs must hold a tensor in each part; got a str"),
            (Lists(lambda x, y: (x, "cat")), "must be numbers; as a batch they are .*cat"),
            (Lists(lambda x, y: (x, {"box": y})), "must be numbers"),
            (Stream(), "IterableDataset has no items by number"),
            (DataLoader(Stream(), 10), "IterableDataset has no items by number"),
            (DataLoader(TensorDataset(x, y), batch_size=None), "batches of its items in order"),
            (DataLoader(TensorDataset(x, y), batch_sampler=BatchSampler([3, 1, 2], 2, False)), "in order"),
        ],
    )
    def test_that_cannot_be_cached_is_refused_in_a_sentence(self, data, match):
        with pytest.raises(ValueError, match=match):
            ds.cache_features(small_backbone(), data)


class KeepsTheSizeOfABatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(x.shape[1], 6)

    def forward(self, inputs):
        self.size = len(inputs)
        return self.linear(inputs)


def test_a_backbone_that_keeps_the_size_of_a_batch_is_the_same_after_any_batch():
    net = KeepsTheSizeOfABatch()
    train = ds.cache_features(net, (x, y), batch_size=16)
    other = ds.cache_features(net, (x[:19], y[:19]), batch_size=16)
    ds.fit(ds.HeadEnsemble(net, (6, 3), 2), train, validation=other, epochs=1)


def test_what_compiling_leaves_in_a_network_says_nothing_of_it():
    net = KeepsTheSizeOfABatch()
    before = network_digest(net)
    net._is_torch_compile = True
    net._torchdynamo_wrapper_id = id(net)
    assert network_digest(net) == before
