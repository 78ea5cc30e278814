"""A fine-tuned copy of a backbone as a task in few bits: without data, and calibrated where there are images."""

import glob
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitgraft.backbone.layers import COUNTER
from bitgraft.compression.distil import CALIBRATION, calibrate
from bitgraft.compression.input_means import input_means, output_scale
from bitgraft.compression.source import Classes, Finetuned, opened, values
from bitgraft.format.rounding import compact, meet
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.task import Task
from bitgraft.training.callbacks import Callback
from bitgraft.training.config import Config
from bitgraft.training.evaluation import evaluate
from bitgraft.training.mean_shift_correction import corrected_weights
from bitgraft.transforms.levels import Levels

METHOD, BITS = "full", 1.0
ALIKE = 0.5  # below this cosine, a copy was hardly fine-tuned from the backbone


@dataclass
class Compression:
    """A compressed task, and how close it comes to the fine-tuned copy."""

    task: Task
    kept: float
    """The share of what fine-tuning changed in the transformed weights that the task has, by squared norm."""
    cosine: float
    """Between the transformed weights of the copy and of the backbone."""
    accuracy: dict[str, float] = field(default_factory=dict)
    """Of the copy ("finetuned"), the task made without data ("compressed"), and "calibrated"; empty without data."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One record per epoch of calibration."""

    @property
    def warnings(self) -> list[str]:
        if self.cosine >= ALIKE:
            return []
        return [
            f"the copy's weights have little in common with the backbone's (cosine {self.cosine:.2f}): was it "
            "fine-tuned from these?"
        ]


def compress(
    net: Network,
    name: str,
    finetuned: Finetuned,
    classes: Classes | None = None,
    *,
    preprocessing: Mapping[str, Any] | None = None,
    calibrate_on: Any = None,
    config: Config = CALIBRATION,
    bits: float = BITS,
    test: Any = None,
    callbacks: Sequence[Callback] = (),
    workers: int = 0,
    **options: Any,
) -> Compression:
    """Add a task that is as close as possible to a fine-tuned copy of the backbone, in so many bits per weight.

    Each transformed weight changes by whole steps, most of them none, and norm layers by finer ones (method `full` with
    `bits`). Their biases make up for what rounding does to the mean of each channel, found without data. The head and
    whatever else the copy changed are copied. The task is frozen.

    Args:
        finetuned: a task of the network, a module of the backbone's class or its state dict; or a file of plain
            weights, a task file, or "STORE/TASK".
        classes: names in the order of the copy's outputs, if it does not state them.
        preprocessing: if the copy does not state it; by default the backbone's.
        calibrate_on: a Dataset of (image, anything): weights and norm layers are trained to give the copy's scores.
        config: of this calibration.
        bits: what the file takes for each transformed weight, head apart.
        test: a Dataset of (image, label) on which the copy and the task are evaluated.
        **options: of method `full`.
    """
    with opened(net, finetuned, classes, preprocessing) as copy:
        made = _opened(net, name, copy, classes, {**options, "bits": bits})

        def measure(what: str, task: str) -> None:
            if test is not None:
                made.accuracy[what] = evaluate(net, task, test, workers=workers)["accuracy"]

        try:
            measure("finetuned", copy.name)
            if calibrate_on is not None:
                meet(made.task)
                made.history = calibrate(net, name, copy.name, calibrate_on, config, callbacks, workers)
            compact(made.task)
            measure("compressed" if calibrate_on is None else "calibrated", name)
            made.kept = _kept(made.task, values(copy))
        except BaseException:
            net.remove_task(name)
            raise
    reached = {f"accuracy_{what}": value for what, value in made.accuracy.items()}
    made.task.metrics = {"compressed": {"kept": made.kept, **reached}}
    if reached:  # "test" is how the task does now, as after training
        made.task.metrics["test"] = {"accuracy": list(reached.values())[-1]}
    return made


@torch.no_grad()
def _opened(net: Network, name: str, copy: Task, classes: Classes | None, options: Mapping[str, Any]) -> Compression:
    """The task that still has all of the copy's change, with biases that will follow the change as it is rounded."""
    target, metadata = values(copy), copy.metadata
    head: Any = {"keep": "keep", "none": None, "module": deepcopy(copy.head)}.get(metadata.head, "auto")
    task = net.add_task(
        name,
        classes if classes is not None else metadata.classes,
        METHOD,
        preset=None,
        head=head,
        preprocessing=metadata.preprocessing,
        **_with_own(net, target, options),
    )
    for part, tensor in task.owned.items():
        tensor.copy_(target[part])
    if task.head is not None and copy.head is not None:
        task.head.load_state_dict(copy.head.state_dict())
    pairs = []
    for part, transform in task.transforms.items():
        assert isinstance(transform, Levels)
        assert transform.scores is not None
        ours = net.anatomy.tensor(part).detach()
        transform.scores.copy_(target[part] - ours)
        pairs.append((ours.double().flatten(), target[part].double().flatten()))
    _follow(task, target)
    return Compression(task.eval(), 1.0, _cosine(pairs))


def _follow(task: Task, target: Mapping[str, Tensor]) -> None:
    """Let biases of norm layers make up for what is left out of the change."""
    means = input_means(task, corrected_weights(task), target)
    for name, mean in means.items():
        change = (target[name] - task.anatomy.tensor(name).detach()) * mean
        bias = task.owned[f"{task.anatomy.weights[name].feeds}.bias"]
        bias += (change.flatten(1).sum(1) * output_scale(task, name, target)).to(bias.dtype)
    task.correct_mean_shift(means)


def _cosine(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    product, ours, theirs = (
        sum(float(a @ b) for a, b in some) for some in (pairs, [(w, w) for w, _ in pairs], [(t, t) for _, t in pairs])
    )
    scale = math.sqrt(ours * theirs)
    return product / scale if scale else 1.0


def _kept(task: Task, target: Mapping[str, Tensor]) -> float:
    left = change = 0.0
    made, ours = task.tensors(), task.anatomy.tensors()
    for name in (name for name, transform in task.transforms.items() if target[name].dim() > 1):
        left += float((target[name].double() - made[name].double()).square().sum())
        change += float((target[name].double() - ours[name].detach().double()).square().sum())
    return 1 - left / change if change else 1.0


def _with_own(net: Network, target: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with everything owned that the copy changed and method `full` would share, such as biases."""
    anatomy, method = net.anatomy, registry.get(METHOD)
    chosen = method.with_options(options)
    taken = {*registry.owned_names(method, anatomy, chosen), *anatomy.weights, *anatomy.head_names()}
    shared = {name: anatomy.tensor(name).detach() for name in anatomy.places if name not in taken}
    changed = [
        glob.escape(name)  # a pattern that matches the name alone
        for name, tensor in shared.items()
        if not name.endswith(COUNTER) and not torch.equal(tensor.to(target[name].dtype), target[name])
    ]
    return {**options, "own": (*chosen.own, *changed)}
