"""PackNet (Mallya and Lazebnik): each task trains the weights that earlier ones pruned away, and prunes in its turn."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitgraft.errors import CorruptError, NoFreeWeightsError, TaskError
from bitgraft.masks import pack, packed_size, unpack
from bitgraft.methods.registry import Method, Options, Phase, register_method
from bitgraft.transforms import Transform, Weight, expect


@dataclass(frozen=True)
class PacknetOptions(Options):
    norms: bool = False
    keep: float = 0.5
    """The share of the backbone's weights, the largest in each layer, that the first task finds in place."""
    base: bool = False
    """This task retrains the backbone's own: it owns every weight and starts from them, as PackNet does on ImageNet."""

    def __post_init__(self) -> None:
        if not 0 < self.keep < 1:
            raise TaskError(
                f"keep={self.keep!r}: give the share of the backbone's weights to keep, above 0 and below 1"
            )


class Packed(Transform):
    """W~ = what earlier tasks froze, plus what this task owns; the rest is zero and free for later tasks."""

    values: Tensor
    frozen: Tensor
    free: Tensor
    own: Tensor

    def __init__(self, weight: Weight, frozen: Tensor, free: Tensor, start: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("frozen", frozen, persistent=False)
        self.register_buffer("free", free, persistent=False)
        self.register_buffer("own", free.clone(), persistent=False)
        self.values = nn.Parameter(start)

    def forward(self, weight: Tensor) -> Tensor:
        return torch.where(self.own, self.values, self.frozen).to(weight.dtype)

    def left(self) -> Tensor:
        """The weights that a further task may train."""
        return self.free & ~self.own

    @torch.no_grad()
    def prune(self, share: float) -> None:
        owned = int(self.own.sum())
        kept = largest(self.values.abs().where(self.own, -1.0), owned - round(owned * share))
        self.own &= kept
        self.values.mul_(self.own)

    def bits(self) -> int:
        return self.weight.shape.numel() + 32 * int(self.own.sum())

    def parts(self) -> dict[str, Tensor]:
        return {"mask": pack(self.own), "values": self.values.detach().reshape(-1)[self.own.reshape(-1)]}

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        size = packed_size(self.weight.shape.numel())
        if "mask" not in parts or tuple(parts["mask"].shape) != (size,):
            raise CorruptError(f"{self.weight.name!r} should have a mask of {size} bytes; the file is not usable")
        own = unpack(parts["mask"], self.weight.shape).to(self.free.device)
        expect({"mask": (size,), "values": (int(own.sum()),)}, parts)
        if (own & ~self.free).any():
            raise CorruptError(f"{self.weight.name!r} owns weights that an earlier task holds; the file is not usable")
        values = torch.zeros(self.weight.shape, device=own.device)
        values[own] = parts["values"].to(own.device)
        self.own, self.values = own, nn.Parameter(values)
        self.freeze()


def largest(magnitude: Tensor, count: int) -> Tensor:
    """A mask of the `count` largest entries, the first of equals."""
    order = magnitude.reshape(-1).argsort(descending=True, stable=True)
    mask = torch.zeros(magnitude.numel(), dtype=torch.bool, device=magnitude.device)
    mask[order[:count]] = True
    return mask.view(magnitude.shape)


def packed(
    weight: Weight, tensor: Tensor, options: PacknetOptions, rng: torch.Generator | None, before: Transform | None
) -> Packed:
    wide = tensor.to(torch.float32)
    if isinstance(before, Packed):
        return Packed(weight, before.forward(wide).detach(), before.left(), torch.zeros_like(wide))
    if options.base:
        return Packed(weight, torch.zeros_like(wide), torch.ones_like(wide, dtype=torch.bool), wide.clone())
    kept = largest(wide.abs(), round(wide.numel() * options.keep))
    return Packed(weight, wide * kept, ~kept, torch.zeros_like(wide))


def refuse_full_network(built: Mapping[str, Transform]) -> None:
    if not any(bool(t.free.any()) for t in built.values() if isinstance(t, Packed)):
        raise NoFreeWeightsError(
            "PackNet has no free weights left for a further task: the last one was not pruned and took them all; "
            "call prune(0.75) on it while it is still learning, then add the next"
        )


PACKNET = register_method(
    Method(
        name="packnet",
        summary="each task trains the weights that earlier tasks pruned away; order matters",
        equation="W~ = what earlier tasks froze + what this task owns",
        options=PacknetOptions(),
        build=packed,
        leans=True,
        check=refuse_full_network,
        phases=(Phase(epochs=20, rate=1e-3, drop_after=10), Phase(epochs=10, rate=1e-4, prune=0.75)),
    )
)
