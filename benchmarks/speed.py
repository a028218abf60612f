"""`dissensus bench` without typer and rich, for machines that have torch and little else.

    python benchmarks/speed.py [--device cuda] [--cases small-mlps,heads,resnet] [--quick] [--output DIR]

Figures are left out where matplotlib is not installed.
"""

import argparse
from pathlib import Path

from dissensus.bench.cases import CASES
from dissensus.bench.one_run import run


def names(given: str) -> list[str]:
    return given.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--cases", type=names, help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--engines", type=names, help="each case's own by default")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    run(
        options.output,
        device=options.device,
        cases=options.cases,
        engines=options.engines,
        quick=options.quick,
    )


if __name__ == "__main__":
    main()
