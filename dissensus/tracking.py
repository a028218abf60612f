"""Training as others' dashboards show it: callbacks for TensorBoard and MLflow, and a model that MLflow serves.

`fit(..., callback=TensorBoard("runs/a"))` writes every check: each column of the history as the mean over members, and, where members
differ, each one's own value under `member_0/column`, ...
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dissensus.conformal import Alarm
from dissensus.members import Members
from dissensus.training import Run
from dissensus.training.history import mean_of

_PLACES = ("epoch", "step", "member")  # columns that say where a row belongs


def latest(run: Run, step: int | None = None) -> dict[str, float]:
    """Return what the last check, or that after a step, found: means over members and, where they differ, each member's value.

    Example:
        >>> import torch, dissensus as ds
        >>> data = torch.randn(32, 3), torch.randint(0, 2, (32,))
        >>> run = ds.fit(ds.DeepEnsemble(lambda: torch.nn.Linear(3, 2), 2), data, epochs=1, device="cpu")
        >>> sorted(name for name in latest(run) if name.endswith("loss"))
        ['loss', 'member_0/loss', 'member_1/loss']
    """
    rows = [row for row in run.history if row["step"] == (run.step if step is None else step)]
    found: dict[str, float] = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        if name in _PLACES:
            continue
        values = {int(row["member"]): float(row[name]) for row in rows if name in row}
        found[name] = mean_of(list(values.values()))
        if len(set(values.values())) > 1:
            found |= {f"member_{member}/{name}": value for member, value in values.items()}
    return found


@dataclass
class TensorBoard:
    """Write every check for TensorBoard; needs the package `tensorboard`.

    Args:
        folder: Where events go: `tensorboard --logdir FOLDER` shows them.

    Example:
        ds.fit(ens, data, callback=TensorBoard("runs/a"))
    """

    folder: str | Path

    @cached_property
    def _writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder))

    def __call__(self, run: Run) -> None:
        """Write what the last check found."""
        for name, value in latest(run).items():
            self._writer.add_scalar(name, value, run.step)
        self._writer.flush()


@dataclass(frozen=True)
class MLflow:
    """Log every check to MLflow; needs `mlflow` or `mlflow-skinny`.

    Args:
        run_id: Which run of MLflow; the active one by default.

    Example:
        with mlflow.start_run():
            ds.fit(ens, data, callback=MLflow())
    """

    run_id: str | None = None

    def __call__(self, run: Run) -> None:
        """Log what the last check found."""
        import mlflow

        mlflow.log_metrics(latest(run), step=run.step, run_id=self.run_id)


def log_model(ens: Members, example: Any, *, alarm: Alarm | None = None, name: str = "model", **options: Any) -> Any:
    """Log an ensemble to MLflow's active run as the ONNX file that `ds.export` writes, with uncertainty and alarm.

    Args:
        ens: The trained ensemble.
        example: Some inputs, as `ds.export` takes them.
        alarm: What `ds.Alarm.calibrate` returned.
        name: What the model is called in the run.
        **options: What else `ds.export` takes: `loss="gaussian_nll"` of a regression without an alarm, `preprocess`, `precision`, ....

    Returns:
        What `mlflow.onnx.log_model` returns: `mlflow.onnx.load_model(found.model_uri)` has the file back.
    """
    import mlflow.onnx
    import onnx

    from dissensus.exporting import export

    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        export(ens, path, example=example, alarm=alarm, **options)
        return mlflow.onnx.log_model(onnx.load(path), name=name)
