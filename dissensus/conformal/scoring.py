"""From an ensemble and inputs to one number an input: what alarms and monitors rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from dissensus.conformal.ranks import Floats, vector

if TYPE_CHECKING:
    from torch import Tensor

    from dissensus.members import Members

Score: TypeAlias = str | Callable[[Any], Any]  # from member outputs to one number an input
CLASSES = "cross_entropy"


@dataclass(frozen=True)
class Scorer:
    """A score, and how the outputs it looks at are read.

    Attributes:
        score: A name of `scores.SCORES` or `scores.REGRESSION_SCORES`, or a function from member outputs
            `(members, batch, ...)` to `(batch,)`.
        loss: How outputs are read, as in `ds.evaluate`: "cross_entropy" for logits, "mse" for points, "gaussian_nll" …
    """

    score: Score
    loss: str = CLASSES

    def __call__(self, members: "Members", x: Any) -> Floats:
        """Return the score of each input, `(batch,)`."""
        from dissensus.predictions import predict, predict_scores

        if not isinstance(self.score, str):
            return vector(self.score(predict(members, x)), "the score's answer")
        if self.loss == CLASSES:
            return vector(predict_scores(members, x, [self.score])[self.score], self.score)
        return vector(_variance(predict(members, x), self.score, self.loss), self.score)

    @property
    def name(self) -> str:
        """The score's name, for files and pages."""
        return self.score if isinstance(self.score, str) else getattr(self.score, "__name__", "callable")

    def candidates(self) -> list["Scorer"]:
        """Return all scores that read outputs in this way."""
        from dissensus.scores import REGRESSION_SCORES, SCORES

        if self.loss == CLASSES:
            return [Scorer(name, self.loss) for name in SCORES]
        points = self.loss in ("mse", "mae")
        return [Scorer(name, self.loss) for name in (["knowledge_variance"] if points else REGRESSION_SCORES)]


def scorer_of(members: "Members", held_out: Any, score: Score, loss: str) -> Scorer:
    """Return the scorer that these settings mean; "auto" is decided by the targets that came with held-out inputs."""
    from dissensus.members.members import as_members
    from dissensus.scores import REGRESSION_SCORES, SCORES

    as_members(members, "ens")
    if not isinstance(score, str):
        if not callable(score):
            raise ValueError(f"`score` must be a name or a function of member outputs; got {score!r}.")
        return Scorer(score, loss)
    if score != "auto" and score not in SCORES and score not in REGRESSION_SCORES:
        raise ValueError(
            f"`score` must be 'auto', a function or one of {', '.join([*SCORES, *REGRESSION_SCORES])}; got {score!r}."
        )
    if loss == "auto":
        loss = CLASSES if score in SCORES else _loss_of(members, held_out, score)
    if score != "auto":
        return Scorer(score, loss)
    if loss != CLASSES:
        return Scorer("knowledge_variance", loss)
    # Members that cannot disagree have nothing but their own doubt.
    return Scorer("mutual_information" if members.num_members > 1 else "total_entropy", loss)


def inputs_of(held_out: Any) -> Any:
    """Return the inputs of data that may be a pair (inputs, targets)."""
    return held_out[0] if isinstance(held_out, tuple | list) and len(held_out) == 2 else held_out


def _loss_of(members: "Members", held_out: Any, score: str) -> str:
    """Return how outputs are read: float targets mean regression, with one output a target, or a mean and a rho."""
    from dissensus.data.sources import input_batches
    from dissensus.predictions import predict

    targets = _first_targets(held_out)
    regression = score != "auto" or (targets is not None and targets.is_floating_point())
    if not regression:
        return CLASSES
    first = next(input_batches(inputs_of(held_out), 2))[:2]
    outputs = predict(members, first).shape[-1]
    wanted = 1 if targets is None or targets.ndim == 1 else targets.shape[-1]
    if outputs == 1 or (targets is not None and outputs == wanted):
        return "mse"
    if outputs == 2 * wanted and targets is not None:
        return "gaussian_nll"
    raise ValueError(
        f"How {outputs} outputs a member are to be read cannot be told from the held-out data: pass (inputs, targets), or say "
        "loss='mse', 'gaussian_nll' or 'laplace_nll'."
    )


def _first_targets(held_out: Any) -> "Tensor | None":
    """Return some targets of the held-out data, if it has any."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    from dissensus.data.sources import pair_batches

    if isinstance(held_out, tuple | list) and len(held_out) == 2:
        return torch.as_tensor(held_out[1])
    if isinstance(held_out, Dataset | DataLoader):
        try:
            return next(iter(pair_batches(held_out, 2)))[1]
        except ValueError:  # batches of inputs alone
            return None
    return None


def _variance(outputs: "Tensor", score: str, loss: str) -> "Tensor":
    """Return a variance of the mixture, the mean over targets."""
    import torch

    from dissensus.objectives.likelihoods import likelihood_of, mean_and_scale
    from dissensus.scores import REGRESSION_SCORES

    outputs = outputs if outputs.ndim == 3 else outputs[..., None]
    points = likelihood_of(loss).kind == "points"
    mean, scale = (outputs, torch.zeros_like(outputs)) if points else mean_and_scale(outputs)
    family = "laplace" if loss == "laplace_nll" else "gaussian"
    return REGRESSION_SCORES[score](mean, scale, family=family).mean(-1)
