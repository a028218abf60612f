"""Options of studies: what a study cannot follow it refuses, and runs nothing."""

import pytest
from dissensus_studies import STUDIES
from dissensus_studies.harness.image_sets import load_images
from typer.testing import CliRunner

from dissensus import cli

IMAGE_STUDIES = ("masksembles", "anchoring", "collusion-images", "diversification")


@pytest.mark.parametrize("name", IMAGE_STUDIES)
def test_a_known_set_without_a_folder_is_refused(name, tmp_path):
    options = ["--quick", "--known", "cifar100", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.app, ["study", name, *options])
    assert result.exit_code == 2
    assert "got 'cifar100' and no folder" in result.output
    assert not (tmp_path / "out").exists()


def test_the_digits_that_come_along_may_be_named():
    assert load_images(None, known="digits", limit=20).name == "digits"


@pytest.mark.parametrize("name", IMAGE_STUDIES[:3])
@pytest.mark.parametrize("option", [{"known": "cifar100"}, {"quick": True}], ids=["known", "quick"])
def test_the_imagenet_setting_has_one_set_and_no_short_version(name, option, tmp_path):
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
    with pytest.raises(ValueError, match=f"no option {next(iter(option))}"):
        STUDIES[name].run(tmp_path / "out", setting="imagenet", data=tmp_path, **option)


@pytest.mark.parametrize("name", ["practical-regression", "practical-classification", "collusion-theory"])
def test_data_is_refused_where_a_study_reads_none(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name} has no option data"):
        STUDIES[name].run(tmp_path / "out", quick=True, data=tmp_path)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_refuses_an_option_that_no_study_has(name, tmp_path):
    with pytest.raises(ValueError, match="has no option moon"):
        STUDIES[name].run(tmp_path, moon=1)
