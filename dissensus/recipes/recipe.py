"""A recipe, everything that decides a run, read from TOML and checked before anything is trained; and the run that it becomes."""

import contextlib
import filecmp
import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dissensus._files import only_writer, replace_file
from dissensus.data.files import Loaded
from dissensus.members import DeepEnsemble, Members
from dissensus.objectives import Likelihood, Objective, mean_and_scale
from dissensus.objectives.likelihoods import SCALE_FLOOR
from dissensus.recipes import choices
from dissensus.recipes.alarms import AlarmSettings, calibrate_run
from dissensus.recipes.data import (
    ENSEMBLE,
    ROWS,
    DataSettings,
    Preprocessing,
    Sets,
    find_rows,
    label_names,
    load_sets,
    row_digests,
    split_classes,
    stored_digests,
    without_left_out,
)
from dissensus.recipes.settings import AUTO, changed, check_names, checked, choose, parameters, to_toml
from dissensus.training import Run, fit
from dissensus.training.checkpoints import CheckpointError, CheckpointFolder
from dissensus.training.mesh import mesh_of

RECIPE = "recipe.toml"
_PARTS = ("train", "validation", "test", "calibration")
# Arguments of `fit` that are not settings of a recipe's [training].
_NOT_TRAINING = (
    *("members", "data", "objective", "schedule", "augment", "unlabelled", "validation", "seed"),
    *("checkpoint_dir", "resume", "callback", "progress", "workers"),
)
_ENSEMBLE = {"kind": "deep", "members": 5, "seed": 0}
_NOT_OPTIONS = ("make_member", "num_members", "seed", "shape")
_HOMES = {"seed": "ensemble", "members": "ensemble", "epochs": "training", "loss": "objective"}
# As many as a small network needs to learn a small table.
_STEPS = 2000
# Settings that change how fast or where a run goes, not what comes out.
_NOT_COMPARED = ("device", "engine", "concurrent_members", "checkpoint_every")


log = logging.getLogger("dissensus")


@dataclass(frozen=True)
class Recipe:
    """A run described: data, network, ensemble, objective, training and augmentation.

    All settings are there, with defaults filled in; `Recipe.read` makes one from a file, and `train` runs it.

    Attributes:
        data: Where the data is, and what is held out of it.
        model: Name of the network and its options.
        ensemble: Its kind, number of members, seed, and options of the kind.
        objective: Name of the objective and its options; what it wraps under `inner`.
        training: Arguments of `ds.fit`.
        augment: Name of each augmentation and its options, in order.
        alarm: Which score raises the alarm, and how often ordinary inputs may.

    Example:
        >>> recipe = Recipe.from_tables({"data": {"path": "digits"}, "model": {"name": "mlp", "hidden": [32]}})
        >>> recipe.ensemble["members"], recipe.training["lr"], recipe.training["epochs"]
        (5, 0.001, 'auto')
        >>> settled = recipe.settled(recipe.load_sets())
        >>> settled.training["epochs"], settled.training["batch_size"], settled.objective["loss"]
        (77, 64, 'cross_entropy')
    """

    data: DataSettings
    model: Mapping[str, Any]
    ensemble: Mapping[str, Any]
    objective: Mapping[str, Any]
    training: Mapping[str, Any]
    augment: Mapping[str, Any]
    alarm: AlarmSettings

    @classmethod
    def read(cls, path: str | Path, changes: Sequence[str] = ()) -> "Recipe":
        """Read a recipe.

        Args:
            path: A TOML file, or a run's folder. Paths in it are relative to its folder.
            changes: Settings to change, such as `"training.epochs=3"`.
        """
        path = Path(path)
        path = path / RECIPE if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"There is no recipe {path}.")
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
            raise ValueError(f"{path} is not valid TOML: {problem}") from None
        tables.pop("sweep", None)  # says which runs there are, not what one of them is
        try:
            return cls.from_tables(changed(tables, changes), path.parent)
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from None

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], folder: str | Path = ".") -> "Recipe":
        """Make a recipe from nested dicts; paths in them are relative to `folder`."""
        _check_tables(tables, [field.name for field in fields(cls)])
        recipe = cls(
            data=DataSettings(**checked(DataSettings, tables["data"], "[data]")).resolved(Path(folder)),
            model=choices.resolve_model(tables["model"], Path(folder)),
            ensemble=_resolve_ensemble(tables.get("ensemble", {})),
            objective=choices.resolve_objective(tables.get("objective", {})),
            training=_resolve_training(tables.get("training", {})),
            augment=choices.resolve_augment(tables.get("augment", {})),
            alarm=AlarmSettings(**checked(AlarmSettings, tables.get("alarm", {}), "[alarm]")),
        )
        # What these find is better known now than after the data is read.
        recipe.build_objective()
        choices.build_optimizer(recipe.training["optimizer"])
        return recipe

    def to_toml(self) -> str:
        """Return the recipe as TOML, with every default filled in."""
        return to_toml({**asdict(self), "data": {key: own for key, own in asdict(self.data).items() if own != ()}})

    @property
    def likelihood(self) -> Likelihood:
        """What outputs mean."""
        return self.build_objective().likelihood

    def build_objective(self) -> Objective:
        """Make the objective; masked examples get the uniform target where the ensemble asks for that."""
        objective = choices.build_objective(self.objective)
        uniform = self.ensemble.get("masked_target") == "uniform"
        return objective.uniform_where_masked() if uniform else objective

    def build_ensemble(self, preprocessing: Preprocessing, outputs: int, *, allow_import: bool = False) -> Members:
        """Make the untrained ensemble, for inputs that look as `preprocessing` says and so many outputs a prediction."""
        options = {key: value for key, value in self.ensemble.items() if key not in _ENSEMBLE}
        make = choices.member_factory(self.model, preprocessing.shape, outputs, allow_import)
        kind = choices.KINDS[self.ensemble["kind"]]
        if "shape" in parameters(kind):
            options["shape"] = preprocessing.shape
        return kind(make, self.ensemble["members"], seed=self.ensemble["seed"], **options)

    def load_sets(self) -> Sets:
        """Read the data and split it; the same rows every time."""
        is_open = choices.with_loss(self.objective, regression=False) != self.objective
        return load_sets(self.data, None if is_open else self.likelihood.kind == "classes")

    def settled(self, sets: Sets) -> "Recipe":
        """Return the recipe with what it leaves to the data decided: the loss, the size of batches, and how long to train.

        Small data is gone through more often, until about 2 000 steps are made; of these the best check on the validation
        rows is kept.
        """
        self.alarm.check(regression=sets.classes is None)
        training = dict(self.training)
        rows = len(sets.train)
        if training["batch_size"] == AUTO:
            # A power of two that cuts the rows into 16 batches or more, from 16 to 128.
            training["batch_size"] = max(16, min(128, 1 << max(rows // 16, 1).bit_length() - 1))
        if training["epochs"] == AUTO:
            training["epochs"] = max(10, ceil(_STEPS / ceil(rows / training["batch_size"])))
            if sets.validation is not None:
                training.setdefault("select", "ensemble_loss")
        if training["checkpoint_every"] == AUTO:
            training["checkpoint_every"] = max(1, training["epochs"] // 20)
        return replace(self, objective=choices.with_loss(self.objective, sets.classes is None), training=training)

    def train(
        self,
        folder: str | Path,
        *,
        resume: bool = False,
        allow_import: bool = False,
        progress: bool | None = None,
        mesh: tuple[int, int] | None = None,
    ) -> Run:
        """Train the ensemble and write the run into a folder.

        The folder gets `recipe.toml`, checkpoints, `history.csv` and, at the end, the ensemble for `load_run`.

        Args:
            folder: The run's folder; it is made where it does not exist.
            resume: Go on with a run that was interrupted; it ends as if it had not been.
            allow_import: Whether `module:factory` of `[model]` may be imported, which runs that module's code.
            progress: Show progress; by default on a terminal only.
            mesh: Over how many processes of `torchrun` members and batches are spread, as of `ds.fit`; the first one writes.

        Returns:
            What `ds.fit` returns.
        """
        folder = Path(folder)
        if not resume and any(map(CheckpointFolder(folder).exists, ("last", ENSEMBLE))):
            raise ValueError(f"{folder} already holds a run. Go on (--resume, resume=True), or choose another folder.")
        choices.check_import(self.model["name"], allow_import)
        sets = self.load_sets()
        recipe = self.settled(sets)
        if resume and (folder / RECIPE).exists():
            recipe.check_same(Recipe.read(folder), folder)
        together = mesh_of(mesh)
        writes = together is None or together.first
        preprocessing = Preprocessing.learn(sets.train, sets.classes, self.data)
        (x, y), more = preprocessing.pair(sets.train), self.data.unlabelled
        outputs = len(sets.classes or y[0]) * (2 if recipe.likelihood.kind == "density" else 1)
        ensemble = recipe.build_ensemble(preprocessing, outputs, allow_import=allow_import)
        ensemble.see(x)
        with started(folder, recipe.to_toml()) if writes else contextlib.nullcontext():
            run = fit(
                ensemble,
                (x, y),
                objective=recipe.build_objective(),
                augment=choices.build_augment(self.augment, None if sets.classes is None else len(sets.classes)),
                seed=self.ensemble["seed"],
                checkpoint_dir=str(folder),
                resume=resume,
                progress=progress,
                mesh=mesh,
                validation=None if sets.validation is None else preprocessing.pair(sets.validation),
                unlabelled=None if more is None else preprocessing(preprocessing.read(more).x),
                **{
                    **recipe.training,
                    "optimizer": choices.build_optimizer(self.training["optimizer"]),
                    "schedule": choices.build_schedule(self.training["schedule"]),
                },
            )
            if writes:
                facts = {"outputs": outputs, "members": list(ensemble.member_ids)}
                trained = _rebuilt(folder, recipe, preprocessing, facts, ensemble.state_dict(), allow_import)
                for note in calibrate_run(trained, sets, self.alarm, folder):
                    log.warning("%s", note)
                # Last, since it is what tells a finished run.
                save_ensemble(folder, ensemble, {**facts, "preprocessing": preprocessing.to_json()}, run.step, sets)
        return run

    def check_same(self, stored: "Recipe", folder: Path, *, moved: bool = False) -> None:
        """Refuse to go on with a run of another recipe.

        Where the run may have been made in another place, of paths the names count, and what is left to the data here does not.
        """
        tables = (tomllib.loads(recipe.to_toml()) for recipe in (self, stored))
        here, there = ({(table, key): own[key] for table, own in each.items() for key in own} for each in tables)
        for table, key in {**there, **here}:
            one, other = there.get((table, key)), here.get((table, key))
            alike = one == other or (moved and _same_elsewhere(one, other))
            if not alike and key not in _NOT_COMPARED:
                raise ValueError(
                    f"The run in {folder} has another recipe: {key} in [{table}] is {one!r} there and {other!r} here. "
                    "Give the same recipe, or choose another folder."
                )


def _same_elsewhere(there: Any, here: Any) -> bool:
    """Whether a value is left to the data, or both are paths of one name, of which the other is gone or a file of the same content."""
    if here == AUTO:
        return True
    if not (isinstance(there, str) and isinstance(here, str)):
        return False
    stored, given = Path(there), Path(here)
    if not (stored.is_absolute() and given.is_absolute()) or stored.name != given.name:
        return False
    return not stored.exists() or (stored.is_file() and given.is_file() and filecmp.cmp(stored, given, shallow=False))


def _check_tables(tables: Mapping[str, Any], known: Sequence[str]) -> None:
    check_names(tables, known, "the recipe")
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ValueError(f"{name} must be a table, [{name}]; got {table!r}.")
    for name in ("data", "model"):
        if name not in tables:
            raise ValueError(f"A recipe needs the table [{name}].")
    # A seed or a size written into the wrong table is a common slip, and no close match would be found for it.
    for name, home in _HOMES.items():
        for table in tables:
            if name in tables[table] and table != home and (name, table) != ("seed", "data"):
                raise ValueError(f"{name!r} stands in [{table}]; it belongs into [{home}].")


def _resolve_ensemble(table: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: table.get(name, default) for name, default in _ENSEMBLE.items()}
    for name in ("members", "seed"):
        if type(own[name]) is not int or (name == "members" and own[name] < 1):
            raise ValueError(f"{name} in [ensemble] must be a whole number; got {own[name]!r}.")
    options = {key: value for key, value in table.items() if key not in _ENSEMBLE}
    kind = choose(choices.KINDS, own["kind"], "[ensemble]")
    return own | checked(kind, options, "[ensemble]", skip=_NOT_OPTIONS)


def _resolve_training(table: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in table.items() if name != "schedule"}
    schedule = choices.resolve_schedule(table.get("schedule", "constant"))
    auto = ("epochs", "batch_size", "checkpoint_every")
    return {**checked(fit, given, "[training]", _NOT_TRAINING, auto), "schedule": schedule}


class LoadedRun(NamedTuple):
    """A finished run: the trained ensemble, its recipe, and what happens to inputs before members see them.

    Predictions of a regression are in the units of the data: `ds.predict(run.ensemble, run.preprocessing(x))`.
    """

    ensemble: Members
    recipe: Recipe
    preprocessing: Preprocessing


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a run that was trained to its end."""
    return folder.is_dir() and CheckpointFolder(folder).exists(ENSEMBLE)


@contextlib.contextmanager
def started(folder: Path, recipe: str) -> Iterator[None]:
    """Put the recipe into a run's folder, which is the block's alone; take both back on errors before the first checkpoint."""
    path = folder / RECIPE
    before = path.read_bytes() if path.exists() else None
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


def save_ensemble(folder: Path, ensemble: Members, facts: Mapping[str, Any], step: int, sets: Sets) -> None:
    """Write the ensemble's tensors, what is needed to build it again, and which rows are which, in one step."""
    rows = {f"{ROWS}{part}": row_digests(own) for part in _PARTS if (own := getattr(sets, part)) is not None}
    CheckpointFolder(folder).save(ENSEMBLE, step, {**ensemble.state_dict(), **rows}, facts)


def rows_of_run(run: LoadedRun, folder: Path, part: str, advice: str = "Restore the file.") -> Loaded | None:
    """Read again the rows that a run trained on or held out, whatever else has come into its file since; None if it held none out."""
    if part != "train" and isinstance(source := getattr(run.recipe.data, part), str):
        return without_left_out(run.preprocessing.read(source), run.recipe.data.leave_out)
    digests = stored_digests(folder, part)
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
    folder = Path(folder)
    if not (folder / RECIPE).is_file():
        raise ValueError(
            f"There is no run in {folder}: it holds no {RECIPE}. Train one with: dissensus train RECIPE.toml"
        )
    recipe = Recipe.read(folder / RECIPE)
    if not is_finished(folder):
        raise ValueError(f"The run in {folder} has not finished. Go on with: dissensus train {folder} --resume")
    tensors, facts, problem = CheckpointFolder(folder).load(ENSEMBLE)
    if problem is not None:
        log.warning("%s The ensemble saved before it is used.", problem)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(ROWS)}
    return _rebuilt(folder, recipe, Preprocessing.from_json(facts["preprocessing"]), facts, tensors, allow_import)


def _rebuilt(
    folder: Path,
    recipe: Recipe,
    preprocessing: Preprocessing,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    allow_import: bool,
) -> LoadedRun:
    """Return a run with an ensemble of these tensors, on the CPU and in evaluation mode."""
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


def _in_units(ensemble: Members, recipe: Recipe, preprocessing: Preprocessing) -> Members:
    if preprocessing.target_mean is None or preprocessing.target_std is None:
        return ensemble
    mean, std = torch.tensor(preprocessing.target_mean), torch.tensor(preprocessing.target_std)
    density = recipe.likelihood.kind == "density"
    nets = [nn.Sequential(ensemble.member(j), InUnits(mean, std, density)) for j in range(ensemble.num_members)]
    return DeepEnsemble.from_members(nets, seed=ensemble.seed).eval()
