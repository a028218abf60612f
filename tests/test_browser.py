"""The demo's page in a real browser: it renders, fits a phone, follows light and dark, and reports no error."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from markdown_blocks import ROOT
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
    assert len(seen["pictures"]) >= 14
    assert len(seen["tables"]) >= 4
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


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_the_site_and_it_loads_nothing_from_elsewhere(scheme, tmp_path):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is an extra")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is an extra")
    for extra in ("material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(extra, reason="the site needs the docs extra")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})

    class Files(SimpleHTTPRequestHandler):
        def __init__(self, *given):
            super().__init__(*given, directory=str(tmp_path))

        def log_message(self, *said):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base, asked = f"http://127.0.0.1:{server.server_port}/", []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (1280, 375):
            view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            view.on("request", lambda request: asked.append(request.url))
            for page in ("", "results/claims/", "scores/", "choosing/", "journeys/student/", "api/saving/"):
                view.goto(base + page)
                assert view.evaluate("document.documentElement.scrollWidth") <= width, page
                found = axe.Axe().run(view).response["violations"]
                assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == [], page
        browser.close()
    server.shutdown()
    server.server_close()
    assert [url for url in asked if not url.startswith((base, "data:", "blob:"))] == []


def test_the_page_follows_light_and_dark(page, tmp_path):
    follows_scheme(tmp_path, page, 1600)
