"""Who runs next: bounded queues, one for each task, that take turns in one thread.

A task's turn is a batch of what waits for it, so that a busy task costs the others one batch and no more. A batch is
run when it is full or its first item has waited long enough.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from bitgraft.serving.refusals import busy, crowded

Key = TypeVar("Key", bound=Hashable)
Run = Callable[[Any, list[Any]], Sequence[Any]]
"""(task, items) -> a result for each."""


@dataclass(frozen=True)
class Bounds:
    batch: int
    wait: float
    """Seconds."""
    queue: int
    """Items waiting for one task."""
    total: int
    """Items waiting for any."""


@dataclass
class _Item:
    value: Any
    result: "Future[Any]" = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class Scheduler(Generic[Key]):
    """Items go in from any thread; `run` is called in one thread, with items of one key at a time."""

    def __init__(self, run: Run, bounds: Bounds) -> None:
        self._run, self.bounds = run, bounds
        self._queues: OrderedDict[Key, deque[_Item]] = OrderedDict()  # whose turn is next comes first
        self._changed = threading.Condition()
        self._waiting = 0
        self._pace = 0.05  # seconds for an item, smoothed
        self._hurried = self._closing = False
        self._thread = threading.Thread(target=self._work, name="bitgraft-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        return self._waiting

    def depths(self) -> dict[Key, int]:
        with self._changed:
            return {key: len(queue) for key, queue in self._queues.items()}

    def submit(self, key: Key, name: str, values: Sequence[Any]) -> list["Future[Any]"]:
        """Queue all of the values or, where there is no room for them, none."""
        items = [_Item(value) for value in values]
        with self._changed:
            queued = len(self._queues.get(key, ()))
            if self._closing:
                raise busy("the service is about to end: try another replica", 1)
            if self._waiting + len(items) > self.bounds.total:
                raise busy(f"{self._waiting} images are waiting already: come back later", self._waiting * self._pace)
            if queued + len(items) > self.bounds.queue:
                raise crowded(f"{queued} images are waiting for task {name!r} already", queued * self._pace)
            self._queues.setdefault(key, deque()).extend(items)
            self._waiting += len(items)
            self._changed.notify()
        return [item.result for item in items]

    def hurry(self) -> None:
        """Let no batch wait for more."""
        with self._changed:
            self._hurried = True
            self._changed.notify()

    def close(self) -> None:
        """Take nothing more, finish what waits."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            key, items = batch
            if not items:
                continue  # all of them were taken back
            began = time.monotonic()
            try:
                results = self._run(key, [item.value for item in items])
            except BaseException as problem:  # an item that fails must not end the thread that serves all others
                for item in items:
                    item.result.set_exception(problem)
            else:
                for item, result in zip(items, results, strict=True):
                    item.result.set_result(result)
            self._pace += 0.1 * ((time.monotonic() - began) / len(items) - self._pace)

    def _next(self) -> tuple[Key, list[_Item]] | None:
        """The batch whose turn it is, as soon as there is one; None when all is done."""
        with self._changed:
            while True:
                now = time.monotonic()
                for key, queue in self._queues.items():
                    if self._closing or self._ripe(queue) <= now:
                        return key, self._take(key, queue)
                if self._closing:
                    return None
                ripens = min(map(self._ripe, self._queues.values()), default=None)
                self._changed.wait(None if ripens is None else ripens - now)

    def _ripe(self, queue: deque[_Item]) -> float:
        """When a queue's next batch is to be run, at the latest."""
        return 0.0 if self._hurried or len(queue) >= self.bounds.batch else queue[0].since + self.bounds.wait

    def _take(self, key: Key, queue: deque[_Item]) -> list[_Item]:
        items = [queue.popleft() for _ in range(min(self.bounds.batch, len(queue)))]
        self._waiting -= len(items)
        if queue:
            self._queues.move_to_end(key)  # behind every other task that waits
        else:
            del self._queues[key]
        return [item for item in items if item.result.set_running_or_notify_cancel()]
