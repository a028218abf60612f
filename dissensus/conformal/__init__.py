"""Guarantees that hold for any ensemble: false-alarm rates, coverage of sets and intervals, and tests for drift.

All of it ranks new inputs among held-out ones, and assumes one thing: that both come in no particular order from one source
(they are *exchangeable*). How good the ensemble is decides what is found, never how often a guarantee fails.

Nothing here needs torch, unless an ensemble is handed in: what a server keeps are scores, ranks and numbers.
"""

from dissensus.conformal.alarm import Alarm
from dissensus.conformal.coverage import intervals, sets
from dissensus.conformal.drift import DriftMonitor, Martingale, two_sample
from dissensus.conformal.ranks import p_values

__all__ = ["Alarm", "DriftMonitor", "Martingale", "intervals", "p_values", "sets", "two_sample"]
