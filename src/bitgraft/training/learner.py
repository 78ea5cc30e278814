"""What a process trains: tasks and nothing else, so that only what they learn is reduced between processes."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from bitgraft.backbone.tracing import logits
from bitgraft.errors import TrainingError
from bitgraft.network import Network
from bitgraft.task import Task
from bitgraft.training import cpu
from bitgraft.training.batches import call, rows, to_device
from bitgraft.training.joint import SHARED, Shared, shared_weights
from bitgraft.training.loader import Turn, Turns
from bitgraft.training.processes import gathered, random_state, set_random_state

Loss = Callable[[Any, Any], Tensor] | Literal["model"]
"""(what the network gives, what the data says) -> the mean loss of a batch; "model": the network computes it."""
IGNORED = -100  # a label that counts for nothing, as in torch's cross entropy
Values = dict[str, dict[str, Tensor]]
"""What each task holds, and what they share, by name and on the CPU."""


class Learner(nn.Module):
    """What learns as the only children; the network is held out of sight of whoever collects parameters."""

    def __init__(self, net: Network, tasks: Iterable[Task]) -> None:
        super().__init__()
        self._net, self.tasks = (net,), {task.name: task for task in tasks}
        self.shared = shared_weights(net, self.tasks)
        self.parts: Mapping[str, Task | Shared] = self.tasks
        if self.shared is not None:
            self.parts = {**self.tasks, SHARED: self.shared}
        self._learned = nn.ModuleList(self.parts.values())

    def forward(self, inputs: Any, task: str, targets: Any = None) -> Any:
        task_module = self._net[0].ready(task)
        with cpu.fast_convolutions(self._net[0].anatomy.device):
            return call(task_module, inputs, targets)

    def roles(self) -> list[tuple[str, nn.Parameter]]:
        """Everything that learns, with its role."""
        return [pair for part in self.parts.values() for pair in part.roles()]

    def values(self) -> Values:
        """A copy of what there is to keep."""
        copied: Values = {}
        for name, part in self.parts.items():
            copied[name] = {key: tensor.detach().cpu().clone() for key, tensor in part.state_dict().items()}
        return copied

    def restore(self, values: Values) -> None:
        """Go back to what `values` gave."""
        for name, part in self.parts.items():
            part.load_state_dict(values[name])

    def is_finite(self) -> bool:
        held = [tensor for part in self.parts.values() for tensor in part.state_dict().values()]
        floats = [tensor for tensor in held if isinstance(tensor, Tensor) and tensor.is_floating_point()]
        return bool(torch.stack([tensor.isfinite().all() for tensor in floats]).all())

    def release(self) -> None:
        """Leave tasks to normalise as they would without us, and the backbone out of reach."""
        for task in self.tasks.values():
            task.holds_statistics = False
            task.set_hardness(1.0)
            cpu.set_channels_last(task, False)
            task._fold_mean_shift()
        if self.shared is not None:
            self.shared.release(self.tasks)


class Objective:
    """Cross entropy with its usual options, or a loss of the user's own; always the sum over a batch."""

    def __init__(self, tasks: Collection[Task], loss: Loss | None = None, label_smoothing: float = 0.0) -> None:
        self.loss, self.label_smoothing = loss, label_smoothing
        self.outputs = {task.name: len(task.classes) if task.classes is not None else None for task in tasks}
        self.weights: dict[str, Tensor | None] = dict.fromkeys(self.outputs)
        for task in tasks if loss == "model" else ():
            check_takes_targets(task.anatomy.backbone)

    def weigh(
        self, task: str, weights: Literal["balanced"] | tuple[float, ...], data: Any, device: torch.device
    ) -> None:
        """Give each class its weight: those stated, or the inverse of how often it comes."""
        if weights == "balanced":
            labels, outputs = getattr(data, "labels", None), self.outputs[task]
            if labels is None or outputs is None:
                raise TrainingError("class_weights='balanced' needs a data set with a list `labels`: give the weights")
            self.weights[task] = balanced(torch.as_tensor(labels), outputs).to(device)
        else:
            self.weights[task] = torch.tensor(weights, device=device)

    def given(self, targets: Any) -> Any:
        """The targets, where the network takes them to compute its own loss."""
        return targets if self.loss == "model" else None

    def __call__(self, task: str, output: Any, target: Any) -> Tensor:
        if self.loss is not None:
            return (models_own(output) if self.loss == "model" else self.loss(output, target)) * len(target)
        scores, weights = logits(output).float(), self.weights[task]
        how = "sum" if target.dim() == 1 else "mean"  # labels of pixels or words: a mean over those of the batch
        loss = F.cross_entropy(scores, target, weights, label_smoothing=self.label_smoothing, reduction=how)
        return loss if how == "sum" else loss * len(target)

    def correct(self, output: Any, target: Any) -> Tensor:
        """How many answers are right (of pixels, the share times the images); none where the loss is another."""
        if self.loss is not None:
            return torch.zeros((), device=next(t.device for t in tree_leaves(output) if isinstance(t, Tensor)))
        right = logits(output).argmax(1) == target
        share: Tensor = right.sum() / (target != IGNORED).sum().clamp(min=1) * len(target)
        return right.sum() if target.dim() == 1 else share

    def check(self, task: str, targets: Any, what: str) -> None:
        """Refuse labels that the head has no output for, while they are still on the CPU."""
        outputs = self.outputs[task]
        if self.loss is not None or outputs is None or not isinstance(targets, Tensor) or not targets.numel():
            return
        counted = targets if targets.dim() == 1 else targets[targets != IGNORED]
        low, high = (int(counted.min()), int(counted.max())) if counted.numel() else (0, 0)
        if low < 0 or high >= outputs:
            raise TrainingError(
                f"{what} has the label {low if low < 0 else high}, but task {task!r} has {outputs} classes, numbered "
                "from 0: add the task with as many classes as the data has"
            )


def check_takes_targets(backbone: nn.Module) -> None:
    if len(taken := inspect.signature(backbone.forward).parameters) < 2:
        raise TrainingError(
            f"loss='model' needs a network that takes the targets, too, and {type(backbone).__name__} takes only "
            f"{', '.join(taken)}: pass a function of its output and the targets as the loss"
        )


def models_own(output: Any) -> Tensor:
    """The loss that a network gives along with its scores (transformers), or the sum of several (detectors)."""
    held = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if (
        held is None
        and isinstance(output, Mapping)
        and all(isinstance(v, Tensor) and not v.dim() for v in output.values())
    ):
        held = sum(output.values())
    if not isinstance(held, Tensor):
        raise TrainingError(
            f"loss='model' needs a network that gives a loss, and this one gives a {type(output).__name__}: pass a "
            "function as the loss; a detector gives none in evaluation mode, so leave out the validation data"
        )
    return held


def balanced(labels: Tensor, classes: int) -> Tensor:
    """Weights inverse to how often a class comes, with mean one over the images."""
    counts = torch.bincount(labels, minlength=classes).clamp(min=1)
    return labels.numel() / (classes * counts.float())


def trainable(net: Network, name: str) -> Task:
    """The task of that name, if there is something in it to learn."""
    task = net.tasks.get(name)
    if task is None:
        raise TrainingError(f"there is no task {name!r} to train: add it first, net.add_task({name!r}, classes=...)")
    if not any(True for _ in task.roles()):
        raise TrainingError(
            f"task {name!r} is frozen (it was loaded from a file, or has been trained): add it anew to train it"
        )
    return task


def takes_batch_statistics(task: Task) -> bool:
    """Some batch norm in the task normalises by the batch in training."""
    return not task.holds_statistics and any(name.endswith(".running_mean") for name in task.owned)


def distributed(learner: Learner, turns: Turns, objective: Objective, accelerator: Accelerator) -> Any:
    """The learner as the processes train it; DDP looks for parameters without a gradient only where there are some."""
    if accelerator.num_processes == 1 or accelerator.ddp_handler is not None:
        return accelerator.prepare(learner)
    some = len(learner.tasks) > 1 or any(gathered(_unused(learner, turns, objective, accelerator), accelerator))
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=some)
    try:
        return accelerator.prepare(learner)
    finally:
        accelerator.ddp_handler = None


def _unused(learner: Learner, turns: Turns, objective: Objective, accelerator: Accelerator) -> bool:
    """Some parameter gets no gradient from the first images: a layer of the backbone never runs. Nothing is changed."""
    return trial_step(learner, next(turns.from_step(0, 0)), objective, accelerator, images=2)


def trial_step(
    learner: Learner, turn: Turn, objective: Objective, accelerator: Accelerator, images: int | None = None
) -> bool:
    """A step of which nothing stays, on these first images; whether some parameter got no gradient."""
    device = accelerator.device
    objective.check(turn.task, turn.batch[1], turn.what)
    inputs, targets = (to_device(rows(part, slice(images)), device) for part in turn.batch)
    task, randomness = learner.tasks[turn.task].train(), random_state(device)
    held, task.holds_statistics = task.holds_statistics, True
    with accelerator.autocast():
        loss = objective(task.name, learner(inputs, task.name, objective.given(targets)), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    task.holds_statistics = held
    set_random_state(randomness, device)
    found = any(parameter.grad is None for _, parameter in learner.roles())
    learner.zero_grad()
    return found
