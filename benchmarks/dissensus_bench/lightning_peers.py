"""Libraries that train under Lightning's trainer, each in its own documented way: TorchUncertainty and lightning-uq-box.

A turn fits for two epochs, and the second is what counts: building a trainer and the first step's allocations are not in
a step's time, as they are not in ours. Loggers, progress bars, checkpoints and validation are off, which favours them.
"""

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dissensus_bench.problems import Problem
from dissensus_bench.rivals import Turn
from dissensus_bench.timing import clock


def ensemble_routine(problem: Problem) -> Turn | str:
    """Return TorchUncertainty's turn: `deep_ensembles` in a routine under `TUTrainer`; or why it cannot take part.

    Members share their batches and one optimizer.
    """
    if reason := _left_out(problem):
        return reason
    library, regression = import_module("torch_uncertainty"), problem.loss == "mse"
    routines = import_module("torch_uncertainty.routines")
    deep_ensembles = import_module("torch_uncertainty.methods").deep_ensembles
    repeat_target = import_module("torch_uncertainty.transforms").RepeatTarget(problem.members)
    outputs = problem.y.shape[-1] if regression else int(problem.y.max()) + 1
    # For one output its routine adds the last axis to the targets itself.
    targets = problem.y[..., 0] if regression and outputs == 1 else problem.y
    loader = DataLoader(TensorDataset(problem.x.cpu(), targets.cpu()), problem.batch, shuffle=True)

    def turn() -> float:
        task = {"task": "regression", "probabilistic": False} if regression else {"task": "classification"}
        ensemble = deep_ensembles(problem.make(), num_estimators=problem.members, **task)
        kind = routines.RegressionRoutine if regression else routines.ClassificationRoutine
        size = {"output_dim": outputs} if regression else {"num_classes": outputs}
        routine = kind(
            model=ensemble,
            loss=_loss(problem),
            is_ensemble=True,
            format_batch_fn=repeat_target,
            optim_recipe=problem.torch_optimizer(ensemble.parameters()),
            **size,
        )
        with _quiet():
            return _second_epoch(library.TUTrainer, routine, loader, problem)

    return Turn(turn, len(loader))


def member_after_member(problem: Problem) -> Turn | str:
    """Return lightning-uq-box's turn: its deterministic module fitted once for each member; or why it cannot take part."""
    if reason := _left_out(problem):
        return reason
    methods = import_module("lightning_uq_box.uq_methods")
    collate = import_module("lightning_uq_box.datamodules.utils").collate_fn_tensordataset
    trainer = import_module("lightning").Trainer
    kind = methods.DeterministicRegression if problem.loss == "mse" else methods.DeterministicClassification
    data = TensorDataset(problem.x.cpu(), problem.y.cpu())
    loader = DataLoader(data, problem.batch, shuffle=True, collate_fn=collate)

    def turn() -> float:
        seconds = 0.0
        with _quiet():
            for _ in range(problem.members):
                module = kind(problem.make(), _loss(problem), optimizer=problem.torch_optimizer)
                seconds += _second_epoch(trainer, module, loader, problem)
        return seconds

    return Turn(turn, len(loader))


def _left_out(problem: Problem) -> str | None:
    if problem.picked is not None:
        return "trains all members in every step"
    if problem.augment is not None:
        return "augmentation is its data loader's business"
    return None


def _loss(problem: Problem) -> nn.Module:
    return nn.MSELoss() if problem.loss == "mse" else nn.CrossEntropyLoss()


def _second_epoch(trainer: Callable[..., Any], module: Any, loader: Any, problem: Problem) -> float:
    """Fit a module for two epochs and return what the second took."""
    stamps: dict[str, float] = {}
    watch = import_module("lightning.pytorch.callbacks").LambdaCallback(
        on_train_epoch_start=lambda *_: stamps.update(began=clock(problem.device)),
        on_train_end=lambda *_: stamps.update(ended=clock(problem.device)),
    )
    trainer(
        max_epochs=2,
        accelerator="gpu" if problem.x.is_cuda else "cpu",
        devices=1,
        precision="bf16-mixed" if problem.bf16 else "32-true",
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader)
    return stamps["ended"] - stamps["began"]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's advice on devices and workers to itself."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def wrapped_forward(nets: Sequence[nn.Module], x: Tensor, batch: int) -> Callable[[], None]:
    """Return TorchUncertainty's predictions: the forward pass of `deep_ensembles`, which returns every member's logits."""
    ensemble = import_module("torch_uncertainty.methods").deep_ensembles(list(nets)).eval()

    def predict() -> None:
        for rows in x.split(batch):
            ensemble(rows)

    return predict


def loaded_when_needed(nets: Sequence[nn.Module], x: Tensor, batch: int) -> Callable[[], None]:
    """Return lightning-uq-box's predictions: `predict_step` of its ensemble, which reads each member's file for every batch."""
    methods = import_module("lightning_uq_box.uq_methods")
    folder = tempfile.TemporaryDirectory()
    members = []
    for index, net in enumerate(nets):
        module = methods.DeterministicClassification(net, nn.CrossEntropyLoss())
        path = Path(folder.name) / f"{index}.ckpt"
        torch.save({"state_dict": module.state_dict()}, path)
        members.append({"base_model": module, "ckpt_path": path})
    with torch.no_grad():
        classes = nets[0](x[:1]).shape[-1]
    ensemble = methods.DeepEnsembleClassification(members, classes)

    def predict(folder: object = folder) -> None:  # the folder lasts as long as this function
        for rows in x.split(batch):
            ensemble.predict_step(rows)

    return predict
