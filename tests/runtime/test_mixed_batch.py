"""Many tasks in one pass, layer by layer: the same scores as one task at a time, with no task's weights kept."""

import pytest
import timm
import torch
from tiny import batch, learn, run, tiny
from torch import nn

from bitgraft.network import Network
from bitgraft.runtime import mixed_batch
from bitgraft.runtime.mixed_batch import Mixture
from bitgraft.transforms import cpu

torch.set_num_threads(1)
NAMES = ["b", "a", "original", "c", "b", "b", "a", "c"]
FAMILIES = {
    "resnet": ("resnet18", {}),
    "norm with activation": ("tf_efficientnet_lite0", {}),
    "convnext": ("convnext_atto", {}),
    "vit": ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 2}),
}


@pytest.fixture
def passes(monkeypatch):
    """How often several tasks ran in one pass."""
    seen = []
    whole = Mixture._pass
    monkeypatch.setattr(Mixture, "_pass", lambda *args, **kwargs: seen.append(1) or whole(*args, **kwargs))
    return seen


def taught(backbone: nn.Module, x: torch.Tensor, methods=("full", "piggyback-bn", "finetune"), **options) -> Network:
    net = Network(backbone, active=1, **options)
    for seed, (name, method) in enumerate(zip("abc", methods, strict=True)):
        net.add_task(name, classes=3 + seed, method=method, seed=seed)
        learn(net, name, x, rate=1e-2)
    return net.eval()


def one_by_one(net: Network, x: torch.Tensor) -> list[torch.Tensor]:
    rows = {name: [i for i, wanted in enumerate(NAMES) if wanted == name] for name in NAMES}
    scores = {name: dict(zip(where, run(net, x[where], task=name), strict=True)) for name, where in rows.items()}
    return [scores[name][row] for row, name in enumerate(NAMES)]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass_gives_what_one_task_at_a_time_gives(family, passes):
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    x = batch(8, 3, 32, 32)
    # finetune owns the scales and positions of those two as well, which lie in blocks of layers
    methods = ("full", "piggyback-bn", "simple" if family in ("convnext", "vit") else "finetune")
    net = taught(timm.create_model(name, num_classes=6, **options).eval(), x, methods)
    expected = one_by_one(net, x)
    with torch.inference_mode():
        found = net(x, task=NAMES)
    assert passes
    assert [len(row) for row in found] == [4, 3, 6, 5, 4, 4, 3, 5]
    equal = torch.equal if family != "vit" else torch.allclose  # attention multiplies whole batches at once
    assert all(equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert len({round(float(row[0]), 4) for row in expected}) > 4  # tasks and images tell apart
    assert len(net.resident) <= 1


class Winding(nn.Module):
    """One convolution before a norm layer, `twice` before two; when it `skips`, before none."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.one, self.other = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.head, self.twice = nn.Linear(8, 6), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        x = self.conv(x) if self.skips else self.one(self.conv(x)).relu()
        x = self.other(self.conv(x)).relu() if self.twice else x
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_a_norm_layer_that_does_not_follow_its_convolution(twice, skips, passes, monkeypatch):
    """Convolutions are run along with the norm layers behind them, which forward need not keep to."""
    torch.manual_seed(0)
    x, backbone = batch(8, 3, 12, 12), Winding().eval()
    backbone.twice = twice
    net = taught(backbone, x, ("full", "simple", "finetune"))
    monkeypatch.setattr(Winding, "skips", skips)
    expected = one_by_one(net, x)
    with torch.inference_mode():
        found = net(x, task=NAMES)
    assert passes
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("large", [False, True])
def test_tasks_at_rest_take_turns_in_one_layers_memory(large, passes, monkeypatch):
    """Loaded tasks' bits become weights in memory that the next task's overwrite, by the compiled loops."""
    monkeypatch.setattr(mixed_batch, "LARGE", 0 if large else mixed_batch.LARGE)
    rooms = []
    switch = cpu.Switch
    monkeypatch.setattr(cpu, "Switch", lambda mask: rooms.append(mask.out) or switch(mask))
    torch.manual_seed(0)
    x = batch(8, 3, 32, 32)
    net = taught(timm.create_model("resnet18", num_classes=6).eval(), x, ("full", "simple", "piggyback-bn"))
    expected = one_by_one(net, x)
    for task in net.tasks.values():
        task.freeze().eval()
    with torch.inference_mode():
        found = net(x, task=NAMES)
    assert len(passes) == (len(set(NAMES)) if large else 1)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert len({room.untyped_storage().data_ptr() for room in rooms}) == 1


def test_large_images_run_task_by_task_with_nothing_kept(passes, monkeypatch):
    monkeypatch.setattr(mixed_batch, "LARGE", 0)
    x = batch(8)
    net = taught(tiny(), x)
    expected = one_by_one(net, x)
    with torch.inference_mode():
        found = net(x, task=NAMES)
    assert len(passes) == len(set(NAMES))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert len(net.resident) <= 1


def test_norm_layers_that_tasks_replace_behind_convolutions_that_none_does(passes):
    x = batch(8)
    net = Network(tiny(), active=1)
    for seed, name in enumerate("abc"):
        net.add_task(name, classes=3 + seed, method="classifier", norms=True, seed=seed)
        learn(net, name, x, rate=1e-2)
    expected = one_by_one(net.eval(), x)
    with torch.inference_mode():
        found = net(x, task=NAMES)
    assert passes
    for mine, theirs in zip(found, expected, strict=True):  # such a convolution takes the whole batch at once
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("methods", [("adapters-series", "lora", "dan"), ("simple", "adapters-parallel", "classifier")])
def test_every_kind_of_transform(methods, passes):
    x = batch(8)
    net = taught(tiny(), x, methods)
    with torch.no_grad():
        found = net(x, task=NAMES)
    assert passes
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, one_by_one(net, x), strict=True))


def test_a_change_between_two_passes_shows(passes):
    x = batch(8)
    net = taught(tiny(), x)
    with torch.no_grad():
        before = net(x, task=NAMES)
        net.tasks["a"].owned["norm1.bias"].add_(1.0)
        net.backbone.get_parameter("stem.weight").mul_(1.5)
        after = net(x, task=NAMES)
    assert len(passes) == 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(after, one_by_one(net, x), strict=True))
    assert not torch.equal(before[1], after[1])


class FirstAndLast(nn.Module):
    """Turns the batch around on its way: no layer's rows are those of the images any more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = self.inner(x.transpose(0, 1)).transpose(0, 1)
        scores: torch.Tensor = self.head(turned.mean(1))
        return scores


@pytest.mark.parametrize("length", [7, 8])
def test_a_backbone_that_does_not_keep_images_first_runs_its_tasks_one_by_one(length):
    x = torch.randn(8, length, 5)
    net = taught(FirstAndLast().eval(), x, example=x)
    with torch.no_grad():
        found = net(x, task=NAMES)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, one_by_one(net, x), strict=True))


class ReadElsewhere(nn.Module):
    """Uses a layer's weight without running the layer, as torch's own attention does with its last one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(x @ self.inner.weight)
        return scores


def test_a_layer_whose_weight_another_reads_makes_its_tasks_run_one_by_one():
    x = torch.randn(8, 5)
    net = taught(ReadElsewhere().eval(), x, ("full", "simple", "finetune"), example=x)
    with torch.no_grad():
        found = net(x, task=NAMES)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, one_by_one(net, x), strict=True))
    assert "inner.weight" in net.tasks["a"].transforms


@pytest.mark.parametrize("why", ["it learns", "it trains", "there is room", "it has a module of its own"])
def test_tasks_that_could_be_kept_or_learn_run_as_ever(why, passes):
    x = batch(8)
    net = taught(tiny(), x) if why != "there is room" else Network(tiny(), active=8).eval()
    if why == "there is room":
        for seed, name in enumerate("abc"):
            net.add_task(name, classes=3 + seed, seed=seed).eval()
    if why == "it trains":
        net.tasks["a"].train()
    if why == "it has a module of its own":
        net.module("a")
    with torch.set_grad_enabled(why == "it learns"):
        net(x, task=NAMES)
    assert not passes
