"""onnxruntime sessions for busy tasks, made in a background thread. Until then a task runs on PyTorch.

Sessions and PyTorch's computed weights share one memory budget. When it is used up, a busy task replaces the least
recently used sessions, but none that is running. Pinned tasks get their sessions at the start and keep them.

A task without a session has its weights computed for each batch. It runs in the onnxruntime graph that the sessions
share, once its scores for a first batch have agreed with PyTorch's.
"""

import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor

from bitgraft.errors import ExportError
from bitgraft.runtime.engines import Graph, Session, check_agreement
from bitgraft.runtime.memory import give_memory_back
from bitgraft.runtime.onnx_graph import MissingGraphError
from bitgraft.serving.library import Entry, Library
from bitgraft.serving.settings import Settings
from bitgraft.store import Store
from bitgraft.workflows.prediction import graph_session, passing_scores, task_session

log = logging.getLogger("bitgraft.serving")
BUSY = 16  # images that a task answers without a session before it gets one


class Sessions:
    """The sessions of one worker. All methods are thread-safe."""

    def __init__(
        self,
        library: Library,
        settings: Settings,
        *,
        make: Callable[..., Session] = task_session,
        on_event: Callable[[str, str], object] = lambda task, event: None,
    ) -> None:
        """`on_event(task, event)` is called with the events "made" and "dropped"."""
        self._library, self._budget, self._pinned = library, settings.memory_budget, settings.pin
        self._enabled, self._make, self._on_event = settings.use_sessions, make, on_event
        self.held: WeakKeyDictionary[Entry, Session] = WeakKeyDictionary()
        """A replaced task loses its session. So nothing else may keep an entry, not even a log record."""
        self._used: WeakKeyDictionary[Entry, float] = WeakKeyDictionary()  # time of its last batch
        self._running: list[Session | None] = []  # one per batch
        self._pending: WeakSet[Entry] = WeakSet()
        self.reasons: WeakKeyDictionary[Entry, str] = WeakKeyDictionary()
        """Why a task will not get a session."""
        self._graph: Graph | None = None  # of the newest session
        self._checked: WeakKeyDictionary[Entry, tuple[Graph, bool]] = WeakKeyDictionary()  # and whether it agreed
        self._images: WeakKeyDictionary[Entry, int] = WeakKeyDictionary()  # answered since a session was last requested
        self._lock = threading.RLock()
        self._requests: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="bitgraft-sessions", daemon=True)

    def start(self) -> None:
        if self._enabled:
            self._thread.start()
        self.keep_pinned()

    def keep_pinned(self) -> None:
        """Request missing sessions of pinned tasks, whose files may have been replaced."""
        for entry in self._pinned_entries():
            if self._enabled:
                self._request(entry)
            elif entry not in self.reasons:
                self._stay_on_torch(entry, "sessions are off")

    def run(self, entry: Entry, images: Tensor) -> tuple[Tensor, str]:
        """Return the task's scores, and the name of the engine that computed them."""
        with self._lock:
            session = self.get(entry, len(images))
            self._running.append(session)
        try:
            return self.run_without_session(entry, images) if session is None else (session(images), "onnxruntime")
        finally:
            with self._lock:
                self._running.remove(session)

    def get(self, entry: Entry, images: int) -> Session | None:
        """Return the task's session for this many images. If it has none and is busy, request one and return None."""
        if not self._enabled:
            return None
        with self._lock:
            self._used[entry] = time.monotonic()
            if (session := self.held.get(entry)) is not None:
                return session
            self._images[entry] = self._images.get(entry, 0) + images
            wanted = self._images[entry] >= BUSY and self._to_drop(entry, self._estimate()) is not None
        if wanted:
            self._request(entry)
        return None

    def run_without_session(self, entry: Entry, images: Tensor) -> tuple[Tensor, str]:
        """Run a batch in the shared graph if the task agrees with it, or else in PyTorch."""
        net, agreed = self._library.net, self._agreed_graph(entry)
        if agreed is not None and entry.task_id not in net.resident:
            return graph_session(net, entry.task_id, agreed)(images), "onnxruntime"
        scores, graph = passing_scores(net, entry.task_id, images), self._graph
        if agreed is None and graph is not None and self._checked.get(entry, (None,))[0] is not graph:
            try:
                check_agreement(graph_session(net, entry.task_id, graph)(images), scores)
                self._checked[entry] = graph, True
            except ExportError as problem:
                self._checked[entry] = graph, False
                log.info("%s: runs on PyTorch until it has a session: %s", entry.name, str(problem))
        return scores, "torch"

    def _agreed_graph(self, entry: Entry) -> Graph | None:
        """The shared graph, if the task's scores in it have agreed with PyTorch's."""
        graph, agreed = self._checked.get(entry, (None, False))
        return graph if agreed else None

    def engine(self, entry: Entry) -> str:
        """The engine that runs the task's next batch."""
        in_graph = self._agreed_graph(entry) is not None and entry.task_id not in self._library.net.resident
        return "onnxruntime" if entry in self.held or in_graph else "torch"

    def ready(self) -> bool:
        """Whether every pinned task has its session, or a reason not to get one."""
        return all(entry in self.held or entry in self.reasons for entry in self._pinned_entries())

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() or not self._enabled

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(session.nbytes for session in self.held.values())

    def _pinned_entries(self) -> list[Entry]:
        tasks = self._library.tasks
        return [tasks[name] for name in self._pinned if name in tasks]

    def _request(self, entry: Entry) -> None:
        with self._lock:
            if entry in self._pending or entry in self.held or entry in self.reasons:
                return
            self._pending.add(entry)
            self._images.pop(entry, None)
        self._requests.put(entry)

    def _work(self) -> None:
        while True:
            entry = self._requests.get()
            try:
                self._add(entry, self._new(entry))
            except ExportError as problem:
                self._stay_on_torch(entry, str(problem))
            except Exception as problem:  # one task's failure must not end this thread
                self._stay_on_torch(entry, f"{type(problem).__name__}: {problem}")
            self._pending.discard(entry)
            del entry

    def _new(self, entry: Entry) -> Session:
        if (graph := self._agreed_graph(entry)) is not None:
            return graph_session(self._library.net, entry.task_id, graph)
        try:
            return self._make(self._library.net, entry.task_id)
        except MissingGraphError:
            export_graph(self._library.store.folder, entry.name)
            return self._make(self._library.net, entry.task_id)

    def _add(self, entry: Entry, session: Session) -> None:
        """Keep a session if it fits, dropping others if needed, and release the task's weights in PyTorch."""
        with self._lock:
            dropped = self._to_drop(entry, session.nbytes)
            if dropped is not None:
                for other in dropped:
                    del self.held[other]
                    self._on_event(other.name, "dropped")
                self.held[entry], self._graph = session, session.graph
                self._on_event(entry.name, "made")
        del session
        if dropped is not None:
            self._library.net.release(entry.task_id)
            log.info("%s: runs on onnxruntime now", entry.name)
        self._library.net.limit_memory(max(0, self._budget - self.nbytes))
        give_memory_back()

    def _to_drop(self, entry: Entry, size: int) -> list[Entry] | None:
        """The sessions that make room for one of this size, least recently used first. None if there is no room."""
        room, dropped = self._budget - self.nbytes, list[Entry]()
        for other in sorted(self.held, key=lambda other: self._used.get(other, 0.0)):
            if size > room and other.name not in self._pinned and self.held[other] not in self._running:
                room += self.held[other].nbytes
                dropped.append(other)
        return dropped if size <= room or entry.name in self._pinned else None

    def _estimate(self) -> int:
        """Estimated bytes of the next session."""
        known = next((session.nbytes for session in self.held.values()), None)
        return known or 4 * self._library.store.size.parameters

    def _stay_on_torch(self, entry: Entry, reason: str) -> None:
        if entry.name in self._pinned:
            self._library.net.module(entry.task_id)  # computes its weights and keeps them
        if self._enabled:
            log.warning("%s: stays on PyTorch: %s", entry.name, reason)
        self.reasons[entry] = reason


def export_graph(store: Path, task: str) -> None:
    """Export a task's graph into the cache, in another process: tracing patches every module call in the process."""
    done = subprocess.run([sys.executable, "-m", __name__, store, task], capture_output=True, text=True)
    if done.returncode:
        raise ExportError((done.stderr.strip().splitlines() or [f"exporting failed with {done.returncode}"])[-1])


def _export(store: Store, task: str) -> None:
    net = store.network().eval()
    if task != net.original:
        store.load(net, task)
    task_session(net, task)


if __name__ == "__main__":  # the other process
    _export(Store(sys.argv[1]), sys.argv[2])
