"""A task file taken apart, for tests of what readers refuse."""

import json
import struct
from typing import Any

import xxhash

Entry = tuple[str, list[int], bytes]


class Draft:
    """A file taken apart, to be changed and put together again under a right checksum, by whatever rules it breaks."""

    def __init__(self, data: bytes) -> None:
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        self.about: dict[str, Any] = json.loads(header.pop("__metadata__")["bitgraft"])
        self.beside: dict[str, str] = {}
        self.tensors: dict[str, Entry] = {}
        for name, entry in header.items():
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            self.tensors[name] = (entry["dtype"], entry["shape"], data[start:end])

    def header(self) -> dict[str, Any]:
        text = json.dumps({**self.about, "checksum": "0" * 32}, sort_keys=True, separators=(",", ":"))
        header: dict[str, Any] = {"__metadata__": {"bitgraft": text, **self.beside}}
        at = 0
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
        return header

    def build(self, header: bytes | None = None, tail: bytes = b"") -> bytes:
        top = json.dumps(self.header()).encode() if header is None else header
        body = b"".join(data for _, _, data in self.tensors.values()) + tail
        blank = struct.pack("<Q", len(top)) + top + body
        marker = b'\\"checksum\\":\\"'
        start = blank.index(marker) + len(marker)
        return blank[:start] + xxhash.xxh3_128(blank).hexdigest().encode() + blank[start + 32 :]
