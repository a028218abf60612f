"""Hashes see every bit, whatever else changes with it, and neither batches nor parts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dissensus.data import fingerprints
from dissensus.data.fingerprints import row_hashes, sum_of_rows
from dissensus.randomness import mix, mix_in_place

X = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))


def flipped(places: list[int]) -> torch.Tensor:
    other = X.clone()
    other[:, places] *= -1
    return other


@pytest.mark.parametrize("places", [[i] for i in range(40)] + [[0, 2], [1, 3], [1, 7, 9, 33], list(range(40))])
def test_signs_are_seen_alone_and_together(places):
    assert not (row_hashes(flipped(places)) == row_hashes(X)).any()
    assert sum_of_rows(flipped(places), 0) != sum_of_rows(X, 0)


@given(st.lists(st.integers(0, 40 * 32 - 1), min_size=1, max_size=4, unique=True))
def test_every_bit_is_seen_with_any_others(bits):
    words = X[:1].clone().view(torch.int32)
    for bit in bits:
        words[0, bit // 32] ^= -(1 << 31) if bit % 32 == 31 else 1 << bit % 32
    assert row_hashes(words.view(torch.float32)) != row_hashes(X[:1])


@pytest.mark.parametrize("change", [torch.neg, torch.bitwise_not, lambda x: x.flip(1), lambda x: x.roll(1, 1)])
def test_whole_rows_of_integers_that_are_changed_alike_are_others(change):
    x = torch.randint(-1000, 1000, (5, 30), generator=torch.Generator().manual_seed(1))
    assert not (row_hashes(change(x)) == row_hashes(x)).any()


@pytest.mark.parametrize("shape", [(3, 7), (1, 300), (50, 2), (4, 0), (5,)])
def test_parts_do_not_change_the_hash(monkeypatch, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    whole = row_hashes(x)
    assert whole.shape == shape[:1]
    monkeypatch.setattr(fingerprints, "_HASHED_AT_ONCE", 8)
    assert torch.equal(row_hashes(x), whole)


def test_mixing_in_place_is_mixing():
    z = torch.randint(-(2**62), 2**62, (100,), generator=torch.Generator().manual_seed(3))
    assert torch.equal(mix_in_place(z.clone()), mix(z))


def test_a_part_of_a_larger_tensor_has_the_hash_of_its_copy():
    x = X.flatten()[1:9].view(1, 8)
    assert torch.equal(row_hashes(x), row_hashes(x.clone()))


@pytest.mark.parametrize("rows", [1, 2])
def test_one_column_of_a_table_has_the_hash_of_its_copy(rows):
    column = X[:rows, 3:4]
    assert torch.equal(row_hashes(column), row_hashes(column.clone(memory_format=torch.contiguous_format)))
    assert torch.equal(row_hashes(X[:rows, 3]), row_hashes(X[:rows, 3].clone()))
