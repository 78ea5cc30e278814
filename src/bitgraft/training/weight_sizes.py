"""The sizes of weights, which relative rates are multiplied by (`Config.relative_rates`)."""

from collections.abc import Mapping

from torch import nn

from bitgraft.task import Task
from bitgraft.training.joint import Shared
from bitgraft.transforms.base import rms


def weight_sizes(parts: Mapping[str, Task | Shared]) -> dict[nn.Parameter, float]:
    """Return the RMS of the backbone's weight, for each parameter that replaces or changes one in its own units."""
    sizes: dict[nn.Parameter, float] = {}
    for part in parts.values():
        if isinstance(part, Shared):
            sizes.update({parameter: rms(parameter) for parameter in part.parameters()})
            continue
        for name, transform in part.transforms.items():
            sizes.update(dict.fromkeys(transform.changes(), rms(part.anatomy.tensor(name))))
        for name, tensor in part.owned.items():
            if isinstance(tensor, nn.Parameter):
                sizes[tensor] = rms(part.anatomy.tensor(name))
    return sizes
