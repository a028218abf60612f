"""`dissensus export` and `serve`: a trained run out of the notebook."""

import asyncio
import contextlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dissensus._files import checkpoint_digest
from dissensus._signatures import need
from dissensus.cli.options import AllowImport, RunFolder, say

_SERVED = "served.onnx"


def export(
    run: RunFolder,
    to: Annotated[str, Option("--to", metavar="FORMAT", help="onnx, or pt2 for torch.export.load.")] = "onnx",
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Where to write.", show_default="RUN/model.onnx")
    ] = None,
    precision: Annotated[
        str, Option(help="fp32, fp16, or int8 for weights in 8 bits; refused where scores change their order.")
    ] = "fp32",
    false_alarms: Annotated[
        float | None,
        Option(help="The alarm's rate of false alarms, unless a caller gives another.", show_default="the run's"),
    ] = None,
    members: Annotated[bool, Option("--members", help="Give each member's own prediction, too.")] = False,
    allow_import: AllowImport = False,
) -> None:
    """Write a run as one file: prediction, uncertainty, alarm, and what happens to inputs before.

    The alarm is the run's, calibrated on rows that it held out. The file is compared with the run before it is called done.
    """
    from dissensus.recipes import load_run
    from dissensus.recipes.alarms import ALARM
    from dissensus.recipes.exporting import export_run

    if to not in ("onnx", "pt2"):
        raise ValueError(f"--to is onnx or pt2; got {to!r}.")
    path = output or run / f"model.{to}"
    if path.suffix != f".{to}":
        raise ValueError(f"With --to {to} the file ends in .{to}; got {path.name!r}.")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        done = export_run(
            load_run(run, allow_import=allow_import),
            run,
            path,
            precision=precision,
            false_alarms=false_alarms,
            member_outputs=members,
        )
    for warning in told:
        if warning.category is UserWarning:  # such as that the alarm can never ring with so few rows
            say(str(warning.message))
    typer.echo(
        f"{done.path}: {done.size / 1024:.0f} kB; largest difference from the run {done.largest_error:.1e}, rank correlation of "
        f"scores {done.rank_correlation:.4f}."
    )
    if not (run / ALARM).exists():
        say("The run held no rows out, so the file has no alarm: train with calibration = 0.15 under [data].")
    if to == "onnx":
        typer.echo(f"Next: dissensus serve {done.path}")


def serve(
    source: Annotated[Path, Argument(metavar="RUN|FILE", help="A trained run, or an exported .onnx file.")],
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    workers: Annotated[int, Option(min=1, help="Processes; one that dies is started again.")] = 1,
    threads: Annotated[int, Option(min=0, help="Threads of one prediction; 0 for all processors.")] = 1,
    name: Annotated[
        str | None, Option(help="The model's name in addresses.", show_default="of the run or file")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        Option(metavar="FILE", help="Ask for the key in this file; or in the environment, DISSENSUS_API_KEY."),
    ] = None,
    tls_cert: Annotated[Path | None, Option(metavar="FILE", help="TLS certificate.")] = None,
    tls_key: Annotated[Path | None, Option(metavar="FILE", help="Its private key.")] = None,
    queue: Annotated[int, Option(min=1, help="Rows that may wait; more get 429.")] = 1024,
    most_rows: Annotated[int, Option(min=1, help="Rows that a request may have.")] = 4096,
    most_bytes: Annotated[int, Option(min=1, help="Bytes that a request may have.")] = 8 << 20,
    drift_threshold: Annotated[
        float, Option(min=1.0, help="Unchanged inputs ring the drift alarm once in so many streams.")
    ] = 100.0,
    log_level: Annotated[str, Option(help="debug, info (a line a request), warning or error.")] = "info",
    allow_import: AllowImport = False,
) -> None:
    """Answer HTTP requests: /score for rows, /v2 for KServe's protocol, /metrics, and a page at /.

    A run is exported first, in a process of its own; the server itself loads no torch.
    """
    need("Serving", "serve", "fastapi", "uvicorn", "prometheus_client", "onnxruntime")
    from dissensus.serving import Settings
    from dissensus.serving import serve as listen
    from dissensus.serving.model import Model

    if log_level not in ("debug", "info", "warning", "error"):
        raise ValueError(f"--log-level is debug, info, warning or error; got {log_level!r}.")
    if (tls_cert is None) != (tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together; give both.")
    path = _exported(source, allow_import) if source.is_dir() else source
    settings = Settings(
        path=str(path),
        name=name or source.resolve().stem,
        host=host,
        port=port,
        workers=workers,
        threads=threads,
        api_key=_api_key(api_key_file),
        certificate=None if tls_cert is None else str(tls_cert),
        key=None if tls_key is None else str(tls_key),
        queue_rows=queue,
        most_rows=most_rows,
        most_bytes=most_bytes,
        drift_threshold=drift_threshold,
    )
    Model(path)  # refuses a file that cannot be served before anything listens
    _check_free(host, port)
    say(f"http{'s' if tls_cert else ''}://{host}:{port} serves {settings.name} of {path}")
    listen(settings, log_level)


def _check_free(host: str, port: int) -> None:
    """Refuse an address at which nothing can listen, before it is announced."""

    async def listen() -> None:
        (await asyncio.start_server(lambda *_: None, host, port)).close()

    try:
        asyncio.run(listen())
    except OSError as problem:
        why = os.strerror(problem.errno or 0)
        raise ValueError(f"Nothing can listen at {host}:{port}: {why}. Choose another --port.") from None


def _api_key(file: Path | None) -> str | None:
    key = os.environ.get("DISSENSUS_API_KEY") if file is None else file.read_text(encoding="utf-8").strip()
    if key == "":
        raise ValueError("The API key is empty; leave it out to let all requests in.")
    return key


def _exported(run: Path, allow_import: bool) -> Path:
    """Return a run's file for the server, written anew by another process where it is of another ensemble."""
    from dissensus.serving.model import Model

    path = run / _SERVED
    with contextlib.suppress(ValueError):  # there is none, or none that can be read
        if Model(path).facts.get("ensemble") == checkpoint_digest(run, "ensemble"):
            return path
    say(f"Exporting {run} ...")
    command = [sys.executable, "-m", "dissensus", "export", str(run), "-o", str(path), "--members"]
    command += ["--allow-import"] if allow_import else []
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)  # it has said what is wrong
    return path
