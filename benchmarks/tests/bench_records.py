"""A result of the benchmark, for tests that need one and not the measuring."""

from dissensus_bench.cases import LOOP


def result(ratio=2.0, case="small-mlps", what="a job", name="captured against plain loop"):
    return {
        "case": case,
        "what": what,
        "sides": {"ds.fit, captured": {"ms": 1.0}, LOOP: {"ms": ratio}},
        "ratios": {name: ratio},
        "missing": {"JAX vmap + scan": "not installed"},
    }
