"""The service behind HTTP: images are decoded in a few threads, queued by task, and run in turns."""

import asyncio
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bitgraft.errors import UnknownTaskError, UnsafeNameError
from bitgraft.runtime.module_cache import computed_bytes
from bitgraft.serving import auto
from bitgraft.serving.changes import change
from bitgraft.serving.library import Entry, Library
from bitgraft.serving.metrics import Metrics
from bitgraft.serving.predictions import check_tensor, decode
from bitgraft.serving.refusals import Refusal
from bitgraft.serving.scheduler import Scheduler
from bitgraft.serving.sessions import Sessions
from bitgraft.serving.settings import Settings
from bitgraft.serving.tracing import Tracing, otlp_exporter
from bitgraft.workflows.prediction import best, probabilities, task_session, torch_scores

Predictions = list[dict[str, Any]]
"""For each task {"task", "version", "milliseconds": in the network, "answers": the best classes by image}."""


class Inferred(NamedTuple):
    """One task's probabilities (N, classes), and what the classes are called, if they have names."""

    probabilities: Tensor
    classes: Sequence[str] | None
    version: str


class Scored(NamedTuple):
    """One image's probabilities, how long its batch took, and when that ended."""

    row: Tensor
    seconds: float
    ended: float


class Service(Protocol):
    """What the HTTP side needs: an engine in this process, or replicas on other machines."""

    settings: Settings
    metrics: Metrics
    tracing: Tracing

    async def predict(self, names: Sequence[str], images: Sequence[bytes], top: int) -> Predictions: ...
    async def infer(self, name: str, inputs: Sequence[bytes] | Tensor) -> Inferred: ...
    async def change(self, action: str, name: str, *args: Any) -> dict[str, Any]: ...
    async def tasks(self) -> dict[str, Any]: ...
    async def task(self, name: str) -> dict[str, Any]: ...

    async def find(self, images: Sequence[bytes], top: int) -> list[dict[str, Any]]:
        raise Refusal(501, "this service does not find an image's task: name it, as in /v1/predict/NAME")

    def healthy(self) -> bool:
        return True

    def ready(self) -> bool:
        return self.healthy()

    def update_gauges(self) -> None:
        return


class Engine(Service):
    """The service in this process."""

    def __init__(self, library: Library, settings: Settings) -> None:
        self.library, self.settings, self.metrics = library, settings, Metrics()
        self.tracing = Tracing(otlp_exporter(settings.otlp) if settings.otlp else None)
        self.scheduler = Scheduler(
            self._run,
            batch=settings.max_batch,
            wait=settings.max_wait_ms / 1000,
            queue=settings.max_queue,
            total=settings.max_waiting,
            turns=settings.turns_each,
        )
        self.sessions = Sessions(
            library,
            budget=settings.memory_budget,
            pinned=settings.pin,
            enabled=settings.sessions,
            make=partial(task_session, threads=settings.threads_per_turn, export=False),
            note=lambda task, event: self.metrics.session_events.labels(task, event).inc(),
        )
        self._decoders = ThreadPoolExecutor(settings.threads_each, thread_name_prefix="bitgraft-decoder")
        self._decoding = 0
        self._watcher = threading.Thread(target=self._watch, name="bitgraft-watcher", daemon=True)

    def start(self) -> None:
        self.library.net.to(self.settings.device)
        self.library.scan()
        self.sessions.start()
        self.scheduler.start()
        self._watcher.start()

    def healthy(self) -> bool:
        """Every thread that answers depend on is alive."""
        return self.scheduler.alive and self.sessions.alive and self._watcher.is_alive()

    def ready(self) -> bool:
        return self.healthy() and self.sessions.ready()

    async def predict(self, names: Sequence[str], images: Sequence[bytes], top: int) -> Predictions:
        """Every task's answers to every image. A request that cannot be answered whole is refused whole."""
        entries = self._find(dict.fromkeys(names))
        with self.metrics.asked(entries, len(images)):
            self._check(len(entries), len(images))
            decoded = await self._decode(entries, images)
            scored = await self._scored(dict(zip(entries, zip(*decoded, strict=True), strict=True)))
        return [self._answers(entry, scored[entry], top) for entry in entries]

    async def infer(self, name: str, inputs: Sequence[bytes] | Tensor) -> Inferred:
        """All probabilities of one task, for images or for a tensor that is already preprocessed."""
        (entry,) = self._find([name])
        with self.metrics.asked([entry], len(inputs)):
            self._check(1, len(inputs))
            if isinstance(inputs, Tensor):
                check_tensor(inputs, entry.preprocessing)
                rows = list(inputs)
            else:
                rows = [made for (made,) in await self._decode([entry], inputs)]
            scored = (await self._scored({entry: rows}))[entry]
        return Inferred(torch.stack([one.row for one in scored]), entry.classes, entry.about["version"])

    async def change(self, action: str, name: str, *args: Any) -> dict[str, Any]:
        return await asyncio.to_thread(change, self.library, action, name, *args)

    def _find(self, names: Iterable[str]) -> list[Entry]:
        try:
            return self.library.find(names)
        except UnsafeNameError as problem:
            raise Refusal(400, str(problem)) from problem
        except UnknownTaskError as problem:
            raise Refusal(404, str(problem)) from problem

    async def find(self, images: Sequence[bytes], top: int) -> list[dict[str, Any]]:
        """Each image's task and its answers, found in a thread beside the scheduler's."""
        self._check(1, len(images))
        work = partial(auto.find, self.library, images, top, self.settings.max_pixels)
        self._decoding += len(images)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._decoders, work)
        finally:
            self._decoding -= len(images)

    def _check(self, tasks: int, images: int) -> None:
        """Refuse what would not fit into empty queues, or has too many before it."""
        most, total = self.settings.max_queue, self.settings.max_waiting
        if images > most or tasks * images > total:
            limits = f"send at most {most} images, and at most {total} images times tasks"
            raise Refusal(413, f"{images} images for {tasks} tasks are too many for one request: {limits}")
        if self._decoding + images > total:
            raise Refusal(503, f"{self._decoding} images are already waiting to be decoded: try later", 1)

    async def _decode(self, entries: Sequence[Entry], images: Sequence[bytes]) -> list[list[Tensor]]:
        """Each image as each task takes it: for each image, a tensor per task."""
        wanted, limit = [entry.preprocessing for entry in entries], self.settings.max_pixels
        names = ["the image"] if len(images) == 1 else [f"image {i + 1}" for i in range(len(images))]

        def work() -> list[list[Tensor]]:
            return [decode(data, wanted, limit, name) for data, name in zip(images, names, strict=True)]

        self._decoding += len(images)
        began = time.perf_counter()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._decoders, work)
        finally:
            self._decoding -= len(images)
            self.tracing.step("decode", began, time.perf_counter(), **{"bitgraft.images": len(images)})

    async def _scored(self, inputs: dict[Entry, Sequence[Tensor]]) -> dict[Entry, list[Scored]]:
        """Each task's images through its queue and the network."""
        began = time.perf_counter()
        futures, scored = self.scheduler.submit(dict(inputs.items())), dict[Entry, list[Scored]]()
        for entry in inputs:
            scored[entry] = [await asyncio.wrap_future(future) for future in futures[entry]]
        for entry, rows in scored.items():
            for one in rows:
                self.metrics.queue_seconds.labels(entry.name).observe(one.ended - one.seconds - began)
            for one in {one.ended: one for one in rows}.values():  # of each batch
                about = {"bitgraft.task": entry.name, "bitgraft.version": entry.about["version"]}
                self.tracing.step("queue", began, one.ended - one.seconds, **about)
                self.tracing.step("compute", one.ended - one.seconds, one.ended, **about)
        return scored

    def _answers(self, entry: Entry, scored: Sequence[Scored], top: int) -> dict[str, Any]:
        seconds = sum({one.ended: one.seconds for one in scored}.values())
        return {
            "task": entry.name,
            "version": entry.about["version"],
            "milliseconds": round(1000 * seconds, 3),
            "answers": [best(one.row, entry.classes, top) for one in scored],
        }

    def _run(self, entry: Entry, images: list[Tensor]) -> list[Scored]:
        """The probabilities of each image. Only the scheduler's threads call this."""
        began = time.perf_counter()
        scores, engine = self._scores(entry, images)
        rows = probabilities(scores)
        ended = time.perf_counter()
        self.metrics.compute_seconds.labels(entry.name, entry.role, engine).observe(ended - began)
        self.metrics.images.labels(entry.name, entry.role).inc(len(images))
        self.metrics.batch.observe(len(images))
        return [Scored(row, ended - began, ended) for row in rows]

    def _scores(self, entry: Entry, images: list[Tensor]) -> tuple[Tensor, str]:
        """(N, classes), and the engine that gave them."""
        session = self.sessions.get(entry, len(images))
        if session is not None:
            return session(torch.stack(images)), "onnxruntime"
        net = self.library.net
        self.metrics.switches.inc(entry.inner not in net.resident)
        if self.settings.exact:
            return torch.cat([torch_scores(net, entry.inner, image[None]) for image in images]), "torch"
        return self.sessions.passing_scores(entry, torch.stack(images))

    async def tasks(self) -> dict[str, Any]:
        """The store as JSON."""
        library, errors = self.library, dict(self.library.errors)
        rows = [self._row(entry) for entry in library.tasks.values()]
        for row in rows:
            if row["name"] in errors:  # the old version goes on
                row["error"] = errors.pop(row["name"])
        return {
            "backbone": library.store.backbone.name,
            "original": library.net.original,
            "tasks": rows,
            "broken": [{"name": name, "error": text} for name, text in errors.items()],
            "bytes": sum(row["bytes"] for row in rows),
            "separate_bytes": sum(row.get("copy_bytes", row["bytes"]) for row in rows),
        }

    def _row(self, entry: Entry) -> dict[str, Any]:
        engine, reason = self.sessions.engine(entry), self.sessions.reasons.get(entry)
        resident = bool(self.sessions.size(entry)) or entry.inner in self.library.net.resident
        row = {**self.library.about(entry), "resident": resident, "engine": engine}
        return row | ({"engine_reason": reason} if reason and self.settings.sessions else {})

    async def task(self, name: str) -> dict[str, Any]:
        """One task as JSON, layer by layer."""
        entry = self.library.tasks.get(name)
        if entry is None:
            raise Refusal(404, f"there is no task {name!r}; known are {', '.join(self.library.tasks)}")
        shape = [entry.preprocessing.channels, *entry.preprocessing.size]
        return {**self.library.about(entry), "input": shape, "class_names": entry.classes, "layers": entry.layers}

    def update_gauges(self) -> None:
        self.metrics.decoding.set(self._decoding)
        self.metrics.waiting.set(self.scheduler.waiting)
        self.metrics.resident.set(len(self.library.net.resident))
        self.metrics.sessions.set(len(self.sessions))
        self.metrics.session_bytes.set(self.sessions.nbytes)
        self.metrics.tasks.set(len(self.library.tasks))
        self.metrics.broken.set(len(self.library.errors))
        self.metrics.set_task_bytes(self._task_bytes())

    def _task_bytes(self) -> dict[tuple[str, str], int]:
        """By task and tier: its bits, and its weights in PyTorch or in a session."""
        net, sizes = self.library.net, dict[tuple[str, str], int]()
        resident = net.resident
        for entry in self.library.tasks.values():
            sizes[entry.name, "bits"] = entry.about["bytes"]
            if entry.inner in resident and entry.inner in net.tasks:
                sizes[entry.name, "torch"] = computed_bytes(net.tasks[entry.inner])
            if size := self.sessions.size(entry):
                sizes[entry.name, "onnxruntime"] = size
        return sizes

    def _watch(self) -> None:
        while True:
            time.sleep(self.settings.poll)
            self.library.scan()
            self.sessions.keep_pinned()
            self.update_gauges()
