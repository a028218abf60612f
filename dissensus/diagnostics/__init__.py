"""Member outputs and targets in, a finding out: whether members know different things or only cancel each other."""

from dissensus.diagnostics.findings import Check, DropCurve, Finding, Pair
from dissensus.diagnostics.measuring import diagnose

__all__ = ["Check", "DropCurve", "Finding", "Pair", "diagnose"]
