"""Export a task on the five architectures that exports support, and compare each file's scores with the task's.

    python -m benchmarks.export_check               # about 5 minutes on two idle cores; random weights, no download
    python -m benchmarks.export_check resnet50

Plain weights in timm's own class and the torch.export program must be bit-identical. The ONNX column is the largest
difference in onnxruntime relative to the largest score, at most 1e-4 (`onnx_bytes` raises an error otherwise).
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
    """Return a task with random masks and perturbed k, on random weights that propagate the input."""
    torch.manual_seed(0)
    net = Network(_open(timm.create_model(name).eval()))
    task = net.add_task("t", classes=CLASSES, preset=None)
    with torch.no_grad():
        for weight, transform in task.transforms.items():
            assert isinstance(transform, Masked)
            size = net.anatomy.tensor(weight).std()
            for part, parameter in transform.named_parameters():
                parameter.normal_() if part == "scores" else parameter.add_(0.2 * size * torch.randn_like(parameter))
        net.train()(Subject(net, "t").images(8), task="t")  # sets the norm layers' statistics
    task.freeze()
    return Subject(net.eval(), "t")


def _open(model: nn.Module) -> nn.Module:
    """Open every branch (norms start at 0, layer scales at 1e-6), and take statistics from the last batch."""
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
