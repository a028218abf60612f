"""How a server is to run, what one worker keeps, and its routes: KServe's protocol, plain rows, metrics, drift and a page."""

import asyncio
import base64
import hashlib
import hmac
import html
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from math import log
from typing import Annotated, Any, TypeGuard

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Path, Request, Response
from numpy.typing import NDArray
from pydantic import AfterValidator
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, PlainTextResponse

from dissensus import __version__
from dissensus.conformal import DriftMonitor
from dissensus.serving import schema
from dissensus.serving.batching import Batcher, QueueFull
from dissensus.serving.model import Arrays, BadInput, Field, Model
from dissensus.serving.watching import Metrics, Watched

# For what the framework itself says.
_SENTENCES = {
    "Not Found": "There is nothing at this address; GET /openapi.json lists what there is.",
    "Method Not Allowed": "This address does not take that method.",
}
# Points of the drift chart; when they are full, every second one goes.
_POINTS = 400


@dataclass(frozen=True)
class Settings:
    """How a server is to run.

    Attributes:
        path: The exported file.
        name: What the model is called in addresses.
        host: Address to listen on.
        port: Port to listen on.
        workers: Processes that answer, each with the file in memory; one that dies is started again.
        threads: Processor threads of one run; 0 for as many as there are processors.
        api_key: What requests must bring along as `Authorization: Bearer KEY`; None lets all in. Health and the page stay open.
        certificate: File of the TLS certificate; None for plain HTTP.
        key: File of its private key.
        queue_rows: Rows that may wait; further requests get 429.
        most_rows: Rows that one request may have.
        most_bytes: Bytes that one request may have.
        seconds: How long a request may take to arrive.
        drift_threshold: Where the drift alarm rings: inputs that do not change ring it with a probability of one in so many.
    """

    path: str
    name: str = "model"
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    threads: int = 1
    api_key: str | None = None
    certificate: str | None = None
    key: str | None = None
    queue_rows: int = 1024
    most_rows: int = 4096
    most_bytes: int = 8 << 20
    seconds: float = 10.0
    drift_threshold: float = 100.0


class Service:
    """Everything that one process keeps between requests."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = Model(settings.path, settings.threads)
        self.metrics = Metrics()
        self.batcher = Batcher(self._run, settings.queue_rows)
        state = self.model.facts.get("drift")
        self.monitor = None if state is None else DriftMonitor.from_state(state)
        self._points: list[tuple[int, float]] = []
        self._every = 1

    async def check_key(self, request: Request) -> None:
        """Let requests with the right key pass; in a time that does not tell how much of it was right."""
        key = self.settings.api_key
        given = request.headers.get("authorization", "").encode("latin-1").removeprefix(b"Bearer ")
        if key is not None and not hmac.compare_digest(given, key.encode()):
            raise HTTPException(
                401, "Send the server's key as Authorization: Bearer KEY.", {"WWW-Authenticate": "Bearer"}
            )

    def _run(self, feed: Arrays) -> Arrays:
        """Run a batch, and look at its scores; in the batcher's thread, which is the only one that does."""
        outputs = self.model.run(feed)
        for name, values in outputs.items():
            if not (finite := np.isfinite(values)).all():
                row = int(np.argwhere(~finite)[0][0])
                raise BadInput(f"Row {row} has no finite {name}: are its values far too large?")
        if self.monitor is not None:
            self.monitor.update_scores(outputs["score"])
            self._note(self.monitor)
        self.metrics.count(outputs)
        self.metrics.waiting.set(self.batcher.waiting_rows)
        return outputs

    def _note(self, monitor: DriftMonitor) -> None:
        seen, value = monitor.martingale.seen, monitor.log_value / log(10)
        self.metrics.martingale.set(value)
        if not self._points or seen - self._points[-1][0] >= self._every:
            self._points.append((seen, round(value, 3)))
        if len(self._points) > _POINTS:
            self._points = self._points[::2]
            self._every *= 2

    def drift(self) -> dict[str, Any]:
        """Return where the drift monitor stands, and how it got there."""
        if self.monitor is None:
            return {"watched": False}
        return {
            "watched": True,
            "seen": self.monitor.martingale.seen,
            "log10": self.monitor.log_value / log(10),
            "threshold": self.settings.drift_threshold,
            "alarm": self.monitor.alarm(self.settings.drift_threshold),
            "points": self._points,
        }


def make_app(settings: Settings) -> FastAPI:
    """Return the application; one process of a server runs one.

    Example:
        >>> make_app(Settings("no/such/model.onnx"))
        Traceback (most recent call last):
        ValueError: There is no file no/such/model.onnx. Write one with: dissensus export RUN --to onnx
    """
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.batcher.stop()

    app = FastAPI(
        title="dissensus",
        description="Predictions that say how sure they are, and whether an input is unlike what the ensemble knows.",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # it asks for the key, too
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(Watched, metrics=service.metrics)
    for problem in (HTTPException, BadInput, QueueFull):
        app.add_exception_handler(problem, _refuse)
    keyed = APIRouter(dependencies=[Depends(service.check_key)], responses=schema.refusals(401))
    _add_rows(keyed, service)
    _add_protocol(app, keyed, service)
    _add_watching(app, keyed, service)
    app.include_router(keyed)
    return app


def _add_protocol(app: FastAPI, keyed: APIRouter, service: Service) -> None:
    """Add KServe's protocol, version 2."""
    name = service.settings.name

    def known(given: str) -> str:
        if given != name:
            raise HTTPException(404, f"There is one model here, {name!r}.")
        return given

    # Described as the one name there is; another gets a sentence, which a type that allows no other would not give.
    about = Path(description="The model's name.", json_schema_extra={"enum": [name]})
    Name = Annotated[str, about, AfterValidator(known)]

    @app.get("/v2/health/live", responses=schema.answers({"live": True}), tags=["health"])
    async def live() -> Response:
        """Say that the process answers."""
        return _json({"live": True})

    @app.get("/v2/health/ready", responses=schema.answers({"ready": True}), tags=["health"])
    async def ready() -> Response:
        """Say that the model is loaded."""
        return _json({"ready": True})

    @keyed.get("/v2", responses=schema.answers({"name": "", "version": "", "extensions": [""]}), tags=["protocol"])
    async def server() -> Response:
        """Describe the server."""
        return _json({"name": "dissensus", "version": __version__, "extensions": []})

    @app.get("/v2/models/{model}/ready", responses=schema.answers({"name": "", "ready": True}, 404), tags=["health"])
    async def model_ready(model: Name) -> Response:
        """Say that a model is loaded."""
        return _json({"name": model, "ready": True})

    @keyed.get("/v2/models/{model}", responses=schema.answers(schema.MODEL, 404), tags=["protocol"])
    async def metadata(model: Name) -> Response:
        """Describe a model: its inputs and outputs, and what its file says about itself."""
        served = service.model
        limit = [] if served.limit is None else [{"name": "limit", "datatype": "FP32", "shape": []}]
        return _json(
            {
                "name": model,
                "versions": ["1"],
                "platform": "onnxruntime_onnx",
                "inputs": [field.to_json() for field in served.inputs.values()] + limit,
                "outputs": [field.to_json() for field in served.outputs.values()],
                "parameters": {key: fact for key, fact in served.facts.items() if key != "drift"},
            }
        )

    @keyed.post(
        "/v2/models/{model}/infer",
        responses=schema.answers(schema.INFERRED, 400, 404, 408, 413, 415, 429),
        openapi_extra=schema.body(schema.infer(service.model)),
        tags=["protocol"],
    )
    async def infer(model: Name, request: Request) -> Response:
        """Predict tensors. `limit`, a false-alarm rate, may be given among the inputs."""
        asked = await _read(request, service)
        if not isinstance(asked.get("id"), str | int | None):
            raise BadInput('"id" must be a text or a whole number.')
        feed, limit = _tensors(asked, service)
        wanted = _wanted(asked, service)
        found = await _predict(request, service, feed, limit)
        outputs = [service.model.outputs[output].tensor(found[output]) for output in wanted]
        answer = {"model_name": model, "model_version": "1", "outputs": outputs}
        return _json(answer | ({"id": asked["id"]} if "id" in asked else {}))


def _add_rows(keyed: APIRouter, service: Service) -> None:
    @keyed.post(
        "/score",
        responses=schema.answers(schema.SCORED, 400, 408, 413, 415, 429),
        openapi_extra=schema.body(schema.score(service.model)),
        tags=["rows"],
    )
    async def score(request: Request) -> Response:
        """Predict rows: lists of numbers, or objects by name of column."""
        asked = await _read(request, service)
        if unknown := set(asked) - {"rows", "limit", "members"}:
            raise BadInput(f'A request has "rows", and may have "limit" and "members"; got {min(unknown)[:60]!r}.')
        limit = None if asked.get("limit") is None else _limit(asked["limit"], service)
        members = asked.get("members", False)
        if not isinstance(members, bool):
            raise BadInput('"members" must be true or false.')
        rows = asked.get("rows")
        if not isinstance(rows, list) or not rows:
            raise BadInput('"rows" must be a list of at least one row.')
        _check_rows(len(rows), service)
        found = await _predict(request, service, service.model.read_rows(rows), limit)
        return _json({"rows": service.model.answers(found, members)})


def _add_watching(app: FastAPI, keyed: APIRouter, service: Service) -> None:
    page, policy = _page(service.settings.name)

    @app.get("/", response_class=HTMLResponse, tags=["page"])
    async def index() -> Response:
        """Return a page to try the model in a browser."""
        return Response(page, media_type="text/html", headers={"Content-Security-Policy": policy})

    @keyed.get("/openapi.json", include_in_schema=False)
    async def described() -> Response:
        """Return what every address takes and gives."""
        return _json(app.openapi())

    @keyed.get("/drift", responses=schema.answers(schema.DRIFT), tags=["watching"])
    async def drift() -> Response:
        """Say whether inputs have changed since the ensemble was calibrated, as this worker has seen them."""
        return _json(service.drift())

    @keyed.get("/metrics", response_class=PlainTextResponse, tags=["watching"])
    async def metrics() -> Response:
        """Return counters for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _page(name: str) -> tuple[str, str]:
    """Return the page, and a policy that lets its own script and style run and nothing else."""
    page = files("dissensus.serving").joinpath("page.html").read_text(encoding="utf-8")
    page = page.replace("{model}", html.escape(name))
    parts = (page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0] for tag in ("script", "style"))
    hashes = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
    script, style = (f"sha256-{own}" for own in hashes)
    return page, (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src blob: data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _read(request: Request, service: Service) -> dict[str, Any]:
    """Return the JSON object of a request, or say what is wrong with it."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "Requests are JSON: send Content-Type: application/json.")
    most, body = service.settings.most_bytes, bytearray()
    too_large = HTTPException(413, f"A request may have {most} bytes. Send fewer rows at a time.")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > most):
        raise too_large
    try:
        async with asyncio.timeout(service.settings.seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"The request took more than {service.settings.seconds:g} s to arrive.") from None
    except ClientDisconnect:
        raise HTTPException(400, "The request ended before it was whole.") from None
    try:
        asked = json.loads(body, parse_constant=int)  # which NaN and Infinity are not
    except (ValueError, RecursionError):
        raise BadInput("The request is not JSON, whose numbers are finite; NaN and Infinity are none.") from None
    if not isinstance(asked, dict):
        raise BadInput(f"A request is a JSON object; got {type(asked).__name__}.")
    return asked


def _tensors(asked: dict[str, Any], service: Service) -> tuple[Arrays, float | None]:
    """Return the inputs of a protocol request, and its limit."""
    given = asked.get("inputs")
    if not _are_objects(given):
        raise BadInput('"inputs" must be a list of tensors, each with "name", "shape", "datatype" and "data".')
    named = {str(each.get("name")): each for each in given}
    fields = service.model.inputs
    if named.keys() - {"limit"} != fields.keys() or len(given) != len(named):
        raise BadInput(
            f"The inputs are {', '.join(map(repr, fields))}, each once; got {', '.join(map(repr, named)) or 'none':.200}."
        )
    limit, feed, rows = None, Arrays(), None
    if "limit" in named:
        data = named["limit"].get("data")
        limit = _limit(data[0] if isinstance(data, list) and len(data) == 1 else data, service)
    for name, field in fields.items():
        feed[name] = _array(named[name], field, rows)
        rows = len(feed[name])
        _check_rows(rows, service)
    return feed, limit


def _are_objects(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _array(tensor: dict[str, Any], field: Field, rows: int | None) -> NDArray[Any]:
    """Return a tensor's numbers, which may come flat or nested, in its shape."""
    shape = tensor.get("shape")
    if tensor.get("datatype") != field.datatype:
        raise BadInput(f"{field.name!r} is {field.datatype}; got {str(tensor.get('datatype'))[:60]!r}.")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise BadInput(f'"shape" of {field.name!r} must be a list of whole numbers.')
    return field.array(tensor.get("data"), rows, shape)


def _wanted(asked: dict[str, Any], service: Service) -> list[str]:
    outputs = list(service.model.outputs)
    given = asked.get("outputs")
    if given is None:
        return [output for output in outputs if output != "members"]
    if not _are_objects(given) or not all(each.get("name") in outputs for each in given):
        raise BadInput(f'"outputs" must be a list of objects whose "name" is one of {", ".join(map(repr, outputs))}.')
    return [each["name"] for each in given]


def _limit(value: Any, service: Service) -> float:
    if service.model.limit is None:
        raise BadInput("The file has no alarm, so there is no limit to move. Export it with one.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise BadInput('"limit" is a false-alarm rate, one number from 0 to 1.')
    return float(value)


async def _predict(request: Request, service: Service, feed: Arrays, limit: float | None) -> Arrays:
    """Return the outputs; flags of another limit than the file's own come by the same comparison."""
    found = await service.batcher.submit(feed)
    request.scope["dissensus.rows"] = len(found["prediction"])
    return found if limit is None else found | {"flag": found["p_value"] <= np.float32(limit)}


def _check_rows(rows: int, service: Service) -> None:
    if rows > service.settings.most_rows:
        raise HTTPException(413, f"A request may have {service.settings.most_rows} rows; got {rows}.")


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(text, status, headers, "application/json")


async def _refuse(request: Request, problem: Any) -> Response:
    """Answer what went wrong in one sentence, as `{"error": ...}`."""
    if isinstance(problem, QueueFull):
        sentence = "Too many requests wait already; try again in a second."
        return _json({"error": sentence}, 429, {"Retry-After": "1"})
    if isinstance(problem, BadInput):
        return _json({"error": str(problem)}, 400)
    return _json({"error": _SENTENCES.get(problem.detail, problem.detail)}, problem.status_code, problem.headers)
