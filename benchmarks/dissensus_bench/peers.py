"""Other libraries, each used in its own documented way, where it is installed."""

import contextlib
import copy
import io
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dissensus_bench.lightning_peers import ensemble_routine, loaded_when_needed, member_after_member, wrapped_forward
from dissensus_bench.problems import Problem
from dissensus_bench.rivals import Turn

Predictor = Callable[[Sequence[nn.Module], Tensor, int], Callable[[], None]]


class Peer(NamedTuple):
    """A library to compare with.

    Attributes:
        module: The module that must be there.
        train: Makes its turn at a problem, or says why it has none.
        predict: Makes its predictions with given networks for given inputs in batches; None if that is not compared.
    """

    module: str
    train: Callable[[Problem], Turn | str]
    predict: Predictor | None = None


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
    data = torch.utils.data.TensorDataset(problem.x.cpu(), problem.y.cpu())
    loader = torch.utils.data.DataLoader(data, problem.batch, shuffle=True)
    estimator = problem.make()

    def turn() -> None:
        ensemble = kind(estimator=estimator, n_estimators=problem.members, cuda=problem.x.is_cuda)
        ensemble.set_optimizer(names[problem.optimizer], lr=problem.lr, **problem.options)
        # It prints a line for each member and epoch.
        with (
            contextlib.redirect_stdout(io.StringIO()),
            torch.autocast(problem.device.type, torch.bfloat16, enabled=problem.bf16),
        ):
            ensemble.fit(loader, epochs=1, log_interval=len(loader), save_model=False)

    return Turn(turn, len(loader))


def averaged(nets: Sequence[nn.Module], x: Tensor, batch: int) -> Callable[[], None]:
    """Return TorchEnsemble's predictions: `VotingClassifier.predict`, which returns the members' mean probabilities."""
    kind = import_module("torchensemble").VotingClassifier
    ensemble = kind(estimator=nets[0], n_estimators=len(nets), cuda=x.is_cuda)
    ensemble.estimators_ = nn.ModuleList(nets)

    def predict() -> None:
        for rows in x.split(batch):
            ensemble.predict(rows)

    return predict


PEERS: Mapping[str, Peer] = {
    "JAX vmap + scan": Peer("jax", vmap_and_scan),
    "TorchEnsemble": Peer("torchensemble", voting, averaged),
    "TorchUncertainty": Peer("torch_uncertainty", ensemble_routine, wrapped_forward),
    "lightning-uq-box": Peer("lightning_uq_box", member_after_member, loaded_when_needed),
}


def join_peers(problem: Problem) -> tuple[dict[str, Turn], dict[str, str]]:
    """Return the turns of the peers that can train, and why the others cannot."""
    turns: dict[str, Turn] = {}
    missing: dict[str, str] = {}
    for name, peer in PEERS.items():
        made = _why_not_there(peer.module) or peer.train(problem)
        if isinstance(made, str):
            missing[name] = made
        else:
            turns[name] = made
    return turns, missing


def join_predictors(
    nets: Sequence[nn.Module], x: Tensor, batch: int
) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """Return how the peers that can predict do so with copies of the networks, and why the others cannot."""
    calls: dict[str, Callable[[], None]] = {}
    missing: dict[str, str] = {}
    for name, peer in PEERS.items():
        if peer.predict is None:
            missing[name] = "no adapter for predictions"
        elif reason := _why_not_there(peer.module):
            missing[name] = reason
        else:
            calls[name] = peer.predict(copy.deepcopy(list(nets)), x, batch)
    return calls, missing


def _why_not_there(module: str) -> str | None:
    if find_spec(module) is None:
        return "not installed"
    try:
        import_module(module)
    except (ImportError, RuntimeError) as error:
        return f"installed, but does not import here ({error})"
    return None
