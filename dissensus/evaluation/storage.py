"""Evaluation in, JSON file out, and back; arrays and pictures stand in it as compressed base64."""

import json
import os
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from dissensus.diagnostics import Finding
from dissensus.evaluation.results import (
    AlarmCheck,
    Disputed,
    Evaluation,
    Examples,
    Histogram,
    Number,
    Reliability,
    Roc,
    SetInfo,
)

FORMAT = "dissensus evaluation 1"


def save(result: Evaluation, path: Path) -> Path:
    """Write an evaluation, replacing the file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(to_json(result), encoding="utf-8")
    os.replace(temporary, path)
    return path


def load(path: Path) -> Evaluation:
    """Read an evaluation, or say why the file is none."""
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise ValueError(f"{path} holds no evaluation that can be read: {error}. Evaluate again.") from None


def to_json(result: Evaluation) -> str:
    """Return an evaluation as JSON text."""
    whole = {entry.name: getattr(result, entry.name) for entry in fields(result)}
    whole["numbers"] = _as_table(result.numbers)
    whole["replicates"] = {
        "shape": result.replicates.shape,
        "float32": _packed(result.replicates.astype("<f4").tobytes()),
    }
    for name in ("sets", "reliability", "rocs", "histograms", "examples"):
        whole[name] = [asdict(part) for part in whole[name]]
    whole["gallery"] = [{**asdict(item), "pixels": _packed(item.pixels)} for item in result.gallery]
    whole["diagnosis"] = None if result.diagnosis is None else result.diagnosis.to_dict()
    whole["alarm"] = None if result.alarm is None else asdict(result.alarm)
    return json.dumps({"format": FORMAT, **whole}, allow_nan=False)


def from_json(text: str) -> Evaluation:
    """Return the evaluation that `to_json` wrote."""
    whole = json.loads(text)
    if not isinstance(whole, dict) or whole.pop("format", None) != FORMAT:
        raise KeyError(f"its format is not {FORMAT!r}")
    columns, rows = whole["numbers"]["columns"], whole["numbers"]["rows"]
    whole["numbers"] = tuple(Number(**dict(zip(columns, row, strict=True))) for row in rows)
    packed = whole["replicates"]
    array = np.frombuffer(_unpacked(packed["float32"]), dtype="<f4").reshape(packed["shape"])
    whole["replicates"] = array.astype(np.float32)
    for item in whole["gallery"]:
        item["pixels"] = _unpacked(item["pixels"])
    kinds: dict[str, Any] = {
        "sets": SetInfo,
        "reliability": Reliability,
        "rocs": Roc,
        "histograms": Histogram,
        "gallery": Disputed,
        "examples": Examples,
    }
    whole.setdefault("examples", [])  # files of earlier versions have none
    for part in whole["examples"]:
        part["scores"] = {name: tuple(values) for name, values in part["scores"].items()}
    for name, kind in kinds.items():
        whole[name] = tuple(_rebuilt(kind, part) for part in whole[name])
    for name in ("class_names", "weights", "score_names", "remarks"):
        whole[name] = tuple(whole.get(name, ()))
    whole["groups"] = {name: tuple(members) for name, members in whole["groups"].items()}
    if whole.get("diagnosis") is not None:
        whole["diagnosis"] = Finding.from_dict(whole["diagnosis"])
    if (alarm := whole.get("alarm")) is not None:
        alarm["p_values"] = {name: tuple(values) for name, values in alarm["p_values"].items()}
        whole["alarm"] = _rebuilt(AlarmCheck, alarm)
    return Evaluation(**whole)


def _rebuilt(kind: Callable[..., Any], values: dict[str, Any]) -> Any:
    return kind(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    )


def _as_table(numbers: tuple[Number, ...]) -> dict[str, Any]:
    columns = [entry.name for entry in fields(Number)]
    return {"columns": columns, "rows": [[getattr(number, name) for name in columns] for number in numbers]}


def _packed(raw: bytes) -> str:
    return b64encode(zlib.compress(raw)).decode("ascii")


def _unpacked(text: str) -> bytes:
    return zlib.decompress(b64decode(text))
