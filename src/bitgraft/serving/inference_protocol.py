"""The Open Inference Protocol (KServe V2), for existing KServe and Triton clients.

A model is a task. Its input is `images` (BYTES: encoded images) or `tensor` (FP32: preprocessed images). Its outputs
are `probabilities`, in the order of the task's classes, and `class`, the name of the most likely class. A body is JSON,
or JSON followed by raw tensors (Triton's extension).
"""

import asyncio
import base64
import json
import math
import re
import struct
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from torch import Tensor

from bitgraft import __version__
from bitgraft.serving.engine import Inferred, Service
from bitgraft.serving.examples import INFER_REQUEST, INFERRED, SERVER, STATUS, TASK, example
from bitgraft.serving.http_error import HttpError
from bitgraft.serving.uploads import Uploads, body

HEADER_LENGTH = "Inference-Header-Content-Length"
OUTPUTS = ("probabilities", "class")
DIGITS = re.compile("[0-9]{1,18}")


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

    @app.post("/v2/models/{task}/infer", openapi_extra=INFER_REQUEST, responses=example(INFERRED))
    async def infer(request: Request, task: str) -> Response:
        """A task's class probabilities for encoded images or a preprocessed tensor."""
        if encoding := request.headers.get("content-encoding", ""):
            raise HttpError(415, f"the body is compressed with {encoding}: send it uncompressed")
        async with uploads.read(request, body) as data:
            wanted, inputs = await asyncio.to_thread(_read_request, data, request.headers.get(HEADER_LENGTH))
            (inferred,) = await service.infer([task], inputs)
        data, headers = _write_response(wanted, inferred)
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


class _Input(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] = {}


class _Output(BaseModel):
    name: str
    parameters: dict[str, Any] = {}


class _Request(BaseModel):
    id: str = ""
    inputs: list[_Input]
    outputs: list[_Output] = []
    parameters: dict[str, Any] = {}


def _read_request(body: bytes, header_length: str | None) -> tuple[_Request, list[bytes] | Tensor]:
    """Return the request, and its input: encoded images, or a batch (N, C, H, W)."""
    if header_length is not None and not (DIGITS.fullmatch(header_length) and int(header_length) <= len(body)):
        raise HttpError(400, f"{HEADER_LENGTH} is {header_length}, but the body has {len(body)} bytes")
    length = len(body) if header_length is None else int(header_length)
    try:
        request = _Request.model_validate_json(body[:length])
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        raise HttpError(400, f"{where}: {first['msg']}") from problem
    if len(request.inputs) != 1:
        raise HttpError(400, f"send one input, images or tensor, not {len(request.inputs)}")
    if unknown := [output.name for output in request.outputs if output.name not in OUTPUTS]:
        raise HttpError(400, f"there is no output {unknown[0]!r}; known outputs are {' and '.join(OUTPUTS)}")
    return request, _read_input(request.inputs[0], body[length:])


def _read_input(given: _Input, raw: bytes) -> list[bytes] | Tensor:
    size = given.parameters.get("binary_data_size")
    if (size or 0) != len(raw) or (size is None) == (given.data is None):
        raise HttpError(400, f"input {given.name!r} needs data, or a binary_data_size of the bytes after the JSON")
    values: list[bytes] | np.ndarray[Any, Any]
    if given.datatype == "BYTES":
        values = _split(raw) if given.data is None else _from_base64(given.data)
    elif given.datatype == "FP32":
        values = _floats(raw, given.data)
    else:
        raise HttpError(400, f"input {given.name!r} is {given.datatype}: send images as BYTES, or a tensor as FP32")
    if min(given.shape, default=0) < 1 or len(values) != math.prod(given.shape):
        raise HttpError(400, f"input {given.name!r} has shape {given.shape}, but {len(values)} values")
    return values if isinstance(values, list) else torch.from_numpy(values.reshape(given.shape))


def _floats(raw: bytes, data: list[Any] | None) -> "np.ndarray[Any, np.dtype[np.float32]]":
    try:
        if data is None:
            return np.frombuffer(raw, "<f4").copy()
        return np.asarray(data, np.float32).reshape(-1)
    except (ValueError, TypeError, OverflowError) as problem:
        raise HttpError(400, "the tensor's data are not 32-bit numbers") from problem


def _split(raw: bytes) -> list[bytes]:
    """Split elements that each follow their length in four bytes."""
    items, at = [], 0
    while at < len(raw):
        if at + 4 > len(raw) or at + 4 + (length := struct.unpack_from("<I", raw, at)[0]) > len(raw):
            raise HttpError(400, "the images are cut off: each needs its length in four bytes before it")
        items.append(raw[at + 4 : at + 4 + length])
        at += 4 + length
    return items


def _from_base64(data: list[Any]) -> list[bytes]:
    flat = [item for one in data for item in (one if isinstance(one, list) else [one])]
    try:
        return [base64.b64decode(item, validate=True) for item in flat]
    except (ValueError, TypeError) as problem:
        raise HttpError(400, "images in JSON must be base64 strings") from problem


def _write_response(request: _Request, inferred: Inferred) -> tuple[bytes, dict[str, str]]:
    """Return the body and its headers."""
    outputs, raw = [], []
    binary = bool(request.parameters.get("binary_data_output"))
    for output in request.outputs or [_Output(name=name) for name in OUTPUTS]:
        values = _values(output, inferred)
        is_text = values.dtype == object
        header = {"name": output.name, "datatype": "BYTES" if is_text else "FP32", "shape": list(values.shape)}
        if output.parameters.get("binary_data", binary):
            raw.append(_join(values) if is_text else values.astype("<f4").tobytes())
            outputs.append({**header, "parameters": {"binary_data_size": len(raw[-1])}})
        else:
            outputs.append({**header, "data": values.reshape(-1).tolist()})
    response = {"model_name": inferred.task, "model_version": inferred.version, "id": request.id, "outputs": outputs}
    head = json.dumps(response).encode()
    return b"".join([head, *raw]), {HEADER_LENGTH: str(len(head))} if raw else {}


def _values(output: _Output, inferred: Inferred) -> "np.ndarray[Any, Any]":
    """Return an output's array. Triton's `classification` asks for the top classes, as "probability:index:name"."""
    scores, top = inferred.probabilities, output.parameters.get("classification", 0)
    names = inferred.classes or list(map(str, range(scores.shape[1])))
    if not isinstance(top, int) or top < 0:
        raise HttpError(400, f"classification is {top!r}: give a number of classes")
    if output.name == "probabilities" and not top:
        return scores.numpy()
    values, indices = scores.topk(min(top or 1, scores.shape[1]))
    if output.name == "class":
        return np.array([names[i] for i in indices[:, 0].tolist()], object)
    rows = zip(values.tolist(), indices.tolist(), strict=True)
    return np.array([[f"{v}:{i}:{names[i]}" for v, i in zip(*row, strict=True)] for row in rows], object)


def _join(values: "np.ndarray[Any, Any]") -> bytes:
    encoded = [str(value).encode() for value in values.reshape(-1)]
    return b"".join(struct.pack("<I", len(one)) + one for one in encoded)
