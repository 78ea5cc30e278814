"""Numbers that look random and depend on their place alone, not on workers, order or library versions."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_STEP = 0x9E3779B97F4A7C15


def draws(seed: int, epoch: int, indices: Sequence[int] | NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for each index: splitmix64 over (seed, epoch, index, place).

    A hash and no generator: a batch is drawn in one sweep, and an item of it comes out as if drawn alone.
    """
    state = _mix(np.array([seed % 2**64], dtype=np.uint64) + np.uint64(_STEP))
    state = _mix(state + np.uint64((epoch + 1) * _STEP % 2**64))
    state = _mix(state ^ _mix(np.asarray(indices, dtype=np.int64).astype(np.uint64) + np.uint64(_STEP)))  # (B,)
    places = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
    bits = _mix(state[:, None] + places)  # (B, count)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
