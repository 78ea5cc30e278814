"""The tasks of a store in memory, kept in step with its folder.

A loaded task never changes. A replaced file becomes another `Entry` under the same name; the old one stays loaded while
a request holds it. A file that cannot be used changes nothing and is reported.
"""

import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bitgraft.backbone.files import check_name
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.errors import TaskError, UnknownTaskError
from bitgraft.format.archive import pack_task
from bitgraft.format.inspect import inspect_archive
from bitgraft.network import Network
from bitgraft.store import SUFFIX, Store
from bitgraft.workflows.prediction import preprocessing_of

log = logging.getLogger("bitgraft.serving")

Signature = tuple[int, int, int]  # a file's size, when it was written, its inode


@dataclass(frozen=True, eq=False)
class Entry:
    """One version of a task."""

    name: str
    inner: str
    """What the network calls this version."""
    classes: tuple[str, ...] | None
    preprocessing: Preprocessing
    about: Mapping[str, Any]
    """As JSON: method, classes, accuracy, bytes, bits per weight."""
    layers: tuple[Mapping[str, Any], ...] = ()
    """As JSON: the share of ones and k0..k3 by layer."""

    def __str__(self) -> str:
        return self.name


class Library:
    """`tasks` is replaced as a whole, so a reader always sees one state of the store."""

    def __init__(self, store: Store, net: Network) -> None:
        self.store, self.net = store, net.eval()
        self.errors: Mapping[str, str] = {}
        """Why a file is not served as it is now, by task name; "" is the folder itself."""
        self._seen: dict[str, Signature] = {}
        self._versions = 0
        self._unused: list[str] = []  # versions whose entries are gone
        self._scanning = threading.Lock()
        about = {"name": net.original, "method": "backbone", "bytes": 4 * store.size.parameters}
        self._own = Entry(net.original, net.original, None, preprocessing_of(net, net.original), about)
        self.tasks: Mapping[str, Entry] = {net.original: self._own}

    def find(self, names: Iterable[str]) -> list[Entry]:
        """The tasks of these names as they are now."""
        tasks = self.tasks
        for name in names:
            if name not in tasks:
                check_name(name)
                broken = f" (its file is broken: {self.errors[name]})" if name in self.errors else ""
                raise UnknownTaskError(f"there is no task {name!r}{broken}; known are {', '.join(tasks)}")
        return [tasks[name] for name in names]

    def scan(self) -> bool:
        """Load what was added, replaced or removed since the last scan; whether anything was."""
        with self._scanning:
            try:
                files = [p for p in self.store.folder.iterdir() if p.suffix == SUFFIX and not p.name.startswith(".")]
                found = {p.stem: ((stat := p.stat()).st_size, stat.st_mtime_ns, stat.st_ino) for p in files}
            except OSError as problem:
                self._report({**self.errors, "": f"the store's folder cannot be read: {problem.strerror}"})
                return False
            new = found != self._seen or "" in self.errors
            if new:
                changed = {name for name, signature in found.items() if self._seen.get(name) != signature}
                again = changed | (self.errors.keys() & found.keys())  # a missing dependency may be here now
                tasks = {name: entry for name, entry in self.tasks.items() if name in found or entry is self._own}
                self._report(self._load(tasks, sorted(again), found))
                self._seen, self.tasks = found, dict(sorted(tasks.items()))
            for inner in list(self._unused):
                with suppress(TaskError):  # another task builds on it
                    self.net.remove_task(inner)
                    self._unused.remove(inner)
            return new

    def _load(self, tasks: dict[str, Entry], names: list[str], found: Mapping[str, Signature]) -> dict[str, str]:
        """Load files into `tasks`, dependencies first; returns what is wrong with the rest."""
        while names:
            faults = {}
            for name in names:
                self._versions += 1
                inner = f"v{self._versions}"
                try:
                    tasks[name] = self._read(name, inner, found[name][0])
                    weakref.finalize(tasks[name], self._unused.append, inner)
                except Exception as problem:  # whatever a file makes the reader do, the others are served
                    if inner in self.net.tasks:
                        self.net.remove_task(inner)
                    text = str(problem).replace(repr(inner), repr(name))
                    faults[name] = text.replace(f"{self.store.folder}{os.sep}", "")
            if len(faults) == len(names):
                return faults
            names = list(faults)  # they may depend on those that are loaded now
        return {}

    def _read(self, name: str, inner: str, size: int) -> Entry:
        if name == self.net.original:
            raise TaskError(f"{name!r} is the name of the backbone's own task: rename the file")
        task = self.net.load_task(self.store.path(name), name=inner)
        if task.metadata.head == "none":
            raise TaskError(f"task {name!r} gives features, not classes: it has no answers to serve")
        found = inspect_archive(pack_task(task, self.net.fingerprint), size)
        layers = [
            {"name": layer.name, "density": layer.density, "k": [spread.mean for spread in layer.k] or None}
            for layer in found.layers
        ]
        about = {**found.listed(name, self.store.size.weights), "density": found.density}
        return Entry(name, inner, task.classes, preprocessing_of(self.net, inner), about, tuple(layers))

    def _report(self, errors: dict[str, str]) -> None:
        for name, text in errors.items():
            if self.errors.get(name) != text:
                log.error("%s: %s", name or "store", text)
        self.errors = errors
