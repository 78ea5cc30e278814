"""The bytes of a task file: safetensors with one metadata entry and a checksum. `docs/format.md` specifies them.

We write them ourselves, so that the same content gives the same bytes whatever version of safetensors is installed.
"""

import json
import math
import re
import struct
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from bitgraft.errors import CorruptError, NewerFormatError, TaskError

FORMAT = 2  # the newest; all up to it are read
LINE = 64  # bytes
DEPTH = 32  # how deep metadata may be nested
HEADER_LIMIT = 100_000_000  # bytes; safetensors reads no longer one
ORDERED = ("leans_on", "shapes")  # metadata whose own order means something
METADATA = "__metadata__"
BLANK = "0" * 32
CHECKSUM = re.compile(rb'(?<=\\"checksum\\":\\")[0-9a-f]{32}(?=\\")')
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
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What reading JSON that may hold anything can raise."""


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
    about, entries, start = _header(data, source)
    if type(about.get("format")) is not int or about["format"] < 1:
        raise CorruptError(f"{source} states no format that bitgraft knows: it is damaged, or not a task file")
    if about["format"] > FORMAT:
        raise NewerFormatError(
            f"{source} is of task format {about['format']}, this reads up to {FORMAT}; install a newer bitgraft"
        )
    try:
        size = _check_layout(entries)
    except MALFORMED as cause:
        raise CorruptError(f"{source} is damaged: not a valid safetensors file ({cause}); get a fresh copy") from cause
    if len(data) < start + size:
        raise CorruptError(f"{source} is truncated: {len(data)} of {start + size} bytes are here; get a fresh copy")
    if len(data) > start + size:
        raise CorruptError(f"{source} is not a valid safetensors file (there are bytes behind the last tensor)")
    if _digest(data) != about.get("checksum"):
        raise CorruptError(f"{source} does not match its checksum: it is damaged; get a fresh copy")
    return about, {name: _tensor(data, start, entry) for name, entry in entries.items()}


def raw(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.numpy().data


def too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH):
        nested = [inner for inner in level if isinstance(inner, dict | list | tuple)]
        level = [inner for outer in nested for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return bool(level)


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


def _header(data: memoryview, source: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    """bitgraft's metadata, the entries that say where tensors are, and the offset from which those count."""
    if not data:
        raise CorruptError(f"{source} is empty; get a fresh copy")
    (size,) = struct.unpack("<Q", bytes(data[:8]).ljust(8, b"\0"))
    if len(data) < 8 or size > min(len(data) - 8, HEADER_LIMIT):
        raise CorruptError(f"{source} is truncated, or not a task file: header would take {size} of {len(data)} bytes")
    try:
        entries = _strict_json(str(data[8 : 8 + size], "utf-8"))
        metadata = entries.pop(METADATA, {})
        text = metadata.get("bitgraft")
        about = _strict_json(text) if isinstance(text, str) else None
    except MALFORMED as cause:
        raise CorruptError(f"{source} is damaged, or not a task file ({cause})") from cause
    if not isinstance(about, dict):
        raise CorruptError(f"{source} is no bitgraft task file: its safetensors header has no entry 'bitgraft'")
    if too_deep(about) or len(metadata) > 1:
        raise CorruptError(f"{source} has metadata beside bitgraft's own, or nested deeper than {DEPTH}: not usable")
    return about, entries, 8 + size


def _strict_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_twins, parse_float=_finite, parse_constant=_finite)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no number that JSON has")
    return value


def _check_layout(entries: Mapping[str, Any]) -> int:
    """How many bytes the tensors take. They must lie in order and without gaps, or it is one of `MALFORMED`."""
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1]["data_offsets"]):
        dtype, shape, (begin, end) = KINDS[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if type(begin) is not int or type(end) is not int or begin != reached or len(entry) != 3:
            raise ValueError(f"{name!r} does not begin where the tensor before it ends")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name!r} has no shape")
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"{name!r} does not take the bytes that its shape and dtype give")
        reached = end
    return reached


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


def _digest(data: memoryview) -> str:
    """XXH3 of the file with the checksum's own 32 digits set to 0: against damage, which it finds at memory's speed."""
    (size,) = struct.unpack_from("<Q", data)
    found, view, digest = CHECKSUM.search(data, 8, 8 + size), data, xxhash.xxh3_128()
    if found is not None:
        digest.update(view[: found.start()])
        digest.update(BLANK.encode())
        view = view[found.end() :]
    digest.update(view)
    return digest.hexdigest()
