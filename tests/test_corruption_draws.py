"""Counter-based draws: against SplitMix64 in Python's integers, and against the laws they should follow."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dissensus.data.corruptions._images import _words, bits, image_keys, integers, normal, share_below, uniform

KEYS = image_keys(0, "test", 1, torch.arange(400))


def splitmix64(start: int, count: int) -> list[int]:
    """The generator as published, in unbounded integers, as signed words."""
    mask, words = 2**64 - 1, []
    for _ in range(count):
        start = (start + 0x9E3779B97F4A7C15) & mask
        z = start
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        words.append(z - 2**64 if z >= 2**63 else z)
    return words


@given(st.integers(-(2**63), 2**63 - 1))
def test_words_are_those_of_splitmix64(key):
    assert _words(torch.tensor([key]), 5, stream=0)[0].tolist() == splitmix64(key, 5)


def test_splitmix64_started_at_zero_gives_its_published_first_output():
    assert splitmix64(0, 1)[0] % 2**64 == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("change", [{"seed": 1}, {"name": "b"}, {"severity": 2}, {"index": 5}])
def test_every_part_of_the_key_matters(change):
    parts = {"seed": 0, "name": "a", "severity": 1, "index": 4}
    keys = [
        image_keys(p["seed"], p["name"], p["severity"], torch.tensor([p["index"]])) for p in (parts, parts | change)
    ]
    numbers = [uniform(key, (50,)) for key in keys]
    assert (numbers[0] != numbers[1]).float().mean() > 0.9


def test_neighbouring_indices_have_unlike_keys():
    keys = image_keys(0, "a", 1, torch.arange(1000))
    assert keys.unique().numel() == 1000
    differing = [bin((a ^ b) & (2**64 - 1)).count("1") for a, b in zip(keys.tolist(), keys[1:].tolist(), strict=False)]
    assert sum(differing) / len(differing) == pytest.approx(32, abs=0.6)


def test_uniform_numbers_are_uniform_and_never_zero_or_one():
    numbers = uniform(KEYS, (1000,)).flatten()
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert stats.kstest(numbers.numpy(), "uniform").pvalue > 0.001


def test_normal_numbers_are_normal():
    numbers = normal(KEYS, (1001,)).flatten()
    assert stats.kstest(numbers.numpy(), "norm").pvalue > 0.001
    assert numbers.double().var().item() == pytest.approx(1.0, abs=4 * (2 / numbers.numel()) ** 0.5)


def test_numbers_of_one_image_images_and_streams_are_uncorrelated():
    first, second = normal(KEYS, (500,)), normal(KEYS, (500,), stream=1)
    bound = 5 / first.numel() ** 0.5
    for other in (second, first.roll(1, 0), first.roll(1, 1), first.roll(250, 1)):
        assert abs((first * other).mean().item()) < bound


def test_integers_cover_their_range_evenly():
    counts = integers(KEYS, 6, (600,)).flatten().bincount()
    assert len(counts) == 6
    assert stats.chisquare(counts.numpy()).pvalue > 0.001


def test_every_bit_is_set_half_of_the_time():
    words = bits(KEYS, (500,))
    for position in range(32):
        share = ((words >> position) & 1).double().mean().item()
        assert share == pytest.approx(0.5, abs=2.5 / words.numel() ** 0.5)


def test_a_number_does_not_depend_on_how_many_follow_it():
    assert torch.equal(uniform(KEYS, (10,)), uniform(KEYS, (999,))[:, :10])


@given(st.floats(0.001, 0.999))
def test_bits_lie_below_a_share_exactly_where_uniform_numbers_do(share):
    assert torch.equal(bits(KEYS[:40], (500,)) < share_below(share), uniform(KEYS[:40], (500,)) < share)


def test_a_share_that_is_itself_a_uniform_number_is_not_below_itself():
    numbers = uniform(KEYS[:1], (50,))[0]
    for number, drawn in zip(numbers.tolist(), bits(KEYS[:1], (50,))[0].tolist(), strict=True):
        assert drawn >= share_below(number)
