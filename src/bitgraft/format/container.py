"""The bytes of a task file: safetensors with one metadata entry and a checksum. `docs/format.md` specifies them.

We write them ourselves, so that the same content gives the same bytes whatever version of safetensors is installed.
"""

import functools
import itertools
import json
import math
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from bitgraft.errors import CorruptError, NewerFormatError, TaskError

FORMAT = 1
LINE = 64  # bytes
DEPTH = 32  # how deep metadata may be nested
HEADER_LIMIT = 100_000_000  # bytes; safetensors reads no longer one
ORDERED = ("leans_on", "shapes")  # metadata whose own order means something
KEPT = 1 << 20  # characters of a header's part that says where tensors are, of which the last few are remembered
METADATA = "__metadata__"
OURS = re.compile(r'\{"__metadata__":\{"bitgraft":("[^"\\]*(?:\\.[^"\\]*)*")\},')  # how a header of bitgraft's begins
BLANK = "0" * 32
CHECKSUM = re.compile(rb'(?<=\\"checksum\\":\\")[0-9a-f]{32}(?=\\")')
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.float64: "F64",
}
KINDS = {name: dtype for dtype, name in DTYPES.items()} | {"F16": torch.float16, "BF16": torch.bfloat16}  # to refuse


def encode(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> list[bytes | memoryview]:
    """The file in pieces, which share memory with the tensors.

    The largest elements come first, and matrices before vectors, then names decide: so the head begins on a cache line.
    """
    header: dict[str, Any] = {METADATA: {"bitgraft": _text({**about, "checksum": BLANK, "format": FORMAT})}}
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
    """Metadata and tensors, which stay where they are in `data`, checked against the checksum."""
    about, places, start = _header(data, source)
    if type(about.get("format")) is not int or about["format"] < 1:
        raise CorruptError(f"{source} states no format that bitgraft knows: it is damaged, or not a task file")
    if about["format"] > FORMAT:
        raise NewerFormatError(
            f"{source} is of task format {about['format']}, this bitgraft reads up to {FORMAT}; install a newer one"
        )
    try:
        layout = _layout(places) if len(places) < KEPT else _read_layout(places)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as cause:
        raise CorruptError(f"{source} is damaged: not a valid safetensors file ({cause}); get a fresh copy") from cause
    whole = start + layout[-1].end if layout else start
    if len(data) < whole:
        raise CorruptError(f"{source} is truncated: {len(data)} of {whole} bytes are here; get a fresh copy")
    if len(data) > whole:
        raise CorruptError(f"{source} is not a valid safetensors file (there are bytes behind the last tensor)")
    if _digest(data) != about.get("checksum"):
        raise CorruptError(f"{source} does not match its checksum: it is damaged; get a fresh copy")
    return about, _tensors(layout, data, start)


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes in row-major order, little-endian, without a copy where they are so already."""
    array = tensor.contiguous().numpy()
    if sys.byteorder != "little":
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return array.reshape(-1).view("u1").data


def too_deep(value: Any) -> bool:
    level, nested = [value], (dict, list, tuple)
    for _ in range(DEPTH):
        inside = [v for v in level if isinstance(v, nested)]
        if not inside:
            return False
        level = [v for parent in inside for v in (parent.values() if isinstance(parent, dict) else parent)]
    return bool(level)


def _text(about: Mapping[str, Any]) -> str:
    """Canonical JSON: sorted, so that the order in which metrics were noted does not show; ASCII, no spaces."""
    try:
        text = ",".join(f'"{key}":{_canonical(value, key not in ORDERED)}' for key, value in sorted(about.items()))
        if too_deep(about):
            raise ValueError(f"it is nested deeper than {DEPTH}")
        return f"{{{text}}}"
    except (TypeError, ValueError, RecursionError) as cause:
        raise TaskError(
            f"task {about['name']!r}: preprocessing and metrics must be plain JSON data ({cause})"
        ) from cause


def _canonical(value: Any, sort: bool) -> str:
    return json.dumps(value, sort_keys=sort, separators=(",", ":"), allow_nan=False)


def _header(data: memoryview, source: str) -> tuple[dict[str, Any], str, int]:
    """bitgraft's part of the safetensors header, the part that says where tensors are, as JSON still, and where they
    begin. Nothing about them is trusted."""
    if not data:
        raise CorruptError(f"{source} is empty; get a fresh copy")
    (size,) = struct.unpack("<Q", bytes(data[:8]).ljust(8, b"\0"))
    if len(data) < 8 or size > min(len(data) - 8, HEADER_LIMIT):
        raise CorruptError(
            f"{source} is truncated, or not a task file: its header would take {size} of {len(data)} bytes"
        )
    try:
        metadata, places = _split(str(data[8 : 8 + size], "utf-8"))
        text = metadata.get("bitgraft")
        about = _strict_json(text) if isinstance(text, str) else None
    except (ValueError, TypeError, AttributeError, RecursionError) as cause:
        raise CorruptError(f"{source} is damaged, or not a task file ({cause})") from cause
    if not isinstance(about, dict):
        raise CorruptError(f"{source} is no bitgraft task file: its safetensors header has no entry 'bitgraft'")
    if too_deep(about) or len(metadata) > 1:
        raise CorruptError(f"{source} has metadata beside bitgraft's own, or nested deeper than {DEPTH}: not usable")
    return about, places, 8 + size


def _split(header: str) -> tuple[dict[str, Any], str]:
    """The metadata, and the rest of the header. A header that bitgraft wrote is not read whole for that."""
    if ours := OURS.match(header):
        return {"bitgraft": json.loads(ours[1])}, "{" + header[ours.end() :]
    read = _strict_json(header)
    return read.pop(METADATA, {}), json.dumps(read)


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


class Place(NamedTuple):
    """Where a tensor is: bytes behind the header."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


class Run(NamedTuple):
    """Tensors of one dtype, one behind the other, which are cut out of the file in one call."""

    dtype: torch.dtype
    begin: int
    end: int
    sizes: dict[str, int]
    """How many elements each tensor has, by its name."""
    shapes: dict[str, list[int]]
    """Of those that are no vectors."""


def _read_layout(places: str) -> tuple[Run, ...]:
    """Where tensors are, in order and without gaps, or a `ValueError` and the like that says what is wrong."""
    entries, found, reached = _strict_json(places), [], 0
    if METADATA in entries:
        raise ValueError("a key comes twice")
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1]["data_offsets"]):
        dtype, shape, (begin, end) = KINDS[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if type(begin) is not int or type(end) is not int or begin != reached or len(entry) != 3:
            raise ValueError(f"{name!r} does not begin where the tensor before it ends")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name!r} has no shape")
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"{name!r} does not take the bytes that its shape and dtype give")
        found.append(Place(name, dtype, shape, begin, end))
        reached = end
    return tuple(_run(dtype, list(alike)) for dtype, alike in itertools.groupby(found, lambda place: place.dtype))


def _run(dtype: torch.dtype, places: Sequence[Place]) -> Run:
    return Run(
        dtype,
        begin=places[0].begin,
        end=places[-1].end,
        sizes={place.name: math.prod(place.shape) for place in places},
        shapes={place.name: place.shape for place in places if len(place.shape) != 1},
    )


_layout = functools.lru_cache(maxsize=32)(_read_layout)  # tasks of one method on one backbone have the same


def _tensors(layout: Sequence[Run], data: memoryview, start: int) -> dict[str, Tensor]:
    """The tensors, all in one stretch of memory: a resident task costs what its file takes."""
    whole = torch.frombuffer(data, dtype=torch.uint8)
    found: dict[str, Tensor] = {}
    for run in layout:  # a thousand tasks have 300,000 tensors, so they are cut out all at once
        stretch = _stretch(whole[start + run.begin : start + run.end], run.dtype)
        # not views, which would keep what they are views of beside them
        found.update(zip(run.sizes, torch.unsafe_split_with_sizes(stretch, list(run.sizes.values())), strict=True))
        for name, shape in run.shapes.items():
            tensor = found[name].view(shape).data
            found[name] = _on_a_line(tensor) if len(shape) > 1 and run.dtype.is_floating_point else tensor
    return found


def _on_a_line(matrix: Tensor) -> Tensor:
    """Matrices begin on a cache line, as torch allocates them: a product's last bit depends on where they lie."""
    return matrix.clone() if matrix.data_ptr() % LINE else matrix


def _stretch(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes as numbers, where they are if that is where such numbers can be."""
    if raw.storage_offset() % dtype.itemsize == 0 and sys.byteorder == "little":  # bitgraft's own files are aligned
        return raw.view(dtype)
    kind = np.dtype(str(dtype).removeprefix("torch.")).newbyteorder("<")
    return torch.from_numpy(raw.numpy().view(kind).astype(kind.newbyteorder("=")))


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
