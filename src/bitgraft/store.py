"""A folder of tasks on disk: one backbone (name, weights, fingerprint) and a file for each task.

    my-store/
      store.json              which backbone, and its fingerprint
      flowers.safetensors     a task
      runs/flowers/           what training it left: checkpoint, metrics
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from bitgraft.archive import Archive, read_archive
from bitgraft.errors import StoreError, UnknownTaskError
from bitgraft.files import write_atomically
from bitgraft.loading import load_backbone
from bitgraft.network import Network
from bitgraft.task import Task, check_name

SUFFIX = ".safetensors"
FORMAT = 1


@dataclass(frozen=True)
class Backbone:
    """How a store's backbone is built, as `bitgraft.loading` takes it."""

    name: str
    weights: str | None = None
    pretrained: bool = True

    def build(self) -> nn.Module:
        return load_backbone(self.name, weights=self.weights, pretrained=self.pretrained)


class Store:
    """Opened by its folder. Every write is of one whole file, so that commands running side by side cannot clash."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            about = json.loads((self.folder / "store.json").read_text())
            if about["format"] != FORMAT:
                raise StoreError(f"{folder} is a store of format {about['format']}: this bitgraft knows {FORMAT}")
            self.backbone = Backbone(**about["backbone"])
            self.fingerprint: str = about["fingerprint"]
        except FileNotFoundError:
            raise StoreError(f"there is no store at {folder}: `bitgraft train --store {folder}` makes one") from None
        except (ValueError, KeyError, TypeError, OSError) as cause:
            raise StoreError(f"{self.folder}/store.json is damaged ({cause}): restore it, or begin anew") from cause

    @classmethod
    def create(cls, folder: str | Path, backbone: Backbone, fingerprint: str) -> "Store":
        """Begin a store, or open the one that is there if it has the same backbone."""
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise StoreError(f"cannot make a store at {folder}: {cause.strerror}") from cause
        if not (path / "store.json").exists():
            about = {"format": FORMAT, "backbone": asdict(backbone), "fingerprint": fingerprint}
            write_atomically(path / "store.json", (json.dumps(about, indent=2) + "\n").encode())
        store = cls(path)
        if store.fingerprint != fingerprint:
            raise StoreError(
                f"the store at {folder} has the backbone {store.backbone.name}, fingerprint {store.fingerprint[:12]}, "
                f"not {backbone.name}, {fingerprint[:12]}: a store holds the tasks of one backbone; choose another"
            )
        return store

    def network(self) -> Network:
        """The backbone, without any of the tasks."""
        backbone = self.backbone.build()
        net = Network(backbone.eval())
        if net.fingerprint != self.fingerprint:
            raise StoreError(
                f"the weights of {self.backbone.name} are not those that the store at {self.folder} was made with: "
                f"their fingerprint is {net.fingerprint[:12]}, not {self.fingerprint[:12]}"
            )
        return net

    def names(self) -> list[str]:
        files = (p for p in self.folder.glob(f"*{SUFFIX}") if not p.name.startswith("."))
        return sorted(p.name.removesuffix(SUFFIX) for p in files)

    def path(self, task: str) -> Path:
        return self.folder / f"{check_name(task)}{SUFFIX}"

    def run_folder(self, task: str) -> Path:
        return self.folder / "runs" / check_name(task)

    def archive(self, task: str) -> Archive:
        if not self.path(task).exists():
            known = ", ".join(self.names()) or "none yet"
            raise UnknownTaskError(f"the store at {self.folder} has no task {task!r}; it has {known}")
        return read_archive(self.path(task))

    def load(self, net: Network, task: str) -> Task:
        """Add a task, and first those that it builds on."""
        for earlier in self.archive(task).card.leans_on:
            if earlier not in net.tasks:
                self.load(net, earlier)
        return net.load_task(self.path(task), name=task)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Each task with the bytes that its file takes."""
        return ((name, os.path.getsize(self.path(name))) for name in self.names())
