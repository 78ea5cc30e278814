"""Entropy coding with range asymmetric numeral systems (rANS, Duda 2013), in NumPy.

Byte i belongs to lane i mod L. All lanes advance together, one byte each per step. A lane whose state falls below 2^16
takes the next 16-bit word from a shared stream, in the order of lanes. `docs/format.md` has the layout. Long streams
are decoded by the compiled loops of `bitgraft.transforms.kernels`, if they are available.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitgraft.transforms import kernels

SCALE = 14  # frequencies sum to 2^14
LOW = 1 << 16  # states are in [2^16, 2^32)
ZERO = 128  # the byte that encodes level 0
LONG = 1 << 10  # bytes; shorter streams are not worth a compiled loop
Bytes = NDArray[np.uint8]


def encode(data: Bytes) -> Bytes:
    """Code at least one byte, with its own frequency table."""
    frequencies = _frequencies(data)
    table = frequencies.astype("<u2").view(np.uint8)
    log_lanes, *coded = _encode(data, frequencies[None], np.array([len(data)]), lanes=10)
    return np.concatenate([log_lanes, table, *coded])


def decode(coded: Bytes, count: int) -> Bytes:
    """Return `count` decoded bytes. Any fault is a ValueError."""
    if len(coded) < 513:
        raise ValueError("too short")
    frequencies = np.frombuffer(coded[1:513].tobytes(), "<u2").astype(np.int64)
    return _decode(coded[0], coded[513:], frequencies[None], np.array([count]))


def encode_levels(groups: Sequence[NDArray[np.int8]]) -> Bytes:
    """Code groups of integers from -127 to 127, each with its own frequency table, which is symmetric in the sign."""
    tables, headers = [], []
    for group in groups:
        sizes = np.bincount(np.abs(group.astype(np.int64)), minlength=1)
        table = _symmetric_frequencies(sizes)
        tables.append(_byte_frequencies(table))
        headers.append(np.concatenate([np.array([len(sizes) - 1], np.uint8), table.astype("<u2").view(np.uint8)]))
    data = np.concatenate(groups).view(np.uint8) ^ np.uint8(ZERO)
    ends = np.cumsum([len(group) for group in groups])
    log_lanes, *coded = _encode(data, np.stack(tables), ends, lanes=8)
    return np.concatenate([log_lanes, *headers, *coded])


def decode_levels(coded: Bytes, counts: Sequence[int]) -> NDArray[np.int8]:
    """Return the levels of all groups, concatenated; `counts` are the groups' sizes. Any fault is a ValueError."""
    tables, at = [], 1
    for _ in counts:
        size = 2 * int(coded[at : at + 1].sum()) + 2
        held = coded[at + 1 : at + 1 + size]
        if len(held) < size or size > 2 * ZERO:
            raise ValueError("too short, or a level is too large")
        tables.append(_byte_frequencies(np.frombuffer(held.tobytes(), "<u2").astype(np.int64)))
        at += 1 + size
    return (_decode(coded[0], coded[at:], np.stack(tables), np.cumsum(counts)) ^ np.uint8(ZERO)).view(np.int8)


def _encode(data: Bytes, tables: NDArray[np.int64], ends: NDArray[np.int64], lanes: int) -> list[NDArray[Any]]:
    """Return log2 of the number of lanes, the states and the words. Bytes up to ends[i] use tables[i]."""
    log_lanes = min(lanes, max(0, (len(data) // 256).bit_length() - 1))  # each lane costs 4 bytes
    count, width, base = 1 << log_lanes, tables.astype(np.uint64), _bases(tables)
    states, words = np.full(count, LOW, np.uint64), [np.empty(0, "<u2")]
    for start in reversed(range(0, len(data), count)):
        symbols = data[start : start + count]
        table = np.searchsorted(ends, np.arange(start, start + len(symbols)), "right")
        active, wide = states[: len(symbols)], width[table, symbols]
        full = active >= wide << np.uint64(32 - SCALE)
        words.append((active[full] & np.uint64(0xFFFF)).astype("<u2"))
        active[full] >>= np.uint64(16)
        active[:] = (active // wide << np.uint64(SCALE)) + active % wide + base[table, symbols]
    tail = np.concatenate(words[::-1]).view(np.uint8)
    return [np.array([log_lanes], np.uint8), states.astype("<u4").view(np.uint8), tail]


def _decode(log_lanes: Any, coded: Bytes, tables: NDArray[np.int64], ends: NDArray[np.int64]) -> Bytes:
    if log_lanes > 10 or len(coded) < 4 << int(log_lanes):
        raise ValueError("too short, or too many lanes")
    count, lanes = int(ends[-1]), 1 << int(log_lanes)
    if count >> 16 > len(coded):
        raise ValueError(f"{count} bytes cannot be coded in {len(coded)}")
    if (tables.sum(1) != 1 << SCALE).any() or len(coded) % 2:
        raise ValueError("wrong sum of frequencies, or an odd number of bytes")
    symbol_of = np.stack([np.repeat(np.arange(256, dtype=np.uint8), table) for table in tables])
    states = np.frombuffer(coded[: 4 * lanes].tobytes(), "<u4").astype(np.uint64)
    words = np.frombuffer(coded[4 * lanes :].tobytes(), "<u2").astype(np.uint64)
    out = np.empty(count, np.uint8)
    compiled = kernels.loops() if count >= LONG else None
    decode_lanes = compiled.unroll if compiled else _decode_lanes
    read = decode_lanes(states, words, symbol_of, tables.astype(np.uint64), _bases(tables), ends.astype(np.int64), out)
    if read < 0:
        raise ValueError("ends too early")
    if read != len(words) or (states != LOW).any():
        raise ValueError("does not end where it should")
    return out


def _decode_lanes(
    states: NDArray[np.uint64],
    words: NDArray[np.uint64],
    symbol_of: Bytes,
    width: NDArray[np.uint64],
    base: NDArray[np.uint64],
    ends: NDArray[np.int64],
    out: Bytes,
) -> int:
    """Fill `out` and update `states`; return the number of words read, or -1 if there are too few."""
    lanes, read = len(states), 0
    for start in range(0, len(out), lanes):
        active = states[: min(lanes, len(out) - start)]
        table = np.searchsorted(ends, np.arange(start, start + len(active)), "right")
        slots = active & np.uint64((1 << SCALE) - 1)
        out[start : start + lanes] = symbols = symbol_of[table, slots]
        active[:] = width[table, symbols] * (active >> np.uint64(SCALE)) + slots - base[table, symbols]
        empty = np.flatnonzero(active < LOW)
        if read + len(empty) > len(words):
            return -1
        active[empty] = active[empty] << np.uint64(16) | words[read : read + len(empty)]
        read += len(empty)
    return read


def _bases(frequencies: NDArray[np.int64]) -> NDArray[np.uint64]:
    return (np.cumsum(frequencies, -1) - frequencies).astype(np.uint64)


def _frequencies(data: Bytes) -> NDArray[np.int64]:
    """Return the frequency of each byte, out of 2^14; at least 1 if it occurs."""
    counts = np.bincount(data, minlength=256)
    shares = counts * ((1 << SCALE) - 256) // len(data) + (counts > 0)
    shares[np.argmax(counts)] += (1 << SCALE) - shares.sum()
    return shares.astype(np.int64)


def _symmetric_frequencies(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return frequencies of 0, ±1, ±2, ... out of 2^14, the same for both signs, at least 1 each."""
    total, pairs = max(1, int(counts.sum())), counts[1:] // 2
    shares = np.concatenate([[0], pairs * ((1 << SCALE) - 256) // total + 1])
    shares[0] = (1 << SCALE) - 2 * shares[1:].sum()
    return shares


def _byte_frequencies(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the frequencies of all bytes from those of 0, ±1, ±2, ..."""
    whole = np.zeros(256, np.int64)
    whole[ZERO : ZERO + len(table)] = table
    whole[ZERO - len(table) + 1 : ZERO] = table[:0:-1]
    return whole
