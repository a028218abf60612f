"""Training, predicting and evaluating on cached features is doing so on the data, from the device or from a file."""

import itertools

import numpy as np
import pytest
import torch
from backbone_cases import small_backbone
from torch import nn
from training_helpers import x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.data.augment import GaussianNoise
from dissensus.training import feeds
from dissensus.training.feeds import ArrayFeed, HostFeed, lives_on
from dissensus.training.step import read_batch

NOISE = GaussianNoise(0.1)


def head() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def ensemble(members: int = 3) -> ds.HeadEnsemble:
    return ds.HeadEnsemble(small_backbone(), head, members, seed=4)


class TestTraining:
    @pytest.mark.parametrize("engine", ["eager", "captured"])
    @pytest.mark.parametrize("batches", ["own", "shared"])
    def test_on_features_is_training_on_the_data(self, engine, batches):
        seen, cached = ensemble(), ensemble()
        options = dict(epochs=3, batch_size=25, lr=0.01, engine=engine, device="cpu", batches=batches)
        run = ds.fit(cached, ds.cache_features(cached, (x, y)), **options)
        ds.fit(seen, (x, y), **options)
        assert run.members is cached
        torch.testing.assert_close(ds.predict(cached, x), ds.predict(seen, x), rtol=1e-4, atol=1e-5)

    def test_a_plain_ensemble_of_heads_trains_on_features_too(self):
        features = ds.cache_features(small_backbone(), (x, y))
        plain, whole = ds.DeepEnsemble(head, 3, seed=4), ensemble()
        for members in (plain, whole):
            ds.fit(members, features, epochs=2, batch_size=25, device="cpu")
        torch.testing.assert_close(ds.predict(plain, features), ds.predict(whole, features))

    def test_with_validation_selection_and_a_callback(self):
        ens = ensemble()
        train, held_out = (ds.cache_features(ens, pair) for pair in ((x[:80], y[:80]), (x[80:], y[80:])))
        seen = []
        run = ds.fit(
            ens,
            train,
            epochs=10,
            batch_size=20,
            lr=0.05,
            validation=held_out,
            select="ensemble_loss",
            device="cpu",
            callback=lambda run: seen.append(run.members(x).shape),
        )
        assert seen == [(3, 100, 3)] * 10
        assert run.best == min(run.history["ensemble_loss"])

    def test_drops_a_head_that_diverges_from_the_whole_ensemble(self):
        ens = ensemble(3)
        with torch.no_grad():
            ens.heads.net[2].bias[1] = torch.nan
        features = ds.cache_features(ens, (x, y))
        run = ds.fit(ens, features, epochs=2, batch_size=50, on_divergence="drop", device="cpu")
        assert run.dropped == [1]
        assert (ens.num_members, ens.member_ids) == (2, (0, 2))
        assert ens(x).shape == (2, 100, 3)

    def test_a_run_that_breaks_off_leaves_the_whole_ensemble_with_the_heads_that_are_left(self):
        ens = ensemble(3)
        with torch.no_grad():
            ens.heads.net[2].bias[1] = torch.nan
        features = ds.cache_features(ens, (x, y))
        calls = []

        def augment(values, targets, noise):
            calls.append(len(values))
            if len(calls) == 4:
                raise KeyboardInterrupt
            return values, targets

        with pytest.raises(KeyboardInterrupt):
            ds.fit(ens, features, epochs=3, batch_size=50, on_divergence="drop", device="cpu", augment=augment)
        assert ens.heads.member_ids == ens.member_ids == (0, 2)
        assert ens(x).shape == (2, 100, 3)

    def test_features_of_another_backbone_are_refused(self):
        features = ds.cache_features(nn.Linear(4, 6), (x, y))
        for use in (
            lambda: ds.fit(ensemble(), features, epochs=1),
            lambda: ds.predict(ensemble(), features),
            lambda: ds.evaluate(ensemble(), features, bootstrap=0),
            lambda: ds.fit(ensemble(), ds.cache_features(ensemble(), (x, y)), epochs=1, validation=features),
        ):
            with pytest.raises(ValueError, match="another backbone"):
                use()

    def test_inputs_beside_features_are_refused(self):
        features = ds.cache_features(ensemble(), (x, y))
        for data, validation in ((features, (x, y)), ((x, y), features)):
            with pytest.raises(ValueError, match="both"):
                ds.fit(ensemble(), data, epochs=1, validation=validation)

    def test_half_precision_features_train_float32_heads(self):
        features = ds.cache_features(ensemble(), (x, y), dtype=torch.float16)
        ens = ensemble()
        run = ds.fit(ens, features, epochs=5, batch_size=25, lr=0.02, device="cpu", validation=features)
        losses = run.history.by_epoch("ensemble_loss")
        assert losses[-1] < losses[0]
        assert ens(x).dtype == torch.float32


def orders(feed, epochs):
    """The rows that a feed gives, epoch by epoch; targets hold their numbers."""
    seen = []
    for number in range(epochs):
        rows = []
        for size in feed.epoch(number, 0):
            batch_x, batch_y, _ = read_batch(feed, feed.tensors, size)
            assert torch.equal(batch_x[..., 0], batch_y.float())
            rows.append(batch_y)
            feed.tensors["position"].add_(1)
        seen.append(torch.cat(rows, -1))
    return seen


def numbered(tmp_path, examples=103, passes=3, **options):
    """Features whose first value is the number of their row, in a file."""
    rows = torch.arange(float(examples * passes))
    np.save(tmp_path / "f.npy", torch.stack([rows, rows], 1).numpy())
    features = np.load(tmp_path / "f.npy", mmap_mode="r")
    return ds.CachedFeatures(features, rows.long(), passes, **options)


def resident(cached, own):
    keys = torch.tensor([5, 6]) if own else torch.tensor(5)
    return ArrayFeed((cached.resident(), cached.targets), 10, keys, passes=cached.passes)


def streamed(cached, key=5, **options):
    return HostFeed((cached.stored, cached.targets), 10, torch.tensor(key), passes=cached.passes, **options)


class TestOrder:
    @pytest.fixture(autouse=True)
    def small_chunks(self, monkeypatch):
        monkeypatch.setattr(feeds, "CHUNK_BYTES", 8 * 7)
        monkeypatch.setattr(feeds, "BUFFER_BYTES", 8 * 7 * 4)

    @pytest.mark.parametrize("passes", [1, 3])
    @pytest.mark.parametrize("make", [lambda c: resident(c, own=False), streamed], ids=["resident", "streamed"])
    def test_an_epoch_has_every_example_once_and_the_passes_take_turns(self, tmp_path, make, passes):
        feed = make(numbered(tmp_path, passes=passes))
        seen = orders(feed, 6)
        for rows in seen:
            assert sorted((rows % 103).tolist()) == list(range(103))
            assert rows.tolist() != sorted(rows.tolist())
        assert len({tuple(rows.tolist()) for rows in seen}) == 6
        for first in range(0, 6, passes):
            together = torch.cat(seen[first : first + passes])
            assert sorted(together.tolist()) == list(range(103 * passes))
        if passes > 1:
            assert len({int(row) // 103 for row in seen[0]}) == passes, "an epoch mixes passes"

    def test_members_with_orders_of_their_own_have_them(self, tmp_path):
        (rows, *_) = orders(resident(numbered(tmp_path), own=True), 1)
        assert rows.shape == (2, 103)
        assert not torch.equal(*rows)
        for own in rows:
            assert sorted((own % 103).tolist()) == list(range(103))

    def test_streaming_shuffles_beyond_a_chunk(self, tmp_path):
        (rows, *_) = orders(streamed(numbered(tmp_path, passes=1)), 1)
        chunks = (rows // 7).tolist()
        runs = 1 + sum(a != b for a, b in itertools.pairwise(chunks))
        assert runs > 2 * 15, "rows of one chunk would be neighbours if chunks alone were shuffled"

    def test_streaming_depends_on_the_seed_alone(self, tmp_path):
        cached = numbered(tmp_path)
        first, again = (orders(streamed(cached), 2) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(orders(streamed(cached, key=6), 1)[0], first[0])

    def test_a_resumed_epoch_skips_what_was_seen(self, tmp_path):
        feed = streamed(numbered(tmp_path))
        (whole,) = orders(feed, 1)
        rows = [read_batch(feed, feed.tensors, size)[1] for size in feed.epoch(0, 4)]
        assert torch.equal(torch.cat(rows), whole[40:])

    def test_the_smaller_last_batch_can_be_dropped(self, tmp_path):
        feed = streamed(numbered(tmp_path), drop_last=True)
        assert feed.steps_per_epoch == 10
        assert len(orders(feed, 1)[0]) == 100

    def test_streaming_reads_neighbouring_rows_at_about_the_same_time(self, tmp_path):
        (rows, *_) = orders(streamed(numbered(tmp_path, passes=1)), 1)
        # A buffer holds 4 chunks of 7 rows: all rows of a chunk come within one of 28 rows.
        places = torch.empty(103, dtype=torch.int64)
        places[rows] = torch.arange(103)
        assert all(int(chunk.max() - chunk.min()) < 28 for chunk in places.split(7))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
    def test_streaming_keeps_the_precision_of_what_is_more_precise(self, tmp_path, dtype):
        cached = ds.cache_features(small_backbone(), (x, y), tmp_path, dtype=dtype)
        feed = streamed(cached)
        size = next(feed.epoch(0, 0))
        read = read_batch(feed, feed.tensors, size)[0]
        assert feed.tensors["batch"][0].dtype == dtype
        assert read.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)

    def test_what_is_larger_than_its_limit_is_streamed(self, tmp_path):
        device = torch.device("cpu")
        heads = ds.DeepEnsemble(lambda: nn.Linear(2, 309), 2)
        ds.fit(heads, numbered(tmp_path), epochs=1, batches="own", device="cpu")
        small = numbered(tmp_path, resident_limit=100)
        assert not lives_on(small.stored, device, small.resident_limit)
        run = ds.fit(heads, small, epochs=2, batch_size=32, device="cpu", engine="captured")
        assert run.step == 8
        with pytest.raises(ValueError, match="raise their `resident_limit`"):
            ds.fit(heads, small, epochs=1, batches="own", device="cpu")


@pytest.mark.parametrize("limit", [None, 10])
def test_a_stopped_run_on_features_resumes_exactly(tmp_path, limit):
    settings = dict(epochs=5, batch_size=16, device="cpu", engine="eager")
    features = ds.cache_features(
        ensemble(), (x, y), tmp_path / "features", passes=2, augment=NOISE, resident_limit=limit
    )
    straight, twin, again = ensemble(), ensemble(), ensemble()
    ds.fit(straight, features, **settings)

    def stop(run):
        if run.epoch == 3:
            raise KeyboardInterrupt

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        ds.fit(twin, features, checkpoint_dir=folder, callback=stop, **settings)
    ds.fit(again, features, checkpoint_dir=folder, resume=True, **settings)
    assert torch.equal(ds.predict(again, x), ds.predict(straight, x))


class TestReading:
    def test_predictions_are_those_of_the_inputs(self, tmp_path):
        ens = ensemble()
        cached = ds.cache_features(ens, (x, y), tmp_path)
        torch.testing.assert_close(ds.predict(ens, cached, batch_size=9), ds.predict(ens, x))
        torch.testing.assert_close(ds.predict(ens.heads, cached), ds.predict(ens, x))

    def test_evaluation_is_that_of_the_inputs_set_by_set(self):
        ens = ensemble()
        far = x + 20
        wanted = ds.evaluate(ens, (x, y), ood={"far": far}, bootstrap=0)
        cached, cached_far = ds.cache_features(ens, (x, y)), ds.cache_features(ens, far)
        for known, unknown in ((cached, cached_far), (cached, far), ((x, y), cached_far)):
            got = ds.evaluate(ens, known, ood={"far": unknown}, bootstrap=0)
            for number, other in zip(wanted.numbers, got.numbers, strict=True):
                assert (number.metric, number.set) == (other.metric, other.set)
                assert other.value == pytest.approx(number.value, abs=1e-5)

    def test_a_transform_is_for_inputs_and_not_for_features(self):
        ens = ensemble()
        cached = ds.cache_features(ens, (x * 2, y))
        got = ds.evaluate(ens, cached, ood={"far": x + 20}, bootstrap=0, transform=lambda raw: raw * 2)
        wanted = ds.evaluate(ens, (x * 2, y), ood={"far": (x + 20) * 2}, bootstrap=0)
        for name in ("accuracy", "nll"):
            assert got.number(name).value == pytest.approx(wanted.number(name).value, abs=1e-5)

    def test_items_and_unlabelled_streams(self):
        ens = ensemble()
        cached = ds.cache_features(ens, (x, y))
        features, label = cached[7]
        torch.testing.assert_close(features, small_backbone().eval()(x).detach()[7])
        assert label == y[7]
        objective = obj.VirtualAdversarial(obj.Independent(), epsilon=0.1)
        ds.fit(ens, cached, objective=objective, unlabelled=cached, epochs=1, batch_size=50, device="cpu")
