"""Requests a second that `dissensus serve` answers: single rows, eight connections, five MLPs.

python benchmarks/serving.py --seconds 60 --record benchmarks/serving.json
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROW = [0.1 * value for value in range(8)]


def make_model(path: Path) -> None:
    """Export five MLPs with an alarm, as issue and documentation describe them."""
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


async def connection(port: int, body: bytes, stop: float, seconds: list[float], errors: list[str]) -> None:
    """Send one request after another on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    )
    while time.perf_counter() < stop:
        start = time.perf_counter()
        writer.write(head + body)
        headers = await reader.readuntil(b"\r\n\r\n")
        length = int(headers.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        seconds.append(time.perf_counter() - start)
        if not headers.startswith(b"HTTP/1.1 200"):
            errors.append(headers.split(b"\r\n")[0].decode())
    writer.close()


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(port: int, pid: int, duration: float, connections: int) -> dict[str, object]:
    """Load the server for so long; return what came of it."""
    body = json.dumps({"rows": [ROW]}).encode()
    await asyncio.gather(
        *(connection(port, body, time.perf_counter() + 2, [], []) for _ in range(connections))
    )
    seconds: list[float] = []
    errors: list[str] = []
    memory = [memory_mb(pid)]
    start = time.perf_counter()

    async def watch() -> None:
        while time.perf_counter() < start + duration - 1:
            await asyncio.sleep(1)
            memory.append(memory_mb(pid))

    jobs = [connection(port, body, start + duration, seconds, errors) for _ in range(connections)]
    await asyncio.gather(watch(), *jobs)
    ordered = sorted(seconds)
    return {
        "requests_per_second": round(len(seconds) / duration, 1),
        "p50_ms": round(1000 * ordered[len(ordered) // 2], 2),
        "p99_ms": round(1000 * ordered[int(0.99 * len(ordered))], 2),
        "largest_ms": round(1000 * ordered[-1], 2),
        "errors": len(errors),
        "memory_mb": {
            "first": round(memory[0], 1),
            "last": round(memory[-1], 1),
            "most": round(max(memory), 1),
        },
        "seconds": duration,
        "connections": connections,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder) / "model.onnx"
        if options.model is None:
            subprocess.run([sys.executable, __file__, "--model", str(path), "--seconds", "0"], check=True)
        elif options.seconds == 0:
            make_model(path)
            return
        command = [sys.executable, "-m", "dissensus", "serve", str(path), "--port", str(options.port)]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_for(options.port)
            found = asyncio.run(measure(options.port, server.pid, options.seconds, options.connections))
        finally:
            server.terminate()
            server.wait(30)
    found |= {"date": time.strftime("%Y-%m-%d"), "machine": platform.machine(), "cores": os.cpu_count()}
    found["load_before"] = os.getloadavg()[2]
    print(json.dumps(found, indent=2))
    if options.record is not None:
        options.record.write_text(json.dumps(found, indent=2) + "\n")


def wait_for(port: int, seconds: float = 60) -> None:
    """Wait until the server listens."""
    import socket

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("The server did not start.")


if __name__ == "__main__":
    main()
