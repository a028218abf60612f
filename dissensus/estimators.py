"""Ensembles for tables, as scikit-learn's estimators: a DataFrame goes in as it is, and every answer says how sure it is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from safetensors.numpy import load_file, save
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_consistent_length, check_is_fitted, validate_data
from torch import Tensor

from dissensus._files import replace_file
from dissensus._signatures import warn, whole_number
from dissensus.architectures import mlp
from dissensus.conformal import Alarm, DriftMonitor, intervals, p_values
from dissensus.data.sources import device_named
from dissensus.data.tables import TableEncoder, columns_of
from dissensus.detectors import RowDistance
from dissensus.members import Members
from dissensus.objectives import Objective
from dissensus.predictions import predict
from dissensus.recipes.choices import KINDS, OBJECTIVES, build_objective, resolve_objective, with_loss
from dissensus.scores import data_variance, expected_entropy, mutual_information, total_entropy
from dissensus.training import fit

METHODS = ("deep", "packed", "batch_ensemble", "masksembles", "mc_dropout", "anchored")
"""Kinds of ensembles that tables are learned by."""

_BANK = 4096  # training rows that distances are measured to, and held-out rows that are kept
_NO_LABEL = ("None", "nan", "<NA>", "NaT")
# Settings that members are made of, and outputs read by.
_MADE_OF = ("method", "num_members", "objective", "hidden", "dropout")


@dataclass(frozen=True)
class Features:
    """How a table becomes what members take: columns encoded, standardised, and each column of numbers cut into pieces.

    A piecewise-linear encoding gives a column one feature for each of its quantile bins: 0 below the bin, 1 above it, linear
    inside; the outermost go on beyond the data. Networks learn steps and kinks from it that they miss in the plain number.

    Attributes:
        encoder: What the columns are.
        centre: Mean of each feature in the training rows.
        scale: Its standard deviation; 1 for a feature that does not change or is 0 or 1.
        edges: Where the pieces of each feature begin and end, in standardised units; none of features that are not cut.

    References:
        Gorishniy et al., 2022, <https://arxiv.org/abs/2203.05556>.
    """

    encoder: TableEncoder
    centre: np.ndarray
    scale: np.ndarray
    edges: Sequence[np.ndarray]

    @classmethod
    def fit(
        cls,
        table: Mapping[str, np.ndarray],
        keep: Sequence[str],
        bins: int,
        rows: Any = slice(None),
        numbers: np.ndarray | None = None,
    ) -> "Features":
        """Decide by a table what its columns are, and learn the rest from its training rows; messages call its rows by `numbers`."""
        if bins < 0:
            raise ValueError(f"`bins` must be 0 or more; got {bins}.")
        encoder = TableEncoder.fit(table, keep=keep).refit(table, rows)
        values = encoder.transform(table, np.float64, numbers)[rows]
        flags = np.asarray(np.isin(values, (0.0, 1.0)).all(0))
        centre = np.where(flags, 0.0, values.mean(0))
        scale = np.where(flags | (values.std(0) <= 1e-12 * np.abs(centre)), 1.0, values.std(0))
        quantiles = np.quantile((values - centre) / scale, np.linspace(0, 1, bins + 1), axis=0).T
        edges = [np.unique(own) for own in np.where(flags[:, None], 0.0, quantiles)]
        return cls(encoder, centre, scale, [own if len(own) > 2 else own[:0] for own in edges])

    def standard(self, table: Mapping[str, np.ndarray], numbers: np.ndarray | None = None) -> np.ndarray:
        """Return standardised features, `(rows, features)`, in which distances are measured."""
        return (self.encoder.transform(table, np.float64, numbers) - self.centre) / self.scale

    def inputs(self, standard: np.ndarray) -> np.ndarray:
        """Return what members take: the standardised features and their pieces."""
        pieces = [_pieces(column, own) for column, own in zip(standard.T, self.edges, strict=True) if len(own)]
        return np.concatenate([standard, *pieces], 1)

    @property
    def num_inputs(self) -> int:
        """Values that members take for a row."""
        return len(self.centre) + sum(len(own) - 1 for own in self.edges if len(own))


def _pieces(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    low, high = np.zeros(len(edges) - 1), np.ones(len(edges) - 1)
    low[0], high[-1] = -10.0, 10.0
    return np.clip((values[:, None] - edges[:-1]) / np.diff(edges), low, high)


class _Rows(NamedTuple):
    """Rows of a table as they are trained on: standardised features, encoded targets, weights, and what each row is for."""

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray
    use: np.ndarray


_TRAIN, _STOP, _CALIBRATE = range(3)


@dataclass(eq=False, repr=False)
class _TableEnsemble(BaseEstimator):  # type: ignore[misc]
    """What both estimators share: reading tables, training, distances to the training rows, storage."""

    method: str = "deep"
    num_members: int = 10
    objective: str | Mapping[str, Any] | Objective | None = None
    hidden: int | Sequence[int] = (64, 64)
    bins: int = 8
    dropout: float = 0.1
    epochs: int = 200
    patience: int = 16
    batch_size: int | None = None
    lr: float = 3e-3
    weight_decay: float = 0.1
    validation_fraction: float = 0.2
    false_alarms: float = 0.01
    random_state: Any = 0
    device: str = "auto"
    # Share of the held-out rows that training does not stop by: intervals must be calibrated on rows that chose nothing.
    _calibrating: ClassVar[float] = 0.0
    # Losses that targets as they are encoded can be told by.
    _losses: ClassVar[tuple[str, ...]] = ()
    # Those settings as `fit` found them: what it made is read by them, whatever `set_params` says afterwards.
    made_of_: dict[str, Any] = field(init=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    # Training.

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on a table.

        Args:
            X: A DataFrame of pandas or polars with columns of numbers, words, booleans and dates, also with missing values; or an
                array `(rows, columns)`. The same goes for all other methods.
            y: The target of each row.
            sample_weight: How much each row counts; all alike by default.
        """
        return self._train(self._rows(X, y, sample_weight, first=True), self.epochs, self.patience)

    def _go_on(self, X: Any, y: Any, sample_weight: Any, classes: Any = None) -> Self:
        first = not hasattr(self, "ensemble_")
        return self._train(self._rows(X, y, sample_weight, classes, first=first), 1, None)

    def _rows(self, X: Any, y: Any, sample_weight: Any, classes: Any = None, *, first: bool) -> _Rows:
        """Read rows to train on; from the first ones learn what columns and targets are, and make the members."""
        table, y, weight, numbers = self._read_training(X, y, sample_weight, reset=first)
        if first:
            self.made_of_ = {name: getattr(self, name) for name in _MADE_OF}
            self._learn_targets(y, weight, classes)
            self._seed = _seed_of(self.random_state)
        encoded = self._encode_targets(y)
        use = self._divide(encoded)
        if first:
            named = hasattr(self, "feature_names_in_")
            keep = [name for name, values in table.items() if not named or values.dtype.kind in "biuf"]
            self.features_ = Features.fit(table, keep, self.bins, use == _TRAIN, numbers)
            _tell_left_out(self.features_.encoder)
        rows = _Rows(self.features_.standard(table, numbers), encoded, weight, use)
        if first:
            self.ensemble_ = self._make_members()
            self.ensemble_.see(self._data(rows, use == _TRAIN)[0])
            self.bank_ = self.held_out_x_ = rows.x[:0]
            self.held_out_y_, self.calibrates_ = encoded[:0], np.zeros(0, bool)
        return rows

    def _train(self, rows: _Rows, epochs: int, patience: int | None) -> Self:
        """Train the members, stopping by rows that they do not train on."""
        count = int((rows.use == _TRAIN).sum())
        device = device_named(self.device)
        stops = patience is not None and bool((rows.use == _STOP).any())
        run = fit(
            self.ensemble_.float(),
            self._data(rows, rows.use == _TRAIN),
            objective=self._objective(),
            epochs=epochs,
            batch_size=min(count, self.batch_size or min(max(count // 8, 32), 256)),
            lr=self.lr,
            weight_decay=self.weight_decay,
            validation=self._data(rows, rows.use == _STOP) if stops else None,
            patience=patience if stops else None,
            seed=self._seed,
            device=device,
            # Steps of networks this small are not worth recording on a CPU.
            engine="auto" if device.type == "cuda" else "eager",
            progress=False,
        )
        # In double precision a row's answer does not depend on the rows beside it.
        self.ensemble_.double().eval()
        self.n_epochs_ = run.epoch
        self._remember(rows)
        return self

    def _divide(self, y: np.ndarray) -> np.ndarray:
        """Decide what each row is for, at random, so that held-out and new rows are exchangeable."""
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"`validation_fraction` must lie in [0, 1); got {self.validation_fraction!r}.")
        order = np.random.default_rng(self._seed).permutation(len(y))
        held_out = order[: int(self.validation_fraction * len(y))]
        use = np.full(len(y), _TRAIN)
        use[held_out] = _STOP
        use[held_out[: int(self._calibrating * len(held_out))]] = _CALIBRATE
        return use

    def _data(self, rows: _Rows, chosen: np.ndarray) -> Any:
        """Return what `fit` takes: inputs, targets and, where they differ, weights."""
        x = torch.from_numpy(self.features_.inputs(rows.x[chosen])).float()
        y = torch.from_numpy(rows.y[chosen])
        weight = rows.weight[chosen]
        if (weight == weight[0]).all():
            return x, y
        return x, y, torch.from_numpy(weight).float()

    def _remember(self, rows: _Rows) -> None:
        """Keep training rows to measure distances to, and held-out rows to calibrate by."""
        chance = np.random.default_rng(self._seed)
        bank = np.concatenate([self.bank_, rows.x[rows.use == _TRAIN]])
        self.bank_ = bank if len(bank) <= _BANK else bank[chance.choice(len(bank), _BANK, replace=False)]
        held_out = rows.use != _TRAIN
        self.held_out_x_ = np.concatenate([self.held_out_x_, rows.x[held_out]])[-_BANK:]
        self.held_out_y_ = np.concatenate([self.held_out_y_, rows.y[held_out]])[-_BANK:]
        self.calibrates_ = np.concatenate([self.calibrates_, rows.use[held_out] == _CALIBRATE])[-_BANK:]
        self.held_out_distance_ = np.sqrt(self._gaps(self.held_out_x_).sum(1))

    def _objective(self) -> Objective:
        """Return what is minimised, with the task's own loss unless another was asked for."""
        given, regression = self.made_of_["objective"], isinstance(self, RegressorMixin)
        if not isinstance(given, Objective):
            table = given if isinstance(given, Mapping) else {"name": given or "independent"}
            given = build_objective(with_loss(resolve_objective(table, "objective"), regression))
        loss = given.likelihood
        if loss.name not in self._losses and (regression or loss.kind != "own"):
            scaled = ", for targets are standardised inside" if regression else ""
            raise ValueError(
                f"An {type(self).__name__} learns by one of the losses {', '.join(self._losses)}{scaled}; got {loss.name}. For others "
                "train an ensemble with ds.fit."
            )
        return given

    def _make_members(self) -> Members:
        method, dropout = self.made_of_["method"], self.made_of_["dropout"]
        if method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}; got {method!r}.")
        inputs, outputs = self.features_.num_inputs, self._num_outputs()
        hidden = [whole_number("hidden", width, 1) for width in np.atleast_1d(self.made_of_["hidden"]).tolist()]
        options: dict[str, Any] = {"shape": (inputs,)} if method == "anchored" else {}
        if method == "mc_dropout" and not dropout:
            options = {"p": 0.1}

        def make() -> torch.nn.Module:
            return mlp(inputs, hidden, outputs, dropout=dropout)

        return KINDS[method](make, self.made_of_["num_members"], seed=self._seed, **options)

    # Reading tables.

    def _read_training(
        self, X: Any, y: Any, sample_weight: Any, reset: bool
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
        """Return columns, targets, weights and numbers of the rows that count."""
        if y is None:
            raise ValueError(f"This {type(self).__name__} estimator requires y to be passed, but the target y is None.")
        table = self._read(X, reset=reset, least=2 if reset else 1)
        y = column_or_1d(y.to_numpy() if hasattr(y, "to_numpy") else y, warn=True)
        rows = len(next(iter(table.values())))
        check_consistent_length(np.empty(rows), y)
        weight = _check_sample_weight(sample_weight, np.empty((rows, 1)), dtype=np.float64, ensure_non_negative=True)
        counts = weight > 0
        numbers = np.flatnonzero(counts)
        self._check_targets(y[counts], numbers)
        return {name: values[counts] for name, values in table.items()}, y[counts], weight[counts], numbers

    def _check_targets(self, y: np.ndarray, numbers: np.ndarray) -> None:
        """Refuse targets that cannot be learned; messages call rows by `numbers`."""
        missing = np.isnan(y) if y.dtype.kind == "f" else np.zeros(len(y), bool)
        if y.dtype == object:
            missing = np.array([str(label) in _NO_LABEL and not isinstance(label, str) for label in y])
        if missing.any():
            row = numbers[missing.argmax()]
            raise ValueError(f"`y` holds missing values, the first in row {row}. Leave such rows out.")

    def _read(self, X: Any, reset: bool = False, least: int = 1) -> dict[str, np.ndarray]:
        """Return the columns of a DataFrame or an array, checked as scikit-learn checks them."""
        if hasattr(X, "collect"):  # a lazy frame of polars
            X = X.collect()
        if hasattr(X, "columns") and hasattr(X, "shape"):
            validate_data(self, X, reset=reset, skip_check_array=True)
            table = columns_of(X)
            if X.shape[0] < least:
                raise ValueError(f"Found a table with {X.shape[0]} sample(s) while a minimum of {least} is required.")
            return table
        mixed = _mixed(X)
        if mixed is not None:
            validate_data(self, mixed, reset=reset, skip_check_array=True)
            return columns_of({str(number): list(column) for number, column in enumerate(mixed.T)})
        checks = {"ensure_all_finite": "allow-nan", "dtype": "numeric", "ensure_min_samples": least}
        return columns_of(validate_data(self, X, reset=reset, **checks))

    def _standard(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        # As elsewhere in scikit-learn, an array after a DataFrame is read by the places of its columns.
        names = (column.name for column in self.features_.encoder.columns)
        return self.features_.standard(dict(zip(names, self._read(X).values(), strict=True)))

    def _predict(self, standard: np.ndarray) -> Tensor:
        """Return every member's output, `(members, rows, outputs)`, in double precision."""
        return predict(self.ensemble_, torch.from_numpy(self.features_.inputs(standard)))

    # How familiar rows are.

    def distance(self, X: Any) -> np.ndarray:
        """Return how far each row is from the nearest training rows: the root of the mean squared distance to five of them.

        Returns:
            `(rows,)`, in standard deviations of the columns. Reading: higher is less familiar.
        """
        return np.sqrt(self._gaps(self._standard(X)).sum(1))

    def p_values(self, X: Any) -> np.ndarray:
        """Return how familiar each row is: the share of held-out rows that are as far from the training rows, or further.

        A conformal p-value: for rows like the training rows it is at most q with probability at most q.

        Returns:
            `(rows,)`, from 0 to 1. Reading: small is unfamiliar.
        """
        return p_values(self._familiar(), self.distance(X))

    def is_unfamiliar(self, X: Any, false_alarms: float | None = None) -> np.ndarray:
        """Return which rows are too far from the training rows to trust an answer.

        Args:
            X: Rows.
            false_alarms: Share of rows like the training rows that may be flagged; the estimator's own by default.
        """
        rate = self.false_alarms if false_alarms is None else false_alarms
        alarm = Alarm.of_scores(self._familiar(), false_alarms=rate)
        return alarm.p_values_of(self.distance(X)) <= alarm.false_alarms

    def drift_monitor(self) -> DriftMonitor:
        """Return a monitor for a stream of rows: `monitor.update_scores(estimator.distance(X))`, in their order."""
        return DriftMonitor.of_scores(self._familiar(), seed=self._seed)

    def _familiar(self) -> np.ndarray:
        """Return the distances of held-out rows, which others are ranked among."""
        check_is_fitted(self)
        if not len(self.held_out_distance_):
            raise ValueError("No training rows were held out to compare with: fit more or raise `validation_fraction`.")
        return self.held_out_distance_

    def explain_alarm(self, X: Any) -> dict[str, np.ndarray]:
        """Return which columns make rows unfamiliar.

        Returns:
            For each column its share of the squared distance to the nearest training rows, `(rows,)`; shares sum to 1.
        """
        gaps, columns = self._gaps(self._standard(X)), self.features_.encoder.columns
        ends = np.cumsum([0, *(len(column.features) for column in columns)])
        parts = {own.name: gaps[:, a:b].sum(1) for own, a, b in zip(columns, ends[:-1], ends[1:], strict=True)}
        total = np.maximum(np.sum(list(parts.values()), 0), np.finfo(np.float64).tiny)
        return {name: part / total for name, part in parts.items()}

    def _gaps(self, standard: np.ndarray) -> np.ndarray:
        """Return the mean squared difference to the nearest training rows in each feature, `(rows, features)`."""
        distance = RowDistance(torch.from_numpy(self.bank_))
        return torch.cat([distance.gaps(rows) for rows in torch.from_numpy(standard).split(1024)]).numpy()

    # Storage: arrays and plain values, for skops, for joblib and for a folder of our own.

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "ensemble_" in state:
            weights = self.ensemble_.state_dict()
            state["ensemble_"] = {name: weight.cpu().numpy() for name, weight in weights.items()}
            state["features_"] = {**vars(self.features_), "encoder": self.features_.encoder.to_json()}
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(dict(state))
        if "ensemble_" in state:
            features = state["features_"]
            self.features_ = Features(**{**features, "encoder": TableEncoder.from_json(features["encoder"])})
            self.ensemble_ = self._make_members().double().eval()
            self.ensemble_.load_state_dict({name: torch.tensor(w) for name, w in state["ensemble_"].items()})

    def save(self, folder: str | Path) -> None:
        """Write the estimator into a folder: `estimator.json` and `arrays.safetensors`, no pickle."""
        arrays: dict[str, np.ndarray] = {}
        state = {"estimator": type(self).__name__, "state": self.__getstate__()}
        text = json.dumps(state, indent=1, default=partial(_plain, arrays=arrays))
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        replace_file(path / "arrays.safetensors", save(arrays))
        (path / "estimator.json").write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read an estimator that `save` wrote."""
        path = Path(folder)
        if not (path / "estimator.json").exists():
            raise ValueError(f"{path} holds no estimator.json. Give the folder that `save` wrote.")
        arrays = load_file(path / "arrays.safetensors")
        text = (path / "estimator.json").read_text(encoding="utf-8")
        stored = json.loads(text, object_hook=partial(_with_arrays, arrays=arrays))
        if stored["estimator"] != cls.__name__:
            raise ValueError(f"{path} holds an {stored['estimator']}; load it with {stored['estimator']}.load.")
        estimator = cls()
        estimator.__setstate__(stored["state"])
        return estimator


class EnsembleClassifier(ClassifierMixin, _TableEnsemble):  # type: ignore[misc]
    """Classify the rows of a table by an ensemble of small networks.

    Columns may hold numbers, words, booleans and dates, also with missing values; words that training did not see are read as
    none of its own. Training stops early by rows that are held out; the alarm and intervals are calibrated on rows like them.

    Args:
        method: Kind of ensemble: "deep", "packed", "batch_ensemble", "masksembles", "mc_dropout" or "anchored".
        num_members: How many networks answer.
        objective: What is minimised: a name such as "joint", a table such as `{"name": "joint", "beta": 0.4}`, or an objective of
            `dissensus.objectives`; each member on its own by default. Its loss is "cross_entropy", "brier" or one's own on class logits; a
            regressor's, which sees standardised targets, "gaussian_nll", "laplace_nll", "mse" or "mae".
        hidden: Widths of a network's hidden layers.
        bins: Pieces that a column of numbers is cut into (`Features`); 0 for the plain number only.
        dropout: Chance that a hidden value is dropped in training.
        epochs: How often training goes through the rows at most.
        patience: Training stops after this many epochs without a better held-out likelihood.
        batch_size: Rows a step; an eighth of all, from 32 to 256, by default.
        lr: Learning rate of AdamW.
        weight_decay: Its weight decay.
        validation_fraction: Share of the rows that is held out, to stop by and for the alarm; a regressor stops by one half of them and
            calibrates intervals on the other.
        false_alarms: Share of familiar rows that `is_unfamiliar` may flag.
        random_state: Seed, or a generator of numpy.
        device: "auto" takes a GPU if there is one.

    Attributes:
        classes_: Labels, in the order of the columns of `predict_proba`.
        ensemble_: The trained members, on the features of a row.
        features_: How a table becomes those features.
        n_epochs_: Epochs that training took.

    Example:
        >>> rows = {"age": [20.0, 30.0, None, 60.0] * 10, "town": ["Ulm", "Ulm", "Bonn", "Bonn"] * 10}
        >>> import pandas
        >>> table = pandas.DataFrame(rows)
        >>> model = EnsembleClassifier(num_members=3, epochs=30).fit(table, ["a", "a", "b", "b"] * 10)
        >>> model.predict(table[:4]).tolist()
        ['a', 'a', 'b', 'b']
        >>> sorted(model.uncertainty(table))
        ['data', 'knowledge', 'total']
    """

    _losses = ("cross_entropy", "brier")

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Go once over further rows, as `fit` takes them; the first call decides what the columns are, so let it see many.

        `classes` are all labels there will be; the first call needs them unless its `y` has them all.
        """
        return self._go_on(X, y, sample_weight, classes)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the mean of the members' probabilities, `(rows, classes)`."""
        return self._predict(self._standard(X)).softmax(-1).mean(0).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of each row."""
        places = self.predict_proba(X).argmax(1)  # first: it says what is missing before `fit`
        return self.classes_[places]

    def uncertainty(self, X: Any) -> dict[str, np.ndarray]:
        """Return how uncertain each answer is, in nats: `total`, of which `data` (noise) and `knowledge` (members disagree)."""
        logits = self._predict(self._standard(X))
        parts = {"total": total_entropy, "data": expected_entropy, "knowledge": mutual_information}
        return {name: score(logits).numpy() for name, score in parts.items()}

    def _check_targets(self, y: np.ndarray, numbers: np.ndarray) -> None:
        super()._check_targets(y, numbers)
        words = [isinstance(label, str) for label in y] if y.dtype == object else []
        if any(words) and not all(words):
            some, other = y[words.index(True)], y[words.index(False)]
            raise ValueError(f"`y` holds words and other labels, such as {some!r} and {other!r}. Write all as words.")

    def _learn_targets(self, y: np.ndarray, weight: np.ndarray, classes: Any) -> None:
        check_classification_targets(y)
        self.classes_ = np.unique(y if classes is None else np.asarray(classes))
        if len(self.classes_) < 2:
            raise ValueError(f"A classifier needs rows of two classes or more; got one class, {self.classes_[0]}.")

    def _encode_targets(self, y: np.ndarray) -> np.ndarray:
        unknown = sorted(set(y.tolist()) - set(self.classes_.tolist()), key=str)
        if unknown:
            raise ValueError(f"`y` holds labels not among the classes: {unknown[:3]}. Name all in `classes`.")
        return np.searchsorted(self.classes_, y)

    def _divide(self, y: np.ndarray) -> np.ndarray:
        use = super()._divide(y)
        for label in np.setdiff1d(y, y[use == _TRAIN]):  # a class must be trained on to be known
            use[np.flatnonzero(y == label)[0]] = _TRAIN
        return use

    def _num_outputs(self) -> int:
        return len(self.classes_)


class EnsembleRegressor(RegressorMixin, _TableEnsemble):  # type: ignore[misc]
    """Predict a number for the rows of a table by an ensemble of small networks, with how sure it is.

    Each member predicts a mean and a standard deviation; their mixture is the answer. Targets are standardised inside. Arguments
    and, but for `classes_`, attributes are those of `EnsembleClassifier`.

    Example:
        >>> x = np.linspace(-2, 2, 200)[:, None]
        >>> model = EnsembleRegressor(num_members=3, epochs=60).fit(x, 3 * x[:, 0])
        >>> mean, std = model.predict([[1.0]], return_std=True)
        >>> bool(abs(mean[0] - 3) < 1 and std[0] < 1)
        True
    """

    _calibrating = 0.5
    _losses = ("gaussian_nll", "laplace_nll", "mse", "mae")

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Go once over further rows, as `fit` takes them; the first call decides what the columns are, so let it see many."""
        return self._go_on(X, y, sample_weight)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of the members' mixture for each row, `(rows,)`; with `return_std` also its standard deviation."""
        mean, variance = self._moments(self._standard(X))
        return (mean, np.sqrt(variance["total"])) if return_std else mean

    def uncertainty(self, X: Any) -> dict[str, np.ndarray]:
        """Return the variance of each answer: `total`, of which `data` (noise) and `knowledge` (members disagree)."""
        return self._moments(self._standard(X))[1]

    def predict_interval(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """Return intervals that hold the target in so many cases, as wide as the held-out rows ask for.

        Args:
            X: Rows.
            coverage: How often the target lies inside.

        Returns:
            `(rows, 2)`, lower and upper ends; infinite where there are too few held-out rows for the coverage.
        """
        new = self.predict(X, return_std=True)
        if not self.calibrates_.any():
            raise ValueError(
                "No training rows were held out to calibrate intervals on: fit on more rows, or with a larger `validation_fraction`."
            )
        held, variance = self._moments(self.held_out_x_[self.calibrates_])
        truth = self._unscaled(self.held_out_y_[self.calibrates_, 0])
        return intervals((held, np.sqrt(variance["total"])), truth, new, coverage)

    def _moments(self, standard: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the mean, and the variance with its parts, in the target's units."""
        outputs, likelihood = self._predict(standard), self._objective().likelihood
        if likelihood.kind == "density":
            mean, scale = likelihood.mean_and_scale(outputs)
            data = data_variance(mean, scale, family=likelihood.family)[:, 0].numpy()
        else:
            mean, data = outputs, np.full(len(standard), self.noise_)
        data = data * self.target_scale_**2
        knowledge = mean.var(0, correction=0)[:, 0].numpy() * self.target_scale_**2
        parts = {"total": data + knowledge, "data": data, "knowledge": knowledge}
        return self._unscaled(mean.mean(0)[:, 0].numpy()), parts

    def _unscaled(self, target: np.ndarray) -> np.ndarray:
        return target * self.target_scale_ + self.target_mean_

    def _check_targets(self, y: np.ndarray, numbers: np.ndarray) -> None:
        super()._check_targets(y, numbers)
        infinite = np.isinf(_numbers(y))
        if infinite.any():
            row = numbers[infinite.argmax()]
            raise ValueError(f"`y` holds infinity, the first in row {row}. Leave such rows out.")

    def _learn_targets(self, y: np.ndarray, weight: np.ndarray, classes: Any) -> None:
        y = _numbers(y)
        self.target_mean_ = float(np.average(y, weights=weight))
        spread = float(np.sqrt(np.average((y - self.target_mean_) ** 2, weights=weight)))
        self.target_scale_ = spread if spread > 1e-12 * abs(self.target_mean_) else 1.0

    def _encode_targets(self, y: np.ndarray) -> np.ndarray:
        return (((_numbers(y) - self.target_mean_) / self.target_scale_)[:, None]).astype(np.float32)

    def _num_outputs(self) -> int:
        return 2 if self._objective().likelihood.kind == "density" else 1

    def _remember(self, rows: _Rows) -> None:
        super()._remember(rows)
        # Members that predict no scale of their own share one: the error on rows that they were not trained on, if there are any.
        if self._objective().likelihood.kind == "points":
            x, y = (self.held_out_x_, self.held_out_y_) if len(self.held_out_x_) else (rows.x, rows.y)
            error = self._predict(x).mean(0).numpy() - y
            self.noise_ = float(np.square(error).mean())


def _seed_of(random_state: Any) -> int:
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31 - 1))
    return int(check_random_state(random_state).randint(2**31 - 1))


def _tell_left_out(encoder: TableEncoder) -> None:
    """Warn of columns that are no features, by name."""
    if left_out := [f"{column.name!r} ({column.note})" for column in encoder.columns if not column.features]:
        warn(f"Columns that are no features: {', '.join(left_out)}. Drop them, or give them as numbers.")


def _numbers(y: np.ndarray) -> np.ndarray:
    try:
        return y.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"A regressor predicts numbers; `y` holds {y.tolist()[0]!r}. Convert it, or take EnsembleClassifier."
        ) from None


def _mixed(X: Any) -> np.ndarray | None:
    """Return an array of words and numbers as it is; None for one of numbers only."""
    if hasattr(X, "toarray"):  # sparse, which scikit-learn's own check refuses
        return None
    array = X if isinstance(X, np.ndarray) else np.asarray(X, dtype=object)
    if array.ndim != 2 or array.dtype.kind not in "OUS":
        return None
    return array if any(isinstance(value, str) for value in array.ravel().tolist()) else None


def _plain(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return what JSON has in place of a value: of an array of numbers its number among `arrays`, of an objective its table."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        arrays[str(len(arrays))] = np.ascontiguousarray(value)
        return {"array": str(len(arrays) - 1)}
    if isinstance(value, np.ndarray):
        return {"values": value.tolist(), "dtype": value.dtype.str}
    if isinstance(value, Objective):
        name = next((name for name, kind in OBJECTIVES.items() if kind is type(value)), None)
        return {"name": name} | {each.name: getattr(value, each.name) for each in fields(value)}  # type: ignore[arg-type]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"A {type(value).__name__} cannot be written as JSON. Give the estimator plain values.")


def _with_arrays(value: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    if set(value) == {"array"}:
        return arrays[value["array"]]
    if set(value) == {"values", "dtype"}:
        return np.array(value["values"], dtype=np.dtype(value["dtype"]))
    return value
