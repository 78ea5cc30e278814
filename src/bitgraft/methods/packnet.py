"""PackNet (Mallya and Lazebnik): each task trains the weights that earlier tasks pruned away, then prunes its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bitgraft.errors import NoFreeWeightsError, TaskError
from bitgraft.methods.registry import Method, Options, Phase, is_number, register_method, require

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bitgraft.transforms.base import Transform, Weight


@dataclass(frozen=True)
class PacknetOptions(Options):
    norms: bool = False
    keep: float = 0.5
    """For the first task: the share of the backbone's weights to keep, the largest of each layer."""
    base: bool = False
    """For the first task: train all weights, starting from the backbone's, as PackNet does on ImageNet."""

    def __post_init__(self) -> None:
        super().__post_init__()
        share = is_number(self.keep) and 0 < self.keep < 1
        require(share, "keep", self.keep, "give the share of the backbone's weights to keep, above 0 and below 1")
        require(isinstance(self.base, bool), "base", self.base, "give True or False")


def packed(
    weight: Weight, tensor: Tensor, options: PacknetOptions, rng: torch.Generator | None, before: Sequence[Transform]
) -> Transform:
    import torch

    from bitgraft.transforms.base import strided_like, widened
    from bitgraft.transforms.packed import Packed, largest

    zeros = torch.zeros_like(tensor, dtype=torch.float32)
    previous = before[0] if before else None
    if isinstance(previous, Packed):
        if options.base:
            raise TaskError("base=True is for PackNet's first task, but there is already one: leave it out")
        return Packed(weight, previous.forward(widened(tensor)).detach(), previous.left(), zeros)
    if options.base:
        return Packed(weight, None, torch.ones_like(tensor, dtype=torch.bool), zeros.copy_(tensor))
    kept = largest(tensor.abs(), round(tensor.numel() * options.keep))
    return Packed(weight, None, strided_like(tensor, ~kept), zeros)


def refuse_full_network(transforms: Mapping[str, Transform]) -> None:
    from bitgraft.transforms.packed import Packed

    if not any(bool(t.free.any()) for t in transforms.values() if isinstance(t, Packed)):
        raise NoFreeWeightsError(
            "PackNet has no free weights left for another task, because the last task was not pruned: "
            "call prune(0.75) on it while it is still training, then add the next"
        )


register_method(
    Method(
        name="packnet",
        summary="each task trains the weights that earlier tasks pruned away; order matters",
        equation="W~ = what earlier tasks froze + what this task owns",
        options=PacknetOptions(),
        build=packed,
        depends_on_previous=True,
        check=refuse_full_network,
        phases=(Phase(epochs=20, rate=1e-3, drop_after=10), Phase(epochs=10, rate=1e-4, prune=0.75)),
    )
)
