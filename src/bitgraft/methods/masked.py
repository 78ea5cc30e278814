"""The mask family: W~ = k0 W + k1 1 + k2 M + k3 W∘M, and what is constant or learned in it."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bitgraft.errors import TaskError
from bitgraft.methods.registry import Method, Options, is_number, register_method, uniform
from bitgraft.transforms.base import Transform, Weight
from bitgraft.transforms.bits import Surrogate
from bitgraft.transforms.masked import Masked, MaskRule
from bitgraft.transforms.shared_masks import Borrowing, own_mask

K = float | Literal["learn"]


@dataclass(frozen=True)
class MaskOptions(Options):
    """Each k is a constant or learned; a learned one begins where W~ = W."""

    k0: K | Literal["auto"] = "auto"
    """auto: 1 where a norm undoes the weight's scale (with per="channel", that of each channel), learned elsewhere."""
    k1: K = "learn"
    k2: K = "learn"
    k3: K = "learn"
    per: Literal["layer", "channel"] = "layer"
    """One k for a layer, or one for each of its output channels."""
    surrogate: Surrogate = "identity"
    threshold: float = 0.0
    init: tuple[float, float] = (1e-4, 2e-4)
    """R starts uniform in this range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("k0", "k1", "k2", "k3"):
            value = getattr(self, name)
            words = ("learn", "auto") if name == "k0" else ("learn",)
            if not is_number(value) and value not in words:
                raise TaskError(f"{name}={value!r}: give a number, or {' or '.join(map(repr, words))}")
        _one_of("per", self.per, ("layer", "channel"))
        _one_of("surrogate", self.surrogate, ("identity", "sigmoid"))
        if not is_number(self.threshold):
            raise TaskError(f"threshold={self.threshold!r}: give a number")
        pair = isinstance(self.init, tuple) and len(self.init) == 2 and all(map(is_number, self.init))
        if not pair or self.init[0] > self.init[1]:
            raise TaskError(f"init={self.init!r}: give the lowest and the highest starting value of R")

    def rule(self, weight: Weight) -> MaskRule:
        per_channel, k0 = self.per == "channel", self.k0
        if k0 == "auto":
            k0 = 1.0 if (weight.channels_scale_free if per_channel else weight.scale_free) else "learn"
        return _rule(k0, self.k1, self.k2, self.k3, self.threshold, self.surrogate, per_channel)


@functools.lru_cache
def _rule(k0: K, k1: K, k2: K, k3: K, threshold: float, surrogate: Surrogate, per_channel: bool) -> MaskRule:
    """One for all layers and tasks that have the same."""
    fixed = tuple(None if isinstance(value, str) else float(value) for value in (k0, k1, k2, k3))
    return MaskRule(fixed, threshold, surrogate, per_channel)


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise TaskError(f"{name}={value!r}: choose {' or '.join(map(repr, choices))}")


def masked(
    weight: Weight, tensor: Tensor, options: MaskOptions, rng: torch.Generator | None, before: Sequence[Transform]
) -> Masked | Borrowing:
    scores = uniform(weight.shape, *options.init, rng, tensor) if rng is not None else None
    own = Masked(weight, options.rule(weight), scores)
    earlier = [mask for transform in before if (mask := own_mask(transform)) is not None]
    return Borrowing(own, earlier, tensor.device) if earlier else own


FULL = register_method(
    Method(
        name="full",
        summary="masks with a learned scale, shift and product term; own norm layers (the paper)",
        equation="W~ = k0 W + k1 1 + k2 M + k3 W∘M",
        options=MaskOptions(),
        build=masked,
        borrows=True,
    )
)
SIMPLE = register_method(
    replace(
        FULL,
        name="simple",
        summary="full without the product term (the paper)",
        equation="W~ = k0 W + k1 1 + k2 M",
        options=MaskOptions(k3=0.0),
        borrows=False,
    )
)
PIGGYBACK = register_method(
    replace(
        FULL,
        name="piggyback",
        summary="a mask that filters the weights; norm layers frozen, starting as its own code does",
        equation="W~ = W∘M",
        options=MaskOptions(norms=False, k0=0.0, k1=0.0, k2=0.0, k3=1.0, threshold=5e-3, init=(1e-2, 1e-2)),
        borrows=False,
    )
)
PIGGYBACK_BN = register_method(
    replace(
        PIGGYBACK,
        name="piggyback-bn",
        summary="piggyback with the task's own norm layers",
        options=replace(PIGGYBACK.options, norms=True),
    )
)
