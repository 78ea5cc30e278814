"""Tasks that stay busy get a session of onnxruntime, made in a thread of its own; until then they run on PyTorch.

Sessions and PyTorch's computed weights share one budget of bytes. When it is used up, a busier task takes the place of
the least recently used session, unless that one is busier still. Pinned tasks have theirs from the start, and keep it.

A task without a session has its weights computed for each batch. As soon as there is a graph, and the task's scores for
a first batch agree with PyTorch's, it runs in that graph as well.
"""

import logging
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor

from bitgraft.errors import ExportError
from bitgraft.runtime.engines import Graph, Session, check_agreement
from bitgraft.runtime.memory import give_memory_back
from bitgraft.runtime.onnx_graph import MissingGraphError
from bitgraft.serving.library import Entry, Library
from bitgraft.workflows.prediction import graph_session, passing_scores, task_session

log = logging.getLogger("bitgraft.serving")
BUSY = 16  # images that a task answers on PyTorch before it gets a session
BUSIER = 1.5  # times as busy must be who takes another's place, or tasks that are equally busy would take turns
EXPORT = "bitgraft.serving.export_graph"
MEMORY = 1024  # images of all tasks after which what was counted weighs half


@dataclass
class _Held:
    session: Session
    used: int
    """When it last ran, in images of all tasks."""


class Sessions:
    """The sessions of one worker. All methods may be called from any thread."""

    def __init__(
        self,
        library: Library,
        *,
        budget: int,
        pinned: Collection[str] = (),
        enabled: bool = True,
        make: Callable[..., Session] = task_session,
        note: Callable[[str, str], object] = lambda task, event: None,
    ) -> None:
        """`note(task, "made")` and `note(task, "dropped")` are called for the metrics."""
        self._library, self._budget, self._pinned, self._enabled, self._make = library, budget, pinned, enabled, make
        self._note = note
        self._held: WeakKeyDictionary[Entry, _Held] = WeakKeyDictionary()  # a replaced task's session goes with it
        self._wanted: WeakSet[Entry] = WeakSet()
        self.reasons: WeakKeyDictionary[Entry, str] = WeakKeyDictionary()
        """Why a task has no session and will not get one."""
        self._graph: Graph | None = None  # of the session that was made last
        self._tried: WeakKeyDictionary[Entry, tuple[Graph, bool]] = WeakKeyDictionary()  # and whether it agreed
        self._heat: Counter[str] = Counter()
        self._images = self.made = self.dropped = 0
        self._lock = threading.RLock()
        self._orders: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="bitgraft-sessions", daemon=True)

    def start(self) -> None:
        if self._enabled:
            self._thread.start()
        self.keep_pinned()

    def keep_pinned(self) -> None:
        """Order what pinned tasks lack; their files may have been replaced."""
        tasks = self._library.tasks
        for entry in [tasks[name] for name in self._pinned if name in tasks]:
            if self._enabled:
                self._order(entry)
            elif entry not in self.reasons:
                self._on_torch(entry, "sessions are off")

    def get(self, entry: Entry, images: int) -> Session | None:
        """The task's session, if it has one. If it has none and is busy, one is ordered."""
        if not self._enabled:
            return None
        with self._lock:
            self._images += images
            self._heat[entry.inner] += images
            if self._images // MEMORY != (self._images - images) // MEMORY:
                self._heat = Counter({name: heat // 2 for name, heat in self._heat.items() if heat > 1})
            held = self._held.get(entry)
            if held is not None:
                held.used = self._images
                return held.session
            wanted = self._heat[entry.inner] >= BUSY and self._fits(entry, self._estimate())
        if wanted:
            self._order(entry)
        return None

    def passing_scores(self, entry: Entry, images: Tensor) -> tuple[Tensor, str]:
        """The scores of a task without a session, and the engine that gave them."""
        net, agreed = self._library.net, self._agreed(entry)
        if agreed is not None and entry.inner not in net.resident:
            return graph_session(net, entry.inner, agreed)(images), "onnxruntime"
        scores, graph = passing_scores(net, entry.inner, images), self._graph
        if agreed is None and graph is not None and self._tried.get(entry, (None,))[0] is not graph:
            try:
                check_agreement(graph_session(net, entry.inner, graph)(images), scores)
                self._tried[entry] = graph, True
            except ExportError as problem:
                self._tried[entry] = graph, False
                log.info("%s: runs on PyTorch until it has a session: %s", entry, problem)
        return scores, "torch"

    def _agreed(self, entry: Entry) -> Graph | None:
        """The graph in which the task has been found to agree with PyTorch."""
        graph, agreed = self._tried.get(entry, (None, False))
        return graph if agreed else None

    def engine(self, entry: Entry) -> str:
        """The engine that runs the task's next batch."""
        in_graph = self._agreed(entry) is not None and entry.inner not in self._library.net.resident
        return "onnxruntime" if entry in self._held or in_graph else "torch"

    def ready(self) -> bool:
        """Every pinned task that is there has its session, or a reason to have none."""
        tasks = self._library.tasks
        pinned = [tasks[name] for name in self._pinned if name in tasks]
        return all(entry in self._held or entry in self.reasons for entry in pinned)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() or not self._enabled

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(held.session.nbytes for held in self._held.values())

    def size(self, entry: Entry) -> int:
        """Bytes of a task's session; 0 without one."""
        held = self._held.get(entry)
        return held.session.nbytes if held else 0

    def _order(self, entry: Entry) -> None:
        with self._lock:
            if entry in self._wanted or entry in self._held or entry in self.reasons:
                return
            self._wanted.add(entry)
        self._orders.put(entry)

    def _work(self) -> None:
        while True:
            entry = self._orders.get()
            try:
                self._add(entry, self._new(entry))
            except ExportError as problem:
                self._on_torch(entry, str(problem))
            except Exception as problem:  # whatever goes wrong with one task, the others go on
                self._on_torch(entry, f"{type(problem).__name__}: {problem}")
            self._wanted.discard(entry)
            del entry

    def _new(self, entry: Entry) -> Session:
        if (graph := self._agreed(entry)) is not None:
            return graph_session(self._library.net, entry.inner, graph)
        try:
            return self._make(self._library.net, entry.inner)
        except MissingGraphError:
            export_graph(self._library.store.folder, entry.name)
            return self._make(self._library.net, entry.inner)

    def _add(self, entry: Entry, session: Session) -> None:
        """Keep a session, in the place of others if need be. The task's weights in PyTorch are not needed any more."""
        with self._lock:
            fits = self._fits(entry, session.nbytes, drop=True)
            if fits:
                self._held[entry], self._graph = _Held(session, self._images), session.graph
                self.made += 1
                self._note(entry.name, "made")
        del session
        if fits:
            self._library.net.release(entry.inner)
            log.info("%s: runs on onnxruntime now", entry)
        self._library.net.limit_memory(max(0, self._budget - self.nbytes))
        give_memory_back()

    def _fits(self, entry: Entry, size: int, *, drop: bool = False) -> bool:
        """There is room for one more session, or would be without those that may go for this task."""
        room = self._budget - self.nbytes
        for other, held in sorted(self._held.items(), key=lambda pair: pair[1].used):
            if size <= room:
                break
            if other.name not in self._pinned and BUSIER * self._heat[other.inner] < self._heat[entry.inner]:
                room += held.session.nbytes
                if drop:
                    del self._held[other]
                    self.dropped += 1
                    self._note(other.name, "dropped")
        return size <= room or entry.name in self._pinned

    def _estimate(self) -> int:
        """What the next session will take."""
        known = next((held.session.nbytes for held in self._held.values()), None)
        return known or 4 * self._library.store.size.parameters

    def _on_torch(self, entry: Entry, reason: str) -> None:
        if entry.name in self._pinned:
            self._library.net.module(entry.inner)  # computed, and kept
        if self._enabled:
            log.warning("%s: stays on PyTorch: %s", entry, reason)
        self.reasons[entry] = reason


def export_graph(store: Path, task: str) -> None:
    """Put a task's graph into the cache, or why it has none: in a process of its own, as `GraphCache` says."""
    made = subprocess.run([sys.executable, "-m", EXPORT, store, task], capture_output=True, text=True)
    if made.returncode:
        raise ExportError((made.stderr.strip().splitlines() or [f"exporting ended with {made.returncode}"])[-1])
