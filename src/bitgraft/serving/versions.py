"""The versions of a task in a store: the one that is served, the one before it, and a canary.

    my-store/
      flowers.safetensors             is served
      previous/flowers.safetensors    was served before; rolling back swaps the two
      canary/flowers.safetensors      gets a share of the traffic
      canary/flowers.json             that share: {"share": 0.1}

Every step is one rename, under a lock that all processes share: a process killed between two steps leaves whole files.
"""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitgraft.backbone.files import PART, sweep_parts, write_atomically
from bitgraft.errors import StoreError
from bitgraft.serving.refusals import Refusal
from bitgraft.store import SUFFIX, Store
from bitgraft.task import check_name

CANARY, PREVIOUS, LOCK = "canary", "previous", ".lock"


class Versions:
    def __init__(self, store: Store) -> None:
        self._store = store

    def part(self) -> Path:
        """A new name for a file that is being written; if a kill leaves it behind, later writers sweep it."""
        return self._store.folder / PART.format(secrets.token_hex(8))

    def canary(self, name: str) -> Path:
        return self._in(CANARY, name)

    def previous(self, name: str) -> Path:
        return self._in(PREVIOUS, name)

    def put(self, name: str, file: Path) -> None:
        """Serve this file, which is moved; what was served becomes the previous version."""
        with self._locked():
            self._set_aside(name)
            os.replace(file, self._store.path(name))

    def put_canary(self, name: str, file: Path, share: float) -> None:
        with self._locked():
            self._need(self._store.path(name), f"there is no task {name!r} yet: put it without a canary")
            target = self.canary(name)
            target.parent.mkdir(exist_ok=True)
            write_atomically(target.with_suffix(".json"), json.dumps({"share": share}).encode())
            os.replace(file, target)

    def promote(self, name: str) -> None:
        """The canary gets all traffic."""
        with self._locked():
            self._need(self.canary(name), f"task {name!r} has no canary")
            self._set_aside(name)
            os.replace(self.canary(name), self._store.path(name))
            self._drop_canary(name)

    def end_canary(self, name: str) -> None:
        with self._locked():
            self._need(self.canary(name), f"task {name!r} has no canary")
            self._drop_canary(name)

    def rollback(self, name: str) -> None:
        """Swap what is served with the version before it; a removed task comes back."""
        with self._locked():
            current, previous, part = self._store.path(name), self.previous(name), self.part()
            self._need(previous, f"task {name!r} has no version to go back to")
            self._check_replaceable(name)
            if current.exists():
                _link(current, part)
            os.replace(previous, current)
            if part.exists():
                os.replace(part, previous)

    def remove(self, name: str) -> None:
        """Serve the task no longer. Its file becomes the previous version."""
        with self._locked():
            self._need(self._store.path(name), f"there is no task {name!r}")
            self._check_replaceable(name)
            self._drop_canary(name)
            self.previous(name).parent.mkdir(exist_ok=True)
            os.replace(self._store.path(name), self.previous(name))

    def _in(self, folder: str, name: str) -> Path:
        return self._store.folder / folder / f"{check_name(name)}{SUFFIX}"

    def _set_aside(self, name: str) -> None:
        """Keep what is served now as the previous version, too: no moment without a file."""
        current, previous, part = self._store.path(name), self.previous(name), self.part()
        if not current.exists():
            return
        self._check_replaceable(name)
        previous.parent.mkdir(exist_ok=True)
        _link(current, part)
        os.replace(part, previous)
        part.unlink(missing_ok=True)  # a rename onto another link of the same file does nothing

    def _drop_canary(self, name: str) -> None:
        self.canary(name).unlink(missing_ok=True)
        self.canary(name).with_suffix(".json").unlink(missing_ok=True)

    def _check_replaceable(self, name: str) -> None:
        try:
            self._store.check_replaceable(name)
        except StoreError as problem:
            raise Refusal(409, str(problem)) from problem

    def _need(self, path: Path, otherwise: str) -> None:
        if not path.exists():
            raise Refusal(404, otherwise)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self._store.folder / LOCK, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # goes with the file, also when the process is killed
            sweep_parts(self._store.folder)
            yield


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)
