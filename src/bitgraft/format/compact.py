"""The small tensors of a task in format 2: concatenated, and in as few bits as their values need.

Packing is lossless. A row of k takes 8 bits per value if it is on a grid of 256 steps; a batch norm takes two
half-precision vectors if its statistics are trivial; LoRA's factors are in half precision if their values are.
`bitgraft.compact` rounds a task to such values. Other tensors keep their own keys.
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
from bitgraft.format.header import CODED, CODES, GRIDS, LEVELS, MASKS, NORMS, STEPS
from bitgraft.format.metadata import Shapes
from bitgraft.transforms.bits import packed_size

NORM_PARTS = ("weight", "bias", "running_mean", "running_var")
MEAN = ".running_mean"
FACTORS = (":a", ":b")  # the ends of the keys of LoRA's factors


def pack(tensors: Mapping[str, Tensor], shapes: Shapes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors as a file holds them, and the metadata that a reader needs to unpack them."""
    left, packed = dict(tensors), dict[str, Tensor]()
    if shapes and all(f"{name}:levels" in left for name in shapes):
        packed[STEPS] = torch.stack([left.pop(f"{name}:step") for name in shapes])
        levels = {name: left.pop(f"{name}:levels").flatten() for name in shapes}
        groups = [torch.cat([levels[name] for name in group]).numpy() for group in _groups(shapes)]
        packed[LEVELS] = torch.from_numpy(entropy_coding.encode_levels(groups))
    uncoded = [name for name in shapes if f"{name}:mask{CODED}" not in left]
    if uncoded and all(f"{name}:mask" in left for name in uncoded):
        packed[MASKS] = torch.cat([left.pop(f"{name}:mask") for name in uncoded])
    channels = _pack_k(left, packed, shapes)
    layers = sorted(key.removesuffix(MEAN) for key in left if key.endswith(MEAN) and ":" not in key)  # as in the JSON
    norms = {layer: len(left[f"{layer}.weight"]) for layer in layers if _is_folded(left, layer)}
    if norms:
        parts = [[left.pop(f"{layer}.{part}") for part in NORM_PARTS] for layer in norms]
        packed[NORMS] = torch.cat([tensor for weight, bias, _, _ in parts for tensor in (weight, bias)]).half()
    halves = {key: tensor.half() for key, tensor in left.items() if key.endswith(FACTORS) and _is_half(tensor)}
    return packed | left | halves, {"channels": channels, "norms": norms}


def unpack(tensors: Mapping[str, Tensor], about: Mapping[str, Any], shapes: Shapes, source: str) -> dict[str, Tensor]:
    """Invert `pack`. Any fault is a `CorruptError`."""
    left = {key: t.float() if key.endswith(FACTORS) and t.dtype == torch.float16 else t for key, t in tensors.items()}
    try:
        found = dict(_unpack(left, about["channels"], about["norms"], shapes))
        if set(found) & set(left) or any(key.startswith(":") for key in left):
            raise ValueError("a tensor is a duplicate, or has an unknown key")
    except (ValueError, TypeError, AttributeError, RuntimeError) as cause:
        raise CorruptError(f"{source} is corrupt: cannot unpack its tensors ({cause})") from cause
    return found | left


def _groups(shapes: Shapes) -> list[list[str]]:
    """Return groups of weights whose levels share a frequency table: one per matrix or kernel, one for all vectors."""
    matrices = [[name] for name, shape in shapes.items() if len(shape) > 1]
    vectors = [name for name, shape in shapes.items() if len(shape) < 2]
    return [*matrices, vectors] if vectors else matrices


def _pack_k(left: dict[str, Tensor], packed: dict[str, Tensor], shapes: Shapes) -> list[int | None]:
    """Move each k that is on a grid from `left` to `packed`; return the values per row of each weight."""
    channels: list[int | None] = []
    grids, codes = [], [np.empty(0, np.uint8)]
    for name in shapes:
        k = left.get(f"{name}:k")
        found = [] if k is None else [find_grid(row) for row in k.view(4, -1).numpy()]
        rows = [row for row in found if row is not None]
        channels.append(None if k is None or len(rows) < 4 else k.shape[1] if k.dim() > 1 else 0)
        if channels[-1] is None:
            continue
        grids += [(low, unit) for low, unit, _ in rows]
        codes += [steps for _, unit, steps in rows if unit != 0]
        del left[f"{name}:k"]
    if grids:
        packed[GRIDS], packed[CODES] = torch.tensor(grids), torch.from_numpy(np.concatenate(codes))
    return channels


def find_grid(row: NDArray[Any]) -> tuple[float, float, NDArray[Any]] | None:
    """Return low, unit and uint8 steps with row = low + unit * steps to the last bit, or None if there are none.

    The unit is the greatest common divisor of the differences, so it is found exactly.
    """
    if not np.isfinite(row).all():
        return None
    low = row.min()
    differences = row.astype(np.float64) - float(low)
    if not differences.any():
        return float(low), 0.0, np.empty(0, np.uint8)
    scale = 2.0 ** (52 - math.frexp(float(differences.max()))[1])
    scaled = differences * scale
    if (scaled != np.floor(scaled)).any():
        return None
    divisor = int(np.gcd.reduce(scaled.astype(np.int64)))
    steps, unit = scaled.astype(np.int64) // divisor, np.float32(divisor / scale)
    if steps.max() > 255 or float(unit) != divisor / scale or not np.array_equal(_on_grid(low, unit, steps), row):
        return None
    return float(low), float(unit), steps.astype(np.uint8)


def _on_grid(low: Any, unit: Any, steps: NDArray[Any]) -> NDArray[Any]:
    """Compute low + unit * steps in float64, which is exact, and round once."""
    return (np.float64(low) + np.float64(unit) * steps).astype(np.float32)


def _is_folded(tensors: Mapping[str, Tensor], layer: str) -> bool:
    """Whether a batch norm has mean 0, variance 1, and a scale and shift that are exact in half precision."""
    parts = [tensors.get(f"{layer}.{part}") for part in NORM_PARTS]
    held = [tensor for tensor in parts if tensor is not None and tensor.dtype == torch.float32]
    if len(held) < 4 or len({tensor.shape for tensor in held}) > 1 or held[0].dim() != 1 or not len(held[0]):
        return False
    trivial = not held[2].any() and bool((held[3] == 1).all())
    return trivial and all(map(_is_half, held[:2]))


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and torch.equal(tensor.half().float(), tensor)


def _unpack(left: dict[str, Tensor], channels: Any, norms: Any, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield unpacked keys and tensors, and remove the packed ones from `left`."""
    if len(channels) != len(shapes) or not all(c is None or (type(c) is int and c >= 0) for c in channels):
        raise ValueError("'channels' does not have one whole number for each weight")
    if not all(type(size) is int and size > 0 for size in norms.values()):
        raise ValueError("'norms' has an invalid size")
    if LEVELS in left:
        yield from _unpack_levels(left.pop(LEVELS), left.pop(STEPS, torch.empty(0)), shapes)
    if MASKS in left:
        uncoded = [name for name in shapes if f"{name}:mask{CODED}" not in left]
        masks = _split(left.pop(MASKS), torch.uint8, [packed_size(math.prod(shapes[name])) for name in uncoded])
        yield from ((f"{name}:mask", mask) for name, mask in zip(uncoded, masks, strict=True))
    if gridded := {name: c for name, c in zip(shapes, channels, strict=True) if c is not None}:
        yield from _unpack_k(left.pop(GRIDS, torch.empty(0)), left.pop(CODES, torch.empty(0)), gridded)
    if norms:
        sizes = [size for size in norms.values() for _ in ("weight", "bias")]
        values = _split(left.pop(NORMS, torch.empty(0)), torch.float16, sizes)
        for layer, weight, bias in zip(norms, values[::2], values[1::2], strict=True):
            parts = weight.float(), bias.float(), torch.zeros(len(weight)), torch.ones(len(weight))
            yield from zip((f"{layer}.{part}" for part in NORM_PARTS), parts, strict=True)


def _unpack_levels(coded: Tensor, steps: Tensor, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    if coded.dtype != torch.uint8 or coded.dim() != 1 or not len(coded):
        raise ValueError("levels are not a vector of bytes")
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    groups = _groups(shapes)
    values = entropy_coding.decode_levels(coded.numpy(), [sum(sizes[name] for name in group) for group in groups])
    order = [name for group in groups for name in group]
    levels = dict(zip(order, torch.split(torch.from_numpy(values), [sizes[name] for name in order]), strict=True))
    for name, step in zip(shapes, _split(steps, torch.float32, [1] * len(shapes)), strict=True):
        yield f"{name}:levels", levels[name].view(shapes[name])
        yield f"{name}:step", step.view(())


def _unpack_k(grids: Tensor, codes: Tensor, channels: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    if grids.dtype != torch.float32 or grids.shape != (4 * len(channels), 2) or not grids.isfinite().all():
        raise ValueError("k has no valid grid")
    widths = [max(1, count) for count in channels.values() for _ in range(4)]
    sizes = [width if unit else 0 for width, unit in zip(widths, grids[:, 1].tolist(), strict=True)]
    steps = _split(codes, torch.uint8, sizes)
    rows = [
        np.full(width, low, np.float32) if unit == 0 else _on_grid(low, unit, step.numpy().astype(np.int64))
        for (low, unit), width, step in zip(grids.numpy(), widths, steps, strict=True)
    ]
    for i, (name, count) in enumerate(channels.items()):
        k = torch.from_numpy(np.stack(rows[4 * i : 4 * i + 4]))
        yield f"{name}:k", k if count else k.view(4)


def _split(tensor: Tensor, dtype: torch.dtype, sizes: list[int]) -> list[Tensor]:
    if tensor.dtype != dtype or tensor.shape != (sum(sizes),):
        raise ValueError(f"{tensor.dtype} of shape {tuple(tensor.shape)} where {sum(sizes)} of {dtype} are expected")
    return list(torch.split(tensor, sizes))
