"""The tasks of a store in memory, kept in step with its folder.

A task that is here is never changed. A replaced file becomes another `Entry` under the same name, and what was accepted
for the old one is still answered by it. A file that cannot be used leaves everything as it was, and is reported.
"""

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bitgraft.data.preprocessing import Preprocessing
from bitgraft.errors import BitgraftError, TaskError, UnknownTaskError
from bitgraft.format.archive import pack_task
from bitgraft.format.inspect import Inspection, Layer, accuracy, inspect_archive
from bitgraft.network import Network
from bitgraft.runtime.heads import stated_preprocessing
from bitgraft.store import SUFFIX, Store
from bitgraft.task import check_name

log = logging.getLogger("bitgraft.serving")

Signature = tuple[int, int, int]
"""Of a file: when it was written, how long it is, which one it is."""


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


class Library:
    """`tasks` is replaced as a whole, so that whoever has it has one state of the store."""

    def __init__(self, store: Store, net: Network) -> None:
        self.store, self.net = store, net.eval()
        self.errors: Mapping[str, str] = {}
        """Why a file is not served as it is now, by its name; "" is the folder itself."""
        self._seen: dict[str, Signature] = {}
        self._versions = 0
        self._retired: list[Entry] = []
        self._users: Counter[Entry] = Counter()
        self._scanning, self._swapping = threading.Lock(), threading.Lock()
        own = Preprocessing.from_dict(stated_preprocessing(net.backbone))
        about = {"name": net.original, "method": "backbone", "bytes": 4 * store.size.parameters}
        self._own = Entry(net.original, net.original, None, own, about)
        self.tasks: Mapping[str, Entry] = MappingProxyType({net.original: self._own})

    @contextmanager
    def borrow(self, names: Iterable[str]) -> Iterator[list[Entry]]:
        """The tasks of these names as they are now; they stay usable until they are given back."""
        with self._swapping:
            entries = [self._find(name) for name in names]
            self._users.update(entries)
        try:
            yield entries
        finally:
            with self._swapping:
                self._users.subtract(entries)

    def scan(self) -> bool:
        """Take in what was added, replaced or removed since the last look; whether anything was."""
        with self._scanning:
            try:
                found = dict(_files(self.store.folder))
            except OSError as problem:
                self._report({**self.errors, "": f"the store's folder cannot be read: {problem.strerror}"})
                return False
            changed = {name for name, signature in found.items() if self._seen.get(name) != signature}
            if changed or self._seen.keys() - found.keys() or "" in self.errors:
                again = changed | (self.errors.keys() & found.keys())  # what was missing may be here now
                tasks = {name: entry for name, entry in self.tasks.items() if name in found or entry is self._own}
                self._report(self._take_in(tasks, sorted(again), found))
                self._seen = found
                self._swap(tasks)
                return True
            self._sweep()
            return False

    def _find(self, name: str) -> Entry:
        entry = self.tasks.get(name)
        if entry is not None:
            return entry
        check_name(name)
        broken = f" (its file is broken: {self.errors[name]})" if name in self.errors else ""
        raise UnknownTaskError(f"there is no task {name!r}{broken}; known are {', '.join(self.tasks)}")

    def _take_in(self, tasks: dict[str, Entry], names: list[str], found: Mapping[str, Signature]) -> dict[str, str]:
        """Read files into `tasks`, those that lean on others after these; what is wrong with the rest."""
        while names:
            faults = {}
            for name in names:
                try:
                    tasks[name] = self._read(name, found[name])
                except Exception as problem:  # whatever a file makes the reader do, the others are served
                    faults[name] = str(problem).replace(f"{self.store.folder}{os.sep}", "")
            if len(faults) == len(names):
                return faults
            names = list(faults)
        return {}

    def _read(self, name: str, signature: Signature) -> Entry:
        self._versions += 1
        inner = f"v{self._versions}"
        try:
            task = self.net.load_task(self.store.path(name), name=inner)
        except BitgraftError as problem:
            raise type(problem)(str(problem).replace(repr(inner), repr(name))) from problem
        try:
            if name == self.net.original:
                raise TaskError(f"{name!r} is what the backbone's own task is called: call the file otherwise")
            if task.metadata.head == "none":
                raise TaskError(f"task {name!r} gives features, not classes: there is nothing to answer")
            read = inspect_archive(pack_task(task, self.net.fingerprint), signature[1])
            preprocessing = Preprocessing.from_dict(task.metadata.preprocessing)
        except BitgraftError:
            self.net.remove_task(inner)
            raise
        about = _about(name, read, self.store.size.weights)
        return Entry(name, inner, task.classes, preprocessing, about, tuple(map(_layer, read.layers)))

    def _report(self, errors: dict[str, str]) -> None:
        for name, text in errors.items():
            if self.errors.get(name) != text:
                log.error("%s: %s", name or "store", text)
        self.errors = MappingProxyType(errors)

    def _swap(self, tasks: dict[str, Entry]) -> None:
        with self._swapping:
            self._retired += [entry for name, entry in self.tasks.items() if tasks.get(name) is not entry]
            self.tasks = MappingProxyType(dict(sorted(tasks.items())))
        self._sweep()

    def _sweep(self) -> None:
        """Forget versions that nobody uses any more and no other task depends on."""
        with self._swapping:
            unused = [entry for entry in self._retired if not self._users[entry]]
        for entry in unused:
            with contextlib.suppress(TaskError):  # another depends on it
                self.net.remove_task(entry.inner)
                self._retired.remove(entry)
                self._users.pop(entry, None)


def _files(folder: Path) -> Iterator[tuple[str, Signature]]:
    with os.scandir(folder) as listed:
        for file in listed:
            if file.name.endswith(SUFFIX) and not file.name.startswith("."):
                stat = file.stat()
                yield file.name.removesuffix(SUFFIX), (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def _about(name: str, read: Inspection, weights: int) -> dict[str, Any]:
    metadata = read.archive.metadata
    split, share = accuracy(read.archive.metrics)
    return {
        "name": name,
        "method": metadata.method,
        "classes": None if metadata.classes is None else len(metadata.classes),
        "accuracy": share,
        "measured_on": split,
        "bytes": read.size,
        "bits_per_weight": 8 * (read.size - read.bytes["head"]) / weights,
        "density": read.density,
    }


def _layer(layer: Layer) -> dict[str, Any]:
    return {"name": layer.name, "density": layer.density, "k": [spread.mean for spread in layer.k] or None}
