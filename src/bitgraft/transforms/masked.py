"""The paper's transform: a binary mask and four k per weight, in training and packed to bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from bitgraft.errors import TaskError
from bitgraft.transforms.affine import Operands, compute
from bitgraft.transforms.base import ScoredTransform, Transform, Weight
from bitgraft.transforms.bits import Surrogate, pack, packed_size, threshold, unpack

START = (1.0, 0.0, 0.0, 0.0)  # initial values of the learned k: W~ = W
PACE = 3.0  # a k2 that is scaled by R learns this much faster than the other k
MIN_MARGIN = 1e-4  # least distance of R from its threshold when it starts from another task's mask


@dataclass(frozen=True)
class MaskRule:
    """How M follows from R for one weight, and which k are constants."""

    fixed: tuple[float | None, ...]
    """k0..k3, None where it is learned."""
    threshold: float
    surrogate: Surrogate
    per_channel: bool

    @property
    def learned(self) -> list[int]:
        return [i for i, value in enumerate(self.fixed) if value is None]

    @cached_property
    def k_rows(self) -> tuple[int, ...]:
        """Which k the rows of `Masked.k` are: the learned ones except k1."""
        return tuple(i for i in self.learned if i != 1)


class Masked(ScoredTransform):
    """W~ = k0 W + k1 1 + k2 M + k3 W∘M with M = 1[R >= threshold] (equation 2 of the paper).

    In training it holds R (`scores`) and the learned k, with k1 as a parameter of its own. Frozen, it holds M packed
    to bits (`packed`) and all four k (`constants`). Training starts at W~ = W with all bits set, as in the paper.
    """

    k: nn.Parameter | None
    k1: nn.Parameter | None
    constants: Tensor
    packed: Tensor | None
    k2_scaled_by_r = False
    """See `scale_k2_by_r`. `hardness` has an effect only if this is set."""
    channels_last = False
    """In training, return W~ in channels-last format, to match images in that format."""

    def __init__(self, weight: Weight, rule: MaskRule, scores: Tensor | None) -> None:
        super().__init__()
        self.weight, self.rule = weight, rule
        for name in ("scores", "k", "k1"):
            self.register_parameter(name, None)
        self.register_buffer("packed", None)
        self.register_buffer("constants", None)
        if scores is None:
            return  # `restore` follows
        k = torch.tensor([START[i] if v is None else v for i, v in enumerate(rule.fixed)], device=scores.device)
        self.constants = k = k[:, None].repeat(1, weight.outputs) if rule.per_channel else k
        self.scores = nn.Parameter(scores)
        self.k = nn.Parameter(k[list(rule.k_rows)]) if rule.k_rows else None
        self.k1 = nn.Parameter(k[1].clone()) if 1 in rule.learned else None

    def forward(self, weight: Tensor) -> Tensor:
        return _view(compute([self.operands(weight)])[0], weight.shape)

    def operands(self, weight: Tensor, out: Tensor | None = None) -> Operands:
        """Return the inputs of equation (2), shaped so that per-channel k broadcast."""
        rule, shape, k, learns = self.rule, weight.shape, self.values(), self.scores is not None
        if rule.per_channel:
            shape, k = torch.Size(self.weight.grouped_shape), k.view(4, *self.weight.channel_shape)
        mask = self.packed if self.scores is None else _view(self.scores, shape)
        assert mask is not None, "call `restore` first"
        return Operands(
            weight=_view(weight, shape),
            mask=mask,
            k=k,
            threshold=rule.threshold,
            surrogate=rule.surrogate,
            k2_scaled_by_r=self.k2_scaled_by_r,
            hardness=self.hardness if self.training and self.k2_scaled_by_r else 1.0,
            channels_last=self.channels_last and learns and weight.dim() == 4 and weight.shape == shape,
            out=None if out is None or learns else _view(out, shape),
        )

    def values(self) -> Tensor:
        """Return k0..k3, learned and constant, as (4,) or (4, channels)."""
        if self.k is None and self.k1 is None:
            return self.constants
        rows = list(self.constants.unbind())
        for index, row in zip(self.rule.k_rows, () if self.k is None else self.k.unbind(), strict=True):
            rows[index] = row
        if self.k1 is not None:
            rows[1] = self.k1
        if self.k2_scaled_by_r:
            half = self._mean_abs_r() * torch.exp(PACE * rows[2])
            rows[1], rows[2] = rows[1] - half, 2 * half
        return torch.stack(rows)

    @torch.no_grad()
    def _mean_abs_r(self) -> Tensor:
        """Return the mean distance of R from its threshold, per layer or per channel."""
        assert self.scores is not None
        distance = self.scores if self.rule.threshold == 0 else self.scores - self.rule.threshold
        if not self.rule.per_channel:
            mean: Tensor = torch.linalg.vector_norm(distance, 1) / distance.numel()
            return mean
        sums = distance.view(self.weight.grouped_shape).abs().sum_to_size(self.weight.channel_shape)
        return (sums * (sums.numel() / distance.numel())).flatten()

    @torch.no_grad()
    def scale_k2_by_r(self, bound: float, rng: torch.Generator) -> None:
        """Tie k2 and k1 to the size of R, and start R uniformly in [-bound, bound] around its threshold.

        From then on k2 = 2 * mean(abs(R)) * exp(PACE * k2_raw) and k1 = k1_raw - k2 / 2, where k2_raw and k1_raw are
        the learned parameters: a bit moves its weight up or down by mean(abs(R)), times a learned factor.

        The paper starts at k2 = 0. There the meaning of a bit flips whenever k2 changes sign, and what R has learned
        by then is lost. Here R is the change that fine-tuning would make, and W~ - W has R's sign and mean size, so a
        bit keeps its meaning from the first step on. Transforms that have already learned, or whose k1 or k2 is a
        constant, are left as they are.
        """
        if self.scores is None or self.k1 is None or 2 not in self.rule.k_rows or not self._is_at_start():
            return
        self.k2_scaled_by_r = True
        drawn = (2 * torch.rand(self.weight.shape, generator=rng) - 1) * bound + self.rule.threshold
        self.scores.copy_(drawn)

    def _is_at_start(self) -> bool:
        start, learned = self.constants.new_tensor(START), self.rule.learned
        return not self.k2_scaled_by_r and bool((self.values().view(4, -1)[learned] == start[learned, None]).all())

    @torch.no_grad()
    def start_as(self, other: "Masked", weight: Tensor) -> None:
        """Start from another transform's mask and k. W~ is the same to the last bit.

        R starts at a distance from its threshold of mean(abs(k2 + k3 W)) / 2, which is how far a bit moves a weight to
        either side. As R is then about the change to W, flipping a bit takes as many steps as undoing that change.
        """
        k, name = other.values(), self.weight.name
        if k.shape != self.constants.shape:
            raise TaskError(
                f"{name!r} has one k per layer in one task and one per channel in the other: give the same `per`"
            )
        for index, value in enumerate(self.rule.fixed):
            if value is not None and bool((k[index] != value).any()):
                raise TaskError(
                    f"{name!r} has k{index} = {k[index].flatten()[0].item():.4g} in the earlier task, but here it is "
                    f"fixed to {value:g}: give both tasks the same options"
                )
        assert self.scores is not None
        _, _, k2, k3 = k.view(4, *(self.weight.channel_shape if self.rule.per_channel else ()))
        margin = (k2 + k3 * weight.detach().float().view(self.weight.grouped_shape)).abs().mean() / 2
        margin = margin.clamp(min=MIN_MARGIN)
        self.scores.copy_(torch.where(other.mask().to(margin.device), margin, -margin) + self.rule.threshold)
        if self.k is not None:
            self.k.copy_(k[list(self.rule.k_rows)])
        if self.k1 is not None:
            self.k1.copy_(k[1])

    def changes(self) -> list[nn.Parameter]:
        scores = self.scores if self.rule.threshold == 0 else None  # a threshold has units of its own
        return [parameter for parameter in (scores, self.k1) if parameter is not None]

    def mask(self) -> Tensor:
        """Return M as a bool tensor of the weight's shape."""
        if self.scores is None:
            assert self.packed is not None
            return unpack(self.packed, self.weight.shape)
        return threshold(self.scores, self.rule.threshold)

    def bits(self, *, statistics: bool = False) -> int:
        channels = self.weight.outputs if self.rule.per_channel else 1
        return self.weight.shape.numel() + 32 * channels * len(self.rule.learned)

    def parts(self) -> dict[str, Tensor]:
        return {"mask": self.packed if self.packed is not None else pack(self.mask()), "k": self.values().detach()}

    def _part_shapes(self) -> dict[str, tuple[int, ...]]:
        k = (4, self.weight.outputs) if self.rule.per_channel else (4,)
        return {"mask": (packed_size(self.weight.shape.numel()),), "k": k}

    def _hold(self, parts: Mapping[str, Tensor]) -> None:
        self.scores = self.k = self.k1 = None
        self.k2_scaled_by_r = False
        self.packed, self.constants = parts["mask"], parts["k"]

    def get_extra_state(self) -> Tensor:
        """Store `k2_scaled_by_r`: it changes what the same parameters mean."""
        return torch.tensor(self.k2_scaled_by_r)

    def set_extra_state(self, state: Tensor) -> None:
        self.k2_scaled_by_r = bool(state)


def transformed(
    transforms: Mapping[str, Transform], weights: Mapping[str, Tensor], out: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return W~ of each weight, with all plain masks in one call.

    W~ of a frozen mask may be written to the weight's buffer in `out`, which is then returned.
    """
    masks = {name: transform for name, transform in transforms.items() if type(transform) is Masked}
    computed = compute([mask.operands(weights[name], (out or {}).get(name)) for name, mask in masks.items()])
    results = dict(zip(masks, computed, strict=True))
    return {
        name: _view(results[name], weights[name].shape) if name in results else transform(weights[name])
        for name, transform in transforms.items()
    }


def _view(tensor: Tensor, shape: torch.Size) -> Tensor:
    """A needless view may change the strides of dimensions of size 1, and convolutions look at those."""
    return tensor if tensor.shape == shape else tensor.view(shape)
