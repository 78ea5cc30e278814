"""The paper's transform: a mask and four k for each weight, while they learn and as bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bitgraft.errors import TaskError
from bitgraft.transforms.affine import Operands, compute, learned
from bitgraft.transforms.base import Transform, Weight, expect
from bitgraft.transforms.bits import Surrogate, pack, packed_size, threshold, unpack

START = (1.0, 0.0, 0.0, 0.0)  # where a learned k begins: W~ = W
PACE = 3.0  # how much faster than the other k a k2 learns that is scaled by R
LEAST = 1e-4  # how far from its threshold an R begins at least that starts from another mask


@dataclass(frozen=True)
class MaskRule:
    """How a mask is read off R, and which k are learned (None) or constant, for one weight."""

    fixed: tuple[float | None, ...]
    threshold: float
    surrogate: Surrogate
    per_channel: bool

    @property
    def learned(self) -> list[int]:
        return [i for i, value in enumerate(self.fixed) if value is None]

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Which of k0, k2 and k3 are learned: the rows of `Masked.k`."""
        return tuple(i for i in self.learned if i != 1)


class Masked(Transform):
    """W~ = k0 W + k1 1 + k2 M + k3 W∘M with M = 1[R >= threshold] (the paper, equation 2).

    While it learns it holds R (`scores`) and the learned k, with k1 apart (`k1`); frozen, it holds M packed to bits
    and all four k. It begins where W~ = W with all of the mask set, as the paper has it.
    """

    scores: nn.Parameter | None
    k: nn.Parameter | None
    k1: nn.Parameter | None
    constants: Tensor
    packed: Tensor | None
    k2_scaled_by_r = False
    hardness = 1.0
    """In training mode, where k2 is scaled by R: at 0 W~ = W + R, as fine-tuning would have it; at 1 it is the mask's;
    in between a mixture. In evaluation mode it is always the mask's."""
    channels_last = False
    """While it learns, give W~ with the channels last, as the images are laid out that it will meet."""

    def __init__(self, weight: Weight, rule: MaskRule, scores: Tensor | None) -> None:
        super().__init__()
        self.weight, self.rule = weight, rule
        for name in ("scores", "k", "k1"):
            self.register_parameter(name, None)
        self.register_buffer("packed", None)
        self.register_buffer("constants", None)
        if scores is None:
            return  # until `restore` brings them
        k = torch.tensor([START[i] if v is None else v for i, v in enumerate(rule.fixed)], device=scores.device)
        self.constants = k = k[:, None].repeat(1, weight.outputs) if rule.per_channel else k
        self.scores = nn.Parameter(scores)
        self.k = nn.Parameter(k[list(rule.kept)]) if rule.kept else None
        self.k1 = nn.Parameter(k[1].clone()) if 1 in rule.learned else None

    def forward(self, weight: Tensor) -> Tensor:
        return transformed({"": self}, {"": weight})[""]

    def operands(self, weight: Tensor, out: Tensor | None = None) -> Operands:
        """What W~ is computed from, viewed so that channels broadcast."""
        mask, k = self.packed if self.scores is None else self.scores, self.values()
        assert mask is not None, "values are still to come"
        rule, shape = self.rule, weight.shape
        if rule.per_channel:
            shape, k = torch.Size(self.weight.grouped_shape), k.view(4, *self.weight.channel_shape)
        if self.scores is None:
            return Operands(_shaped(weight, shape), mask, k, out=None if out is None else _shaped(out, shape))
        channels_last = self.channels_last and weight.dim() == 4 and weight.shape == shape
        hardness = self.hardness if self.training and self.k2_scaled_by_r else 1.0
        ours = rule.threshold, rule.surrogate, self.k2_scaled_by_r, hardness, channels_last
        return Operands(_shaped(weight, shape), _shaped(mask, shape), k, *ours)

    def values(self) -> Tensor:
        """k0..k3, (4,) or (4, channels), constants included.

        Where k2 is scaled by R, it is 2 * mean(abs(R)) * exp(PACE * its row of k), and k1 is `k1` - k2 / 2: W~ moves
        by the mean size of R, up or down as R's sign says, and learns quickly whether that is too much or too little.
        """
        if self.k is None and self.k1 is None:
            return self.constants
        rows = list(self.constants.unbind())
        for index, row in zip(self.rule.kept, () if self.k is None else self.k.unbind(), strict=True):
            rows[index] = row
        if self.k1 is not None:
            rows[1] = self.k1
        if self.k2_scaled_by_r:
            half = self._mean_size() * torch.exp(PACE * rows[2])
            rows[1], rows[2] = rows[1] - half, 2 * half
        return torch.stack(rows)

    @torch.no_grad()
    def _mean_size(self) -> Tensor:
        """How far R is from its threshold, the mean over the layer or over each channel."""
        assert self.scores is not None
        apart = self.scores if self.rule.threshold == 0 else self.scores - self.rule.threshold
        if not self.rule.per_channel:
            size: Tensor = torch.linalg.vector_norm(apart, 1) / apart.numel()
            return size
        sums = apart.view(self.weight.grouped_shape).abs().sum_to_size(self.weight.channel_shape)
        return (sums * (sums.numel() / apart.numel())).flatten()

    @torch.no_grad()
    def scale_k2_by_r(self, reach: float, rng: torch.Generator) -> None:
        """Scale k2 by R, which begins at random within this reach: W~ = W ± mean|R|, times a factor that is learned.

        From the paper's start, where k2 = 0, a bit's meaning changes whenever k2 changes its sign, and what R has
        gathered until then is lost. Here R is what fine-tuning would add to W, and W~ has its sign and mean size: a bit
        means the same from the first step on, and moves its weight as far as R has come. Nothing happens where
        something has been learned already, or where k1 or k2 is a constant.
        """
        if self.scores is None or self.k1 is None or 2 not in self.rule.kept or not self._is_at_start():
            return
        self.k2_scaled_by_r = True
        drawn = (2 * torch.rand(self.weight.shape, generator=rng) - 1) * reach + self.rule.threshold
        self.scores.copy_(drawn)

    def _is_at_start(self) -> bool:
        start, learned = self.constants.new_tensor(START), self.rule.learned
        return not self.k2_scaled_by_r and bool((self.values().view(4, -1)[learned] == start[learned, None]).all())

    @torch.no_grad()
    def start_at(self, scores: Tensor, k: Tensor) -> None:
        """Begin with these R and k, (4, channels) or (4, 1)."""
        rows = k if self.rule.per_channel else k.squeeze(1)
        assert self.scores is not None
        self.scores.copy_(scores)
        if self.k is not None:
            self.k.copy_(rows[list(self.rule.kept)])
        if self.k1 is not None:
            self.k1.copy_(rows[1])

    @torch.no_grad()
    def start_as(self, other: "Masked", weight: Tensor) -> None:
        """Begin with another transform's mask and k: W~ is the same to the last bit.

        R lies as far from its threshold as a bit moves its weight to either side, |k2 + k3 W| / 2, in the mean over the
        layer: as if R were what was added to W, so that turning a bit takes as many steps as the way back to W would.
        """
        k, name = other.values(), self.weight.name
        if k.shape != self.constants.shape:
            raise TaskError(
                f"{name!r} has one k per layer there and per channel here, or the reverse: give the same `per`"
            )
        for index, value in enumerate(self.rule.fixed):
            if value is not None and bool((k[index] != value).any()):
                raise TaskError(
                    f"{name!r} has k{index} = {k[index].flatten()[0].item():.4g} there, where it is to stay {value:g} "
                    "here: give both tasks the same options"
                )
        _, _, k2, k3 = k.view(4, *(self.weight.channel_shape if self.rule.per_channel else ()))
        size = (k2 + k3 * weight.detach().float().view(self.weight.grouped_shape)).abs().mean() / 2
        size = size.clamp(min=LEAST)
        scores = torch.where(other.mask().to(size.device), size, -size) + self.rule.threshold
        self.start_at(scores, k.view(4, -1))

    def role(self, parameter: str) -> str:
        return parameter

    def mask(self) -> Tensor:
        """M as a bool tensor of the weight's shape."""
        if self.scores is None:
            assert self.packed is not None
            return unpack(self.packed, self.weight.shape)
        return threshold(self.scores, self.rule.threshold)

    def bits(self, *, statistics: bool = False) -> int:
        channels = self.weight.outputs if self.rule.per_channel else 1
        return self.weight.shape.numel() + 32 * channels * len(self.rule.learned)

    def freeze(self) -> None:
        if self.scores is not None:
            self._hold(**self.parts())

    def parts(self) -> dict[str, Tensor]:
        if self.packed is not None:
            return {"mask": self.packed, "k": self.constants}
        if self.scores is not None:
            return {"mask": pack(self.mask()), "k": self.values().detach()}
        kinds = {"mask": torch.uint8, "k": torch.float32}  # values are still to come: sizes alone
        return {name: torch.empty(size, dtype=kinds[name], device="meta") for name, size in self._sizes().items()}

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        expect(self._sizes(), parts)
        self._hold(parts["mask"], parts["k"])

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        k = (4, self.weight.outputs) if self.rule.per_channel else (4,)
        return {"mask": (packed_size(self.weight.shape.numel()),), "k": k}

    def _hold(self, mask: Tensor, k: Tensor) -> None:
        if self.scores is not None:
            self.scores = self.k = self.k1 = None
            self.k2_scaled_by_r = False
        self.packed, self.constants = mask, k

    def get_extra_state(self) -> Tensor:
        """Whether k2 is scaled by R: without it, the same tensors stand for another W~."""
        return torch.tensor(self.k2_scaled_by_r)

    def set_extra_state(self, state: Tensor) -> None:
        self.k2_scaled_by_r = bool(state)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if self.scores is not None and f"{prefix}packed" in state_dict:
            raise TaskError(
                f"{self.weight.name!r} is learning, and this state is of a frozen task: freeze the task first"
            )
        if self.scores is None and f"{prefix}scores" in state_dict:
            raise TaskError(
                f"{self.weight.name!r} is frozen, and this state is of a task that learns: add the task anew"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


def transformed(
    transforms: Mapping[str, Transform], weights: Mapping[str, Tensor], out: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """W~ of each weight by its transform: all frozen masks at once, all that learn, and the rest one by one.

    W~ of a frozen mask may be written to the weight's tensor in `out`, which then is what is returned.
    """
    masks = {name: transform for name, transform in transforms.items() if isinstance(transform, Masked)}
    given = {name: mask.operands(weights[name], (out or {}).get(name)) for name, mask in masks.items()}
    frozen = {name: one for name, one in given.items() if one.is_packed}
    learning = {name: one for name, one in given.items() if not one.is_packed}
    found = dict(zip(frozen, compute(list(frozen.values())), strict=True))
    found |= zip(learning, learned(list(learning.values())), strict=True)
    return {
        name: _shaped(found[name], weights[name].shape) if name in found else transform(weights[name])
        for name, transform in transforms.items()
    }


def _shaped(tensor: Tensor, shape: torch.Size) -> Tensor:
    """A view would have other strides where a dimension has size 1, and convolutions look at those."""
    return tensor if tensor.shape == shape else tensor.view(shape)
