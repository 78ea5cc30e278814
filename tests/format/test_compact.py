"""Compact tasks (format 2): rounded once, then exact; small; refused if damaged."""

import copy
import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from drafts import Draft
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

import bitgraft
from bitgraft.errors import CorruptError
from bitgraft.format import archive
from bitgraft.format.compact import find_grid
from bitgraft.format.inspect import inspect_file
from bitgraft.format.rounding import round_to_grid

GOLDEN = Path(__file__).parents[1] / "golden" / "format-2.safetensors"
FLOATS = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)


@given(arrays.arrays(np.float32, st.integers(1, 60), elements=FLOATS), st.floats(-1e3, 1e3, width=32))
def test_a_grid_is_near_and_then_exact(values: Any, offset: float) -> None:
    row = torch.from_numpy(values + np.float32(offset))
    rounded = round_to_grid(row)
    apart = float(row.max() - row.min())
    assert float((rounded - row).abs().max()) <= 0.51 * apart / 255 + float(row.abs().max()) * 2**-21
    found = find_grid(rounded.numpy())
    assert found is not None
    low, unit, steps = found
    again = np.full(len(row), low) if unit == 0 else low + unit * steps.astype(np.float64)
    assert np.array_equal(again.astype(np.float32), rounded.numpy())
    assert torch.equal(round_to_grid(rounded), rounded)


def test_values_off_any_grid_give_none() -> None:
    assert find_grid(np.array([0.1, 0.2, 0.4, 0.7001], np.float32)) is None
    assert find_grid(np.array([1.0, np.nan], np.float32)) is None
    assert find_grid(np.arange(257, dtype=np.float32)) is None


def backbone() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.ConvTranspose2d(12, 8, 3), nn.GroupNorm(2, 8)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2.0)
        model[1].weight.normal_(1.0, 0.1)
    return model.eval()


def network(method: str = "full", **options: Any) -> bitgraft.Network:
    net = bitgraft.Network(backbone(), example=(2, 3, 8, 8))
    task = net.add_task("t", classes=3, method=method, **options)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=rng))
    task.eval()
    return net


IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
METHODS = [
    ("full", {"per": "channel"}),
    ("full", {"per": "layer"}),
    ("simple", {"per": "channel"}),
    ("piggyback-bn", {}),
    ("norms", {}),
    ("lora", {"norms": True}),
    ("adapters-series", {}),
]


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(("method", "options"), METHODS)
def test_a_compact_task_is_near_the_trained_one_and_its_file_is_exact(
    method: str, options: dict[str, Any], coded: bool, tmp_path: Path
) -> None:
    net = network(method, **options)
    trained = net(IMAGES, task="t").detach()
    bitgraft.compact(net.tasks["t"])
    rounded = net(IMAGES, task="t").detach()
    assert torch.allclose(rounded, trained, atol=0.02)
    bitgraft.compact(net.tasks["t"])
    assert torch.equal(net(IMAGES, task="t"), rounded), "compact once is compact"
    net.save_task("t", tmp_path / "t", coded=coded)
    fresh = bitgraft.Network(backbone(), example=(2, 3, 8, 8))
    fresh.load_task(tmp_path / "t")
    assert torch.equal(fresh(IMAGES, task="t"), rounded)
    assert min(inspect_file(tmp_path / "t").bytes.values()) >= 0
    fresh.save_task("t", tmp_path / "again", coded=coded)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "t").read_bytes()
    assert json.loads(Draft((tmp_path / "t").read_bytes()).header()["__metadata__"]["bitgraft"])["format"] == 2


def test_a_copy_of_the_network_is_not_rounded() -> None:
    net = network("finetune")
    before = net(IMAGES, task="t").detach()
    assert not bitgraft.compact(net.tasks["t"]).is_compact
    assert torch.equal(net(IMAGES, task="t"), before)


class SharedScale(nn.Module):
    """Two batch norms with one scale between them, and statistics of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 48, 3), nn.Conv2d(48, 48, 3)
        self.norm, self.other, self.fc = nn.BatchNorm2d(48), nn.BatchNorm2d(48), nn.Linear(48, 4)
        self.other.weight = self.norm.weight
        for norm in (self.norm, self.other):
            nn.init.uniform_(norm.running_var, 0.01, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.other(self.second(self.norm(self.first(x)).relu())).relu().mean((2, 3)))  # type: ignore[no-any-return]


class FrozenNorm(nn.Module):
    """A batch norm whose scale and shift are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 48, 3), nn.Conv2d(48, 48, 3)
        self.norm, self.other, self.fc = FrozenBatchNorm2d(48), nn.BatchNorm2d(48), nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.other(self.second(self.norm(self.first(x)).relu())).relu().mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [SharedScale, FrozenNorm])
@pytest.mark.parametrize("options", [{}, {"bits": 4.0}])
def test_norms_whose_tensors_are_not_theirs_alone_stay_as_they_are(
    make: type[nn.Module], options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    net = bitgraft.Network(model, example=(2, 3, 8, 8))
    task = net.add_task("t", classes=3, preset=None, **options)
    with torch.no_grad():
        for name, tensor in task.owned.items():
            if name.endswith("running_var"):
                tensor.mul_(4 if name.startswith("norm") else 1)
    trained = net.eval()(IMAGES, task="t").detach()
    bitgraft.compact(task)
    rounded = net(IMAGES, task="t").detach()
    assert float((rounded - trained).abs().max() / trained.abs().max()) < 0.02
    net.save_task("t", tmp_path / "t")
    fresh = bitgraft.Network(copy.deepcopy(model), example=(2, 3, 8, 8))
    fresh.load_task(tmp_path / "t")
    assert torch.equal(fresh(IMAGES, task="t"), rounded)


def test_a_scale_beyond_half_precision_is_kept(tmp_path: Path) -> None:
    net = network(per="channel")
    with torch.no_grad():
        net.tasks["t"].owned["1.weight"][0] = 1e6
    bitgraft.compact(net.tasks["t"])
    net.save_task("t", tmp_path / "t")
    assert "1.weight" in Draft((tmp_path / "t").read_bytes()).tensors
    rounded = net(IMAGES, task="t")
    assert torch.equal(network_of(tmp_path / "t")(IMAGES, task="t"), rounded)


@pytest.mark.parametrize(("value", "dtype"), [(0.1, "F16"), (1e5, "F32")])
def test_factors_of_lora_are_stored_in_half_precision_where_they_fit(value: float, dtype: str, tmp_path: Path) -> None:
    net = network("lora", rank=2)
    with torch.no_grad():
        net.tasks["t"].transforms["0.weight"].a[0, 0] = value
    net.save_task("t", tmp_path / "whole")
    bitgraft.compact(net.tasks["t"])
    net.save_task("t", tmp_path / "t")
    header = Draft((tmp_path / "t").read_bytes()).header()
    assert [header[f"0.weight:{part}"]["dtype"] for part in "ab"] == [dtype, "F16"]
    assert torch.equal(network_of(tmp_path / "t")(IMAGES, task="t"), net(IMAGES, task="t"))
    assert Draft((tmp_path / "whole").read_bytes()).header()["0.weight:a"]["dtype"] == "F32"


def network_of(path: Path) -> bitgraft.Network:
    net = bitgraft.Network(backbone(), example=(2, 3, 8, 8))
    net.load_task(path)
    return net


@pytest.mark.parametrize(
    ("name", "per", "most"),
    [
        ("resnet50", "layer", 1.08),
        ("resnet50", "channel", 1.08),
        ("densenet121", "layer", 1.25),
        ("tf_efficientnet_lite0", "channel", 1.40),
        ("wrn-28-4", "channel", 1.07),
    ],
)
def test_bits_per_weight(name: str, per: str, most: float, tmp_path: Path) -> None:
    """The size of the file without the head, per masked weight."""
    model = bitgraft.wide_resnet(28, 4, 10) if name == "wrn-28-4" else timm.create_model(name)
    net = bitgraft.Network(model.eval())
    task = net.add_task("t", classes=[f"class {i}" for i in range(10)], method="full", per=per)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for role, parameter in task.roles():
            if role in ("k", "k1", "norms"):
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=rng))
    bitgraft.compact(task)
    net.save_task("t", tmp_path / "t")
    found = inspect_file(tmp_path / "t")
    assert found.bits_per_weight is not None
    assert 1.0 < found.bits_per_weight <= most
    assert sum(found.bytes.values()) == (tmp_path / "t").stat().st_size
    assert found.bytes["statistics"] == 0


def golden() -> archive.Archive:
    """The task of format 1's golden file, compact: k per channel on a grid, a norm with no statistics."""
    first = bitgraft.read_archive(GOLDEN.with_name("format-1.safetensors"))
    tensors = {
        **first.tensors,
        "0.weight:k": torch.tensor([[1.0], [-0.5], [0.25], [2.0]]),
        "1.running_mean": torch.tensor([0.0]),
        "1.running_var": torch.tensor([1.0]),
    }
    metadata = dataclasses.replace(first.metadata, options={**first.metadata.options, "per": "channel"})
    return dataclasses.replace(first, metadata=metadata, tensors=tensors, format=2)


def test_golden_bytes() -> None:
    assert archive.to_bytes(golden()) == GOLDEN.read_bytes()
    read = bitgraft.read_archive(GOLDEN)
    assert dataclasses.replace(read, tensors={}) == dataclasses.replace(golden(), tensors={})
    assert read.tensors.keys() == golden().tensors.keys()
    assert all(torch.equal(tensor, golden().tensors[key]) for key, tensor in read.tensors.items())


def test_a_reader_written_from_the_specification(tmp_path: Path) -> None:
    """Follows docs/format.md, section Format 2, literally."""
    net = network(per="channel")
    bitgraft.compact(net.tasks["t"])
    net.save_task("t", tmp_path / "t")
    data = (tmp_path / "t").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    about = json.loads(header.pop("__metadata__")["bitgraft"])
    kinds = {"U8": "<u1", "F16": "<f2", "F32": "<f4"}
    held = {}
    for key, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        held[key] = np.frombuffer(data[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"])
    masks, codes, grids, norms = (held[key] for key in (":masks", ":k", ":k.grid", ":norms"))
    state, at, code, row = backbone().state_dict(), 0, 0, 0
    found = net.tasks["t"].tensors()
    for (name, shape), channels in zip(about["shapes"].items(), about["channels"], strict=True):
        count = int(np.prod(shape))
        bits = np.unpackbits(masks[at : at + -(-count // 8)], bitorder="little")[:count].reshape(shape)
        at += -(-count // 8)
        k = []
        for low, unit in grids[row : row + 4].astype(np.float64):
            steps = codes[code : code + channels] if unit else np.zeros(channels)
            code += channels if unit else 0
            k.append((low + unit * steps).astype(np.float32))
        row += 4
        wide = (1, -1, 1, 1) if name == "3.weight" else (-1, 1, 1, 1)  # a transposed convolution has its outputs second
        k0, k1, k2, k3 = (one.reshape(wide) for one in k)
        weight = state[name].numpy()
        wanted = k0 * weight + k1 + k2 * bits + k3 * weight * bits
        assert np.allclose(found[name].numpy(), wanted, atol=1e-6)
    assert (at, code, row) == (len(masks), len(codes), len(grids))
    reached = 0
    for layer, channels in about["norms"].items():
        for part in ("weight", "bias"):
            values = norms[reached : reached + channels].astype(np.float32)
            assert np.array_equal(found[f"{layer}.{part}"].numpy(), values)
            reached += channels
        assert not found[f"{layer}.running_mean"].any()
        assert bool((found[f"{layer}.running_var"] == 1).all())
    assert reached == len(norms)


def shorter(key: str) -> Any:
    def edit(draft: Draft) -> None:
        kind, shape, data = draft.tensors[key]
        size = {"U8": 1, "F16": 2, "F32": 8}[kind]
        draft.tensors[key] = (kind, [shape[0] - 1, *shape[1:]], data[:-size])

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        *(shorter(key) for key in (":masks", ":k", ":k.grid", ":norms")),
        lambda draft: draft.tensors.pop(":k"),
        lambda draft: draft.tensors.pop(":k.grid"),
        lambda draft: draft.tensors.pop(":norms"),
        lambda draft: draft.tensors.update({":more": ("U8", [1], b"x")}),
        lambda draft: draft.tensors.update({"1.weight": ("F32", [12], bytes(48))}),
        lambda draft: draft.about.update(channels=[12]),
        lambda draft: draft.about.update(channels=[12, -1]),
        lambda draft: draft.about.update(channels=None),
        lambda draft: draft.about.update(norms=[]),
        lambda draft: draft.about.update(norms={"1": 0}),
        lambda draft: draft.about.update(norms={"1": "12"}),
        lambda draft: draft.tensors.update({":norms": ("U8", [48], draft.tensors[":norms"][2])}),
    ],
)
def test_damage_with_a_valid_checksum_is_refused(edit: Any, tmp_path: Path) -> None:
    net = network(per="channel")
    bitgraft.compact(net.tasks["t"])
    net.save_task("t", tmp_path / "t")
    draft = Draft((tmp_path / "t").read_bytes())
    edit(draft)
    (tmp_path / "bad").write_bytes(draft.build())
    with pytest.raises(CorruptError, match=r"bad is corrupt: "):
        network_of(tmp_path / "bad")
