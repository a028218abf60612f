"""The report in a real browser: it renders, fits a phone, and reports no error."""

import json
import re
from contextlib import contextmanager
from html import unescape

import numpy as np
import pytest
from evaluation_cases import as_floats, classifier, image_classifier, images, labelled, unlabelled
from matplotlib.image import imread
from test_browser import CHROMIUM, LOOK, NAMES, browse, follows_scheme

from dissensus.evaluation import evaluate
from dissensus.reporting import report

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is on the path"),
]

# Scrolls every table of the page to its right end, and leaves where row headings then stand in their box.
SCROLL = """<!doctype html><body><iframe width="390" height="800" src="{page}"></iframe><pre></pre><script>
document.querySelector("iframe").onload = event => {{
  const left = element => element.getBoundingClientRect().left;
  const seen = [...event.target.contentDocument.querySelectorAll(".scroll")].map(box => {{
    box.scrollLeft = 10000;
    const heading = box.querySelector("tbody th");
    return [box.scrollLeft, heading ? left(heading) - left(box) : 0];
  }});
  document.querySelector("pre").textContent = JSON.stringify(seen);
}};
</script>"""


@contextmanager
def opened(path, scheme="light", width=1280):
    """A page in a browser that scripts can drive, without a network."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is an extra")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        view = context.new_page()
        view.goto(path.as_uri())
        yield view
        browser.close()


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
        evaluate(classifier(3, seed=seed), labelled(40), {"far": unlabelled(30)}, bootstrap=20, name=f"seed {seed}")
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


def test_row_headings_stay_in_sight_while_a_table_scrolls(pair, tmp_path):
    scroll = tmp_path / "scroll.html"
    scroll.write_text(SCROLL.format(page=pair.as_uri()))
    document, _ = browse(tmp_path, scroll, "--dump-dom")
    seen = json.loads(re.search("<pre>(.*?)</pre>", document, flags=re.DOTALL)[1])
    assert any(scrolled > 50 for scrolled, _ in seen)
    assert all(abs(offset) < 1 for _, offset in seen)


def test_the_report_follows_light_and_dark(page, tmp_path):
    follows_scheme(tmp_path, page, 3000)


def test_figures_are_dark_on_a_dark_page_and_their_images_are_not_changed(page, tmp_path):
    shots = {}
    for scheme, setting in (("light", 1), ("dark", 0)):
        picture = tmp_path / f"{scheme}.png"
        flags = (f"--blink-settings=preferredColorScheme={setting}", "--window-size=1200,16000")
        browse(tmp_path, page, *flags, f"--screenshot={picture}")
        shots[scheme] = imread(picture)[..., :3]
    light, dark = shots["light"], shots["dark"]
    assert light.shape == dark.shape
    # White paper of figures covers much of the light page; of the dark one only thin lines and letters are bright.
    assert (light > 0.99).all(-1).mean() > 0.1
    assert (dark > 0.8).all(-1).mean() < 0.05
    # What is the same in both, colour for colour, are the gallery's images: 24 or more of at least 100 by 100 dots.
    coloured = light.max(-1) - light.min(-1) > 0.05
    assert (coloured & (np.abs(light - dark) < 0.01).all(-1)).sum() > 24 * 100 * 100


def test_inputs_can_be_searched_and_sorted(page):
    with opened(page) as view:
        rows = "document.querySelectorAll('table[data-search] tbody tr:not([hidden])')"
        assert view.evaluate(f"{rows}.length") == 70
        view.fill("input[type=search]", "noise")
        assert view.evaluate(f"{rows}.length") == 30
        assert view.inner_text(".tools [role=status]") == "30 of 70 rows"
        view.fill("input[type=search]", "")
        for order, sign in (("descending", 1), ("ascending", -1)):
            view.click("table[data-search] thead th:nth-child(6) button")
            assert view.get_attribute("table[data-search] thead th:nth-child(6)", "aria-sort") == order
            column = [float(v) for v in view.evaluate(f"[...{rows}].map(row => row.cells[5].textContent)")]
            assert [sign * value for value in column] == sorted((sign * value for value in column), reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["page", "pair"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_axe_finds_nothing_on_the_report(which, scheme, width, request):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is an extra")
    with opened(request.getfixturevalue(which), scheme, width) as view:
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        found = axe.Axe().run(view).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []


def test_the_report_prints_whole_tables_and_no_tools(page):
    with opened(page) as view:
        view.emulate_media(media="print")
        hidden = "getComputedStyle(document.querySelector('{}')).display"
        assert view.evaluate(hidden.format("nav")) == view.evaluate(hidden.format(".tools")) == "none"
        view.set_viewport_size({"width": 700, "height": 1000})
        boxes = "[...document.querySelectorAll('.scroll')].map(box => box.scrollHeight - box.clientHeight)"
        assert max(view.evaluate(boxes)) <= 1
        assert view.pdf(format="A4").startswith(b"%PDF")
