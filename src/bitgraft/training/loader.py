"""Which images make up a batch: a function of the seed, the epoch and the step alone."""

from collections.abc import Iterator, Mapping

import torch
from torch.utils.data import Sampler


class Batches(Sampler[list[int]]):
    """The batches of one epoch, each a process's share of it, from any step on; in order where there is no seed."""

    def __init__(self, count: int, size: int, seed: int | None, rank: int = 0, world: int = 1) -> None:
        self.count, self.size, self.seed, self.rank, self.world = count, size, seed, rank, world
        self.epoch, self.first = 0, 0

    def at(self, epoch: int, step: int = 0) -> "Batches":
        """Go to a step of an epoch."""
        self.epoch, self.first = epoch, step
        return self

    def __len__(self) -> int:
        return -(-self.count // self.size)

    def whole(self, step: int) -> int:
        """How many images the batch at a step has over all processes."""
        return min(self.size, self.count - step * self.size)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.count))
        if self.seed is not None:
            rng = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.count, generator=rng).tolist()
        for step in range(self.first, len(self)):
            yield order[step * self.size : (step + 1) * self.size][self.rank :: self.world]


def turns(lengths: Mapping[str, int]) -> list[tuple[str, int]]:
    """The steps of an epoch of several tasks, given how many each has: they take turns, and one that is through with
    its data sits out."""
    longest = max(lengths.values())
    return [(name, step) for step in range(longest) for name, length in lengths.items() if step < length]
