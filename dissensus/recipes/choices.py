"""What a recipe can name: networks, kinds of ensembles, objectives, schedules and augmentations."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dissensus.architectures import ARCHITECTURES
from dissensus.data import augment
from dissensus.data.images import describe_shape
from dissensus.members import Anchored, BatchEnsemble, DeepEnsemble, Masksembles, MCDropout, Members
from dissensus.members.anchored import MaskedTarget, MaskPer
from dissensus.members.anchored_net import TemperatureForm
from dissensus.members.first_layer import Initialise
from dissensus.members.mc_dropout import Masks as DropoutMasks
from dissensus.members.shared import BatchUse
from dissensus.objectives import (
    Adversarial,
    Disagree,
    HardDelta,
    Independent,
    Joint,
    LossGuided,
    MaskedUniform,
    NormPenalty,
    Objective,
    VirtualAdversarial,
)
from dissensus.randomness import derive, seeded
from dissensus.recipes.settings import checked, choose, parameters
from dissensus.training import schedules
from dissensus.training.rules import RULES


def anchored(
    make_member: Callable[[], nn.Module],
    num_members: int,
    seed: int = 0,
    *,
    shape: Any,
    references: int = 256,
    anchors: int = 1,
    mask_probability: float = 0.0,
    mask_per: MaskPer = "batch",
    masked_target: MaskedTarget = "label",
    temperature: TemperatureForm | None = None,
    initialise: Initialise = "fresh",
) -> Anchored:
    """Make anchored networks with room for references, which training fills with training inputs."""
    return Anchored(
        make_member,
        torch.zeros(references, *shape),
        anchors,
        seed,
        num_nets=num_members,
        mask_probability=mask_probability,
        mask_per=mask_per,
        masked_target=masked_target,
        temperature=temperature,
        initialise=initialise,
    )


def masksembles(
    make_member: Callable[[], nn.Module],
    num_members: int,
    seed: int = 0,
    *,
    scale: float = 2.0,
    layers: Sequence[str] = (),
    grow: bool = False,
    batches: BatchUse = "split",
) -> Masksembles:
    """Make one network with masks; `layers` names where they act, by rule if none is named."""
    with seeded(derive(seed, "initial weights", 0), alone=True):
        net = make_member()
    chosen = list(layers) if layers else "auto"
    return Masksembles(net, num_members, scale, layers=chosen, seed=seed, grow=grow, batches=batches)


def mc_dropout(
    make_member: Callable[[], nn.Module],
    num_members: int,
    seed: int = 0,
    *,
    p: float | None = None,
    masks: DropoutMasks = "member",
) -> MCDropout:
    """Make one network whose dropout stays on."""
    with seeded(derive(seed, "initial weights", 0), alone=True):
        net = make_member()
    return MCDropout(net, num_members, seed, p, masks=masks)


def batch_ensemble(
    make_member: Callable[[], nn.Module], num_members: int, seed: int = 0, *, batches: BatchUse = "whole"
) -> BatchEnsemble:
    """Make members that share weights up to factors of rank one."""
    return BatchEnsemble(make_member, num_members, seed, batches=batches)


KINDS: Mapping[str, Callable[..., Members]] = MappingProxyType(
    {
        "deep": DeepEnsemble,
        "anchored": anchored,
        "masksembles": masksembles,
        "mc_dropout": mc_dropout,
        "batch_ensemble": batch_ensemble,
    }
)
"""Kinds of ensembles: called with a factory of members, their number and a seed."""

OBJECTIVES: Mapping[str, Callable[..., Objective]] = MappingProxyType(
    {
        "independent": Independent,
        "joint": Joint,
        "loss_guided": LossGuided,
        "disagree": Disagree,
        "adversarial": Adversarial,
        "virtual_adversarial": VirtualAdversarial,
        "norm_penalty": NormPenalty,
        "hard_delta": HardDelta,
        "masked_uniform": MaskedUniform,
    }
)

SCHEDULES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "constant": schedules.Constant,
        "step": schedules.StepDecay,
        "multi_step": schedules.MultiStep,
        "cosine": schedules.Cosine,
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
    """Return the settings of an objective with defaults filled in, the inner one's too."""
    name = table.get("name", "independent")
    make = choose(OBJECTIVES, name, where)
    given = {key: value for key, value in table.items() if key not in ("name", "inner")}
    wraps = "inner" in _all_parameters(make)
    if "inner" in table and not wraps:
        raise ValueError(f"{name} in {where} wraps no other objective; leave inner out.")
    if wraps:
        _point_inwards(name, make, given, where)
    resolved = {"name": name, **checked(make, given, where, without=("inner",))}
    if wraps:
        inner = table.get("inner", {})
        if not isinstance(inner, Mapping):
            raise ValueError(
                f"inner in {where} must be a table such as {{ name = 'independent' }}; got {inner!r}."
            )
        resolved["inner"] = resolve_objective(inner, f"{where[:-1]}.inner]")
    return resolved


def _all_parameters(make: Callable[..., Any]) -> set[str]:
    return set(getattr(make, "__dataclass_fields__", ()))


def _point_inwards(name: str, make: Callable[..., Any], given: Mapping[str, Any], where: str) -> None:
    """Say so where a setting of the inner objective was given to the one around it."""
    known = parameters(make)
    for key in given:
        if key not in known and key in parameters(Independent):
            raise ValueError(
                f"{key} in {where} belongs to the objective that {name} wraps; write it under {where[:-1]}.inner]."
            )


def build_objective(resolved: Mapping[str, Any]) -> Objective:
    """Make an objective from settings that `resolve_objective` returned."""
    options = {key: value for key, value in resolved.items() if key not in ("name", "inner")}
    if "inner" in resolved:
        options["inner"] = build_objective(resolved["inner"])
    return OBJECTIVES[resolved["name"]](**options)


def resolve_schedule(value: Any) -> Any:
    """Return a schedule's settings with defaults filled in; a name alone stays a name."""
    if not isinstance(value, Mapping):
        choose(SCHEDULES, value, "schedule of [training]")
        return value if value in ("constant", "cosine", "one_cycle") else resolve_schedule({"name": value})
    make = choose(SCHEDULES, value.get("name"), "[training.schedule]")
    given = {key: item for key, item in value.items() if key != "name"}
    return {"name": value["name"], **checked(make, given, "[training.schedule]")}


def build_schedule(resolved: Any) -> Any:
    """Make a schedule from settings that `resolve_schedule` returned."""
    if isinstance(resolved, str):
        return resolved
    return SCHEDULES[resolved["name"]](**{key: value for key, value in resolved.items() if key != "name"})


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
        if options is False:
            continue
        if options is not True and not isinstance(options, Mapping):
            raise ValueError(
                f"{name} in [augment] must be true, false or a table of options; got {options!r}."
            )
        given = {} if options is True else options
        resolved[name] = checked(make, given, f"{name} of [augment]", without=("num_classes",))
    return resolved


def build_augment(resolved: Mapping[str, Any], num_classes: int | None) -> augment.Augmentation | None:
    """Make one augmentation of all; None where there are none."""
    steps = []
    for name, options in resolved.items():
        own = dict(options)
        if "num_classes" in _all_parameters(AUGMENTATIONS[name]):
            if num_classes is None:
                raise ValueError(f"{name} in [augment] mixes class labels; this run is a regression.")
            own["num_classes"] = num_classes
        steps.append(AUGMENTATIONS[name](**own))
    return augment.Compose(tuple(steps)) if steps else None


def resolve_model(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a network with defaults filled in; an imported factory's are left as they are."""
    if "name" not in table:
        raise ValueError(f"[model] needs a name: {', '.join(ARCHITECTURES)}, or module:factory.")
    name = table["name"]
    if isinstance(name, str) and ":" in name:
        return dict(table)
    make = choose(ARCHITECTURES, name, "[model]")
    given = {key: value for key, value in table.items() if key not in ("name", "activation")}
    resolved = {"name": name, **checked(make, given, "[model]", without=_not_given(make, given))}
    if "activation" in table:
        choose(ACTIVATIONS, table["activation"], "[model]")
        resolved["activation"] = table["activation"]
    return resolved


def _not_given(make: Callable[..., Any], given: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of sizes that the data decides, unless the recipe gives them."""
    return tuple(name for name in _FROM_DATA if name in parameters(make) and name not in given)


def member_factory(
    model: Mapping[str, Any], shape: Sequence[int], outputs: int, allow_import: bool = False
) -> Callable[[], nn.Module]:
    """Return a function that makes one member for inputs of this shape.

    Args:
        model: Settings that `resolve_model` returned.
        shape: Shape of one input.
        outputs: Values a prediction has.
        allow_import: Whether `module:factory` may be imported, which runs that module's code.
    """
    name = model["name"]
    check_import(name, allow_import)
    make = _import_factory(name) if ":" in name else ARCHITECTURES[name]
    options = {key: value for key, value in model.items() if key != "name"}
    if "activation" in options and ":" not in name:
        options["activation"] = ACTIVATIONS[options["activation"]]
    takes = parameters(make)
    if "channels" in takes and len(shape) != 3:
        raise ValueError(f"The network {name} is for images; this data has {describe_shape(shape)}. Use mlp.")
    sizes = {"inputs": prod(shape), "channels": shape[0], "outputs": outputs, "classes": outputs}
    for key in _FROM_DATA:
        if key in takes and options.setdefault(key, sizes[key]) != sizes[key]:
            raise ValueError(
                f"{key} in [model] is {options[key]}, but the data asks for {sizes[key]}. Leave it out."
            )
    flatten = "inputs" in takes and len(shape) > 1

    def make_member() -> nn.Module:
        net = make(**options)
        return nn.Sequential(nn.Flatten(), net) if flatten else net

    return make_member


def check_import(name: str, allow_import: bool) -> None:
    """Refuse to import a network's module where that was not allowed."""
    if ":" in name and not allow_import:
        raise ValueError(
            f"The recipe asks to import {name}, which runs that module's code. "
            "If you trust it, allow it: --allow-import on the command line, allow_import=True in Python."
        )


def _import_factory(name: str) -> Callable[..., nn.Module]:
    module_name, _, attribute = name.partition(":")
    # As `python -m` does: a module in the working folder is found.
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        raise ValueError(f"The module {module_name} of [model] cannot be imported: {problem}.") from None
    finally:
        sys.path.pop(0)
    make = getattr(module, attribute, None)
    if not callable(make):
        raise ValueError(f"The module {module_name} has no function {attribute!r}.")
    return make
