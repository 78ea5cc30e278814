"""The mask family: W~ = k0 W + k1 1 + k2 M + k3 W∘M, and what is constant or learned in it."""

from __future__ import annotations

import functools
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
LEAST_BITS, MOST_BITS = 0.05, 4


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
            value, words = getattr(self, name), ("learn", "auto") if name == "k0" else ("learn",)
            require(is_number(value) or value in words, name, value, f"give a number, or {_either(words)}")
        for name, words in (("per", ("layer", "channel")), ("surrogate", ("identity", "sigmoid"))):
            require(getattr(self, name) in words, name, getattr(self, name), f"choose {_either(words)}")
        require(is_number(self.threshold), "threshold", self.threshold, "give a number")
        pair = isinstance(self.init, tuple) and len(self.init) == 2 and all(map(is_number, self.init))
        ordered = pair and self.init[0] <= self.init[1]
        require(ordered, "init", self.init, "give the lowest and the highest starting value of R")

    def rule(self, weight: Weight) -> MaskRule:
        return self._rules[weight.channels_scale_free if self.per == "channel" else weight.scale_free]

    @functools.cached_property
    def _rules(self) -> tuple[MaskRule, MaskRule]:
        """For a weight that keeps its scale, and for one whose scale a norm undoes."""
        from bitgraft.transforms.masked import MaskRule

        learned = tuple(None if isinstance(k, str) else float(k) for k in (self.k0, self.k1, self.k2, self.k3))
        free = (1.0, *learned[1:]) if self.k0 == "auto" else learned
        usual, scale_free = (
            MaskRule(fixed, self.threshold, self.surrogate, self.per == "channel") for fixed in (learned, free)
        )
        return usual, scale_free


@dataclass(frozen=True)
class FullOptions(MaskOptions):
    """With `bits`, W~ = W + step Q in place of the masks."""

    bits: float | None = None
    """What the file may take for each weight, head apart; None: a mask, one bit, and k."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.bits is None or (is_number(self.bits) and LEAST_BITS <= self.bits <= MOST_BITS)
        require(fits, "bits", self.bits, f"give a number from {LEAST_BITS} to {MOST_BITS}")


def _either(words: tuple[str, ...]) -> str:
    return " or ".join(map(repr, words))


def masked(
    weight: Weight, tensor: Tensor, options: MaskOptions, rng: torch.Generator | None, before: Sequence[Transform]
) -> Transform:
    from bitgraft.transforms.levels import Levels
    from bitgraft.transforms.masked import Masked
    from bitgraft.transforms.shared_masks import Borrowing, own_mask

    if isinstance(options, FullOptions) and options.bits is not None:
        require(not before, "bits", options.bits, "masks of earlier tasks cannot be mixed in; leave out one of them")
        return Levels(weight, uniform(weight.shape, 0.0, 0.0, rng, tensor) if rng is not None else None)
    scores = uniform(weight.shape, *options.init, rng, tensor) if rng is not None else None
    own = Masked(weight, options.rule(weight), scores)
    earlier = [mask for transform in before if (mask := own_mask(transform)) is not None]
    return Borrowing(own, earlier, tensor.device) if earlier else own


LEARNED = "masks with a learned scale, shift and product term; own norm layers (the paper)"
FILTER = "a mask that filters the weights; norm layers frozen, starting as its own code does"
PIGGYBACK = MaskOptions(norms=False, k0=0.0, k1=0.0, k2=0.0, k3=1.0, threshold=5e-3, init=(1e-2, 1e-2))
OWN_NORMS = replace(PIGGYBACK, norms=True)

register_method(Method("full", LEARNED, "W~ = k0 W + k1 1 + k2 M + k3 W∘M", FullOptions(), masked, borrows=True))
register_method(
    Method(
        "simple", "full without the product term (the paper)", "W~ = k0 W + k1 1 + k2 M", MaskOptions(k3=0.0), masked
    )
)
register_method(Method("piggyback", FILTER, "W~ = W∘M", PIGGYBACK, masked))
register_method(Method("piggyback-bn", "piggyback with the task's own norm layers", "W~ = W∘M", OWN_NORMS, masked))
