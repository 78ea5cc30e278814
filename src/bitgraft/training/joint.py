"""What tasks learn together: the backbone's own weights, where their method trains those as well."""

from collections.abc import Iterator, Mapping

from torch import nn

from bitgraft.errors import TrainingError
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.task import Task, dotless

SHARED = "the backbone"  # what is shared goes by this among tasks; with a space, it is no task's name


class Shared(nn.Module):
    """The weights that no task has for itself. They are the backbone's own tensors, of a `Network.joint_copy`."""

    def __init__(self, net: Network, tasks: Mapping[str, Task]) -> None:
        super().__init__()
        apart = set(net.anatomy.head_names()).union(*(task.owned for task in tasks.values()))
        found = {n: p for n, p in net.backbone.named_parameters() if n not in apart and p.is_floating_point()}
        self._asked = {dotless(name): parameter.requires_grad for name, parameter in found.items()}
        for name, parameter in found.items():
            self.register_parameter(dotless(name), parameter)
        self.requires_grad_(True)
        for task in tasks.values():
            task._share(found)

    def roles(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (("weights", parameter) for parameter in self.parameters())

    def release(self, tasks: Mapping[str, Task]) -> None:
        """Out of gradients' reach again."""
        for task in tasks.values():
            task._share(())
        for name, parameter in self.named_parameters():
            parameter.grad = None
            parameter.requires_grad_(self._asked[name])


def shared_weights(net: Network, tasks: Mapping[str, Task]) -> Shared | None:
    """What the tasks learn together, if their method wants that and nobody else stands on it."""
    methods = {task.metadata.method for task in tasks.values()}
    joint = {name for name in methods if registry.get(name).joint}
    if not joint:
        return None
    said = f"method {min(joint)!r} trains the weights that tasks share"
    if not net.joint:
        raise TrainingError(f"{said}: add the tasks to a copy of the network, net.joint_copy(), and train them there")
    if len(methods) > 1:
        raise TrainingError(f"{said}, so all tasks must be of that method, not of {', '.join(sorted(methods))}")
    if others := sorted(set(net.tasks) - set(tasks)):
        raise TrainingError(f"{said}, which would change task {others[0]!r}: train it along, or remove it first")
    if str(net.anatomy.dtype) != "torch.float32":
        raise TrainingError(f"{said}: give it a backbone in float32, not {net.anatomy.dtype}")
    return Shared(net, tasks)
