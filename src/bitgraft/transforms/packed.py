"""PackNet (Mallya and Lazebnik): tasks share one set of weights, and each owns the part that it trained."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bitgraft.errors import CorruptError, TaskError
from bitgraft.transforms.base import Transform, Weight, check_parts, strided_like, widened
from bitgraft.transforms.bits import pack, packed_size, unpack


class Packed(Transform):
    """W~ = what earlier tasks froze + what this task owns; the rest is zero and free for later tasks.

    `frozen` is the W~ of the previous task. The first task has none, and uses the backbone's weights where `free` is
    not set.
    """

    values: nn.Parameter
    frozen: Tensor | None
    free: Tensor
    own: Tensor

    def __init__(self, weight: Weight, frozen: Tensor | None, free: Tensor, start: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("frozen", frozen)
        self.register_buffer("free", free)
        self.register_buffer("own", free.clone())
        self.values = nn.Parameter(start)
        self.stores_free = frozen is None and not bool(free.all())

    def forward(self, weight: Tensor) -> Tensor:
        earlier = self.frozen if self.frozen is not None else weight * ~self.free  # zero wherever this task owns
        return (earlier + self.values * self.own).to(weight.dtype)

    def changes(self) -> list[nn.Parameter]:
        return [self.values]

    def left(self) -> Tensor:
        """Return the mask of weights that the next task may train."""
        return self.free & ~self.own

    def builds_on(self, previous: "Packed", first: "Packed", weight: Tensor) -> bool:
        """Return whether `frozen` is still the previous task's W~.

        The backbone's own weights, where the first task found nothing free, may have been rounded since.
        """
        differs = self.frozen != previous.forward(widened(weight.detach()))
        return torch.equal(self.free, previous.left()) and not bool((differs & first.free).any())

    @torch.no_grad()
    def prune(self, share: float) -> None:
        if not self.values.requires_grad:
            raise TaskError("a frozen task cannot be pruned, because later tasks build on its weights")
        owned = int(self.own.sum())
        kept = largest(self.values.abs().where(self.own, -1.0), owned - round(owned * share))
        self.own &= kept
        self.values.mul_(self.own)

    def bits(self, *, statistics: bool = False) -> int:
        masks = 2 if self.stores_free else 1
        return masks * self.weight.shape.numel() + 32 * int(self.own.sum())

    def parts(self) -> dict[str, Tensor]:
        parts = {"mask": pack(self.own), "values": self.values.detach()[self.own]}
        # The first task also stores what it found free: computed again from a rounded backbone, it could differ.
        return {**parts, "free": pack(self.free)} if self.stores_free else parts

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        size = (packed_size(self.weight.shape.numel()),)
        masks = dict.fromkeys(("mask", "free") if self.stores_free else ("mask",), size)
        check_parts(masks, {name: tensor for name, tensor in parts.items() if name != "values"})
        own = self._unpack(parts["mask"])
        check_parts({**masks, "values": (int(own.sum()),)}, parts)
        free = self._unpack(parts["free"]) if self.stores_free else self.free
        if (own & ~free).any():
            raise CorruptError(f"{self.weight.name!r} owns weights of an earlier task; the file is not usable")
        values = torch.zeros_like(self.values)
        values[own] = parts["values"].to(own.device)
        self.own, self.free, self.values = own, free, nn.Parameter(values)
        self.freeze()

    def _unpack(self, packed: Tensor) -> Tensor:
        return strided_like(self.free, unpack(packed, self.weight.shape).to(self.free.device))


def largest(magnitude: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` largest entries; among equals the first win."""
    order = magnitude.reshape(-1).argsort(descending=True, stable=True)
    mask = torch.zeros(magnitude.numel(), dtype=torch.bool, device=magnitude.device)
    mask[order[:count]] = True
    return mask.view(magnitude.shape)
