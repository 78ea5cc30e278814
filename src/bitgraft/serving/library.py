"""The tasks of a store in memory, kept in step with its folder.

A loaded task never changes. A replaced file becomes another `Entry` under the same name; the old one stays loaded while
a request holds it. A file that cannot be used changes nothing and is reported.
"""

import json
import logging
import os
import random
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from bitgraft.backbone.files import check_name, read_whole
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.errors import TaskError, UnknownTaskError
from bitgraft.format.archive import from_bytes, rename
from bitgraft.format.inspect import inspect_archive
from bitgraft.network import Network
from bitgraft.runtime.new_task import loaded_task
from bitgraft.serving.class_names import imagenet_names
from bitgraft.serving.versions import CANARY
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
    """As JSON: version, method, classes, accuracy, bytes, bits per weight."""
    layers: tuple[Mapping[str, Any], ...] = ()
    """As JSON: the share of ones and k0..k3 by layer."""
    share: float | None = None
    """A canary's share of the task's traffic."""

    @property
    def role(self) -> str:
        return "stable" if self.share is None else "canary"

    def __str__(self) -> str:
        return self.name


class Library:
    """`tasks` and `canaries` are replaced as a whole, so a reader always sees one state of the store."""

    def __init__(self, store: Store, net: Network) -> None:
        self.store, self.net = store, net.eval()
        self.errors: Mapping[str, str] = {}
        """Why a file is not served as it is now, by its path without suffix; "" is the folder itself."""
        self._seen: dict[str, Signature] = {}
        self._loaded: dict[str, Entry] = {}  # by path, as in `errors`
        self._versions = 0
        self._unused: list[str] = []  # versions whose entries are gone
        self._scanning = threading.Lock()
        names = imagenet_names(net.backbone, store.backbone)
        about = {"name": net.original, "method": "backbone", "bytes": 4 * store.size.parameters}
        about |= {"version": store.fingerprint[:16], "classes": len(names) if names else None}
        self._own = Entry(net.original, net.original, names, preprocessing_of(net, net.original), about)
        self.tasks: Mapping[str, Entry] = {net.original: self._own}
        self.canaries: Mapping[str, Entry] = {}

    def find(self, names: Iterable[str]) -> list[Entry]:
        """The tasks of these names as they are now; for its share of calls, a canary in its task's place."""
        tasks, canaries = self.tasks, self.canaries
        for name in names:
            if name not in tasks:
                check_name(name)
                broken = f" (its file is broken: {self.errors[name]})" if name in self.errors else ""
                raise UnknownTaskError(f"there is no task {name!r}{broken}; known are {', '.join(tasks)}")
        return [self._draw(tasks[name], canaries.get(name)) for name in names]

    def _draw(self, task: Entry, canary: Entry | None) -> Entry:
        return task if canary is None or random.random() >= (canary.share or 0.0) else canary

    def about(self, entry: Entry) -> dict[str, Any]:
        """A task as JSON, with its canary."""
        canary = self.canaries.get(entry.name)
        if canary is None:
            return dict(entry.about)
        told = {"share": canary.share, "version": canary.about["version"], "accuracy": canary.about["accuracy"]}
        return {**entry.about, "canary": told}

    def scan(self) -> bool:
        """Load what was added, replaced or removed since the last scan; whether anything was."""
        with self._scanning:
            try:
                found = self._files()
            except OSError as problem:
                self._report({**self.errors, "": f"the store's folder cannot be read: {problem.strerror}"})
                return False
            new = found != self._seen or "" in self.errors
            if new:
                changed = {key for key, signature in found.items() if self._seen.get(key) != signature}
                again = changed | (self.errors.keys() & found.keys())  # a missing dependency may be here now
                loaded = {key: entry for key, entry in self._loaded.items() if key in found}
                self._report(self._load(loaded, sorted(again), found))
                self._publish(found, loaded)
            self._unload()
            return new

    def check(self, name: str, path: Path) -> None:
        """Load a file as this task and drop it again; a `TaskError` says what is wrong with it."""
        with self._scanning:
            problem = self._try(name, path, path.stat().st_size)[1]
            self._unload()
        if problem:
            raise TaskError(problem)

    def _files(self) -> dict[str, Signature]:
        """Every task file and canary, by its path in the store without suffix."""
        found = {}
        for prefix in ("", f"{CANARY}/"):
            folder = self.store.folder / prefix
            if prefix and not folder.is_dir():
                continue
            for path in folder.iterdir():
                if path.suffix == SUFFIX and not path.name.startswith("."):
                    stat = path.stat()
                    found[prefix + path.stem] = stat.st_size, stat.st_mtime_ns, stat.st_ino
        return found

    def _publish(self, found: dict[str, Signature], loaded: dict[str, Entry]) -> None:
        entries = [entry for _, entry in sorted(loaded.items())]
        tasks = {entry.name: entry for entry in [self._own, *entries] if entry.share is None}
        self._seen, self._loaded, self.tasks = found, loaded, dict(sorted(tasks.items()))
        self.canaries = {entry.name: entry for entry in entries if entry.share is not None}

    def _unload(self) -> None:
        for inner in list(self._unused):
            with suppress(TaskError):  # another task builds on it
                self.net.remove_task(inner)
                self._unused.remove(inner)

    def _load(self, loaded: dict[str, Entry], keys: list[str], found: Mapping[str, Signature]) -> dict[str, str]:
        """Load files into `loaded`, dependencies first; returns what is wrong with the rest."""
        while keys:
            faults = {}
            for key in keys:
                entry, problem = self._try(key, self.store.folder / f"{key}{SUFFIX}", found[key][0])
                if entry is None:
                    faults[key] = problem
                else:
                    loaded[key] = entry
            if len(faults) == len(keys):
                return faults
            keys = list(faults)  # they may depend on those that are loaded now
        return {}

    def _try(self, key: str, path: Path, size: int) -> tuple[Entry | None, str]:
        """A file's task, or what is wrong with it."""
        self._versions += 1
        inner, name = f"v{self._versions}", key.removeprefix(f"{CANARY}/")
        try:
            entry = self._read(name, path, inner, size, _share(path) if key != name else None)
        except Exception as problem:  # whatever a file makes the reader do, the others are served
            if inner in self.net.tasks:
                self.net.remove_task(inner)
            text = str(problem).replace(repr(inner), repr(name)).replace(str(path), f"{key}{SUFFIX}")
            return None, text.replace(f"{self.store.folder}{os.sep}", "")
        weakref.finalize(entry, self._unused.append, inner)
        return entry, ""

    def _read(self, name: str, path: Path, inner: str, size: int, share: float | None) -> Entry:
        if check_name(name) == self.net.original:
            raise TaskError(f"{name!r} is the name of the backbone's own task: rename the file")
        data = read_whole(path)
        archive = from_bytes(data, str(path))
        if archive.metadata.head == "none":
            raise TaskError(f"task {name!r} gives features, not classes: it has no answers to serve")
        net = self.net
        net._keep(loaded_task(net.anatomy, net.tasks, rename(archive, inner), net.fingerprint, None, path))
        found = inspect_archive(archive, len(data))
        layers = [
            {"name": layer.name, "density": layer.density, "k": [spread.mean for spread in layer.k] or None}
            for layer in found.layers
        ]
        about = found.listed(name, self.store.size.weights) | {
            "version": xxhash.xxh3_64_hexdigest(data),
            "density": found.density,
            "copy_bytes": self.store.size.copy_bytes(found.bytes["head"]),
            "described": archive.description is not None,
        }
        classes = archive.metadata.classes
        return Entry(name, inner, classes, preprocessing_of(net, inner), about, tuple(layers), share)

    def _report(self, errors: dict[str, str]) -> None:
        for name, text in errors.items():
            if self.errors.get(name) != text:
                log.error("%s: %s", name or "store", text)
        self.errors = errors


def _share(path: Path) -> float:
    try:
        return float(json.loads(path.with_suffix(".json").read_text())["share"])
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise TaskError(f"the canary's share cannot be read from {path.stem}.json: put the canary again") from cause
