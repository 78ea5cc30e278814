"""Bytes in about as many bits as they have entropy: range asymmetric numeral systems (rANS, Duda 2013), in NumPy.

Byte i belongs to lane i mod L. All lanes move together, a step for each of their bytes, and take 16-bit words from one
stream, in their order, whenever their state falls below 2^16. `docs/format.md` has the layout.
"""

import numpy as np
from numpy.typing import NDArray

SCALE = 14  # frequencies add up to 2^14
LOW = 1 << 16  # states are at least this, and below 2^32
Bytes = NDArray[np.uint8]


def encode(data: Bytes) -> Bytes:
    """The coded form of some bytes, at least one."""
    log_lanes = min(10, max(0, (len(data) // 256).bit_length() - 1))  # a lane's state costs 4 bytes
    lanes, frequencies = 1 << log_lanes, _frequencies(data)
    width, base = frequencies.astype(np.uint64), _bases(frequencies)
    states, words = np.full(lanes, LOW, np.uint64), []
    for start in reversed(range(0, len(data), lanes)):
        symbols = data[start : start + lanes]
        active, wide = states[: len(symbols)], width[symbols]
        full = active >= wide << np.uint64(32 - SCALE)
        words.append((active[full] & np.uint64(0xFFFF)).astype("<u2"))
        active[full] >>= np.uint64(16)
        active[:] = (active // wide << np.uint64(SCALE)) + active % wide + base[symbols]
    head = [np.array([log_lanes], np.uint8), frequencies.astype("<u2").view(np.uint8)]
    tail = np.concatenate(words[::-1]).view(np.uint8)
    return np.concatenate([*head, states.astype("<u4").view(np.uint8), tail])


def decode(coded: Bytes, count: int) -> Bytes:
    """The `count` bytes that `coded` stands for. Whatever is wrong with it is a ValueError."""
    if len(coded) < 513 or coded[0] > 10 or len(coded) < 513 + (4 << int(coded[0])):
        raise ValueError("it is too short, or has too many lanes")
    if count >> 16 > len(coded):
        raise ValueError(f"{count} bytes are more than it could sensibly stand for")
    lanes = 1 << int(coded[0])
    frequencies = np.frombuffer(coded[1:513].tobytes(), "<u2").astype(np.int64)
    if frequencies.sum() != 1 << SCALE or (len(coded) - 513) % 2:
        raise ValueError("its frequencies do not add up, or half a word is left")
    symbol_of = np.repeat(np.arange(256, dtype=np.uint8), frequencies)
    width, base = frequencies.astype(np.uint64), _bases(frequencies)
    states = np.frombuffer(coded[513 : 513 + 4 * lanes].tobytes(), "<u4").astype(np.uint64)
    words = np.frombuffer(coded[513 + 4 * lanes :].tobytes(), "<u2").astype(np.uint64)
    out, read = np.empty(count, np.uint8), 0
    for start in range(0, count, lanes):
        active = states[: min(lanes, count - start)]
        slots = active & np.uint64((1 << SCALE) - 1)
        out[start : start + lanes] = symbols = symbol_of[slots]
        active[:] = width[symbols] * (active >> np.uint64(SCALE)) + slots - base[symbols]
        empty = np.flatnonzero(active < LOW)
        if read + len(empty) > len(words):
            raise ValueError("it ends too early")
        active[empty] = active[empty] << np.uint64(16) | words[read : read + len(empty)]
        read += len(empty)
    if read != len(words) or (states != LOW).any():
        raise ValueError("it does not end where it should")
    return out


def _bases(frequencies: NDArray[np.int64]) -> NDArray[np.uint64]:
    return (np.cumsum(frequencies) - frequencies).astype(np.uint64)


def _frequencies(data: Bytes) -> NDArray[np.int64]:
    """How often each byte comes, out of 2^14: at least 1 where it comes at all."""
    counts = np.bincount(data, minlength=256)
    shares = counts * ((1 << SCALE) - 256) // len(data) + (counts > 0)
    shares[np.argmax(counts)] += (1 << SCALE) - shares.sum()
    return shares.astype(np.int64)
