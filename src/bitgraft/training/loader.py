"""Which images make up a batch.

A batch is a function of the seed, the epoch and the step alone. Each process takes its share of it. All processes run
the same number of parts, since batch norm and gradients are reduced over all of them in each: where a part has fewer
images than there are processes, those left without one run an image that counts for nothing.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Sampler, default_convert

from bitgraft.errors import TrainingError
from bitgraft.training.batches import pair
from bitgraft.training.processes import gathered


@dataclass(frozen=True)
class Part:
    """What is run at once: a batch, or one of those that it is accumulated from."""

    whole: int
    """Images over all processes."""
    own: int
    """Images of this process. Where it has none, it runs one that counts for nothing."""

    @property
    def rows(self) -> int:
        return max(1, self.own)


class Batches(Sampler[list[int]]):
    """The batches of one epoch, each a process's share of it, from any step on; in order where there is no seed.

    Args:
        accumulate: run each batch in so many parts.
        smallest: a last batch, or part, of fewer images is run with the one before it. Batch norm needs two.
        pad: give a process without a share an image that counts for nothing; else it skips the batch.
    """

    def __init__(
        self,
        count: int,
        size: int,
        seed: int | None,
        rank: int = 0,
        world: int = 1,
        *,
        accumulate: int = 1,
        smallest: int = 1,
        pad: bool = True,
    ) -> None:
        self.count, self.size, self.seed, self.rank, self.world = count, size, seed, rank, world
        self.accumulate, self.smallest, self.pad = accumulate, smallest, pad
        self._sizes = _split(count, size, smallest)
        self.epoch, self.first = 0, 0

    def at(self, epoch: int, step: int = 0) -> "Batches":
        """Go to a step of an epoch."""
        self.epoch, self.first = epoch, step
        return self

    def __len__(self) -> int:
        return len(self._sizes)

    def whole(self, step: int) -> int:
        """How many images the batch at a step has over all processes."""
        return self._sizes[step]

    def parts(self, step: int) -> list[Part]:
        """The parts of the batch at a step, as they follow each other in this process's share."""
        return [Part(size, len(range(self.rank, size, self.world))) for size in self._part_sizes(step)]

    def _part_sizes(self, step: int) -> list[int]:
        whole = self.whole(step)
        return _split(whole, max(self.smallest, -(-whole // self.accumulate)), self.smallest)

    def of(self, rank: int) -> "Batches":
        """Another process's shares."""
        other = copy.copy(self)
        other.rank = rank
        return other

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.count))
        if self.seed is not None:
            rng = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.count, generator=rng).tolist()
        for step in range(self.first, len(self)):
            share, start = [], step * self.size
            for size in self._part_sizes(step):
                part = order[start : start + size]
                share += part[self.rank :: self.world] or (part[:1] if self.pad else [])
                start += size
            if share:
                yield share


class Loader:
    """A data set in batches, from any step of any epoch on."""

    def __init__(self, data: Any, what: str, batches: Batches, workers: int, device: torch.device) -> None:
        self.data, self.what, self.batches = data, what, batches
        self._loader: DataLoader[Any] = DataLoader(
            data,
            batch_sampler=batches,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            collate_fn=getattr(data, "collate_fn", None),
            generator=torch.Generator(),  # its own: each pass draws a number, which must not move the network's
        )

    def from_step(self, epoch: int, step: int) -> Iterator[tuple[Any, list[Part]]]:
        """(a process's share of a batch, the parts that it is run in)."""
        self._at(epoch, step)
        return zip(map(pair, self._loader), map(self.batches.parts, range(step, len(self.batches))), strict=True)

    def __iter__(self) -> Iterator[Any]:
        self._at(0, 0)
        return map(pair, self._loader)

    def not_finite(self, accelerator: Accelerator, epoch: int = 0, steps: range | None = None) -> str | None:
        """What to say of the first image that is not finite, if there is one. All processes must ask."""
        steps = range(len(self.batches)) if steps is None else steps
        self._at(epoch, steps.start)
        shares = (index for _, share in zip(steps, self.batches, strict=False) for index in share)
        found = gathered(next((i for i in shares if not _is_finite(self.data[i])), None), accelerator)
        first = min((index for index in found if index is not None), default=None)
        return None if first is None else f"image {first} of {self.what} has values that are NaN or infinite: mend it"

    def _at(self, epoch: int, step: int) -> None:
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        self.batches.at(epoch, step)


def loader(
    data: Any,
    kind: str,
    task: str,
    size: int,
    accelerator: Accelerator,
    workers: int = 0,
    seed: int | None = None,
    **batching: Any,
) -> Loader:
    """The training, validation or test data of a task in batches; further options are those of `Batches`."""
    what = f"the {kind} data of task {task!r}"
    if not len(data):
        raise TrainingError(f"{what} is empty: give it at least one image")
    batches = Batches(len(data), size, seed, accelerator.process_index, accelerator.num_processes, **batching)
    return Loader(data, what, batches, workers, accelerator.device)


@dataclass(frozen=True)
class Turn:
    """One step: a task, this process's share of a batch of its data, and the parts that the share is run in."""

    task: str
    what: str
    batch: tuple[Any, Any]
    parts: list[Part]

    @property
    def whole(self) -> int:
        """Images over all processes."""
        return sum(part.whole for part in self.parts)


class Turns:
    """The steps of an epoch of several tasks: they take turns, and one that is through with its data sits out."""

    def __init__(self, loaders: Mapping[str, Loader]) -> None:
        self.loaders = loaders
        lengths = {name: len(loader.batches) for name, loader in loaders.items()}
        longest = max(lengths.values())
        self.order = [(name, step) for step in range(longest) for name, length in lengths.items() if step < length]

    def __len__(self) -> int:
        return len(self.order)

    def from_step(self, epoch: int, step: int) -> Iterator[Turn]:
        streams = {}
        for name, loader in self.loaders.items():
            streams[name] = loader.from_step(epoch, sum(task == name for task, _ in self.order[:step]))
        return (Turn(name, self.loaders[name].what, *next(streams[name])) for name, _ in self.order[step:])

    def not_finite(self, accelerator: Accelerator, epoch: int, steps: range) -> str | None:
        """What to say of the first image in these steps that is not finite, if there is one."""
        for name, loader in self.loaders.items():
            own = [step for task, step in self.order[steps.start : steps.stop] if task == name]
            if own and (found := loader.not_finite(accelerator, epoch, range(own[0], own[-1] + 1))):
                return found
        return None


def _is_finite(item: Any) -> bool:
    leaves = tree_leaves(default_convert(item))  # type: ignore[no-untyped-call]
    return all(bool(leaf.isfinite().all()) for leaf in leaves if isinstance(leaf, Tensor))


def _split(count: int, size: int, smallest: int) -> list[int]:
    """A count in parts of one size and the rest, which joins the last of them where it would be too small."""
    sizes, rest = [size] * (count // size), count % size
    if rest and rest < smallest and sizes:
        sizes[-1] += rest
    elif rest:
        sizes.append(rest)
    return sizes
