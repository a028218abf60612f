"""An ensemble in a folder: its tensors as safetensors, and as JSON how it was made."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dissensus._files import replace_file
from dissensus._signatures import checked
from dissensus.construction import UnknownNetwork, make_again
from dissensus.members import Members
from dissensus.randomness import seeded

FORMAT = 1
TENSORS, CONFIG = "model.safetensors", "config.json"
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

    The configuration holds how the ensemble was made: its kind and settings, and its networks where they are of
    `dissensus.architectures` or made by a function or class that can be imported. Others (lambdas around code of your own) are made
    again by a factory that you give to `load`.

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
        # A network that was handed over is described already where it is known: what is not yet is a factory.
        if isinstance(given := found.get(name), dict) and given.get("factory"):
            ways = [getattr(modules[place], "construction", None) for place in places if place in modules]
            if ways and ways[0] is not None:
                found[name] = {"partial": {"name": ways[0]["call"]}, "arguments": ways[0]["arguments"]}
    return found


@checked
def load(
    folder: str | Path,
    make_member: Callable[[], nn.Module] | None = None,
    *,
    make_head: Callable[[], nn.Module] | None = None,
    allow: Collection[str] = (),
    output: Any = None,
    device: str | torch.device = "cpu",
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

    Returns:
        The ensemble, with the weights, members and mode that it had.
    """
    folder = Path(folder)
    config = _config(folder)
    own = [config["kind"]] if config["kind"].startswith("dissensus.members.") else []
    kind = make_again({"name": config["kind"]}, [*allow, *own])
    arguments = dict(config["arguments"])
    given = {"make_head": make_head, "output": output} | {
        name: make_member for name in _NETWORKS if name != "make_head"
    }
    maker = kind if config["classmethod"] is None else getattr(kind, config["classmethod"])
    with seeded(0):
        made = {name: _argument(name, description, given.get(name), allow) for name, description in arguments.items()}
        members: Members = maker(**made)
    if list(members.member_ids) != config["members"]:
        members.keep_members([list(members.member_ids).index(member) for member in config["members"]])
    _load_tensors(members, folder, config)
    members.train(config["training"])
    members.decide_as(config["decisions"])
    return members.to(device)


def _argument(name: str, description: Any, given: Any, allow: Collection[str]) -> Any:
    """Return one argument of the constructor, from what was given where that is needed."""
    if given is not None:
        if name == "nets":
            makers = given if isinstance(given, list | tuple) else [given] * len(description)
            return [make() for make in makers]
        hands_over = name in ("net", "backbone") and not description.get("factory")
        return given() if hands_over else given
    try:
        return make_again(description, allow)
    except UnknownNetwork as problem:
        wanted = name if name in ("make_head", "output") else "make_member"
        raise ValueError(
            f"`{name}` of this ensemble was {problem}, which a file cannot hold. Give it again: ds.load(folder, {wanted}=...)."
        ) from None


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
