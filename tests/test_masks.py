"""Masks against enumeration, exact counting in whole numbers, and plain simulation."""

import itertools
import math
import re
from collections import Counter
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dissensus import masks as mk

# num_masks, ones, scale, mean width, its sd (simulated), exact IoU, chance of the floored mean width
ORACLES = [
    (4, 16, 1.0, 16.0, 0.0, 1.0, 1.0),
    (4, 16, 2.0, 30.0, 1.19, 0.33816, 0.32),
    (4, 32, 2.0, 60.0, 1.66, 0.33570, 0.24),
    (4, 32, 3.0, 77.037, 2.80, 0.20204, 0.14),
    (4, 64, 1.5, 94.815, 1.03, 0.50099, 0.23),
    (8, 64, 2.0, 127.5, 0.68, 0.33450, 0.31),
    (4, 64, 6.0, 198.815, 4.99, 0.09150, 0.077),
    (2, 10, 2.0, 15.0, 1.15, 0.34127, 0.35),
    (4, 4, 2.0, 7.5, 0.61, 0.35551, 0.39),
]


def count_mask_sets(width, num_masks, ones):
    """Sets that use every column, by inclusion and exclusion of empty columns."""
    return sum((-1) ** k * comb(width, k) * comb(width - k, ones) ** num_masks for k in range(width - ones + 1))


def all_mask_sets(slots, num_masks, ones):
    rows = [tuple(j in chosen for j in range(slots)) for chosen in itertools.combinations(range(slots), ones)]
    return itertools.product(rows, repeat=num_masks)


def trim(mask_set):
    """Rows without the columns that no row uses."""
    kept = [column for column in zip(*mask_set, strict=True) if any(column)]
    return tuple(zip(*kept, strict=True))


def simulate(num_masks, ones, slots, draws):
    """Untrimmed masks, (draws, num_masks, slots): the generative story as it is told."""
    keys = np.random.default_rng(0).random((draws, num_masks, slots))
    return keys.argsort(-1).argsort(-1) < ones


def generate_with(ones, width, num_masks, seed):
    scale = mk.solve(width, ones=ones, num_masks=num_masks).scale
    return mk.generate(width, num_masks, scale, seed)


def as_key(masks):
    return tuple(map(tuple, masks.tolist()))


def assert_chi_square(counts, expected):
    """Pearson's statistic is within five standard deviations of its mean."""
    statistic, freedom = sum((counts[k] - e) ** 2 / e for k, e in expected.items()), len(expected) - 1
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(("num_masks", "ones", "scale", "width", "sd", "iou", "chance"), ORACLES)
class TestOracleTable:
    def test_closed_forms_match_it(self, num_masks, ones, scale, width, sd, iou, chance):
        assert mk.expected_width(ones, scale, num_masks) == pytest.approx(width, abs=5e-4)
        assert mk.width_variance(ones, scale, num_masks) ** 0.5 == pytest.approx(sd, rel=0.025, abs=0.006)
        assert mk.expected_iou(scale) == pytest.approx(1 / (2 * scale - 1))
        assert mk.expected_iou(scale, ones) == pytest.approx(iou, abs=6e-6)

    def test_exact_law_of_the_width_has_these_moments(self, num_masks, ones, scale, width, sd, iou, chance):
        slots = round(ones * scale)
        total = comb(slots, ones) ** num_masks
        law = {w: comb(slots, w) * count_mask_sets(w, num_masks, ones) / total for w in range(ones, slots + 1)}
        mean = sum(w * p for w, p in law.items())
        variance = sum((w - mean) ** 2 * p for w, p in law.items())
        assert mk.expected_width(ones, scale, num_masks) == pytest.approx(mean)
        assert mk.width_variance(ones, scale, num_masks) == pytest.approx(variance, rel=1e-6)
        assert law[math.floor(width)] == pytest.approx(chance, abs=0.012)

    def test_simulated_masks_have_these_moments(self, num_masks, ones, scale, width, sd, iou, chance):
        simulated = simulate(num_masks, ones, round(ones * scale), draws=2000)
        widths, shared = simulated.any(1).sum(1), (simulated[:, 0] & simulated[:, 1]).sum(1)
        variance = mk.width_variance(ones, scale, num_masks)
        error = max(1e-9, 4 * math.sqrt(variance / 2000))
        assert widths.mean() == pytest.approx(width, abs=error + 5e-4)
        assert widths.var() == pytest.approx(variance, rel=0.15)
        assert (shared / (2 * ones - shared)).mean() == pytest.approx(iou, abs=0.01)


def test_moments_and_overlap_are_those_of_all_masks_of_four_slots():
    sets = list(all_mask_sets(slots=4, num_masks=3, ones=2))
    widths = np.array([len(trim(s)[0]) for s in sets])
    ious = [mk.overlap(torch.tensor(s))[0, 1].item() for s in sets]
    assert mk.expected_width(2, 2.0, 3) == pytest.approx(widths.mean())
    assert mk.width_variance(2, 2.0, 3) == pytest.approx(widths.var())
    assert mk.expected_iou(2.0, ones=2) == pytest.approx(np.mean(ious))


def test_variance_with_one_spare_slot_and_with_very_many_slots():
    widths = np.array([len(trim(s)[0]) for s in all_mask_sets(slots=3, num_masks=2, ones=2)])
    assert mk.width_variance(2, 1.5, 2) == pytest.approx(widths.var())
    # With T slots, two masks of M ones share M^2 / T slots on average, a Poisson number for large T.
    assert mk.width_variance(100, 1e8, 2) == pytest.approx(100**2 / 1e10, rel=1e-3)
    assert mk.width_variance(100, math.inf, 2) == 0.0


@pytest.mark.parametrize("slots", [4, 5, 6])
def test_trimmed_masks_of_a_given_width_are_uniform_whatever_the_number_of_slots(slots):
    counts = Counter(trim(s) for s in all_mask_sets(slots, num_masks=3, ones=2))
    at_width = [n for matrix, n in counts.items() if len(matrix[0]) == 4]
    assert len(at_width) == count_mask_sets(4, 3, 2) == 114
    assert set(at_width) == {comb(slots, 4)}


@pytest.mark.parametrize("num_masks", [1, 2, 3, 4, 8, 20, 64])
@pytest.mark.parametrize("width", [2, 5, 10, 33, 64, 200, 512])
def test_log_counts_equal_exact_counts_in_whole_numbers(width, num_masks):
    fewest = math.ceil(width / num_masks)
    for ones in {fewest, fewest + 1, width // 3, width // 2, width - 1, width} & set(range(fewest, width + 1)):
        _, log_counts = mk._log_counts(width, num_masks, ones)[-1]
        exact = count_mask_sets(width, num_masks, ones)
        assert log_counts[-1] == pytest.approx(math.log(exact), rel=1e-12, abs=1e-9)


@pytest.mark.parametrize(("width", "num_masks", "ones"), [(4, 3, 2), (5, 2, 3), (3, 4, 1), (6, 3, 2), (3, 3, 2)])
def test_generated_masks_are_uniform_among_all_that_use_every_column(width, num_masks, ones):
    allowed = [s for s in all_mask_sets(width, num_masks, ones) if len(trim(s)[0]) == width]
    draws = 25 * len(allowed)
    counts = Counter(as_key(generate_with(ones, width, num_masks, seed)) for seed in range(draws))
    assert set(counts) <= set(allowed)
    assert_chi_square(counts, dict.fromkeys(allowed, 25.0))


def test_any_two_masks_of_a_wide_layer_overlap_by_the_exact_law():
    width, num_masks, ones, draws = 60, 4, 32, 2000

    def ways(union):  # two masks with this union, times two more that use at least the columns left over
        others = range(width - union + 1)
        rest = sum((-1) ** k * comb(width - union, k) * comb(width - k, ones) ** 2 for k in others)
        return comb(width, union) * count_mask_sets(union, 2, ones) * rest

    total = count_mask_sets(width, num_masks, ones)
    expected = {u: draws * ways(u) / total for u in range(ones, width + 1)}
    assert sum(expected.values()) == pytest.approx(draws)
    masks = torch.stack([generate_with(ones, width, num_masks, seed) for seed in range(draws)])
    for first, second in itertools.combinations(range(num_masks), 2):
        unions = (masks[:, first] | masks[:, second]).sum(1)
        assert_chi_square(Counter(unions.tolist()), {u: e for u, e in expected.items() if e >= 5})


def check_masks(masks, width, num_masks):
    assert masks.shape == (num_masks, width)
    assert masks.dtype == torch.bool
    assert masks.any(0).all()
    assert len(set(masks.sum(1).tolist())) == 1


def test_every_setting_of_the_grid_works_or_names_settings_that_do():
    refused = 0
    widths = (2, 3, 5, 7, 10, 16, 33, 64, 100, 128, 511, 512)
    for width, num_masks in itertools.product(widths, (1, 2, 3, 4, 5, 7, 8, 13, 16, 32, 63, 64)):
        for scale in (1.0, 1.1, 1.5, 2.0, 3.0, 4.0, 6.0, 20.0, math.inf):
            try:
                check_masks(mk.generate(width, num_masks, scale), width, num_masks)
            except ValueError as error:
                refused += 1
                for name, value in re.findall(r"(scale|width|num_masks)=([\d.]+)", str(error)):
                    asked = {"width": width, "num_masks": num_masks, "scale": scale}
                    asked[name] = type(asked[name])(float(value))
                    mk.solve(asked["width"], num_masks=asked["num_masks"], scale=asked["scale"])
                assert scale * num_masks > width or math.isinf(scale)
    assert refused < 300


@given(st.integers(2, 300), st.integers(1, 64), st.floats(1.0, 8.0), st.integers(-(2**63), 2**63))
@settings(max_examples=40, deadline=None)
def test_masks_have_the_width_the_count_and_a_scale_near_the_one_asked(width, num_masks, scale, seed):
    assume(width >= 8 * num_masks)
    masks = mk.generate(width, num_masks, scale, seed)
    check_masks(masks, width, num_masks)
    if num_masks > 1:
        # One more or less one a mask moves 1 / scale by at most (num_masks + 1) / width here.
        assert abs(1 / mk.effective_scale(masks) - 1 / scale) <= (num_masks + 1) / width


@pytest.mark.parametrize(("width", "num_masks", "scale"), [(10, 2, 4.0), (100, 8, 1.1), (10, 4, 2.5), (64, 2, 6.0)])
def test_settings_on_which_rejection_samplers_fail_work(width, num_masks, scale):
    check_masks(mk.generate(width, num_masks, scale), width, num_masks)


def test_a_very_wide_layer_takes_no_square_table():
    check_masks(mk.generate(25_000, 8, 3.0), 25_000, 8)


def test_scale_one_gives_equal_masks_and_an_infinite_one_disjoint_masks():
    assert mk.generate(12, 3, 1.0).all()
    disjoint = mk.generate(12, 3, math.inf)
    assert disjoint.sum(0).tolist() == [1] * 12
    assert mk.effective_scale(disjoint) == math.inf
    assert torch.equal(mk.overlap(disjoint), torch.eye(3))
    assert mk.generate(5, 1, 3.0).all()  # one mask must use every column


def test_overlap_of_generated_masks_is_the_expected_one():
    pairs = [mk.overlap(mk.generate(60, 4, 2.0, seed)).triu(1).sum().item() / 6 for seed in range(400)]
    assert np.mean(pairs) == pytest.approx(mk.expected_iou(2.0, ones=32), abs=0.004)


def test_seed_decides_the_masks():
    first = mk.generate(64, 4, 2.0, seed=3)
    assert torch.equal(first, mk.generate(64, 4, 2.0, seed=3))
    assert not torch.equal(first, mk.generate(64, 4, 2.0, seed=4))
    assert not torch.equal(mk.generate(64, 4, 2.0, seed=-1), mk.generate(64, 4, 2.0, seed=1))


def test_masks_of_a_seed_stay_what_they_were():
    rows = ["".join("01"[kept] for kept in row) for row in mk.generate(8, 3, 2.0, seed=0).tolist()]
    assert rows == ["00111101", "11010011", "01111100"]


def test_global_random_state_and_default_device_do_not_matter():
    expected = mk.generate(32, 4, 2.0)
    states = [torch.get_rng_state().tolist(), repr(np.random.get_state())]  # noqa: NPY002
    with torch.device("meta"):
        masks = mk.generate(32, 4, 2.0)
    assert torch.equal(masks, expected)
    assert states == [torch.get_rng_state().tolist(), repr(np.random.get_state())]  # noqa: NPY002


@given(st.integers(2, 200), st.integers(2, 16), st.data())
@settings(max_examples=40, deadline=None)
def test_solved_scale_has_the_width_as_its_expected_width(width, num_masks, data):
    ones = data.draw(st.integers(math.ceil(width / num_masks), width))
    solved = mk.solve(width, ones=ones, num_masks=num_masks)
    assert mk.expected_width(ones, solved.scale, num_masks) == pytest.approx(width, rel=1e-9)
    assert mk.solve(width, num_masks=num_masks, scale=solved.scale) == solved
    if (1 - 1 / solved.scale) ** num_masks > 1e-6:  # beyond, one more mask hardly changes the width
        assert mk.solve(width, ones=ones, scale=solved.scale).num_masks == num_masks


@given(st.integers(2, 60), st.integers(2, 8), st.floats(1.0, 12.0))
@settings(max_examples=40, deadline=None)
def test_solved_ones_are_the_nearest_of_all_in_one_over_scale(width, num_masks, scale):
    assume(width >= scale * num_masks)
    possible = [mk.solve(width, ones=n, num_masks=num_masks) for n in range(math.ceil(width / num_masks), width + 1)]
    solved = mk.solve(width, num_masks=num_masks, scale=scale)
    assert abs(1 / solved.scale - 1 / scale) == min(abs(1 / s.scale - 1 / scale) for s in possible)


@given(st.integers(1, 256), st.floats(1.0, 20.0), st.integers(2, 32))
@settings(max_examples=100, deadline=None)
def test_a_layer_grown_to_the_expected_width_keeps_its_ones(ones, scale, num_masks):
    width = round(mk.expected_width(ones, scale, num_masks))
    assume(width > 1)
    assert mk.solve(width, num_masks=num_masks, scale=scale).ones == ones


@given(st.integers(1, 128), st.floats(1.0, 50.0))
@settings(max_examples=40, deadline=None)
def test_exact_overlap_is_never_below_the_approximation(ones, scale):
    exact_scale = round(ones * scale) / ones
    assert mk.expected_iou(exact_scale, ones) >= mk.expected_iou(exact_scale) * (1 - 1e-9)


def test_overlap_of_an_infinite_scale_is_zero():
    assert mk.expected_iou(math.inf) == mk.expected_iou(math.inf, ones=5) == 0.0


def test_effective_scale_ignores_unused_columns():
    masks = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    assert mk.effective_scale(masks) == mk.effective_scale(masks[:, :3]) == 2.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mk.generate(7, 2, 20.0), "at most 4.0 .* Take scale=4.0 or width=6 or num_masks=4"),
        (lambda: mk.generate(64, 4, 0.5), "`scale` must be at least 1; got 0.5"),
        (lambda: mk.generate(64, 4, math.nan), "`scale` must be a number; got nan"),
        (lambda: mk.generate(0, 4, 2.0), "`width` must be at least 1; got 0"),
        (lambda: mk.generate(64, 0, 2.0), "`num_masks` must be at least 1; got 0"),
        (lambda: mk.expected_width(0, 2.0, 4), "`ones` must be at least 1; got 0"),
        (lambda: mk.expected_iou(2.0, ones=0), "`ones` must be at least 1; got 0"),
        (lambda: mk.solve(64, ones=15, num_masks=4), "from 16 to 64 .* Take ones=16"),
        (lambda: mk.solve(64, ones=65, num_masks=4), "from 16 to 64 .* Take ones=64"),
        (lambda: mk.solve(64, ones=32, scale=2.0), "above width / scale = 32 .* Take ones=33"),
        (lambda: mk.solve(64, ones=64, scale=1.0), "`scale` above 1"),
        (lambda: mk.solve(64, ones=32), "Give two of"),
        (lambda: mk.solve(64, ones=32, scale=2.0, num_masks=4), "Give two of"),
        (lambda: mk.effective_scale(torch.tensor([[True, True], [False, True]])), r"same number .* \[1, 2\]"),
    ],
)
def test_bad_settings_are_refused_with_what_to_do(call, words):
    with pytest.raises(ValueError, match=words):
        call()
