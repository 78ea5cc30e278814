"""The loaded tasks of a store, kept up to date with its folder.

A loaded task never changes. When a file is replaced, a new `Entry` takes over its name; the old one stays loaded while
requests use it. A broken file is reported and leaves the old entry in place.
"""

import json
import logging
import os
import random
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from bitgraft.backbone.files import check_name, read_whole
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.errors import BitgraftError, StoreError, TaskError, UnknownTaskError
from bitgraft.format.archive import from_bytes, rename
from bitgraft.format.inspect import inspect_archive
from bitgraft.network import Network
from bitgraft.runtime.new_task import loaded_task
from bitgraft.serving.http_error import HttpError
from bitgraft.serving.predictions import decode_all
from bitgraft.serving.versions import CANARY, Versions
from bitgraft.store import SUFFIX, Store
from bitgraft.workflows.identification import as_answers
from bitgraft.workflows.prediction import imagenet_names, preprocessing_of, torch_scores

log = logging.getLogger("bitgraft.serving")

Signature = tuple[int, int, int]  # size, modification time and inode of a file


@dataclass(frozen=True, eq=False)
class Entry:
    """One version of a task."""

    name: str
    task_id: str
    """The name of this version in the network."""
    classes: tuple[str, ...] | None
    preprocessing: Preprocessing
    info: Mapping[str, Any]
    """As JSON: version, method, classes, accuracy, bytes, bits per weight."""
    layers: tuple[Mapping[str, Any], ...] = ()
    """As JSON: mask density and k0..k3 per layer."""
    share: float | None = None
    """The share of the task's requests that a canary answers."""

    @property
    def role(self) -> str:
        return "stable" if self.share is None else "canary"

    def __str__(self) -> str:
        """Return the name, for messages that only have the entry, such as the scheduler's."""
        return self.name


class Library:
    """The store's tasks, loaded. `tasks` and `canaries` are replaced, never modified, so readers need no lock."""

    def __init__(self, store: Store, net: Network) -> None:
        self.store, self.net = store, net.eval()
        self.errors: Mapping[str, str] = {}
        """Why a file is not served, by its path in the store without suffix; "" is the folder itself."""
        self._signatures: dict[str, Signature] = {}
        self._loaded: dict[str, Entry] = {}  # by path, as in `errors`
        self._loads = 0
        self._unused: list[str] = []  # ids of tasks whose entries were garbage-collected
        self._scan_lock = threading.Lock()
        names = imagenet_names(net.backbone, store.backbone)
        info = {"name": net.original, "method": "backbone", "bytes": 4 * store.size.parameters}
        info |= {"version": store.fingerprint[:16], "classes": len(names) if names else None}
        self._original = Entry(net.original, net.original, names, preprocessing_of(net, net.original), info)
        self.tasks: Mapping[str, Entry] = {net.original: self._original}
        self.canaries: Mapping[str, Entry] = {}
        self.scan()

    def find(self, name: str) -> Entry:
        """Return the entry that answers a request to a task: its canary with the probability of the canary's share."""
        entry, canary = self.tasks.get(name), self.canaries.get(name)
        if entry is None:
            check_name(name)
            broken = f" (its file is broken: {self.errors[name]})" if name in self.errors else ""
            raise UnknownTaskError(f"there is no task {name!r}{broken}; known tasks are {', '.join(self.tasks)}")
        return canary if canary is not None and random.random() < (canary.share or 0.0) else entry

    def info(self, entry: Entry) -> dict[str, Any]:
        """Return a task and its canary, if any, as JSON."""
        canary = self.canaries.get(entry.name)
        if canary is None:
            return dict(entry.info)
        shown = {"share": canary.share, "version": canary.info["version"], "accuracy": canary.info["accuracy"]}
        return {**entry.info, "canary": shown}

    def identify(self, images: Sequence[bytes], top: int, max_pixels: int) -> list[dict[str, Any]]:
        """Return each image's task, the most likely tasks, and the task's answers, as JSON."""
        net = self.net
        entries = {name: entry for name, entry in self.tasks.items() if name != net.original}
        tasks = {name: net.tasks[entry.task_id] for name, entry in entries.items()}
        preprocessings = list(dict.fromkeys(entry.preprocessing for entry in entries.values()))
        decoded = zip(*decode_all(images, preprocessings, max_pixels), strict=True)
        batches = {one: torch.stack(t).to(net.anatomy.device) for one, t in zip(preprocessings, decoded, strict=True)}
        inputs = {name: batches[entry.preprocessing] for name, entry in entries.items()}

        def run(name: str, batch: Tensor) -> Tensor:
            return torch_scores(net, entries[name].task_id, batch).to(net.anatomy.device)

        try:
            found = net._identifier.decide(tasks, inputs, run)
        except BitgraftError as problem:  # no task has a description, or the backbone has no features
            raise HttpError(409, str(problem)) from problem
        return as_answers(found, {name: entry.classes for name, entry in entries.items()}, top=top)

    def scan(self) -> bool:
        """Load new and replaced files and drop removed ones. Return whether the folder has changed."""
        with self._scan_lock:
            try:
                found = self._files()
            except OSError as problem:
                self._report({**self.errors, "": f"cannot read the store's folder: {problem.strerror}"})
                return False
            has_changed = found != self._signatures or "" in self.errors
            if has_changed:
                changed = {key for key, signature in found.items() if self._signatures.get(key) != signature}
                retried = self.errors.keys() & found.keys()  # a missing dependency may have been added
                loaded = {key: entry for key, entry in self._loaded.items() if key in found}
                self._report(self._load(loaded, sorted(changed | retried)))
                self._signatures, self._loaded = found, loaded
                entries = sorted([self._original, *loaded.values()], key=lambda entry: entry.name)
                self.tasks = {entry.name: entry for entry in entries if entry.share is None}
                self.canaries = {entry.name: entry for entry in entries if entry.share is not None}
            self._unload()
            return has_changed

    def change(self, action: str, name: str, *args: Any) -> dict[str, Any]:
        """Call the `Versions` method called `action` and return the task that is served afterwards, as JSON.

        A file is checked before it gets its place, and served at once.
        """
        versions = Versions(self.store)
        if name == self.net.original:
            raise HttpError(409, f"{name!r} is the backbone's own task: it cannot be changed")
        try:
            if action in ("put", "put_canary"):
                self.check(name, args[0])
            elif action == "rollback" and versions.previous(name).exists():
                self.check(name, versions.previous(name))  # it may have been broken when it was replaced
            getattr(versions, action)(name, *args)
        except StoreError as problem:
            raise HttpError(409, str(problem)) from problem
        except OSError as problem:
            raise HttpError(507, f"cannot write to the store: {problem.strerror}") from problem
        self.scan()
        entry = self.tasks.get(name)
        served = {"name": name, "version": None} if entry is None else self.info(entry)
        return {**served, "previous": versions.previous(name).exists()}

    def check(self, name: str, path: Path) -> None:
        """Load a file as this task and drop it again. Raise an `HttpError` if it cannot be served."""
        with self._scan_lock:
            problem = self._try(name, path)[1]
            self._unload()
        if problem:
            raise HttpError(422, f"the task file was rejected: {problem}")

    def _files(self) -> dict[str, Signature]:
        """Every task file and canary, by its path in the store without suffix."""
        found, canaries = {}, self.store.folder / CANARY
        for path in chain(self.store.folder.iterdir(), canaries.iterdir() if canaries.is_dir() else ()):
            if path.suffix == SUFFIX and not path.name.startswith("."):
                key, stat = path.relative_to(self.store.folder).with_suffix("").as_posix(), path.stat()
                found[key] = stat.st_size, stat.st_mtime_ns, stat.st_ino
        return found

    def _unload(self) -> None:
        for task_id in list(self._unused):
            with suppress(TaskError):  # another task builds on it
                self.net.remove_task(task_id)
                self._unused.remove(task_id)

    def _load(self, loaded: dict[str, Entry], keys: list[str]) -> dict[str, str]:
        """Load files into `loaded`, dependencies first. Return the errors of those that cannot be loaded."""
        while keys:
            errors = {}
            for key in keys:
                entry, problem = self._try(key, self.store.folder / f"{key}{SUFFIX}")
                if entry is None:
                    errors[key] = problem
                else:
                    loaded[key] = entry
            if len(errors) == len(keys):
                return errors
            keys = list(errors)  # they may depend on tasks that are loaded now
        return {}

    def _try(self, key: str, path: Path) -> tuple[Entry | None, str]:
        """Return a file's entry, or what is wrong with the file."""
        self._loads += 1
        task_id, name = f"v{self._loads}", key.removeprefix(f"{CANARY}/")
        try:
            entry = self._read(name, path, task_id, _share(path) if key != name else None)
        except Exception as problem:  # one bad file must not stop the others from being served
            if task_id in self.net.tasks:
                self.net.remove_task(task_id)
            text = str(problem).replace(repr(task_id), repr(name)).replace(str(path), f"{key}{SUFFIX}")
            return None, text.replace(f"{self.store.folder}{os.sep}", "")
        weakref.finalize(entry, self._unused.append, task_id)
        return entry, ""

    def _read(self, name: str, path: Path, task_id: str, share: float | None) -> Entry:
        net, size = self.net, self.store.size
        if check_name(name) == net.original:
            raise TaskError(f"{name!r} is the name of the backbone's own task: rename the file")
        data = read_whole(path)
        archive = from_bytes(data, str(path))
        if archive.metadata.head == "none":
            raise TaskError(f"task {name!r} has no classifier: only tasks with classes can be served")
        net._register(loaded_task(net.anatomy, net.tasks, rename(archive, task_id), net.fingerprint, None, path))
        found = inspect_archive(archive, data)
        layers = tuple(
            {"name": layer.name, "density": layer.density, "k": [spread.mean for spread in layer.k] or None}
            for layer in found.layers
        )
        info = found.listed(name, size.weights) | {
            "version": xxhash.xxh3_64_hexdigest(data),
            "density": found.density,
            "copy_bytes": size.copy_bytes(found.bytes["head"]),
            "described": archive.description is not None,
        }
        return Entry(name, task_id, archive.metadata.classes, preprocessing_of(net, task_id), info, layers, share)

    def _report(self, errors: dict[str, str]) -> None:
        for name, text in errors.items():
            if self.errors.get(name) != text:
                log.error("%s: %s", name or "store", text)
        self.errors = errors


def _share(path: Path) -> float:
    try:
        return float(json.loads(path.with_suffix(".json").read_text())["share"])
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise TaskError(f"cannot read the canary's share from {path.stem}.json: put the canary again") from cause
