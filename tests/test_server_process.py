"""The server as processes: it outlives hostile clients, a killed worker and overload, and stops without losing what it accepted."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from serving_cases import write_model

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
httpx = pytest.importorskip("httpx")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROW = b'{"rows": [[0.5, 1.0]]}'
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(path, *options):
    """Run a server; give its address and process, and end it."""
    port = free_port()
    command = [sys.executable, "-m", "dissensus", "serve", str(path), "--port", str(port), "--name", "tiny"]
    process = subprocess.Popen([*command, "--log-level", "warning", *options])
    try:
        wait_until(lambda: answers(port))
        yield port, process
    finally:
        process.terminate()
        assert process.wait(60) in (0, -signal.SIGTERM)


def wait_until(true, seconds=120):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.1)


def answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def score(port):
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"http://127.0.0.1:{port}/score", content=ROW, headers=headers, timeout=60).status_code


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny.onnx")


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def workers_of(pid):
    """Children that serve: those whose command names uvicorn's way to start one."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError), open(f"/proc/{child}/cmdline", "rb") as file:
            if b"spawn_main" in file.read():
                found.append(child)
    return found


@pytest.mark.skipif(not os.path.exists("/proc"), reason="looks for workers in /proc")
def test_a_killed_worker_is_replaced_and_the_service_goes_on(path):
    with server(path, "--workers", "2") as (port, process):
        wait_until(lambda: len(workers_of(process.pid)) == 2)
        assert score(port) == 200
        first = set(workers_of(process.pid))
        os.kill(min(first), signal.SIGKILL)
        codes = []
        until = time.monotonic() + 120
        while len(set(workers_of(process.pid)) - first) < 1:
            with contextlib.suppress(httpx.TransportError):  # a connection that the dead worker had accepted
                codes.append(score(port))
            assert time.monotonic() < until
        assert set(codes) == {200}
        wait_until(lambda: score(port) == 200)
        assert "dissensus_rows_total" in httpx.get(f"http://127.0.0.1:{port}/metrics").text


def test_a_port_in_use_is_refused_before_anything_is_announced(path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        command = [sys.executable, "-m", "dissensus", "serve", str(path), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert f"Nothing can listen at 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "serves" not in done.stderr + done.stdout


async def send(port, content, linger=0.0, sentences=None):
    """Send bytes; return the status of the answer, None where the server closed the connection.

    What a refusal says is put into `sentences`.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content)
        await writer.drain()
        if linger:
            await asyncio.sleep(linger)
            return None
        line = await asyncio.wait_for(reader.readline(), 60)
        status = int(line.split()[1]) if line else None
        if sentences is not None and status is not None and status >= 400:
            sentences.append((await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")[2])
        return status
    except OSError:
        return None
    finally:
        writer.close()


def request(body, path=b"/score", kind=b"application/json", length=None):
    size = len(body) if length is None else length
    return b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        path,
        kind,
        size,
        body,
    )


def test_a_full_queue_answers_429_and_everyone_is_answered(path):
    body = json.dumps({"rows": [[0.5, 1.0]] * 200}).encode()

    async def storm(port):
        return await asyncio.gather(*(send(port, request(body)) for _ in range(150)))

    with server(path, "--queue", "400") as (port, _):
        codes = asyncio.run(storm(port))
        assert set(codes) <= {200, 429}
        assert codes.count(200) >= 2
        assert score(port) == 200
        counted = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert f"dissensus_rows_total {200.0 * codes.count(200) + 1}" in counted


def test_stopping_answers_what_was_accepted(path):
    body = json.dumps({"rows": [[0.5, 1.0]] * 4000}).encode()

    async def work(port, process):
        jobs = [asyncio.create_task(send(port, request(body))) for _ in range(6)]
        await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        process.terminate()
        return await asyncio.gather(*jobs)

    with server(path, "--queue", "100000") as (port, process):
        codes = asyncio.run(work(port, process))
        assert codes.count(200) > 1
        assert set(codes) <= {200, None}  # None: it had not been accepted yet


def hostile(rng):
    """Make one request that is wrong, and say which answers are right."""
    numbers = [rng.choice([0, 1, -1, 1e308, 1e-320, "1", None, [], {}, True]) for _ in range(rng.randrange(4))]
    bodies = [
        bytes(rng.randrange(256) for _ in range(rng.randrange(200))),
        json.dumps({"rows": numbers}).encode(),
        json.dumps({"rows": [numbers]}).encode(),
        json.dumps({"rows": [[1, 2]], "limit": rng.choice([-1, 2, "x", [], True])}).encode(),
        json.dumps({rng.choice(["rows", "inputs", "x"]): rng.choice([1, "a", {}, [[[]]]])}).encode(),
        b'{"rows":' + b"[" * rng.randrange(3000),
        b'{"rows":[[' + b"9" * rng.randrange(6000) + b",1]]}",
        b'{"rows":[[NaN,Infinity]]}',
        json.dumps(
            {"inputs": [{"name": "x", "shape": [1, rng.randrange(-3, 10**12)], "datatype": "FP32", "data": [1]}]}
        ).encode(),
    ]
    body = rng.choice(bodies)
    address = rng.choice(
        [b"/score", b"/v2/models/tiny/infer", b"/v2/models/%ff/infer", b"/", b"/../../etc/passwd", b"/v2"]
    )
    return rng.choice(
        [
            request(body, address),
            request(body, address),
            request(body, address, kind=b"text/xml"),
            request(body, address, length=10**12) + b"x" * 100,
            b"GET "
            + address
            + b" HTTP/1.1\r\nHost: x\r\n"
            + b"A: b\r\n" * rng.randrange(50)
            + b"Connection: close\r\n\r\n",
            bytes(rng.randrange(256) for _ in range(rng.randrange(1, 300))) + b"\r\n\r\n",
            b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\nZZ\r\n\r\n",
        ]
    )


def test_ten_thousand_hostile_requests(path):
    rng = random.Random(0)

    async def attack(port):
        codes, sentences = [], []
        for _ in range(200):
            jobs = [send(port, hostile(rng), rng.choice([0] * 60 + [0.5]), sentences) for _ in range(50)]
            codes += await asyncio.gather(*(asyncio.wait_for(job, 120) for job in jobs))
        return codes, sentences

    with server(path, "--most-bytes", "5000") as (port, _):
        codes, sentences = asyncio.run(attack(port))
        assert len(codes) == 10_000
        answered = {code for code in codes if code is not None}
        assert answered <= {200, 400, 404, 405, 408, 413, 415, 429}
        assert len(sentences) > 5000
        for said in sentences:
            # What is no HTTP at all does not reach the application.
            sentence = json.loads(said)["error"] if said.startswith(b"{") else said.decode()
            assert sentence.endswith(".") or "Invalid HTTP request received." in sentence, said
        assert score(port) == 200


def test_slow_clients_are_closed_and_do_not_stop_others(path):
    async def work(port):
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        for place, (_, writer) in enumerate(slow):
            writer.write(b"POST /sc" if place % 2 else request(ROW, length=1000))
        start = time.monotonic()
        assert await send(port, request(ROW)) == 200
        for place, (reader, writer) in enumerate(slow):
            line = await asyncio.wait_for(reader.readline(), 120)
            assert line == (b"" if place % 2 else b"HTTP/1.1 408 Request Timeout\r\n")
            writer.close()
        assert time.monotonic() - start > 5

    with server(path) as (port, _):
        asyncio.run(work(port))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestRemovedIn10Warning")
def test_the_schema_holds(path):
    pytest.importorskip("schemathesis")
    with server(path) as (port, _):
        found = subprocess.run(
            [
                sys.executable,
                "-m",
                "schemathesis.cli",
                "run",
                f"http://127.0.0.1:{port}/openapi.json",
                "--checks=all",
                # Shapes that fit their data and finite scores cannot be written into a schema.
                "--exclude-checks=positive_data_acceptance",
                "--max-examples=50",
                "--seed=1",
            ],
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-1000:]
        assert score(port) == 200


def test_https(path, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    subject = "/CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout k.pem -out c.pem -days 1 -subj {subject}"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    port = free_port()
    options = ["--tls-cert", str(tmp_path / "c.pem"), "--tls-key", str(tmp_path / "k.pem")]
    command = [sys.executable, "-m", "dissensus", "serve", str(path), "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "DISSENSUS_API_KEY": "k"})
    try:
        import ssl

        context = ssl.create_default_context(cafile=str(tmp_path / "c.pem"))
        with httpx.Client(verify=context, base_url=f"https://127.0.0.1:{port}", timeout=30) as client:

            def ready():
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/v2/health/ready").status_code == 200

            wait_until(ready)
            assert client.get("/v2").status_code == 401
            assert client.get("/v2", headers={"Authorization": "Bearer k"}).status_code == 200
    finally:
        process.terminate()
        process.wait(60)


def elsewhere(address):
    """Where a page went beside its own server."""
    return [] if address.startswith(("http://127.0.0.1:", "data:", "blob:")) else [address]


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip(f"none of {', '.join(NAMES)} is on the path")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as tool:
        yield tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])


@pytest.mark.browser
@pytest.mark.parametrize("what", ["values", "table", "image"])
def test_the_page_in_a_browser(browser, path, tmp_path, what):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    from dissensus.data.tables import TableEncoder

    file = path
    if what == "table":
        table = {"town": ["Ulm", "Bonn", None] * 10, "joined": [f"2020-01-{day:02}" for day in range(1, 31)]}
        file = write_model(tmp_path / "m.onnx", TableEncoder.fit(table).to_json(), dtype=np.float64)
    elif what == "image":
        file = write_model(tmp_path / "m.onnx", image=True)
    with server(file) as (port, _):
        for scheme, width in (("light", 375), ("dark", 1280)):
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            said = []
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda problem, said=said: said.append(str(problem)))
            page.on("request", lambda request, said=said: said.extend(elsewhere(request.url)))
            page.goto(f"http://127.0.0.1:{port}/")
            if what == "image":
                drop_red_image(page)
            else:
                page.get_by_label("Value 1" if what == "values" else "town").focus()
                page.get_by_role("button", name="Predict").press("Enter")
            page.wait_for_selector(".answer")
            page.wait_for_selector("#drift polyline.path")
            verdict = page.locator(".verdict").inner_text()
            assert verdict.split(":")[0] in ("✓ Familiar", "⚠ Unlike what the ensemble knows")
            if what == "image":
                assert page.locator(".answer").inner_text().startswith("red")
                assert "p = 0.3679" in verdict  # exp(-1): as red as can be
            assert page.locator("table").count() == 2
            assert "2 of 2" in page.locator("table").first.inner_text()
            assert page.evaluate("document.documentElement.scrollWidth") == width
            found = axe.Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            assert said == []
            page.close()


def drop_red_image(page):
    """Drop a picture of 40 x 30 red pixels on the page."""
    dropped = page.evaluate_handle(
        """async () => {
            const canvas = new OffscreenCanvas(40, 30), context = canvas.getContext("2d");
            context.fillStyle = "#ff0000";
            context.fillRect(0, 0, 40, 30);
            const held = new DataTransfer();
            held.items.add(new File([await canvas.convertToBlob()], "red.png", { type: "image/png" }));
            return held;
        }"""
    )
    page.wait_for_selector(".drop")
    page.dispatch_event(".drop", "drop", {"dataTransfer": dropped})


@pytest.mark.skipif(not os.path.exists("/proc"), reason="looks for libraries in /proc")
def test_a_run_is_exported_and_served_without_torch(tmp_path):
    pytest.importorskip("onnxscript")
    x = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=(x[:, 0] > 0).astype(int))
    (tmp_path / "recipe.toml").write_text(
        '[data]\npath = "data.npz"\ncalibration = 0.5\n[model]\nname = "mlp"\nhidden = [8]\n[training]\nepochs = 2\n'
    )
    command = [sys.executable, "-m", "dissensus", "train", "recipe.toml", "-o", "run"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    with server(tmp_path / "run") as (port, process):
        answer = httpx.post(f"http://127.0.0.1:{port}/score", json={"rows": [[3.0, 0.0]]}).json()["rows"][0]
        assert answer["prediction"] == "1"
        assert "p_value" in answer
        with open(f"/proc/{process.pid}/maps") as maps:
            loaded = maps.read()
        assert "onnxruntime" in loaded
        assert "libtorch" not in loaded
