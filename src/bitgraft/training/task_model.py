"""A task as an ordinary module, for other people's trainers. Callbacks for two of them: `lightning`, `transformers`."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitgraft.errors import TrainingError
from bitgraft.format.rounding import compact
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.training import optimizers
from bitgraft.training.config import ROLES, Config
from bitgraft.training.learner import trainable
from bitgraft.training.presets import preset


class TaskModel(nn.Module):
    """One task of a network, called as the backbone is.

        model = TaskModel(net, "flowers")
        optimizer = model.optimizer()

    Its parameters and its state dict are the task's alone, so a trainer's checkpoints hold nothing of the backbone. The
    trainer's callback does between steps what `fit` does.

    Args:
        config: what to change in the preset that the task was added with; how long to train and the schedule of rates
            are the trainer's.
    """

    accepts_loss_kwargs = False  # Hugging Face's Trainer would pass some to the backbone

    def __init__(self, net: Network, name: str, config: Config | None = None) -> None:
        super().__init__()
        self.task = trainable(net, name)
        method = registry.get(self.task.metadata.method)
        if method.joint or len(method.phases) > 1:
            raise TrainingError(f"method {method.name!r} has its own way of training: use bitgraft.fit")
        self._net = (net,)  # out of sight of whoever collects parameters
        self._settings = (config or Config()).over(preset(self.task.preset, method.name))
        self.task.holds_statistics = self._settings.statistics == "kept"
        if self._settings.scale_k2_by_r:
            self.task.scale_k2_by_r(self._settings.scale_k2_by_r, self._settings.seed)
        self.train()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._net[0](*inputs, task=self.task.name, **named)

    def _apply(self, fn: Any, recurse: bool = True) -> "TaskModel":
        self._net[0]._apply(fn, recurse)  # the task is part of it
        return self

    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW with a group for each role, at the rates of the settings."""
        config = self._settings.changed(optimizers=dict.fromkeys(ROLES, "adam"))
        return optimizers.build(self.task.roles(), config, registry.Phase())[0]

    def before_step(self, step: int, steps: int) -> None:
        """Let masks form, at a step of a run of so many."""
        self.task.set_hardness(optimizers.hardness(self._settings, step, steps))

    def before_optimizer(self, optimizer: Any) -> None:
        """Bring gradients into shape, as the settings say; nothing for an optimiser of your own."""
        optimizers.centralize_gradients([optimizer])
        optimizers.clip_to_ema_norm([optimizer])

    def finish(self, path: str | Path) -> None:
        """End of learning: round the task and write its file."""
        self.task.holds_statistics = False
        self._net[0].save_task(compact(self.task).name, path)
