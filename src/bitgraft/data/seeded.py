"""Random numbers and splits that depend on a seed alone, not on workers, order or library versions."""

from collections.abc import Sequence
from math import floor

import numpy as np
from numpy.typing import NDArray

from bitgraft.errors import DataError

_STEP = 0x9E3779B97F4A7C15


def seeded_uniform(
    seed: int, epoch: int, indices: Sequence[int] | NDArray[np.int64], count: int
) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for each index: splitmix64 over (seed, epoch, index, place), (B, count).

    A hash rather than a generator, so an item gets the same numbers alone and in a batch.
    """
    state = _mix(np.array([seed % 2**64], dtype=np.uint64) + np.uint64(_STEP))
    state = _mix(state + np.uint64((epoch + 1) * _STEP % 2**64))
    state = _mix(state ^ _mix(np.asarray(indices, dtype=np.int64).astype(np.uint64) + np.uint64(_STEP)))  # (B,)
    places = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
    bits = _mix(state[:, None] + places)  # (B, count)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stratified_split(
    labels: Sequence[int], val_share: float, test_share: float, seed: int
) -> tuple[list[int], list[int], list[int]]:
    """Positions for train, val and test, each in order. Shares are of the whole; no class loses its last image."""
    check_shares(val_share, test_share)
    rest, test = _take(range(len(labels)), labels, test_share, seed, stream=0)
    train, val = _take(rest, labels, val_share / (1 - test_share), seed, stream=1)
    return train, val, test


def check_shares(val_share: float, test_share: float) -> None:
    """Refuse shares that cannot be held out."""
    for name, share in (("val_share", val_share), ("test_share", test_share)):
        if not 0 <= share < 1:
            raise DataError(f"{name} is the share of images to hold out, at least 0 and below 1, not {share}")
    if val_share + test_share >= 1:
        raise DataError(f"val_share {val_share} and test_share {test_share} together leave nothing to train on")


def _take(
    positions: Sequence[int], labels: Sequence[int], share: float, seed: int, stream: int
) -> tuple[list[int], list[int]]:
    """What stays and what is taken. Each class gives its share rounded down or up, and never its last image."""
    groups: dict[int, list[int]] = {}
    for position in positions:
        groups.setdefault(labels[position], []).append(position)
    taken: set[int] = set()
    for label, number in _numbers({label: len(group) for label, group in groups.items()}, share).items():
        order = np.argsort(seeded_uniform(seed, stream, groups[label], 1)[:, 0], kind="stable")
        taken.update(groups[label][i] for i in order[:number])
    return [p for p in positions if p not in taken], [p for p in positions if p in taken]


def _numbers(sizes: dict[int, int], share: float) -> dict[int, int]:
    """How many images each class gives: its share rounded down, then one more from those that lost most by rounding,
    until the whole gives its share."""
    numbers = {label: floor(size * share) for label, size in sizes.items()}
    missing = (max(1, round(sum(sizes.values()) * share)) if share else 0) - sum(numbers.values())
    for label in sorted(sizes, key=lambda label: (numbers[label] - sizes[label] * share, label)):
        if missing > 0 and sizes[label] * share > numbers[label] and numbers[label] + 1 < sizes[label]:
            numbers[label] += 1
            missing -= 1
    return numbers
