"""`python -m attacks [--long] [--record FILE]`: runs every attack, prints its figures, and fails where a promise was broken."""

import argparse
import json
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from attacks import interruptions, wrong_calls


def main() -> int:
    """Run the attacks; return 1 where something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--long", action="store_true", help="every kind of run, every place and every wrong call, in about ten minutes"
    )
    parser.add_argument("--record", type=Path, help="write the figures here, with machine, versions and date")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    figures = interruptions.attack(arguments.long)
    figures["wrong calls"] = wrong_calls.counts(every=1 if arguments.long else 31)
    if figures["wrong calls"]["in one sentence"] < wrong_calls.AIM * figures["wrong calls"]["refused"]:
        interruptions.PROBLEMS.append(f"less than {wrong_calls.AIM:.0%} of refusals are one clear sentence")
    for name, counts in figures.items():
        print(f"{name}: {', '.join(f'{what} {count}' for what, count in counts.items())}")
    for problem in interruptions.PROBLEMS:
        print(f"BROKEN: {problem}", file=sys.stderr)
    if arguments.record is not None:
        about = {
            "form": "long" if arguments.long else "short",
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "seconds": round(time.monotonic() - start),
            "broken": len(interruptions.PROBLEMS),
        }
        arguments.record.write_text(json.dumps({**about, "figures": figures}, indent=1) + "\n")
    return 1 if interruptions.PROBLEMS else 0


if __name__ == "__main__":
    sys.exit(main())
