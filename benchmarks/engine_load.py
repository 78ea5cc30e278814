"""One task over HTTP: `bitgraft serve` on onnxruntime and on PyTorch, next to a bare FastAPI and onnxruntime server.

    python -m benchmarks.engine_load --seconds 6 --rounds 3 --clients 8      about a minute and a half on two idle cores

The sides take turns against the same clients in this process. Every answer is compared with the offline one: the same
best class, and each probability within 1e-5 (bitgraft) or 0.01 (the bare server, which resizes the whole image).
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from contextlib import ExitStack
from datetime import date
from pathlib import Path

import torch

from benchmarks.load import BACKBONE, MAIN, PICTURES, RESULTS, Side, add, offline, picture, running, traffic
from bitgraft.export.onnx_file import onnx_bytes
from bitgraft.export.plain import Subject
from bitgraft.network import Network
from bitgraft.store import Store

TASK = "task-0"
COLUMNS = ("server", "requests_per_second", "p50_ms", "p99_ms", "megabytes", "answers_checked", "answers_wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bitgraft-load-") as folder, ExitStack() as stack:
        net = Network(BACKBONE.build())
        store = Store.create(Path(folder) / "store", BACKBONE, net)
        add(store, net, TASK, "full", 0)
        exported = Path(folder) / "task.onnx"
        exported.write_bytes(onnx_bytes(Subject(net, TASK)))
        pictures = [picture(seed) for seed in range(PICTURES)]
        wanted = {(TASK, number): offline(net, TASK, data) for number, data in enumerate(pictures)}
        threads = str(len(os.sched_getaffinity(0)))
        serve = ["-c", MAIN, "serve", "--store", str(store.folder), "--port", "0", "--threads", threads, "--engine"]
        sides = []
        for title, command, tolerance in (
            ("FastAPI and onnxruntime, bare", ["-m", "benchmarks.bare_server", str(exported), threads], 1e-2),
            ("bitgraft serve, onnxruntime", [*serve, "onnxruntime", "--pin", TASK], 1e-5),
            ("bitgraft serve, torch", [*serve, "torch"], 1e-5),
        ):
            process, port = stack.enter_context(running(command, threads))
            sides.append(Side(title, {TASK: port}, [process], wanted, tolerance=tolerance))
        time.sleep(1.0)  # the pinned session
        for side in sides:
            traffic(side, pictures, 1.0, asked.clients)
            side.rates.clear()
            side.seconds.clear()
        for number in range(asked.rounds):
            for side in sides if number % 2 == 0 else sides[::-1]:
                traffic(side, pictures, asked.seconds, asked.clients)
        rows = [side.plain() for side in sides]
    ratio = statistics.median(ours / bare for bare, ours in zip(sides[0].rates, sides[1].rates, strict=True))
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for row in rows:
        print("| " + " | ".join(str(row[column]) for column in COLUMNS) + " |")
    print(f"\nonnxruntime in bitgraft serve reaches {ratio:.2f} of the bare server's rate")
    found = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {threads} cores, torch {torch.__version__}",
        "load": os.getloadavg()[0],
        "clients": asked.clients,
        "seconds": asked.seconds,
        "servers": rows,
        "rates": {side.title: [round(rate, 2) for rate in side.rates] for side in sides},
        "ratio_to_bare": round(ratio, 3),
    }
    RESULTS.with_name("load-engines.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
