"""The head that is fitted before the first step."""

import torch
from tiny import tiny
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.ops import FrozenBatchNorm2d

from bitgraft.network import Network
from bitgraft.training.config import ROLES, Config
from bitgraft.training.loop import fit


def test_the_head_minimises_the_loss_of_training():
    """Fitted without label smoothing, solar cells had logits of 13 at the first step, and training collapsed."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    data = TensorDataset(nn.functional.one_hot(labels, 8).float() + 0.1 * torch.randn(60, 8, generator=rng), labels)
    losses = {}
    for fitted in (0.0, 0.1):
        torch.manual_seed(0)
        net = Network(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
        net.add_task("t", classes=3, method="classifier")
        config = Config(epochs=1, head_init=True, rates=dict.fromkeys(ROLES, 0.0), label_smoothing=fitted)
        fit(net, "t", data, None, config, progress=False)
        logits = net(data.tensors[0], task="t").detach()
        losses[fitted] = float(nn.functional.cross_entropy(logits, labels, label_smoothing=0.1))
    assert losses[0.1] < losses[0.0] - 0.01


def test_a_feature_that_hardly_varies_gets_no_large_weight():
    """On solar cells, features that are almost always 0 had weights of 200, and training diverged when one moved."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    features = nn.functional.one_hot(labels, 8).float() + 0.3 * torch.randn(60, 8, generator=rng)
    features[:, 5] = 1e-6 * torch.randn(60, generator=rng)
    body = nn.Linear(8, 8)
    nn.init.eye_(body.weight)
    nn.init.zeros_(body.bias)
    net = Network(nn.Sequential(body, nn.Linear(8, 2)))
    net.add_task("t", classes=3, method="classifier")
    config = Config(epochs=1, head_init=True, rates=dict.fromkeys(ROLES, 0.0))
    result = fit(net, "t", TensorDataset(features, labels), None, config, progress=False)
    weight = net.tasks["t"].owned["1.weight"]
    assert result.history[-1]["train_accuracy"] > 0.9
    assert weight[:, 5].abs().max() < weight.abs().max()


def test_norm_layers_without_a_counter_keep_their_statistics():
    backbone = tiny()
    backbone.norm1 = FrozenBatchNorm2d(8)
    net = Network(backbone)
    net.add_task("t", classes=2)
    data = TensorDataset(torch.rand(8, 3, 8, 8), torch.arange(8) % 2)
    fit(net, "t", data, config=Config(epochs=1, batch=4, statistics="batch"))
    assert torch.equal(net.tasks["t"].owned["norm1.running_mean"], torch.zeros(8))
