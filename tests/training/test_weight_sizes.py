"""Relative rates: which parameters have them, and that the size of a network's weights no longer matters."""

import pytest
import torch
from stripes import SHORT, backbone, network, stripes
from tiny import METHODS
from torch import nn
from torch.nn import functional as F

from bitgraft.methods.registry import Phase
from bitgraft.network import Network
from bitgraft.training.loop import fit
from bitgraft.training.optimizers import build
from bitgraft.training.presets import QUICK
from bitgraft.training.weight_sizes import weight_sizes
from bitgraft.transforms.base import MIN_RMS, rms

RELATIVE = {
    "finetune": {"weights"},
    "full": {"scores", "k1"},
    "simple": {"scores", "k1"},
    "packnet": {"weights"},
}
"""The others train parameters with units of their own."""


def rates(net):
    """Role -> the distinct rates of its parameters, divided by the role's own."""
    task = net.tasks["stripes"]
    roles = {id(parameter): role for role, parameter in task.roles()}
    found = {}
    for optimizer in build(task.roles(), QUICK, Phase(), weight_sizes({"stripes": task})):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                role = roles[id(parameter)]
                found.setdefault(role, set()).add(group["lr"] / QUICK.rates[role])
    return found


@pytest.mark.parametrize("method", [method for method in METHODS if method != "adapters-joint"])
def test_rates_of_changes_of_a_weight_are_relative_to_it(method):
    net = network(method)
    sizes = {rms(net.anatomy.tensor(name)) for name in net.anatomy.weights if name != "9.weight"}
    for role, found in rates(net).items():
        assert found <= (sizes if role in RELATIVE.get(method, ()) else {1.0}), role


def test_rates_of_levels_are_relative_too():
    net = Network(backbone())
    net.add_task("stripes", classes=3, bits=2.0, preset=None)
    assert rates(net)["scores"] != {1.0}


def test_the_size_of_a_tensor_is_a_power_of_two_and_never_0():
    assert rms(torch.full((4, 5), 0.3)) == 0.25
    assert rms(torch.full((4, 5), 0.37, dtype=torch.float16)) == 0.5
    assert MIN_RMS / 2 < rms(torch.zeros(3)) < 2 * MIN_RMS


class Scaled(nn.Module):
    """A network with weights times `factor` that computes the same as with factor 1."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8, eps=0.0)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(16, eps=0.0)
        self.fc = nn.Linear(16, 5)
        with torch.no_grad():
            for conv, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2)):
                conv.weight.mul_(factor)
                norm.running_mean.mul_(factor)
                norm.running_var.mul_(factor**2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return self.fc(F.relu(self.norm2(self.conv2(x))).mean((2, 3)))


def scores_after_training(method, factor, relative):
    net = Network(Scaled(factor).eval())
    net.add_task("stripes", classes=3, method=method)
    fit(net, "stripes", stripes(48, 1), None, SHORT.changed(epochs=4, eps=1e-12, relative_rates=relative))
    return net(stripes(32, 2).tensors[0], "stripes").detach()


@pytest.mark.parametrize("method", ["full", "simple", "finetune"])
def test_a_network_with_larger_weights_trains_alike(method):
    """Adam's steps do not grow with a weight: with one rate for all, small weights would be torn apart."""
    large, small = (scores_after_training(method, factor, relative=True) for factor in (1.0, 0.125))
    assert torch.allclose(large, small, atol=1e-3)
    large, small = (scores_after_training(method, factor, relative=False) for factor in (1.0, 0.125))
    assert not torch.allclose(large, small, atol=0.1)
