"""An ensemble in code of other people: a plain PyTorch loop, Trainer, Lightning, torchmetrics, pytorch-ood, OpenOOD's arrays.

The loop gives the curve of `ds.fit` for the same batches: the sum of the members' losses trains each member as it would alone.
Run: python examples/own_training.py
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dissensus as ds


def make_net() -> nn.Module:
    """Make one member."""
    return ds.architectures.mlp(4, [16], 3)


def data(count: int = 96) -> tuple[Tensor, Tensor]:
    """Return inputs and labels that can be learnt."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def plain_loop(ens: nn.Module, loader: DataLoader, epochs: int, lr: float) -> list[list[float]]:
    """Train with a loop of one's own; return each member's mean loss, epoch by epoch."""
    optimizer = torch.optim.SGD(ens.parameters(), lr=lr)
    curve = []
    for _ in range(epochs):
        sums, steps = torch.zeros(ens.num_members), 0
        for x, y in loader:
            losses = torch.stack([F.cross_entropy(member, y) for member in ens(x)])
            optimizer.zero_grad()
            losses.sum().backward()
            optimizer.step()
            sums, steps = sums + losses.detach(), steps + 1
        curve.append((sums / steps).tolist())
    return curve


def fitted(ens: nn.Module, loader: DataLoader, epochs: int, lr: float) -> list[list[float]]:
    """Train with `ds.fit`; return the same curve."""
    run = ds.fit(ens, loader, epochs=epochs, lr=lr, optimizer="sgd", device="cpu")
    rows = run.history.rows
    return [[row["loss"] for row in rows if row["epoch"] == epoch + 1] for epoch in range(epochs)]


class EnsembleForTrainer(nn.Module):
    """What the Trainer of transformers wants of a model: a dictionary with the loss, and logits with the batch first."""

    def __init__(self, ens: nn.Module) -> None:
        super().__init__()
        self.ens = ens

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the sum of the members' losses and the mean of their probabilities as logits."""
        outputs = self.ens(x)
        loss = sum(F.cross_entropy(member, labels) for member in outputs)
        return {"loss": loss, "logits": outputs.log_softmax(-1).logsumexp(0)}


def with_trainer(ens: nn.Module, folder: str, epochs: int = 3) -> float:
    """Train inside the Trainer of transformers; return the loss at the end."""
    from transformers import Trainer, TrainingArguments

    x, y = data()
    rows = [{"x": each, "labels": label} for each, label in zip(x, y, strict=True)]
    arguments = TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        learning_rate=0.01,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(EnsembleForTrainer(ens), arguments, train_dataset=rows).train().training_loss


def with_torchmetrics(ens: nn.Module) -> float:
    """Return the calibration error of the averaged prediction, by torchmetrics."""
    from torchmetrics.classification import MulticlassCalibrationError

    x, y = data()
    metric = MulticlassCalibrationError(3, n_bins=15)
    return float(metric(ds.predict(ens, x).softmax(-1).mean(0), y))


def with_lightning(ens: nn.Module, loader: DataLoader, epochs: int, lr: float) -> None:
    """Train inside Lightning, whichever of its two packages is installed."""
    try:
        import lightning
    except ImportError:
        import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.ens = ens

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            x, y = batch
            return sum(F.cross_entropy(member, y) for member in self.ens(x))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=lr)

    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Module(), loader)


def with_pytorch_ood(ens: nn.Module, x: Tensor) -> Tensor:
    """Return a detector of pytorch-ood for each member, averaged, as a score: `(batch,)`, higher for what is unknown."""
    from pytorch_ood.detector import EnergyBased

    return torch.stack([EnergyBased(ens.member(j).eval())(x) for j in range(ens.num_members)]).mean(0)


def for_openood(ens: nn.Module, known: tuple[Tensor, Tensor], unknown: Tensor) -> tuple[np.ndarray, ...]:
    """Return what OpenOOD's metrics take: confidence (higher = known), label (-1 = unknown), and prediction."""
    x, y = torch.cat([known[0], unknown]), torch.cat([known[1], torch.full((len(unknown),), -1)])
    logits = ds.predict(ens, x)
    prediction = logits.softmax(-1).mean(0).argmax(-1)
    return tuple(t.numpy() for t in (-ds.scores.mutual_information(logits), y, prediction))


class Detector:
    """A score with the interface of pytorch-ood's detectors: `fit`, and a call that is higher for what is unknown."""

    def __init__(self, ens: nn.Module, score: str = "mutual_information") -> None:
        self.ens, self.score = ens, score

    def fit(self, loader: object) -> "Detector":
        """Learn nothing: the members are trained already."""
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """Return scores, `(batch,)`."""
        return ds.predict_scores(self.ens, x, [self.score])[self.score]


def main() -> None:
    """Show that the two curves are one."""
    loader = DataLoader(TensorDataset(*data()), batch_size=16)
    mine = plain_loop(ds.DeepEnsemble(make_net, 5).train(), loader, epochs=5, lr=0.1)
    theirs = fitted(ds.DeepEnsemble(make_net, 5), loader, epochs=5, lr=0.1)
    for epoch, (a, b) in enumerate(zip(mine, theirs, strict=True), start=1):
        print(f"epoch {epoch}: own loop {sum(a) / 5:.5f}, ds.fit {sum(b) / 5:.5f}")


if __name__ == "__main__":
    main()
