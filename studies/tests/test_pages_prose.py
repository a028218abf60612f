"""What was measured comes onto a page from the record: its prose has no such numbers, only those that say how a thing was done."""

import re

import pytest
from dissensus_studies.recorded import TEMPLATES

PAGES = ("anchoring", "choosing", "claims", "collusion", "diversification", "masksembles")

# Not prose: code, comments that ask for a table, numbers of the record, lines of tables, links and their targets, words of others.
NOT_PROSE = re.compile(
    r"```.*?```|<!--.*?-->|^\|.*?$|`[^`\n]*`|<<.*?>>|<http[^>]*>|\]\([^)\n]*\)|\"[^\"\n]*\"", re.DOTALL | re.MULTILINE
)
# Words after which a number is a setting.
SETTING = re.compile(
    r"\b(?:strengths?|weights?|torch|(?:AdamW|Adam|SGD|ResNet-18|test) at|up to|alpha =|[βSMp] =|rate|decay|momentum|by|Theorem|limit of)"
    r" [\d./]*\d(?:(?:,| and| or| to) [\d./]*\d)*"
    r"|95 % (?:intervals|of \d+ training images)"
)
# Decimal numbers, shares and times, errors, and counts such as "13 of 182" or "78 / 40".
RESULT = re.compile(
    r"(?<![\w.])[+-]?\d*\.\d+|\b\d+ ?(?:%|points?\b|ms\b|s\b|seconds\b|minutes\b)|± ?\d+|\b\d+ (?:of|/) \d+\b"
)


def typed_results(text):
    """Return the numbers in a page's prose, texts of pictures included, that look measured."""
    return RESULT.findall(SETTING.sub(" ", NOT_PROSE.sub(" ", text)))


@pytest.mark.parametrize("name", PAGES)
def test_prose_has_no_numbers_that_were_measured(name):
    assert typed_results((TEMPLATES / f"{name}.md").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "BMA of A2D has .772 here.",
        "The worst member loses 13 points.",
        "right on 30 % of the images",
        "It is lower (± 9).",
        "13 of 182 are higher",
        "![falls from 0.7 to 0.12](figure.svg)",
        "took 411 s",
    ],
)
def test_a_typed_number_is_found(text):
    assert typed_results(text)


@pytest.mark.parametrize(
    "text",
    [
        "Five heads 512-512-10, AdamW at 0.001, 10 epochs, batches of 256, torch 2.11.",
        "strengths 0.1, 0.5 and 5; alpha = 1/16; β = 0.8; one cycle up to 0.2",
        "± are 95 % intervals over seeds.",
        "| a table | .772 |",
        "`lr=0.1`, and [speed](speed-1.5.md)",
    ],
)
def test_settings_may_be_named(text):
    assert typed_results(text) == []
