"""The FastAPI application: routes, error responses and the two HTML pages."""

import asyncio
import base64
import hashlib
import re
import time
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from bitgraft import __version__
from bitgraft.errors import UnknownTaskError, UnsafeNameError
from bitgraft.serving.access import Access
from bitgraft.serving.admin import add_admin
from bitgraft.serving.engine import Inferred, Service
from bitgraft.serving.examples import FOUND, IMAGES, METRICS, PREDICTION, PREDICTIONS, TASK, TASKS, example
from bitgraft.serving.http_error import HttpError
from bitgraft.serving.inference_protocol import add_inference_protocol
from bitgraft.serving.schemas import FoundPredictions, Prediction, Predictions
from bitgraft.serving.uploads import Uploads
from bitgraft.workflows.prediction import best

STATUS: dict[type[Exception], int] = {UnsafeNameError: 400, UnknownTaskError: 404}
Top = Annotated[int, Query(ge=1, le=1000, description="Number of classes per image.")]
Tasks = Annotated[list[str], Query(description="Repeat for several tasks.")]


def make_app(service: Service) -> FastAPI:
    app = FastAPI(title="bitgraft", version=__version__, docs_url=None, redoc_url=None)
    kinds: tuple[type[Exception], ...] = (HttpError, *STATUS, HTTPException, RequestValidationError, Exception)
    for kind in kinds:
        app.add_exception_handler(kind, _error_response)
    app.add_middleware(Access, service=service)
    uploads = Uploads(service.settings)
    _add_page(app, "/", "page.html")
    _add_page(app, "/docs", "docs.html")
    _add_state(app, service)
    _add_predictions(app, service, uploads)
    add_admin(app, service, uploads)
    add_inference_protocol(app, service, uploads)
    return app


def _add_predictions(app: FastAPI, service: Service, uploads: Uploads) -> None:
    @app.post("/v1/predict/auto", response_model=FoundPredictions, openapi_extra=IMAGES, responses=example(FOUND))
    async def find(request: Request, top: Top = 5) -> dict[str, Any]:
        """Identify each image's task from the tasks' descriptions and run it. Unknown images have a null task."""
        start = time.perf_counter()
        async with uploads.read(request, uploads.images) as (images, _):
            found = await service.identify(images, top)
        return {"milliseconds": _milliseconds_since(start), "images": found}

    @app.post("/v1/predict/{task:path}", response_model=Prediction, openapi_extra=IMAGES, responses=example(PREDICTION))
    async def predict(request: Request, task: str, top: Top = 5) -> dict[str, Any]:
        """Run one task on one or more images. `milliseconds` is the time of their batches in the network."""
        async with uploads.read(request, uploads.images) as (images, _):
            (inferred,) = await service.infer([task], images)
        return _prediction(inferred, top)

    @app.post("/v1/predict", response_model=Predictions, openapi_extra=IMAGES, responses=example(PREDICTIONS))
    async def predict_several(request: Request, task: Tasks = [], top: Top = 5) -> dict[str, Any]:  # noqa: B006
        """Run several tasks on the same images."""
        start = time.perf_counter()
        async with uploads.read(request, uploads.images) as (images, more):
            names = [*task, *more]
            if not names:
                raise HttpError(422, "no task given: add ?task=NAME&task=NAME; /v1/tasks lists the names")
            inferred = await service.infer(names, images)
        return {"milliseconds": _milliseconds_since(start), "tasks": [_prediction(one, top) for one in inferred]}


def _prediction(inferred: Inferred, top: int) -> dict[str, Any]:
    return {
        "task": inferred.task,
        "version": inferred.version,
        "milliseconds": round(1000 * inferred.seconds, 3),
        "answers": [best(row, inferred.classes, top) for row in inferred.probabilities],
    }


def _milliseconds_since(start: float) -> float:
    return round(1000 * (time.perf_counter() - start), 3)


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/v1/tasks", responses=example(TASKS))
    async def tasks() -> dict[str, Any]:
        """List the store's tasks: method, classes, accuracy, size, engine, and whether weights are in memory."""
        return await service.tasks()

    @app.get("/v1/tasks/{task:path}", responses=example(TASK))
    async def task(task: str) -> dict[str, Any]:
        """Show one task: its class names, and the mask density and k0..k3 of each layer."""
        return await service.task(task)

    @app.get("/metrics", responses=example(METRICS, "text/plain"))
    async def metrics() -> Response:
        """Metrics of all workers, in Prometheus format."""
        service.update_gauges()
        text = await asyncio.to_thread(service.metrics.render)  # takes seconds with many tasks
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_page(app: FastAPI, path: str, name: str) -> None:
    """Serve a page whose policy allows only its own script and style, and requests to this host."""
    text = files("bitgraft.serving").joinpath(name).read_text()
    hashes = {
        tag: base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        for tag, content in re.findall(r"<(script|style)>(.*?)</\1>", text, re.DOTALL)
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    @app.get(path, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})


async def _error_response(request: Request, problem: Any) -> Response:
    if type(problem) in STATUS:
        problem = HttpError(STATUS[type(problem)], str(problem))
    if isinstance(problem, HttpError):
        headers = {} if problem.retry_after is None else {"Retry-After": str(problem.retry_after)}
        if problem.status in (400, 401, 403, 408, 413, 415, 503, 507):
            headers["Connection"] = "close"  # the client may still be sending a body that nobody reads
        return JSONResponse({"error": problem.message}, problem.status, headers)
    if isinstance(problem, HTTPException):
        message = f"{request.method} {request.url.path}: {problem.detail}; see /docs for the API"
        return JSONResponse({"error": message}, problem.status_code, problem.headers)
    if isinstance(problem, RequestValidationError):
        first = problem.errors()[0]
        return JSONResponse({"error": f"{first['loc'][-1]}: {first['msg'].lower()}"}, 422)
    return JSONResponse({"error": "internal error: see the service's log"}, 500)
