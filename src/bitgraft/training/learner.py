"""What training updates and what it minimises: `Learner` holds the parameters, `Objective` computes the loss."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, gather_object
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from bitgraft.backbone.tracing import logits
from bitgraft.errors import TrainingError
from bitgraft.network import Network
from bitgraft.task import Task
from bitgraft.training import cpu
from bitgraft.training.batches import batch_size, call_model, take_rows, to_device
from bitgraft.training.joint import SHARED, Shared, shared_weights
from bitgraft.training.loader import InterleavedLoader, StepBatch
from bitgraft.training.processes import random_state_kept
from bitgraft.transforms.bits import is_finite

Loss = Callable[[Any, Any], Tensor] | Literal["model"]
"""(output, targets) -> the mean loss of a batch; "model" if the network computes it."""
IGNORED = -100  # ignore_index of torch's cross entropy
Values = dict[str, dict[str, Tensor]]
"""A state dict for each task, and for the shared weights, on the CPU."""


class Objective:
    """Cross entropy with its usual options, or the user's own loss; always the sum over a batch."""

    def __init__(self, tasks: Iterable[Task], loss: Loss | None = None, label_smoothing: float = 0.0) -> None:
        if not (loss is None or loss == "model" or callable(loss)):
            raise TrainingError(
                f"loss={loss!r}: pass a function of (output, targets), or 'model' for the network's own"
            )
        self.tasks = {task.name: task for task in tasks}
        self.loss, self.label_smoothing = loss, label_smoothing
        self.class_weights: dict[str, Tensor] = {}
        for task in self.tasks.values() if loss == "model" else ():
            backbone = task.anatomy.backbone
            if len(taken := inspect.signature(backbone.forward).parameters) < 2:
                raise TrainingError(
                    f"loss='model' needs a network that also takes the targets, but {type(backbone).__name__} takes "
                    f"only {', '.join(taken)}: pass a function of its output and the targets as the loss"
                )

    def set_class_weights(
        self, task: str, weights: Literal["balanced"] | tuple[float, ...] | None, data: Any, device: torch.device
    ) -> None:
        classes = self._classes(task)
        if weights == "balanced":
            labels = getattr(data, "labels", None)
            if labels is None or classes is None:
                raise TrainingError("class_weights='balanced' needs a data set with a list `labels`: give the weights")
            counts = torch.bincount(torch.as_tensor(labels), minlength=classes).clamp(min=1)
            balanced = len(labels) / (classes * counts.float())  # with a mean of 1 over the images
            self.class_weights[task] = balanced.to(device)
        elif weights is not None:
            if len(weights) != classes:
                raise TrainingError(f"{len(weights)} class weights for task {task!r}, which has {classes} classes")
            self.class_weights[task] = torch.tensor(weights, device=device)

    def run(self, module: Callable[..., Any], task: str, inputs: Any, targets: Any) -> Any:
        """The output of a module that runs the task; it gets the targets if it computes its own loss."""
        dtype = self.tasks[task].anatomy.dtype
        return call_model(module, inputs, dtype, targets if self.loss == "model" else None)

    def __call__(self, task: str, output: Any, target: Any, images: int, *, evaluating: bool = False) -> Tensor:
        """The loss of training; or without label smoothing and class weights, to compare runs that differ in these."""
        if self.loss is not None:
            return (model_loss(output) if self.loss == "model" else self.loss(output, target)) * images
        scores = self.tasks[task].anatomy.as_logits(logits(output))
        if target.shape != (needed := scores.shape[:1] + scores.shape[2:]):
            raise TrainingError(
                f"task {task!r} gives scores of shape {tuple(scores.shape)}, so labels must have the shape "
                f"{tuple(needed)}, not {tuple(target.shape)}: change them, or pass a loss that takes them"
            )
        weights, smoothing = (None, 0.0) if evaluating else (self.class_weights.get(task), self.label_smoothing)
        target = target.long()
        loss = F.cross_entropy(scores, target, weights, label_smoothing=smoothing, reduction="sum")
        if target.dim() == 1:
            return loss
        counted: Tensor = target != IGNORED  # labels per pixel or word: a mean over the batch's
        total = (counted if weights is None else weights[target.clamp(min=0)] * counted).sum()
        return loss * images / torch.where(total > 0, total, 1)  # 0 if nothing counts, where a mean would be NaN

    def num_correct(self, output: Any, target: Any) -> Tensor:
        """Correct answers in a batch; with labels per pixel, their share times the images; 0 with a custom loss."""
        if self.loss is not None:
            return torch.zeros((), device=next(t.device for t in tree_leaves(output) if isinstance(t, Tensor)))
        correct: Tensor = (logits(output).argmax(1) == target).sum()
        if target.dim() > 1:
            correct = correct / (target != IGNORED).sum().clamp(min=1) * len(target)
        return correct

    def check_labels(self, task: str, targets: Any, data_name: str) -> None:
        """Refuse labels outside the head. Call it while targets are on the CPU."""
        if self.loss is not None:
            return
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            found = f"of type {targets.dtype}" if isinstance(targets, Tensor) else f"in a {type(targets).__name__}"
            raise TrainingError(
                f"{data_name} has labels {found}, not a tensor of class numbers: number the classes from 0, or pass a "
                "loss that takes such labels"
            )
        if (classes := self._classes(task)) is None:
            return
        labels = targets if targets.dim() == 1 else targets[targets != IGNORED]
        low, high = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
        if low < 0 or high >= classes:
            raise TrainingError(
                f"{data_name} has the label {low if low < 0 else high}, but task {task!r} has {classes} classes: "
                "number labels from 0, and add the task with as many classes as the data"
            )

    def _classes(self, task: str) -> int | None:
        classes = self.tasks[task].classes
        return None if classes is None else len(classes)


class Learner(nn.Module):
    """The trained tasks as a module, and how they are run. The network is not a submodule, so DDP reduces only the
    tasks' parameters."""

    def __init__(self, net: Network, objective: Objective, accelerator: Accelerator) -> None:
        super().__init__()
        self._net, self.objective, self.accelerator = (net,), objective, accelerator
        self.tasks = objective.tasks
        self.shared = shared_weights(net, self.tasks)
        self.parts: Mapping[str, Task | Shared] = self.tasks
        if self.shared is not None:
            self.parts = {**self.tasks, SHARED: self.shared}
        self._learned = nn.ModuleList(self.parts.values())

    @property
    def net(self) -> Network:
        return self._net[0]

    def forward(self, task: str, inputs: Any, targets: Any) -> Any:
        with cpu.fast_convolutions(self.accelerator.device):
            return self.objective.run(self.net.ready(task), task, inputs, targets)

    def roles(self) -> list[tuple[str, nn.Parameter]]:
        return [pair for part in self.parts.values() for pair in part.roles()]

    def values(self) -> Values:
        """A copy of all state dicts."""
        copied: Values = {}
        for name, part in self.parts.items():
            copied[name] = {key: tensor.detach().cpu().clone() for key, tensor in part.state_dict().items()}
        return copied

    def restore(self, values: Values) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(values[name])

    def is_finite(self) -> bool:
        """Whether all values are finite, in all processes."""
        held = [tensor for part in self.parts.values() for tensor in part.state_dict().values()]
        floats = [tensor for tensor in held if isinstance(tensor, Tensor) and tensor.is_floating_point()]
        return all(gather_object([bool(torch.stack([is_finite(tensor) for tensor in floats]).all())]))

    def release(self) -> None:
        """Undo what training set on the tasks, and freeze the backbone again."""
        for task in self.tasks.values():
            task.holds_statistics = False
            task.set_hardness(1.0)
            cpu.set_channels_last(task, False)
            task._fold_mean_shift()
        if self.shared is not None:
            self.shared.release(self.tasks)

    def distributed(self, train_loader: InterleavedLoader) -> Any:
        """This module, for several processes in DDP, which looks for unused parameters only if there are some."""
        accelerator = self.accelerator
        if accelerator.num_processes == 1 or accelerator.ddp_handler is not None:
            return accelerator.prepare(self)
        find_unused = len(self.tasks) > 1
        if not find_unused:
            unused = self.dry_run(next(train_loader.from_step(0, 0)), images=2)
            find_unused = any(gather_object([unused]))
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=find_unused)
        try:
            return accelerator.prepare(self)
        finally:
            accelerator.ddp_handler = None

    def dry_run(self, batch: StepBatch, images: int | None = None) -> bool:
        """Run a forward and backward pass that changes nothing; return whether some parameter got no gradient."""
        device, objective, task = self.accelerator.device, self.objective, self.tasks[batch.task].train()
        objective.check_labels(task.name, batch.targets, batch.name)
        inputs, targets = to_device([take_rows(part, slice(images)) for part in (batch.inputs, batch.targets)], device)
        held, task.holds_statistics = task.holds_statistics, True
        with random_state_kept(device):
            with self.accelerator.autocast():
                loss = objective(task.name, self(task.name, inputs, targets), targets, batch_size(inputs))
            loss.backward()  # type: ignore[no-untyped-call]
        task.holds_statistics = held
        unused = any(parameter.grad is None for _, parameter in self.roles())
        self.zero_grad()
        return unused


def model_loss(output: Any) -> Tensor:
    """The loss in a network's output (transformers), or the sum of its losses (detectors)."""
    losses = list(output.values()) if isinstance(output, Mapping) else []
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and all(isinstance(value, Tensor) and not value.dim() for value in losses):
        loss = sum(losses)  # 0, which is no tensor, if there are none
    if not isinstance(loss, Tensor):
        raise TrainingError(
            f"loss='model' needs a network that returns a loss, but this one returns a {type(output).__name__}: pass a "
            "function as the loss, or, for a detector, leave out the validation data, where it computes no loss"
        )
    return loss


def trainable(net: Network, name: str) -> Task:
    """The task of that name; an error if it is unknown or frozen."""
    task = net.tasks.get(name)
    if task is None:
        raise TrainingError(f"there is no task {name!r} to train: add it first, net.add_task({name!r}, classes=...)")
    if not any(True for _ in task.roles()):
        raise TrainingError(f"task {name!r} is frozen (loaded from a file or already trained): add it again")
    return task
