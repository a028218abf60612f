"""How training scales over processes, what a step sends, and what memory `dissensus score` takes: docs/results/scaling.md.

python benchmarks/scaling.py            # 1, 2 and 4 processes on this machine: about two minutes; writes record and page
python benchmarks/scaling.py --engines  # eager and captured steps of small networks alone: a minute
python benchmarks/scaling.py --score    # ten million rows through `dissensus score`: about ten minutes
python benchmarks/scaling.py --page     # the page again, from the record
"""

import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import matplotlib.figure

RESULTS = Path(__file__).parents[1] / "docs" / "results"
RECORD, PAGE = RESULTS / "scaling.json", RESULTS / "scaling.md"
PROCESSES = (1, 2, 4)
MEMBERS, BATCH, INPUTS, WIDTH, CLASSES, STEPS = 8, 128, 256, 512, 100, 20
OBJECTIVES = ("Independent", "Joint", "Joint, outputs gathered", "LossGuided, all active")
# Small networks, whose steps are mostly Python: what programs gain.
ENGINES = ("eager", "captured")
SMALL_MEMBERS, SMALL_INPUTS, SMALL_WIDTH, SMALL_EPOCHS = 20, 20, 32, 6
COLUMNS, ROWS = 20, 10_000_000


class Meter:
    """Counts and times what a process hands to collective operations."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.bytes, self.calls, self.seconds = 0, 0, 0.0
        for name in ("all_gather", "all_reduce"):
            setattr(dist, name, self._metered(getattr(dist, name)))

    def _metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def metered(tensor: Any, *arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(tensor, *arguments, **options)
            self.seconds += time.perf_counter() - start
            parts = tensor if isinstance(tensor, list) else [tensor]
            self.bytes += sum(part.numel() * part.element_size() for part in parts)
            self.calls += 1
            return result

        return metered


def loopback() -> int:
    """Return how many bytes the machine has sent to itself."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[1])


def work(folder: Path, engines: bool) -> None:
    """Be one process of a torchrun, or the only one: train with each objective, or each engine, and time the steps."""
    import torch
    import torch.distributed as dist

    import dissensus as ds
    from dissensus import objectives as obj
    from dissensus.architectures import mlp
    from dissensus.training.trainer import Trainer

    class Gathered(obj.Joint):
        needs = "outputs"

    torch.set_num_threads(1)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        dist.init_process_group("gloo")
    meter, times = Meter(), []
    take = Trainer._take_steps

    def timed(*arguments: Any) -> int:
        before = (time.perf_counter(), meter.seconds, meter.bytes, meter.calls, loopback(), time.process_time())
        taken = take(*arguments)
        after = (time.perf_counter(), meter.seconds, meter.bytes, meter.calls, loopback(), time.process_time())
        times.append([b - a for a, b in zip(before, after, strict=True)])
        return taken

    Trainer._take_steps = timed  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * BATCH, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (len(x),), generator=generator)
    made = [obj.Independent(), obj.Joint(0.5), Gathered(0.5), obj.LossGuided(0.5, active=None)]
    found: dict[str, Any] = {}
    for label, objective in zip(OBJECTIVES, made, strict=True) if not engines else ():
        times.clear()
        ens = ds.DeepEnsemble(lambda: mlp(INPUTS, [WIDTH, WIDTH], CLASSES), MEMBERS, seed=0)
        mesh = (processes, 1) if processes > 1 else None
        ds.fit(
            ens, (x, y), objective=objective, epochs=1, batch_size=BATCH, batches="shared", device="cpu",
            engine="eager", mesh=mesh, progress=False,
        )  # fmt: skip
        columns = list(zip(*times[4:], strict=True))
        found[label] = {
            "seconds": statistics.median(columns[0]),
            "collective_seconds": statistics.median(columns[1]),
            "bytes": int(statistics.median(columns[2])),
            "calls": int(statistics.median(columns[3])),
            "wire_bytes": sum(columns[4]) / len(columns[4]),
        }
    for engine in ENGINES if engines else ():
        times.clear()
        ens = ds.DeepEnsemble(lambda: mlp(SMALL_INPUTS, [SMALL_WIDTH] * 2, 3), SMALL_MEMBERS, seed=0)
        ds.fit(
            ens, (x[:, :SMALL_INPUTS], y % 3), objective=Gathered(0.5), epochs=SMALL_EPOCHS, batch_size=64, device="cpu", engine=engine,
            mesh=(processes, 1) if processes > 1 else None, progress=False,
        )  # fmt: skip
        columns = list(zip(*times[10:], strict=True))
        found[engine] = {"seconds": statistics.median(columns[0]), "processor_seconds": statistics.median(columns[5])}
    if processes > 1 and not engines:
        found["network"] = network(processes)
    if os.environ.get("RANK", "0") == "0":
        (folder / f"{processes}.json").write_text(json.dumps(found))
    if processes > 1:
        dist.destroy_process_group()


def network(processes: int) -> dict[str, float]:
    """Measure what an all-reduce takes for a few bytes and for many."""
    import torch
    import torch.distributed as dist

    def seconds(numbers: int, times: int) -> float:
        tensor, taken = torch.zeros(numbers), []
        for _ in range(times):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    few, many = seconds(64, 60), seconds(1 << 20, 20)
    sent = 2 * (processes - 1) / processes * 4 * ((1 << 20) - 64)
    return {"latency": few / (2 * (processes - 1)), "bytes_a_second": sent / max(many - few, 1e-9)}


def collective(kind: str, payload: float, processes: int, latency: float, speed: float) -> float:
    """Return the seconds of one ring operation: `reduce` of so many bytes, or `gather` of parts that make so many."""
    rounds, passes = (2 * (processes - 1), 2) if kind == "reduce" else (processes - 1, 1)
    return rounds * latency + passes * (processes - 1) / processes * payload / speed


def measure(engines: bool) -> None:
    """Train on 1, 2 and 4 processes, with each objective or each engine, and store what came out."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{Path(__file__).parents[1]}:{environment.get('PYTHONPATH', '')}"
    load = os.getloadavg()[0]
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for processes in PROCESSES:
            run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            command = (run if processes > 1 else [sys.executable]) + [
                __file__,
                "--work",
                folder,
                *(["--engines"] if engines else []),
            ]
            subprocess.run(command, check=True, env=environment)
        found = {n: json.loads((Path(folder) / f"{n}.json").read_text()) for n in PROCESSES}
    record["engines" if engines else "training"] = {
        "machine": machine(),
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "processes": found,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def machine() -> str:
    """Say what this ran on."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


RECIPE = """
[data]
path = "train.parquet"
target = "y"
[model]
name = "mlp"
hidden = [32]
[training]
epochs = 3
"""


def measure_score(rows: int) -> None:
    """Score a table of so many rows in a process of its own; store its peak of memory beside that of a hundred rows."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(path: Path, count: int, target: bool = False) -> None:
        rng = np.random.default_rng(0)
        columns = {f"x{n}": pa.float32() for n in range(COLUMNS)} | ({"y": pa.string()} if target else {})
        with pq.ParquetWriter(path, pa.schema(columns)) as writer:
            for start in range(0, count, 1 << 18):
                x = rng.standard_normal((min(1 << 18, count - start), COLUMNS), dtype=np.float32)
                table = {f"x{n}": x[:, n] for n in range(COLUMNS)}
                if target:
                    table["y"] = np.where(x[:, 0] + x[:, 1] > 0, "yes", "no")
                writer.write_table(pa.table(table, schema=pa.schema(columns)))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "train.parquet", 4000, target=True)
        (folder / "recipe.toml").write_text(RECIPE)
        subprocess.run([sys.executable, "-m", "dissensus", "train", "recipe.toml", "-o", "run"], check=True, cwd=folder)
        found = {}
        for label, count in (("idle", 100), ("scored", rows)):
            write(folder / f"{label}.parquet", count)
            found[label] = peak(folder, label)
            (folder / f"{label}.parquet").unlink()
            written = pq.read_metadata(folder / f"{label}.out.parquet").num_rows
            assert written == count, (written, count)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record["score"] = {"machine": machine(), "rows": rows, "columns": COLUMNS, **found}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def peak(folder: Path, label: str) -> dict[str, Any]:
    """Run `dissensus score`; return its largest resident memory, its seconds, and its last line of progress."""
    command = [
        sys.executable,
        "-m",
        "dissensus",
        "score",
        "run",
        f"{label}.parquet",
        "-o",
        f"{label}.out.parquet",
        "--batch-size",
        "8192",
    ]
    start = time.monotonic()
    with open(folder / "said", "w+") as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        said.seek(0)
        lines = [line.strip() for line in said if " left" in line]
    assert os.waitstatus_to_exitcode(status) == 0
    seconds = time.monotonic() - start
    return {
        "bytes": usage.ru_maxrss * 1024,
        "seconds": seconds,
        "lines": len(lines),
        "line": (lines or [""])[len(lines) // 2],
    }


# What the model of a cluster assumes: rounds of a ring between machines take so long, and links carry so much.
ASSUMED_LATENCY, ASSUMED_SPEED = 10e-6, 25e9
GPUS = (8, 16, 32, 64, 128, 256, 512)
CLUSTER_BATCH, CLUSTER_CLASSES = 128, 1000


def sent(objective: str, members: int, batch: int, classes: int) -> list[tuple[str, int]]:
    """Return the collective operations of a step on a mesh of members, and the bytes of each one's result.

    `Joint` reduces the largest and the sum of the label's probability, and the mean error; the general rule gathers all outputs.
    """
    if objective == "Independent":
        return []
    if objective == "Joint":
        return [("reduce", 4 * batch), ("reduce", 4 * batch), ("reduce", 4)]
    return [("gather", 4 * members * batch * classes)]


def predicted(objective: str, processes: int, training: dict[str, Any]) -> float:
    """Return a step's seconds by the model: the members of a process, then its collective operations."""
    alone, cores = training["processes"]["1"][objective]["seconds"], training["cores"]
    found = training["processes"][str(processes)]["network"]
    compute = alone / processes * max(1.0, processes / cores)
    operations = sent(objective, MEMBERS, BATCH, CLASSES)
    return compute + sum(
        collective(kind, payload, processes, found["latency"], found["bytes_a_second"]) for kind, payload in operations
    )


def page(record: dict[str, Any]) -> str:
    """Return docs/results/scaling.md."""
    training = record["training"]
    lines = [
        "# Scaling: processes, bytes and memory",
        "",
        "What several processes gain, what a step sends, and what memory scoring takes; see [Beyond one process](../distributed.md).",
        "",
        "| aim | measured | |",
        "|---|---|---|",
        *_aims(record),
        "",
        f"![Speed-up of 1, 2 and 4 processes on {training['cores']} cores of a busy machine, a line for each objective](scaling.svg)",
        "",
        '<details markdown="1">',
        "<summary>How it was done</summary>",
        "",
        "`python benchmarks/scaling.py` measures and writes `docs/results/scaling.json` and this page; `--score` does so for scoring.",
        "",
        "</details>",
        "",
        "## Several processes on one machine",
        "",
        f"{MEMBERS} MLPs ({INPUTS} inputs, two layers of {WIDTH}, {CLASSES} classes), batches of {BATCH}, AdamW, members spread; median of "
        f"{STEPS - 4} steps in one run, one thread a process, gloo. Machine: {training['machine']}, shared with other work (load "
        f"{training['load_before']} before), so times are rough; with {training['cores']} cores, four processes cannot be faster than two on an idle machine; on a busy one more processes get a larger share of it. "
        "*Model*: the step of one process, divided, plus each collective operation as a ring: rounds x latency + bytes / speed, both measured "
        "by an all-reduce of 256 bytes and one of 4 MB on the same processes.",
        "",
        "| objective | processes | ms a step | speed-up | in collectives, ms | model, ms | measured / model |",
        "|---|---|---|---|---|---|---|",
        *_steps(training),
        "",
        "Latency and speed found: "
        + "; ".join(
            f"{n} processes {1e6 * training['processes'][n]['network']['latency']:.0f} µs a round, "
            f"{training['processes'][n]['network']['bytes_a_second'] / 1e9:.2f} GB/s"
            for n in training["processes"]
            if n != "1"
        )
        + ". Time in collectives holds waiting for the slowest process.",
        "",
        *_engines(record["engines"]),
        "## Bytes a step",
        "",
        "Counted at the calls, for one process: the result that it gets. Beside it what a ring sends for that, and what the loopback interface saw "
        "divided by the processes (other traffic of the machine included).",
        "",
        "| objective | processes | operations | bytes of results | a ring sends | seen on the interface |",
        "|---|---|---|---|---|---|",
        *_bytes(training),
        "",
        "`Joint` needs means over members only: the probability of the label, which is reduced, instead of all members' outputs. `Independent` "
        "exchanges nothing in a step.",
        "",
        "## A model of 8 to 512 GPUs",
        "",
        f"**Not measured.** One member a GPU, batches of {CLUSTER_BATCH}, {CLUSTER_CLASSES} classes, a ring of {1e6 * ASSUMED_LATENCY:.0f} µs a "
        f"round and {ASSUMED_SPEED / 1e9:.0f} GB/s a link (assumed; a 200 Gb/s network), bytes as above. Trees, which libraries use for small "
        "messages, have log2 as many rounds. The last column is what the gather costs where `Joint` is trained by the general rule.",
        "",
        "| GPUs = members | `Joint`: bytes sent | ms, ring | ms, tree | all outputs: bytes sent | ms, ring |",
        "|---|---|---|---|---|---|",
        *_cluster(),
        "",
        "So what is small stays small: latency is all that `Joint` pays, and the gather of outputs grows with the members. Beyond the step, every check "
        "hands all weights to every process (4 bytes a parameter and member; what optimizers keep stays where it is): check seldom where members are many.",
        "",
        *_score(record.get("score")),
    ]
    return "\n".join(lines)


def _aims(record: dict[str, Any]) -> list[str]:
    """Return the rows of the table that the page opens with."""
    found, score = record["training"]["processes"], record["score"]
    faster = {
        name: [found["1"][name]["seconds"] / found[n][name]["seconds"] for n in ("2", "4")] for name in OBJECTIVES
    }
    ratios = [
        found[str(n)][name]["seconds"] / predicted(name, n, record["training"]) for name in OBJECTIVES for n in (2, 4)
    ]
    gathered, means = (found["4"][name]["bytes"] for name in ("Joint, outputs gathered", "Joint"))
    more = (score["scored"]["bytes"] - score["idle"]["bytes"]) / 1e9
    rows = [
        (
            "members spread over 2 and 4 processes",
            "; ".join(f"{n} {a:.1f} x, {b:.1f} x" for n, (a, b) in faster.items()),
            "",
        ),
        (
            "a model of the network, checked with 2 and 4",
            f"measured / model {min(ratios):.2f} to {max(ratios):.2f}",
            "busy machine",
        ),
        ("`Joint` sends means, not outputs", f"{means:,} bytes a step instead of {gathered:,}", "reached"),
        (
            f"{score['rows']:,} rows scored within 1 GB above the idle process",
            f"{more:.2f} GB",
            "reached" if more < 1 and score["rows"] >= ROWS else "open",
        ),
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def figure(training: dict[str, Any]) -> "matplotlib.figure.Figure":
    """Draw the speed-up of each objective by number of processes."""
    from dissensus import plots

    drawing, (ax,) = plots.panels(width=6.4, height=3.0)
    ends = []
    for name, colour in zip(OBJECTIVES, plots.COLOURS, strict=False):
        seconds = [training["processes"][str(n)][name]["seconds"] for n in PROCESSES]
        faster = [seconds[0] / each for each in seconds]
        ax.plot(PROCESSES, faster, "o-", color=colour, markersize=5, linewidth=1.5)
        ends.append((faster[-1], name, colour))
    height = 0.0
    for end, name, colour in sorted(ends):
        # Names that would lie on each other stand one above the other.
        height = max(end, height + 0.13)
        ax.annotate(name, (PROCESSES[-1], height), (10, 0), textcoords="offset points", color=colour, va="center")
    ax.plot((1, 2.1), (1, 2.1), "--", color=plots.NOTE_COLOUR, linewidth=1)
    ax.annotate("as many times faster", (2.1, 2.1), (6, -4), textcoords="offset points", color=plots.NOTE_COLOUR)
    ax.set_xticks(PROCESSES, [str(n) for n in PROCESSES])
    ax.set(xlabel="processes", ylabel="times faster than one", ylim=(0, 2.2))
    return drawing


def _steps(training: dict[str, Any]) -> list[str]:
    rows = []
    for objective in OBJECTIVES:
        alone = training["processes"]["1"][objective]["seconds"]
        rows.append(f"| {objective} | 1 | {1e3 * alone:.0f} | 1 | | | |")
        for processes in PROCESSES[1:]:
            found, model = (training["processes"][str(processes)][objective], predicted(objective, processes, training))
            rows.append(
                f"| {objective} | {processes} | {1e3 * found['seconds']:.0f} | {alone / found['seconds']:.2f} | "
                f"{1e3 * found['collective_seconds']:.1f} | {1e3 * model:.0f} | {found['seconds'] / model:.2f} |"
            )
    return rows


def _engines(found: dict[str, Any]) -> list[str]:
    rows = []
    for processes in PROCESSES:
        eager, captured = (found["processes"][str(processes)][name] for name in ENGINES)
        rows.append(
            f"| {processes} | {1e3 * eager['seconds']:.2f} | {1e3 * captured['seconds']:.2f} | {1e3 * eager['processor_seconds']:.2f} | "
            f"{1e3 * captured['processor_seconds']:.2f} | {eager['processor_seconds'] / captured['processor_seconds']:.1f} |"
        )
    return [
        "## Programs around the exchange",
        "",
        f'{SMALL_MEMBERS} MLPs ({SMALL_INPUTS} inputs, two layers of {SMALL_WIDTH}), batches of 64, `Joint` with all outputs gathered: `engine="captured"` '
        "replays the members' passes as programs and exchanges outputs between them. The machine was busy (load "
        f"{found['load_before']} before): the ratio is of the processor's time, which other work disturbs least.",
        "",
        "| processes | eager, ms a step | captured | eager, ms of the processor | captured | ratio |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def _bytes(training: dict[str, Any]) -> list[str]:
    rows = []
    for objective in OBJECTIVES:
        for processes in PROCESSES[1:]:
            found = training["processes"][str(processes)][objective]
            operations = sent(objective, MEMBERS, BATCH, CLASSES)
            assert found["bytes"] == sum(payload for _, payload in operations), (objective, found["bytes"])
            ring = sum(_on_the_wire(kind, payload, processes) for kind, payload in operations)
            seen = found["wire_bytes"] / processes
            rows.append(
                f"| {objective} | {processes} | {found['calls']} | {found['bytes']:,} | {ring:,.0f} | {seen:,.0f} |"
            )
    return rows


def _on_the_wire(kind: str, payload: float, processes: int) -> float:
    return (2 if kind == "reduce" else 1) * (processes - 1) / processes * payload


def _cluster() -> list[str]:
    rows = []
    for gpus in GPUS:
        joint = sent("Joint", gpus, CLUSTER_BATCH, CLUSTER_CLASSES)
        everything = sent("outputs", gpus, CLUSTER_BATCH, CLUSTER_CLASSES)
        few, all_of_it = (sum(_on_the_wire(*one, gpus) for one in operations) for operations in (joint, everything))
        ring, gather = (
            1e3 * sum(collective(*one, gpus, ASSUMED_LATENCY, ASSUMED_SPEED) for one in operations)
            for operations in (joint, everything)
        )
        tree = 1e3 * len(joint) * 2 * math.log2(gpus) * ASSUMED_LATENCY
        rows.append(f"| {gpus} | {few:,.0f} | {ring:.2f} | {tree:.2f} | {all_of_it:,.0f} | {gather:.2f} |")
    return rows


def _score(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    more = (found["scored"]["bytes"] - found["idle"]["bytes"]) / 1e9
    return [
        "## Memory of `dissensus score`",
        "",
        f"{found['rows']:,} rows of {found['columns']} columns, one parquet file, five MLPs with the alarm, batches of 8192, on {found['machine']} (shared): "
        f"**{more:.2f} GB** of resident memory at the peak above the same command with a hundred rows ({found['idle']['bytes'] / 1e9:.2f} GB), "
        f"{found['scored']['seconds']:.0f} s. A line every ten seconds says how far it is, such as `{found['scored']['line']}`.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", action="store_true")
    parser.add_argument("--score", action="store_true")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work, options.engines)
        return
    if options.score:
        measure_score(options.rows)
    elif not options.page:
        measure(options.engines)
    record = json.loads(RECORD.read_text())
    PAGE.write_text(page(record))
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "dissensus"}):
        figure(record["training"]).savefig(PAGE.with_suffix(".svg"), metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
