"""From a fine-tuned copy of a backbone to a task of method `full`, in closed form; with images, refined further."""

import glob
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitgraft.backbone.weight_files import COUNTER
from bitgraft.compression.balance import unbalanced
from bitgraft.compression.distil import CALIBRATION, calibrate
from bitgraft.compression.nearest import nearest
from bitgraft.compression.source import Classes, Finetuned, opened, values
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.task import Task
from bitgraft.training.callbacks import Callback
from bitgraft.training.config import Config
from bitgraft.training.evaluation import score
from bitgraft.transforms.masked import Masked

METHOD = "full"
ALIKE = 0.5  # a copy whose weights have less in common with the backbone's (their cosine) was hardly made from it


@dataclass
class Compression:
    """A task in place of a fine-tuned copy, and how near it comes."""

    task: Task
    change: float
    """The squared size of all that fine-tuning changed in the weights that masks take."""
    left: float
    """How much of that the task does not have, before any calibration."""
    cosine: float
    """Between these weights of the copy and of the backbone."""
    accuracy: dict[str, float] = field(default_factory=dict)
    """Of the copy ("finetuned"), of the task in closed form ("compressed"), and "calibrated"; if there was data."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One record for each epoch of calibration."""

    @property
    def kept(self) -> float:
        """The share of the change that the task has."""
        return 1 - self.left / self.change if self.change else 1.0

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
    """Add a task of method `full` that is as near as it can be to a fine-tuned copy of the backbone.

    Norm layers, the head and whatever else the copy changed are taken over as they are; of the weights that masks take,
    each layer gets the mask and the k with the least squared error, but for few bits that make errors cancel in each
    filter. The task can learn on from there (`bitgraft.fit`).

    Args:
        finetuned: a task of the network, a module of the backbone's class or its state dict; or a file of plain
            weights, a task file, or "STORE/TASK".
        classes: names in the order of the copy's outputs, where it does not state them.
        preprocessing: stored in the file, where the copy does not state it; by default what the backbone states.
        calibrate_on: a Dataset of (image, anything): k and norm layers are then trained to give the copy's scores.
        config: how.
        masks: train the masks, too.
        test: a Dataset of (image, label) on which the copy and the task are tried.
        **options: of method `full`. k0 is free in every layer unless stated: the norm layers' statistics are the
            copy's, so none of them undoes a scale here.
    """
    with opened(net, finetuned, classes, preprocessing) as copy:
        made = _begin(net, name, copy, classes, options)
        try:
            _try(net, made, test, workers, finetuned=copy.name, compressed=name)
            if calibrate_on is not None:
                made.history = calibrate(
                    net, name, copy.name, calibrate_on, config, masks=masks, callbacks=callbacks, workers=workers
                )
                _try(net, made, test, workers, calibrated=name)
        except BaseException:
            net.remove_task(name)
            raise
    made.task.metrics = _metrics(made)
    return made


def _try(net: Network, made: Compression, test: Any, workers: int, **tasks: str) -> None:
    for what, task in tasks.items():
        if test is not None:
            made.accuracy[what] = score(net, task, test, workers=workers)["accuracy"]


def _metrics(made: Compression) -> dict[str, Any]:
    """For the file. "test" is how the task does now, as after training."""
    said = {"compressed": {"kept": made.kept, **{f"accuracy_{what}": v for what, v in made.accuracy.items()}}}
    last = list(made.accuracy.values())[-1:]
    return {**said, "test": {"accuracy": last[0]}} if last else said


def _begin(net: Network, name: str, copy: Task, classes: Classes | None, options: Mapping[str, Any]) -> Compression:
    """The task in closed form, ready to learn."""
    target, metadata = values(copy), copy.metadata
    head: Any = {"keep": "keep", "none": None, "module": deepcopy(copy.head)}.get(metadata.head, "auto")
    task = net.add_task(
        name,
        classes if classes is not None else metadata.classes,
        METHOD,
        head=head,
        preprocessing=metadata.preprocessing,
        **_with_own(net, target, {"k0": "learn", **options}),
    )
    with torch.no_grad():
        for part, tensor in task.owned.items():
            tensor.copy_(target[part])
        if task.head is not None and copy.head is not None:
            task.head.load_state_dict(copy.head.state_dict())
        sums = torch.zeros(5, dtype=torch.float64)  # |D|², |T - W~|², |T|², |W|², T·W
        for part, transform in task.transforms.items():
            assert isinstance(transform, Masked)
            sums += _fit(transform, net.anatomy.tensor(part).detach(), target[part])
    change, left, mine, theirs, product = sums.tolist()
    scale = math.sqrt(mine * theirs)
    return Compression(task.eval(), change, left, product / scale if scale else 1.0)


def _with_own(net: Network, target: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with everything owned outright that the copy changed and method `full` would share: biases, ..."""
    anatomy, recipe = net.anatomy, registry.get(METHOD)
    chosen = recipe.with_options(options)
    taken = {*registry.owned_names(recipe, anatomy, chosen), *anatomy.weights, *anatomy.head_names()}
    changed = [
        glob.escape(name)  # a name is a pattern that matches itself
        for name in anatomy.places
        if name not in taken and not name.endswith(COUNTER) and not _same(anatomy.tensor(name), target[name])
    ]
    return {**options, "own": (*chosen.own, *changed)}


def _same(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.detach().to(theirs.dtype), theirs)


def _fit(transform: Masked, weight: Tensor, target: Tensor) -> Tensor:
    """Give a transform the nearest mask and k, and say how far they are."""
    about, rule = transform.weight, transform.rule
    ours, theirs = (about.filters(tensor).cpu() for tensor in (weight, target))
    rows = ours.shape if rule.per_channel else (1, -1)
    found = nearest(ours.reshape(rows), theirs.reshape(rows), rule.fixed)
    mask, margin = found.mask.view(ours.shape), found.margin.view(ours.shape)
    turned = unbalanced(ours, theirs, found.k, mask)
    scores = scores_of(mask ^ turned, margin, rule.threshold)
    transform.start_at(about.from_filters(scores), found.k)
    w, t, made = weight.double(), target.double(), transform(weight).double()
    pairs = ((t - w, t - w), (t - made, t - made), (t, t), (w, w), (t, w))
    return torch.stack([(a * b).sum() for a, b in pairs]).cpu()


def scores_of(mask: Tensor, margin: Tensor, threshold: float) -> Tensor:
    """R: as far from its threshold as the weight is from where its bit would change, and never on it."""
    at = torch.tensor(threshold)
    above = torch.maximum(at + margin, torch.nextafter(at, at + 1))
    below = torch.minimum(at - margin, torch.nextafter(at, at - 1))
    return torch.where(mask, above, below)
