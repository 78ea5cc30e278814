"""Bytes in about as many bits as they have entropy: range asymmetric numeral systems (rANS, Duda 2013), in NumPy.

Byte i belongs to lane i mod L. All lanes move together, a step for each of their bytes, and take 16-bit words from one
stream, in their order, whenever their state falls below 2^16. `docs/format.md` has the layout. Long streams are decoded
by `bitgraft.transforms.cpu`, where that can be had.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitgraft.transforms import kernels

SCALE = 14  # frequencies add up to 2^14
LOW = 1 << 16  # states are at least this, and below 2^32
ZERO = 128  # the byte that stands for no step
LONG = 1 << 10  # bytes from which on a compiled loop is worth it
Bytes = NDArray[np.uint8]


def encode(data: Bytes) -> Bytes:
    """The coded form of some bytes, at least one, under a table of their own."""
    frequencies = _frequencies(data)
    table = frequencies.astype("<u2").view(np.uint8)
    log_lanes, *coded = _encode(data, frequencies[None], np.array([len(data)]), lanes=10)
    return np.concatenate([log_lanes, table, *coded])


def decode(coded: Bytes, count: int) -> Bytes:
    """The `count` bytes that `coded` stands for. Whatever is wrong with it is a ValueError."""
    if len(coded) < 513:
        raise ValueError("it is too short")
    frequencies = np.frombuffer(coded[1:513].tobytes(), "<u2").astype(np.int64)
    return _decode(coded[0], coded[513:], frequencies[None], np.array([count]))


def encode_steps(groups: Sequence[NDArray[np.int8]]) -> Bytes:
    """The coded form of groups of whole numbers from -127 to 127, each group under a table that is even in its sign."""
    tables, heads = [], []
    for group in groups:
        sizes = np.bincount(np.abs(group.astype(np.int64)), minlength=1)
        table = _even(sizes)
        tables.append(_mirrored(table))
        heads.append(np.concatenate([np.array([len(sizes) - 1], np.uint8), table.astype("<u2").view(np.uint8)]))
    data = np.concatenate(groups).view(np.uint8) ^ np.uint8(ZERO)
    ends = np.cumsum([len(group) for group in groups])
    log_lanes, *coded = _encode(data, np.stack(tables), ends, lanes=8)
    return np.concatenate([log_lanes, *heads, *coded])


def decode_steps(coded: Bytes, counts: Sequence[int]) -> NDArray[np.int8]:
    """The whole numbers of groups of these sizes, one after another. Whatever is wrong is a ValueError."""
    tables, at = [], 1
    for _ in counts:
        size = 2 * int(coded[at : at + 1].sum()) + 2
        held = coded[at + 1 : at + 1 + size]
        if len(held) < size or size > 2 * ZERO:
            raise ValueError("it is too short, or has too large steps")
        tables.append(_mirrored(np.frombuffer(held.tobytes(), "<u2").astype(np.int64)))
        at += 1 + size
    return (_decode(coded[0], coded[at:], np.stack(tables), np.cumsum(counts)) ^ np.uint8(ZERO)).view(np.int8)


def _encode(data: Bytes, tables: NDArray[np.int64], ends: NDArray[np.int64], lanes: int) -> list[NDArray[Any]]:
    """The logarithm of the number of lanes, their states, and the words. Bytes up to each end have a table each."""
    log_lanes = min(lanes, max(0, (len(data) // 256).bit_length() - 1))  # a lane's state costs 4 bytes
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
        raise ValueError("it is too short, or has too many lanes")
    count, lanes = int(ends[-1]), 1 << int(log_lanes)
    if count >> 16 > len(coded):
        raise ValueError(f"{count} bytes are more than it could sensibly stand for")
    if (tables.sum(1) != 1 << SCALE).any() or len(coded) % 2:
        raise ValueError("its frequencies do not add up, or half a word is left")
    symbol_of = np.stack([np.repeat(np.arange(256, dtype=np.uint8), table) for table in tables])
    states = np.frombuffer(coded[: 4 * lanes].tobytes(), "<u4").astype(np.uint64)
    words = np.frombuffer(coded[4 * lanes :].tobytes(), "<u2").astype(np.uint64)
    out = np.empty(count, np.uint8)
    compiled = kernels.loops() if count >= LONG else None
    unroll = compiled.unroll if compiled else _unroll
    read = unroll(states, words, symbol_of, tables.astype(np.uint64), _bases(tables), ends.astype(np.int64), out)
    if read < 0:
        raise ValueError("it ends too early")
    if read != len(words) or (states != LOW).any():
        raise ValueError("it does not end where it should")
    return out


def _unroll(
    states: NDArray[np.uint64],
    words: NDArray[np.uint64],
    symbol_of: Bytes,
    width: NDArray[np.uint64],
    base: NDArray[np.uint64],
    ends: NDArray[np.int64],
    out: Bytes,
) -> int:
    """Fill `out`, and leave the states as they are then. The number of words that it took, -1 if there are too few."""
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
    """How often each byte comes, out of 2^14: at least 1 where it comes at all."""
    counts = np.bincount(data, minlength=256)
    shares = counts * ((1 << SCALE) - 256) // len(data) + (counts > 0)
    shares[np.argmax(counts)] += (1 << SCALE) - shares.sum()
    return shares.astype(np.int64)


def _even(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Frequencies of 0, ±1, ±2, ... out of 2^14, where both signs of a number share: at least 1 each."""
    total, pairs = max(1, int(counts.sum())), counts[1:] // 2
    shares = np.concatenate([[0], pairs * ((1 << SCALE) - 256) // total + 1])
    shares[0] = (1 << SCALE) - 2 * shares[1:].sum()
    return shares


def _mirrored(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Frequencies of bytes, of which 128 stands for 0."""
    whole = np.zeros(256, np.int64)
    whole[ZERO : ZERO + len(table)] = table
    whole[ZERO - len(table) + 1 : ZERO] = table[:0:-1]
    return whole
