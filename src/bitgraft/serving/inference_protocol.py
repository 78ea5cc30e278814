"""The Open Inference Protocol (KServe V2), for existing KServe and Triton clients.

A model is a task. Its input is `images` (BYTES: encoded images) or `tensor` (FP32: preprocessed images). Its outputs
are `probabilities`, in the order of the task's classes, and `class`, the name of the most likely class.
"""

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from bitgraft import __version__
from bitgraft.serving.engine import Service
from bitgraft.serving.examples import INFER_REQUEST, INFERRED, SERVER, STATUS, TASK, example
from bitgraft.serving.http_error import HttpError
from bitgraft.serving.tensors import HEADER_LENGTH, read_request, write_response
from bitgraft.serving.uploads import Uploads, body

BODY = {
    "requestBody": {
        "required": True,
        "description": "One input as JSON (images in base64), or with Triton's binary extension.",
        "content": {"application/json": {"example": INFER_REQUEST}},
    }
}


def add_inference_protocol(app: FastAPI, service: Service, uploads: Uploads) -> None:
    @app.get("/healthz", name="healthy", responses=example(STATUS))
    @app.get("/v2/health/live", responses=example(STATUS))
    async def live() -> Response:
        """Liveness: the process accepts requests."""
        return _status(service.healthy())

    @app.get("/readyz", responses=example(STATUS))
    @app.get("/v2/health/ready", responses=example(STATUS))
    async def ready() -> Response:
        """Readiness: the process accepts requests and every pinned task is ready."""
        return _status(service.ready())

    @app.get("/v2", responses=example(SERVER))
    async def server() -> dict[str, Any]:
        """The server's name, version and protocol extensions."""
        return SERVER | {"version": __version__}

    @app.get("/v2/models/{task}", responses=example(_metadata(TASK)))
    async def model(task: str) -> dict[str, Any]:
        """A task's inputs, outputs and classes."""
        return _metadata(await service.task(task))

    @app.get("/v2/models/{task}/ready", responses=example(STATUS))
    async def model_ready(task: str) -> Response:
        """Whether the task is served. Its weights may not be computed yet."""
        await service.task(task)
        return _status(service.healthy())

    @app.post("/v2/models/{task}/infer", openapi_extra=BODY, responses=example(INFERRED))
    async def infer(request: Request, task: str) -> Response:
        """A task's class probabilities for encoded images or a preprocessed tensor."""
        if encoding := request.headers.get("content-encoding", ""):
            raise HttpError(415, f"the body is compressed with {encoding}: send it uncompressed")
        async with uploads.read(request, body) as data:
            wanted, inputs = await asyncio.to_thread(read_request, data, request.headers.get(HEADER_LENGTH))
            inferred = await service.infer(task, inputs)
        data, headers = write_response(task, wanted, inferred)
        kind = "application/octet-stream" if HEADER_LENGTH in headers else "application/json"
        return Response(data, media_type=kind, headers=headers)


def _status(ok: bool) -> Response:
    return JSONResponse({"status": "ok" if ok else "unavailable"}, 200 if ok else 503)


def _metadata(task: dict[str, Any]) -> dict[str, Any]:
    classes = task["class_names"]
    return {
        "name": task["name"],
        "versions": [task["version"]],
        "platform": "bitgraft",
        "inputs": [
            {"name": "images", "datatype": "BYTES", "shape": [-1]},
            {"name": "tensor", "datatype": "FP32", "shape": [-1, *task["input"]]},
        ],
        "outputs": [
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, len(classes) if classes else -1]},
            {"name": "class", "datatype": "BYTES", "shape": [-1]},
        ],
        "classes": classes,
    }
