"""Inference rows, all with ResNet-50: switching tasks, resident tasks, the forward pass, mixed batches."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import bitgraft
from benchmarks.measure import Row, compare, timed
from bitgraft.task import Task

CLASSES, PIXELS = 100, 64


def backbone() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("resnet50", num_classes=CLASSES).eval()


def trained(net: bitgraft.Network, name: str, seed: int = 0, share: float = 0.5) -> Task:
    """Add a task like a trained one: masks with a given share of ones, perturbed k."""
    task, rng = net.add_task(name, classes=CLASSES, preset=None, seed=seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for role, parameter in task.roles():
            if role == "scores":
                parameter.copy_(share - torch.rand(parameter.shape, generator=rng))
            elif role in ("k", "k1"):
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=rng))
    return task.freeze().eval()


def task_file(folder: Path) -> tuple[nn.Module, Path]:
    model = backbone()
    net = bitgraft.Network(model)
    trained(net, "task")
    net.save_task("task", folder / "task.safetensors")
    return model, folder / "task.safetensors"


@torch.no_grad()
def weights_of(task: Task) -> dict[str, Tensor]:
    """Compute W~ of every layer, as a switch does."""
    return task.tensors()


def switch(folder: Path, rounds: int) -> Iterator[Row]:
    model, path = task_file(folder)
    net = bitgraft.Network(model)
    task = net.load_task(path)
    base = [task.anatomy.tensor(name).detach() for name in task.transforms]
    yield compare(
        "switch",
        "a task's weights from its packed bits, ResNet-50",
        "a memcpy of the same weights",
        1.5,
        timed(lambda: weights_of(task)),
        timed(lambda: [weight.clone() for weight in base]),
        rounds,
        "both into fresh memory, all threads",
    )


def residents(folder: Path, rounds: int, counts: tuple[int, ...] = (1, 10, 100, 1000)) -> Iterator[Row]:
    """Load many tasks; measure switching between them, and the memory of each additional one."""
    model, path = task_file(folder)
    alone = bitgraft.Network(model)
    single = alone.load_task(path, name="alone")
    net = bitgraft.Network(model)
    tasks = [net.load_task(path, name="task-0")]
    ideal = _ideal(tasks[0])
    room = int(0.7 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ideal)
    for count in counts:
        if count > room:
            return
        gc.collect()
        before, had = _resident(), len(tasks)
        tasks += [net.load_task(path, name=f"task-{i}") for i in range(had, count)]
        gc.collect()
        if count - had >= 90:  # enough to be distinguished from the rest of the process
            each = (_resident() - before) / (count - had)
            detail = f"{each / 1e6:.3f} MB against {ideal / 1e6:.3f} MB, resident memory over {count - had} tasks"
            what = f"memory per further resident task, up to {count}"
            yield Row(f"resident-{count}", what, "bits / 8 + norms + head", 1.05, [each / ideal], detail)
        turn = iter(range(10**9))
        yield compare(
            f"switch-{count}",
            f"switch with {count} task{'s' if count > 1 else ''} resident",
            "switch with one",
            1.05,
            timed(lambda: weights_of(tasks[next(turn) * 37 % count])),  # noqa: B023
            timed(lambda: weights_of(single)),
            rounds,
        )


def _ideal(task: Task) -> int:
    bits = sum(transform.bits() for transform in task.transforms.values()) / 8
    return int(bits + sum(t.numel() * t.element_size() for t in task.owned.values()))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forward(folder: Path, rounds: int) -> Iterator[Row]:
    model, path = task_file(folder)
    net = bitgraft.Network(model).eval()
    net.load_task(path)
    images = torch.randn(32, 3, PIXELS, PIXELS)

    def run(call: object) -> None:
        with torch.inference_mode():
            call(images)  # type: ignore[operator]

    yield compare(
        "forward",
        "forward of an active task, ResNet-50, batch 32 at 64 px",
        "forward of the plain backbone",
        1.01,
        timed(lambda: run(lambda x: net(x, task="task"))),
        timed(lambda: run(model)),
        rounds,
    )


def mixed(folder: Path, rounds: int) -> Iterator[Row]:
    """Mixed batches at 224 px, and at 64 px where computing W~ dominates, with one or all eight modules kept."""
    model = backbone()
    names = [f"task-{i}" for i in range(8)]
    makers = {active: bitgraft.Network(model, active=active).eval() for active in (1, 8)}
    for seed, name in enumerate(names):
        trained(makers[1], name, seed)
        makers[1].save_task(name, folder / name)
        makers[8].load_task(folder / name)
    plain = [makers[1].export(name) for name in names]
    wanted = [names[i % 8] for i in range(32)]

    def separate(images: Tensor) -> None:
        with torch.inference_mode():
            for i, module in enumerate(plain):
                module(images[i::8])

    def together(net: bitgraft.Network, images: Tensor) -> None:
        with torch.inference_mode():
            net(images, task=wanted)

    size = sum(p.numel() * 4 for p in model.parameters())
    for pixels, active, limit in ((224, 1, 1.10), (64, 1, 2.0), (64, 8, None)):
        net, images = makers[active], torch.randn(32, 3, pixels, pixels)
        held = size + active * size + 8 * _ideal(net.tasks[names[0]])
        yield compare(
            f"mixed-{pixels}-{active}",
            f"mixed batch of 32 images over 8 tasks, {pixels} px, {active} cached",
            "eight separate plain models, each with its part",
            limit,
            timed(lambda: together(net, images)),  # noqa: B023
            timed(lambda: separate(images)),  # noqa: B023
            rounds if pixels == 64 else max(6, rounds // 2),
            f"{held / 1e6:.0f} MB of weights, bits and backbone against {8 * size / 1e6:.0f} MB",
        )
