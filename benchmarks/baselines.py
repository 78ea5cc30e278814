"""Baselines, written the obvious way."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

Roles = Iterable[tuple[str, nn.Parameter]]


class _Binarise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, threshold: float) -> Tensor:  # noqa: ARG004
        return (scores > threshold).to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


class PiggybackConv(nn.Conv2d):
    """Mask, product and convolution, each a separate operation and tensor."""

    def forward(self, x: Tensor) -> Tensor:
        mask = _Binarise.apply(self.scores, 5e-3)
        return self._conv_forward(x, mask * self.weight, self.bias)


def piggyback(model: nn.Module) -> Roles:
    """Convert a network to Piggyback with trained norm layers; return its trainable parameters."""
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = PiggybackConv
            module.weight.requires_grad_(False)
            module.scores = nn.Parameter(torch.full_like(module.weight, 1e-2))
    return [(role(name), p) for name, p in model.named_parameters() if p.requires_grad]


def lora(model: nn.Module, rank: int = 8) -> tuple[nn.Module, Roles]:
    """Apply PEFT's LoRA to every convolution, with head and norm layers trained."""
    from peft import LoraConfig, get_peft_model

    convs = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    wrapped = get_peft_model(model, LoraConfig(r=rank, target_modules=convs, modules_to_save=["fc"]))
    for module in wrapped.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(True)
    return wrapped, [(role(name), p) for name, p in wrapped.named_parameters() if p.requires_grad]


def role(name: str) -> str:
    if "fc." in name or "classifier" in name:
        return "head"
    return "scores" if name.endswith("scores") else "weights"
