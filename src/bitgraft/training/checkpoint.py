"""Where a run is and what it has come to, in memory and on disk, so that a killed one goes on as before."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from bitgraft.backbone.files import write_atomically
from bitgraft.errors import TrainingError
from bitgraft.training.config import Config
from bitgraft.training.learner import Learner, Values
from bitgraft.training.processes import gathered, random_state, set_random_state

FEWEST = 10  # epochs of patience, where it is a share of the run: the last ones, at low rates, are often the best
MIDDLE = 0.5  # of the run, before which rates are high and such patience does not begin


@dataclass
class Position:
    """Where a run is: before this step of this epoch of this phase."""

    phase: int = 0
    epoch: int = 0
    step: int = 0
    epochs_done: int = 0
    """Over all phases; batches and augmentation are drawn from it."""
    epochs: int = 0
    """Of the whole run, as planned at its start: what a resumed one keeps to."""


@dataclass
class Result:
    history: list[dict[str, Any]] = field(default_factory=list)
    """One record for each epoch."""
    start: dict[str, Any] | None = None
    """The record of the head start, where there was one: a linear probe with norm statistics of its own."""
    best: dict[str, Any] | None = None
    """The record of the best epoch on validation; epoch 0 is the head start."""
    best_tasks: Values | None = None
    """What the tasks held then, and the weights that they learn together; given when the run is over."""

    def hopeful(self, at: Position, config: Config) -> bool:
        """Whether a better epoch may still come: less than `patience` epochs have passed since the best one, since
        masks were formed, and, if it is a share of the run, since the middle."""
        if config.patience is None or self.best is None:
            return True
        patience, since = config.patience, max(self.best["epoch"], config.anneal_masks * at.epochs)
        if patience < 1:
            patience, since = max(FEWEST, patience * at.epochs), max(since, MIDDLE * at.epochs)
        return bool(at.epochs_done - since < patience)

    def is_better(self, record: Mapping[str, Any]) -> bool:
        """Whether a record beats the best one so far, by accuracy and then by loss."""
        if self.best is None:
            return True
        mine, theirs = ((r["val_accuracy"], -r["val_loss"]) for r in (record, self.best))
        return bool(mine > theirs)


@dataclass
class State:
    """A run that can go on: where it is, what it has learned, and the optimisers (none before a phase's first step)."""

    at: Position
    result: Result
    best_tasks: Values | None
    sums: Tensor
    """Of this epoch, in this process."""
    optimizers: Sequence[Any]


def save(path: Path, config: Config, state: State, learner: Learner, accelerator: Accelerator) -> None:
    """In all processes at once; the main one writes."""
    own = random_state(accelerator.device) | {"sums": state.sums.cpu()}
    held = {
        "config": asdict(config),
        "at": asdict(state.at),
        "result": asdict(state.result),
        "best_tasks": state.best_tasks,
        "processes": gathered(own, accelerator),
        "optimizers": [optimizer.state_dict() for optimizer in state.optimizers],
        "tasks": {name: part.state_dict() for name, part in learner.parts.items()},
        "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
    }
    if accelerator.is_main_process:
        buffer = io.BytesIO()
        torch.save(held, buffer)
        write_atomically(path, buffer.getbuffer())


def load(path: Path, config: Config, learner: Learner, accelerator: Accelerator) -> State:
    """Put back what was learned and random; the rest is returned, with the optimisers' state dicts.

    Tensors and plain data only: nothing in a checkpoint is ever executed.
    """
    if not path.exists():
        raise TrainingError(f"there is nothing to resume in {path.parent}: start without resuming")
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        settings, at, result = held["config"], Position(**held["at"]), Result(**held["result"])
        tasks, processes = held["tasks"], held["processes"]
    except Exception as cause:  # torch raises whatever the damage leads to
        raise TrainingError(f"the checkpoint {path} cannot be read ({cause}): remove it and start anew") from cause
    changed = sorted(name for name, value in asdict(config).items() if settings.get(name) != value)
    if changed or set(tasks) != set(learner.parts):
        raise TrainingError(
            f"the run in {path.parent} was started with other settings ({', '.join(changed) or 'tasks'}): "
            "give the same ones to resume it, or start without resuming"
        )
    for name, part in learner.parts.items():
        part.load_state_dict(tasks[name])
    if accelerator.scaler is not None and held["scaler"] is not None:
        accelerator.scaler.load_state_dict(held["scaler"])
    rank = accelerator.process_index
    set_random_state(processes[rank % len(processes)], accelerator.device)
    if len(processes) == accelerator.num_processes:
        sums = processes[rank]["sums"]
    else:  # their number has changed: one has what all had
        sums = sum((process["sums"] for process in processes), torch.zeros(3)) * (rank == 0)
    return State(at, result, held["best_tasks"], sums, held["optimizers"])


def of_task(record: Mapping[str, Any], task: str) -> dict[str, Any]:
    """A record of several tasks' epoch, with one task's own validation."""
    plain = {name: value for name, value in record.items() if name != "by_task"}
    own = record.get("by_task", {}).get(task, {})
    return plain | {f"val_{what}": value for what, value in own.items()}
