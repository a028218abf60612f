"""Numbers of another type than signatures say: apart from the other tests of masks, which also run with types checked."""

import pytest

from dissensus import masks as mk


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mk.generate(64.0, 4, 2.0), "`width` must be a whole number; got 64.0"),
        (lambda: mk.generate(64, 4.5, 2.0), "`num_masks` must be a whole number; got 4.5"),
        (lambda: mk.solve(64, ones=31.5, num_masks=4), "`ones` must be a whole number or None; got 31.5"),
    ],
)
def test_fractions_are_refused_with_what_to_take(call, words):
    with pytest.raises(ValueError, match=words):
        call()
