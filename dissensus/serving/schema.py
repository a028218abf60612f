"""What requests and answers look like, as OpenAPI describes them."""

from collections.abc import Sequence
from typing import Any

from dissensus.serving.model import Field, Model

Schema = dict[str, Any]


def _object(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _one_of(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def _like(example: Any) -> Schema:
    """Describe values that look like an example: an object, of which keys with a question mark may be missing, or a list.

    A pair is an example and what is said about it; `...` is anything.
    """
    if isinstance(example, tuple):
        return {**_like(example[0]), "description": example[1]}
    if isinstance(example, dict):
        parts = {name.rstrip("?"): _like(value) for name, value in example.items()}
        return {"type": "object", "properties": parts, "required": [name for name in example if name in parts]}
    if isinstance(example, list):
        return _list(_like(example[0]))
    return {} if example is ... else {"type": _TYPES[type(example)]}


_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
_ERROR = {"error": ("", "One sentence: what was wanted, what came, what to do.")}
_FIELD = {"name": "", "datatype": "", "shape": [1]}
MODEL = {"name": "", "versions": [""], "platform": "", "inputs": [_FIELD], "outputs": [_FIELD], "parameters": {}}
_DATA = ([...], "Numbers, flat or nested as the shape says.")
INFERRED = {"model_name": "", "model_version": "", "outputs": [{**_FIELD, "data": _DATA}], "id?": ""}
_SCORED_ROW = {
    "prediction": (..., "Name or number of the class, or the value(s)."),
    "total": (0.0, "Total uncertainty: an entropy in nats, or a variance."),
    "data": (0.0, "The part that members see in the data."),
    "knowledge": (0.0, "The part in which members disagree."),
    "score": (0.0, "What the alarm ranks; higher is stranger."),
    "probabilities?": [0.0],
    "p_value?": (0.0, "Small where an input is unlike held-out ones."),
    "flag?": (True, "Whether the p-value is at most the limit."),
    "members?": ([...], "Each member's probabilities or values."),
}
SCORED = {"rows": [_SCORED_ROW]}
DRIFT = {
    "watched": True,
    "seen?": (1, "Rows so far."),
    "log10?": (0.0, "Common logarithm of the martingale."),
    "threshold?": (0.0, "Unchanged inputs reach it with a probability of one in so many."),
    "alarm?": (True, "Whether it was ever reached."),
    "points?": ([[0.0]], "Pairs of rows seen and the logarithm then."),
}
_VALUE: Schema = {"type": ["number", "string", "boolean", "null"], "description": "null where the value is missing"}


def score(model: Model) -> Schema:
    """Describe what `/score` takes: rows of this model, lists of numbers or objects by name."""
    return _object(
        {"rows": _list(_row(model), minItems=1)},
        limit={
            "type": ["number", "null"],
            "minimum": 0,
            "maximum": 1,
            "description": "Flag rows whose p-value is at most this; the file's own limit where there is none.",
        },
        members=_like((True, "Return each member's own prediction, where the file has them.")),
    )


def _row(model: Model) -> Schema:
    if model.table is not None:
        names = model.table.names
        columns = {**_object({name: _VALUE for name in names}), "additionalProperties": False}
        return {"anyOf": [columns, _list(_VALUE, minItems=len(names), maxItems=len(names))]}
    arrays = {name: _array(field, field.shape) for name, field in model.inputs.items()}
    return _object(arrays) if len(arrays) > 1 else next(iter(arrays.values()))


def _array(field: Field, shape: Sequence[int | None]) -> Schema:
    if not shape:
        return _like(0.0 if field.floats else 1)
    size = {} if shape[0] is None else {"minItems": shape[0], "maxItems": shape[0]}
    return _list(_array(field, shape[1:]), **size)


def infer(model: Model) -> Schema:
    """Describe what the protocol's `infer` takes for this model."""
    types = sorted({field.datatype for field in model.inputs.values()} | {"FP32"})
    shape = _list({"type": "integer", "minimum": 0})
    tensor = {
        "name": _one_of(*model.inputs, "limit"),
        "shape": shape,
        "datatype": _one_of(*types),
        "data": _like(_DATA),
    }
    outputs = _object({"name": _one_of(*model.outputs)})
    about = "The model's inputs; `limit`, a false-alarm rate, may be among them."
    return _object(
        {"inputs": _list(_object(tensor), minItems=len(model.inputs), description=about)},
        id=_like(""),
        outputs=_list(outputs, description="Which outputs to return; all but `members` by default."),
    )


_REASONS = {
    400: "Something about the request is wrong.",
    401: "The key is missing or wrong.",
    404: "There is no such model.",
    408: "The request took too long to arrive.",
    413: "The request is too large.",
    415: "The request is not JSON.",
    429: "Too many requests wait; Retry-After says when to come again.",
}


def answers(example: Any, *errors: int) -> dict[int | str, dict[str, Any]]:
    """Return the answers of a route: its own, which look like the example, and the errors it may give."""
    return {200: {"description": "The answer.", **_json(_like(example))}} | refusals(*errors)


def refusals(*errors: int) -> dict[int | str, dict[str, Any]]:
    """Return errors of a route; every one is an object with one sentence."""
    return {status: {"description": _REASONS[status], **_json(_like(_ERROR))} for status in errors}


def body(schema: Schema) -> dict[str, Any]:
    """Return what a route takes."""
    return {"requestBody": {"required": True, **_json(schema)}}


def _json(schema: Schema) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
