"""The HTTP side: routes, refusals as sentences, the pages."""

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
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from bitgraft import __version__
from bitgraft.serving.access import Access
from bitgraft.serving.admin import add_admin
from bitgraft.serving.engine import Service
from bitgraft.serving.examples import FOUND, METRICS, PREDICTION, PREDICTIONS, STATUS, TASK, TASKS, answer
from bitgraft.serving.inference_protocol import add_inference_protocol
from bitgraft.serving.refusals import Refusal
from bitgraft.serving.uploads import Uploads

Top = Annotated[int, Query(ge=1, le=1000, description="How many answers for each image.")]
Tasks = Annotated[list[str], Query(description="Repeat it for several tasks.")]
FILE = {"type": "string", "format": "binary"}
FORM = {"type": "object", "properties": {"image": {"type": "array", "items": FILE}}}
BODY = {
    "requestBody": {
        "required": True,
        "description": "An image, or a form with one file for each image.",
        "content": {"image/*": {"schema": FILE}, "multipart/form-data": {"schema": FORM}},
    }
}


class Answer(BaseModel):
    """One class and its probability."""

    class_: str = Field(alias="class")
    probability: float


class Prediction(BaseModel):
    """One task's answers: a list for each image, the likeliest class first."""

    task: str
    version: str
    milliseconds: float = Field(description="In the network, for the batch in which the images ran.")
    answers: list[list[Answer]]


class Predictions(BaseModel):
    """The answers of several tasks to the same images."""

    milliseconds: float
    tasks: list[Prediction]


class Guess(BaseModel):
    """A task and how likely the image is one of its."""

    task: str
    score: float


class Found(BaseModel):
    """An image's task, or null, the likeliest tasks, and the answers of the first."""

    task: str | None
    route: list[Guess]
    answers: list[Answer]


class FoundPredictions(BaseModel):
    """What was found for each image."""

    milliseconds: float
    images: list[Found]


def make_app(service: Service) -> FastAPI:
    app = FastAPI(title="bitgraft", version=__version__, docs_url=None, redoc_url=None)
    for kind in (Refusal, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _failed)
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
    @app.post("/v1/predict/auto", response_model=FoundPredictions, openapi_extra=BODY, responses=answer(FOUND))
    async def find(request: Request, top: Top = 5) -> Any:
        """The task of each image, found by its description, and that task's answers; null where it is unknown."""
        began = time.perf_counter()
        async with uploads.read(request) as (images, _):
            found = await service.find(images, top)
        return {"milliseconds": round(1000 * (time.perf_counter() - began), 3), "images": found}

    @app.post("/v1/predict/{task:path}", response_model=Prediction, openapi_extra=BODY, responses=answer(PREDICTION))
    async def predict(request: Request, task: str, top: Top = 5) -> Any:
        """One task's answers to one or more images."""
        async with uploads.read(request) as (images, _):
            return (await service.predict([task], images, top))[0]

    @app.post("/v1/predict", response_model=Predictions, openapi_extra=BODY, responses=answer(PREDICTIONS))
    async def predict_several(request: Request, task: Tasks = [], top: Top = 5) -> Any:  # noqa: B006
        """The answers of several tasks to the same images."""
        began = time.perf_counter()
        async with uploads.read(request) as (images, more):
            names = [*task, *more]
            if not names:
                known = ", ".join(row["name"] for row in (await service.tasks())["tasks"])
                raise Refusal(422, f"name the tasks, as in ?task=NAME&task=NAME; known are {known}")
            answers = await service.predict(names, images, top)
        return {"milliseconds": round(1000 * (time.perf_counter() - began), 3), "tasks": answers}


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/v1/tasks", responses=answer(TASKS))
    async def tasks() -> dict[str, Any]:
        """The store: each task's method, classes, accuracy, size, and whether its weights are computed right now."""
        return await service.tasks()

    @app.get("/v1/tasks/{task:path}", responses=answer(TASK))
    async def task(task: str) -> dict[str, Any]:
        """One task: its classes, and by layer the share of ones and k0..k3."""
        return await service.task(task)

    def status(good: bool) -> Response:
        return JSONResponse({"status": "ok" if good else "unavailable"}, 200 if good else 503)

    @app.get("/healthz", responses=answer(STATUS))
    async def healthy() -> Response:
        """Whether the process works and accepts requests."""
        return status(service.healthy())

    @app.get("/readyz", responses=answer(STATUS))
    async def ready() -> Response:
        """The same, and whether all pinned tasks are ready."""
        return status(service.ready())

    @app.get("/metrics", responses=answer(METRICS, "text/plain"))
    async def metrics() -> Response:
        """Metrics of all workers, in Prometheus' format."""
        service.update_gauges()
        text = await asyncio.to_thread(service.metrics.text)  # with many tasks it takes seconds
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_page(app: FastAPI, path: str, name: str) -> None:
    """A page that may load nothing but its own script and style, and talk to this host only."""
    text = files("bitgraft.serving").joinpath(name).read_text()
    hashes = {
        tag: base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        for tag, inside in re.findall(r"<(script|style)>(.*?)</\1>", text, re.DOTALL)
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    @app.get(path, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})


async def _failed(request: Request, problem: Any) -> Response:
    if isinstance(problem, Refusal):
        headers = {} if problem.retry_after is None else {"Retry-After": str(problem.retry_after)}
        if problem.status in (400, 401, 403, 408, 413, 415, 503, 507):
            headers["Connection"] = "close"  # the rest of the body may still come, and nobody will read it
        return JSONResponse({"error": problem.sentence}, problem.status, headers)
    if isinstance(problem, HTTPException):
        sentence = f"{request.method} {request.url.path}: {problem.detail}; see /docs for what there is"
        return JSONResponse({"error": sentence}, problem.status_code, problem.headers)
    if isinstance(problem, RequestValidationError):
        first = problem.errors()[0]
        return JSONResponse({"error": f"{first['loc'][-1]}: {first['msg'].lower()}"}, 422)
    return JSONResponse({"error": "the service failed; its log says why"}, 500)
