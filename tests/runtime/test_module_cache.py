"""Computed weights stay within the limits of the cache."""

import torch
from tiny import batch, run, tiny

from bitgraft.network import Network


def test_computed_weights_stay_within_the_memory_budget():
    net, x = Network(tiny(), active=8), batch()
    for name in "abc":
        net.add_task(name, classes=3)
    one = sum(weight.numel() * 4 for weight in (net.backbone.get_parameter(n) for n in net.tasks["a"].transforms))
    wanted = [run(net.eval(), x, task=name) for name in "abca"]
    small = Network(tiny(), memory=2 * one)
    for name in "abc":
        small.add_task(name, classes=3)
    assert all(torch.equal(run(small.eval(), x, task=name), want) for name, want in zip("abca", wanted, strict=True))
    assert small.resident == {"c", "a"}
    smallest = Network(tiny(), memory=0)
    smallest.add_task("a", classes=3)
    assert torch.equal(run(smallest.eval(), x, task="a"), wanted[0])
    assert smallest.resident == {"a"}
