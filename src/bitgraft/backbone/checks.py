"""Refuses modules that cannot be a backbone, and warns if tasks could change little of one."""

import warnings
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bitgraft.errors import BackboneError, BackboneWarning


def refuse(backbone: nn.Module) -> None:
    """Raise if the backbone's weights cannot be replaced."""
    if not isinstance(backbone, nn.Module):
        raise BackboneError(f"a backbone must be a torch.nn.Module, not a {type(backbone).__name__}: build it first")
    if isinstance(backbone, torch.jit.ScriptModule):
        raise BackboneError("the backbone is a TorchScript module, whose weights are fixed: pass the Python module")
    if hasattr(backbone, "_orig_mod"):
        raise BackboneError("the backbone is already compiled: pass the plain module and compile the Network instead")
    if isinstance(backbone, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise BackboneError("the backbone is wrapped for parallel training: pass `backbone.module`")
    for name, module in backbone.named_modules():
        if hasattr(module, "parametrizations"):
            remedy = "call torch.nn.utils.parametrize.remove_parametrizations on it first"
            raise BackboneError(f"layer {name!r} computes its weight with a parametrization: {remedy}")
        if ".quantized" in type(module).__module__:
            raise BackboneError(f"layer {name!r} is quantised: pass the backbone before quantisation")
    for name, tensor in [*backbone.named_parameters(), *backbone.named_buffers()]:
        if is_lazy(tensor):
            raise BackboneError(f"{name!r} is lazy and has no shape yet: run the backbone once on a batch first")
        if type(tensor) not in (Tensor, nn.Parameter):  # torchao, bitsandbytes, DTensor
            raise BackboneError(
                f"{name!r} is a {type(tensor).__name__}, not a plain tensor: "
                "pass the backbone before it is quantised or sharded"
            )


def refuse_bypassed(backbone: nn.Module, bypassed: Collection[str]) -> None:
    """Raise if the forward pass uses parameters by references that a copy shares: tasks would have no effect there."""
    if bypassed:
        names = ", ".join(map(repr, list(bypassed)[:3]))
        raise BackboneError(
            f"{type(backbone).__name__} also uses {names} through a list, a lambda or a wrapped function, where a task "
            "could not replace it: use the attribute of its module"
        )


def warn_of_shared(backbone: nn.Module, shared: Collection[str]) -> None:
    """Warn if tasks cannot change more than half of the parameters, not counting embeddings (text models)."""
    embeddings = {id(m.weight) for m in backbone.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    sizes = {name: p.numel() for name, p in backbone.named_parameters() if id(p) not in embeddings}
    untouched = sorted((name for name in shared if name in sizes), key=lambda name: -sizes[name])
    share = 1 - sum(sizes[name] for name in untouched) / max(1, sum(sizes.values()))
    if share < 0.5:
        without = ", without embeddings" if embeddings else ""
        warnings.warn(
            f"a task can change only {share:.0%} of the parameters of {type(backbone).__name__}{without}; it leaves "
            f"{', '.join(map(repr, untouched[:3]))} as they are: pass patterns of other weights to transform, "
            "Network(backbone, transform=...), or of tensors to train directly, add_task(..., own=...)",
            BackboneWarning,
            stacklevel=4,
        )
