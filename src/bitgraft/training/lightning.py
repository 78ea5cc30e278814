"""Train a task with Lightning."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from bitgraft.training.task_model import TaskModel


class TaskCallback(Callback):
    """For a LightningModule with a `TaskModel`: prepare each step as `fit` does; write the task file at the end."""

    def __init__(self, model: TaskModel, path: str | Path) -> None:
        self.model, self.path = model, path

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.model.before_step(trainer.global_step, int(trainer.estimated_stepping_batches))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.model.before_optimizer(optimizer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.model.finish(self.path)
