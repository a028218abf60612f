"""Datasets and loaders: what is loaded by threads and processes is what would be loaded here."""

import multiprocessing
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
from training_helpers import net, norm_net, x, y

import dissensus as ds
from dissensus import objectives as obj
from dissensus.training.feeds import DatasetFeed, LoaderFeed, prefetched
from dissensus.training.step import read_batch

CPU = torch.device("cpu")


class Noisy(Dataset):
    """Items that are random, and that tell which process loaded them."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()), multiprocessing.current_process().pid]), index


def epochs(feed, count=3, skip=0):
    found = []
    for number in range(count):
        found.append(torch.cat([read_batch(feed, feed.tensors, size)[0] for size in feed.epoch(number, skip)]))
    return found


def test_processes_load_what_would_be_loaded_here_and_stay_from_epoch_to_epoch():
    here, there = (epochs(DatasetFeed(Noisy(), 8, 3, CPU, False, workers)) for workers in (0, 2))
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a[:, :2], b[:, :2])
    assert len({number for rows in there for number in rows[:, 2].tolist()}) == 2
    assert not {number for rows in there for number in rows[:, 2].tolist()} & set(here[0][:, 2].tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_begins_in_the_middle(workers):
    feed = DatasetFeed(Noisy(), 8, 3, CPU, False, workers)
    whole, rest = epochs(feed, 1), epochs(feed, 1, skip=3)
    assert torch.equal(rest[0][:, :2], whole[0][24:, :2])


def test_no_process_is_left_behind():
    before = set(multiprocessing.active_children())
    ens = ds.DeepEnsemble(lambda: nn.Linear(3, 50), 2)
    ds.fit(ens, Noisy(), epochs=2, batch_size=8, workers=2, device="cpu")
    assert set(multiprocessing.active_children()) == before


def test_a_loader_with_processes_is_read_ahead_by_a_thread():
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1)
    epoch = LoaderFeed(loader, 0, CPU).epoch(0, 0)
    before = torch.get_rng_state()
    next(epoch)
    assert any(thread.name.startswith("dissensus data") for thread in threading.enumerate())
    epoch.close()
    assert not any(thread.name.startswith("dissensus data") for thread in threading.enumerate())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_order_of_a_loader_does_not_depend_on_where_it_loads():
    orders = [
        [rows[:, 0] for rows in epochs(LoaderFeed(loader, 0, CPU))]
        for loader in (DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=n) for n in (0, 1))
    ]
    for here, there in zip(*orders, strict=True):
        assert sorted(here.tolist()) == sorted(there.tolist()) == list(range(50))
    assert not torch.equal(orders[1][0], orders[1][1])


class DrawsLate(RandomSampler):
    """A sampler of a user's that draws from the global generator as it goes."""

    def __iter__(self):
        for _ in range(len(self)):
            yield int(torch.randint(50, ()))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_draws_as_it_goes_is_seeded_here(workers):
    loader = DataLoader(Noisy(), batch_size=8, sampler=DrawsLate(Noisy()), num_workers=workers)
    feed = LoaderFeed(loader, 0, CPU)
    first, again = (epochs(feed, 2) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a[:, 0], b[:, 0])


class Stream(IterableDataset):
    """Says how long it is, and gives so many items of it in each epoch."""

    def __init__(self, given, said):
        self.given, self.said, self.begun = given, said, 0

    def __len__(self):
        return self.said

    def __iter__(self):
        count = self.given[min(self.begun, len(self.given) - 1)]
        self.begun += 1
        return iter([(x[place], y[place]) for place in range(count)])


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(("given", "epoch"), [([30], 1), ([50, 30], 2), ([50, 0], 2)])
def test_a_loader_that_gives_fewer_batches_than_it_says_stops_training(given, epoch, accumulate):
    loader, ens = DataLoader(Stream(given, 50), batch_size=5), ds.DeepEnsemble(net, 2)
    feed = LoaderFeed(loader, 0, CPU, accumulate)
    sizes = [list(feed.epoch(number, 0)) for number in range(epoch - 1)]
    assert all(sum(found) == 50 for found in sizes)
    with pytest.raises(ValueError, match=f"says it has 10 batches and gave {given[-1] // 5} in epoch {epoch}"):
        list(feed.epoch(epoch - 1, 0))
    with pytest.raises(ValueError, match="says it has 10 batches and gave"):  # a look at the first batches comes before
        ds.fit(ens, DataLoader(Stream([50, *given], 50), batch_size=5), epochs=4, accumulate=accumulate, device="cpu")


def test_a_loader_with_processes_that_gives_fewer_batches_stops_training_too():
    loader = DataLoader(Stream([30], 50), batch_size=5, num_workers=1)
    with pytest.raises(ValueError, match="says it has 10 batches and gave 6 in epoch 1"):
        list(LoaderFeed(loader, 0, CPU).epoch(0, 0))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_loader_of_the_length_that_it_says_goes_on_in_the_middle_of_an_epoch(accumulate):
    feed = LoaderFeed(DataLoader(Stream([50], 50), batch_size=5), 0, CPU, accumulate)
    whole, rest = epochs(feed, 1), epochs(feed, 1, skip=2)
    assert torch.equal(rest[0], whole[0][10 * accumulate :])


class Typed(Dataset):
    """Items with labels of a type."""

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return x[index], self.labels[index]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("loss", ["cross_entropy", "brier", "mse", "binary_cross_entropy", "poisson", "gaussian_nll"])
def test_integers_of_any_type_are_the_targets_that_they_are_in_arrays(loss, dtype):
    labels = (y > 0)[:, None].expand(-1, 3) if loss == "binary_cross_entropy" else y > 0
    typed = Typed(labels.to(dtype))
    width = {"mse": 1, "poisson": 1, "gaussian_nll": 2}.get(loss, 3)
    found = []
    for data in ((x, labels.long()), typed, DataLoader(typed, batch_size=100)):
        ens = ds.DeepEnsemble(lambda: nn.Linear(4, width), 2)
        size = {} if isinstance(data, DataLoader) else {"batch_size": 100}
        settings = {"objective": ds.objectives.Independent(loss), "epochs": 2, "device": "cpu", **size}
        run = ds.fit(ens, data, validation=data, watch_collusion=True, **settings)
        columns = ("loss", "ensemble_loss", "validation_member_error", "train_diversity")
        found.append((ds.predict(ens, x), torch.tensor([run.history[name] for name in columns])))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


def test_weights_of_classes_read_labels_of_few_bits():
    labels = y.to(torch.uint8)
    ends = []
    for each in (labels, y):
        ens = ds.DeepEnsemble(net, 2)
        objective = ds.objectives.Independent(class_weights=(1.0, 2.0, 4.0))
        ds.fit(ens, DataLoader(TensorDataset(x, each), batch_size=20), objective=objective, epochs=1, device="cpu")
        ends.append(ds.predict(ens, x))
    assert torch.equal(*ends)


def test_what_threads_make_comes_in_order_and_only_a_little_ahead():
    started = []

    def make(place):
        started.append(place)
        return place * 2

    made = prefetched(make, range(100), threads=3)
    assert [next(made) for _ in range(5)] == [0, 2, 4, 6, 8]
    made.close()
    assert 5 <= len(started) < 12


def test_an_error_in_a_thread_comes_out_at_its_place():
    def make(place):
        if place == 3:
            raise OSError("the disk is gone")
        return place

    made = prefetched(make, range(10))
    assert [next(made) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(made)


class TestOneExampleLeftOver:
    rest_of_one = (x[:33], y[:33])

    @pytest.mark.parametrize(
        "settings",
        [
            {"data": rest_of_one, "batch_size": 16},
            {"data": rest_of_one, "batch_size": 16, "batches": "shared"},
            {"data": rest_of_one, "batch_size": 1},
            {"data": DataLoader(TensorDataset(*rest_of_one), batch_size=16)},
        ],
    )
    def test_is_refused_where_batchnorm_needs_two(self, settings):
        with pytest.raises(ValueError, match="last_batch='drop'"):
            ds.fit(ds.DeepEnsemble(norm_net, 2), epochs=1, device="cpu", **settings)

    def test_is_no_matter_without_batchnorm_and_where_it_is_dropped(self):
        ds.fit(ds.DeepEnsemble(net, 2), self.rest_of_one, epochs=1, batch_size=16, device="cpu")
        for settings in (
            {"data": self.rest_of_one, "batch_size": 16, "last_batch": "drop"},
            {"data": DataLoader(TensorDataset(*self.rest_of_one), batch_size=16, drop_last=True)},
        ):
            ds.fit(ds.DeepEnsemble(norm_net, 2), epochs=1, device="cpu", **settings)

    def test_is_no_matter_where_an_image_has_many_pixels(self):
        def image_net():
            return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))

        images = torch.randn(33, 1, 4, 4)
        ds.fit(ds.DeepEnsemble(image_net, 2), (images, y[:33]), epochs=1, batch_size=16, device="cpu")


class TestTargetsThatNoBatchMayHave:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize(
        "objective", [obj.Independent(label_smoothing=0.1), obj.Independent("brier"), obj.LossGuided()]
    )
    def test_labels_of_a_later_batch_are_refused_as_those_of_arrays_are(self, objective, workers):
        pairs = TensorDataset(x[:32], torch.cat([y[:31], torch.tensor([7])]))

        class Items(Dataset):
            def __len__(self):
                return len(pairs)

            def __getitem__(self, index):
                return pairs[index]

        loader = DataLoader(pairs, batch_size=8, num_workers=workers)
        for data, settings in ((loader, {}), (Items(), {"batch_size": 8, "workers": workers})):
            with pytest.raises(ValueError, match=r"training labels must lie in 0 to 2, .*; got . to 7"):
                ds.fit(ds.DeepEnsemble(net, 2), data, objective=objective, epochs=1, device="cpu", **settings)

    def test_labels_to_validate_with_are_too(self):
        bad = DataLoader(TensorDataset(x[:32], torch.cat([y[:31], torch.tensor([-1])])), batch_size=8)
        with pytest.raises(ValueError, match="validation labels must lie in 0 to 2"):
            ds.fit(ds.DeepEnsemble(net, 2), (x, y), validation=bad, epochs=1, device="cpu")

    @pytest.mark.parametrize(
        ("loss", "good", "bad", "words"),
        [("binary_cross_entropy", 1.0, 7.0, "must be 0 or 1"), ("poisson", 1.0, -1.0, "counts, 0 or more; got -1")],
    )
    def test_so_are_answers_and_counts(self, loss, good, bad, words):
        targets = torch.full((32, 1), good)
        targets[-1] = bad
        loader = DataLoader(TensorDataset(x[:32], targets), batch_size=8)
        with pytest.raises(ValueError, match=words):
            ds.fit(
                ds.DeepEnsemble(lambda: nn.Linear(4, 1), 2),
                loader,
                objective=obj.Independent(loss),
                epochs=1,
                device="cpu",
            )

    def test_positions_that_do_not_count_are_passed_over(self):
        maps = torch.randint(0, 3, (12, 5, 5), dtype=torch.uint8)
        maps[:, 0] = 255
        images = torch.randn(12, 2, 5, 5)
        loader = DataLoader(TensorDataset(images, maps), batch_size=4)
        settings = {"epochs": 1, "device": "cpu"}
        ens = ds.DeepEnsemble(lambda: nn.Conv2d(2, 3, 3, padding=1), 2)
        ds.fit(ens, loader, objective=obj.Independent(ignore_index=255), validation=loader, **settings)
        with pytest.raises(ValueError, match="must lie in 0 to 2, the network's outputs; got 0 to 255"):
            ds.fit(ens, loader, objective=obj.Independent(), **settings)
