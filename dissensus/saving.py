"""An ensemble in a folder: its tensors as safetensors, and as JSON how it was made."""

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dissensus._files import replace_file
from dissensus._signatures import checked
from dissensus.construction import UnknownNetwork, make_again
from dissensus.data.fingerprints import attributes_of
from dissensus.members import DeepEnsemble, Members
from dissensus.randomness import seeded

FORMAT = 1
TENSORS, CONFIG = "model.safetensors", "config.json"
# Packages whose layers keep nothing in attributes that passes change.
_LAYERS = ("torch.nn.", "dissensus.")
# What constructors call the networks that they are given, and where those that a function made keep how that went.
_NETWORKS = {
    "make_member": ("net", "nets.0"),
    "make_net": ("net",),
    "net": ("inner.net", "inner.nets.0"),
    "nets": (),
    "backbone": (),
    "make_head": ("heads.net", "heads.nets.0"),
}


@checked
def save(members: Members, folder: str | Path) -> None:
    """Write an ensemble of any kind to a folder: `model.safetensors` and `config.json`, as model hubs have them; nothing pickled.

    The configuration holds how the ensemble was made: its kind and settings, and its networks where they are layers of torch.nn,
    `nn.Sequential` of them, of `dissensus.architectures`, or made by a function or class that can be imported. Others (lambdas around
    code of your own) are made again by a factory that you give to `load`.

    Args:
        members: The ensemble, trained or not.
        folder: Where to; files of an earlier call are replaced.

    Example:
        >>> import tempfile
        >>> import dissensus as ds
        >>> ens = ds.DeepEnsemble(lambda: ds.architectures.mlp(4, [8], 3), num_members=5)
        >>> folder = tempfile.mkdtemp()
        >>> ds.save(ens, folder)
        >>> torch.equal(ds.load(folder)(torch.zeros(2, 4)), ens(torch.zeros(2, 4)))
        True
    """
    from safetensors.torch import save as as_bytes

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Copies: parameters that are tied share their memory.
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in members.state_dict().items()}
    data = as_bytes(tensors, metadata={"format": "pt"})
    config = {
        "library": "dissensus",
        "format": FORMAT,
        "kind": f"{type(members).__module__}:{type(members).__qualname__}",
        "arguments": _arguments(members),
        "structure": _structure(members),
        "classmethod": members.made_by[0],
        "members": list(members.member_ids),
        "training": members.training,
        "dtypes": {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()},
        "decisions": members.all_decisions(),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    replace_file(folder / TENSORS, data)
    replace_file(folder / CONFIG, json.dumps(config, indent=1).encode())


def _arguments(members: Members) -> dict[str, Any]:
    """Return the constructor's arguments; those that are networks by how these were made."""
    found = dict(members.made_by[1])
    modules = dict(members.named_modules())
    for name, places in _NETWORKS.items():
        # A network that was handed over is described already where it is known; of a function counts what it made, if that says how.
        if isinstance(given := found.get(name), dict) and (given.get("factory") or "name" in given):
            ways = [getattr(modules[place], "construction", None) for place in places if place in modules]
            if ways and ways[0] is not None:
                found[name] = {"function": ways[0]}
    return found


def _structure(members: Members) -> dict[str, dict[str, str]]:
    """Return of layers of torch and of this package, by name, their class and settings; of others that they are.

    Ensembles are not among them, which their arguments describe, nor what layers count of their calls.
    """
    found = _structure_of(members)
    for name, part in members.named_modules():
        # Members stored as one may still be programs of their own each: those go by their number.
        if isinstance(part, DeepEnsemble) and part.stacked and part.why_different is not None:
            for index, shell in enumerate(part._shells):
                found |= {f"{name}[{index}].{own}": told for own, told in _structure_of(shell.net).items()}
    return found


def _structure_of(net: nn.Module) -> dict[str, dict[str, str]]:
    # Other packages rename their layers.
    found = {
        name: {"class": type(module).__name__ if _is_ours(module) else "a layer of your own"}
        for name, module in net.named_modules()
        if not isinstance(module, Members)
    }
    for path, text in attributes_of(net).items():
        name, _, key = path.rpartition(".")
        if name in found and _is_ours(net.get_submodule(name)) and key != "calls" and key[0] != "_":
            found[name][key] = text
    return found


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_LAYERS)


def _told(structure: Mapping[str, Mapping[str, str]], name: str) -> Mapping[str, str] | None:
    """Return what a structure tells of a module; of one of a member's own, where all members are alike, what it tells of them."""
    return structure.get(name) or structure.get(re.sub(r"\.?\[\d+\]\.", ".net.", name).strip("."))


def _check_structure(members: Members, folder: Path, wanted: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse an ensemble whose layers are others than those that were saved; of settings, those that both have are compared."""
    made = _structure(members)
    for name in dict.fromkeys((*wanted, *made)):
        was, now = _told(wanted, name), _told(made, name)
        if was is None or now is None:
            why = f"{name!r} was {'no layer' if was is None else was['class']} and is {'none' if now is None else now['class']}"
        else:
            key = next((key for key in was if key in now and was[key] != now[key]), None)
            if key is None:
                continue
            what = "" if key == "class" else f"{key} of "
            why = f"{what}{name!r} was {was[key]} and is {now[key]}"
        raise ValueError(
            f"The networks that were made are not those of {folder}: {why}. What was changed in a network after it was made is not in "
            "the folder: give a function that makes it as it was, ds.load(folder, make_member=...)."
        )


@checked
def load(
    folder: str | Path,
    make_member: Callable[[], nn.Module] | Sequence[Callable[[], nn.Module]] | None = None,
    *,
    make_head: Callable[[], nn.Module] | None = None,
    allow: Collection[str] = (),
    output: Any = None,
    device: str | torch.device = "cpu",
    **others: Any,
) -> Members:
    """Read an ensemble that `save` wrote. No code of the folder is run, and nothing is downloaded.

    Args:
        folder: Where it is.
        make_member: Makes one network (of a HeadEnsemble: the backbone), where the folder does not say how; of networks that differ, a
            list of such functions.
        make_head: Makes one head, likewise.
        allow: Names of functions and classes, `"package.module:name"`, that the folder may name and that are imported and called.
        output: What is scored, where it was chosen by a function that has no name.
        device: Where to put it.
        **others: Other arguments of the ensemble that had no name, by theirs: `features=` of a HeadEnsemble, `layers=` of Masksembles.

    Returns:
        The ensemble, with the weights, members and mode that it had.
    """
    folder = Path(folder)
    config = _config(folder)
    maker, arguments = _maker(config, folder, allow), dict(config["arguments"])
    _check_others(others, arguments)
    networks = {name: make_member for name in _NETWORKS if name != "make_head"}
    given = {"make_head": make_head, "output": output, **networks, **others}
    with seeded(0):
        made = {name: _argument(name, description, given.get(name), allow) for name, description in arguments.items()}
        members: Members = maker(**made)
    if list(members.member_ids) != config["members"]:
        members.keep_members([list(members.member_ids).index(member) for member in config["members"]])
    if "structure" in config:
        _check_structure(members, folder, config["structure"])
    _load_tensors(members, folder, config)
    members.train(config["training"])
    members.decide_as(config["decisions"])
    return members.to(device)


def _maker(config: Mapping[str, Any], folder: Path, allow: Collection[str]) -> Callable[..., Members]:
    """Return the constructor of an ensemble."""
    kind, constructor = make_again({"name": config["kind"]}, allow), config["classmethod"]
    if not (isinstance(kind, type) and issubclass(kind, Members)) or constructor not in (None, "from_members"):
        raise ValueError(f"{folder / CONFIG} is of no kind of ensemble: {config['kind']}, made by {constructor}.")
    return kind if constructor is None else getattr(kind, constructor)


def _check_others(others: Collection[str], arguments: Collection[str]) -> None:
    """Refuse arguments that an ensemble was not made with, or that are given by another name."""
    own = [name for name in arguments if name not in _NETWORKS]
    if strange := [name for name in others if name not in own]:
        raise ValueError(
            f"`{strange[0]}` was not given when this ensemble was made, so it cannot be given again; networks are given as make_member= "
            f"and make_head=, and of the rest there are {', '.join(own) or 'none'}."
        )


def _argument(name: str, description: Any, given: Any, allow: Collection[str]) -> Any:
    """Return one argument of the constructor, from what was given where that is needed."""
    if given is not None:
        return _networks(description, given) if name in ("net", "nets", "backbone") else given
    try:
        return make_again(description, allow)
    except UnknownNetwork as problem:
        wanted = "make_member" if name in _NETWORKS and name != "make_head" else name
        raise ValueError(
            f"`{name}` of this ensemble was {problem}, which a file cannot hold. Give it again: ds.load(folder, {wanted}=...)."
        ) from None


def _networks(description: Any, given: Any) -> Any:
    """Return what stood in the place of networks: one, a list of them, or the function that made them."""
    if isinstance(given, list | tuple):
        return [make() for make in given]
    if isinstance(description, list):
        return [given() for _ in description]
    is_function = description.get("factory") or any(form in description for form in ("name", "partial", "function"))
    return given if is_function else given()


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
        known = config["library"] == "dissensus"
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no ensemble: there is no {CONFIG}. Write one with ds.save.") from None
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
        known = False
    if not known:
        raise ValueError(f"{folder / CONFIG} is not of an ensemble (damaged, or of another library).")
    if config["format"] != FORMAT:
        raise ValueError(f"{folder / CONFIG} has format {config['format']}; this version reads {FORMAT}.")
    return dict(config)


def _load_tensors(members: Members, folder: Path, config: dict[str, Any]) -> None:
    from safetensors.torch import load as from_bytes

    path = folder / TENSORS
    data = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(data).hexdigest() != config["sha256"]:
        raise ValueError(f"{path} is missing, truncated or of another ensemble: its digest is not the recorded one.")
    tensors: dict[str, Tensor] = from_bytes(data)
    own = members.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if name in own and own[name].shape == tensor.shape:
            # In the precision that was saved.
            own[name].data = own[name].data.to(tensor.dtype)
    given = OrderedDict(tensors)
    # Layers may ask in which version of them tensors were written: the present one.
    given._metadata = own._metadata  # type: ignore[attr-defined]
    try:
        members.load_state_dict(given)
    except RuntimeError as problem:
        raise ValueError(
            f"The networks that were made are not those of {folder}: {str(problem).splitlines()[1].strip()} "
            "Give the factory that made them."
        ) from problem
