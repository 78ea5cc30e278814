"""Joint methods: the backbone weights that several tasks share, trained along with the tasks."""

from collections.abc import Iterator, Mapping

from torch import nn

from bitgraft.errors import TrainingError
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.task import Task, dotless

SHARED = "the backbone"  # key of the shared weights among the tasks; no task's name may have a space


class Shared(nn.Module):
    """The weights that no task owns. They are the tensors of the backbone itself, a `Network.joint_copy`."""

    def __init__(self, net: Network, tasks: Mapping[str, Task]) -> None:
        super().__init__()
        owned = set(net.anatomy.head_names()).union(*(task.owned for task in tasks.values()))
        shared = {n: p for n, p in net.backbone.named_parameters() if n not in owned and p.is_floating_point()}
        self._requires_grad = {dotless(name): parameter.requires_grad for name, parameter in shared.items()}
        for name, parameter in shared.items():
            self.register_parameter(dotless(name), parameter)
        self.requires_grad_(True)
        for task in tasks.values():
            task._share(shared)

    def roles(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (("weights", parameter) for parameter in self.parameters())

    def release(self, tasks: Mapping[str, Task]) -> None:
        """Freeze the weights again."""
        for task in tasks.values():
            task._share(())
        for name, parameter in self.named_parameters():
            parameter.grad = None
            parameter.requires_grad_(self._requires_grad[name])


def shared_weights(net: Network, tasks: Mapping[str, Task]) -> Shared | None:
    """The shared weights if the method is a joint one; an error if other tasks depend on them."""
    methods = {task.metadata.method for task in tasks.values()}
    joint = {name for name in methods if registry.get(name).joint}
    if not joint:
        return None
    reason = f"method {min(joint)!r} trains the weights that tasks share"
    if not net.joint:
        raise TrainingError(f"{reason}: add the tasks to a copy of the network, net.joint_copy(), and train them there")
    if len(methods) > 1:
        raise TrainingError(f"{reason}, so all tasks must use that method, not {', '.join(sorted(methods))}")
    if others := sorted(set(net.tasks) - set(tasks)):
        raise TrainingError(f"{reason}, which would change task {others[0]!r}: train it as well, or remove it first")
    if str(net.anatomy.dtype) != "torch.float32":
        raise TrainingError(f"{reason}: use a backbone in float32, not {net.anatomy.dtype}")
    return Shared(net, tasks)
