"""The Open Inference Protocol (KServe's V2), so that clients of KServe and Triton work as they are.

A model is a task. Its input is `images` (BYTES: encoded images) or `tensor` (FP32: already preprocessed). Its outputs
are `probabilities`, in the order of the task's classes, and `class`, the name of the likeliest.
"""

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from bitgraft import __version__
from bitgraft.serving.engine import Service
from bitgraft.serving.examples import INFER_REQUEST, INFERRED, MODEL, SERVER, STATUS, answer
from bitgraft.serving.refusals import Refusal
from bitgraft.serving.tensors import HEADER_LENGTH, read_request, write_response
from bitgraft.serving.uploads import Uploads

BODY = {
    "requestBody": {
        "required": True,
        "description": "One input as JSON (images in base64), or with Triton's binary extension.",
        "content": {"application/json": {"example": INFER_REQUEST}},
    }
}


def add_inference_protocol(app: FastAPI, service: Service, uploads: Uploads) -> None:
    _add_health(app, service)

    @app.get("/v2", responses=answer(SERVER))
    async def server() -> dict[str, Any]:
        """What this server is."""
        return SERVER | {"version": __version__}

    @app.get("/v2/models/{task}", responses=answer(MODEL))
    async def model(task: str) -> dict[str, Any]:
        """A task's inputs, outputs and classes."""
        return _metadata(await service.task(task))

    @app.get("/v2/models/{task}/ready", responses=answer(STATUS))
    async def model_ready(task: str) -> Response:
        """Whether the task is served; its weights are computed when they are needed."""
        await service.task(task)
        return _status(service.healthy())

    @app.post("/v2/models/{task}/infer", openapi_extra=BODY, responses=answer(INFERRED))
    async def infer(request: Request, task: str) -> Response:
        """A task's probabilities for images, or for tensors that are already preprocessed."""
        if coding := request.headers.get("content-encoding", ""):
            raise Refusal(415, f"the body is compressed with {coding}: send it as it is")
        async with uploads.body(request) as body:
            asked = await asyncio.to_thread(read_request, body, request.headers.get(HEADER_LENGTH))
            inferred = await service.infer(task, asked.inputs)
        data, headers = write_response(task, asked, inferred)
        kind = "application/octet-stream" if HEADER_LENGTH in headers else "application/json"
        return Response(data, media_type=kind, headers=headers)


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/v2/health/live", responses=answer(STATUS))
    async def live() -> Response:
        """Whether the process works."""
        return _status(service.healthy())

    @app.get("/v2/health/ready", responses=answer(STATUS))
    async def ready() -> Response:
        """Whether all pinned tasks are ready, too."""
        return _status(service.ready())


def _status(good: bool) -> Response:
    return JSONResponse({"status": "ok" if good else "unavailable"}, 200 if good else 503)


def _metadata(about: dict[str, Any]) -> dict[str, Any]:
    classes = about["class_names"]
    return {
        "name": about["name"],
        "versions": [about["version"]],
        "platform": "bitgraft",
        "inputs": [
            {"name": "images", "datatype": "BYTES", "shape": [-1]},
            {"name": "tensor", "datatype": "FP32", "shape": [-1, *about["input"]]},
        ],
        "outputs": [
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, len(classes) if classes else -1]},
            {"name": "class", "datatype": "BYTES", "shape": [-1]},
        ],
        "classes": classes,
    }
