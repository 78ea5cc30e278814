"""A task as an ordinary module, for other trainers; `lightning` and `transformers` have callbacks for two of them."""

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
from bitgraft.training.weight_sizes import weight_sizes


class TaskModel(nn.Module):
    """One task of a network, with the backbone's call signature.

        model = TaskModel(net, "flowers")
        optimizer = model.optimizer()

    Its parameters and state dict are only the task's, so a trainer's checkpoints do not contain the backbone. The
    callback for the trainer anneals masks and processes gradients as `fit` does.

    Args:
        config: changes to the preset that the task was added with; the trainer decides the length and the schedule.
    """

    accepts_loss_kwargs = False  # otherwise Hugging Face's Trainer passes some to the backbone

    def __init__(self, net: Network, name: str, config: Config | None = None) -> None:
        super().__init__()
        self.task = trainable(net, name)
        method = registry.get(self.task.metadata.method)
        if method.joint or len(method.phases) > 1:
            raise TrainingError(f"method {method.name!r} needs its own training loop: use bitgraft.fit")
        self._net = (net,)  # in a tuple, so that it is not a submodule
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
        """AdamW with the configured rates, one per parameter group."""
        config, sizes = self._settings.changed(optimizers=dict.fromkeys(ROLES, "adam")), weight_sizes({"": self.task})
        return optimizers.build(self.task.roles(), config, registry.Phase(), sizes)[0]

    def before_step(self, step: int, steps: int) -> None:
        """Anneal the masks; `steps` is the length of the run."""
        self.task.set_hardness(optimizers.hardness(self._settings, step, steps))

    def before_optimizer(self, optimizer: Any) -> None:
        """Centralise and clip gradients as configured; does nothing for an optimiser that `optimizer` did not make."""
        optimizers.centralize_gradients([optimizer])
        optimizers.clip_to_ema_norm([optimizer])

    def finish(self, path: str | Path) -> None:
        """Round the trained task and write its file."""
        self.task.holds_statistics = False
        self._net[0].save_task(compact(self.task).name, path)
