"""What the page of the study draws from the arms that there are, and what it says of the rest."""

import pytest
from anchoring_records import record
from dissensus_studies.anchoring.arms import AnchorSetting
from dissensus_studies.anchoring.sections import alpha_sections, tail_sections
from dissensus_studies.harness.outputs import Outputs

from dissensus.html import Picture, Text

PLAIN, ANCHORED, MASKED = AnchorSetting(anchored=False), AnchorSetting(), AnchorSetting(alpha=0.25)
MINED = AnchorSetting(alpha=0.25, tail_weight=0.1)


def records(*settings):
    return {(each.architecture, each.row): [record() | {"setting": vars(each)}] for each in settings}


def shown(section):
    """Return what pictures show, and all sentences."""
    pictures = [block.alt for block in section.blocks if isinstance(block, Picture)]
    texts = [block.paragraphs for block in section.blocks if isinstance(block, Text)]
    return pictures, " ".join(sentence for paragraphs in texts for sentence in paragraphs)


def test_two_probabilities_give_both_figures(tmp_path):
    (section,) = alpha_sections(Outputs(tmp_path), records(PLAIN, ANCHORED, MASKED))
    pictures, said = shown(section)
    assert ["masking probability" in alt for alt in pictures] == [True, False]
    assert said == ""


@pytest.mark.parametrize("other", [ANCHORED, MASKED], ids=["anchored", "masked"])
def test_one_anchored_network_gives_the_radar(other, tmp_path):
    (section,) = alpha_sections(Outputs(tmp_path), records(PLAIN, other))
    pictures, said = shown(section)
    assert pictures == ["improvement over the plain network in several qualities"]
    assert "Not drawn: qualities against the masking probability" in said


@pytest.mark.parametrize(
    ("arms", "lacking"),
    [
        ((PLAIN,), "no anchored network in its usual form"),
        ((PLAIN, MINED), "no anchored network in its usual form"),
        ((ANCHORED, MASKED), "no plain network"),
    ],
)
def test_a_comparison_without_one_side_is_said_to_be_missing(arms, lacking, tmp_path):
    (section,) = alpha_sections(Outputs(tmp_path), records(*arms))
    assert shown(section) == ([], f"Not drawn: what anchoring and masking change, because {lacking} is among the arms.")


def test_mining_is_drawn_against_networks_without_it(tmp_path):
    (section,) = tail_sections(Outputs(tmp_path), records(MASKED, MINED))
    assert len(shown(section)[0]) == 1
    (section,) = tail_sections(Outputs(tmp_path), records(MINED))
    assert shown(section)[0] == []
    assert "Not drawn: what mining changes" in shown(section)[1]
    assert tail_sections(Outputs(tmp_path), records(PLAIN, MASKED)) == []
