"""One variant of a training step, timed in its own process: `python -m benchmarks.side METHOD NETWORK BATCH PIXELS`."""

import sys
from collections.abc import Callable

import timm
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import baselines
from benchmarks.measure import answer
from bitgraft.runtime.memory import keep_freed_memory

CLASSES, PLAINLY, OTHERS = 10, "-plainly", ("finetune", "piggyback", "lora")


def build(network: str) -> nn.Module:
    torch.manual_seed(0)
    if network.startswith("wrn"):
        from bitgraft.backbone.models import wide_resnet

        return wide_resnet(28, int(network.removeprefix("wrn")), CLASSES)
    return timm.create_model(network, num_classes=CLASSES)


def step_of(method: str, network: str, batch: int, pixels: int) -> Callable[[], None]:
    """Return a training step: forward, loss, backward, optimizers. All sides use the same optimizer settings."""
    model = build(network)
    images = torch.randn(batch, 3, pixels, pixels).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (batch,))
    if method in OTHERS:
        if method == "lora":
            model, learned = baselines.lora(model)
        elif method == "piggyback":
            learned = baselines.piggyback(model)
        else:
            learned = [(baselines.role(name), p) for name, p in model.named_parameters()]
        model.train()
        optimizers = plain_optimizers(learned)

        def step() -> None:
            (F.cross_entropy(model(images), labels, reduction="sum") / batch).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()

        return step
    return ours(model, method, images, labels)


def plain_optimizers(learned: baselines.Roles) -> list[torch.optim.Optimizer]:
    """Return the default optimizers of `bitgraft.training` in plain torch: fused Adam, and SGD for the head."""
    held = list(learned)
    return [
        torch.optim.AdamW([p for r, p in held if r != "head"], lr=1e-4, weight_decay=0.0, fused=True),
        torch.optim.SGD([p for r, p in held if r == "head"], lr=1e-3, momentum=0.9, fused=True),
    ]


def ours(model: nn.Module, method: str, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """Return a step built from the parts of `bitgraft.fit`; "METHOD-plainly" leaves all gradients to PyTorch."""
    from accelerate import Accelerator

    import bitgraft
    from bitgraft.methods.registry import Phase
    from bitgraft.training import cpu, optimizers
    from bitgraft.training.learner import Learner, Objective
    from bitgraft.training.presets import PAPER

    net = bitgraft.Network(model)
    task = net.add_task("task", classes=CLASSES, method=method.removesuffix(PLAINLY), preset=None)
    plainly, objective = method.endswith(PLAINLY), Objective([task])
    learner = Learner(net, objective, Accelerator(cpu=True))
    cpu.set_channels_last(task, not plainly)
    optimizers = optimizers.build(task.roles(), PAPER, Phase())
    task.train()

    def step() -> None:
        output = net(images, task="task") if plainly else learner("task", images, labels)
        loss = objective("task", output, labels, len(labels))
        (loss * (1 / len(labels))).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    return step


def main(method: str, network: str, batch: str, pixels: str) -> None:
    keep_freed_memory()  # on every side, as the `bitgraft` command does
    answer(step_of(method, network, int(batch), int(pixels)))


if __name__ == "__main__":
    main(*sys.argv[1:])
