"""Compress a fine-tuned copy of a backbone to a task: round its change, then distil the copy on images or drawings."""

import glob
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from bitgraft.backbone.tracing import logits
from bitgraft.compression.distil import CALIBRATION, ON_DRAWINGS, calibrate
from bitgraft.compression.drawings import Drawings
from bitgraft.compression.input_means import input_means, output_scale
from bitgraft.compression.source import Classes, Finetuned, finetuned_task, values
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.errors import BackboneError
from bitgraft.format.rounding import compact, fit_to_bits
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.task import Task
from bitgraft.training.callbacks import Callback
from bitgraft.training.config import Config
from bitgraft.training.evaluation import evaluate
from bitgraft.training.init import corrected_weights
from bitgraft.transforms.base import COUNTER
from bitgraft.transforms.levels import Levels

METHOD, BITS = "full", 1.0
DRAWINGS: Literal["drawings"] = "drawings"
SIMILAR = 0.5  # below this cosine, the copy was probably not fine-tuned from the backbone


@dataclass
class Compression:
    """A compressed task, and how close it is to the fine-tuned copy."""

    task: Task
    kept: float
    """The share of the fine-tuned change of the transformed weights that is kept, by squared norm."""
    cosine: float
    """Between the transformed weights of the copy and of the backbone."""
    accuracy: dict[str, float] = field(default_factory=dict)
    """Of the copy ("finetuned") and of the task ("compressed", or "calibrated"); empty without test data."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One record per epoch of calibration."""
    warnings: list[str] = field(default_factory=list)


def compress(
    net: Network,
    name: str,
    finetuned: Finetuned,
    classes: Classes | None = None,
    *,
    preprocessing: Mapping[str, Any] | None = None,
    calibrate_on: Any = DRAWINGS,
    config: Config | None = None,
    bits: float = BITS,
    test: Any = None,
    callbacks: Sequence[Callback] = (),
    workers: int = 0,
    **options: Any,
) -> Compression:
    """Add a task that is as close as possible to a fine-tuned copy of the backbone, at a given number of bits.

    Each transformed weight changes by integer steps, mostly 0, and norm layers by finer ones (method `full` with
    `bits`). Rounding shifts the mean of each channel; biases of norm layers correct that shift, which is computed
    without data. The head and everything else that the copy changed are copied. Then weights and norm layers learn the
    copy's scores by distillation. The task is frozen.

    Args:
        finetuned: a task of the network, a module of the backbone's class or its state dict; or a file of plain
            weights, a task file, or "STORE/TASK".
        classes: names in the order of the copy's outputs, if the copy does not state them.
        preprocessing: if the copy does not state it; the backbone's by default.
        calibrate_on: what to distil on: a Dataset of (image, anything); "drawings", random shapes and strokes
            for want of data; or None to only round, which takes seconds and loses more.
        config: for the distillation; by default `distil.CALIBRATION`, or `distil.ON_DRAWINGS`.
        bits: the size of the file without the head, per transformed weight.
        test: a Dataset of (image, label) on which the copy and the task are evaluated.
        **options: of method `full`.
    """
    with finetuned_task(net, finetuned, classes, preprocessing) as copy:
        made = _add_task(net, name, copy, classes, {**options, "bits": bits})

        def measure(label: str, task: str) -> None:
            if test is not None:
                made.accuracy[label] = evaluate(net, task, test, workers=workers)["accuracy"]

        without_data = calibrate_on is None or calibrate_on == DRAWINGS
        config = config or (ON_DRAWINGS if without_data else CALIBRATION)
        try:
            measure("finetuned", copy.name)
            images = _drawings(net, made, copy, config.seed) if calibrate_on == DRAWINGS else calibrate_on
            if images is not None:
                fit_to_bits(made.task)
                made.history = calibrate(net, name, copy.name, images, config, callbacks, workers)
            compact(made.task)
            measure("compressed" if without_data else "calibrated", name)
            made.kept = _kept(made.task, values(copy))
        except BaseException:
            net.remove_task(name)
            raise
    reached = {f"accuracy_{label}": value for label, value in made.accuracy.items()}
    made.task.metrics = {"compressed": {"kept": made.kept, **reached}}
    if reached:  # "test" is the task's own accuracy, as after training
        made.task.metrics["test"] = {"accuracy": list(reached.values())[-1]}
    return made


@torch.no_grad()
def _add_task(net: Network, name: str, copy: Task, classes: Classes | None, options: Mapping[str, Any]) -> Compression:
    """Add a task with the copy's weights, not yet rounded, and with mean-shift correction."""
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
    _correct_mean_shift(task, target)
    made = Compression(task.eval(), 1.0, _cosine(pairs))
    if made.cosine < SIMILAR:
        made.warnings.append(
            f"the copy's weights have little in common with the backbone's (cosine {made.cosine:.2f}): was it "
            "fine-tuned from these?"
        )
    return made


@torch.no_grad()
def _drawings(net: Network, made: Compression, copy: Task, seed: int) -> Drawings | None:
    """Return drawings in the size of the copy's images, or None with a warning if it gives no scores for them."""
    try:
        drawings = Drawings(Preprocessing.from_dict(copy.metadata.preprocessing), seed)
        images = torch.stack([drawings[0][0], drawings[1][0]]).to(net.anatomy.device, net.anatomy.dtype)
        if len(logits(net(images, task=copy.name))) != len(images):
            raise BackboneError("it does not return one row of scores per image")
    except Exception as cause:  # the user's forward can raise anything
        reason = " ".join(str(cause).split())
        made.warnings.append(
            f"weights were only rounded, because the network has no scores for random images ({reason}): calibrate on "
            "data of its own"
        )
        return None
    return drawings


def _correct_mean_shift(task: Task, target: Mapping[str, Tensor]) -> None:
    """Let biases of norm layers correct the mean shift of the part of the change that rounding drops."""
    means = input_means(task, corrected_weights(task), target)
    for name, mean in means.items():
        change = (target[name] - task.anatomy.tensor(name).detach()) * mean
        bias = task.owned[f"{task.anatomy.weights[name].feeds}.bias"]
        bias += (change.flatten(1).sum(1) * output_scale(task, name, target)).to(bias.dtype)
    task.correct_mean_shift(means)


def _cosine(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    product = sum(float(ours @ theirs) for ours, theirs in pairs)
    squares = sum(float(ours @ ours) for ours, _ in pairs) * sum(float(theirs @ theirs) for _, theirs in pairs)
    return product / math.sqrt(squares) if squares else 1.0


def _kept(task: Task, target: Mapping[str, Tensor]) -> float:
    left = change = 0.0
    made, ours = task.tensors(), task.anatomy.tensors()
    for name in (name for name in task.transforms if target[name].dim() > 1):
        left += float((target[name].double() - made[name].double()).square().sum())
        change += float((target[name].double() - ours[name].detach().double()).square().sum())
    return 1 - left / change if change else 1.0


def _with_own(net: Network, target: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Add to the option `own` every tensor that the copy changed and method `full` would share, such as biases."""
    anatomy, method = net.anatomy, registry.get(METHOD)
    chosen = method.with_options(options)
    taken = {*registry.owned_names(method, anatomy, chosen), *anatomy.weights, *anatomy.head_names()}
    shared = {name: anatomy.tensor(name).detach() for name in anatomy.places if name not in taken}
    changed = [
        glob.escape(name)  # `own` takes patterns
        for name, tensor in shared.items()
        if not name.endswith(COUNTER) and not torch.equal(tensor.to(target[name].dtype), target[name])
    ]
    return {**options, "own": (*chosen.own, *changed)}
