"""Random numbers and splits that depend only on a seed, not on workers, order or library versions."""

from collections.abc import Sequence
from math import floor

import numpy as np
from numpy.typing import NDArray

from bitgraft.errors import DataError

_STEP = 0x9E3779B97F4A7C15


def seeded_uniform(
    seed: int, epoch: int, indices: Sequence[int] | NDArray[np.int64], count: int
) -> NDArray[np.float64]:
    """Return `count` random numbers in [0, 1) per index, (B, count): splitmix64 of (seed, epoch, index, position).

    A hash rather than a generator, so an item gets the same numbers alone and in a batch.
    """
    state = _mix(np.array([seed % 2**64], dtype=np.uint64) + np.uint64(_STEP))
    state = _mix(state + np.uint64((epoch + 1) * _STEP % 2**64))
    state = _mix(state ^ _mix(np.asarray(indices, dtype=np.int64).astype(np.uint64) + np.uint64(_STEP)))  # (B,)
    positions = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
    bits = _mix(state[:, None] + positions)  # (B, count)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stratified_split(
    labels: Sequence[int], val_share: float, test_share: float, seed: int
) -> tuple[list[int], list[int], list[int]]:
    """Return sorted indices for train, val and test. Shares are of all images, and each class keeps one for train."""
    check_shares(val_share, test_share)
    rest, test = _take(range(len(labels)), labels, test_share, seed, stream=0)
    train, val = _take(rest, labels, val_share / (1 - test_share), seed, stream=1)
    return train, val, test


def check_shares(val_share: float, test_share: float) -> None:
    """Raise unless the shares are in [0, 1) and leave something to train on."""
    for name, share in (("val_share", val_share), ("test_share", test_share)):
        if not 0 <= share < 1:
            raise DataError(f"{name} is {share}, but a share of images must be at least 0 and below 1")
    if val_share + test_share >= 1:
        raise DataError(f"val_share {val_share} and test_share {test_share} together leave nothing to train on")


def _take(
    indices: Sequence[int], labels: Sequence[int], share: float, seed: int, stream: int
) -> tuple[list[int], list[int]]:
    """Split indices into the rest and a random share of each class, but never a class's last image."""
    by_class: dict[int, list[int]] = {}
    for index in indices:
        by_class.setdefault(labels[index], []).append(index)
    taken: set[int] = set()
    for label, count in _counts({label: len(group) for label, group in by_class.items()}, share).items():
        order = np.argsort(seeded_uniform(seed, stream, by_class[label], 1)[:, 0], kind="stable")
        taken.update(by_class[label][i] for i in order[:count])
    return [i for i in indices if i not in taken], [i for i in indices if i in taken]


def _counts(sizes: dict[int, int], share: float) -> dict[int, int]:
    """Return how many images to take per class: its share rounded down, plus one for the classes that lose most by
    rounding, until the total is the share of all images."""
    counts = {label: floor(size * share) for label, size in sizes.items()}
    missing = (max(1, round(sum(sizes.values()) * share)) if share else 0) - sum(counts.values())
    for label in sorted(sizes, key=lambda label: (counts[label] - sizes[label] * share, label)):
        if missing > 0 and sizes[label] * share > counts[label] and counts[label] + 1 < sizes[label]:
            counts[label] += 1
            missing -= 1
    return counts
