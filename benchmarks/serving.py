"""Requests a second that `dissensus serve` answers: single rows, eight connections, five MLPs.

    python benchmarks/serving.py

takes about 70 s, writes docs/serving.json with machine, versions and date, and the figure of docs/deployment.md from it.
"""

import argparse
import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD, PAGE = ROOT / "docs" / "serving.json", ROOT / "docs" / "deployment.md"
START, END = "<!-- from docs/serving.json -->\n", "\n<!-- end -->"
PACKAGES = ("onnxruntime", "fastapi", "starlette", "uvicorn", "numpy")
BODY = json.dumps({"rows": [[0.1 * value for value in range(8)]]}).encode()
REQUEST = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)
# Before anything counts, the server answers for so long.
WARM_UP_SECONDS = 3.0


def make_model(path: Path) -> None:
    """Export five MLPs with an alarm."""
    import torch
    from torch import nn

    import dissensus as ds

    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    ens = ds.DeepEnsemble(make, num_members=5)
    ds.fit(ens, (x[:500], y[:500]), epochs=5)
    ds.export(ens, path, example=x[500:], alarm=ds.Alarm.calibrate(ens, x[500:]))


class Connection(asyncio.Protocol):
    """Sends one request after another; reads no more of an answer than its status and length."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.seconds: list[float] = []
        self.errors: list[str] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        """Send the first request."""
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        """Note how long a whole answer took, and send the next request."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]):
            return
        now = time.perf_counter()
        self.seconds.append(now - self._sent)
        if not head.startswith(b"HTTP/1.1 200"):
            self.errors.append(head.split(b"\r\n")[0].decode())
        self._received = b""
        if now < self.until:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, problem: Exception | None) -> None:
        """Count a connection that ended too early as an error."""
        if time.perf_counter() < self.until:
            self.errors.append(f"connection lost: {problem}")
        self.ended.set_result(None)


async def load(port: int, seconds: float, connections: int) -> list[Connection]:
    """Keep so many connections busy for so long."""
    loop, until = asyncio.get_running_loop(), time.perf_counter() + seconds
    made = [(await loop.create_connection(lambda: Connection(until), "127.0.0.1", port))[1] for _ in range(connections)]
    await asyncio.gather(*(connection.ended for connection in made))
    return made


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(port: int, pid: int, duration: float, connections: int) -> dict[str, Any]:
    """Load the server for so long; return what came of it."""
    await load(port, WARM_UP_SECONDS, connections)
    memory = [memory_mb(pid)]

    async def watch() -> None:
        while True:
            await asyncio.sleep(1)
            memory.append(memory_mb(pid))

    watching = asyncio.create_task(watch())
    taken, start = processor_seconds(pid), time.perf_counter()
    done = await load(port, duration, connections)
    elapsed, taken = time.perf_counter() - start, processor_seconds(pid) - taken
    watching.cancel()
    seconds = sorted(second for connection in done for second in connection.seconds)
    return {
        "requests_per_second": round(len(seconds) / elapsed, 1),
        "requests": len(seconds),
        "p50_ms": round(1000 * seconds[len(seconds) // 2], 2),
        "p99_ms": round(1000 * seconds[int(0.99 * len(seconds))], 2),
        "largest_ms": round(1000 * seconds[-1], 2),
        "errors": sum(len(connection.errors) for connection in done),
        "processor_ms_per_request": round(1000 * taken / len(seconds), 3),
        "memory_mb": {"first": round(memory[0], 1), "last": round(memory[-1], 1), "most": round(max(memory), 1)},
        "seconds": round(elapsed, 1),
        "connections": connections,
    }


def environment() -> dict[str, Any]:
    """Return where and when this runs; `load` is what else the machine has been doing in the last minute."""
    names = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }


def sentence(record: dict[str, Any]) -> str:
    """Return what the documentation says of a record."""
    memory = record["memory_mb"]
    return (
        f"Measured with `benchmarks/serving.py` ({record['date']}, {record['cores']} cores of an {record['processor']}, which the "
        f"client shares; load {record['load_before']} before): five MLPs, single rows, {record['connections']} connections: "
        f"{record['requests_per_second']:.0f} requests/s for {record['seconds']:.0f} s, {record['errors']} errors; half are answered "
        f"within {record['p50_ms']:.1f} ms, 99 % within {record['p99_ms']:.1f} ms. A request takes "
        f"{record['processor_ms_per_request']:.2f} ms of processor time; memory went from {memory['first']:.0f} to "
        f"{memory['last']:.0f} MB."
    )


def with_sentence(page: str, record: dict[str, Any]) -> str:
    """Return a page with the figure of a record between its marks."""
    before, rest = page.split(START)
    return before + START + sentence(record) + END + rest.split(END, 1)[1]


def wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    """Wait until the server listens."""
    while server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("The server did not start.")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--model", type=Path, help="an exported file; made where there is none")
    parser.add_argument("--dry", action="store_true", help="print only")
    options = parser.parse_args()
    found = environment()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder) / "model.onnx"
        if not path.exists():
            # In a process of its own, so that torch's threads and memory are not in this one.
            with ProcessPoolExecutor(1, get_context("spawn")) as maker:
                maker.submit(make_model, path).result()
        command = [sys.executable, "-m", "dissensus", "serve", str(path), "--port", str(options.port)]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_for(options.port, server)
            found = asyncio.run(measure(options.port, server.pid, options.seconds, options.connections)) | found
        finally:
            server.terminate()
            server.wait(60)
    print(json.dumps(found, indent=1))
    if not options.dry:
        RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(with_sentence(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
