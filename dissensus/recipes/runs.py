"""A run's folder: what a finished run leaves there, and how it is read back."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dissensus._files import only_writer, replace_file
from dissensus.data.files import Loaded
from dissensus.members import DeepEnsemble, Members
from dissensus.objectives import mean_and_scale
from dissensus.objectives.likelihoods import SCALE_FLOOR
from dissensus.recipes.preprocessing import Preprocessing
from dissensus.recipes.sets import Sets, find_rows, label_names, row_digests, split_classes, without_left_out
from dissensus.training.checkpoints import CheckpointError, CheckpointFolder

if TYPE_CHECKING:
    from dissensus.recipes.recipe import Recipe

RECIPE = "recipe.toml"
ENSEMBLE = "ensemble"
_ROWS = "rows."
_PARTS = ("train", "validation", "test", "calibration")

log = logging.getLogger("dissensus")


class LoadedRun(NamedTuple):
    """A finished run: the trained ensemble, its recipe, and what happens to inputs before members see them.

    Predictions of a regression are in the units of the data: `ds.predict(run.ensemble, run.preprocessing(x))`.
    """

    ensemble: Members
    recipe: "Recipe"
    preprocessing: Preprocessing

    @property
    def family(self) -> Literal["gaussian", "laplace"]:
        """Which distribution the outputs of a regression with a likelihood describe."""
        return "laplace" if self.recipe.likelihood.name == "laplace_nll" else "gaussian"

    def mean_and_scale(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and scales of a regression's outputs; scales are zero where members give points."""
        if self.recipe.likelihood.kind == "density":
            return mean_and_scale(outputs)
        return outputs, torch.zeros_like(outputs)


def check_folder(folder: Path, resume: bool) -> None:
    """Refuse to train into a folder that holds a run, unless it is to go on."""
    if not resume and any(CheckpointFolder(folder).exists(kind) for kind in ("last", ENSEMBLE)):
        raise ValueError(
            f"{folder} already holds a run. Go on with it (--resume, resume=True), or choose another folder."
        )


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a run that was trained to its end."""
    return folder.is_dir() and CheckpointFolder(folder).exists(ENSEMBLE)


@contextlib.contextmanager
def started(folder: Path, recipe: str) -> Iterator[None]:
    """Put the recipe into a run's folder, which is the block's alone; take both back where it fails before the first checkpoint.

    An interruption is no failure: the run can still go on.
    """
    path = folder / RECIPE
    before = path.read_text(encoding="utf-8") if path.exists() else None
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        with only_writer(folder, ".recipe"):
            replace_file(path, recipe)
            yield
    except Exception:
        if not CheckpointFolder(folder).exists():
            if before is None:
                path.unlink(missing_ok=True)
            else:
                replace_file(path, before)
            # Of the folders that were made; one that somebody put something into stays, and so do those around it.
            with contextlib.suppress(OSError):
                for each in made:
                    each.rmdir()
        raise


def save_ensemble(
    folder: Path, ensemble: Members, preprocessing: Preprocessing, outputs: int, step: int, sets: Sets
) -> None:
    """Write the ensemble's tensors, what is needed to build it again, and which rows are which, in one step."""
    facts = {"preprocessing": preprocessing.to_json(), "outputs": outputs, "members": list(ensemble.member_ids)}
    rows = {f"{_ROWS}{part}": row_digests(own) for part in _PARTS if (own := getattr(sets, part)) is not None}
    CheckpointFolder(folder).save(ENSEMBLE, step, {**ensemble.state_dict(), **rows}, facts)


def rows_of_run(run: LoadedRun, folder: Path, part: str, advice: str = "Restore the file.") -> Loaded | None:
    """Read again the rows that a run trained on or held out, as they were, whatever else has come into its file since.

    None where the run held none out for that part; a file that lacks some of them is refused, with advice.
    """
    if part != "train" and isinstance(source := getattr(run.recipe.data, part), str):
        return without_left_out(run.preprocessing.read(source), run.recipe.data.leave_out)
    digests = CheckpointFolder(folder).load(ENSEMBLE)[0].get(f"{_ROWS}{part}")
    if digests is None:
        return None
    whole = run.preprocessing.read(run.recipe.data.path)
    rows = find_rows(whole, digests)
    if rows is None:
        raise ValueError(
            f"{run.recipe.data.path} has changed since training: some of the {len(digests)} rows of the run's {part} part are no "
            f"longer in it. {advice}"
        )
    return whole.rows(rows)


def left_out_rows(run: LoadedRun) -> Loaded | None:
    """Read the rows of classes that training never saw; None where the recipe leaves none out."""
    if not run.recipe.data.leave_out:
        return None
    whole = run.preprocessing.read(run.recipe.data.path)
    return whole.rows(split_classes(label_names(whole), run.recipe.data.leave_out)[1])


def load_run(folder: str | Path, *, allow_import: bool = False) -> LoadedRun:
    """Read a finished run.

    Args:
        folder: What `Recipe.train` or `dissensus train` wrote.
        allow_import: Whether `module:factory` of the recipe may be imported, which runs that module's code.

    Returns:
        The ensemble, on the CPU and in evaluation mode, with the selected weights (the best, or else the last); the
        recipe; and the preprocessing.

    Example:
        >>> load_run("no/such/folder")
        Traceback (most recent call last):
        ValueError: There is no run in no/such/folder: it holds no recipe.toml. Train one with: dissensus train RECIPE.toml
    """
    from dissensus.recipes.recipe import Recipe

    folder = Path(folder)
    if not (folder / RECIPE).is_file():
        raise ValueError(
            f"There is no run in {folder}: it holds no {RECIPE}. Train one with: dissensus train RECIPE.toml"
        )
    recipe = Recipe.read(folder / RECIPE)
    if not CheckpointFolder(folder).exists(ENSEMBLE):
        raise ValueError(f"The run in {folder} has not finished. Go on with: dissensus train {folder} --resume")
    tensors, facts, problem = CheckpointFolder(folder).load(ENSEMBLE)
    if problem is not None:
        log.warning("%s The ensemble saved before it is used.", problem)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(_ROWS)}
    preprocessing = Preprocessing.from_json(facts["preprocessing"])
    ensemble = recipe.build_ensemble(preprocessing, facts["outputs"], allow_import=allow_import)
    if list(ensemble.member_ids) != facts["members"]:
        ensemble.keep_members([ensemble.member_ids.index(member) for member in facts["members"]])
    try:
        ensemble.load_state_dict(tensors)
    except RuntimeError as difference:
        first = str(difference).strip().splitlines()[-1].strip()
        raise CheckpointError(f"The ensemble in {folder} does not fit the network of its recipe: {first}") from None
    return LoadedRun(_in_units(ensemble.eval(), recipe, preprocessing), recipe, preprocessing)


class InUnits(nn.Module):
    """Outputs of a member that learned standardised targets, in the units of the data; `density`: they are (mean, rho)."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, density: bool) -> None:
        super().__init__()
        self.density = density
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, outputs: Tensor) -> Tensor:
        """Return outputs `(batch, outputs)` of the same meaning."""
        if not self.density:
            return outputs * self.std + self.mean
        mean, scale = mean_and_scale(outputs)
        wanted = (scale * self.std - SCALE_FLOOR).clamp_min(1e-12)
        # The inverse of softplus, in a form that neither overflows for large scales nor cancels for small ones.
        rho = wanted + torch.log(-torch.expm1(-wanted))
        return torch.cat([mean * self.std + self.mean, rho], dim=-1)


def _in_units(ensemble: Members, recipe: "Recipe", preprocessing: Preprocessing) -> Members:
    if preprocessing.target_mean is None or preprocessing.target_std is None:
        return ensemble
    mean, std = torch.tensor(preprocessing.target_mean), torch.tensor(preprocessing.target_std)
    density = recipe.likelihood.kind == "density"
    nets = [nn.Sequential(ensemble.member(j), InUnits(mean, std, density)) for j in range(ensemble.num_members)]
    return DeepEnsemble.from_members(nets, seed=ensemble.seed).eval()
