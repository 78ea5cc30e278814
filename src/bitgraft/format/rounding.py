"""Round a task for a small file: k to 8 bits, norm layers and LoRA's factors to half precision, or all to levels."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bitgraft.backbone.anatomy import describe
from bitgraft.errors import TaskError
from bitgraft.format.archive import pack_task, to_bytes
from bitgraft.format.compact import NORM_PARTS, find_grid
from bitgraft.format.header import HEAD
from bitgraft.methods import registry
from bitgraft.task import Task
from bitgraft.transforms.baselines import LowRank
from bitgraft.transforms.bits import is_finite
from bitgraft.transforms.levels import MAX_LEVEL, Levels
from bitgraft.transforms.masked import Masked

STEPS = 255
NORM_STEP = 1 / 64  # relative to the root mean square of the norm's scale
ATTEMPTS = 12
RESERVED = 256  # bytes for metrics that are added later
Parts = dict[str, dict[str, Tensor]]


@torch.no_grad()
def compact(task: Task) -> Task:
    """Freeze a task and round it, so that its file is small. Evaluate it afterwards, not before.

    Each row of k is rounded to 256 equal steps, LoRA's factors to half precision. A batch norm with its own statistics
    becomes a scale and a shift, with mean 0 and variance 1; to train a task further, save it without this. For a task
    with `bits`, the quantization cells are chosen to give that file size, and norm layers are stored as integer steps
    from the backbone's. Saving and loading do not round again.
    """
    if task.learned_levels():
        fit_to_bits(task)
    task.freeze()
    if registry.get(task.metadata.method).owns_everything:
        return task  # a full copy is not compressed
    if any(isinstance(one, Levels) for one in task.transforms.values()):
        if not task.is_compact:
            steps = _norm_steps(task)
            made = {name: Levels(describe(task.anatomy, name), None) for name in steps}
            for name, levels in made.items():
                levels.restore(steps[name])
            task.exchange(_replaced(task, steps), made)
    else:
        for module in task.modules():
            if isinstance(module, Masked) and module.rule.per_channel:
                module.constants = torch.stack([round_to_grid(row) for row in module.constants])
            elif isinstance(module, LowRank):
                for factor in (module.a, module.b):
                    if is_finite(rounded := factor.half()):
                        factor.copy_(rounded)
        for layer in task.anatomy.norms:
            _fold(task, layer)
    task.revision += 1
    task.is_compact = True
    return task


@torch.no_grad()
def fit_to_bits(task: Task) -> None:
    """Choose cells so that the file without the head takes `bits` per weight, or up to 3 % less."""
    bits, weights = task.metadata.options["bits"], sum(one.weight.shape.numel() for one in task.learned_levels())
    low, high, fits = 0.97 * bits, 0.997 * bits, dict[float, float]()
    if low <= (found := _cost(task, weights)) <= high:
        return
    others = weights * found - sum(one.bits() for one in task.learned_levels())  # the rest of the file
    for _ in range(ATTEMPTS):
        task.spend(others)
        found = _cost(task, weights)
        if found <= high:
            fits[found] = others
        if low <= found <= high:
            return
        others += weights * (found - (low + high) / 2)
    if not fits:
        raise TaskError(
            f"bits={bits} cannot be met: norm layers and the header alone take {found:.2f} bits for each of "
            f"{weights:,} weights; give more bits, or norms=False"
        )
    task.spend(fits[max(fits)])  # if all changes have the same size, nothing lies in between


def _cost(task: Task, weights: int) -> float:
    """Return the size of the file without the head, in bits per weight."""
    archive, steps, head = pack_task(task, "0" * 64), _norm_steps(task), set(task.anatomy.head_names())
    replaced = _replaced(task, steps)
    tensors = {key: tensor for key, tensor in archive.tensors.items() if key not in replaced}
    for name, parts in steps.items():
        tensors |= {f"{name}:{part}": tensor.cpu() for part, tensor in parts.items()}
    shapes = {**archive.shapes, **{name: tuple(parts["levels"].shape) for name, parts in steps.items()}}
    size = RESERVED + len(to_bytes(replace(archive, tensors=tensors, shapes=shapes, format=2, description=None)))
    size -= sum(tensor.nbytes for key, tensor in tensors.items() if key in head or key.startswith(HEAD))
    return 8 * size / weights


def _norm_steps(task: Task) -> Parts:
    """Return norm layers as integer steps from the backbone's scale and shift, with the backbone's statistics."""
    held, found = task.stored(), {}
    for layer in task.anatomy.norms:
        norm: Any = task.anatomy.backbone.get_submodule(layer)
        learned = all(isinstance(task.owned.get(f"{layer}.{name}"), nn.Parameter) for name in NORM_PARTS[:2])
        weight, bias, mean, var = (held.get(f"{layer}.{name}") for name in NORM_PARTS)
        if weight is None or bias is None or not learned or _shares(task, layer):  # frozen batch norms have buffers
            continue
        weight, bias = weight.double(), bias.double()
        if mean is not None and var is not None:
            ratio = ((norm.running_var.double() + norm.eps) / (var.double() + norm.eps)).sqrt()
            bias = bias + (norm.running_mean - mean.double()) * weight / (var.double() + norm.eps).sqrt()
            weight = weight * ratio
        size = NORM_STEP * weight.square().mean().sqrt()
        for name, value in ((f"{layer}.weight", weight), (f"{layer}.bias", bias)):
            change = value - task.anatomy.tensor(name).detach().double()
            step = torch.maximum(size, change.abs().max() / MAX_LEVEL).clamp(min=1e-12).float()
            found[name] = {"levels": (change / step).round().to(torch.int8), "step": step}
    return found


def _shares(task: Task, layer: str) -> bool:
    """Return whether a norm layer shares a tensor with another layer, which changing it would change as well."""
    names = (f"{layer}.{part}" for part in NORM_PARTS)
    return any(task.anatomy.is_tied(name) for name in names if name in task.anatomy.places)


def _replaced(task: Task, steps: Parts) -> set[str]:
    """Return the owned tensors of the norm layers that `steps` replaces."""
    layers = {name.rpartition(".")[0] for name in steps}
    return {name for name in task.owned if task.anatomy.norm_of.get(name) in layers}


def round_to_grid(row: Tensor) -> Tensor:
    """Round to a grid of 256 steps. All values are multiples of a power of two, so they are exact in float32.

    A row that is on such a grid stays.
    """
    low, high = float(row.min()), float(row.max())
    if not high > low or find_grid(row.cpu().numpy()) is not None:
        return row
    spacing = (high - low) / STEPS
    grain = 2.0 ** max(math.frexp(spacing)[1] - 8, math.frexp(max(-low, high))[1] - 23)
    unit, first = math.ceil(spacing / grain) * grain, round(low / grain) * grain
    return (first + unit * ((row.double() - first) / unit).round().clamp(0, STEPS)).float()


def _fold(task: Task, layer: str) -> None:
    """Fold an owned batch norm's statistics into its scale and shift, which are rounded to half precision."""
    norm: Any = task.anatomy.backbone.get_submodule(layer)
    owned = task.owned
    names = [f"{layer}.{name}" for name in NORM_PARTS]
    whole = isinstance(norm, nn.modules.batchnorm._BatchNorm) and all(name in owned for name in names)
    if not whole or _shares(task, layer):
        return
    weight, bias, mean, var = (owned[name].double() for name in names)
    scale = weight * ((1 + norm.eps) / (var + norm.eps)).sqrt()
    shift = bias - mean * weight / (var + norm.eps).sqrt()
    rounded = [value.half() for value in (scale, shift)]
    if not all(map(is_finite, rounded)):
        return  # beyond half precision
    for name, value in zip(names, (*rounded, torch.zeros_like(mean), torch.ones_like(var)), strict=True):
        owned[name].copy_(value)
