"""The mask family: W~ = k0 W + k1 1 + k2 M + k3 W∘M, with each k learned or constant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from bitgraft.methods.registry import Method, Options, is_number, register_method, require, uniform

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bitgraft.transforms.base import Transform, Weight
    from bitgraft.transforms.bits import Surrogate
    from bitgraft.transforms.masked import MaskRule

K = float | Literal["learn"]
MIN_BITS, MAX_BITS = 0.05, 4


@dataclass(frozen=True)
class MaskOptions(Options):
    """Each k is a constant or learned. Learned k start at W~ = W."""

    k0: K | Literal["auto"] = "auto"
    """auto: 1 if the next norm cancels the weight's scale (per channel, with per="channel"), else learned."""
    k1: K = "learn"
    k2: K = "learn"
    k3: K = "learn"
    per: Literal["layer", "channel"] = "layer"
    """One k per layer, or one per output channel."""
    surrogate: Surrogate = "identity"
    threshold: float = 0.0
    init: tuple[float, float] = (1e-4, 2e-4)
    """R starts uniformly in this range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("k0", "k1", "k2", "k3"):
            value, words = getattr(self, name), ("learn", "auto") if name == "k0" else ("learn",)
            remedy = f"give a number, or {' or '.join(map(repr, words))}"
            require(is_number(value) or value in words, name, value, remedy)
        for name, words in (("per", ("layer", "channel")), ("surrogate", ("identity", "sigmoid"))):
            value = getattr(self, name)
            require(value in words, name, value, f"choose {' or '.join(map(repr, words))}")
        require(is_number(self.threshold), "threshold", self.threshold, "give a number")
        pair = isinstance(self.init, tuple) and len(self.init) == 2 and all(map(is_number, self.init))
        ordered = pair and self.init[0] <= self.init[1]
        require(ordered, "init", self.init, "give the lowest and the highest initial value of R")

    def rule(self, weight: Weight) -> MaskRule:
        from bitgraft.transforms.masked import MaskRule

        fixed = [None if isinstance(k, str) else float(k) for k in (self.k0, self.k1, self.k2, self.k3)]
        if self.k0 == "auto" and (weight.channels_scale_free if self.per == "channel" else weight.scale_free):
            fixed[0] = 1.0
        return MaskRule(tuple(fixed), self.threshold, self.surrogate, self.per == "channel")


@dataclass(frozen=True)
class FullOptions(MaskOptions):
    bits: float | None = None
    """Store W~ = W + step Q instead of masks, so that the file takes this many bits per weight, without the head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.bits is None or (is_number(self.bits) and MIN_BITS <= self.bits <= MAX_BITS)
        require(fits, "bits", self.bits, f"give a number from {MIN_BITS} to {MAX_BITS}")


def masked(
    weight: Weight, tensor: Tensor, options: MaskOptions, rng: torch.Generator | None, before: Sequence[Transform]
) -> Transform:
    from bitgraft.transforms.levels import Levels
    from bitgraft.transforms.masked import Masked
    from bitgraft.transforms.shared_masks import Borrowing

    bits = options.bits if isinstance(options, FullOptions) else None
    low, high = options.init if bits is None else (0.0, 0.0)
    scores = uniform(weight.shape, low, high, rng, tensor) if rng is not None else None
    if bits is not None:
        require(not before, "bits", bits, "this does not work with masks of earlier tasks; leave out one of the two")
        return Levels(weight, scores)
    rule, earlier = options.rule(weight), [mask for mask in before if isinstance(mask, Masked)]
    return Borrowing(weight, rule, scores, earlier) if earlier else Masked(weight, rule, scores)


FULL = "masks with a learned scale, shift and product term; own norm layers (the paper)"
SIMPLE = "full without the product term (the paper)"
PIGGYBACK = "a mask that filters the weights; norm layers frozen (initialised as in Piggyback's code)"
FILTER = MaskOptions(norms=False, k0=0.0, k1=0.0, k2=0.0, k3=1.0, threshold=5e-3, init=(1e-2, 1e-2))
NORMS = replace(FILTER, norms=True)

register_method(Method("full", FULL, "W~ = k0 W + k1 1 + k2 M + k3 W∘M", FullOptions(), masked, borrows=True))
register_method(Method("simple", SIMPLE, "W~ = k0 W + k1 1 + k2 M", MaskOptions(k3=0.0), masked))
register_method(Method("piggyback", PIGGYBACK, "W~ = W∘M", FILTER, masked))
register_method(Method("piggyback-bn", "piggyback with the task's own norm layers", "W~ = W∘M", NORMS, masked))
