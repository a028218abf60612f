"""`dissensus bench` without typer and rich, for machines that have torch and little else.

    python benchmarks/speed.py [--device cuda] [--cases small-mlps,heads,resnet] [--quick] [--output DIR]
    python benchmarks/speed.py --device cpu --quick --runs 5 --store benchmarks/reference.json

Figures are left out where matplotlib is not installed. Stored ratios are the lowest of all runs: a check against them fails
when something became slower, not when the machine was lucky on the day they were stored.
"""

import argparse
import json
from pathlib import Path

from dissensus_bench.cases import CASES
from dissensus_bench.check import keep_worse, read_stored
from dissensus_bench.one_run import run


def names(given: str) -> list[str]:
    return given.split(",")


def lowest_ratios(files: list[Path]) -> dict[str, object]:
    first, *others = map(read_stored, files)
    results = first["results"]
    for other in others:
        results = [keep_worse(*pair) for pair in zip(results, other["results"], strict=True)]
    return {"about": first["about"] | {"runs": len(files)}, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--cases", type=names, help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--engines", type=names, help="each case's own by default")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"))
    parser.add_argument("--runs", type=int, default=1, help="how often; each run has a folder of its own")
    parser.add_argument("--store", type=Path, help="write the lowest ratios of all runs to this file")
    options = parser.parse_args()
    folders = [options.output / str(index) if options.runs > 1 else options.output for index in range(options.runs)]
    for folder in folders:
        run(folder, device=options.device, cases=options.cases, engines=options.engines, quick=options.quick)
    if options.store is not None:
        stored = lowest_ratios([folder / "results.json" for folder in folders])
        options.store.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
