"""The paper's "# Params" rows to the printed digits, and counted files against real ones."""

import os
from pathlib import Path

import pytest
import torch

import bitgraft
from bitgraft import Network, wide_resnet
from bitgraft.backbone.anatomy import Anatomy, read_anatomy
from bitgraft.backbone.loading import read_backbone
from bitgraft.errors import BackboneError
from bitgraft.paper.parameter_counts import Row, account, file_bytes, headless_parameters, paper_accounts

METHODS = ["classifier", "finetune", "full", "simple", "piggyback", "piggyback-bn", "dan", "lora"]
ADAPTERS = ["adapters-series", "adapters-joint", "adapters-parallel"]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], float]:
    return {(one.backbone, row.method): row.relative for one in paper_accounts() for row in one.rows}


@pytest.mark.parametrize(
    ("backbone", "printed"),
    [
        (
            "resnet50",
            {"classifier": 1, "piggyback": 1.16, "piggyback-bn": 1.17, "simple": 1.17, "full": 1.17, "finetune": 6},
        ),
        (
            "densenet121",
            {"classifier": 1, "piggyback": 1.15, "piggyback-bn": 1.21, "simple": 1.21, "full": 1.21, "finetune": 6},
        ),
        ("wrn-28-4", {"classifier": 1, "piggyback": 1.28, "simple": 1.29, "full": 1.29, "finetune": 10}),
    ],
)
def test_the_papers_rows(backbone: str, printed: dict[str, float], rows: dict[tuple[str, str], float]) -> None:
    assert {method: round(rows[backbone, method], 2) for method in printed} == printed


def test_packnet_takes_three_bits_for_all_tasks_together(rows: dict[tuple[str, str], float]) -> None:
    for backbone in ("resnet50", "densenet121"):
        assert rows[backbone, "packnet"] == pytest.approx(1 + 3 / 32, abs=0.0015)  # norms have no bits
        assert round(rows[backbone, "packnet"], 2) == 1.09


@pytest.mark.parametrize(
    ("backbone", "method", "printed", "counted"),
    [
        ("wrn-28-4", "dan", 2.17, 2.20),
        ("resnet26", "adapters-series", 2, 2.09),
        ("resnet26", "adapters-joint", 2, 2.09),
        ("resnet26", "adapters-parallel", 2, 2.01),
    ],
)
def test_adapters_and_dan_are_counted_exactly(
    backbone: str, method: str, printed: float, counted: float, rows: dict[tuple[str, str], float]
) -> None:
    assert abs(rows[backbone, method] - printed) < 0.1
    assert round(rows[backbone, method], 2) == counted


def counted(anatomy: Anatomy, tasks: int, method: str) -> Row:
    return next(row for row in account(anatomy, tasks).rows if row.method == method)


def test_dan_by_hand() -> None:
    anatomy = read_anatomy(wide_resnet(10, 1))
    squares = sum(w.outputs**2 for w in anatomy.weights.values())
    norms = sum(anatomy.backbone.get_submodule(name).weight.numel() * 2 for name in anatomy.norms)
    assert counted(anatomy, 10, "dan").relative == 1 + (squares + norms) * 9 / headless_parameters(anatomy)


def test_parameters_leave_the_classifier_out() -> None:
    backbone = wide_resnet(10, 1, num_classes=7)
    everything = sum(p.numel() for p in backbone.parameters())
    assert account(read_anatomy(backbone), 2).parameters == everything - 7 * 64 - 7


@pytest.mark.parametrize("method", METHODS + ADAPTERS)
def test_a_counted_file_is_the_real_one(method: str, tmp_path: Path) -> None:
    size = counted(read_backbone("wrn-10-1"), 2, method).file_bytes
    net = Network(wide_resnet(10, 1))
    task = net.add_task("real", method=method, head="keep")
    with torch.no_grad():
        for _, parameter in task.roles():
            parameter.add_(0.01 * torch.randn_like(parameter))
    bitgraft.compact(task)
    net.save_task("real", tmp_path / "real.safetensors")
    metadata = os.path.getsize(tmp_path / "real.safetensors") - size  # method, options, fingerprint, sizes of norms
    assert 0 < metadata < 2000


def test_packnets_mean_file_is_that_of_a_real_chain(tmp_path: Path) -> None:
    mean = counted(read_backbone("wrn-10-1"), 4, "packnet").file_bytes
    net, sizes = Network(wide_resnet(10, 1)), []
    for name in ("first", "second", "last"):
        task = net.add_task(name, method="packnet", head="keep", preset=None)
        if name != "last":
            task.prune(0.75)
    for name in net.tasks:
        net.save_task(name, tmp_path / name)
        sizes.append(os.path.getsize(tmp_path / name))
    assert sum(sizes) / 3 == pytest.approx(mean, rel=0.02)


def test_files_hold_norm_layers_in_half_precision() -> None:
    row = counted(read_backbone("wrn-10-1"), 10, "piggyback-bn")
    assert row.relative_files < row.relative
    assert file_bytes({}) == 10


def test_a_backbone_without_a_known_head_is_refused() -> None:
    with pytest.raises(BackboneError, match="which layer"):
        account(read_backbone("tiny:hidden_head"), 6)
    assert counted(read_backbone("tiny:hidden_head", head="2"), 6, "piggyback").bits == 12
