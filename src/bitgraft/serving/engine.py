"""The service behind HTTP: decode images in a thread pool, queue them by task, and run them in batches."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from bitgraft.errors import UnknownTaskError
from bitgraft.runtime.module_cache import computed_bytes
from bitgraft.serving.http_error import HttpError
from bitgraft.serving.library import Entry, Library
from bitgraft.serving.metrics import Metrics
from bitgraft.serving.predictions import check_tensor, decode_all
from bitgraft.serving.scheduler import Scheduler
from bitgraft.serving.sessions import Sessions
from bitgraft.serving.settings import Settings
from bitgraft.serving.tracing import Tracing
from bitgraft.workflows.prediction import probabilities, task_session, torch_scores

T = TypeVar("T")


class Inferred(NamedTuple):
    """One task's probabilities (N, classes), its class names if it has any, and its time in the network."""

    task: str
    version: str
    seconds: float
    probabilities: Tensor
    classes: Sequence[str] | None


class Scored(NamedTuple):
    """One image's probabilities (classes,), and when its batch started and ended."""

    probabilities: Tensor
    start: float
    end: float


class Service(Protocol):
    """What the HTTP routes need: an engine in this process, or replicas on other machines."""

    settings: Settings
    metrics: Metrics
    tracing: Tracing

    async def infer(self, names: Sequence[str], inputs: Sequence[bytes] | Tensor) -> list[Inferred]: ...
    async def change(self, action: str, name: str, *args: Any) -> dict[str, Any]: ...
    async def tasks(self) -> dict[str, Any]: ...
    async def task(self, name: str) -> dict[str, Any]: ...
    def healthy(self) -> bool: ...

    async def identify(self, images: Sequence[bytes], top: int) -> list[dict[str, Any]]:
        raise HttpError(501, "this service cannot identify an image's task: name it, as in /v1/predict/NAME")

    def ready(self) -> bool:
        return self.healthy()

    def update_gauges(self) -> None:
        return


class Engine(Service):
    """The service in this process."""

    def __init__(self, library: Library, settings: Settings) -> None:
        self.library, self.settings, self.metrics = library, settings, Metrics()
        self.tracing = Tracing.to_collector(settings.otlp)
        self.scheduler = Scheduler(
            self._run,
            batch=settings.max_batch,
            wait=settings.max_wait_ms / 1000,
            queue=settings.max_queue,
            total=settings.max_waiting,
            turns=settings.turns_per_worker,
        )
        self.sessions = Sessions(
            library,
            settings,
            make=partial(task_session, threads=settings.threads_per_turn, export=False),
            on_event=lambda task, event: self.metrics.session_events.labels(task, event).inc(),
        )
        self._decoders = ThreadPoolExecutor(settings.threads_per_worker, thread_name_prefix="bitgraft-decoder")
        self._decoding = 0
        self._watcher = threading.Thread(target=self._watch, name="bitgraft-watcher", daemon=True)

    def start(self) -> None:
        self.library.net.to(self.settings.device)
        self.library.scan()
        self.sessions.start()
        self.scheduler.start()
        self._watcher.start()

    def healthy(self) -> bool:
        """Whether every thread that requests depend on is alive."""
        return self.scheduler.alive and self.sessions.alive and self._watcher.is_alive()

    def ready(self) -> bool:
        return self.healthy() and self.sessions.ready()

    async def infer(self, names: Sequence[str], inputs: Sequence[bytes] | Tensor) -> list[Inferred]:
        """Run every task on encoded images or a preprocessed tensor. A request succeeds or fails as a whole."""
        entries = [self.library.find(name) for name in dict.fromkeys(names)]
        with self.metrics.track(entries, len(inputs)):
            self._check_size(len(entries), len(inputs))
            if isinstance(inputs, Tensor):
                for entry in entries:
                    check_tensor(inputs, entry.preprocessing)
                images = {entry: list(inputs) for entry in entries}
            else:
                images = await self._decode(entries, inputs)
            return await self._score(images)

    async def change(self, action: str, name: str, *args: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self.library.change, action, name, *args)

    async def identify(self, images: Sequence[bytes], top: int) -> list[dict[str, Any]]:
        """Return each image's task and its answers. It runs in a decoder thread, outside the queues."""
        self._check_size(1, len(images))
        work = partial(self.library.identify, images, top, self.settings.max_pixels)
        return await self._in_decoder(work, len(images))

    def _check_size(self, tasks: int, images: int) -> None:
        """Refuse a request that would not fit into empty queues, or when too many images wait to be decoded."""
        most, total = self.settings.max_queue, self.settings.max_waiting
        if images > most or tasks * images > total:
            limits = f"send at most {most} images, and at most {total} images times tasks"
            raise HttpError(413, f"{images} images for {tasks} tasks are too many for one request: {limits}")
        if self._decoding + images > total:
            raise HttpError(503, f"{self._decoding} images are already waiting to be decoded: try again later", 1)

    async def _decode(self, entries: Sequence[Entry], images: Sequence[bytes]) -> dict[Entry, list[Tensor]]:
        """Decode each image for each task."""
        work = partial(decode_all, images, [entry.preprocessing for entry in entries], self.settings.max_pixels)
        start = time.perf_counter()
        try:
            decoded = await self._in_decoder(work, len(images))
        finally:
            self.tracing.step("decode", start, time.perf_counter(), **{"bitgraft.images": len(images)})
        return {entry: list(tensors) for entry, tensors in zip(entries, zip(*decoded, strict=True), strict=True)}

    async def _in_decoder(self, work: Callable[[], T], images: int) -> T:
        self._decoding += images
        try:
            return await asyncio.get_running_loop().run_in_executor(self._decoders, work)
        finally:
            self._decoding -= images

    async def _score(self, inputs: Mapping[Entry, Sequence[Tensor]]) -> list[Inferred]:
        """Send each task's images through its queue and the network."""
        accepted, inferred = time.perf_counter(), list[Inferred]()
        for entry, futures in self.scheduler.submit(inputs).items():
            scored: list[Scored] = [await asyncio.wrap_future(one) for one in futures]
            for one in scored:
                self.metrics.queue_seconds.labels(entry.name).observe(one.start - accepted)
            version, batches = entry.info["version"], {(one.start, one.end) for one in scored}
            for start, end in sorted(batches):
                attributes = {"bitgraft.task": entry.name, "bitgraft.version": version}
                self.tracing.step("queue", accepted, start, **attributes)
                self.tracing.step("compute", start, end, **attributes)
            rows, seconds = torch.stack([one.probabilities for one in scored]), sum(b - a for a, b in batches)
            inferred.append(Inferred(entry.name, version, seconds, rows, entry.classes))
        return inferred

    def _run(self, entry: Entry, images: list[Tensor]) -> list[Scored]:
        """Run one batch, in one of the scheduler's threads."""
        start = time.perf_counter()
        scores, engine = self._scores(entry, images)
        rows = probabilities(self.library.net, scores)
        end = time.perf_counter()
        self.metrics.compute_seconds.labels(entry.name, entry.role, engine).observe(end - start)
        self.metrics.images.labels(entry.name, entry.role).inc(len(images))
        self.metrics.batch.observe(len(images))
        return [Scored(row, start, end) for row in rows]

    def _scores(self, entry: Entry, images: list[Tensor]) -> tuple[Tensor, str]:
        """Return the scores (N, classes) and the name of the engine that computed them."""
        net = self.library.net
        self.metrics.switches.inc(entry not in self.sessions.held and entry.task_id not in net.resident)
        if self.settings.exact:
            return torch.cat([torch_scores(net, entry.task_id, image[None]) for image in images]), "torch"
        return self.sessions.run(entry, torch.stack(images))

    async def tasks(self) -> dict[str, Any]:
        """Return the store as JSON."""
        library = self.library
        rows, errors = [self._row(entry) for entry in library.tasks.values()], library.errors
        return {
            "backbone": library.store.backbone.name,
            "original": library.net.original,
            "tasks": [row | ({"error": errors[row["name"]]} if row["name"] in errors else {}) for row in rows],
            "broken": [{"name": name, "error": text} for name, text in errors.items() if name not in library.tasks],
            "bytes": sum(row["bytes"] for row in rows),
            "separate_bytes": sum(row.get("copy_bytes", row["bytes"]) for row in rows),
        }

    def _row(self, entry: Entry) -> dict[str, Any]:
        engine, reason = self.sessions.engine(entry), self.sessions.reasons.get(entry)
        resident = entry in self.sessions.held or entry.task_id in self.library.net.resident
        row = {**self.library.info(entry), "resident": resident, "engine": engine}
        return row | ({"engine_reason": reason} if reason and self.settings.use_sessions else {})

    async def task(self, name: str) -> dict[str, Any]:
        """Return one task as JSON, with its layers."""
        entry = self.library.tasks.get(name)
        if entry is None:
            raise UnknownTaskError(f"there is no task {name!r}; known tasks are {', '.join(self.library.tasks)}")
        shape = [entry.preprocessing.channels, *entry.preprocessing.size]
        return {**self.library.info(entry), "input": shape, "class_names": entry.classes, "layers": entry.layers}

    def update_gauges(self) -> None:
        self.metrics.decoding.set(self._decoding)
        self.metrics.waiting.set(self.scheduler.waiting)
        self.metrics.resident.set(len(self.library.net.resident))
        self.metrics.sessions.set(len(self.sessions.held))
        self.metrics.session_bytes.set(self.sessions.nbytes)
        self.metrics.tasks.set(len(self.library.tasks))
        self.metrics.broken.set(len(self.library.errors))
        self.metrics.set_task_bytes(self._task_bytes())

    def _task_bytes(self) -> dict[tuple[str, str], int]:
        """Bytes by task and tier: its file, and its weights in PyTorch or in a session."""
        net, sizes = self.library.net, dict[tuple[str, str], int]()
        resident = net.resident
        for entry in self.library.tasks.values():
            sizes[entry.name, "bits"] = entry.info["bytes"]
            if entry.task_id in resident and entry.task_id in net.tasks:
                sizes[entry.name, "torch"] = computed_bytes(net.tasks[entry.task_id])
            if session := self.sessions.held.get(entry):
                sizes[entry.name, "onnxruntime"] = session.nbytes
        return sizes

    def _watch(self) -> None:
        while True:
            time.sleep(self.settings.poll)
            self.library.scan()
            self.sessions.keep_pinned()
            self.update_gauges()
