"""Which images each process runs at each step.

A batch depends only on the seed, the epoch and the step, so a run can resume at any step. Each process gets a shard of
every batch. All processes run the same number of micro-batches, because batch norm and gradients are reduced over all
processes in each of them. A process whose shard is empty runs one placeholder image with weight 0.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Sampler, default_convert

from bitgraft.errors import TrainingError
from bitgraft.task import Task
from bitgraft.training.batches import inputs_and_targets
from bitgraft.training.config import Config


@dataclass(frozen=True)
class MicroBatch:
    """The images of one forward and backward pass; gradients accumulate over a step's micro-batches."""

    global_size: int
    """Images over all processes."""
    local_size: int
    """Images of this process, not counting a placeholder."""

    @property
    def rows(self) -> int:
        """Images that this process runs, including a placeholder."""
        return max(1, self.local_size)


@dataclass(eq=False)
class ShardedBatchSampler(Sampler[list[int]]):
    """This process's shard of each batch of an epoch, shuffled if there is a seed, starting at any step."""

    count: int
    size: int
    seed: int | None = None
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1
    """Micro-batches per batch."""
    min_size: int = 1
    """Merge a smaller last batch, or micro-batch, into the one before it. Batch norm needs two images."""
    pad: bool = True
    """Give a process with an empty shard a placeholder image; otherwise it skips the batch."""
    epoch: int = 0
    first_step: int = 0

    def __post_init__(self) -> None:
        self.global_sizes = _split(self.count, self.size, self.min_size)

    def seek(self, epoch: int, step: int = 0) -> "ShardedBatchSampler":
        """Start the next iteration at this step."""
        self.epoch, self.first_step = epoch, step
        return self

    def __len__(self) -> int:
        return len(self.global_sizes)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step, in the order of this process's shard."""
        size = self.global_sizes[step]
        sizes = _split(size, max(self.min_size, -(-size // self.accumulate)), self.min_size)
        return [MicroBatch(size, len(range(self.rank, size, self.world_size))) for size in sizes]

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.count))
        if self.seed is not None:
            rng = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**64)
            order = torch.randperm(self.count, generator=rng).tolist()
        for step in range(self.first_step, len(self)):
            shard, start = [], step * self.size
            for micro in self.micro_batches(step):
                images = order[start : start + micro.global_size]
                shard += images[self.rank :: self.world_size] or (images[:1] if self.pad else [])
                start += micro.global_size
            if shard:
                yield shard


@dataclass(frozen=True)
class StepBatch:
    """The data of one optimiser step: this process's shard of a batch of one task."""

    task: str
    name: str
    """How errors call the data."""
    inputs: Any
    targets: Any
    micro_batches: list[MicroBatch]

    @property
    def global_size(self) -> int:
        """Images over all processes."""
        return sum(micro.global_size for micro in self.micro_batches)


class Loader:
    """A task's training, validation or test data in batches, from any step of any epoch.

    `batching` sets fields of `ShardedBatchSampler`.
    """

    def __init__(
        self, data: Any, kind: str, task: str, size: int, accelerator: Accelerator, workers: int = 0, **batching: Any
    ) -> None:
        self.data, self.task, self.name = data, task, f"the {kind} data of task {task!r}"
        self.accelerator, self.workers = accelerator, workers
        if not len(data):
            raise TrainingError(f"{self.name} is empty: give it at least one image")
        batching |= {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
        self.batches = ShardedBatchSampler(len(data), size, **batching)
        self._loader: DataLoader[Any] = DataLoader(
            data,
            batch_sampler=self.batches,
            num_workers=workers,
            pin_memory=accelerator.device.type == "cuda",
            collate_fn=getattr(data, "collate_fn", None),
            generator=torch.Generator(),  # each pass draws a seed, which must not advance the global generator
        )

    def from_step(self, epoch: int, step: int) -> Iterator[StepBatch]:
        self._seek(epoch, step)
        for at, batch in enumerate(self._loader, start=step):
            yield StepBatch(self.task, self.name, *inputs_and_targets(batch), self.batches.micro_batches(at))

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, targets) of this process, for data that is not trained on."""
        self._seek(0, 0)
        return map(inputs_and_targets, self._loader)

    def find_non_finite(self, epoch: int = 0, steps: range | None = None) -> str | None:
        """An error message for the first image with NaN or infinite values, or None. All processes must call it."""
        steps = range(len(self.batches)) if steps is None else steps
        self._seek(epoch, steps.start)
        indices = (index for _, shard in zip(steps, self.batches, strict=False) for index in shard)
        own = next((index for index in indices if not _is_finite(self.data[index])), None)
        found = [index for index in gather_object([own]) if index is not None]
        return f"image {min(found)} of {self.name} has NaN or infinite values: fix or remove it" if found else None

    def _seek(self, epoch: int, step: int) -> None:
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        self.batches.seek(epoch, step)


class InterleavedLoader:
    """The steps of one epoch, cycling through the tasks until each has used all of its data."""

    def __init__(self, loaders: Mapping[str, Loader]) -> None:
        self.loaders = loaders
        lengths = {task: len(loader.batches) for task, loader in loaders.items()}
        longest = max(lengths.values())
        self.order = [(task, step) for step in range(longest) for task, length in lengths.items() if step < length]

    def __len__(self) -> int:
        return len(self.order)

    @property
    def images(self) -> dict[str, int]:
        """The number of images of each task."""
        return {task: len(loader.data) for task, loader in self.loaders.items()}

    def from_step(self, epoch: int, step: int) -> Iterator[StepBatch]:
        done = Counter(task for task, _ in self.order[:step])
        streams = {task: loader.from_step(epoch, done[task]) for task, loader in self.loaders.items()}
        return (next(streams[task]) for task, _ in self.order[step:])

    def find_non_finite(self, epoch: int, steps: range) -> str | None:
        """An error message for the first image in these steps with NaN or infinite values, or None."""
        for name, loader in self.loaders.items():
            own = [step for task, step in self.order[steps.start : steps.stop] if task == name]
            if own and (found := loader.find_non_finite(epoch, range(own[0], own[-1] + 1))):
                return found
        return None


def training_loader(task: Task, data: Any, config: Config, accelerator: Accelerator, workers: int) -> Loader:
    has_batch_norm = any(tensor.endswith(".running_mean") for tensor in task.owned)
    has_tail = any(transform.tail is not None for transform in task.transforms.values())  # with a batch norm
    min_size = 2 if has_tail or (has_batch_norm and config.statistics == "batch") else 1
    batching = {"seed": config.seed, "accumulate": config.accumulate, "min_size": min_size}
    return Loader(data, "training", task.name, config.batch, accelerator, workers, **batching)


def _is_finite(item: Any) -> bool:
    leaves = tree_leaves(default_convert(item))  # type: ignore[no-untyped-call]
    return all(bool(leaf.isfinite().all()) for leaf in leaves if isinstance(leaf, Tensor))


def _split(count: int, size: int, min_size: int) -> list[int]:
    """Split a count into parts of one size; a remainder below `min_size` joins the last part."""
    sizes, rest = [size] * (count // size), count % size
    if rest and rest < min_size and sizes:
        sizes[-1] += rest
    elif rest:
        sizes.append(rest)
    return sizes
