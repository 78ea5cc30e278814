"""How long a run takes: epochs from the settings, the data and, if asked for, the time that a step takes."""

import time
from collections.abc import Sequence

import torch
from accelerate import Accelerator

from bitgraft.errors import TrainingError
from bitgraft.methods.registry import Phase
from bitgraft.training.callbacks import Plan
from bitgraft.training.checkpoint import Position
from bitgraft.training.config import Config
from bitgraft.training.learner import Learner, Objective, trial_step
from bitgraft.training.loader import Turns
from bitgraft.training.processes import from_main

EPOCHS, SEVERAL, MANY = 30, 5, 100
"""Passes over the data that are enough; the fewest, however large it is; and the most, however small."""
LEAST, PER_CLASS, MOST = 1000, 10, 4000
"""Steps: small data sets get LEAST and PER_CLASS more for each class; large ones MOST, or SEVERAL epochs."""
OVERHEAD = 1.1  # validation and checkpoints, beside the steps


def auto_epochs(steps_per_epoch: float, classes: int) -> int:
    """The budget that follows the data, where the settings have steps="auto"."""
    steps = min(max(EPOCHS * steps_per_epoch, LEAST + PER_CLASS * classes), MOST)
    return min(MANY, max(SEVERAL, round(steps / steps_per_epoch)))


def planned_epochs(config: Config, steps_per_epoch: float, classes: int, seconds_per_step: float | None) -> int:
    """Epochs of a whole run; `steps_per_epoch` is that of one task in the mean."""
    if config.minutes is not None and seconds_per_step is not None:
        epoch = seconds_per_step * steps_per_epoch * OVERHEAD
        if (epochs := int(60 * config.minutes / epoch)) < 1:
            raise TrainingError(
                f"an epoch takes about {epoch / 60:.1f} minutes here, more than the {config.minutes:g} that it may: "
                "allow more minutes, or train at a smaller image size"
            )
        return epochs
    if config.steps == "auto":
        return auto_epochs(steps_per_epoch, classes)
    return config.epochs if config.steps is None else max(1, round(config.steps / steps_per_epoch))


def plan(
    config: Config,
    phases: Sequence[Phase],
    learner: Learner,
    turns: Turns,
    objective: Objective,
    at: Position,
    accelerator: Accelerator,
) -> Plan:
    """How long a run is going to be, noted in `at`; a resumed one keeps to what is noted there.

    A step is timed where the user has not said how many there shall be.
    """
    timed = config.minutes is not None or config.steps == "auto"
    seconds = seconds_per_step(learner, turns, objective, accelerator) if timed else None
    each = len(turns) / len(learner.tasks)  # together tasks see as many images as they would apart
    classes = max(count or 0 for count in objective.outputs.values())
    at.epochs = at.epochs or planned_epochs(config, each, classes, seconds)
    whole = sum(share_of(at.epochs, phase, phases) for phase in phases)
    return Plan(list(learner.tasks), whole, len(turns), at.epochs_done, seconds)


def share_of(epochs: int, phase: Phase, phases: Sequence[Phase]) -> int:
    """A run's epochs, shared out between phases in the proportion of their own."""
    if phase.epochs is None:
        return epochs
    return max(1, round(epochs * phase.epochs / sum(one.epochs or 0 for one in phases)))


def seconds_per_step(learner: Learner, turns: Turns, objective: Objective, accelerator: Accelerator) -> float:
    """Of the main process, measured on the first batch of each task; nothing is learned."""
    took = []
    for name in learner.tasks:
        turn = next(turn for turn in turns.from_step(0, 0) if turn.task == name)
        for _ in range(2):  # the first one also sets up memory
            began = time.perf_counter()
            trial_step(learner, turn, objective, accelerator)
            if accelerator.device.type != "cpu":
                torch.accelerator.synchronize()
        took.append(time.perf_counter() - began)
    return from_main(sum(took) / len(took), accelerator)
