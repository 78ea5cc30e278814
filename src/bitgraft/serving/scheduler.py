"""Bounded queues, one per task, that take turns in a few threads.

A task's turn is one batch, so a busy task delays the others by one batch at most. A batch runs as soon as a thread is
free and its first item has waited long enough; what waits for one task is divided among the threads.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from bitgraft.serving.refusals import Refusal


@dataclass
class _Item:
    value: Any
    result: "Future[Any]" = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class Scheduler:
    """Items arrive from any thread; `run(task, items)` gives a result for each item; `turns` threads call it."""

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
        """`wait` is in seconds; `queue` and `total` bound the items that wait for one task, and for all."""
        self._run, self._batch, self._wait, self._queue, self._total = run, batch, wait, queue, total
        self._queues: OrderedDict[Hashable, deque[_Item]] = OrderedDict()  # the next turn comes first
        self._changed = threading.Condition()
        self.waiting = 0
        self._pace = 0.05  # seconds per item, smoothed
        self._hurried = False
        self._threads = [
            threading.Thread(target=self._work, name=f"bitgraft-turn-{i}", daemon=True) for i in range(turns)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, values: Mapping[Hashable, Sequence[Any]]) -> dict[Hashable, list["Future[Any]"]]:
        """Queue the values of one or more tasks, or none of them if there is no room for all."""
        items = {task: [_Item(value) for value in of_task] for task, of_task in values.items()}
        with self._changed:
            if self.waiting + sum(map(len, items.values())) > self._total:
                raise Refusal(503, f"{self.waiting} images are already waiting: try later", self.waiting * self._pace)
            for task, new in items.items():
                queued = len(self._queues.get(task, ()))
                if queued + len(new) > self._queue:
                    sentence = f"{queued} images are already waiting for task '{task}': try later"
                    raise Refusal(429, sentence, queued * self._pace)
            for task, new in items.items():
                self._queues.setdefault(task, deque()).extend(new)
                self.waiting += len(new)
            self._changed.notify()
        return {task: [item.result for item in new] for task, new in items.items()}

    def hurry(self) -> None:
        """The service is about to end: let no batch wait for more items."""
        with self._changed:
            self._hurried = True
            self._changed.notify()

    def _work(self) -> None:
        while True:
            task, items = self._next()
            if not items:
                continue  # all of them were cancelled
            began = time.monotonic()
            try:
                results = self._run(task, [item.value for item in items])
            except BaseException as problem:  # one bad item must not end the thread that serves all others
                for item in items:
                    item.result.set_exception(problem)
            else:
                for item, result in zip(items, results, strict=True):
                    item.result.set_result(result)
            self._pace += 0.1 * ((time.monotonic() - began) / len(items) - self._pace)
            del task, items  # a task that was replaced is unloaded when nobody holds it

    def _next(self) -> tuple[Hashable, list[_Item]]:
        """The next batch, as soon as there is one."""
        with self._changed:
            while True:
                due = {task: self._due(queue) for task, queue in self._queues.items()}
                now = time.monotonic()
                for task, when in due.items():
                    if when <= now:
                        return task, self._take(task)
                self._changed.wait(min(due.values()) - now if due else None)

    def _due(self, queue: deque[_Item]) -> float:
        """When a queue's next batch runs, at the latest."""
        return 0.0 if self._hurried or len(queue) >= self._batch else queue[0].since + self._wait

    def _take(self, task: Hashable) -> list[_Item]:
        queue = self._queues[task]
        share = -(-len(queue) // len(self._threads))  # what waits is divided among the turns
        items = [queue.popleft() for _ in range(min(self._batch, share))]
        self.waiting -= len(items)
        if queue:
            self._queues.move_to_end(task)  # behind every other task that waits
        else:
            del self._queues[task]
        return [item for item in items if item.result.set_running_or_notify_cancel()]
