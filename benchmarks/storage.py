"""File rows: saving and loading, a cold process with a full store, file size against entropy."""

import itertools
import math
import mmap
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bitgraft
from benchmarks.measure import Row, Timed, compare, timed
from benchmarks.serving import backbone, task_file, trained
from bitgraft.format.archive import read_archive
from bitgraft.store import SUFFIX, Backbone, Store


def files(folder: Path, rounds: int) -> Iterator[Row]:
    """Compare saving with write, fsync and rename, and loading with reading, from disk and from the page cache.

    Loading a task allocates new memory, and page faults take longer than copying the file. So the baseline also reads
    into fresh memory and keeps it. The rows also state the time to read into warm memory.
    """
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

    kept: list[mmap.mmap] = []
    names = map("loaded-{}".format, itertools.count())

    def into_fresh_memory() -> None:
        room = mmap.mmap(-1, len(content), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with path.open("rb", buffering=0) as file:
            assert file.readinto(room) == len(content)
        kept.append(room)

    read, load = timed(into_fresh_memory), timed(lambda: net.load_task(path, name=next(names)))
    warm = statistics.median(timed(path.read_bytes)() for _ in range(rounds))

    def cold(run: Timed) -> Timed:
        def evicted() -> float:
            _evict(path)
            return run()

        return evicted

    size = f"{len(content) / 1e6:.2f} MB, 320 tensors"
    alike = size + f"; both into fresh memory, which they keep (bytes into warm memory: {1e3 * warm:.2f} ms)"
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
    yield compare(
        "load-cold",
        "loading a task file from the disk",
        "reading its bytes from there",
        5.0,
        cold(load),
        cold(read),
        rounds,
        alike,
    )
    yield compare(
        "load-warm",
        "loading a task file from the system's cache",
        "reading its bytes from there",
        5.0,
        load,
        read,
        rounds,
        alike,
    )


def _evict(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


FIRST = """
import sys, torch
from bitgraft.format.archive import read_archive
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
    """Create a store of identical tasks of a small network, so that a thousand fit anywhere."""
    kind = Backbone("wrn-28-2", pretrained=False)
    net = bitgraft.Network(kind.build())
    store = Store.create(folder, kind, net)
    net.add_task("task-0", classes=10, preset=None).freeze()
    net.save_task("task-0", store.path("task-0"))
    for index in range(1, count):
        shutil.copyfile(store.path("task-0"), folder / f"task-{index}{SUFFIX}")
    return folder


def entropy(folder: Path) -> list[dict[str, float]]:
    """Compare plain and coded file sizes with the entropy of the masks, and time the decoding."""
    table = []
    for share in (0.5, 0.7, 0.9, 0.95, 0.99):
        net = bitgraft.Network(backbone())
        task = trained(net, "task", share=share)
        plain, coded = folder / "plain", folder / "coded"
        net.save_task("task", plain)
        net.save_task("task", coded, coded=True)
        weights = sum(task.anatomy.tensor(name).numel() for name in task.transforms)
        bits = -(share * math.log2(share) + (1 - share) * math.log2(1 - share))
        seconds, slower = (min(timed(lambda: read_archive(path))() for _ in range(5)) for path in (plain, coded))  # noqa: B023
        saved = plain.stat().st_size - coded.stat().st_size
        table.append(
            {
                "share of ones": share,
                "entropy, bits per weight": bits,
                "masks, MB": weights / 8e6,
                "entropy, MB": bits * weights / 8e6,
                "coded, MB": (weights / 8 - saved) / 1e6,
                "plain file, MB": plain.stat().st_size / 1e6,
                "coded file, MB": coded.stat().st_size / 1e6,
                "reading plain, ms": 1e3 * seconds,
                "reading coded, ms": 1e3 * slower,
                "decoded, MB/s": weights / 8e6 / (slower - seconds) if saved else float("nan"),
            }
        )
    return table
