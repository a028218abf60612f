import random
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dissensus as ds
from dissensus.randomness import Noise, bits, derive, fold, normal, permutation, seeded, uniform


def splitmix64(seed: int, count: int) -> list[int]:
    """The published generator, in Python integers: an independent derivation."""
    mask, out, state = (1 << 64) - 1, [], seed & ((1 << 64) - 1)
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


@given(st.integers(-(2**63), 2**63 - 1))
def test_bits_are_the_published_splitmix64_sequence(seed):
    got = [value & ((1 << 64) - 1) for value in bits(torch.tensor(seed), 5).tolist()]
    assert got == splitmix64(seed, 5)


def test_splitmix64_starts_as_published_for_seed_1234567():
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]


def test_uniform_draws_have_the_moments_of_a_uniform():
    draws = uniform(torch.tensor(3), 200_000)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    assert draws.mean().item() == pytest.approx(0.5, abs=3e-3)
    assert draws.var().item() == pytest.approx(1 / 12, abs=1e-3)


def test_normal_draws_have_the_moments_of_a_normal():
    draws = normal(torch.tensor(3), 200_000)
    assert torch.isfinite(draws).all()
    assert draws.mean().item() == pytest.approx(0.0, abs=0.01)
    assert draws.var().item() == pytest.approx(1.0, abs=0.02)
    assert (draws**4).mean().item() == pytest.approx(3.0, abs=0.1)


def test_noise_of_one_member_does_not_depend_on_how_many_there_are():
    few, many = Noise(torch.tensor([5, 6])), Noise(torch.tensor([5, 6, 7]))
    assert torch.equal(few.normal(4, 3), many.normal(4, 3)[:2])


def test_folding_different_numbers_gives_uncorrelated_noise():
    base = torch.tensor(derive(0, "x"))
    draws = torch.stack([uniform(fold(base, step), 5000) for step in range(4)])
    off_diagonal = torch.corrcoef(draws) - torch.eye(4)
    assert off_diagonal.abs().max() < 0.06


def test_neighbouring_seeds_and_members_never_share_a_key():
    keys = {derive(seed, "member", member) for seed in range(100) for member in range(100)}
    assert len(keys) == 10_000


def test_permutation_is_a_permutation_and_depends_on_its_key():
    orders = permutation(torch.tensor([1, 2]), 100)
    assert torch.equal(orders.sort(-1).values, torch.arange(100).expand(2, 100))
    assert not torch.equal(orders[0], orders[1])


def test_seeded_blocks_repeat_and_leave_every_global_generator_as_found():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    with seeded(7):
        first = torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
    with seeded(7):
        second = torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert before[2] == random.getstate()


@pytest.mark.parametrize("keys", [torch.tensor(12345678901234567), torch.tensor([1, -5, 3])], ids=["one", "three"])
def test_draws_used_as_places_are_the_same_compiled(keys):
    # Compiled for a CPU, a signed product that wraps let the compiler end the loop early: images were garbage.
    def shifted(keys, images):
        start = (uniform(keys, 16) * 3).long() - 1
        places = (start[..., None] + torch.arange(8)).clamp(0, 7)[..., None, None, :]
        return images.expand(*start.shape, 3, 8, 8).gather(-1, places.expand(*start.shape, 3, 8, 8))

    images = torch.randn(16, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.compile(shifted)(keys, images)
    assert torch.equal(found, shifted(keys, images))


def test_ensembles_made_in_threads_have_the_weights_of_their_seeds():
    def make(seed: int) -> torch.Tensor:
        ens = ds.DeepEnsemble(lambda: torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(20))), 3, seed=seed)
        return torch.cat([p.detach().flatten() for p in ens.parameters()])

    state = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(make, range(8)))
    assert all(torch.equal(weights, make(seed)) for seed, weights in enumerate(found))
    assert torch.equal(state, torch.get_rng_state())


class NoisyItems(Dataset):
    """Items that draw from all three global generators."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(3) + np.random.rand() + random.random(), index % 2  # noqa: NPY002


class NoisyNetwork(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x) if self.training else x)


def fitted(kind: str, seed: int) -> torch.Tensor:
    """All that follows from a seed: weights, validation and predictions."""
    ens = ds.DeepEnsemble(lambda: NoisyNetwork(3, 2), 2, seed=seed)
    data = NoisyItems() if kind == "dataset" else DataLoader(NoisyItems(), batch_size=8, shuffle=True)
    options = {"batch_size": 8} if kind == "dataset" else {}
    run = ds.fit(ens, data, epochs=2, seed=seed, validation=NoisyItems(), device="cpu", engine="eager", **options)
    losses = torch.tensor([row["validation_loss"] for row in run.history.rows])
    predicted = ds.predict(ens, NoisyItems())
    return torch.cat([*(p.detach().flatten() for p in ens.parameters()), losses, predicted.flatten()])


def test_fits_in_threads_are_those_of_their_seeds_whatever_draws_from_the_global_generators():
    jobs = [(kind, seed) for seed in range(3) for kind in ("dataset", "loader")]
    alone = [fitted(*job) for job in jobs]
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda job: fitted(*job), jobs))
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.filterwarnings("ignore")  # of torch about its own parts
@pytest.mark.parametrize("training", [True, False])
def test_an_ensemble_with_dropout_that_a_user_compiles_draws_as_it_does_plainly(training):
    def make():
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    x = torch.randn(6, 4)
    plain, ens = (ds.DeepEnsemble(make, 2, seed=0).train(training) for _ in range(2))
    torch.compiler.reset()
    ens(x), plain(x)
    compiled = torch.compile(ens, backend="eager")
    for _ in range(3):  # from the second pass on its number is a symbol
        torch.testing.assert_close(compiled(x), plain(x))


def test_compiled_keys_are_the_plain_ones():
    keys = torch.tensor([3, -5, 2**62])
    torch.compiler.reset()
    compiled = torch.compile(fold, backend="eager", dynamic=True)
    for number in (0, 1, 2, -3, 2**40):
        assert torch.equal(compiled(keys, number), fold(keys, number))
