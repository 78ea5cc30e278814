"""Print the size of a task file by method, for a network with random weights and learned values that do not compress.

python -m benchmarks.file_sizes                          # ResNet-50 with 102 classes: docs/which-method.md
python -m benchmarks.file_sizes densenet121 --classes 10
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import timm
import torch

import bitgraft
from bitgraft.format.inspect import inspect_file
from bitgraft.store import Size

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "simple": {},
    "piggyback-bn": {},
    "piggyback": {},
    "lora": {"rank": 8, "norms": True},
    "norms": {},
    "classifier": {},
    "adapters-parallel": {},
    "finetune": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the size of a task file by method.")
    parser.add_argument("name", nargs="?", default="resnet50", help="a network of timm")
    parser.add_argument("--classes", type=int, default=102)
    given = parser.parse_args()
    net = bitgraft.Network(timm.create_model(given.name).eval())
    print(f"{given.name}, {given.classes} classes\n\n| method | file | head | bits per weight without the head |")
    print("|---|--:|--:|--:|")
    for method, options in METHODS.items():
        megabytes, head, bits = measure(net, method, options, given.classes)
        print(f"| `{method}` | {megabytes:.2f} MB | {head:.2f} MB | {bits:.2f} |")


def measure(net: bitgraft.Network, method: str, options: dict[str, Any], classes: int) -> tuple[float, float, float]:
    """Megabytes of a task's compact file and of its head, and bits per weight of the rest."""
    task, rng = net.add_task("task", classes=classes, method=method, **options), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for role, parameter in task.roles():
            noise = torch.randn(parameter.shape, generator=rng)
            if role == "scores":
                parameter.copy_(noise)  # half of the mask's bits are ones
            else:
                parameter.add_(0.01 * noise)
    bitgraft.compact(task)
    with tempfile.TemporaryDirectory() as folder:
        net.save_task("task", path := Path(folder) / "task.safetensors")
        found, size = inspect_file(path), path.stat().st_size
    net.remove_task("task")
    return size / 1e6, found.bytes["head"] / 1e6, found.bits_per(Size.of(net).weights)


if __name__ == "__main__":
    main()
