"""The header of a task file, read and checked without torch. `docs/format.md` specifies it."""

import json
import math
import re
import struct
from collections.abc import Mapping
from typing import Any

import xxhash

from bitgraft.errors import CorruptError, NewerFormatError

FORMAT = 3  # the newest; all up to it are read
DEPTH = 32  # how deep metadata may be nested
HEADER_LIMIT = 100_000_000  # bytes; safetensors reads no longer one
HEAD = "head:"  # keys of a head module's own tensors; those of the backbone's last layer keep its names
CODED = ".rans"  # behind the name of a packed part that is stored in fewer bytes, see `bitgraft.format.entropy_coding`
DESCRIPTION = ":description."  # before the names of what `bitgraft.format.description` holds
MASKS, CODES, GRIDS, NORMS, LEVELS, STEPS = ":masks", ":k", ":k.grid", ":norms", ":levels", ":steps"
"""Keys of what `bitgraft.format.compact` packs."""
METADATA = "__metadata__"
BLANK = "0" * 32
CHECKSUM = re.compile(rb'(?<=\\"checksum\\":\\")[0-9a-f]{32}(?=\\")')
WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}
"""Bytes of an element, by safetensors' name of its dtype."""
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What reading JSON that may hold anything can raise."""


def read_header(data: memoryview, source: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    """bitgraft's metadata, an entry for each tensor (dtype, shape, offsets), and the byte from which offsets count.

    Nothing is trusted, and the checksum of the whole file must match.
    """
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
    return about, entries, start


def too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH):
        nested = [inner for inner in level if isinstance(inner, dict | list | tuple)]
        level = [inner for outer in nested for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return bool(level)


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
        width, shape, (begin, end) = WIDTHS[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if type(begin) is not int or type(end) is not int or begin != reached or len(entry) != 3:
            raise ValueError(f"{name!r} does not begin where the tensor before it ends")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name!r} has no shape")
        if math.prod(shape) * width != end - begin:
            raise ValueError(f"{name!r} does not take the bytes that its shape and dtype give")
        reached = end
    return reached


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
