"""The stored benchmark runs in, `docs/results/speed.md` and its figure out: `python -m dissensus_bench.page`.

`benchmarks/records/h200.json` is the `results.json` of `python benchmarks/speed.py --device cuda`, `benchmarks/reference.json` that of
quick runs on one CPU thread. The README and the first page of the documentation quote `headlines`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dissensus_bench.cases import Result

if TYPE_CHECKING:
    import matplotlib.figure

ROOT = Path(__file__).parents[2]
GPU, CPU = ROOT / "benchmarks" / "records" / "h200.json", ROOT / "benchmarks" / "reference.json"
PAGE = ROOT / "docs" / "results" / "speed.md"
WORDS = Path(__file__).with_name("speed.md")
OURS, SMALL = "ds.fit, compiled", "20 x 10-30-30-1,"
TRAINING = ("small-mlps", "heads", "ldr-imagenet-size", "resnet", "transformers")


def load(path: Path) -> tuple[Mapping[str, Any], list[Result]]:
    """Return what a stored run was made on, and its results."""
    record = json.loads(path.read_text(encoding="utf-8"))
    return record["about"], record["results"]


def side(results: Sequence[Result], start: str, name: str) -> float:
    """Return the milliseconds of one side of the job whose description begins so."""
    (found,) = [result for result in results if result["what"].startswith(start)]
    return float(found["sides"][name]["ms"])


def headlines() -> dict[str, str]:
    """Return the numbers that other pages quote, as they are written there."""
    results, small = load(GPU)[1], load(CPU)[1]
    five, one = "5 ResNet-18, batch", "one eager model"
    ours = side(results, five, OURS)
    scores = "5 ResNet-18, 8192"
    return {
        "small loop": f"{side(small, SMALL, 'plain loop'):.1f}",
        "small": f"{side(small, SMALL, 'ds.fit, captured'):.2f}",
        "five against one": f"{ours / side(results, five, one):.2f} ×",
        "five": f"{ours:.2f}",
        "one": f"{side(results, five, one):.1f}",
        "loop": f"{side(results, five, 'plain loop'):.1f}",
        "scores": f"{side(results, scores, 'bare forward passes') / side(results, scores, 'ds.predict_scores'):.2f} ×",
    }


def aims(results: Sequence[Result]) -> list[list[str]]:
    """Return what was aimed at, what the record says, and whether that is enough."""
    five, small, heads = "5 ResNet-18, batch", SMALL, "2 of {} heads, 1281167 features"

    def ratio(job: str, above: str, below: str = OURS) -> float:
        return side(results, job, above) / side(results, job, below)

    one, bare = 1 / ratio(five, "one eager model"), 1 / ratio(five, "one eager model, no augmentation")
    costs = [side(results, heads.format(number), OURS) for number in (2, 50, 1000)]
    growth = costs[-1] / costs[0]
    loop, jax = ratio(small, "plain loop"), ratio(small, "JAX vmap + scan")
    wide = ratio("10 x 10-128-128-1", "JAX vmap + scan")
    bert, vit = ratio("5 BERT-shaped", "plain loop"), ratio("5 ViT", "plain loop")
    tree = ratio("20 networks of two inputs", "one tensor, compiled", "two inputs, compiled")
    predicted = "bare forward passes"
    scores = ratio("5 ResNet-18, 8192", predicted, "ds.predict_scores")
    tiny = ratio("5 x 64-512-512-10", predicted, "ds.predict_scores")
    return [
        [
            "five ResNet-18 at most 1.05 × the step of one eager model, at least 5 × faster than the loop",
            f"{one:.2f} × one with, {bare:.2f} × one without augmentation; {ratio(five, 'plain loop'):.1f} × and "
            f"{ratio(five, 'plain loop, no augmentation'):.1f} ×",
            _reached(max(one, bare) <= 1.05 and ratio(five, "plain loop") >= 5),
        ],
        [
            "the honest ratio: against one compiled and captured model",
            f"{1 / ratio(five, 'one model, ds.fit, compiled'):.1f} ×",
            "5 would be one after the other",
        ],
        [
            "20 MLPs at most 0.06 ms, 300 × the loop",
            f"{side(results, small, OURS):.3f} ms, {loop:.0f} ×",
            _reached(side(results, small, OURS) <= 0.06 and loop >= 300),
        ],
        [
            "2 of M loss-guided heads of ImageNet's size at most 0.18 ms, 1.1 × from M = 2 to 1000",
            f"{', '.join(f'{cost:.3f}' for cost in costs)} ms for M = 2, 50, 1000: {growth:.2f} ×",
            _reached(max(costs) <= 0.18 and growth <= 1.1, "time reached, growth not"),
        ],
        [
            "predictions with all scores at 0.9 of the bare passes' speed",
            f"{scores:.2f} for five ResNet-18, {tiny:.2f} for 5 × 64-512-512-10",
            _reached(min(scores, tiny) >= 0.9, "reached where networks cost something"),
        ],
        [
            "five BERT-shaped networks, and five ViT, at least 4 × faster than the loop",
            f"{bert:.1f} × and {vit:.0f} ×",
            _reached(min(bert, vit) >= 4),
        ],
        ["two inputs as fast as one tensor", f"{tree:.2f} × the speed", _reached(tree >= 0.95)],
        ["as fast as JAX", f"{jax:.2f} for 20 MLPs, {wide:.2f} for 10 wider ones", _reached(min(jax, wide) >= 1)],
    ]


def _reached(yes: bool, otherwise: str = "not reached") -> str:
    return "reached" if yes else otherwise


def times_table(results: Sequence[Result], cases: Sequence[str]) -> str:
    """Return milliseconds of every side, and how many times as long as our fastest it took."""
    lines = [["work", "side", "ms", "× ours", "first epoch, s", "peak, GB"]]
    for result in results:
        if result["case"] not in cases:
            continue
        own = [timed["ms"] for name, timed in result["sides"].items() if name.startswith(("ds.", "two inputs"))]
        for place, (name, timed) in enumerate(result["sides"].items()):
            extra = [f"{timed[key]:.3g}" if key in timed else "" for key in ("first_epoch_s", "peak_GB")]
            shown = f"`{name.replace(', ', '`, ', 1)}" if name.startswith("ds.") else name
            shown += "`" if name.startswith("ds.") and "," not in name else ""
            lines.append(
                [
                    "" if place else result["what"].replace(" x ", " × "),
                    shown,
                    f"{timed['ms']:.3g}",
                    f"{timed['ms'] / min(own):.3g}",
                    *extra,
                ]
            )
    return _table(lines)


def _table(lines: Sequence[Sequence[str]]) -> str:
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([rows[0], "|" + "---|" * len(lines[0]), *rows[1:]])


def page() -> str:
    """Return the page: the words of `speed.md` beside this file, with what the records say put in."""
    (about, gpu), (cpu_about, cpu) = load(GPU), load(CPU)
    parts = {
        "aims": _table([["aim", "measured", ""], *aims(gpu)]),
        "gpu": f"One {about['gpu']}, {about['cores']} cores of an {about['processor'].replace('(R)', '')}, torch "
        f"{about['versions']['torch'].split('+')[0]} with CUDA {about['cuda']}, JAX {about['versions']['jax']}, Python "
        f"{about['python']}; {about['date']}.",
        "training": times_table(gpu, TRAINING),
        "trees": times_table(gpu, ["two-inputs"]),
        "inference": times_table(gpu, ["inference"]),
        "cpu": f"One thread of an {cpu_about['processor'].replace('(R)', '')}, torch {cpu_about['versions']['torch'].split('+')[0]}, "
        f"Python {cpu_about['python']}, {cpu_about['date']}: of {cpu_about['runs']} quick runs on a "
        "busy machine, the one whose ratio was lowest.",
        "cpu-times": times_table(cpu, ["small-mlps", "heads", "inference"]),
        "cpu-scaling": times_table(cpu, ["scaling"]),
    }
    text = WORDS.read_text(encoding="utf-8")
    for name, value in parts.items():
        text = text.replace(f"<!-- {name} -->", value)
    return text


def figure(results: Sequence[Result]) -> "matplotlib.figure.Figure":
    """Draw milliseconds a step of every side, one panel for each kind of work."""
    from matplotlib.ticker import NullLocator

    from dissensus import plots

    jobs = (SMALL, "2 of 50 heads 768", "5 ResNet-18, batch")
    drawn, axes = plots.panels(columns=3, width=3.6, height=2.6)
    for ax, start in zip(axes, jobs, strict=True):
        (result,) = [each for each in results if each["what"].startswith(start)]
        sides = {name: timed["ms"] for name, timed in result["sides"].items() if "fewest" not in name}
        ordered = sorted(sides, key=lambda name: -sides[name])
        colours = [plots.COLOURS[1] if "ds.fit" in name else plots.COLOURS[0] for name in ordered]
        ax.scatter([sides[name] for name in ordered], range(len(ordered)), color=colours, s=28)
        ax.set_yticks(range(len(ordered)), ordered, fontsize=7)
        ax.set(title=result["what"].split(",")[0].replace(" x ", " × "), xlabel="ms a step", xscale="log")
        low, high = min(sides.values()), max(sides.values())
        ax.set_xticks([tick for tick in (0.02, 0.1, 0.5, 2, 5, 20, 50) if low / 1.5 < tick < 1.5 * high])
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_locator(NullLocator())
        ax.margins(0.12, 0.1)
    return drawn


def write() -> None:
    """Write the page and its figure."""
    from matplotlib import rc_context

    PAGE.write_text(page(), encoding="utf-8")
    with rc_context({"svg.hashsalt": "dissensus"}):
        figure(load(GPU)[1]).savefig(PAGE.with_suffix(".svg"), metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    write()
