"""The kinds of layers: weighted, norm, head."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs, ...): transposed convolutions, and GPT-2's linear layers."""
    return isinstance(module, _ConvTransposeNd) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D, a linear layer with a transposed weight, recognised without importing transformers."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_conv(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd)


def is_weighted(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd | nn.Linear) or _is_conv1d(module)


def is_classifier(module: nn.Module) -> bool:
    """Whether the layer can be a head: linear, or a 1x1 convolution."""
    return isinstance(module, nn.Linear) or (is_conv(module) and all(s == 1 for s in module.kernel_size))  # type: ignore[union-attr]


def is_norm(module: nn.Module) -> bool:
    """Whether it is a norm layer, by type, or by name if it has only vectors (timm and transformers have their own)."""
    if isinstance(module, _BatchNorm | _InstanceNorm | nn.LayerNorm | nn.GroupNorm):
        return True
    own = [t for t in [*module._parameters.values(), *module._buffers.values()] if t is not None]
    named = "norm" in type(module).__name__.lower()
    return named and bool(own) and all(t.squeeze().dim() <= 1 for t in own)


def undoes_scale(layer: nn.Module, norm: nn.Module) -> bool:
    """Per-channel norms cancel a layer's scale and bias; others cancel a scale only if there is no bias."""
    return undoes_channel_scales(norm) or (not _frozen(norm) and getattr(layer, "bias", None) is None)


def undoes_channel_scales(norm: nn.Module) -> bool:
    """Per-channel norms, such as batch and instance norm, cancel a scale per channel; others mix channels."""
    per_channel = isinstance(norm, nn.GroupNorm) and norm.num_groups == norm.num_channels
    return not _frozen(norm) and (per_channel or isinstance(norm, _BatchNorm | _InstanceNorm))


def _frozen(norm: nn.Module) -> bool:
    """Frozen batch norms of torchvision and timm are fixed affine maps, which cancel nothing."""
    return "frozen" in type(norm).__name__.lower()


def weight_attributes(module: nn.Module) -> list[str]:
    """Return the names of a layer's weights to transform."""
    if is_weighted(module):
        return ["weight"]
    if isinstance(module, nn.MultiheadAttention):
        return [name for name in ATTENTION_WEIGHTS if getattr(module, name) is not None]
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return [name for name in module._parameters if name.startswith("weight")]
    return []
