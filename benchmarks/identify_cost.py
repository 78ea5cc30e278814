"""Measure the cost of routing over 1,000 tasks, relative to a forward pass of ResNet-50 at batch 1."""

from collections.abc import Iterator
from statistics import median

import torch

from benchmarks.backbones import resnet50_v1
from benchmarks.measure import in_turns, timed
from bitgraft.format.description import rounded
from bitgraft.runtime.identify.fitting import RANK
from bitgraft.runtime.identify.scorers import Likelihood

TASKS, CLASSES, ROUNDS = 1000, 100, 15
FEATURES = 2048 + 12 * 48  # of ResNet-50: the input of its head, and twelve depths


def cost() -> Iterator[str]:
    rng = torch.Generator().manual_seed(0)
    one = rounded(
        mean=torch.randn(FEATURES, generator=rng),
        basis=torch.linalg.qr(torch.randn(FEATURES, RANK, generator=rng))[0].T,
        classes=torch.randn(CLASSES, RANK, generator=rng),
        variances=torch.ones(RANK),
        noise=torch.ones(1),
        calibration=torch.ones(5),
    )
    scorer, network = Likelihood([one] * TASKS), resnet50_v1().eval()
    images, features = torch.randn(1, 3, 224, 224), torch.randn(1, FEATURES)
    with torch.inference_mode():
        sides = in_turns([timed(lambda: network(images)), timed(lambda: scorer(features))], ROUNDS)
    held = [t for t in vars(scorer).values() if isinstance(t, torch.Tensor)]
    forward, route = (1000 * median(side) for side in sides)
    yield "| ResNet-50 forward, ms | routing, ms | ratio (forward + routing) / forward | in files, MB | stacked, MB |"
    yield "|---|---|---|---|---|"
    sizes = f"{TASKS * one.nbytes / 1e6:.0f} | {sum(t.nbytes for t in held) / 1e6:.0f}"
    yield f"| {forward:.0f} | {route:.1f} | {(forward + route) / forward:.3f} | {sizes} |"
