"""Wrong calls at every public name: how many refusals are sentences. The aim is 0.95; it has been about 0.65 over all names."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "attacks"))

import wrong_calls


@pytest.mark.slow
def test_every_public_name_has_a_right_call(tmp_path):
    for _, call in wrong_calls.right_calls(tmp_path):
        call()


@pytest.mark.slow
def test_most_refusals_are_clear_sentences():
    ended, obscure = wrong_calls.attack(every=23)
    worst = [f"{case.name}({case.argument}={case.wrong}): {said:.120}" for case, said in obscure]
    assert ended["clear"] > 100
    assert wrong_calls.share(ended) >= 0.6, "\n".join(worst)
