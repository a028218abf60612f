"""The demo's page in a real browser: it renders, fits a phone, follows light and dark, and reports no error."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest
from matplotlib.image import imread

from dissensus import demo

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is on the path"),
]

# Looks at the page from a frame as wide as a phone and leaves what it saw in its own text.
LOOK = """<!doctype html><body><iframe width="390" height="800" src="{page}"></iframe><pre></pre><script>
document.querySelector("iframe").onload = event => {{
  const seen = event.target.contentDocument;
  const width = element => element.getBoundingClientRect().width;
  document.querySelector("pre").textContent = JSON.stringify({{
    page: seen.documentElement.scrollWidth,
    pictures: [...seen.querySelectorAll("svg")].map(width),
    tables: [...seen.querySelectorAll(".scroll")].map(width),
    text: seen.body.innerText,
  }});
}};
</script>"""


def browse(folder, page, *flags):
    """Open a page headless and without a network; return what was printed and what the page's console said."""
    run = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-sync",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--allow-file-access-from-files",
            "--enable-logging=stderr",
            "--virtual-time-budget=5000",
            f"--user-data-dir={folder / 'profile'}",
            *flags,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return demo.run(tmp_path_factory.mktemp("demo"), num_members=2, epochs=2).page


def test_errors_on_the_console_would_be_seen(tmp_path):
    faulty = tmp_path / "faulty.html"
    faulty.write_text("<!doctype html><script>missing.call()</script>")
    _, console = browse(tmp_path, faulty, "--dump-dom")
    assert any("missing is not defined" in line for line in console)


def test_the_page_opens_without_errors_and_its_figures_survive_the_parser(page, tmp_path):
    document, console = browse(tmp_path, page, "--dump-dom")
    assert console == []
    written = page.read_text(encoding="utf-8")
    for tag in ("section", "table", "figure", "svg", "image", "use", "text"):
        assert len(re.findall(f"<{tag}[ >]", document)) == len(re.findall(f"<{tag}[ >]", written)) > 0, tag


def test_the_page_fits_a_phone(page, tmp_path):
    look = tmp_path / "look.html"
    look.write_text(LOOK.format(page=page.as_uri()))
    document, _ = browse(tmp_path, look, "--dump-dom")
    seen = json.loads(unescape(re.search("<pre>(.*?)</pre>", document, flags=re.DOTALL)[1]))
    assert seen["page"] <= 390
    assert len(seen["pictures"]) == 14
    assert len(seen["tables"]) == 4
    assert all(250 < width <= 390 for width in seen["pictures"] + seen["tables"])
    assert "Telling known from unknown" in seen["text"]


def follows_scheme(folder, page, height):
    """Check that a page is light or dark as the reader wants, and that something is drawn on it."""
    for scheme, setting, low, high in (("light", 1, 0.9, 1.0), ("dark", 0, 0.0, 0.2)):
        picture = folder / f"{scheme}.png"
        flags = (f"--blink-settings=preferredColorScheme={setting}", f"--window-size=1200,{height}")
        browse(folder, page, *flags, f"--screenshot={picture}")
        pixels = imread(picture)[..., :3]
        assert low <= pixels[5, 5].min() <= pixels[5, 5].max() <= high
        assert pixels.min() < 0.2 < 0.8 < pixels.max()


def test_the_page_follows_light_and_dark(page, tmp_path):
    follows_scheme(tmp_path, page, 1600)
