"""Train a task with Hugging Face's Trainer."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from bitgraft.training.task_model import TaskModel


class TaskCallback(TrainerCallback):
    """For a Trainer of a `TaskModel`: prepare each step as `fit` does; write the task file at the end."""

    def __init__(self, model: TaskModel, path: str | Path) -> None:
        self.model, self.path = model, path

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.model.before_step(state.global_step, state.max_steps)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.model.before_optimizer(kwargs["optimizer"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self.model.finish(self.path)
