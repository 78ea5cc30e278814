"""Add and remove 1,000 tasks of a small network under `bitgraft serve`, and check that memory is released.

    python -m benchmarks.churn --tasks 1000 --at-once 100      about three minutes on two idle cores

Each task answers 16 images, so that it gets a session. The worker's resident memory is compared before the second wave
of tasks and after the last. Writes benchmarks/results/churn.json; the exit code is 1 if memory grew by over 5 %.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from benchmarks.load import MAIN, add
from benchmarks.traffic import Side, form, get, picture, post, running
from bitgraft.network import Network
from bitgraft.store import Backbone, Store

BACKBONE, LIMIT, PATIENCE = Backbone("test_resnet", pretrained=False), 1.05, 300.0
RESULTS = Path(__file__).parent / "results" / "churn.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=100)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bitgraft-churn-") as folder:
        torch.manual_seed(0)
        net = Network(BACKBONE.build())
        store = Store.create(Path(folder) / "store", BACKBONE, net)
        add(store, net, "stays", 0)
        command = ["-c", MAIN, "serve", "--store", str(store.folder), "--port", "0", "--poll", "0.2", "--pin", "stays"]
        with running(command, 1) as (process, port):
            side, resident = Side("churn", {"stays": port}, [process], {}), []
            for start in range(0, asked.tasks + asked.at_once, asked.at_once):  # the first wave only warms the caches
                wave(side, store, [f"task-{number}" for number in range(start, start + asked.at_once)])
                resident.append(megabytes(side.family()[-1]))
                print(f"{start + asked.at_once} tasks added and removed: {resident[-1]:.1f} MB", flush=True)
    grown = resident[-1] / resident[0]
    found = {"date": date.today().isoformat(), "tasks": asked.tasks, "resident_megabytes": resident, "ratio": grown}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(f"resident memory, after / before: {grown:.3f}")
    return int(grown > LIMIT)


def wave(side: Side, store: Store, names: list[str]) -> None:
    for name in names:
        shutil.copy(store.path("stays"), partial := store.folder / f".{name}")
        partial.rename(store.path(name))
    wait(side, {"stays", "original", *names})
    for name in names:
        answers = json.loads(post(side.ports["stays"], f"/v1/predict/{name}", *form([picture(0)] * 16)))["answers"]
        assert len(answers) == 16
    for name in names:
        store.path(name).unlink()
    wait(side, {"stays", "original"})


def wait(side: Side, names: set[str]) -> None:
    """Wait until exactly these tasks are served."""
    end = time.monotonic() + PATIENCE
    while {task["name"] for task in json.loads(get(side.ports["stays"], "/v1/tasks"))["tasks"]} != names:
        assert time.monotonic() < end, "the store's files were not picked up"
        time.sleep(0.1)
    time.sleep(0.5)  # removed versions are dropped at the next poll


def megabytes(process: int) -> float:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    sys.exit(main())
