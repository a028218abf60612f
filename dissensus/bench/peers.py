"""Other libraries, each used in its own documented way, where it is installed."""

import contextlib
import io
import itertools
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from dissensus.bench.problems import Problem
from dissensus.bench.rivals import Turn


class Peer(NamedTuple):
    """A library to compare with: the module that must be there, and what makes its turn, or says why it has none."""

    module: str
    make: Callable[[Problem], Turn | str]


def vmap_and_scan(problem: Problem) -> Turn | str:
    """Return JAX's turn: members by `vmap`, steps by `scan`, the whole turn compiled; or why it cannot take part."""
    if problem.widths is None or problem.optimizer != "adam" or problem.picked is not None:
        return "written for MLPs trained by Adam only"
    _set_up_jax()
    jax = import_module("jax")
    try:
        device = jax.devices("gpu" if problem.x.is_cuda else "cpu")[0]
    except RuntimeError:
        return f"this installation of JAX has no {problem.device.type} device"
    with jax.default_device(device), jax.default_matmul_precision("float32"):
        return _jax_turn(jax, problem, problem.widths, device)


def _set_up_jax() -> None:
    """Have JAX leave GPU memory to others and use one thread, as torch does here; read when JAX first starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")


def _jax_turn(jax: Any, problem: Problem, widths: tuple[int, ...], device: Any) -> Turn:
    jnp, tree_map = jax.numpy, jax.tree.map
    x, y = (jax.device_put(part.cpu().numpy(), device) for part in (problem.x, problem.y))
    # A whole epoch in one program, as is its habit: a shorter scan would mostly time its start.
    shape = (len(x) // problem.batch, problem.batch)

    def new_weights(key: Any) -> Any:
        pairs = list(itertools.pairwise(widths))
        keys = jax.random.split(key, len(pairs))
        return [
            (jax.random.uniform(k, pair, minval=-1, maxval=1) / pair[0] ** 0.5, jnp.zeros(pair[1]))
            for k, pair in zip(keys, pairs, strict=True)
        ]

    def loss(weights: Any, inputs: Any, targets: Any) -> Any:
        *hidden, (last, bias) = weights
        for weight, offset in hidden:
            inputs = jax.nn.relu(inputs @ weight + offset)
        return jnp.mean((inputs @ last + bias - targets) ** 2)

    def step(state: Any, rows: Any) -> Any:
        weights, first, second, count = state
        value, gradient = jax.value_and_grad(loss)(weights, x[rows], y[rows])
        count = count + 1
        first = tree_map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
        second = tree_map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradient)

        def update(weight: Any, m: Any, v: Any) -> Any:
            return weight - problem.lr * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)

        return (tree_map(update, weights, first, second), first, second, count), value

    def member_turn(state: Any, key: Any) -> Any:
        return jax.lax.scan(step, state, jax.random.randint(key, shape, 0, len(x)))

    program = jax.jit(jax.vmap(member_turn))
    keys = jax.random.split(jax.random.key(0), problem.members)
    weights = jax.vmap(new_weights)(keys)
    nothing = tree_map(jnp.zeros_like, weights)
    held = [(weights, nothing, nothing, jnp.zeros(problem.members))]

    def turn() -> None:
        with jax.default_device(device), jax.default_matmul_precision("float32"):
            held[0], losses = program(held[0], keys)
            jax.block_until_ready((held[0], losses))

    return Turn(turn, shape[0])


def voting(problem: Problem) -> Turn | str:
    """Return TorchEnsemble's turn: `VotingRegressor` or `VotingClassifier` fitted on a DataLoader; or why it cannot take part."""
    if problem.picked is not None:
        return "trains all members in every step"
    if problem.augment is not None:
        return "augmentation is its data loader's business"
    torchensemble = import_module("torchensemble")
    kind = torchensemble.VotingRegressor if problem.loss == "mse" else torchensemble.VotingClassifier
    names = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
    rows = problem.turn_steps * problem.batch
    data = torch.utils.data.TensorDataset(problem.x[:rows].cpu(), problem.y[:rows].cpu())
    loader = torch.utils.data.DataLoader(data, problem.batch, shuffle=True)

    def turn() -> None:
        ensemble = kind(estimator=problem.make(), n_estimators=problem.members, cuda=problem.x.is_cuda)
        ensemble.set_optimizer(names[problem.optimizer], lr=problem.lr, **problem.options)
        # It prints a line for each member and epoch.
        with (
            contextlib.redirect_stdout(io.StringIO()),
            torch.autocast(problem.device.type, torch.bfloat16, enabled=problem.bf16),
        ):
            ensemble.fit(loader, epochs=1, log_interval=problem.turn_steps, save_model=False)

    return Turn(turn, problem.turn_steps)


PEERS: Mapping[str, Peer] = {
    "JAX vmap + scan": Peer("jax", vmap_and_scan),
    "TorchEnsemble": Peer("torchensemble", voting),
}

# Libraries that could not be run where the adapters above were; better no figure than an untried one.
WITHOUT_ADAPTER = ("TorchUncertainty", "lightning-uq-box")


def join_peers(problem: Problem) -> tuple[dict[str, Turn], dict[str, str]]:
    """Return the turns of the peers that can take part, and why the others cannot."""
    turns: dict[str, Turn] = {}
    missing = dict.fromkeys(WITHOUT_ADAPTER, "no adapter")
    for name, peer in PEERS.items():
        made = peer.make(problem) if find_spec(peer.module) is not None else "not installed"
        if isinstance(made, str):
            missing[name] = made
        else:
            turns[name] = made
    return turns, missing
