"""Where a run is and what it has come to, in memory and on disk, so that a killed one goes on as before."""

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitgraft.backbone.files import write_atomically
from bitgraft.errors import TrainingError
from bitgraft.training.config import Config


@dataclass
class Position:
    """Where a run is: before this step of this epoch of this phase."""

    phase: int = 0
    epoch: int = 0
    step: int = 0
    epochs_done: int = 0
    """Over all phases; batches and augmentation are drawn from it."""


@dataclass
class Result:
    history: list[dict[str, Any]] = field(default_factory=list)
    """One record for each epoch."""
    best: dict[str, Any] | None = None
    """The record of the best epoch on validation."""
    best_tasks: dict[str, dict[str, Tensor]] | None = None
    """What the tasks held then; given when the run is over."""

    def hopeful(self, epochs_done: int, patience: int | None) -> bool:
        """Whether a better epoch may still come: less than `patience` epochs have passed since the best one."""
        return patience is None or self.best is None or epochs_done - self.best["epoch"] < patience

    def is_better(self, record: Mapping[str, Any]) -> bool:
        """Whether a record beats the best one so far, by accuracy and then by loss."""
        if self.best is None:
            return True
        mine, theirs = ((r["val_accuracy"], -r["val_loss"]) for r in (record, self.best))
        return bool(mine > theirs)


@dataclass
class State:
    """All that a run needs to go on. `tasks` and `best_tasks` also hold the weights that tasks learn together."""

    at: Position
    result: Result
    tasks: dict[str, dict[str, Tensor]]
    optimizers: list[dict[str, Any]] | None
    """None before the first step of a phase, which builds them anew."""
    best_tasks: dict[str, dict[str, Tensor]] | None
    processes: list[dict[str, Tensor]]
    """For each process its random numbers (`cpu`, `device`) and the sums of its epoch (`sums`)."""
    scaler: dict[str, Any] | None = None
    """Of the gradients in mixed precision fp16."""
    means: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """What the tasks' weights take in, for mean-shift correction."""

    def of_process(self, rank: int, world: int) -> dict[str, Tensor]:
        """What a process goes on with; where their number has changed, one process has the sums of all."""
        own = self.processes[rank % len(self.processes)]
        if len(self.processes) == world:
            return own
        total = torch.stack([process["sums"] for process in self.processes]).sum(0)
        return {**own, "sums": total if rank == 0 else torch.zeros_like(total)}


def of_task(record: Mapping[str, Any], task: str) -> dict[str, Any]:
    """A record of several tasks' epoch, with one task's own validation."""
    plain = {name: value for name, value in record.items() if name != "by_task"}
    own = record.get("by_task", {}).get(task, {})
    return plain | {f"val_{what}": value for what, value in own.items()}


def save(path: Path, config: Config, state: State) -> None:
    plain = {"config": asdict(config), "at": asdict(state.at), "result": asdict(state.result)}
    buffer = io.BytesIO()
    torch.save({**vars(state), **plain}, buffer)
    write_atomically(path, buffer.getbuffer())


def load(path: Path, config: Config, tasks: list[str]) -> State:
    """Tensors and plain data only: nothing in a checkpoint is ever executed."""
    if not path.exists():
        raise TrainingError(f"there is nothing to resume in {path.parent}: start without resuming")
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        settings, at, result = (held.pop(name) for name in ("config", "at", "result"))
        state = State(at=Position(**at), result=Result(**result), **held)
    except Exception as cause:  # torch raises whatever the damage leads to
        raise TrainingError(f"the checkpoint {path} cannot be read ({cause}): remove it and start anew") from cause
    changed = sorted(name for name, value in asdict(config).items() if settings.get(name) != value)
    if changed or set(state.tasks) != set(tasks):
        raise TrainingError(
            f"the run in {path.parent} was started with other settings ({', '.join(changed) or 'tasks'}): "
            "give the same ones to resume it, or start without resuming"
        )
    return state
