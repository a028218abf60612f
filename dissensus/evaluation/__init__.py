"""One pass over the data: predictions x scores x metrics x sets x severities -> Evaluation."""

from dissensus.evaluation.comparison import Comparison, Difference, compare
from dissensus.evaluation.one_pass import evaluate
from dissensus.evaluation.results import Disputed, Evaluation, Histogram, Number, Reliability, Roc, SetInfo

__all__ = [
    "Comparison",
    "Difference",
    "Disputed",
    "Evaluation",
    "Histogram",
    "Number",
    "Reliability",
    "Roc",
    "SetInfo",
    "compare",
    "evaluate",
]
