"""The small tensors of a task, as a file of format 2 holds them: together, and in no more bits than their values need.

Nothing is lost: a k takes 8 bits where its row lies on a grid of 256 steps, and a batch norm two half-precision vectors
where it has no statistics to speak of. `bitgraft.compact` rounds a task so that it is so. What is not stays as it is,
under a key of its own.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitgraft.errors import CorruptError
from bitgraft.format import entropy_coding
from bitgraft.format.header import CODES, GRIDS, LEVELS, MASKS, NORMS, STEPS
from bitgraft.format.metadata import Shapes
from bitgraft.transforms.bits import packed_size

PARTS = ("weight", "bias", "running_mean", "running_var")


def pack(tensors: Mapping[str, Tensor], shapes: Shapes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that a file holds, and what its metadata says of them."""
    left, found = dict(tensors), dict[str, Tensor]()
    if shapes and all(f"{name}:levels" in left for name in shapes):
        found[STEPS] = torch.stack([left.pop(f"{name}:step") for name in shapes])
        levels = {name: left.pop(f"{name}:levels").flatten() for name in shapes}
        groups = [torch.cat([levels[name] for name in group]).numpy() for group in _groups(shapes)]
        found[LEVELS] = torch.from_numpy(entropy_coding.encode_steps(groups))
    masks = [left.get(f"{name}:mask") for name in shapes]
    coded = [f"{name}:mask.rans" in left for name in shapes]
    if any(mask is not None for mask in masks) and all((m is None) == c for m, c in zip(masks, coded, strict=True)):
        found[MASKS] = torch.cat([left.pop(f"{name}:mask") for name, c in zip(shapes, coded, strict=True) if not c])
    channels: list[int | None] = []
    grids, codes = [], [np.empty(0, np.uint8)]
    for name in shapes:
        k = left.get(f"{name}:k")
        tried = [] if k is None else [gridded(row) for row in k.view(4, -1).numpy()]
        rows = [row for row in tried if row is not None]
        if k is None or len(rows) < 4:
            channels.append(None)
            continue
        channels.append(k.shape[1] if k.dim() > 1 else 0)
        grids += [(low, unit) for low, unit, _ in rows]
        codes += [steps for _, unit, steps in rows if unit != 0]
        del left[f"{name}:k"]
    if grids:
        found[GRIDS], found[CODES] = torch.tensor(grids), torch.from_numpy(np.concatenate(codes))
    norms = {layer: len(left[f"{layer}.weight"]) for layer in sorted(_folded_norms(left))}  # as JSON will have it
    if norms:
        four = [[left.pop(f"{layer}.{name}") for name in PARTS] for layer in norms]
        found[NORMS] = torch.cat([part for weight, bias, _, _ in four for part in (weight, bias)]).half()
    return found | left, {"channels": channels, "norms": norms}


def unpack(tensors: Mapping[str, Tensor], about: Mapping[str, Any], shapes: Shapes, source: str) -> dict[str, Tensor]:
    """The tensors as they were packed. Whatever does not fit is a `CorruptError`."""
    left = dict(tensors)
    try:
        found = dict(_unpacked(left, about["channels"], about["norms"], shapes))
        if set(found) & set(left) or any(key.startswith(":") for key in left):
            raise ValueError("a tensor is there twice, or belongs to nothing")
    except (ValueError, TypeError, AttributeError, RuntimeError) as cause:
        raise CorruptError(f"{source}: its packed tensors are not usable ({cause})") from cause
    return found | left


def _groups(shapes: Shapes) -> list[list[str]]:
    """The weights whose levels share a table: each matrix or kernel has its own, and all vectors one."""
    alone = [[name] for name, shape in shapes.items() if len(shape) > 1]
    vectors = [name for name, shape in shapes.items() if len(shape) < 2]
    return [*alone, vectors] if vectors else alone


def gridded(row: NDArray[Any]) -> tuple[float, float, NDArray[Any]] | None:
    """The lowest of some float32, the unit that all of them are whole steps of from there, and their steps, if 256 do.

    Found exactly, as the greatest common divisor of the differences: low + unit * step is each value to the last bit.
    """
    if not np.isfinite(row).all():
        return None
    low = row.min()
    apart = row.astype(np.float64) - float(low)
    if not apart.any():
        return float(low), 0.0, np.empty(0, np.uint8)
    scale = 2.0 ** (52 - math.frexp(float(apart.max()))[1])
    whole = apart * scale
    if (whole != np.floor(whole)).any():
        return None
    divisor = int(np.gcd.reduce(whole.astype(np.int64)))
    steps, unit = whole.astype(np.int64) // divisor, np.float32(divisor / scale)
    if steps.max() > 255 or float(unit) != divisor / scale or not np.array_equal(_values(low, unit, steps), row):
        return None
    return float(low), float(unit), steps.astype(np.uint8)


def _values(low: Any, unit: Any, steps: NDArray[Any]) -> NDArray[Any]:
    """In float64, which is exact, rounded once."""
    return (np.float64(low) + np.float64(unit) * steps).astype(np.float32)


def _folded_norms(tensors: Mapping[str, Tensor]) -> list[str]:
    """The batch norms with mean 0, variance 1, and a scale and a shift that half precision holds exactly."""
    layers = [key.removesuffix(".running_mean") for key in tensors if key.endswith(".running_mean") and ":" not in key]
    return [layer for layer in layers if _is_folded(*(tensors.get(f"{layer}.{name}") for name in PARTS))]


def _is_folded(weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None) -> bool:
    held = [tensor for tensor in (weight, bias, mean, var) if tensor is not None and tensor.dtype == torch.float32]
    if len(held) < 4 or len({tuple(tensor.shape) for tensor in held}) > 1 or held[0].dim() != 1 or not len(held[0]):
        return False
    trivial = not held[2].any() and bool((held[3] == 1).all())
    return trivial and all(torch.equal(tensor.half().float(), tensor) for tensor in held[:2])


def _unpacked(left: dict[str, Tensor], channels: Any, norms: Any, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Takes what it unpacks out of `left`."""
    if len(channels) != len(shapes) or not all(c is None or (type(c) is int and c >= 0) for c in channels):
        raise ValueError("channels are not one whole number for each weight")
    if not all(type(size) is int and size > 0 for size in norms.values()):
        raise ValueError("norms have no sizes")
    if LEVELS in left:
        yield from _levels(left.pop(LEVELS), left.pop(STEPS, torch.empty(0)), shapes)
    if MASKS in left:
        uncoded = [name for name in shapes if f"{name}:mask.rans" not in left]
        sizes = [packed_size(math.prod(shapes[name])) for name in uncoded]
        masks = _cut(left.pop(MASKS), torch.uint8, sizes)
        yield from ((f"{name}:mask", mask) for name, mask in zip(uncoded, masks, strict=True))
    known = [(name, c) for name, c in zip(shapes, channels, strict=True) if c is not None]
    if known:
        grids = left.pop(GRIDS, torch.empty(0))
        if grids.dtype != torch.float32 or grids.shape != (4 * len(known), 2) or not grids.isfinite().all():
            raise ValueError("k has no usable grid")
        sizes = [
            max(1, c) if unit else 0
            for (_, c), four in zip(known, grids.view(-1, 4, 2), strict=True)
            for unit in four[:, 1].tolist()
        ]
        codes = iter(_cut(left.pop(CODES, torch.empty(0)), torch.uint8, sizes))
        for (name, count), four in zip(known, grids.view(-1, 4, 2).numpy(), strict=True):
            rows = [_row(low, unit, next(codes).numpy(), max(1, count)) for low, unit in four]
            yield f"{name}:k", torch.from_numpy(np.stack(rows)).view(4, *([count] if count else []))
    if norms:
        values = _cut(left.pop(NORMS, torch.empty(0)), torch.float16, [size for n in norms.values() for size in (n, n)])
        for layer, weight, bias in zip(norms, values[::2], values[1::2], strict=True):
            parts = weight.float(), bias.float(), torch.zeros(len(weight)), torch.ones(len(weight))
            yield from zip((f"{layer}.{name}" for name in PARTS), parts, strict=True)


def _levels(coded: Tensor, steps: Tensor, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    if coded.dtype != torch.uint8 or coded.dim() != 1 or not len(coded):
        raise ValueError("levels are no coded bytes")
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    groups = _groups(shapes)
    values = entropy_coding.decode_steps(coded.numpy(), [sum(sizes[name] for name in group) for group in groups])
    order = [name for group in groups for name in group]
    parts = dict(zip(order, torch.split(torch.from_numpy(values), [sizes[name] for name in order]), strict=True))
    for name, step in zip(shapes, _cut(steps, torch.float32, [1] * len(shapes)), strict=True):
        yield f"{name}:levels", parts[name].view(shapes[name])
        yield f"{name}:step", step.view(())


def _row(low: Any, unit: Any, codes: NDArray[Any], count: int) -> NDArray[Any]:
    return np.full(count, low, np.float32) if unit == 0 else _values(low, unit, codes.astype(np.int64))


def _cut(tensor: Tensor, kind: torch.dtype, sizes: list[int]) -> list[Tensor]:
    if tensor.dtype != kind or tensor.shape != (sum(sizes),):
        raise ValueError(f"one is {tensor.dtype} of shape {tuple(tensor.shape)}, not {kind} of {sum(sizes)}")
    return list(torch.split(tensor, sizes))
