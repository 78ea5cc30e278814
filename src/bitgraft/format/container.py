"""The bytes of a task file: safetensors with one metadata entry and a checksum. `docs/format.md` is the specification.

We write them ourselves, so that the bytes do not depend on the installed version of safetensors.
"""

import json
import struct
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from bitgraft.errors import TaskError
from bitgraft.format.header import BLANK, CHECKSUM, DEPTH, HEADER_LIMIT, METADATA, read_header, too_deep

CACHE_LINE = 64  # bytes
ORDERED = ("leans_on", "shapes")  # metadata whose order has a meaning
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()} | {"BF16": torch.bfloat16}  # read only to be refused


def encode(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """Return the file's bytes.

    Tensors are sorted by element size, largest first, then matrices before vectors, then by name: so the head's matrix
    starts on a cache line.
    """
    header: dict[str, Any] = {METADATA: {"bitgraft": _canonical_json({**about, "checksum": BLANK})}}
    order, start = sorted(tensors, key=lambda name: (-tensors[name].element_size(), tensors[name].dim() < 2, name)), 0
    for name in order:
        tensor = tensors[name]
        end = start + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    top = json.dumps(header, separators=(",", ":")).encode()
    top += b" " * (-(8 + len(top)) % CACHE_LINE)
    if len(top) > HEADER_LIMIT:
        raise TaskError(f"the task's metadata takes {len(top)} bytes, more than the limit of {HEADER_LIMIT}")
    top = struct.pack("<Q", len(top)) + top
    pieces, digest = [raw(tensors[name]) for name in order], xxhash.xxh3_128(top)
    for piece in pieces:
        digest.update(piece)
    return b"".join([CHECKSUM.sub(digest.hexdigest().encode(), top, count=1), *pieces])


def decode(data: memoryview, source: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the metadata and the tensors, which share memory with `data`. The header and the checksum are verified."""
    about, entries, start = read_header(data, source)
    return about, {name: _tensor(data, start, entry) for name, entry in entries.items()}


def raw(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.numpy().data


def _canonical_json(about: Mapping[str, Any]) -> str:
    """Return ASCII without spaces, with sorted keys except in `ORDERED`."""
    try:
        if too_deep(about):
            raise ValueError(f"nested deeper than {DEPTH}")
        write = partial(json.dumps, separators=(",", ":"), allow_nan=False)
        fields = (f'"{key}":{write(value, sort_keys=key not in ORDERED)}' for key, value in sorted(about.items()))
        return f"{{{','.join(fields)}}}"
    except (TypeError, ValueError, RecursionError) as cause:
        raise TaskError(f"task {about['name']!r}: preprocessing and metrics must be plain JSON ({cause})") from cause


def _tensor(data: memoryview, start: int, entry: Mapping[str, Any]) -> Tensor:
    """Return a tensor that shares memory with the file's bytes.

    It is copied if it is misaligned. Float matrices start on a cache line, as torch allocates them, because the last
    bits of a product depend on alignment.
    """
    dtype, shape, (begin, end) = TORCH_DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=start + begin)
    if flat.data_ptr() % (CACHE_LINE if len(shape) > 1 and dtype.is_floating_point else dtype.itemsize):
        flat = flat.clone()
    return flat if len(shape) == 1 else flat.view(shape).data  # .data drops the view's reference to its base
