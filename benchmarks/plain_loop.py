"""`python -m benchmarks.plain_loop FOLDER`: images per second of training, including image loading.

Three sides in turns, each from image folder to updated weights: `bitgraft.fit` with method `full`, `bitgraft.fit` with
method `finetune` (the same loop and convolutions, so this ratio is the cost of the method), and a plain loop in PyTorch
and torchvision. Times are CPU times, so that other processes matter little.
"""

import argparse
import statistics
import time
import warnings
from contextlib import suppress

import timm
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import bitgraft
from bitgraft.training.callbacks import Clock


def ours(network: str, folder: str, method: str, steps: int, size: int) -> float:
    """Return images per second of CPU time, including loading."""
    torch.manual_seed(0)
    net, clock = bitgraft.Network(timm.create_model(network, pretrained=False)), Clock()
    data = bitgraft.open_data(folder)
    net.add_task("task", classes=data.classes, method=method, preset="quick")
    config = bitgraft.Config(epochs=10, size=size, resize=size * 9 // 8, head_init=False)
    with suppress(bitgraft.StoppedError):
        enough = lambda: clock.images >= 32 * steps  # noqa: E731
        bitgraft.fit(net, "task", data, config=config, callbacks=[clock], stop=enough, progress=False)
    return clock.images / clock.processor_seconds


def plain(network: str, folder: str, steps: int, size: int) -> float:
    torch.manual_seed(0)
    crops = [transforms.Resize(size * 9 // 8), transforms.RandomCrop(size), transforms.RandomHorizontalFlip()]
    norm = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    data = ImageFolder(f"{folder}/train", transforms.Compose([*crops, transforms.ToTensor(), norm]))
    model: nn.Module = timm.create_model(network, pretrained=False, num_classes=len(data.classes)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seen, began = 0, time.process_time()
    while True:
        for images, labels in DataLoader(data, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            seen += len(images)
            if seen >= 32 * steps:
                return seen / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="with train/ and test/, one subfolder per class")
    parser.add_argument("--networks", default="tf_efficientnet_lite0,resnet50")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for network in given.networks.split(","):
        sides: dict[str, list[float]] = {"full": [], "finetune": [], "plain loop": []}
        ours(network, given.folder, "full", 2, given.size)  # loads the compiled loops
        for _ in range(given.rounds):
            for method in ("full", "finetune"):
                sides[method].append(ours(network, given.folder, method, given.steps, given.size))
            sides["plain loop"].append(plain(network, given.folder, given.steps, given.size))
        for other in ("finetune", "plain loop"):
            ratios = [b / a for a, b in zip(sides["full"], sides[other], strict=True)]
            print(f"{network}, {given.size} px: time of full / {other}: {statistics.median(ratios):.2f}", end=" ")
            print(f"({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
        rates = {side: round(statistics.median(found), 1) for side, found in sides.items()}
        print(f"  images per second of processor time: {rates}", flush=True)


if __name__ == "__main__":
    main()
