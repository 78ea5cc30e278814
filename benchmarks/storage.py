"""Rows on files: saving and loading, a cold process with a full store, size against entropy."""

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import bitgraft
from benchmarks.measure import Row, Timed, compare, timed
from benchmarks.serving import backbone, task_file, trained
from bitgraft.store import SUFFIX, Backbone, Store


def files(folder: Path, rounds: int) -> Iterator[Row]:
    """Saving against write, fsync and rename; loading against reading, from a disk and from the system's cache."""
    model, path = task_file(folder)
    net = bitgraft.Network(model)
    net.load_task(path)
    content = path.read_bytes()
    _ = net.fingerprint

    def write() -> None:
        part = folder / "part"
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / "plain")

    def load() -> None:
        net.load_task(path, name="loaded")

    def after(run: Timed) -> Timed:
        def both() -> float:
            seconds = run()
            net.remove_task("loaded")
            return seconds

        return both

    def cold(run: Timed) -> Timed:
        def evicted() -> float:
            _evict(path)
            return run()

        return evicted

    size = f"{len(content) / 1e6:.2f} MB, 320 tensors"
    yield compare(
        "save",
        "saving a task file, ResNet-50",
        "write, fsync, rename of its bytes",
        3.0,
        timed(lambda: net.save_task("task", folder / "saved")),
        timed(write),
        rounds,
        size + "; saving also flushes the folder",
    )
    read = timed(path.read_bytes)
    yield compare(
        "load-cold",
        "loading a task file from the disk",
        "reading its bytes from there",
        3.0,
        after(cold(timed(load))),
        cold(read),
        rounds,
        size,
    )
    yield compare(
        "load-warm",
        "loading a task file from the system's cache",
        "reading its bytes from there",
        3.0,
        after(timed(load)),
        read,
        rounds,
        size + "; SHA-256 alone takes several times as long as such a read",
    )


def _evict(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


FIRST = """
import sys, torch
from bitgraft.store import Store
store = Store(sys.argv[1])
assert len(store.names()) == int(sys.argv[2])
net = store.network().eval()
store.load(net, "task-0")
with torch.inference_mode():
    net(torch.zeros(1, 3, 64, 64), task="task-0")
"""


def cold_process(folder: Path, rounds: int) -> Iterator[Row]:
    stores = {count: _store(folder / f"store-{count}", count) for count in (1, 1000)}

    def start(count: int) -> Timed:
        command = [sys.executable, "-c", FIRST, str(stores[count]), str(count)]
        return timed(lambda: subprocess.run(command, check=True))

    yield compare(
        "cold",
        "first prediction from a cold process, a store of 1000 tasks",
        "the same with one task",
        1.2,
        start(1000),
        start(1),
        rounds,
    )


def _store(folder: Path, count: int) -> Path:
    """Tasks of the small network, so that a thousand of them fit anywhere; what they hold is not read here."""
    kind = Backbone("wrn-28-2", pretrained=False)
    net = bitgraft.Network(kind.build())
    store = Store.create(folder, kind, net)
    net.add_task("task-0", classes=10).freeze()
    net.save_task("task-0", store.path("task-0"))
    for index in range(1, count):
        shutil.copyfile(store.path("task-0"), folder / f"task-{index}{SUFFIX}")
    return folder


def entropy(folder: Path) -> list[dict[str, float]]:
    """The file's size against the entropy of its masks."""
    table = []
    for share in (0.5, 0.7, 0.9, 0.95, 0.99):
        net = bitgraft.Network(backbone())
        trained(net, "task", share=share)
        path = folder / "entropy.safetensors"
        net.save_task("task", path)
        masks = sum(t.weight.shape.numel() for t in net.tasks["task"].transforms.values())  # type: ignore[union-attr]
        bits = -(share * math.log2(share) + (1 - share) * math.log2(1 - share))
        loaded = bitgraft.Network(net.backbone)
        start = time.perf_counter()
        loaded.load_task(path)
        table.append(
            {
                "share_of_ones": share,
                "entropy_bits_per_weight": bits,
                "packed_mb": masks / 8e6,
                "floor_mb": bits * masks / 8e6,
                "file_mb": path.stat().st_size / 1e6,
                "load_seconds": time.perf_counter() - start,
            }
        )
    return table
