"""What requests and answers look like, as OpenAPI describes them."""

from collections.abc import Sequence
from typing import Any

from dissensus.serving.model import Field, Model

Schema = dict[str, Any]

_NUMBER: Schema = {"type": "number"}
_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_WHOLE: Schema = {"type": "integer"}


def _object(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _like(example: Any) -> Schema:
    """Describe values that look like an example: an object with all its keys, or a list whose items are like its first."""
    if isinstance(example, dict):
        return _object({name: _like(value) for name, value in example.items()})
    if isinstance(example, list):
        return _list(_like(example[0]) if example else {})
    return {"type": _TYPES[type(example)]}


_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
LIVE, READY, MODEL_READY = _like({"live": True}), _like({"ready": True}), _like({"name": "", "ready": True})
SERVER = _like({"name": "", "version": "", "extensions": [""]})
_ERROR = _object({"error": {**_TEXT, "description": "One sentence: what was wanted, what came, what to do."}})
_FIELD = {"name": "", "datatype": "", "shape": [1]}
MODEL = _like({"name": "", "versions": [""], "platform": "", "inputs": [_FIELD], "outputs": [_FIELD], "parameters": {}})


def _tensor(name: Schema, datatype: Schema) -> Schema:
    data = _list({}, description="Numbers, flat or nested as the shape says.")
    return _object({"name": name, "shape": _list({**_WHOLE, "minimum": 0}), "datatype": datatype, "data": data})


INFERRED = _object({"model_name": _TEXT, "model_version": _TEXT, "outputs": _list(_tensor(_TEXT, _TEXT))}, id=_TEXT)
_UNCERTAINTY = {
    "total": {**_NUMBER, "description": "Total uncertainty: an entropy in nats, or a variance."},
    "data": {**_NUMBER, "description": "The part that members see in the data."},
    "knowledge": {**_NUMBER, "description": "The part in which members disagree."},
    "score": {**_NUMBER, "description": "What the alarm ranks; higher is stranger."},
}
_SCORED_ROW = _object(
    {"prediction": {"description": "Name or number of the class, or the value(s)."}, **_UNCERTAINTY},
    probabilities=_list(_NUMBER),
    p_value={**_NUMBER, "description": "Small where an input is unlike held-out ones."},
    flag={**_FLAG, "description": "Whether the p-value is at most the limit."},
    members=_list({}, description="Each member's probabilities or values."),
)
SCORED = _object({"rows": _list(_SCORED_ROW)})
_VALUE: Schema = {"type": ["number", "string", "boolean", "null"]}


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
        members={**_FLAG, "description": "Return each member's own prediction, where the file has them."},
    )


def _row(model: Model) -> Schema:
    if model.table is not None:
        names = model.table.names
        columns = {"type": "object", "properties": {name: _VALUE for name in names}, "additionalProperties": False}
        return {"anyOf": [columns, _list(_VALUE, minItems=len(names), maxItems=len(names))]}
    arrays = {name: _array(field, field.shape) for name, field in model.inputs.items()}
    return _object(arrays) if len(arrays) > 1 else next(iter(arrays.values()))


def _array(field: Field, shape: Sequence[int | None]) -> Schema:
    if not shape:
        return _NUMBER if field.floats else _WHOLE
    size = {} if shape[0] is None else {"minItems": shape[0], "maxItems": shape[0]}
    return _list(_array(field, shape[1:]), **size)


def infer(model: Model) -> Schema:
    """Describe what the protocol's `infer` takes for this model."""
    types = sorted({field.datatype for field in model.inputs.values()} | {"FP32"})
    tensor = _tensor({**_TEXT, "enum": [*model.inputs, "limit"]}, {**_TEXT, "enum": types})
    outputs = _object({"name": {**_TEXT, "enum": list(model.outputs)}})
    about = "The model's inputs; `limit`, a false-alarm rate, may be among them."
    return _object(
        {"inputs": _list(tensor, minItems=len(model.inputs), description=about)},
        id=_TEXT,
        outputs=_list(outputs, description="Which outputs to return; all but `members` by default."),
    )


DRIFT = _object(
    {"watched": _FLAG},
    seen={**_WHOLE, "description": "Rows so far."},
    log10={**_NUMBER, "description": "Common logarithm of the martingale."},
    threshold={**_NUMBER, "description": "Unchanged inputs reach it with a probability of one in so many."},
    alarm={**_FLAG, "description": "Whether it was ever reached."},
    points=_list(_list(_NUMBER), description="Pairs of rows seen and the logarithm then."),
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


def answers(schema: Schema, *errors: int) -> dict[int | str, dict[str, Any]]:
    """Return the answers of a route: its own, as a schema, and the errors it may give."""
    return {200: {"description": "The answer.", **_json(schema)}} | refusals(*errors)


def refusals(*errors: int) -> dict[int | str, dict[str, Any]]:
    """Return errors of a route; every one is an object with one sentence."""
    return {status: {"description": _REASONS[status], **_json(_ERROR)} for status in errors}


def body(schema: Schema) -> dict[str, Any]:
    """Return what a route takes."""
    return {"requestBody": {"required": True, **_json(schema)}}


def _json(schema: Schema) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
