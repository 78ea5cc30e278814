"""The versions of a store's tasks: the one that is served, the previous one, and a canary.

    my-store/
      flowers.safetensors             the task
      previous/flowers.safetensors    the version before it; a rollback swaps the two
      canary/flowers.safetensors      gets a share of the requests
      canary/flowers.json             that share: {"share": 0.1}

Each step is one rename, under a lock that all processes share. A process killed between steps leaves complete files.
"""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitgraft.backbone.files import PART, check_name, sweep_parts, write_atomically
from bitgraft.serving.http_error import HttpError
from bitgraft.store import SUFFIX, Store

CANARY, PREVIOUS, LOCK = "canary", "previous", ".lock"


class Versions:
    def __init__(self, store: Store) -> None:
        self._store = store

    def part(self) -> Path:
        """Return a new path for an unfinished file. Later writes delete it if a killed process leaves it behind."""
        return self._store.folder / PART.format(secrets.token_hex(8))

    def canary(self, name: str) -> Path:
        return self._store.folder / CANARY / f"{check_name(name)}{SUFFIX}"

    def previous(self, name: str) -> Path:
        return self._store.folder / PREVIOUS / f"{check_name(name)}{SUFFIX}"

    def put(self, name: str, file: Path) -> None:
        """Move a file into the task's place. The replaced file becomes the previous version."""
        with self._locked():
            self._replace(name, file)

    def put_canary(self, name: str, file: Path, share: float) -> None:
        with self._locked():
            _require(self._store.path(name), f"there is no task {name!r} yet: put it without a canary")
            target = self.canary(name)
            target.parent.mkdir(exist_ok=True)
            write_atomically(target.with_suffix(".json"), json.dumps({"share": share}).encode())
            os.replace(file, target)

    def promote(self, name: str) -> None:
        """Replace the task with its canary."""
        with self._locked():
            _require(self.canary(name), f"task {name!r} has no canary")
            self._replace(name, self.canary(name))
            self._drop_canary(name)

    def end_canary(self, name: str) -> None:
        with self._locked():
            _require(self.canary(name), f"task {name!r} has no canary")
            self._drop_canary(name)

    def rollback(self, name: str) -> None:
        """Swap the task with its previous version. A removed task is restored."""
        with self._locked():
            current, previous, part = self._store.path(name), self.previous(name), self.part()
            _require(previous, f"task {name!r} has no previous version")
            self._store.check_replaceable(name)
            if current.exists():
                shutil.copyfile(current, part)
            os.replace(previous, current)
            if part.exists():
                os.replace(part, previous)

    def remove(self, name: str) -> None:
        """Remove the task. Its file becomes the previous version."""
        with self._locked():
            _require(self._store.path(name), f"there is no task {name!r}")
            self._store.check_replaceable(name)
            self._drop_canary(name)
            self.previous(name).parent.mkdir(exist_ok=True)
            os.replace(self._store.path(name), self.previous(name))

    def _replace(self, name: str, file: Path) -> None:
        """Copy the served file, so that the task always has one, then replace it. The copy is the previous version."""
        current, previous, part = self._store.path(name), self.previous(name), self.part()
        if current.exists():
            self._store.check_replaceable(name)
            previous.parent.mkdir(exist_ok=True)
            shutil.copyfile(current, part)
            os.replace(part, previous)
        os.replace(file, current)

    def _drop_canary(self, name: str) -> None:
        for path in (self.canary(name), self.canary(name).with_suffix(".json")):
            path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self._store.folder / LOCK, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, even by a kill
            sweep_parts(self._store.folder)
            yield


def _require(path: Path, message: str) -> None:
    if not path.exists():
        raise HttpError(404, message)
