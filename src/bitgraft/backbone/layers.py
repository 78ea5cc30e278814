"""What kind of layer a module is."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

COUNTER = "num_batches_tracked"  # counts training steps; no output depends on it, and old files lack it
ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def is_transposed(module: nn.Module) -> bool:
    """A layer whose weight is (inputs, outputs, ...): transposed convolutions, and GPT-2's linear layers."""
    return isinstance(module, _ConvTransposeNd) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D, a linear layer with its weight transposed, known by its looks to spare the import."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_conv(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd)


def is_weighted(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd | nn.Linear) or _is_conv1d(module)


def is_classifier(module: nn.Module) -> bool:
    """A layer that can be a head: linear, or a convolution of size one."""
    return isinstance(module, nn.Linear) or (is_conv(module) and all(s == 1 for s in module.kernel_size))  # type: ignore[union-attr]


def is_norm(module: nn.Module) -> bool:
    """A norm layer by type, or one that is called so and holds vectors only (timm and transformers have their own)."""
    if isinstance(module, _BatchNorm | _InstanceNorm | nn.LayerNorm | nn.GroupNorm):
        return True
    own = [t for t in [*module._parameters.values(), *module._buffers.values()] if t is not None]
    named = "norm" in type(module).__name__.lower()
    return named and bool(own) and all(t.squeeze().dim() <= 1 for t in own)


def undoes_scale(layer: nn.Module, norm: nn.Module) -> bool:
    """A norm of each channel takes away a layer's bias as well; the others undo a scale only where there is none."""
    return undoes_channel_scales(norm) or (not _frozen(norm) and getattr(layer, "bias", None) is None)


def undoes_channel_scales(norm: nn.Module) -> bool:
    """Batch and instance norm take each channel by itself, and so undo a scale for each; the others mix channels."""
    single = isinstance(norm, nn.GroupNorm) and norm.num_groups == norm.num_channels
    return not _frozen(norm) and (single or isinstance(norm, _BatchNorm | _InstanceNorm))


def _frozen(norm: nn.Module) -> bool:
    """torchvision's and timm's frozen batch norms: a fixed affine map, which undoes nothing."""
    return "frozen" in type(norm).__name__.lower()


def weight_attributes(module: nn.Module) -> list[str]:
    """The attributes of a layer that hold weights to transform."""
    if is_weighted(module):
        return ["weight"]
    if isinstance(module, nn.MultiheadAttention):
        return [name for name in ATTENTION_WEIGHTS if getattr(module, name) is not None]
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return [name for name in module._parameters if name.startswith("weight")]
    return []
