"""`inspect` against tasks whose contents are known."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitgraft import Network, wide_resnet
from bitgraft.errors import CorruptError
from bitgraft.format.inspect import Inspection, inspect_file
from bitgraft.task import Task
from bitgraft.transforms.masked import Masked


def inspected(tmp_path: Path, method: str = "full", classes: Any = 5, **options: Any) -> tuple[Task, Inspection]:
    net = Network(wide_resnet(10, 1))
    task = net.add_task("known", classes=classes, method=method, preset=None, **options)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in task.roles():
            parameter.copy_(torch.randn(parameter.shape, generator=noise))
    task.metrics["accuracy"] = 0.5
    net.save_task("known", tmp_path / "known.safetensors")
    return task, inspect_file(tmp_path / "known.safetensors")


@pytest.mark.parametrize("per", ["layer", "channel"])
def test_layers_say_what_the_task_holds(per: str, tmp_path: Path) -> None:
    task, found = inspected(tmp_path, per=per)
    assert [layer.name for layer in found.layers] == list(task.anatomy.weights)
    for layer in found.layers:
        transform = task.transforms[layer.name]
        assert isinstance(transform, Masked)
        assert layer.shape == transform.weight.shape
        assert (layer.weights, layer.ones) == (transform.weight.shape.numel(), int(transform.mask().sum()))
        for spread, k in zip(layer.k, transform.values().reshape(4, -1), strict=True):
            assert (spread.low, spread.high) == (k.min().item(), k.max().item())
            assert spread.mean == pytest.approx(k.mean().item(), abs=1e-6)


def test_bytes_by_kind_add_up_to_the_file(tmp_path: Path) -> None:
    task, found = inspected(tmp_path)
    norms = [task.anatomy.backbone.get_submodule(name).weight.numel() for name in task.anatomy.norms]
    assert found.size == (tmp_path / "known.safetensors").stat().st_size
    assert found.bytes["masks"] * 8 == found.weights
    assert found.bytes["k"] == 16 * len(found.layers)
    assert found.bytes["norms"] == found.bytes["statistics"] == 8 * sum(norms)
    assert found.bytes["head"] == 4 * (5 * 64 + 5)
    assert found.bytes["weights"] == 0
    assert 0 < found.bytes["header"] < 10_000
    assert found.bits_per_weight == 8 * (found.size - found.bytes["head"]) / found.weights


@pytest.mark.parametrize("classes", [5, 64])
def test_a_fine_tuned_file_keeps_head_and_weights_apart(classes: int, tmp_path: Path) -> None:
    task, found = inspected(tmp_path, "finetune", classes)  # 64: as many as a convolution has filters
    assert found.head_layer == task.anatomy.head
    weights = sum(w.shape.numel() for w in task.anatomy.weights.values())
    assert found.bytes["head"] == 4 * classes * 65
    assert found.bytes["weights"] == 4 * weights
    assert found.bits_per_weight is None


@pytest.mark.parametrize("method", ["packnet", "adapters-series", "adapters-parallel", "dan", "lora", "classifier"])
def test_other_methods_are_inspected_too(method: str, tmp_path: Path) -> None:
    task, found = inspected(tmp_path, method)
    assert {layer.name for layer in found.layers} == set(task.transforms)
    assert all(layer.values > 0 for layer in found.layers)
    assert found.size == (tmp_path / "known.safetensors").stat().st_size
    json.dumps(found.plain(), allow_nan=False)


def test_json_has_what_a_person_sees(tmp_path: Path) -> None:
    _, found = inspected(tmp_path, classes=["round", "square"])
    plain = json.loads(json.dumps(found.plain(), allow_nan=False))
    assert plain["classes"] == ["round", "square"]
    assert plain["metrics"] == {"accuracy": 0.5}
    assert plain["method"] == "full"
    assert len(plain["backbone"]) == 64
    assert plain["layers"][0]["name"] == "conv1.weight"
    assert set(plain["layers"][0]["k2"]) == {"mean", "low", "high"}


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"nothing")
    with pytest.raises(CorruptError):
        inspect_file(tmp_path / "bad")


class Backwards(nn.Module):
    """Layers created in another order than they run, a mask that ends inside a byte, a head with an arbitrary name."""

    input_size = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.b, self.a = nn.Conv2d(5, 5, 3), nn.Conv2d(3, 5, 3)
        self.z = nn.Linear(5, 5)
        self.last = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.z(self.last(self.b(self.a(x)).mean((2, 3))))


@pytest.mark.parametrize("classes", [5, 3])
def test_counts_are_exact_and_layers_are_in_forward_order(classes: int, tmp_path: Path) -> None:
    net = Network(Backwards().eval())
    net.add_task("t", classes=classes)
    net.save_task("t", tmp_path / "t")
    for network in (net, Network(copy.deepcopy(net.backbone))):  # a second network loads and saves it as well
        name = network.load_task(tmp_path / "t", name="again").name
        network.save_task(name, tmp_path / "again")
        found = inspect_file(tmp_path / "again")
        assert [layer.name for layer in found.layers] == ["a.weight", "b.weight", "last.weight"]
        assert [layer.weights for layer in found.layers] == [135, 225, 25]
        assert [layer.density for layer in found.layers] == [1.0, 1.0, 1.0]
        assert found.bytes["head"] == 4 * classes * 6
        assert found.bytes["masks"] == 17 + 29 + 4
    assert found.plain()["head_layer"] == "z"
    assert found.plain()["layers"][1]["shape"] == [5, 5, 3, 3]
