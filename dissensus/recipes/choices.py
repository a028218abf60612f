"""What a recipe can name: networks, kinds of ensembles, objectives, schedules and augmentations."""

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from math import prod
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dissensus.architectures import ARCHITECTURES
from dissensus.data import augment
from dissensus.data.images import describe_shape
from dissensus.members import KINDS as KINDS
from dissensus.objectives import OBJECTIVES as OBJECTIVES
from dissensus.objectives import Independent, Objective
from dissensus.recipes.settings import AUTO, checked, choose, parameters
from dissensus.training import schedules
from dissensus.training.optimizers import RULES

SCHEDULES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "constant": schedules.Constant,
        "step": schedules.StepDecay,
        "multi_step": schedules.MultiStep,
        "cosine": schedules.Cosine,
        "cyclic": schedules.Cyclic,
        "one_cycle": schedules.OneCycle,
        "plateau": schedules.Plateau,
    }
)

AUGMENTATIONS: Mapping[str, Callable[..., augment.Augmentation]] = MappingProxyType(
    {
        "random_crop": augment.RandomCrop,
        "horizontal_flip": augment.HorizontalFlip,
        "rotation": augment.Rotation,
        "colour_jitter": augment.ColourJitter,
        "gaussian_noise": augment.GaussianNoise,
        "mixup": augment.Mixup,
        "cut_mix": augment.CutMix,
    }
)

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU, "elu": nn.ELU}
)

# What networks call the sizes that follow from the data.
_FROM_DATA = ("inputs", "channels", "outputs", "classes")


def resolve_objective(table: Mapping[str, Any], where: str = "[objective]") -> dict[str, Any]:
    """Return the settings of an objective with defaults filled in, and under `inner` those of one that it wraps."""
    name = table.get("name", "independent")
    make = choose(OBJECTIVES, name, where)
    takes, inside = parameters(make), f"{where[:-1]}.inner]"
    wraps, inner = _has_field(make, "inner"), table.get("inner", {})
    if not isinstance(inner, Mapping):
        raise ValueError(f"inner in {where} must be a table such as {{ name = 'independent' }}; got {inner!r}.")
    if wraps:
        for key in (table.keys() - takes.keys()) & parameters(Independent).keys():
            raise ValueError(f"{key} in {where} belongs to the objective that {name} wraps; write it under {inside}.")
    elif "inner" in table:
        raise ValueError(f"{name} in {where} wraps no other objective; leave inner out.")
    resolved = {"name": name, **checked(make, _options(table, "inner"), where, auto=["loss"])}
    return {**resolved, "inner": resolve_objective(inner, inside)} if wraps else resolved


def with_loss(resolved: Mapping[str, Any], regression: bool) -> dict[str, Any]:
    """Return settings of an objective with the loss that suits the targets where the recipe leaves it open."""
    settled = dict(resolved)
    if settled.get("loss") == AUTO:
        settled["loss"] = "cross_entropy" if not regression else "mse" if settled["name"] == "joint" else "gaussian_nll"
    if "inner" in settled:
        settled["inner"] = with_loss(settled["inner"], regression)
    return settled


def _has_field(make: Callable[..., Any], name: str) -> bool:
    return name in getattr(make, "__dataclass_fields__", ())


def build_objective(resolved: Mapping[str, Any]) -> Objective:
    """Make an objective from settings that `resolve_objective` returned."""
    options = _options(resolved, *(["loss"] if resolved.get("loss") == AUTO else []))
    if "inner" in resolved:
        options["inner"] = build_objective(resolved["inner"])
    return OBJECTIVES[resolved["name"]](**options)


def resolve_schedule(value: Any) -> Any:
    """Return a schedule's settings with defaults filled in; a name alone that `ds.fit` takes stays a name."""
    if isinstance(value, str) and value in schedules.SCHEDULES:
        return value
    table = value if isinstance(value, Mapping) else {"name": value}
    make = choose(SCHEDULES, table.get("name"), "[training.schedule]")
    return {"name": table["name"], **checked(make, _options(table), "[training.schedule]")}


def build_schedule(resolved: Any) -> Any:
    """Make a schedule from settings that `resolve_schedule` returned."""
    return resolved if isinstance(resolved, str) else SCHEDULES[resolved["name"]](**_options(resolved))


def _options(table: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return what a table says beside a name, and beside other keys."""
    return {key: value for key, value in table.items() if key not in ("name", *others)}


def build_optimizer(name: str) -> str | type[Optimizer]:
    """Return an optimizer that `ds.fit` takes: one of its own by name, or the class of that name in `torch.optim`."""
    if name in RULES:
        return name
    kind = getattr(torch.optim, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Optimizer):
        raise ValueError(
            f"optimizer in [training] must be {', '.join(RULES)}, or a class of torch.optim such as RAdam; got {name!r}."
        )
    return kind


def resolve_augment(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of each augmentation with defaults filled in, in the order in which they are applied."""
    resolved = {}
    for name, options in table.items():
        make = choose(AUGMENTATIONS, name, "[augment]")
        if not isinstance(options, bool | Mapping):
            raise ValueError(f"{name} in [augment] must be true, false or a table of options; got {options!r}.")
        if options is not False:
            given = {} if options is True else options
            resolved[name] = checked(make, given, f"{name} of [augment]", skip=("num_classes",))
    return resolved


def build_augment(resolved: Mapping[str, Any], num_classes: int | None) -> augment.Augmentation | None:
    """Make one augmentation of all; None where there are none."""
    steps = []
    for name, options in resolved.items():
        mixes = _has_field(AUGMENTATIONS[name], "num_classes")
        if mixes and num_classes is None:
            raise ValueError(f"{name} in [augment] mixes class labels; this run is a regression.")
        steps.append(AUGMENTATIONS[name](**options, **({"num_classes": num_classes} if mixes else {})))
    return augment.Compose(tuple(steps)) if steps else None


def resolve_model(table: Mapping[str, Any], folder: Path = Path()) -> dict[str, Any]:
    """Return the settings of a network with defaults filled in; an imported factory's stay as they are, with the recipe's folder."""
    if "name" not in table:
        raise ValueError(f"[model] needs a name: {', '.join(ARCHITECTURES)}, or module:factory.")
    name = table["name"]
    if isinstance(name, str) and ":" in name:
        return {"folder": str(folder.absolute()), **table}
    make = choose(ARCHITECTURES, name, "[model]")
    given = _options(table, "activation")
    # Sizes that the data decides, unless the recipe gives them.
    resolved = {"name": name, **checked(make, given, "[model]", skip=[n for n in _FROM_DATA if n not in given])}
    if "activation" in table:
        choose(ACTIVATIONS, table["activation"], "[model]")
        resolved["activation"] = table["activation"]
    return resolved


def member_factory(
    model: Mapping[str, Any], shape: Sequence[int], outputs: int, allow_import: bool = False
) -> Callable[[], nn.Module]:
    """Return a function that makes one member, of settings that `resolve_model` returned, for inputs of this shape."""
    name = model["name"]
    check_import(name, allow_import)
    options = _options(model, "folder")
    if ":" in name:
        make = _import_factory(name, model.get("folder", "."))
    else:
        make = ARCHITECTURES[name]
        if "activation" in options:
            options["activation"] = ACTIVATIONS[options["activation"]]
    takes = parameters(make)
    if "channels" in takes and len(shape) != 3:
        raise ValueError(f"The network {name} is for images; this data has {describe_shape(shape)}. Use mlp.")
    for key, size in zip(_FROM_DATA, (prod(shape), shape[0], outputs, outputs), strict=True):
        if key in takes and options.setdefault(key, size) != size:
            raise ValueError(f"{key} in [model] is {options[key]}, but the data asks for {size}. Leave it out.")
    flatten = "inputs" in takes and len(shape) > 1

    def make_member() -> nn.Module:
        try:
            net = make(**options)
        except Exception as problem:
            raise ValueError(f"The network {name} of [model] cannot be made: {_where(problem)}.") from problem
        return nn.Sequential(nn.Flatten(), net) if flatten else net

    return make_member


def _where(problem: Exception) -> str:
    """Return an error in words, with the line of the user's file that it came from."""
    if isinstance(problem, ModuleNotFoundError | ValueError):
        return str(problem).removesuffix(".")
    last = traceback.extract_tb(problem.__traceback__)[-1]
    place = "" if isinstance(problem, SyntaxError) else f" (line {last.lineno} of {Path(last.filename).name})"
    return f"{type(problem).__name__}: {problem}{place}"


def check_import(name: str, allow_import: bool) -> None:
    """Refuse to import a network's module where that was not allowed."""
    if ":" in name and not allow_import:
        raise ValueError(
            f"The recipe asks to import {name}, which runs that module's code. "
            "If you trust it, allow it: --allow-import on the command line, allow_import=True in Python."
        )


# Modules beside recipes that these brought.
_BROUGHT: set[str] = set()


def _forget_others(name: str, places: Sequence[str]) -> None:
    """Drop modules of recipes in other folders where this one's import finds another file."""
    for top in {name.partition(".")[0], *_BROUGHT} & sys.modules.keys():
        found = PathFinder.find_spec(top, [*places, *sys.path] if top in _BROUGHT else places)
        if found is not None and not _is_of(sys.modules.get(name if name.startswith(f"{top}.") else top), found):
            for each in [each for each in sys.modules if each == top or each.startswith(f"{top}.")]:
                del sys.modules[each]


def _is_of(module: ModuleType | None, found: ModuleSpec) -> bool:
    """Whether a module is what is found by its top name, or lies in the package that is; one without a file is taken for it."""
    file = getattr(module, "__file__", None)
    if file is None or found.submodule_search_locations is None:
        return file is None or file == found.origin
    return any(Path(file).is_relative_to(place) for place in found.submodule_search_locations)


def _import_factory(name: str, folder: str) -> Callable[..., nn.Module]:
    module_name, _, attribute = name.partition(":")
    # A module beside the recipe is found and, as `python -m` does, one in the working folder.
    before, known = list(sys.path), set(sys.modules)
    sys.path[:0] = places = [folder, str(Path.cwd())]
    try:
        _forget_others(module_name, places)
        module = importlib.import_module(module_name)
    except Exception as problem:  # whatever a module of the user's does
        raise ValueError(f"The module {module_name} of [model] cannot be imported: {_where(problem)}.") from problem
    finally:
        tops = {each.partition(".")[0] for each in sys.modules.keys() - known}
        _BROUGHT.update(top for top in tops - known if PathFinder.find_spec(top, places) is not None)
        sys.path[:] = before
    make = getattr(module, attribute, None)
    if not callable(make):
        raise ValueError(f"The module {module_name} has no function {attribute!r}.")
    return make
