"""The format is pinned by the bytes of one small file, and by a reader written from docs/format.md alone."""

import dataclasses
import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

import bitgraft
from bitgraft.format import archive
from bitgraft.format.metadata import Metadata

torch.set_num_threads(1)
GOLDEN = Path(__file__).parents[1] / "golden" / "format-1.safetensors"
SHA256 = "99ed5f8d32a74ed29dfef9f458b384a07ff2dff28b2afaf08c47f7f6586cbcfb"


def backbone() -> nn.Module:
    """Eleven weights to mask (two bytes, five bits over), a norm, a head: every value written down."""
    model = nn.Sequential(nn.Conv1d(1, 1, 11, bias=False), nn.BatchNorm1d(1), nn.Flatten(), nn.Linear(1, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(-5, 6).view(1, 1, 11) / 4)
        for value, tensor in enumerate([*model[1].parameters(), *model[3].parameters()]):
            tensor.fill_(value + 0.5)
    return model.eval()


def task() -> archive.Archive:
    options = {
        "bits": None,
        "norms": True,
        "own": (),
        "k0": "auto",
        "k1": "learn",
        "k2": "learn",
        "k3": "learn",
        "per": "layer",
        "surrogate": "identity",
        "threshold": 0.0,
        "init": (1e-4, 2e-4),
    }
    metadata = Metadata("golden", "full", options, "classes", ("ja", "né"), {"size": [11], "mean": [0.5]}, {})
    tensors = {
        "0.weight:mask": torch.tensor([0b10110001, 0b00000101], dtype=torch.uint8),
        "0.weight:k": torch.tensor([1.0, -0.5, 0.25, 2.0]),
        "1.weight": torch.tensor([1.5]),
        "1.bias": torch.tensor([-0.125]),
        "1.running_mean": torch.tensor([0.75]),
        "1.running_var": torch.tensor([2.0]),
        "3.weight": torch.tensor([[1.0], [-1.0]]),
        "3.bias": torch.tensor([0.0, 3.0]),
    }
    shapes = {"0.weight": (1, 1, 11)}
    return archive.Archive(metadata, network().fingerprint, "3", shapes, {"top1": 87.5}, tensors)


def network() -> bitgraft.Network:
    return bitgraft.Network(backbone(), example=(2, 1, 11))


def test_writing_gives_exactly_these_bytes() -> None:
    assert archive.to_bytes(task()) == GOLDEN.read_bytes()
    assert hashlib.sha256(GOLDEN.read_bytes()).hexdigest() == SHA256
    assert GOLDEN.stat().st_size < 4000


def test_reading_these_bytes_gives_exactly_this_task() -> None:
    read, written = bitgraft.read_archive(GOLDEN), task()
    assert dataclasses.replace(read, tensors={}) == dataclasses.replace(written, tensors={})
    assert read.tensors.keys() == written.tensors.keys()
    for key, tensor in written.tensors.items():
        assert read.tensors[key].dtype == tensor.dtype
        assert torch.equal(read.tensors[key], tensor)


def test_the_task_runs_as_worked_out_by_hand() -> None:
    net = network()
    net.load_task(GOLDEN)
    bits = torch.tensor([1, 0, 0, 0, 1, 1, 0, 1, 1, 0, 1])  # 0xb1 0x05, lowest bit first
    weight = torch.arange(-5, 6) / 4
    expected = 1.0 * weight - 0.5 + 0.25 * bits + 2.0 * weight * bits
    assert torch.equal(net.tasks["golden"].tensors()["0.weight"].flatten(), expected)
    image = torch.zeros(1, 1, 11)
    image[0, 0, 10] = 1.0  # picks the last weight: 1.25 - 0.5 + 0.25 + 2.5 = 3.5
    normal = (3.5 - 0.75) / (2.0 + 1e-5) ** 0.5 * 1.5 - 0.125
    assert net(image, task="golden")[0].tolist() == pytest.approx([normal, 3.0 - normal])


def read_from_the_specification(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """docs/format.md, sections Container, Checksum and Metadata, in so many words."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size].decode("utf-8"))
    about = json.loads(header.pop("__metadata__")["bitgraft"])
    assert about["format"] == 1
    marker = rb"\"checksum\":\""
    start = data.index(marker, 8, 8 + size) + len(marker)
    blanked = data[:start] + b"0" * 32 + data[start + 32 :]
    assert xxhash.xxh3_128(blanked).hexdigest() == about["checksum"] == data[start : start + 32].decode()
    kinds = {"U8": "<u1", "F32": "<f4", "F64": "<f8", "I64": "<i8", "BOOL": "?"}
    tensors, reached = {}, 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert begin == reached, "tensors follow one another without a gap, in the header's order"
        reached = end
        flat = np.frombuffer(data[8 + size + begin : 8 + size + end], kinds[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
        weight, colon, part = name.partition(":")
        if colon and weight != "head":
            assert part not in ("mask", "free") or len(flat) == -(-math.prod(about["shapes"][weight]) // 8)
    assert 8 + size + reached == len(data)
    return about, tensors


def replace_weight(weight: np.ndarray, packed: np.ndarray, k: np.ndarray) -> np.ndarray:
    """docs/format.md, section Masks: bit i % 8, lowest first, of byte i // 8 belongs to weight i in row-major order."""
    mask = np.array([packed[i // 8] >> (i % 8) & 1 for i in range(weight.size)], "f4").reshape(weight.shape)
    channels = k.reshape(4, -1, *[1] * (weight.ndim - 1))
    k0, k1, k2, k3 = channels.astype("f4")
    off, on = k0 * weight + k1, (k0 + k3) * weight + (k1 + k2)
    return np.where(mask == 1, on, off)


@pytest.mark.parametrize("per", ["layer", "channel"])
def test_a_reader_written_from_the_specification_finds_the_same_weights(per: str, tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.Flatten(), nn.Linear(7, 5)).eval()
    net = bitgraft.Network(model, example=(2, 3, 3, 3))
    added = net.add_task("t", classes=["a", "b", "ü"], per=per)
    with torch.no_grad():
        for _, parameter in added.roles():
            parameter.copy_(torch.randn(parameter.shape, generator=rng))
    net.save_task("t", tmp_path / "t")
    about, tensors = read_from_the_specification((tmp_path / "t").read_bytes())
    assert about["name"] == "t"
    assert about["classes"] == ["a", "b", "ü"]
    assert about["backbone"] == net.fingerprint
    assert about["shapes"] == {"0.weight": [7, 3, 3, 3]}
    assert about["head_layer"] == "3"
    ours = added.tensors()
    weight = model[0].weight.detach().numpy()
    found = replace_weight(weight, tensors["0.weight:mask"], tensors["0.weight:k"])
    np.testing.assert_allclose(found, ours["0.weight"].detach().numpy(), rtol=3e-7, atol=3e-7)
    bits = np.unpackbits(tensors["0.weight:mask"], bitorder="little")
    assert (
        bits[: weight.size].reshape(weight.shape).astype(bool).tolist() == added.transforms["0.weight"].mask().tolist()
    )
    assert not bits[weight.size :].any()
    for name in ("1.weight", "1.bias", "1.running_mean", "1.running_var", "3.weight", "3.bias"):
        assert np.array_equal(tensors[name], ours[name].detach().numpy())
    assert set(tensors) == {"0.weight:mask", "0.weight:k", *ours} - {"0.weight", "1.num_batches_tracked"}


def test_the_specification_reads_the_golden_file_exactly() -> None:
    about, tensors = read_from_the_specification(GOLDEN.read_bytes())
    weight = backbone()[0].weight.detach().numpy()
    net = network()
    net.load_task(GOLDEN)
    found = replace_weight(weight, tensors["0.weight:mask"], tensors["0.weight:k"])
    assert np.array_equal(found, net.tasks["golden"].tensors()["0.weight"].numpy())
    assert about["metrics"] == {"top1": 87.5}
    assert about["leans_on"] == {}
    assert about["options"]["init"] == [1e-4, 2e-4]
    assert about["preprocessing"] == {"size": [11], "mean": [0.5]}


def test_the_backbone_is_known_by_the_documented_fingerprint() -> None:
    digest = hashlib.sha256()
    state = {name: tensor.numpy() for name, tensor in backbone().state_dict().items()}
    for name in sorted(state):
        if not name.startswith("3.") and not name.endswith("num_batches_tracked"):
            shape = "(" + ", ".join(map(str, state[name].shape)) + ("," if state[name].ndim == 1 else "") + ")"
            digest.update(f"{name}{shape}".encode() + state[name].astype("<f4").tobytes())
    assert digest.hexdigest() == network().fingerprint == bitgraft.read_archive(GOLDEN).backbone


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ConvTranspose2d(6, 4, 2, groups=2),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    ).eval()


def filters(weight: np.ndarray, transposed: bool) -> np.ndarray:
    if not transposed:
        return weight.reshape(weight.shape[0], -1)
    rows = [group[:, j].reshape(-1) for group in np.split(weight, 2) for j in range(weight.shape[1])]
    return np.stack(rows)


def unfiltered(rows: np.ndarray, like: np.ndarray, transposed: bool) -> np.ndarray:
    if not transposed:
        return rows.reshape(like.shape)
    groups = [np.stack([row.reshape(-1, *like.shape[2:]) for row in half], 1) for half in np.split(rows, 2)]
    return np.concatenate(groups)


def bits(packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.unpackbits(packed, bitorder="little")[: math.prod(shape)].reshape(shape)


def by_the_specification(
    about: dict[str, Any], parts: dict[str, np.ndarray], weight: np.ndarray, transposed: bool, before: Any
) -> np.ndarray:
    """docs/format.md, section Parts: W~ of one weight."""
    method, options = about["method"], about["options"]
    rows = filters(weight, transposed)
    if method in ("full", "simple", "piggyback", "piggyback-bn"):
        k0, k1, k2, k3 = parts["k"].reshape(4, -1, 1)
        mask = filters(bits(parts["mask"], weight.shape), transposed)
        return unfiltered(k0 * rows + k1 + k2 * mask + k3 * rows * mask, weight, transposed)
    if method == "dan":
        return unfiltered(parts["p"] @ rows, weight, transposed)
    if method == "lora":
        return unfiltered(rows + options["alpha"] / options["rank"] * parts["b"] @ parts["a"], weight, transposed)
    if method == "adapters-parallel":
        found = weight.copy()
        found[:, :, 1, 1] += parts["a"][:, :, 0, 0]
        return found
    assert method == "packnet"
    found = before if before is not None else weight * (1 - bits(parts["free"], weight.shape))
    found = found.copy()
    found[bits(parts["mask"], weight.shape) == 1] = parts["values"]
    return found


@pytest.mark.parametrize("method", ["full", "simple", "piggyback", "dan", "lora", "adapters-parallel", "packnet"])
def test_the_specification_computes_every_method(method: str, tmp_path: Path) -> None:
    net = bitgraft.Network(grouped(), example=(2, 4, 4, 4))
    options = {"per": "channel"} if method in ("full", "simple") else {}
    rng, before = torch.Generator().manual_seed(9), {}
    for name in ("first", "second"):
        added = net.add_task(name, classes=2, method=method, **options)
        with torch.no_grad():
            for _, parameter in added.roles():
                parameter.add_(torch.randn(parameter.shape, generator=rng))
        if method == "packnet":
            added.prune(0.5)
        net.save_task(name, tmp_path / name)
        about, tensors = read_from_the_specification((tmp_path / name).read_bytes())
        found = {}
        assert list(about["shapes"]) == list(added.transforms)  # as data reaches them
        for weight, shape in about["shapes"].items():
            assert shape == list(net.anatomy.weights[weight].shape)
            parts = {key.partition(":")[2]: t for key, t in tensors.items() if key.startswith(f"{weight}:")}
            base = net.anatomy.tensor(weight).detach().numpy()
            transposed = isinstance(net.backbone.get_submodule(weight.rpartition(".")[0]), nn.ConvTranspose2d)
            found[weight] = by_the_specification(about, parts, base, transposed, before.get(weight))
            np.testing.assert_allclose(found[weight], added.tensors()[weight].detach().numpy(), rtol=1e-5, atol=1e-6)
        assert len(found) == (1 if method == "adapters-parallel" else 2)
        before = found if method == "packnet" else {}


def test_the_specification_computes_what_a_task_depends_on(tmp_path: Path) -> None:
    net = bitgraft.Network(grouped(), example=(2, 4, 4, 4))
    for name in ("first", "second", "third"):
        net.add_task(name, classes=2, method="packnet").prune(0.5)
    earlier: dict[str, str] = {}
    for name in ("first", "second", "third"):
        assert net.tasks[name].metadata.depends_on == earlier
        net.save_task(name, tmp_path / name)
        about, tensors = read_from_the_specification((tmp_path / name).read_bytes())
        assert about["leans_on"] == earlier
        digest = hashlib.sha256(json.dumps(["packnet", list(earlier.values())], separators=(",", ":")).encode() + b"\n")
        for key in sorted(key for key in tensors if ":" in key):
            digest.update(key.encode() + b"\n" + tensors[key].tobytes())
        earlier = {name: digest.hexdigest()}


def test_a_series_adapter_by_the_specification(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv1d(1, 3, 4), nn.Flatten(), nn.Linear(3, 3)).eval()
    net = bitgraft.Network(model, example=(2, 1, 4))
    added = net.add_task("t", method="adapters-series", head="keep").eval()
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in [*added.parameters(), *(b for b in added.buffers() if b.is_floating_point())]:
            tensor.copy_(torch.rand(tensor.shape, generator=rng) + 0.5)
        net.save_task("t", tmp_path / "t")
        _, tensors = read_from_the_specification((tmp_path / "t").read_bytes())
        part = {key.removeprefix("0.weight:tail."): value for key, value in tensors.items()}
        assert set(part) == {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "a.weight"}
        y = model[0](torch.ones(1, 1, 4)).numpy()[0, :, 0]
        normal = (y - part["norm.running_mean"]) / np.sqrt(part["norm.running_var"] + 1e-5)
        y = y + part["a.weight"][:, :, 0] @ (normal * part["norm.weight"] + part["norm.bias"])
        expected = model[2](torch.from_numpy(y))
        assert net(torch.ones(1, 1, 4), task="t")[0].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
