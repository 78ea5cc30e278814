"""Where a mask begins, if not at the paper's start: at R and k that are given, or where an earlier task's is."""

import torch
from torch import Tensor

from bitgraft.errors import TaskError
from bitgraft.transforms.masked import Masked

LEAST = 1e-4  # how far from its threshold an R begins at least


@torch.no_grad()
def begin(transform: Masked, scores: Tensor, k: Tensor) -> None:
    """Put R and k, (4, rows), into a transform that can learn."""
    rule = transform.rule
    rows = k if rule.per_channel else k.squeeze(1)
    assert transform.scores is not None
    transform.scores.copy_(scores)
    if transform.k is not None:
        transform.k.copy_(rows[list(rule.kept)])
    if transform.k1 is not None:
        transform.k1.copy_(rows[1])


@torch.no_grad()
def begin_as(mine: Masked, theirs: Masked, weight: Tensor) -> None:
    """Begin with another transform's mask and k: W~ is the same to the last bit.

    R lies as far from its threshold as a bit moves its weight to either side, in the mean over the layer: as if R were
    what was added to W, so that turning a bit takes as many steps as the way back to W would.
    """
    k, name = theirs.values(), mine.weight.name
    if k.shape != mine.constants.shape:
        raise TaskError(f"{name!r} has other k there, one per layer or one per channel: give both tasks the same `per`")
    for index, value in enumerate(mine.rule.fixed):
        if value is not None and bool((k[index] != value).any()):
            raise TaskError(
                f"{name!r} has k{index} = {k[index].flatten()[0].item():.4g} there, where it is to stay {value:g} "
                "here: give both tasks the same options"
            )
    size = step(theirs, weight).clamp(min=LEAST)
    begin(mine, torch.where(theirs.mask().to(size.device), size, -size) + mine.rule.threshold, k.view(4, -1))


def step(transform: Masked, weight: Tensor) -> Tensor:
    """How far a bit moves its weight to either side, |k2 + k3 W| / 2, the mean over the layer."""
    channel = transform.weight.channel_shape if transform.rule.per_channel else ()
    _, _, k2, k3 = transform.values().view(4, *channel)
    view = weight.detach().float().view(transform.weight.grouped_shape)
    size: Tensor = (k2 + k3 * view).abs().mean() / 2
    return size
