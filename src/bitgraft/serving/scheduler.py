"""One bounded queue per task; a few threads run batches from them in round-robin order.

A busy task delays the others by one batch at most. A batch runs as soon as a thread is free and its first item has
waited long enough. Items that wait for one task are divided among the threads.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from bitgraft.serving.http_error import HttpError


@dataclass
class _Item:
    value: Any
    result: "Future[Any]" = field(default_factory=Future)
    arrival: float = field(default_factory=time.monotonic)


class Scheduler:
    """Items arrive from any thread. `turns` threads call `run(task, items)`, which returns one result per item."""

    def __init__(
        self,
        run: Callable[[Any, list[Any]], Sequence[Any]],
        *,
        batch: int,
        wait: float,
        queue: int,
        total: int,
        turns: int = 1,
    ) -> None:
        """`wait` is in seconds. `queue` and `total` limit the items waiting for one task and for all tasks."""
        self._run, self._batch, self._wait, self._queue, self._total = run, batch, wait, queue, total
        self._queues: OrderedDict[Hashable, deque[_Item]] = OrderedDict()  # in the order in which they run next
        self._changed = threading.Condition()
        self.waiting = 0
        self._seconds_per_item = 0.05  # moving average
        self._is_draining = False
        self._threads = [
            threading.Thread(target=self._work, name=f"bitgraft-turn-{i}", daemon=True) for i in range(turns)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, values: Mapping[Any, Sequence[Any]]) -> dict[Any, list["Future[Any]"]]:
        """Queue the values of one or more tasks. If they do not all fit, none is queued."""
        items = {task: [_Item(value) for value in of_task] for task, of_task in values.items()}
        with self._changed:
            if self.waiting + sum(map(len, items.values())) > self._total:
                message = f"the queue is full ({self.waiting} waiting, at most {self._total}): try again later"
                raise HttpError(503, message, self.waiting * self._seconds_per_item)
            for task, new in items.items():
                queued = len(self._queues.get(task, ()))
                if queued + len(new) > self._queue:
                    full = f"the queue of task '{task}' is full ({queued} waiting, at most {self._queue})"
                    raise HttpError(429, f"{full}: try again later", queued * self._seconds_per_item)
            for task, new in items.items():
                self._queues.setdefault(task, deque()).extend(new)
                self.waiting += len(new)
            self._changed.notify()
        return {task: [item.result for item in new] for task, new in items.items()}

    def drain(self) -> None:
        """Stop waiting for fuller batches, because the service is shutting down."""
        with self._changed:
            self._is_draining = True
            self._changed.notify()

    def _work(self) -> None:
        while True:
            task, items = self._next()
            if not items:
                continue  # all were cancelled
            start = time.monotonic()
            try:
                results = self._run(task, [item.value for item in items])
            except BaseException as problem:  # a bad item must not end this thread
                for item in items:
                    item.result.set_exception(problem)
            else:
                for item, result in zip(items, results, strict=True):
                    item.result.set_result(result)
            self._seconds_per_item += 0.1 * ((time.monotonic() - start) / len(items) - self._seconds_per_item)
            del task, items  # a replaced task is unloaded when nothing refers to it

    def _next(self) -> tuple[Hashable, list[_Item]]:
        """Wait for the next batch."""
        with self._changed:
            while True:
                due = {task: self._due(queue) for task, queue in self._queues.items()}
                now = time.monotonic()
                for task, when in due.items():
                    if when <= now:
                        return task, self._take(task)
                self._changed.wait(min(due.values()) - now if due else None)

    def _due(self, queue: deque[_Item]) -> float:
        """The latest time at which the queue's next batch starts."""
        return 0.0 if self._is_draining or len(queue) >= self._batch else queue[0].arrival + self._wait

    def _take(self, task: Hashable) -> list[_Item]:
        queue = self._queues[task]
        share = -(-len(queue) // len(self._threads))  # rounded up
        items = [queue.popleft() for _ in range(min(self._batch, share))]
        self.waiting -= len(items)
        if queue:
            self._queues.move_to_end(task)
        else:
            del self._queues[task]
        if self._queues:
            self._changed.notify()  # another thread may run the rest meanwhile
        return [item for item in items if item.result.set_running_or_notify_cancel()]
