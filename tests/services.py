"""A small store, and the service on it as a process of its own, that several test files share."""

import io
import logging
import multiprocessing
import os
import re
import signal
import struct
import sys
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import prometheus_client  # noqa: F401  (a service must count also where this was imported before it)
import torch
from PIL import Image

from bitgraft.cli import main as cli
from bitgraft.data.preprocessing import Preprocessing, evaluation_tensor
from bitgraft.network import Network
from bitgraft.store import Backbone, Store

PATIENCE = 120.0  # seconds, for a machine that has much else to do
SOURCE = """
import torch
from torch import nn

def build(num_classes=5):
    layers = [nn.Conv2d(3, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16)]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))
"""
NET = "served_net:build"
PREPROCESSING = {"size": [32, 32], "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}


def new_store(folder: Path, names: Sequence[str] = ("birds", "cars"), *, active: int = 8) -> tuple[Store, Network]:
    """Random masks, which answer as differently as learned ones. The backbone's source lies beside the store."""
    (folder / "served_net.py").write_text(SOURCE)
    sys.path.insert(0, str(folder))
    sys.modules.pop("served_net", None)
    try:
        backbone = Backbone(NET, pretrained=False)
        net = Network(backbone.build(), active=active)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("served_net", None)
    store = Store.create(folder / "store", backbone, net)
    for seed, name in enumerate(names):
        add(store, net, name, seed=seed)
    return store, net


def add(store: Store, net: Network, name: str, *, seed: int, classes: int = 4, size: int = 32) -> None:
    """Put a task into the store, over the one that is there."""
    if name in net.tasks:
        net.remove_task(name)
    stated = {**PREPROCESSING, "size": [size, size]}
    labels = [f"{name} {seed}.{i}" for i in range(classes)]
    task = net.add_task(name, labels, "full", seed=seed, preprocessing=stated)
    rng = torch.Generator().manual_seed(seed)
    for role, parameter in task.roles():
        if role in ("scores", "k"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=rng))
    task.freeze()
    net.eval().save_task(name, store.path(name))


def picture(seed: int = 0, *, side: int = 40, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side + 5, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


@torch.no_grad()
def offline(net: Network, name: str, data: bytes, top: int = 5) -> list[dict[str, Any]]:
    """What the library says to one image, as a client gets it."""
    own = name == net.original
    stated = {} if own else net.tasks[name].metadata.preprocessing
    scores = net(evaluation_tensor(data, Preprocessing.from_dict(stated))[None], task=name)[0].softmax(0)
    classes = None if own else net.tasks[name].classes
    values, places = scores.topk(min(top, len(scores)))
    pairs = zip(places.tolist(), values.tolist(), strict=True)
    return [{"class": classes[place] if classes else str(place), "probability": value} for place, value in pairs]


def near(given: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """The same answers but for an engine's rounding."""
    pairs = list(zip(given, expected, strict=False))
    same = len(given) == len(expected) and all(g["class"] == e["class"] for g, e in pairs)
    return same and all(abs(g["probability"] - e["probability"]) < 1e-5 for g, e in pairs)


class Served:
    """A running `bitgraft serve`, forked off so that it need not import everything again.

    Its answers are exact, so that they can be compared to the last bit, unless another engine is asked for.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        if "--engine" not in options:
            options = (*options, "--exact")
        self._said = folder / f"said-{time.monotonic_ns()}.txt"
        self._said.touch()
        arguments = ["serve", "--store", "store", "--port", "0", "--threads", "1", *options]
        self._process = _clean.Process(
            target=_serve, args=(str(folder), str(self._said), arguments, os.environ["BITGRAFT_CACHE"])
        )
        self._process.start()
        self.pid = self._process.pid or 0
        until(lambda: self.ended() or "serving" in self.said, "it did not start")
        found = re.search(r"http://[\d.]+:(\d+)/", self.said)
        assert found, self.said
        self.port = int(found[1])
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE, trust_env=False)
        until(self._ready, f"it did not get ready:\n{self.said}")

    @property
    def code(self) -> int | None:
        return self._process.exitcode

    def ended(self) -> bool:
        return self.code is not None

    @property
    def said(self) -> str:
        return self._said.read_text()

    def _ready(self) -> bool:
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return sorted(map(int, children.split()))

    def predict(self, task: str, data: bytes, **query: Any) -> httpx.Response:
        return self.http.post(f"/v1/predict/{task}", content=data, params=query)

    def answers(self, task: str, data: bytes) -> list[dict[str, Any]]:
        response = self.predict(task, data)
        assert response.status_code == 200, response.text
        return response.json()["answers"][0]

    def tasks(self) -> dict[str, Any]:
        return {row["name"]: row for row in self.http.get("/v1/tasks").json()["tasks"]}

    def end(self) -> int | None:
        """Told to end, it does; its exit code."""
        os.kill(self.pid, signal.SIGTERM)
        until(self.ended, f"it did not end:\n{self.said}")
        return self.code


_clean = multiprocessing.get_context("forkserver")  # the tests' own process has threads, whose locks a fork inherits
_clean.set_forkserver_preload(["bitgraft.cli.main", "bitgraft.network", "bitgraft.serving.supervisor", "uvicorn"])


def _serve(folder: str, said: str, arguments: list[str], cache: str) -> None:
    code: Any = 99
    try:
        os.environ["BITGRAFT_CACHE"] = cache  # the fork server was started without it
        os.setsid()
        os.chdir(folder)
        log = os.open(said, os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = (open(end, "w", buffering=1, closefd=False) for end in (1, 2))  # noqa: SIM115
        logging.root.handlers.clear()
        warnings.resetwarnings()
        sys.argv = ["bitgraft", *arguments]
        cli.main()
    except SystemExit as left:
        code = left.code
    finally:
        os._exit(code or 0)


@contextmanager
def served(folder: Path, *options: str) -> Iterator[Served]:
    service = Served(folder, *options)
    try:
        yield service
    finally:
        service.http.close()
        with suppress(ProcessLookupError):
            os.killpg(service.pid, signal.SIGKILL)
        until(service.ended, "it could not be killed")


def until(holds: Any, complaint: str) -> None:
    """Wait until something holds; much longer than it can take, so that no slow machine fails here."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, complaint
        time.sleep(0.02)


def bomb(width: int, height: int) -> bytes:
    """A PNG of so many black pixels, all of them in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(b"\0" * 10_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
