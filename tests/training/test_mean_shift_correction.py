"""Mean-shift correction: changes of weights apply to centred inputs, so the mean output of a layer stays."""

import copy

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import bitgraft
from bitgraft.training.init import InputSums, corrected_weights, observe
from bitgraft.training.loader import Loader
from bitgraft.training.presets import preset


def backbone() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 6),
    ).eval()


def images(count: int = 24) -> torch.Tensor:
    return torch.rand(count, 3, 9, 9, generator=torch.Generator().manual_seed(1)) + 1  # a mean far from 0


def network(method: str = "full", **options) -> bitgraft.Network:
    net = bitgraft.Network(backbone())
    net.add_task("t", classes=3, method=method, **options)
    return net


def means(net: bitgraft.Network, x: torch.Tensor) -> dict[str, torch.Tensor]:
    data = TensorDataset(x, torch.arange(len(x)) % 3)
    return observe(net.tasks["t"], Loader(data, "training", "t", 10, Accelerator(cpu=True)), means=True).means


def changed(task) -> None:
    """Change all parameters, as training would."""
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameter in task.roles():
            parameter += 0.2 * torch.randn(parameter.shape, generator=rng)


@settings(deadline=None)
@given(
    st.integers(1, 3),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.booleans(),
)
def test_means_are_those_of_the_patches_that_kernels_see(n, size, kernel, stride, padding, dense):
    if any(s + 2 * p < k for s, p, k in zip(size, padding, kernel, strict=True)):
        return
    torch.manual_seed(0)
    x = torch.randn(n, 4, *size)
    weight = torch.randn(3, 4, *kernel) if dense else torch.randn(4, 1, *kernel)
    with InputSums({id(weight): "w"}) as inputs:
        F.conv2d(x, weight, stride=stride, padding=padding, groups=1 if dense else 4)
        F.conv2d(x.flip(0), weight=weight, stride=stride, padding=padding, groups=1 if dense else 4)
        F.conv2d(x, torch.randn_like(weight), None, stride, padding, 1, 1 if dense else 4)  # another kernel
    patches = F.unfold(x, kernel, stride=stride, padding=padding).mean((0, 2))
    expected = patches.view(1 if dense else 4, -1, *kernel)
    torch.testing.assert_close(inputs.sums["w"] / inputs.pixels["w"], expected, rtol=1e-5, atol=1e-5)


def test_the_mean_output_of_a_norm_stays_when_the_weight_before_it_changes():
    x = images()
    for layer in (0, 3, 6):
        net = network("finetune")
        task = net.tasks["t"]
        inside: list[torch.Tensor] = []

        def mean(net=net, inside=inside, layer=layer) -> torch.Tensor:
            inside.clear()
            module = net.module("t")
            module[layer + 1].register_forward_hook(lambda m, args, y: inside.append(y))
            with torch.no_grad():
                module(x)
            return inside[0].mean((0, 2, 3))

        before = mean()
        task.correct_mean_shift(means(net, x))
        with torch.no_grad():
            task.owned[f"{layer}.weight"] += torch.randn(task.owned[f"{layer}.weight"].shape)
        torch.testing.assert_close(mean(), before, rtol=1e-4, atol=1e-5)
        task.correct_mean_shift({})
        assert not torch.allclose(mean(), before, atol=1e-2)


@pytest.mark.parametrize("method", ["full", "simple", "finetune", "piggyback-bn"])
def test_folding_the_correction_into_biases_is_exact(method):
    net, x = network(method), images()
    task = net.tasks["t"]
    task.correct_mean_shift(means(net, x))
    assert sorted(task.input_means) == ["0.weight", "3.weight", "6.weight"] == sorted(corrected_weights(task))
    changed(task)
    with torch.no_grad():
        before, stored = net(x, task="t"), {n: v.clone() for n, v in task.stored().items()}
    plain = copy.deepcopy(task)
    task._fold_mean_shift()
    assert not task.input_means
    with torch.no_grad():
        assert torch.equal(net(x, task="t"), before)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in task.owned.items())
    assert not torch.equal(plain.owned["1.bias"], task.owned["1.bias"])
    task.freeze()
    with torch.no_grad():
        assert torch.equal(net(x, task="t"), before)


def test_gradients_reach_a_weight_through_the_corrected_bias():
    """As if the layer's input were centred, for the change of its weight."""
    net, x = network("finetune"), images()
    task = net.tasks["t"]
    changed(task)
    mean = means(net, x)["0.weight"]
    task.correct_mean_shift({"0.weight": mean})
    task.train()
    task.holds_statistics = True
    net(x, task="t").square().sum().backward()
    found = task.owned["0.weight"].grad.clone()
    task._fold_mean_shift()
    task.zero_grad()
    net(x, task="t").square().sum().backward()
    weight, bias = task.owned["0.weight"].grad, task.owned["1.bias"].grad
    scale = task.owned["1.weight"] * torch.rsqrt(task.owned["1.running_var"] + 1e-5)
    expected = weight - (bias * scale).view(-1, 1, 1, 1) * mean
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_tasks_without_their_own_norms_have_nothing_to_correct():
    net = network("full", norms=False)
    assert not corrected_weights(net.tasks["t"])
    assert not means(net, images())


class Shared(nn.Module):
    """One norm layer after two convolutions, and two norm layers with one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(5))
        self.shared, self.own, self.tied, self.fc = *(nn.BatchNorm2d(3) for _ in range(3)), nn.Linear(3, 2)
        self.last = nn.BatchNorm2d(3)
        self.tied.bias = self.last.bias

    def forward(self, x):
        for conv, norm in zip(self.convs, (self.shared, self.shared, self.own, self.tied, self.last), strict=True):
            x = norm(conv(x)).relu()
        return self.fc(x.mean((2, 3)))


def test_a_bias_that_belongs_to_several_layers_corrects_none():
    net = bitgraft.Network(Shared().eval())
    assert corrected_weights(net.add_task("t", classes=2)) == ["convs.2.weight"]


@pytest.mark.parametrize("statistics", ["kept", "batch"])
@pytest.mark.parametrize("keep", ["last", "best"])
def test_a_run_folds_the_correction_and_keeps_its_accuracy(statistics, keep, tmp_path):
    net, x = network(), images(48)
    data = TensorDataset(x, torch.arange(48) % 3)
    config = preset("quick", "full").changed(epochs=3, mean_shift_correction=True, statistics=statistics, keep=keep)
    result = bitgraft.fit(net, "t", data, data, config)
    task = net.tasks["t"]
    assert not task.input_means
    kept = result.history[-1] if keep == "last" else result.best
    with torch.no_grad():
        right = (net(x, task="t").argmax(1) == data.tensors[1]).float().mean()
    assert kept is not None
    assert right == pytest.approx(kept["val_accuracy"])
    assert result.best_tasks is not None
    task.load_state_dict(result.best_tasks["t"])  # as `bitgraft train` does
    net.save_task("t", tmp_path / "t.safetensors")
    loaded = bitgraft.Network(backbone())
    loaded.load_task(tmp_path / "t.safetensors")
    with torch.no_grad():
        assert torch.equal(loaded(x, task="t"), net(x, task="t"))
