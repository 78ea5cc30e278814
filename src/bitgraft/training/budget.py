"""How many epochs a run takes, from the settings, the data and, if needed, the measured time of a step."""

import time
from collections.abc import Sequence

import torch

from bitgraft.errors import TrainingError
from bitgraft.methods.registry import Phase
from bitgraft.training.callbacks import Plan
from bitgraft.training.checkpoint import Position
from bitgraft.training.config import Config
from bitgraft.training.learner import Learner
from bitgraft.training.loader import InterleavedLoader
from bitgraft.training.presets import QUICK
from bitgraft.training.processes import from_main

TARGET_EPOCHS, MIN_EPOCHS, MAX_EPOCHS = 30, 5, 100
MIN_STEPS, STEPS_PER_CLASS, MAX_STEPS = 1000, 10, 4000
OVERHEAD = 1.1  # for validation and checkpoints


def auto_epochs(steps_per_epoch: float, classes: int) -> int:
    """The epochs of steps="auto": TARGET_EPOCHS, within bounds on the steps and then on the epochs."""
    steps = min(max(TARGET_EPOCHS * steps_per_epoch, MIN_STEPS + STEPS_PER_CLASS * classes), MAX_STEPS)
    return min(MAX_EPOCHS, max(MIN_EPOCHS, round(steps / steps_per_epoch)))


def planned_epochs(config: Config, steps_per_epoch: float, classes: int, seconds_per_step: float | None) -> int:
    """Epochs of a whole run; `steps_per_epoch` is the mean over the tasks."""
    if config.minutes is not None and seconds_per_step is not None:
        epoch = seconds_per_step * steps_per_epoch * OVERHEAD
        if (epochs := int(60 * config.minutes / epoch)) < 1:
            raise TrainingError(
                f"an epoch takes about {epoch / 60:.1f} minutes here, but minutes={config.minutes:g}: allow more, or "
                "train at a smaller image size"
            )
        return epochs
    if config.steps == "auto":
        return auto_epochs(steps_per_epoch, classes)
    if config.steps is None:
        return config.epochs
    epochs = max(1, round(config.steps / steps_per_epoch))
    return min(MAX_EPOCHS, epochs) if config.steps == QUICK.steps else epochs  # a first try with few images


def plan(
    config: Config, phases: Sequence[Phase], learner: Learner, train_loader: InterleavedLoader, at: Position
) -> Plan:
    """Plan a run and set `at.epochs`; a resumed run keeps its `at.epochs`.

    Steps are timed if the user did not choose how many to run.
    """
    timed = config.minutes is not None or config.steps == "auto"
    seconds = seconds_per_step(learner, train_loader) if timed else None
    steps_per_task = len(train_loader) / len(learner.tasks)  # a task sees as many images as if trained alone
    classes = max(len(task.classes or ()) for task in learner.tasks.values())
    at.epochs = at.epochs or planned_epochs(config, steps_per_task, classes, seconds)
    epochs = sum(share_of(at.epochs, phase, phases) for phase in phases)
    return Plan(list(learner.tasks), epochs, len(train_loader), at.epochs_done, seconds)


def share_of(epochs: int, phase: Phase, phases: Sequence[Phase]) -> int:
    """A phase's share of a run's epochs, in proportion to the method's own phase lengths."""
    if phase.epochs is None:
        return epochs
    return max(1, round(epochs * phase.epochs / sum(one.epochs or 0 for one in phases)))


def seconds_per_step(learner: Learner, train_loader: InterleavedLoader) -> float:
    """The mean time of a step over the tasks, measured in the main process on each task's first batch."""
    seconds = []
    for loader in train_loader.loaders.values():
        batch = next(loader.from_step(0, 0))
        for _ in range(2):  # the first one warms up
            began = time.perf_counter()
            learner.dry_run(batch)
            if learner.accelerator.device.type != "cpu":
                torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - began)
    return from_main(sum(seconds) / len(seconds), learner.accelerator)
