"""A simulated accelerator: tensors on the device `sim` wrap CPU tensors, and operations that wait for it are counted.

It is a Python backend for PrivateUse1, so torch refuses to mix its tensors with CPU tensors, and every read of a value
is seen. Import it in a separate process.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

aten = torch.ops.aten
READS = (aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero, aten.item, aten.masked_select)


class _Backend(_DummyBackendModule):
    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("sim", _Backend())
SIM = torch.device("sim", 0)
waits: Counter[str] = Counter()
"""Operations that waited for the device."""


class SimTensor(torch.Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "SimTensor":
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=SIM
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        waits["tolist"] += 1
        return self.held.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), SimTensor(self.held.clone()).requires_grad_(self.requires_grad))

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Sim(TorchDispatchMode):
    """Within it, tensors can be made with `device="sim"`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours = any(isinstance(leaf, SimTensor) for leaf in tree_leaves((args, kwargs)))
        return _run(func, args, kwargs) if ours or _is_sim(kwargs.get("device")) else func(*args, **kwargs)


def _is_sim(device: Any) -> bool:
    return device is not None and torch.device(device).type == "sim"


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device = kwargs.get("device")
    packet = func.overloadpacket
    if packet in (aten.copy_, aten._to_copy):
        leaving = packet is aten.copy_ and not isinstance(args[0], SimTensor)
        leaving = leaving or (device is not None and not _is_sim(device))
        if leaving or (not isinstance(leaves[-1], SimTensor) and not kwargs.get("non_blocking", args[2:] == (True,))):
            waits[str(packet)] += 1
    else:
        leaving = False
        strays = [t for t in leaves if not isinstance(t, SimTensor) and t.dim() > 0]
        if strays and any(isinstance(t, SimTensor) for t in leaves):
            raise RuntimeError(f"{func}: a CPU tensor among those of the device")
    if packet in READS or (packet is aten.index and any(getattr(i, "dtype", None) == torch.bool for i in args[1])):
        waits[str(packet)] += 1
    plain_args, plain = tree_map(_held, (args, {**kwargs, **({"device": "cpu"} if device is not None else {})}))
    result = func(*plain_args, **plain)
    if packet is aten.copy_ and leaving:
        return args[0]
    if leaving or packet in (aten._local_scalar_dense, aten.equal, aten.is_nonzero):
        return result
    wrapped = tree_map(lambda leaf: SimTensor(leaf) if isinstance(leaf, Tensor) else leaf, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if func._schema.is_mutable else wrapped


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, SimTensor) else leaf
