"""The report in a real browser: it renders, fits a phone, and reports no error."""

import json
import re
from html import unescape

import pytest
from evaluation_cases import as_floats, classifier, image_classifier, images, labelled, unlabelled
from test_browser import CHROMIUM, LOOK, NAMES, browse

from dissensus.evaluation import evaluate
from dissensus.reporting import report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is on the path"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    result = evaluate(
        image_classifier(),
        images(40),
        {"noise": images(30, seed=7)[0] // 2},
        corruptions=("contrast",),
        severities=(1, 5),
        transform=as_floats,
        class_names=("red & <i>", "green", "blue"),
        bootstrap=20,
    )
    return report(result, tmp_path_factory.mktemp("report") / "report.html", title="Three nets")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    runs = [
        evaluate(
            classifier(3, seed=seed), labelled(40), {"far": unlabelled(30)}, bootstrap=20, name=f"seed {seed}"
        )
        for seed in (0, 1)
    ]
    return report(runs, tmp_path_factory.mktemp("pair") / "report.html")


@pytest.mark.parametrize("which", ["page", "pair"])
def test_the_report_opens_without_errors_and_its_figures_survive_the_parser(which, request, tmp_path):
    path = request.getfixturevalue(which)
    document, console = browse(tmp_path, path, "--dump-dom")
    assert console == []
    written = path.read_text(encoding="utf-8")
    for tag in ("section", "table", "figure", "svg", "use", "text"):
        assert len(re.findall(f"<{tag}[ >]", document)) == len(re.findall(f"<{tag}[ >]", written)) > 0, tag


@pytest.mark.parametrize("which", ["page", "pair"])
def test_the_report_fits_a_phone(which, request, tmp_path):
    path = request.getfixturevalue(which)
    look = tmp_path / "look.html"
    look.write_text(LOOK.format(page=path.as_uri()))
    document, _ = browse(tmp_path, look, "--dump-dom")
    seen = json.loads(unescape(re.search("<pre>(.*?)</pre>", document, flags=re.DOTALL)[1]))
    assert seen["page"] <= 390
    assert seen["pictures"]
    assert all(250 < width <= 390 for width in seen["pictures"])
    assert all(0 < width <= 390 for width in seen["tables"])
    assert "How this page was made" in seen["text"]
