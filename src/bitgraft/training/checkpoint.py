"""The state of a run, in memory and on disk, so that a killed run resumes exactly."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from bitgraft.backbone.files import write_atomically
from bitgraft.errors import TaskError, TrainingError
from bitgraft.training.config import Config
from bitgraft.training.learner import Learner, Values
from bitgraft.training.processes import random_state, set_random_state

# a patience below 1 is a share of the run: the last epochs, at low rates, are often the best
MIN_PATIENCE = 10  # epochs
PATIENCE_FROM = 0.5  # share of the run before which it does not count
SLOWDOWN = 0.25  # of all rates after a retreat
MIN_TO_RETREAT = 8  # epochs of a run


@dataclass
class Position:
    """The next step of a run."""

    phase: int = 0
    epoch: int = 0
    step: int = 0
    epochs_done: int = 0
    """Over all phases; batches and augmentation depend on it."""
    epochs: int = 0
    """Of the whole run, as planned at its start."""
    slowdown: float = 1.0
    """The factor of all rates."""


@dataclass
class Result:
    """What `fit` returns. A record holds the epoch and phase, the losses and the accuracies."""

    history: list[dict[str, Any]] = field(default_factory=list)
    """One record per epoch."""
    start: dict[str, Any] | None = None
    """With `head_init`, the record before the first step: a linear probe."""
    best: dict[str, Any] | None = None
    """The record of the best epoch on validation; epoch 0 is `start`."""
    best_tasks: Values | None = field(default=None, repr=False)
    """The tasks' state dicts, and the shared weights, at the best epoch."""

    def may_improve(self, at: Position, config: Config) -> bool:
        """False once `config.patience` epochs have passed since the best one and since masks were annealed."""
        if config.patience is None or self.best is None:
            return True
        patience, since = config.patience, max(self.best["epoch"], config.anneal_masks * at.epochs)
        if patience < 1:
            patience, since = max(MIN_PATIENCE, patience * at.epochs), max(since, PATIENCE_FROM * at.epochs)
        return bool(at.epochs_done - since < patience)

    def retreat_to(self, at: Position, config: Config) -> int | None:
        """The best epoch, halfway through a run in which none since the warm-up was better (`Config.retreat`)."""
        if not config.retreat or self.best is None or at.epochs < MIN_TO_RETREAT or at.epochs_done != at.epochs // 2:
            return None
        return self.best["epoch"] if self.best["epoch"] <= config.warmup * at.epochs else None

    def is_better(self, record: Mapping[str, Any]) -> bool:
        """Compare a record with the best one by accuracy, then by loss."""
        if self.best is None:
            return True
        new, best = ((r["val_accuracy"], -r["val_loss"]) for r in (record, self.best))
        return bool(new > best)


@dataclass
class State:
    at: Position
    result: Result
    sums: Tensor
    """Loss, correct answers and images of this epoch, in this process."""
    optimizers: Sequence[dict[str, Any]]
    """Their state dicts; none before a phase's first step."""


def save(path: Path, settings: Mapping[str, Any], state: State, learner: Learner) -> None:
    """Call it in all processes: the main one writes, and all go on once it has."""
    accelerator = learner.accelerator
    own = random_state(accelerator.device) | {"sums": state.sums.cpu()}
    held = {
        "settings": dict(settings),
        "at": vars(state.at),
        "result": vars(state.result),
        "processes": gather_object([own]),
        "optimizers": state.optimizers,
        "learned": {name: part.state_dict() for name, part in learner.parts.items()},
        "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
    }
    if accelerator.is_main_process:
        buffer = io.BytesIO()
        torch.save(held, buffer)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, buffer.getbuffer())
    accelerator.wait_for_everyone()


def load(path: Path, settings: Mapping[str, Any], learner: Learner) -> State:
    """Restore the learner, the random state and the gradient scaler; return the rest.

    `settings` must be those that the run was saved with. A checkpoint holds only tensors and plain data: loading it
    executes no code.
    """
    if not path.exists():
        raise TrainingError(f"there is nothing to resume in {path.parent}: start without resuming")
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        before, at, result = held["settings"], Position(**held["at"]), Result(**held["result"])
        learned, processes = held["learned"], held["processes"]
    except Exception as cause:  # a damaged file can raise anything
        raise TrainingError(f"the checkpoint {path} cannot be read ({cause}): remove it and start again") from cause
    changed = sorted(name for name, value in settings.items() if before.get(name) != value)
    if changed or set(learned) != set(learner.parts):
        raise TrainingError(
            f"the run in {path.parent} was started with other settings ({', '.join(changed) or 'tasks'}): "
            "resume it with the same ones, or start without resuming"
        )
    try:
        learner.restore(learned)
    except (RuntimeError, TaskError) as cause:  # load_state_dict: other keys, shapes or options
        raise TrainingError(
            f"the run in {path.parent} was started with another method, other options or other classes: add the task "
            "as it was added then, or start without resuming"
        ) from cause
    accelerator, rank = learner.accelerator, learner.accelerator.process_index
    if accelerator.scaler is not None and held["scaler"] is not None:
        accelerator.scaler.load_state_dict(held["scaler"])
    set_random_state(processes[rank % len(processes)], accelerator.device)
    if len(processes) == accelerator.num_processes:
        sums = processes[rank]["sums"]
    else:  # the number of processes changed: the main one takes the total
        sums = sum((process["sums"] for process in processes), torch.zeros(3)) * (rank == 0)
    return State(at, result, sums, held["optimizers"])


def of_task(record: Mapping[str, Any], task: str) -> dict[str, Any]:
    """An epoch's record with the validation of one task in place of the mean."""
    shared = {name: value for name, value in record.items() if name != "by_task"}
    own = record.get("by_task", {}).get(task, {})
    return shared | {f"val_{metric}": value for metric, value in own.items()}
