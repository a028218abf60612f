# ruff: noqa: E501
"""Thousands of wrong calls at every public name: how many of the refusals are one clear sentence?

Each public function has one right call; then each argument in turn is replaced by values of the wrong type, size, range or
content. A refusal is *clear* if it is a ValueError (or a kind of one, or an IndexError or FileNotFoundError) that this
package raised itself, in one or a few sentences. Calls that are accepted are no refusals and do not count.

    python attacks/wrong_calls.py            # all: about 16 000 calls, in two minutes of one core
    python attacks/wrong_calls.py --quick    # one in ten
    python attacks/wrong_calls.py --obscure  # list what was not clear
"""

import argparse
import inspect
import json
import logging
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import dissensus as ds
from dissensus import conformal, masks, metrics, objectives, scores
from dissensus.training import schedules

SECONDS = 20
AIM = 0.95  # of refusals that are clear
PACKAGE = str(Path(ds.__file__).parent)
CLEAR = (ValueError, IndexError, FileNotFoundError, FileExistsError, ds.DivergedError)
# Results, protocols and the like, which users receive or inherit from and do not call.
NOT_CALLED = {
    "DivergedError", "Evaluation", "Exported", "Finding", "Members", "Run", "CachedFeatures", "Debiased", "Decomposition",
    "Guard", "Likelihood", "Objective", "OutputObjective", "Seen", "Step", "DiversityBounds", "ReliabilityCurve",
    "RiskCoverageCurve", "RocCurve", "Temperature", "MaskedUniform",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One wrong call."""

    name: str
    argument: str
    wrong: str
    call: Callable[[], Any]


def tensor(*shape: int) -> torch.Tensor:
    """The same random numbers each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def ensemble(outputs: int = 4) -> ds.DeepEnsemble:
    """A small one, made anew: calls may change it."""
    return ds.DeepEnsemble(lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, outputs)), num_members=2)


def network() -> nn.Module:
    """A small one with a dropout layer."""
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))


def right_values() -> dict[str, Any]:
    """Return a right value for each name of an argument that means the same wherever it occurs."""
    y = torch.arange(8) % 4
    probs = tensor(2, 8, 4).softmax(-1)
    return {
        "logits": tensor(2, 8, 4), "outputs": tensor(2, 8, 4), "targets": y, "labels": y, "probs": probs[0], "probs_m": probs[0],
        "probs_l": probs[1], "logits_m": tensor(8, 4), "logits_l": tensor(8, 4), "mean": tensor(2, 8), "scale": tensor(2, 8).exp(),
        "target": tensor(2, 8), "prediction": tensor(8), "ood_scores": tensor(8), "id_scores": tensor(9), "confidence": probs[0].amax(-1),
        "correct": y > 1, "scores": tensor(8), "predictions": y.repeat(3, 1), "predictions_a": y, "predictions_b": y.flip(0),
        "groups": y, "lower": tensor(8), "upper": tensor(8) + 1, "samples": tensor(5, 8), "x": tensor(8, 3), "y": y,
        "gradient": tensor(8, 3), "epsilon": 0.1, "members": ensemble, "data": (tensor(8, 3), y), "id_data": (tensor(8, 3), y),
        "num_members": 2, "make_member": lambda: network, "make_net": lambda: network, "net": network, "inner": objectives.Independent(),
        "step": 0.5, "beta": 0.4, "width": 16, "num_masks": 4, "ones": 8, "masks": masks.generate(16, 4, 2.0),
    }  # fmt: skip


def special_values(folder: Path) -> dict[str, dict[str, Any]]:
    """Return right values for functions whose arguments mean something of their own."""
    y = torch.arange(8) % 4
    probs = tensor(8, 4).softmax(-1)
    point = {"outputs": tensor(2, 8, 1), "targets": tensor(8, 1)}
    one = {"mean": tensor(8), "scale": tensor(8).exp(), "target": tensor(8)}
    return {
        "fit": {"epochs": 1, "batch_size": 4, "device": "cpu"},
        "evaluate": {"bootstrap": 0, "batch_size": 4, "device": "cpu"},
        "predict": {"batch_size": 4}, "predict_scores": {"batch_size": 4, "names": ["bma"]},
        "Anchored": {"references": tensor(6, 3), "num_members": 1},
        "HeadEnsemble": {"backbone": lambda: nn.Linear(3, 5), "make_head": lambda: lambda: nn.Linear(5, 4)},
        "PackedEnsemble": {"num_members": 2, "alpha": 2.0},
        "Masksembles": {"num_members": 2, "scale": 2.0},
        "cache_features": {"backbone": lambda: nn.Linear(3, 5), "path": lambda: folder / f"features-{len(list(folder.iterdir()))}"},
        "compare": {"first": lambda: evaluation(), "second": lambda: evaluation()},
        "cut": {"model": network, "at": 1},
        "diverse_hyperparameters": {"lr": (1e-4, 1e-2), "weight_decay": (1e-6, 1e-3)},
        "export": {"path": lambda: folder / "model.pt2", "example": tensor(2, 3)},
        "greedy_soup": {},
        "linear_probe": {"backbone": lambda: nn.Linear(3, 5), "train": (tensor(8, 3), y), "test": (tensor(8, 3), y), "epochs": 1},
        "report": {"results": lambda: evaluation(), "path": lambda: folder / "page.html"},
        "Disagree": {"ood_data": tensor(8, 3)},
        "Adversarial": {"epsilon": 0.1}, "VirtualAdversarial": {"epsilon": 0.1}, "HardDelta": {}, "NormPenalty": {"weight": 0.1},
        "HeldOutAccuracy": {"y": y, "reference": 0.5}, "HeldOutLoss": {"y": y}, "diversity_closed_form": {"targets": y}, "LossShare": {"share": 0.5}, "WeightCap": {"largest": 0.5},
        "correlation_penalty": point, "debias": {}, "gradient_adjusted_loss": point, "negative_correlation_loss": {**point, "strength": 0.5},
        "generalised_negative_correlation_loss": {"strength": 0.5}, "divdis": {"probs": tensor(2, 8, 4).softmax(-1)},
        "likelihood_of": {"loss": "mse"}, "low_confidence": {"logits": tensor(8, 4), "threshold": 0.5}, "two_stage": {"logits": tensor(8, 4), "threshold": 0.5},
        "uniform_cross_entropy": {}, "mean_and_scale": {}, "central_interval": {**one, "level": 0.9},
        "gaussian_crps": one, "laplace_crps": one, "metrics.gaussian_nll": one, "metrics.laplace_nll": one,
        "ensemble_crps": {"target": tensor(8)}, "mae": {"target": tensor(8)}, "rmse": {"target": tensor(8)},
        "interval_coverage": {"target": tensor(8)},
        "diversity_bounds": {"accuracy": 0.8, "base_accuracy": 0.9, "num_classes": 4},
        "ood_disagreement_bound": {"hard_disagreement": 0.5, "cluster_mass": 0.5, "purity": 0.9, "gap": 0.1, "instability": 0.1},
        "fit_temperature": {"logits": tensor(2, 8, 4)}, "top_k_accuracy": {"k": 2}, "smooth_ece": {"truncate": None},
        "total_variance": {}, "generate": {"scale": 2.0}, "expected_iou": {"scale": 2.0}, "expected_width": {"scale": 2.0},
        "width_variance": {"scale": 2.0}, "solve": {"scale": 2.0, "num_masks": 4},
        "StepDecay": {"every": 2.0}, "MultiStep": {"milestones": (1.0, 2.0)}, "Cosine": {}, "OneCycle": {}, "Plateau": {}, "Constant": {},
        "Alarm.calibrate": {"ens": ensemble, "held_out": tensor(40, 3), "false_alarms": 0.1},
        "Alarm.of_scores": {"scores": tensor(40), "false_alarms": 0.1},
        "DriftMonitor.calibrate": {"ens": ensemble, "held_out": tensor(40, 3)}, "DriftMonitor.of_scores": {"scores": tensor(40)},
        "sets": {"probs_cal": tensor(40, 4).softmax(-1), "y_cal": torch.arange(40) % 4, "probs": probs},
        "intervals": {"prediction_cal": (tensor(40), tensor(40).exp()), "y_cal": tensor(40), "prediction": (tensor(8), tensor(8).exp())},
        "p_values": {"calibration": tensor(9)}, "two_sample": {"reference": tensor(9), "batch": tensor(8), "permutations": 9},
        "from_members": {"nets": lambda: [network(), network()]}, "Martingale.update": {"p": 0.5},
        "all_scores": {"names": ["bma"]},
        "save": {"folder": lambda: folder / "saved"}, "load": {"folder": lambda: saved(folder / "to load"), "make_member": lambda: lambda: ensemble().member(0)},
    }  # fmt: skip


def saved(folder: Path) -> Path:
    """Return a folder that holds a small ensemble."""
    ds.save(ensemble(), folder)
    return folder


def evaluation() -> ds.Evaluation:
    """Return a small evaluation."""
    return ds.evaluate(ensemble(), (tensor(8, 3), torch.arange(8) % 4), bootstrap=100, device="cpu")


def targets() -> dict[str, Callable[..., Any]]:
    """Return every public function and class that users call."""
    found: dict[str, Callable[..., Any]] = {}
    tables: list[tuple[Any, Any]] = [
        (ds, ds.__all__),
        (objectives, objectives.__all__),
        (metrics, metrics.__all__),
        (scores, [*scores.SCORES, *scores.REGRESSION_SCORES, "all_scores"]),
        (
            masks,
            [
                name
                for name, own in vars(masks).items()
                if inspect.isfunction(own) and own.__module__ == masks.__name__ and name[0] != "_"
            ],
        ),
        (schedules, ["StepDecay", "MultiStep", "Cosine", "OneCycle", "Plateau"]),
        (conformal, ["sets", "intervals", "p_values", "two_sample"]),
    ]
    for module, names in tables:
        for name in names:
            own = getattr(module, name)
            if name in NOT_CALLED or name == "Alarm" or not (inspect.isfunction(own) or inspect.isclass(own)):
                continue
            found[f"{module.__name__.rpartition('.')[2]}.{name}" if name in found else name] = own
    return found | {
        "from_members": ds.DeepEnsemble.from_members,
        "Alarm.calibrate": ds.Alarm.calibrate,
        "Alarm.of_scores": ds.Alarm.of_scores,
        "DriftMonitor.calibrate": conformal.DriftMonitor.calibrate,
        "DriftMonitor.of_scores": conformal.DriftMonitor.of_scores,
        "Martingale.update": lambda p: conformal.Martingale().update(p),
    }


def wrong_values(right: Any) -> Iterator[tuple[str, Any]]:
    """Yield values that are not what is wanted, from what is."""
    yield from (
        ("None", None), ("a word", "words"), ("an empty word", ""), ("-1", -1), ("0", 0), ("1.5", 1.5), ("nan", float("nan")),
        ("inf", float("inf")), ("-inf", float("-inf")), ("huge", 1e30), ("an empty list", []), ("an empty dict", {}), ("an object", object()),
        ("a class", int), ("bytes", b"x"), ("complex", 1j), ("a set", {1, 2}), ("a tensor of none", torch.empty(0)),
        ("a tensor of NaN", torch.full((8, 3), float("nan"))), ("an array of words", np.array(["a", "b"])), ("a 0-d array", np.array(-3)),
        ("a function", lambda *_: None), ("a module", nn.Identity()),
    )  # fmt: skip
    if isinstance(right, torch.Tensor):
        yield from _wrong_tensors(right)
    if isinstance(right, tuple) and len(right) == 2 and all(isinstance(part, torch.Tensor) for part in right):
        x, y = right
        yield from (
            ("one part", (x,)), ("three parts", (x, y, y, y)), ("fewer targets", (x, y[:-1])), ("inputs of NaN", (x * float("nan"), y)),
            ("targets of NaN", (x, y * float("nan"))), ("labels from 1", (x, y + 1)), ("no rows", (x[:0], y[:0])), ("another width", (x[:, :-1] if x.ndim > 1 else x[:-1], y)),
            ("swapped", (y, x)), ("words", ("a", "b")), ("complex", (x.to(torch.complex64), y)),
        )  # fmt: skip


def _wrong_tensors(right: torch.Tensor) -> Iterator[tuple[str, Any]]:
    yield from (
        ("an axis more", right[None]), ("an axis less", right[0]), ("a row less", right[..., :-1, :] if right.ndim > 1 else right[:-1]),
        ("a column less", right[..., :-1]), ("complex", right.to(torch.complex64)), ("booleans", right > 0), ("integers", right.long() - 5),
        ("real numbers", right.double() + 0.5), ("negative", -right.double().abs() - 1), ("NaN inside", right.double().where(right != right.flatten()[0], float("nan"))),
        ("infinite", right.double() * float("inf")), ("no rows", right[..., :0]), ("of a list", right.tolist()), ("sparse", right.double().to_sparse()),
        ("meta", right.to("meta")), ("large", right.double() * 1e30),
    )  # fmt: skip


def made(value: Any) -> Any:
    """Return a value; factories of values are called anew for each call."""
    return value() if inspect.isfunction(value) else value


def cases(folder: Path) -> Iterator[Case]:
    """Yield every wrong call."""
    common, special = right_values(), special_values(folder)
    for name, function in targets().items():
        parameters = inspect.signature(function).parameters
        own = special.get(name, special.get(name.rpartition(".")[2], {}))
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        given = {
            key: own.get(key, common.get(key))
            for key, parameter in parameters.items()
            if parameter.kind not in kinds and (key in own or parameter.default is parameter.empty)
        }
        for key, parameter in parameters.items():
            if parameter.kind in kinds:
                continue
            for what, wrong in wrong_values(given.get(key, parameter.default)):
                yield Case(name, key, what, _bound(function, given, key, wrong))


def _bound(function: Callable[..., Any], given: dict[str, Any], key: str, wrong: Any) -> Callable[[], Any]:
    return lambda: function(**{**{name: made(value) for name, value in given.items()}, key: wrong})


def right_calls(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the right call of every name, which must work: else nothing is learned from the wrong ones."""
    seen = set()
    for case in cases(folder):
        if case.name not in seen:
            seen.add(case.name)
            given = inspect.getclosurevars(case.call).nonlocals
            function, values = given["function"], given["given"]
            yield (
                case.name,
                lambda function=function, values=values: function(**{k: made(v) for k, v in values.items()}),
            )


def outcome(case: Case) -> tuple[str, str]:
    """Make a call; return "accepted", "clear" or "obscure", and what was said."""
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings(), limited():
            warnings.simplefilter("ignore")
            case.call()
    except Exception as problem:
        said = f"{type(problem).__name__}: {problem}"
        return ("clear" if is_clear(problem) else "obscure"), said
    return "accepted", ""


@contextmanager
def limited() -> Iterator[None]:
    """Stop a call that hangs."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no answer in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_clear(problem: Exception) -> bool:
    """Return whether a refusal is this package's own, and a sentence."""
    if isinstance(problem, TypeError) and "missing" in str(problem):
        return True  # Python's own words for an argument that was left out
    frame = problem.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    ours = frame is not None and frame.tb_frame.f_code.co_filename.startswith(PACKAGE)
    text = str(problem)
    return isinstance(problem, CLEAR) and ours and 15 < len(text) < 700 and " " in text


def attack(every: int = 1) -> tuple[Counter[str], list[tuple[Case, str]]]:
    """Make one in so many of the calls; return how they ended, and those that ended obscurely."""
    logging.disable(logging.CRITICAL)
    ended: Counter[str] = Counter()
    obscure = []
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        evaluation()  # imports what a first call imports, so that none is stopped in the middle of it
        for place, case in enumerate(cases(Path(folder))):
            if place % every:
                continue
            how, said = outcome(case)
            ended[how] += 1
            if how == "obscure":
                obscure.append((case, said))
    logging.disable(logging.NOTSET)
    return ended, obscure


def counts(every: int) -> dict[str, int]:
    """Return the figures for the record."""
    ended, _ = attack(every)
    refused = ended["clear"] + ended["obscure"]
    return {
        "calls": ended.total(),
        "refused": refused,
        "in one sentence": ended["clear"],
        "accepted": ended["accepted"],
    }


def share(ended: Counter[str]) -> float:
    """Return the share of refusals that were clear."""
    return ended["clear"] / max(1, ended["clear"] + ended["obscure"])


def main() -> None:
    """Attack and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one call in ten")
    parser.add_argument("--obscure", action="store_true", help="list refusals that were not clear")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ended, obscure = attack(10 if options.quick else 1)
    if options.obscure:
        for case, said in obscure:
            print(f"{case.name}({case.argument}={case.wrong}): {said:.160}".replace("\n", " "))
    figures = {"calls": ended.total(), **ended, "share_clear": round(share(ended), 4)}
    print(json.dumps(figures))
    sys.exit(share(ended) < AIM)


if __name__ == "__main__":
    main()
