"""The HTTP side: routes, refusals as sentences, the page."""

import base64
import hashlib
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from bitgraft import __version__
from bitgraft.serving.engine import Service
from bitgraft.serving.guard import Guard
from bitgraft.serving.refusals import Refusal
from bitgraft.serving.uploads import Intake, Upload

Top = Annotated[int, Query(ge=1, le=1000, description="How many answers for each image.")]
BODY = {
    "requestBody": {
        "required": True,
        "description": "An image as it is, or a form with one file for each image.",
        "content": {
            "image/*": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"image": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                }
            },
        },
    }
}


class Answer(BaseModel):
    """One class, and how likely the task finds it."""

    class_: str
    probability: float

    model_config = {"alias_generator": lambda name: name.rstrip("_"), "populate_by_name": True}


class Prediction(BaseModel):
    """What a task says: a list of answers for each image, the likeliest first."""

    task: str
    milliseconds: float
    answers: list[list[Answer]]


class Predictions(BaseModel):
    """What several tasks say to the same images."""

    milliseconds: float
    tasks: list[Prediction]


def make_app(service: Service) -> FastAPI:
    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(title="bitgraft", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(RequestValidationError, _no_fit)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(Guard, metrics=service.metrics, keys=service.settings.keys)
    _add_pages(app)
    _add_state(app, service)
    _add_predictions(app, service)
    return app


def _add_predictions(app: FastAPI, service: Service) -> None:
    intake = Intake(service.settings)

    @app.post("/v1/predict/{task:path}", response_model=Prediction, openapi_extra=BODY)
    async def predict(request: Request, task: str, top: Top = 5) -> Any:
        """One task's answers to one image or many."""
        async with intake.upload(request) as upload:
            return (await service.predict([task], upload.pictures, top))[0]

    @app.post("/v1/predict", response_model=Predictions, openapi_extra=BODY)
    async def predict_several(
        request: Request,
        task: Annotated[list[str], Query(description="Repeat it for several tasks.")] = [],  # noqa: B006
        top: Top = 5,
    ) -> Any:
        """Several tasks' answers to the same images."""
        began = time.perf_counter()
        async with intake.upload(request) as upload:
            said = await service.predict(await _names(service, task, upload), upload.pictures, top)
        return {"milliseconds": round(1000 * (time.perf_counter() - began), 3), "tasks": said}


async def _names(service: Service, asked: list[str], upload: Upload) -> list[str]:
    names = [*asked, *upload.fields.get("task", [])]
    if not names:
        known = ", ".join(row["name"] for row in (await service.tasks())["tasks"])
        raise Refusal(422, f"say which tasks, as in ?task=NAME&task=NAME; known are {known}")
    return names


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/v1/tasks")
    async def tasks() -> dict[str, Any]:
        """The store: each task's classes, method, accuracy, size, and whether its weights are computed right now."""
        return await service.tasks()

    @app.get("/v1/tasks/{task:path}")
    async def task(task: str) -> dict[str, Any]:
        """One task: its classes, and by layer the share of ones and k0..k3."""
        return await service.task(task)

    @app.get("/healthz")
    async def healthy() -> Response:
        """The process works."""
        return _state(await service.healthy())

    @app.get("/readyz")
    async def ready() -> Response:
        """It takes requests."""
        return _state(await service.ready())

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters in Prometheus' format, of all workers."""
        service.note()
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_pages(app: FastAPI) -> None:
    for path, name in (("/", "page.html"), ("/docs", "docs.html")):
        text = files("bitgraft.serving").joinpath(name).read_text()
        headers = {"Content-Security-Policy": _policy(text), "X-Content-Type-Options": "nosniff"}
        app.add_api_route(path, _page(text, headers), include_in_schema=False, response_class=HTMLResponse)


def _page(text: str, headers: dict[str, str]) -> Any:
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=headers)

    return page


def _policy(page: str) -> str:
    """Nothing but this very script and style, and this host."""

    def hashes(tag: str) -> str:
        inside = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inside]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _state(good: bool) -> Response:
    return JSONResponse({"status": "ok" if good else "unavailable"}, 200 if good else 503)


async def _refused(request: Request, problem: Any) -> Response:
    headers = {} if problem.retry_after is None else {"Retry-After": str(problem.retry_after)}
    if problem.status in (400, 408, 413, 415, 503):
        headers["Connection"] = "close"  # there may be more of the body to come, which nobody will read
    return JSONResponse({"error": problem.sentence}, problem.status, headers)


async def _no_route(request: Request, problem: Any) -> Response:
    sentence = f"{request.method} {request.url.path}: {problem.detail}; /docs lists what there is"
    return JSONResponse({"error": sentence}, problem.status_code, problem.headers)


async def _no_fit(request: Request, problem: Any) -> Response:
    first = problem.errors()[0]
    return JSONResponse({"error": f"{first['loc'][-1]}: {first['msg'].lower()}"}, 422)


async def _failed(request: Request, problem: Exception) -> Response:
    return JSONResponse({"error": "the service failed; its log says why"}, 500)
