"""Splitting by a seed, each class by itself, so that no class is lost from training."""

from collections.abc import Sequence
from math import floor
from typing import NamedTuple

import numpy as np

from bitgraft.data.chance import draws
from bitgraft.errors import DataError


class Parts(NamedTuple):
    """Positions in the list that was split, each part in the list's order."""

    train: tuple[int, ...]
    val: tuple[int, ...]
    test: tuple[int, ...]


def split(labels: Sequence[int], val_share: float, test_share: float, seed: int) -> Parts:
    """Shares of the whole; what is left is for training, at least one image of each class."""
    check_shares(val_share, test_share)
    everything = tuple(range(len(labels)))
    rest, test = _take(everything, labels, test_share, seed, stream=0)
    train, val = _take(rest, labels, val_share / (1 - test_share), seed, stream=1)
    return Parts(train, val, test)


def check_shares(val_share: float, test_share: float) -> None:
    for name, share in (("val_share", val_share), ("test_share", test_share)):
        if not 0 <= share < 1:
            raise DataError(f"{name} is the share of images to hold back, at least 0 and below 1, not {share}")
    if val_share + test_share >= 1:
        raise DataError(f"val_share {val_share} and test_share {test_share} together leave nothing to train on")


def _take(
    positions: tuple[int, ...], labels: Sequence[int], share: float, seed: int, stream: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What stays and what is taken. Each class gives its share rounded down or up, and never its last image."""
    groups: dict[int, list[int]] = {}
    for position in positions:
        groups.setdefault(labels[position], []).append(position)
    chosen: set[int] = set()
    for label, number in _numbers({label: len(group) for label, group in groups.items()}, share).items():
        order = np.argsort(draws(seed, stream, groups[label], 1)[:, 0], kind="stable")
        chosen.update(groups[label][i] for i in order[:number])
    return tuple(p for p in positions if p not in chosen), tuple(p for p in positions if p in chosen)


def _numbers(sizes: dict[int, int], share: float) -> dict[int, int]:
    """How many each class gives: rounded down, then one more from those that lost most by it, to the whole's share."""
    numbers = {label: floor(size * share) for label, size in sizes.items()}
    wanted = max(1, round(sum(sizes.values()) * share)) if share else 0
    short = wanted - sum(numbers.values())
    for label in sorted(sizes, key=lambda label: (numbers[label] - sizes[label] * share, label)):
        if short > 0 and sizes[label] * share > numbers[label] and numbers[label] + 1 < sizes[label]:
            numbers[label] += 1
            short -= 1
    return numbers
