"""Communication between the processes of a run, and their random state."""

from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast, broadcast_object_list
from torch import Tensor, nn

from bitgraft.errors import TrainingError

T = TypeVar("T")
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def check_supported(accelerator: Accelerator) -> None:
    """Refuse sharded weights: a task's weights are computed from whole ones."""
    if accelerator.distributed_type in SHARDED:
        raise TrainingError(
            f"training under {accelerator.distributed_type.value} is not supported: use one process or plain data "
            "parallelism (torchrun, or `accelerate launch --multi_gpu`); the frozen backbone takes no optimiser memory"
        )


def gathered_in_main(item: T, accelerator: Accelerator) -> list[T] | None:
    """Every process's item in the main process; None in the others."""
    if accelerator.num_processes == 1:
        return [item]
    items: list[Any] | None = [None] * accelerator.num_processes if accelerator.is_main_process else None
    torch.distributed.gather_object(item, items)
    return items


def from_main(item: T, accelerator: Accelerator) -> T:
    """The main process's item, in every process."""
    if accelerator.num_processes > 1:
        (item,) = broadcast_object_list([item])
    return item


def broadcast_from_main(module: nn.Module, accelerator: Accelerator) -> None:
    """Copy the main process's parameters and buffers to all processes."""
    if accelerator.num_processes > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.detach().copy_(broadcast(tensor.detach().clone()))


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's generators on the CPU and on the device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random state at the end."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)
