"""An alarm for unfamiliar inputs whose rate of false alarms is guaranteed, and the scores that it ranks."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dissensus._files import read_state, write_state
from dissensus._signatures import checked, whole_number
from dissensus.conformal.ranks import Floats, Values, fraction, labels_of, p_values_among, vector, warn_of_few

if TYPE_CHECKING:
    from torch import Tensor

    from dissensus.members import Members

FORMAT = "dissensus alarm 1"
_SHARE_TO_CHOOSE = 4  # one in so many held-out inputs chooses the score, where examples are given
Score: TypeAlias = str | Callable[[Any], Any]  # from member outputs to one number an input
CLASSES, LABELS = "cross_entropy", "binary_cross_entropy"


@dataclass(frozen=True)
class Scorer:
    """A score, by name or as a function (of inputs where it says so by `of_inputs`), and how outputs are read, as in `ds.evaluate`."""

    score: Score
    loss: str = CLASSES

    def __call__(self, members: "Members | None", x: Any, instead: str = "") -> Floats:
        """Return the score of each input, `(batch,)`; a tuple is several inputs, as `predict` reads it."""
        from dissensus.data.files import as_data
        from dissensus.data.sources import input_batches
        from dissensus.data.trees import plain
        from dissensus.predictions import predict

        if members is None:
            raise ValueError(f"There is no ensemble to score inputs: pass scores to {instead}, or load it with `ens`.")
        if isinstance(self.score, str):
            return _named_scores([self.score], self.loss, members, x)[self.score]
        if self.of_inputs:
            batches = input_batches(as_data(x, "x", targets=False), 1024)
            return np.concatenate([self._of(plain(batch), len(batch)) for batch in batches])
        outputs = predict(members, x)
        return self._of(outputs, outputs.shape[1])

    def _of(self, seen: Any, count: int) -> Floats:
        """Return what a function makes of so many inputs, or of outputs for them."""
        assert callable(self.score)
        return vector(self.score(seen), "the score's answer", count)

    @property
    def of_inputs(self) -> bool:
        """Whether the score looks at inputs, and not at what members say of them."""
        return bool(getattr(self.score, "of_inputs", False))

    @property
    def name(self) -> str:
        """The score's name, for files and pages."""
        return self.score if isinstance(self.score, str) else getattr(self.score, "__name__", "callable")

    def state(self) -> dict[str, Any]:
        """Return what a file holds of it: no code."""
        return {"score": self.name, "function": not isinstance(self.score, str), "loss": self.loss}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], ens: "Members | None", score: Score | None) -> "Scorer":
        """Return the scorer of a state; `score` is its function, which only an ensemble's outputs need."""
        if ens is not None and state["function"] and score is None:
            raise ValueError(f"Inputs are ranked by a function, {state['score']!r}: pass it as `score`.")
        return cls(score or state["score"], state["loss"])


@dataclass(frozen=True, eq=False)
class Alarm:
    r"""Flags inputs that are stranger than held-out ones, with a bound on how often it flags ordinary inputs.

    An input's score is ranked among those of held-out inputs (`conformal.p_values`), and the alarm rings where
    $p \le$ `false_alarms`. An input that is exchangeable with the held-out ones rings with at most that probability (over held-out
    inputs and new input together); with `labels` also within each class. An input of unknown class then has the largest p-value
    over classes, so it rings if it would be strange in every one.

    Attributes:
        calibration: Sorted scores of held-out inputs, by class; by None where there are no classes.
        false_alarms: The rate of false alarms.
        scorer: Which score is ranked, and how outputs are read for it.
        members: The ensemble; None where only scores are ranked, as in a server.
        aurocs: How well each score told examples from held-out inputs, where one was chosen so.

    Example:
        >>> import torch, dissensus as ds
        >>> ens = ds.DeepEnsemble(lambda: torch.nn.Linear(2, 3), num_members=5)
        >>> alarm = ds.Alarm.calibrate(ens, torch.randn(199, 2), false_alarms=0.05)
        >>> alarm.p_values(torch.randn(4, 2)).shape, alarm(torch.randn(4, 2)).dtype
        (torch.Size([4]), torch.bool)

    References:
        Bates et al., 2023, <https://arxiv.org/abs/2104.08279>; for classes Guan and Tibshirani, 2022,
        <https://arxiv.org/abs/1905.04396>.
    """

    calibration: Mapping[int | str | None, Floats]
    false_alarms: float = 0.01
    scorer: Scorer = field(default_factory=lambda: Scorer("scores"))
    members: "Members | None" = None
    aurocs: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    @checked
    def calibrate(
        cls,
        ens: "Members",
        held_out: Any,
        *,
        score: Score = "auto",
        false_alarms: float = 0.01,
        labels: Any = None,
        examples: Any = None,
        loss: str = "auto",
        seed: int = 0,
    ) -> "Alarm":
        """Return an alarm for an ensemble, from inputs that it was not trained on.

        Args:
            ens: The ensemble.
            held_out: Ordinary inputs that training has not seen, or a pair (inputs, targets), as `ds.predict` and `ds.fit`
                take them; a path, or what `dissensus.data.files.load` returned, has what targets there are.
            score: A name of `scores.SCORES` or `scores.REGRESSION_SCORES`, or a function from member outputs `(members, batch,
                ...)` to `(batch,)`, higher where stranger. "auto" is the one that tells `examples` best; without examples
                `mutual_information` (for one member `total_entropy`), for regression `knowledge_variance`.
            false_alarms: The rate of false alarms to allow. A warning says where so few held-out inputs can never ring.
            labels: Class of each held-out input, `(n,)`, for a guarantee within each class.
            examples: Inputs that should raise the alarm; with `score="auto"` a quarter of the held-out inputs chooses by them.
            loss: How outputs are read, as in `ds.evaluate`. "auto": float targets in `held_out` mean regression, whole numbers that
                number the outputs classes, 0 and 1 shaped `(n, labels)` several labels an input (`"binary_cross_entropy"`).
            seed: Decides which held-out inputs choose the score.
        """
        rate = fraction(false_alarms, "false_alarms")
        inputs, targets = opened(held_out)
        scorer = scorer_of(ens, inputs, targets, score, loss)
        if examples is not None and score != "auto":
            raise ValueError(f"`examples` choose among scores, but `score` is {scorer.name!r}. Leave one out.")
        aurocs: dict[str, float] = {}
        kept: Any = slice(None)
        if examples is None:
            scores = scorer(ens, inputs)
        else:
            scorer, scores, kept, aurocs = _chosen(ens, inputs, examples, scorer.loss, seed)
        return cls(_by_class(scores, labels, kept), rate, scorer, ens, aurocs)._warned()

    @classmethod
    @checked
    def of_scores(cls, scores: Values, *, false_alarms: float = 0.01, labels: Any = None) -> "Alarm":
        """Return an alarm for scores of any origin, from those of held-out inputs, `(n,)`; it ranks by `p_values_of`.

        Example:
            >>> alarm = Alarm.of_scores(range(99), false_alarms=0.05)
            >>> alarm.p_values_of([50.0, 98.0, 200.0]).tolist()
            [0.5, 0.02, 0.01]
        """
        return cls(_by_class(vector(scores, "scores"), labels), fraction(false_alarms, "false_alarms"))._warned()

    def p_values(self, x: Any, labels: Any = None) -> "Tensor":
        """Return how rare inputs as strange as these are among ordinary ones, `(batch,)` float64. Reading: small is strange.

        Args:
            x: Inputs, as `ds.predict` takes them.
            labels: Their classes where they are known, `(batch,)`; only for an alarm calibrated with labels.
        """
        import torch

        found = self.p_values_of(self.scorer(self.members, x, "`p_values_of`"), labels)
        return torch.from_numpy(found).to(x.device if isinstance(x, torch.Tensor) else "cpu")

    def p_values_of(self, scores: Values, labels: Any = None) -> Floats:
        """Return the p-values of scores that were computed elsewhere, `(batch,)`; needs numpy only."""
        found = vector(scores, "scores")
        within = {name: p_values_among(own, found) for name, own in self.calibration.items()}
        if labels is None:
            # Largest over classes: at most the rate of every class's inputs ring.
            return np.max(list(within.values()), axis=0)
        classes = labels_of(labels, "labels", len(found)).tolist()
        if unknown := set(classes) - set(within):
            known = ", ".join(str(name) for name in within if name is not None)
            raise ValueError(f"`labels` must be what it was calibrated with ({known or 'none'}); got {min(unknown)!r}.")
        return np.array([within[name][row] for row, name in enumerate(classes)])

    def __call__(self, x: Any, labels: Any = None) -> "Tensor":
        """Return which inputs raise the alarm, `(batch,)` bool."""
        return self.p_values(x, labels) <= self.false_alarms

    @checked
    def at(self, false_alarms: float) -> "Alarm":
        """Return an alarm from the same held-out inputs with another rate of false alarms."""
        return replace(self, false_alarms=fraction(false_alarms, "false_alarms"))._warned()

    @property
    def threshold(self) -> float:
        """The score that an input must exceed to ring; infinite where none can.

        Example:
            >>> Alarm.of_scores(range(99), false_alarms=0.05).threshold
            94.0
        """
        # So many ranks ring, the new input's included.
        ringing = {name: int(self.false_alarms * (len(own) + 1) + 1e-9) for name, own in self.calibration.items()}
        return float(max(np.append(own, np.inf)[len(own) - ringing[name]] for name, own in self.calibration.items()))

    def save(self, path: Path | str) -> None:
        """Write the alarm, without its ensemble, as JSON."""
        groups = [{"label": name, "scores": own.tolist()} for name, own in self.calibration.items()]
        state = {"false_alarms": self.false_alarms, **self.scorer.state(), "aurocs": dict(self.aurocs)}
        write_state(path, FORMAT, {**state, "calibration": groups})

    @classmethod
    def load(cls, path: Path | str, ens: "Members | None" = None, *, score: Score | None = None) -> "Alarm":
        """Read an alarm that was saved: without its ensemble it ranks scores only, by `p_values_of`.

        `score` is the function that it ranks by, where it was calibrated with one: files hold no code.
        """
        state = read_state(path, FORMAT)
        calibration = {one["label"]: np.asarray(one["scores"], np.float64) for one in state["calibration"]}
        scorer = Scorer.from_state(state, ens, score)
        return cls(calibration, state["false_alarms"], scorer, ens, state["aurocs"])

    def _warned(self) -> "Alarm":
        """Return this alarm, and warn where its held-out inputs are too few."""
        for name, own in self.calibration.items():
            who = "The held-out inputs" if name is None else f"The held-out inputs of class {name!r}"
            warn_of_few(len(own), self.false_alarms, who, "this alarm can never ring")
        return self


def _by_class(scores: Floats, labels: Any, kept: Any = slice(None)) -> dict[int | str | None, Floats]:
    """Return those scores that are kept, sorted, by class."""
    if labels is None:
        return {None: np.sort(scores[kept])}
    classes = labels_of(labels, "labels", len(scores))[kept]
    return {name: np.sort(scores[kept][classes == name]) for name in np.unique(classes).tolist()}


def _chosen(
    members: "Members", inputs: Any, examples: Any, loss: str, seed: int
) -> tuple[Scorer, Floats, NDArray[np.intp], dict[str, float]]:
    """Return the score that tells examples from a part of the held-out inputs best, all scores by it, and the other part."""
    from dissensus.metrics import auroc
    from dissensus.scores import REGRESSION_SCORES, SCORES

    names = list(SCORES if loss in (CLASSES, LABELS) else REGRESSION_SCORES)
    if loss in ("mse", "mae"):  # points have no other variance
        names = ["knowledge_variance"]
    known, strange = (_named_scores(names, loss, members, x) for x in (inputs, examples))
    total = len(next(iter(known.values())))
    if total < (least := 2 * _SHARE_TO_CHOOSE):
        raise ValueError(f"Choosing a score takes {least} held-out inputs or more; got {total}. Name a score instead.")
    order = np.random.default_rng(whole_number("seed", seed, 0)).permutation(total)
    choosing, kept = np.split(order, [total // _SHARE_TO_CHOOSE])
    aurocs = {name: float(auroc(strange[name], own[choosing])) for name, own in known.items()}
    best = max(names, key=lambda name: aurocs[name])
    if aurocs[best] <= 0.5:
        raise ValueError(
            f"No score tells `examples` from held-out inputs: the best AUROC is {aurocs[best]:.2f}, that of {best}. Name a score, "
            "such as score=RowDistance(rows)."
        )
    return Scorer(best, loss), known[best], kept, aurocs


def _named_scores(names: list[str], loss: str, members: "Members", x: Any) -> dict[str, Floats]:
    """Return scores by name, `(batch,)` each; variances are means over targets."""
    from dissensus.objectives.likelihoods import likelihood_of
    from dissensus.predictions import predict, predict_scores
    from dissensus.scores import REGRESSION_SCORES

    if loss in (CLASSES, LABELS):
        found = predict_scores(members, x, names, loss=loss)  # type: ignore[arg-type]
        return {name: vector(own, name) for name, own in found.items()}
    outputs = predict(members, x)
    outputs = outputs if outputs.ndim == 3 else outputs[..., None]
    likelihood = likelihood_of(loss)
    beliefs = likelihood.mean_and_scale(outputs)
    return {name: vector(REGRESSION_SCORES[name](*beliefs, family=likelihood.family).mean(-1), name) for name in names}


def scorer_of(members: "Members", inputs: Any, targets: Any, score: Score, loss: str) -> Scorer:
    """Return the scorer that these settings mean; "auto" is decided by targets of held-out inputs, None where there are none."""
    from dissensus.members.members import as_members
    from dissensus.scores import REGRESSION_SCORES, SCORES

    as_members(members, "ens")
    if not isinstance(score, str):
        return Scorer(score, loss)
    known = (*SCORES, *REGRESSION_SCORES)
    if score != "auto" and score not in known:
        raise ValueError(f"`score` must be 'auto', a function or one of {', '.join(known)}; got {score!r}.")
    loss = _loss_of(members, inputs, targets, score) if loss == "auto" else loss
    fitting = SCORES if loss in (CLASSES, LABELS) else REGRESSION_SCORES
    if score == "auto":
        # Members that cannot disagree have nothing but their own doubt.
        doubt = "mutual_information" if members.num_members > 1 else "total_entropy"
        score = doubt if fitting is SCORES else "knowledge_variance"
    if score not in fitting:
        raise ValueError(f"With the loss {loss!r} `score` must be one of {', '.join(fitting)}; got {score!r}.")
    return Scorer(score, loss)


def opened(held_out: Any) -> tuple[Any, Any]:
    """Return inputs as `predict` takes them, and their targets: of a Dataset or loader the first, None where there are none."""
    from torch.utils.data import DataLoader, Dataset

    from dissensus.data.files import Loaded, load
    from dissensus.data.sources import pair_batches

    found = load(held_out) if isinstance(held_out, str | Path) else held_out
    if isinstance(found, Loaded):
        return found.x, found.y
    if isinstance(found, tuple | list) and len(found) == 2:
        return found[0], found[1]
    if isinstance(found, Dataset | DataLoader):
        with suppress(ValueError):  # batches of inputs alone
            return found, next(iter(pair_batches(found, 64)))[1]
    return found, None


def _loss_of(members: "Members", inputs: Any, targets: Any, score: str) -> str:
    """Return how outputs are read: as the score says, or else the targets; without either as classes."""
    from dissensus.data.sources import input_batches
    from dissensus.data.trees import as_tensor
    from dissensus.predictions import predict
    from dissensus.scores import SCORES

    y = None if targets is None else as_tensor(targets, "targets")
    if score in SCORES or (score == "auto" and y is None):
        return CLASSES if y is None or y.ndim != 2 or y.is_floating_point() else LABELS
    shape = predict(members.reader(inputs), next(input_batches(inputs, 2))[:2]).shape
    outputs = shape[-1] if len(shape) > 2 else 1
    if (told := _told(y, outputs, score == "auto")) is not None:
        return told
    raise ValueError(_why_untold(None if score != "auto" else y, outputs))


def _why_untold(targets: "Tensor | None", outputs: int) -> str:
    """Say why targets do not tell how outputs are to be read."""
    if targets is not None and not targets.is_floating_point():
        return (
            f"Whole numbers as held-out targets must number {outputs} classes, or be 0 and 1 for {outputs} labels; got "
            f"{int(targets.min())} to {int(targets.max())}. Say loss='cross_entropy' or, for values, 'mse' or 'gaussian_nll'."
        )
    return (
        f"How {outputs} outputs a member are to be read cannot be told from the held-out data: pass (inputs, targets), or say "
        "loss='mse', 'gaussian_nll' or 'laplace_nll'."
    )


def _told(targets: "Tensor | None", outputs: int, classes: bool) -> str | None:
    """Return the loss that targets tell: floats that of regression, numbers of the outputs that of classes; None where they tell none."""
    from dissensus.objectives.likelihoods import regression_loss

    if not classes or targets is None or targets.is_floating_point():
        return "mse" if outputs == 1 else regression_loss(outputs, targets)
    numbers, rows = targets.long(), targets.ndim == 2
    inside = (numbers >= 0) & (numbers < (2 if rows else outputs))
    if not bool(inside.all()) or (rows and numbers.shape[1] != outputs):
        return None
    return LABELS if rows else CLASSES
