"""From images and names of tasks to answers: decode in a few threads, queue, run in one."""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from bitgraft.backbone.tracing import logits
from bitgraft.errors import UnknownTaskError, UnsafeNameError
from bitgraft.serving.library import Entry, Library
from bitgraft.serving.metrics import Metrics
from bitgraft.serving.pictures import tensors
from bitgraft.serving.refusals import Refusal, busy
from bitgraft.serving.scheduler import Bounds, Scheduler
from bitgraft.serving.settings import Settings

DECODERS = 2  # threads; each may hold one decoded picture
Answer = dict[str, Any]
"""{"class": name, "probability": number}"""
Said = list[dict[str, Any]]
"""For each task {"task": its name, "milliseconds": from queue to answer, "answers": the best ones by image}."""


class Service(Protocol):
    """What the HTTP side needs; here in this process, or on other machines."""

    settings: Settings
    metrics: Metrics

    async def predict(self, names: Sequence[str], pictures: Sequence[bytes], top: int) -> Said: ...
    async def tasks(self) -> dict[str, Any]: ...
    async def task(self, name: str) -> dict[str, Any]: ...
    async def healthy(self) -> bool: ...
    async def ready(self) -> bool: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def note(self) -> None: ...


class Engine:
    """The service in this process."""

    def __init__(self, library: Library, settings: Settings) -> None:
        self.library, self.settings = library, settings
        self.metrics = Metrics()
        bounds = Bounds(settings.max_batch, settings.max_wait, settings.max_queue, settings.max_waiting)
        self._scheduler: Scheduler[Entry] = Scheduler(self._run, bounds)
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="bitgraft-decoder")
        self._decoding = 0
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="bitgraft-watcher", daemon=True)

    async def start(self) -> None:
        self.library.net.to(self.settings.device)
        self.library.scan()
        self._scheduler.start()
        self._watcher.start()

    async def stop(self) -> None:
        """Finish what was accepted."""
        self._ended.set()
        await asyncio.to_thread(self._scheduler.close)
        self._decoders.shutdown()

    def hurry(self) -> None:
        """The end is near: what waits need not wait for more."""
        self._scheduler.hurry()

    async def healthy(self) -> bool:
        return self._scheduler.alive

    async def ready(self) -> bool:
        return self._scheduler.alive and not self._ended.is_set()

    async def predict(self, names: Sequence[str], pictures: Sequence[bytes], top: int) -> Said:
        """Answers of every task to every picture; what cannot all be answered is refused as a whole."""
        try:
            with self.library.borrow(dict.fromkeys(names)) as entries:
                self._check_count(len(entries), len(pictures))
                images = await self._decoded(entries, pictures)
                began = time.perf_counter()
                asked = self._submitted(entries, images)
                return [await _said(e, futures, top, began) for e, futures in zip(entries, asked, strict=True)]
        except UnsafeNameError as problem:
            raise Refusal(400, str(problem)) from problem
        except UnknownTaskError as problem:
            raise Refusal(404, str(problem)) from problem

    def _check_count(self, tasks: int, pictures: int) -> None:
        """What would not fit into empty queues never will."""
        if pictures > self.settings.max_queue or tasks * pictures > self.settings.max_waiting:
            raise Refusal(
                413,
                f"{pictures} images for {tasks} tasks are too many at once: send at most {self.settings.max_queue} "
                f"images, and {self.settings.max_waiting} images times tasks",
            )

    def _submitted(
        self, entries: Sequence[Entry], images: list[list[Tensor]]
    ) -> list[list["Future[tuple[Tensor, float]]"]]:
        """All of the images to all of the tasks, or none to any."""
        asked: list[list[Future[tuple[Tensor, float]]]] = []
        try:
            for place, entry in enumerate(entries):
                asked.append(self._scheduler.submit(entry, entry.name, [image[place] for image in images]))
        except Refusal:
            for future in (future for futures in asked for future in futures):
                future.cancel()
            raise
        return asked

    async def _decoded(self, entries: Sequence[Entry], pictures: Sequence[bytes]) -> list[list[Tensor]]:
        """Each picture as each task takes it."""
        if self._decoding + len(pictures) > self.settings.max_waiting:
            raise busy(f"{self._decoding} images are waiting to be decoded: come back later", 1)
        loop, wanted, limit = asyncio.get_running_loop(), [e.preprocessing for e in entries], self.settings.max_pixels
        names = ["the image"] if len(pictures) == 1 else [f"image {i + 1}" for i in range(len(pictures))]
        self._decoding += len(pictures)
        try:
            jobs = [
                loop.run_in_executor(self._decoders, tensors, picture, wanted, limit, name)
                for picture, name in zip(pictures, names, strict=True)
            ]
            made = await asyncio.gather(*jobs, return_exceptions=True)
        finally:
            self._decoding -= len(pictures)
        for outcome in made:
            if isinstance(outcome, BaseException):
                raise outcome
        return made  # type: ignore[return-value]

    def _run(self, entry: Entry, images: list[Tensor]) -> list[tuple[Tensor, float]]:
        """Probabilities for each image, and when they were there. This is called in the scheduler's thread alone."""
        net, began = self.library.net, time.perf_counter()
        self.metrics.switches.inc(entry.inner not in net.resident)
        batches = [image[None] for image in images] if self.settings.exact else [torch.stack(images)]
        with torch.no_grad():
            rows = [row for batch in batches for row in probabilities(net, entry.inner, batch.to(self.settings.device))]
        self.metrics.computing.labels(entry.name).inc(time.perf_counter() - began)
        self.metrics.images.labels(entry.name).inc(len(images))
        self.metrics.batch.observe(len(images))
        ended = time.perf_counter()
        return [(row, ended) for row in rows]

    async def tasks(self) -> dict[str, Any]:
        """The store as JSON."""
        library, resident = self.library, self.library.net.resident
        rows = [{**e.about, "resident": e.inner in resident} for e in library.tasks.values()]
        for row in rows:
            if row["name"] in library.errors:
                row["error"] = library.errors[row["name"]]
        broken = [{"name": name, "error": text} for name, text in library.errors.items() if name not in library.tasks]
        own = library.net.original
        taken = sum(row["bytes"] for row in rows)
        return {
            "backbone": library.store.backbone.name,
            "original": own,
            "tasks": rows,
            "broken": broken,
            "bytes": taken,
            "separate_bytes": 4 * library.store.size.parameters * len(rows),
        }

    async def task(self, name: str) -> dict[str, Any]:
        """One task as JSON, layer by layer."""
        entry = self.library.tasks.get(name)
        if entry is None:
            raise Refusal(404, f"there is no task {name!r}; known are {', '.join(self.library.tasks)}")
        return {**entry.about, "class_names": entry.classes, "layers": entry.layers}

    def note(self) -> None:
        """Bring the numbers that say how things are up to date."""
        self.metrics.decoding.set(self._decoding)
        self.metrics.waiting.set(self._scheduler.waiting)
        self.metrics.resident.set(len(self.library.net.resident))
        self.metrics.tasks.set(len(self.library.tasks))
        self.metrics.broken.set(len(self.library.errors))

    def _watch(self) -> None:
        while not self._ended.wait(self.settings.poll):
            self.library.scan()
            self.note()


async def _said(
    entry: Entry, futures: Sequence["Future[tuple[Tensor, float]]"], top: int, began: float
) -> dict[str, Any]:
    done = [await asyncio.wrap_future(future) for future in futures]
    answers = [best(scores, entry.classes, top) for scores, _ in done]
    ended = max((at for _, at in done), default=began)
    return {"task": entry.name, "milliseconds": round(1000 * (ended - began), 3), "answers": answers}


def probabilities(net: Any, task: str, images: Tensor) -> Tensor:
    """As `bitgraft predict` computes them, (N, classes)."""
    return logits(net(images, task=task)).float().softmax(1).cpu()


def best(scores: Tensor, classes: Sequence[str] | None, top: int) -> list[Answer]:
    values, places = scores.topk(min(top, len(scores)))
    return [
        {"class": classes[place] if classes else str(place), "probability": value}
        for value, place in zip(values.tolist(), places.tolist(), strict=True)
    ]
