"""The bytes of a task file: safetensors with one metadata entry and a checksum. `docs/format.md` specifies them.

We write them ourselves, so that the same content gives the same bytes whatever version of safetensors is installed.
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

LINE = 64  # bytes
ORDERED = ("leans_on", "shapes")  # metadata whose own order means something
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
KINDS = {name: dtype for dtype, name in DTYPES.items()} | {"BF16": torch.bfloat16}  # to refuse


def encode(tensors: Mapping[str, Tensor], about: Mapping[str, Any], format: int) -> list[bytes | memoryview]:
    """The file in pieces, which share memory with the tensors.

    The largest elements come first, and matrices before vectors, then names decide: so the head begins on a cache line.
    """
    header: dict[str, Any] = {METADATA: {"bitgraft": _text({**about, "checksum": BLANK, "format": format})}}
    order, start = sorted(tensors, key=lambda name: (-tensors[name].element_size(), tensors[name].dim() < 2, name)), 0
    for name in order:
        end = start + tensors[name].nbytes
        header[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
        start = end
    top = json.dumps(header, separators=(",", ":")).encode()
    top += b" " * (-(8 + len(top)) % LINE)
    if len(top) > HEADER_LIMIT:
        raise TaskError(f"the task's metadata takes {len(top)} bytes, a file has room for {HEADER_LIMIT}")
    top = struct.pack("<Q", len(top)) + top
    pieces, digest = [raw(tensors[name]) for name in order], xxhash.xxh3_128(top)
    for piece in pieces:
        digest.update(piece)
    return [CHECKSUM.sub(digest.hexdigest().encode(), top, count=1), *pieces]


def decode(data: memoryview, source: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors, which stay where they are in `data`. Nothing is trusted, and the checksum must match."""
    about, entries, start = read_header(data, source)
    return about, {name: _tensor(data, start, entry) for name, entry in entries.items()}


def raw(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.numpy().data


def _text(about: Mapping[str, Any]) -> str:
    """Canonical JSON: sorted, so that the order in which metrics were noted does not show; ASCII, no spaces."""
    try:
        if too_deep(about):
            raise ValueError(f"it is nested deeper than {DEPTH}")
        write = partial(json.dumps, separators=(",", ":"), allow_nan=False)
        fields = (f'"{key}":{write(value, sort_keys=key not in ORDERED)}' for key, value in sorted(about.items()))
        return f"{{{','.join(fields)}}}"
    except (TypeError, ValueError, RecursionError) as cause:
        raise TaskError(f"task {about['name']!r}: preprocessing and metrics must be plain JSON ({cause})") from cause


def _tensor(data: memoryview, start: int, entry: Mapping[str, Any]) -> Tensor:
    """A tensor in the memory that the file was read into, so that a resident task costs what its file takes.

    Float matrices begin on a cache line, as torch allocates them: a product's last bit depends on where they lie.
    """
    dtype, shape, (begin, end) = KINDS[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=start + begin)
    if flat.data_ptr() % (LINE if len(shape) > 1 and dtype.is_floating_point else dtype.itemsize):
        flat = flat.clone()
    return (
        flat if len(shape) == 1 else flat.view(shape).data
    )  # no view, which would keep what it is a view of beside it
