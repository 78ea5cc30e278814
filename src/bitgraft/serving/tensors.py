"""Requests and responses of the Open Inference Protocol: JSON, or JSON followed by raw tensors (Triton's extension)."""

import base64
import binascii
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from bitgraft.serving.engine import Inferred
from bitgraft.serving.refusals import Refusal

HEADER_LENGTH = "Inference-Header-Content-Length"
OUTPUTS = ("probabilities", "class")


class _Input(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)


class _Output(BaseModel):
    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class _Request(BaseModel):
    id: str = ""
    inputs: list[_Input]
    outputs: list[_Output] = Field(default_factory=list)
    parameters: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    id: str
    inputs: Sequence[bytes] | Tensor
    """Encoded images, or a batch (N, C, H, W)."""
    outputs: Sequence[_Output]
    binary: bool
    """Outputs are raw, unless one says otherwise."""


def read_request(body: bytes, header_length: str | None) -> Asked:
    if header_length is not None and not (header_length.isdecimal() and int(header_length) <= len(body)):
        raise Refusal(400, f"{HEADER_LENGTH} {header_length}: the body has {len(body)} bytes")
    length = len(body) if header_length is None else int(header_length)
    try:
        said = _Request.model_validate_json(body[:length])
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        raise Refusal(400, f"{where}: {first['msg']}") from problem
    if len(said.inputs) != 1:
        raise Refusal(400, f"send one input, images or tensor: there are {len(said.inputs)}")
    if unknown := [output.name for output in said.outputs if output.name not in OUTPUTS]:
        raise Refusal(400, f"there is no output {unknown[0]!r}; there are {' and '.join(OUTPUTS)}")
    inputs = _read_input(said.inputs[0], body[length:])
    outputs = said.outputs or [_Output(name=name) for name in OUTPUTS]
    return Asked(said.id, inputs, outputs, bool(said.parameters.get("binary_data_output")))


def _read_input(given: _Input, raw: bytes) -> list[bytes] | Tensor:
    size = given.parameters.get("binary_data_size")
    if (size or 0) != len(raw) or (size is None) == (given.data is None):
        raise Refusal(400, f"input {given.name!r} needs its data, or a binary_data_size that is what follows the JSON")
    if given.datatype == "BYTES":
        items = _split(raw) if size is not None else _from_base64(given.data or [])
        found = len(items)
    elif given.datatype == "FP32":
        array = _floats(raw, given.data)
        found = array.size
    else:
        raise Refusal(400, f"input {given.name!r} is {given.datatype}: send images as BYTES, or a tensor as FP32")
    if min(given.shape, default=0) < 1 or found != math.prod(given.shape):
        raise Refusal(400, f"input {given.name!r} has shape {given.shape}, and {found} values")
    return items if given.datatype == "BYTES" else torch.from_numpy(array.reshape(given.shape))


def _floats(raw: bytes, data: list[Any] | None) -> "np.ndarray[Any, np.dtype[np.float32]]":
    try:
        if data is None:
            return np.frombuffer(raw, "<f4").copy()
        return np.asarray(data, np.float32).reshape(-1)
    except (ValueError, TypeError) as problem:
        raise Refusal(400, "the tensor's data are not numbers of 32 bits") from problem


def _split(raw: bytes) -> list[bytes]:
    """Elements with their length in four bytes before each."""
    items, at = [], 0
    while at < len(raw):
        if at + 4 > len(raw) or at + 4 + (length := struct.unpack_from("<I", raw, at)[0]) > len(raw):
            raise Refusal(400, "the images end in the middle: each needs its length in four bytes before it")
        items.append(raw[at + 4 : at + 4 + length])
        at += 4 + length
    return items


def _from_base64(data: list[Any]) -> list[bytes]:
    flat = [item for one in data for item in (one if isinstance(one, list) else [one])]
    try:
        return [base64.b64decode(item, validate=True) for item in flat]
    except (binascii.Error, ValueError, TypeError) as problem:
        raise Refusal(400, "in JSON an image is a string in base64") from problem


def write_response(task: str, asked: Asked, inferred: Inferred) -> tuple[bytes, dict[str, str]]:
    """The body, and its headers."""
    outputs, raw = [], []
    for wanted in asked.outputs:
        values = _values(wanted, inferred)
        text = values.dtype == object
        about = {"name": wanted.name, "datatype": "BYTES" if text else "FP32", "shape": list(values.shape)}
        if wanted.parameters.get("binary_data", asked.binary):
            raw.append(_join(values) if text else values.astype("<f4").tobytes())
            outputs.append({**about, "parameters": {"binary_data_size": len(raw[-1])}})
        else:
            outputs.append({**about, "data": values.reshape(-1).tolist()})
    said = {"model_name": task, "model_version": inferred.version, "id": asked.id, "outputs": outputs}
    head = json.dumps(said).encode()
    return b"".join([head, *raw]), {HEADER_LENGTH: str(len(head))} if raw else {}


def _values(wanted: _Output, inferred: Inferred) -> "np.ndarray[Any, Any]":
    """An output; Triton's `classification` makes it the likeliest classes, as "probability:index:name"."""
    scores, names = inferred.probabilities, inferred.classes
    top = wanted.parameters.get("classification", 0)
    if not isinstance(top, int) or top < 0:
        raise Refusal(400, f"classification {top!r}: give a number of classes")
    if wanted.name == "probabilities" and not top:
        return scores.numpy()
    values, places = scores.topk(min(top or 1, scores.shape[1]))
    rows = zip(values.tolist(), places.tolist(), strict=True)
    if wanted.name == "probabilities":
        said = [[f"{v}:{i}:{_name(names, i)}" for v, i in zip(*row, strict=True)] for row in rows]
        return np.array(said, object)
    return np.array([_name(names, places[0]) for _, places in rows], object)


def _name(names: Sequence[str] | None, place: int) -> str:
    return names[place] if names else str(place)


def _join(values: "np.ndarray[Any, Any]") -> bytes:
    encoded = [str(value).encode() for value in values.reshape(-1)]
    return b"".join(struct.pack("<I", len(one)) + one for one in encoded)
