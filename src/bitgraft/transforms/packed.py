"""What a PackNet task (Mallya and Lazebnik) makes of a weight: what earlier tasks froze, plus what it owns."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bitgraft.errors import CorruptError, TaskError
from bitgraft.transforms.base import Transform, Weight, expect, strided_like
from bitgraft.transforms.bits import pack, packed_size, unpack


class Packed(Transform):
    """W~ = what earlier tasks froze, plus what this task owns; the rest is zero and free for later tasks.

    `frozen` is the earlier task's W~. The first task has none: it finds the backbone's weights where they are not free.
    """

    values: Tensor
    frozen: Tensor | None
    free: Tensor
    own: Tensor

    def __init__(self, weight: Weight, frozen: Tensor | None, free: Tensor, start: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("frozen", frozen, persistent=False)
        self.register_buffer("free", free, persistent=False)
        self.register_buffer("own", free.clone())
        self.values = nn.Parameter(start)
        self.chose_free = frozen is None and not bool(free.all())

    def forward(self, weight: Tensor) -> Tensor:
        found = self.frozen if self.frozen is not None else weight * ~self.free
        return (found + self.values * self.own).to(weight.dtype)  # what was found is zero where the task owns

    def left(self) -> Tensor:
        """The weights that a further task may train."""
        return self.free & ~self.own

    @torch.no_grad()
    def prune(self, share: float) -> None:
        if not self.values.requires_grad:
            raise TaskError("a task that has ended learning cannot be pruned: later tasks stand on its weights")
        owned = int(self.own.sum())
        kept = largest(self.values.abs().where(self.own, -1.0), owned - round(owned * share))
        self.own &= kept
        self.values.mul_(self.own)

    def bits(self, *, statistics: bool = False) -> int:
        masks = 2 if self.chose_free else 1
        return masks * self.weight.shape.numel() + 32 * int(self.own.sum())

    def parts(self) -> dict[str, Tensor]:
        held = {"mask": pack(self.own), "values": self.values.detach()[self.own]}
        # Which weights the first task found pruned is stored too: read again off a rounded backbone, it could differ.
        return {**held, "free": pack(self.free)} if self.chose_free else held

    def restore(self, parts: Mapping[str, Tensor]) -> None:
        size, name = (packed_size(self.weight.shape.numel()),), self.weight.name
        masks = dict.fromkeys(("mask", "free") if self.chose_free else ("mask",), size)
        expect(masks, {part: tensor for part, tensor in parts.items() if part != "values"})
        own = self._placed(parts["mask"])
        expect({**masks, "values": (int(own.sum()),)}, parts)
        free = self._placed(parts["free"]) if self.chose_free else self.free
        if (own & ~free).any():
            raise CorruptError(f"{name!r} owns weights that an earlier task holds; the file is not usable")
        values = torch.zeros_like(self.values)
        values[own] = parts["values"].to(own.device)
        self.own, self.free, self.values = own, free, nn.Parameter(values)
        self.freeze()

    def _placed(self, packed: Tensor) -> Tensor:
        return strided_like(self.free, unpack(packed, self.weight.shape).to(self.free.device))


def largest(magnitude: Tensor, count: int) -> Tensor:
    """A mask of the `count` largest entries, the first of equals."""
    order = magnitude.reshape(-1).argsort(descending=True, stable=True)
    mask = torch.zeros(magnitude.numel(), dtype=torch.bool, device=magnitude.device)
    mask[order[:count]] = True
    return mask.view(magnitude.shape)
