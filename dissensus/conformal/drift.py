"""Has the source of inputs changed? Tests that may be looked at after every input, and one for a batch."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from math import lgamma
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dissensus._files import read_state, write_state
from dissensus._signatures import checked, real_number, whole_number
from dissensus.conformal.alarm import Alarm, Score, Scorer, opened, scorer_of
from dissensus.conformal.ranks import Floats, Values, array, vector

if TYPE_CHECKING:
    from dissensus.members import Members

FORMAT = "dissensus drift monitor 1"
# Bets, as Beta densities of p: scores a little, clearly, far above earlier ones; the same below; both tails; the middle.
_BETS = np.array([(0.8, 1.4), (0.5, 1.8), (0.25, 2.0), (1.4, 0.8), (1.8, 0.5), (2.0, 0.25), (0.5, 0.5), (3.0, 3.0)])
_LOG_NORM = np.array([lgamma(a) + lgamma(b) - lgamma(a + b) for a, b in _BETS])
_WAITING = 0.25  # after t values, t ** -0.25 of the capital still waits for a change
_ROWS = 1024  # values looked at together


@dataclass(eq=False, repr=False)
class Martingale:
    r"""The capital of a gambler who bets against p-values being uniform, and begins with 1.

    $$V_t = (t + 1)^{-a} + \sum_{s \le t} \big(s^{-a} - (s+1)^{-a}\big) \frac1K \sum_k \prod_{i=s}^{t} f_k(p_i),
    \qquad a = \tfrac14$$

    Part of the capital waits, and some of it enters at every step $s$, shared among $K$ bets $f_k$ (densities on [0, 1]): so a
    change is found whenever it comes. If p-values are independent and uniform (those of `Alarm` are not: they share one held-out
    set), $V$ is a martingale and by Ville's inequality *ever* reaches $c$ with a probability of at most $1/c$.

    Attributes:
        seen: How many p-values came.
        log_value: Log of the capital now.
        log_peak: Log of the largest capital so far.

    Example:
        >>> martingale = Martingale()
        >>> martingale.update(0.5) < 1.2
        True
        >>> martingale.update([0.001] * 10) > 1e6, martingale.alarm(20)
        (True, True)

    References:
        Vovk, 2021, <https://arxiv.org/abs/2102.10439>; Shafer et al., 2011, <https://arxiv.org/abs/0912.4269>.
    """

    seen: int = 0
    log_peak: float = 0.0
    _log_capital: Floats = field(default_factory=lambda: np.full(len(_BETS), -np.inf))

    def update(self, p: "float | Values") -> float:
        """Take one p-value or several, `(n,)`, in their order; return the value after the last."""
        self.log_path(p)
        return self.value

    def log_path(self, p: "float | Values") -> Floats:
        """Take p-values as `update` does; return the log of the value after each, `(n,)`, for plots."""
        values = np.atleast_1d(array(p, "p"))  # type: ignore[arg-type]
        if values.ndim != 1 or values.min() < 0 or values.max() > 1:
            raise ValueError(
                f"`p` must be one number or (n,) numbers from 0 to 1; got shape {values.shape}, {values.min():g} to {values.max():g}."
            )
        parts = [self._advance(part) for part in np.split(values, range(_ROWS, len(values), _ROWS))]
        return np.concatenate(parts)

    def _advance(self, p: Floats) -> Floats:
        """Bet on each p-value in turn; return the log of the capital after each."""
        p = np.clip(p, 1e-12, 1 - 1e-12)[:, None]
        step = self.seen + np.arange(1, len(p) + 1, dtype=np.float64)
        gains = (_BETS[:, 0] - 1) * np.log(p) + (_BETS[:, 1] - 1) * np.log1p(-p) - _LOG_NORM
        growth = np.cumsum(gains, 0)
        entering = np.log((step**-_WAITING - (step + 1) ** -_WAITING) / len(_BETS))
        # capital_t = growth_t (capital_0 + sum over s <= t of what entered at s / growth before s), in logs
        scaled = np.vstack([self._log_capital, entering[:, None] - (growth - gains)])
        capital = growth + np.logaddexp.accumulate(scaled, axis=0)[1:]
        logs = np.logaddexp(np.logaddexp.reduce(capital, axis=1), -_WAITING * np.log(step + 1))
        self.seen += len(p)
        self._log_capital = capital[-1]
        self.log_peak = max(self.log_peak, float(logs.max()))
        return logs

    @property
    def log_value(self) -> float:
        """Log of the capital now."""
        waiting = -_WAITING * np.log(self.seen + 1)
        return float(np.logaddexp(np.logaddexp.reduce(self._log_capital), waiting))

    @property
    def value(self) -> float:
        """The capital now. Reading: at 20, uniform p-values would have come this far with a probability of 1/20 or less."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.log_value))

    def alarm(self, threshold: float) -> bool:
        """Return whether the value has ever reached a threshold; without a change that has probability 1/threshold or less."""
        return bool(self.log_peak >= np.log(real_number("threshold", threshold, least=1.0, above=True)))

    def state(self) -> dict[str, Any]:
        """Return all that a later process needs to go on, as JSON takes it."""
        return {"seen": self.seen, "log_peak": self.log_peak, "log_capital": self._log_capital.tolist()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Martingale":
        """Return the martingale of a state."""
        return cls(state["seen"], state["log_peak"], np.asarray(state["log_capital"], np.float64))


@dataclass(eq=False, repr=False)
class DriftMonitor:
    r"""Watches a stream of inputs for any change of the scores' distribution, and may be asked after every input.

    Each score is ranked among all earlier ones: first the held-out inputs, then the stream itself. While the source stays as it was,
    these ranks are independent and uniform, ties being broken at random by `seed`, so a `Martingale` of them ever reaches c with a
    probability of at most 1/c. Scores are sorted into at most 256 bins, by held-out inputs that are not ranked among.

    Attributes:
        edges: Where bins end, `(bins - 1,)`.
        counts: How many scores fell into each bin so far, `(bins,)`, held-out inputs included.
        martingale: The bets so far.
        scorer: Which score is watched.
        members: The ensemble; None where only scores are handed in, as in a server.

    Example:
        >>> monitor = DriftMonitor.of_scores(np.random.default_rng(0).normal(size=500))
        >>> monitor.update_scores(np.random.default_rng(1).normal(size=200)) < 20
        True
        >>> monitor.update_scores(np.random.default_rng(2).normal(2.0, size=50)) > 20
        True
    """

    edges: Floats
    counts: NDArray[np.int64]
    _: KW_ONLY
    seed: int = 0
    scorer: Scorer = field(default_factory=lambda: Scorer("scores"))
    members: "Members | None" = None
    martingale: Martingale = field(default_factory=Martingale)

    @classmethod
    @checked
    def calibrate(
        cls, ens: "Members", held_out: Any, *, score: Score = "auto", loss: str = "auto", bins: int = 256, seed: int = 0
    ) -> "DriftMonitor":
        """Return a monitor for an ensemble, from inputs that it was not trained on.

        Args:
            ens: The ensemble.
            held_out: Ordinary inputs that training has not seen, or a pair (inputs, targets). A third of them sets the bins, the
                others are what the stream is first compared with.
            score: Which score to watch, as `ds.Alarm.calibrate` takes it.
            loss: How outputs are read, as there.
            bins: How many bins there may be, at most 256.
            seed: Decides which held-out inputs set the bins, and breaks ties.
        """
        inputs, targets = opened(held_out)
        scorer = scorer_of(ens, inputs, targets, score, loss)
        monitor = cls.of_scores(scorer(ens, inputs), bins=bins, seed=seed)
        monitor.scorer, monitor.members = scorer, ens
        return monitor

    @classmethod
    @checked
    def of_scores(cls, scores: Values, *, bins: int = 256, seed: int = 0) -> "DriftMonitor":
        """Return a monitor of scores of any origin, from those of held-out inputs, `(n,)`; it goes on by `update_scores`."""
        found = vector(scores, "scores")
        if len(found) < 3:
            raise ValueError(f"A monitor takes 3 held-out inputs or more; got {len(found)}. Hold out more.")
        if not 2 <= whole_number("bins", bins, 2) <= 256:
            raise ValueError(f"`bins` must lie in 2..256; got {bins}.")
        order = np.random.default_rng(whole_number("seed", seed, 0)).permutation(len(found))
        for_edges, history = np.split(found[order], [len(found) // 3])
        edges = np.unique(np.quantile(for_edges, np.arange(1, bins) / bins, method="inverted_cdf"))
        counts = np.bincount(np.searchsorted(edges, history), minlength=len(edges) + 1)
        return cls(edges, counts, seed=seed)

    @classmethod
    def of_alarm(cls, alarm: Alarm) -> "DriftMonitor | None":
        """Return a monitor of an alarm's score and ensemble that begins with its held-out scores; None where there are fewer than three.

        An alarm has them sorted, and the guarantee needs an order that chance made: the seed that shuffles them is drawn from
        their values, for one that is always the same would always set the bins by the same ranks.
        """
        held_out = np.concatenate([*alarm.calibration.values()])
        if len(held_out) < 3:
            return None
        monitor = cls.of_scores(held_out, seed=crc32(held_out.tobytes()))
        monitor.scorer, monitor.members = alarm.scorer, alarm.members
        return monitor

    def update(self, x: Any) -> float:
        """Take the next inputs of the stream, in their order; return the martingale's value after the last."""
        return self.update_scores(self.scorer(self.members, x, "`update_scores`"))

    def update_scores(self, scores: Values) -> float:
        """Take the next scores of the stream, `(n,)`; return the martingale's value after the last. Needs numpy only."""
        self.log_path(scores)
        return self.value

    def log_path(self, scores: Values) -> Floats:
        """Take scores as `update_scores` does; return the log of the value after each, `(n,)`, for plots."""
        bins = np.searchsorted(self.edges, vector(scores, "scores"))
        draws = _uniforms(self.seed, self.martingale.seen, len(bins))
        parts = range(_ROWS, len(bins), _ROWS)
        ranks = [self._ranks(*part) for part in zip(np.split(bins, parts), np.split(draws, parts), strict=True)]
        return self.martingale.log_path(np.concatenate(ranks))

    def _ranks(self, bins: NDArray[np.intp], draws: Floats) -> Floats:
        """Count scores in; return the share of higher ones among all up to each, equal ones counted by a random part."""
        places = np.arange(len(self.counts))
        counts = self.counts + np.cumsum(bins[:, None] == places, 0)
        above = np.where(places > bins[:, None], counts, 0).sum(1)
        equal = counts[np.arange(len(bins)), bins]
        self.counts = counts[-1]
        return (above + draws * equal) / counts.sum(1)

    @property
    def value(self) -> float:
        """The martingale's value. Reading: at 20, a source that has not changed comes this far once in 20 streams or less."""
        return self.martingale.value

    @property
    def log_value(self) -> float:
        """Log of the martingale's value."""
        return self.martingale.log_value

    def alarm(self, threshold: float) -> bool:
        """Return whether the value has ever reached a threshold; without a change that has probability 1/threshold or less."""
        return self.martingale.alarm(threshold)

    def state(self) -> dict[str, Any]:
        """Return all that a later process needs to go on, as JSON takes it: bins, counts, bets and seed, no input."""
        return {
            "edges": self.edges.tolist(),
            "counts": self.counts.tolist(),
            "martingale": self.martingale.state(),
            "seed": self.seed,
            **self.scorer.state(),
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], ens: "Members | None" = None, *, score: Score | None = None
    ) -> "DriftMonitor":
        """Return the monitor of a state, which goes on exactly as the one that gave it."""
        return cls(
            np.asarray(state["edges"], np.float64),
            np.asarray(state["counts"], np.int64),
            seed=state["seed"],
            scorer=Scorer.from_state(state, ens, score),
            members=ens,
            martingale=Martingale.from_state(state["martingale"]),
        )

    def save(self, path: Path | str) -> None:
        """Write the state, without the ensemble, as JSON."""
        write_state(path, FORMAT, self.state())

    @classmethod
    def load(cls, path: Path | str, ens: "Members | None" = None, *, score: Score | None = None) -> "DriftMonitor":
        """Read a monitor that was saved; with its ensemble it takes inputs again, without only scores."""
        return cls.from_state(read_state(path, FORMAT), ens, score=score)


@checked
def two_sample(reference: Values, batch: Values, *, permutations: int = 999, seed: int = 0) -> float:
    r"""Return a p-value for one batch as a whole: do its scores come from where the reference's do?

    The largest distance between the two distribution functions (Kolmogorov and Smirnov's) is ranked among those of random
    divisions of all scores into sets of these sizes: if the two are exchangeable, $P(p \le \alpha) \le \alpha$. It is for *one*
    look at *one* batch; for a stream take `DriftMonitor`.

    Args:
        reference: Scores of held-out inputs, `(n,)`.
        batch: Scores of the batch, `(m,)`.
        permutations: How many random divisions; the smallest p-value is 1 / (permutations + 1).
        seed: Decides the divisions.

    Returns:
        The p-value. Reading: small says that the batch is different.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> two_sample(rng.normal(size=200), rng.normal(2.0, size=50))
        0.001
    """
    first, second = vector(reference, "reference"), vector(batch, "batch")
    values, groups = np.unique(np.concatenate([first, second]), return_inverse=True)
    member = np.arange(len(groups)) >= len(first)
    rng, times = np.random.default_rng(whole_number("seed", seed, 0)), whole_number("permutations", permutations, 1)
    found = _distance(groups, member, len(values))
    others = [_distance(groups, rng.permutation(member), len(values)) for _ in range(times)]
    # Distances are differences of fractions: equal ones may differ by rounding.
    return float((1 + np.sum(np.asarray(others) >= found - 1e-12)) / (times + 1))


def _distance(groups: NDArray[np.intp], member: NDArray[np.bool_], num: int) -> float:
    """Return the largest distance between distribution functions of two sets of values, given by their places in order."""
    second = np.cumsum(np.bincount(groups[member], minlength=num)) / member.sum()
    first = np.cumsum(np.bincount(groups[~member], minlength=num)) / (~member).sum()
    return float(np.abs(first - second).max())


def _uniforms(seed: int, start: int, num: int) -> Floats:
    """Return numbers `start` to `start + num` of a stream that the seed decides, uniform on [0, 1)."""
    bits = np.random.Philox(key=seed)
    bits.advance(start // 4)  # a step of its counter makes four
    return np.random.Generator(bits).random(start % 4 + num)[start % 4 :]
