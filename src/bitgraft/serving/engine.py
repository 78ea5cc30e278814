"""The service behind HTTP: images are decoded in a few threads, queued by task, and run in turns."""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from bitgraft.errors import UnknownTaskError, UnsafeNameError
from bitgraft.serving.library import Entry, Library
from bitgraft.serving.metrics import Metrics
from bitgraft.serving.predictions import decode
from bitgraft.serving.refusals import Refusal
from bitgraft.serving.scheduler import Scheduler
from bitgraft.serving.sessions import Sessions
from bitgraft.serving.settings import Settings
from bitgraft.workflows.prediction import best, passing_scores, probabilities, task_session, torch_scores

Predictions = list[dict[str, Any]]
"""For each task {"task": its name, "milliseconds": from queue to answer, "answers": the best classes by image}."""


class Service(Protocol):
    """What the HTTP side needs: an engine in this process, or replicas on other machines."""

    settings: Settings
    metrics: Metrics

    async def predict(self, names: Sequence[str], images: Sequence[bytes], top: int) -> Predictions: ...
    async def tasks(self) -> dict[str, Any]: ...
    async def task(self, name: str) -> dict[str, Any]: ...

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
        self.scheduler = Scheduler(
            self._run,
            batch=settings.max_batch,
            wait=settings.max_wait_ms / 1000,
            queue=settings.max_queue,
            total=settings.max_waiting,
            turns=settings.turns,
        )
        self.sessions = Sessions(
            library,
            budget=settings.memory_budget,
            pinned=settings.pin,
            enabled=settings.sessions,
            make=partial(task_session, threads=settings.threads_each, export=False),
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
        try:
            entries = self.library.find(dict.fromkeys(names))
        except UnsafeNameError as problem:
            raise Refusal(400, str(problem)) from problem
        except UnknownTaskError as problem:
            raise Refusal(404, str(problem)) from problem
        self._check(len(entries), len(images))
        decoded = await self._decode(entries, images)
        futures = self.scheduler.submit(dict(zip(entries, zip(*decoded, strict=True), strict=True)))
        return await asyncio.gather(*(self._answers(entry, futures[entry], top) for entry in entries))

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
        try:
            return await asyncio.get_running_loop().run_in_executor(self._decoders, work)
        finally:
            self._decoding -= len(images)

    async def _answers(self, entry: Entry, futures: Sequence["Future[Tensor]"], top: int) -> dict[str, Any]:
        began = time.perf_counter()
        scores = [await asyncio.wrap_future(future) for future in futures]
        milliseconds = round(1000 * (time.perf_counter() - began), 3)
        answers = [best(row, entry.classes, top) for row in scores]
        return {"task": entry.name, "milliseconds": milliseconds, "answers": answers}

    def _run(self, entry: Entry, images: list[Tensor]) -> list[Tensor]:
        """The probabilities of each image. Only the scheduler's threads call this."""
        began = time.perf_counter()
        rows = list(probabilities(self._scores(entry, images)))
        self.metrics.computing.labels(entry.name).inc(time.perf_counter() - began)
        self.metrics.images.labels(entry.name).inc(len(images))
        self.metrics.batch.observe(len(images))
        return rows

    def _scores(self, entry: Entry, images: list[Tensor]) -> Tensor:
        """(N, classes), from the task's session or from PyTorch."""
        session = self.sessions.get(entry, len(images))
        if session is not None:
            return session(torch.stack(images))
        net = self.library.net
        self.metrics.switches.inc(entry.inner not in net.resident)
        if self.settings.exact:
            return torch.cat([torch_scores(net, entry.inner, image[None]) for image in images])
        return passing_scores(net, entry.inner, torch.stack(images))

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
            "separate_bytes": 4 * library.store.size.parameters * len(rows),
        }

    def _row(self, entry: Entry) -> dict[str, Any]:
        engine, reason = self.sessions.engine(entry), self.sessions.reasons.get(entry)
        resident = engine == "onnxruntime" or entry.inner in self.library.net.resident
        row = {**entry.about, "resident": resident, "engine": engine}
        return row | ({"engine_reason": reason} if reason and self.settings.sessions else {})

    async def task(self, name: str) -> dict[str, Any]:
        """One task as JSON, layer by layer."""
        entry = self.library.tasks.get(name)
        if entry is None:
            raise Refusal(404, f"there is no task {name!r}; known are {', '.join(self.library.tasks)}")
        return {**entry.about, "class_names": entry.classes, "layers": entry.layers}

    def update_gauges(self) -> None:
        self.metrics.decoding.set(self._decoding)
        self.metrics.waiting.set(self.scheduler.waiting)
        self.metrics.resident.set(len(self.library.net.resident))
        self.metrics.sessions.set(len(self.sessions))
        self.metrics.session_bytes.set(self.sessions.nbytes)
        self.metrics.tasks.set(len(self.library.tasks))
        self.metrics.broken.set(len(self.library.errors))

    def _watch(self) -> None:
        while True:
            time.sleep(self.settings.poll)
            self.library.scan()
            self.sessions.keep_pinned()
            self.update_gauges()
