"""A fine-tuned copy of a backbone as a task of method `full`: in closed form, and calibrated where there are images."""

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
from bitgraft.compression.nearest import balancing_flips, nearest
from bitgraft.compression.source import Classes, Finetuned, opened, values
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.task import Task
from bitgraft.training.callbacks import Callback
from bitgraft.training.config import Config
from bitgraft.training.evaluation import evaluate
from bitgraft.transforms.masked import Masked

METHOD = "full"
ALIKE = 0.5  # below this cosine, a copy was hardly fine-tuned from the backbone


@dataclass
class Compression:
    """A compressed task, and how close it comes to the fine-tuned copy."""

    task: Task
    kept: float
    """The share of what fine-tuning changed in the transformed weights that the task has, by squared norm, before any
    calibration."""
    cosine: float
    """Between the transformed weights of the copy and of the backbone."""
    accuracy: dict[str, float] = field(default_factory=dict)
    """Of the copy ("finetuned"), the task in closed form ("compressed"), and "calibrated"; empty without data."""
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
    masks: bool = False,
    test: Any = None,
    callbacks: Sequence[Callback] = (),
    workers: int = 0,
    **options: Any,
) -> Compression:
    """Add a task of method `full` that is as close as possible to a fine-tuned copy of the backbone.

    Norm layers, the head and whatever else the copy changed are copied. Each transformed weight gets the mask and k
    with the least squared error, except for a few bits that make errors cancel in each filter. The task can be trained
    further (`bitgraft.fit`).

    Args:
        finetuned: a task of the network, a module of the backbone's class or its state dict; or a file of plain
            weights, a task file, or "STORE/TASK".
        classes: names in the order of the copy's outputs, if it does not state them.
        preprocessing: if the copy does not state it; by default the backbone's.
        calibrate_on: a Dataset of (image, anything): k and norm layers are trained to give the copy's scores.
        config: of this calibration.
        masks: calibrate the masks, too.
        test: a Dataset of (image, label) on which the copy and the task are evaluated.
        **options: of method `full`. k0 is learned in every layer by default: norm layers have the copy's statistics,
            so none of them undoes a scale.
    """
    with opened(net, finetuned, classes, preprocessing) as copy:
        made = _in_closed_form(net, name, copy, classes, options)

        def measure(what: str, task: str) -> None:
            if test is not None:
                made.accuracy[what] = evaluate(net, task, test, workers=workers)["accuracy"]

        try:
            measure("finetuned", copy.name)
            measure("compressed", name)
            if calibrate_on is not None:
                made.history = calibrate(
                    net, name, copy.name, calibrate_on, config, masks=masks, callbacks=callbacks, workers=workers
                )
                measure("calibrated", name)
        except BaseException:
            net.remove_task(name)
            raise
    reached = {f"accuracy_{what}": value for what, value in made.accuracy.items()}
    made.task.metrics = {"compressed": {"kept": made.kept, **reached}}
    if reached:  # "test" is how the task does now, as after training
        made.task.metrics["test"] = {"accuracy": list(reached.values())[-1]}
    return made


def _in_closed_form(
    net: Network, name: str, copy: Task, classes: Classes | None, options: Mapping[str, Any]
) -> Compression:
    """The task in closed form, ready to be trained."""
    target, metadata = values(copy), copy.metadata
    head: Any = {"keep": "keep", "none": None, "module": deepcopy(copy.head)}.get(metadata.head, "auto")
    task = net.add_task(
        name,
        classes if classes is not None else metadata.classes,
        METHOD,
        preset=None,
        head=head,
        preprocessing=metadata.preprocessing,
        **_with_own(net, target, {"k0": "learn", **options}),
    )
    with torch.no_grad():
        for part, tensor in task.owned.items():
            tensor.copy_(target[part])
        if task.head is not None and copy.head is not None:
            task.head.load_state_dict(copy.head.state_dict())
        sums = torch.zeros(5, dtype=torch.float64)
        for part, transform in task.transforms.items():
            assert isinstance(transform, Masked)
            sums += _fit(transform, net.anatomy.tensor(part).detach(), target[part])
    change, left, mine, theirs, product = sums.tolist()
    scale = math.sqrt(mine * theirs)
    kept = 1 - left / change if change else 1.0
    return Compression(task.eval(), kept, product / scale if scale else 1.0)


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


def _fit(transform: Masked, weight: Tensor, target: Tensor) -> Tensor:
    """Give a transform the nearest mask and k; returns |D|², |T - W~|², |T|², |W|² and T·W."""
    about, rule = transform.weight, transform.rule
    ours, theirs = (about.filters(tensor).cpu() for tensor in (weight, target))
    rows = ours.shape if rule.per_channel else (1, -1)
    found = nearest(ours.reshape(rows), theirs.reshape(rows), rule.fixed)
    mask, margin = found.mask.view(ours.shape), found.margin.view(ours.shape)
    mask ^= balancing_flips(ours, theirs, found.k, mask)
    transform.start_at(about.from_filters(scores_of(mask, margin, rule.threshold)), found.k)
    w, t, made = weight.double(), target.double(), transform(weight).double()
    pairs = ((t - w, t - w), (t - made, t - made), (t, t), (w, w), (t, w))
    return torch.stack([(a * b).sum() for a, b in pairs]).cpu()


def scores_of(mask: Tensor, margin: Tensor, threshold: float) -> Tensor:
    """R, as far from the threshold as the weight is from where its bit would change, and never on it."""
    least = 1e-6 * max(1.0, abs(threshold))
    return threshold + torch.where(mask, 1.0, -1.0) * margin.clamp(min=least)
