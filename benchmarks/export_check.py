"""Exports the five architectures that exports promise to hold for, and says how far each file is from the task.

    python -m benchmarks.export_check               # about 5 minutes on two idle cores; random weights, no download
    python -m benchmarks.export_check resnet50

A row: plain weights loaded into timm's own class and the torch.export program must be equal to the last bit; ONNX in
onnxruntime, as a share of the largest score, at most 1e-4 (or `onnx_bytes` refuses, and this ends with its sentence).
"""

import argparse
import io
import platform
import time

import timm
import torch
from torch import nn

from bitgraft import Network
from bitgraft.export import onnx_file, plain
from bitgraft.export.plain import Subject
from bitgraft.transforms.masked import Masked

NETWORKS = ("resnet50", "densenet121", "efficientnet_lite0", "convnext_tiny", "vit_small_patch16_224")
CLASSES, BATCH = 10, 2


def subject(name: str) -> Subject:
    """A task with half of its bits set and k away from where they begin, on random weights that let data through."""
    torch.manual_seed(0)
    net = Network(_open(timm.create_model(name).eval()))
    task = net.add_task("t", classes=CLASSES, preset=None)
    with torch.no_grad():
        for weight, transform in task.transforms.items():
            assert isinstance(transform, Masked)
            size = net.anatomy.tensor(weight).std()
            for part, parameter in transform.named_parameters():
                parameter.normal_() if part == "scores" else parameter.add_(0.2 * size * torch.randn_like(parameter))
        net.train()(Subject(net, "t").images(8), task="t")  # norm layers take their statistics from this
    task.freeze()
    return Subject(net.eval(), "t")


def _open(model: nn.Module) -> nn.Module:
    """No branch begins at nothing (norms at 0, layer scales at 1e-6), and statistics are the last batch's."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            layer.momentum = 1.0
    for path, parameter in model.named_parameters():
        if path.endswith("gamma"):
            nn.init.constant_(parameter, 0.5)
    return model


def row(name: str) -> str:
    held, begun = subject(name), time.perf_counter()
    images = held.images(BATCH)
    expected = held.answer(images)
    assert (expected[0] - expected[1]).abs().max() > 1e-2 * expected.abs().max(), (
        "the scores do not depend on the image"
    )
    model = timm.create_model(name, num_classes=CLASSES).eval()
    model.load_state_dict(plain.weights(held))
    program = torch.export.load(io.BytesIO(plain.program_bytes(held))).module()
    data = onnx_file.onnx_bytes(held)
    with torch.no_grad():
        equal = [torch.equal(call(images), expected) for call in (model, program)]
    difference = onnx_file.check_scores(onnx_file.open_session(data), {"images": images}, expected, name)
    cells = [
        name,
        *("equal" if same else "DIFFERS" for same in equal),
        f"{difference:.1e}",
        f"{len(data) / 1e6:.1f} MB",
    ]
    return f"| {' | '.join(cells)} | {time.perf_counter() - begun:.0f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    print(
        f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads, {time.strftime('%F')}\n"
    )
    print("| network | plain weights | torch.export | ONNX | ONNX file | time |\n|---|---|---|--:|--:|--:|")
    for name in parser.parse_args().networks:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
