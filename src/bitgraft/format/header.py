"""Read and check the header of a task file, without torch. `docs/format.md` is the specification."""

import json
import math
import re
import struct
from collections.abc import Mapping
from typing import Any

import xxhash

from bitgraft.errors import CorruptError, NewerFormatError

FORMAT = 3  # the newest version; all earlier ones are read
DEPTH = 32  # maximum nesting of metadata
HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit
HEAD = "head:"  # key prefix of a head module's tensors; a replaced last layer keeps the backbone's names
CODED = ".rans"  # key suffix of an entropy-coded mask, see `bitgraft.format.entropy_coding`
DESCRIPTION = ":description."  # key prefix of `bitgraft.format.description`
MASKS, CODES, GRIDS, NORMS, LEVELS, STEPS = ":masks", ":k", ":k.grid", ":norms", ":levels", ":steps"
"""Keys of the tensors that `bitgraft.format.compact` packs."""
METADATA = "__metadata__"
BLANK = "0" * 32
CHECKSUM = re.compile(rb'(?<=\\"checksum\\":\\")[0-9a-f]{32}(?=\\")')
WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}
"""Bytes per element, by safetensors' dtype name."""
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""Exceptions that arbitrary JSON can cause."""


def read_header(data: memoryview, source: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return bitgraft's metadata, the entry of each tensor (dtype, shape, offsets) and the byte where tensors start.

    The layout and the checksum of the whole file are verified.
    """
    about, entries, start = _parse(data, source)
    if type(about.get("format")) is not int or about["format"] < 1:
        raise CorruptError(f"{source} has no valid format version: it is damaged, or not a task file")
    if about["format"] > FORMAT:
        raise NewerFormatError(
            f"{source} has task format {about['format']}, this bitgraft reads up to {FORMAT}: install a newer bitgraft"
        )
    try:
        end = start + _check_layout(entries)
    except MALFORMED as cause:
        raise CorruptError(f"{source} is not a valid safetensors file ({cause}): get a fresh copy") from cause
    if len(data) < end:
        raise CorruptError(f"{source} is truncated: it has {len(data)} of {end} bytes; get a fresh copy")
    if len(data) > end:
        raise CorruptError(f"{source} is not a valid safetensors file (extra bytes after the last tensor)")
    if _digest(data, start) != about.get("checksum"):
        raise CorruptError(f"{source} does not match its checksum, so it is damaged: get a fresh copy")
    return about, entries, start


def too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH):
        nested = [inner for inner in level if isinstance(inner, dict | list | tuple)]
        level = [inner for outer in nested for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return bool(level)


def _parse(data: memoryview, source: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    if not data:
        raise CorruptError(f"{source} is empty: get a fresh copy")
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
        raise CorruptError(f"{source} is not a bitgraft task file: its safetensors header has no entry 'bitgraft'")
    if too_deep(about) or len(metadata) > 1:
        raise CorruptError(f"{source} is corrupt: it has metadata of other tools, or nested deeper than {DEPTH}")
    return about, entries, 8 + size


def _strict_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique_keys, parse_float=_finite, parse_constant=_finite)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return value


def _check_layout(entries: Mapping[str, Any]) -> int:
    """Return the total size of the tensors, which must be contiguous. Raises one of `MALFORMED`."""
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1]["data_offsets"]):
        width, shape, (begin, end) = WIDTHS[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if type(begin) is not int or type(end) is not int or begin != reached or len(entry) != 3:
            raise ValueError(f"{name!r} does not start where the previous tensor ends")
        if not is_shape(shape):
            raise ValueError(f"{name!r} has no valid shape")
        if math.prod(shape) * width != end - begin:
            raise ValueError(f"the size of {name!r} does not match its shape and dtype")
        reached = end
    return reached


def is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _digest(data: memoryview, start: int) -> str:
    """Return XXH3 of the file with the 32 digits of the checksum itself set to 0."""
    digest, found, rest = xxhash.xxh3_128(), CHECKSUM.search(data, 8, start), data
    if found is not None:
        digest.update(data[: found.start()])
        digest.update(BLANK.encode())
        rest = data[found.end() :]
    digest.update(rest)
    return digest.hexdigest()
