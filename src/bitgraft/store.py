"""A folder of tasks on disk: one backbone (name, weights, fingerprint) and a file for each task.

    my-store/
      store.json              which backbone, its fingerprint and size
      flowers.safetensors     a task
      runs/flowers/           what training it left: metrics, and a checkpoint while it runs

Whoever has the backbone can move the task files elsewhere: each is whole in itself.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitgraft.backbone.files import write_atomically
from bitgraft.backbone.loading import load_backbone
from bitgraft.backbone.weight_files import PACKAGE
from bitgraft.errors import ArchiveError, StoreError, UnknownTaskError
from bitgraft.format.archive import Archive, content, read_archive
from bitgraft.network import Network
from bitgraft.task import Task, check_name

SUFFIX = ".safetensors"
FORMAT = 1
ABOUT = "store.json"


@dataclass(frozen=True)
class Backbone:
    """How a store's backbone is built, as `bitgraft.backbone.loading` takes it."""

    name: str
    weights: str | None = None
    pretrained: bool = True

    def __post_init__(self) -> None:
        if self.weights is not None and not self.weights.startswith(PACKAGE):  # to be found from any folder
            object.__setattr__(self, "weights", os.path.abspath(self.weights))

    def build(self) -> nn.Module:
        """The network in evaluation mode. One with random weights has the same ones each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return load_backbone(self.name, weights=self.weights, pretrained=self.pretrained).eval()


@dataclass(frozen=True)
class Size:
    """What a store's tasks are measured against."""

    parameters: int
    """Of the backbone, its own head included."""
    weights: int
    """How many of them a task can transform."""

    @classmethod
    def of(cls, net: Network) -> "Size":
        weights = sum(weight.shape.numel() for weight in net.anatomy.weights.values())
        return cls(sum(p.numel() for p in net.backbone.parameters()), weights)


class Store:
    """TrainData by its folder. Every write is of one whole file, so that commands running side by side cannot clash."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            about = json.loads((self.folder / ABOUT).read_text())
            if about["format"] != FORMAT:
                raise StoreError(f"{folder} is a store of format {about['format']}: this bitgraft knows {FORMAT}")
            self.backbone = Backbone(**_resolved(about["backbone"], self.folder))
            self.fingerprint = str(about["fingerprint"])
            self.size = Size(**about["size"])
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(
                f"there is no store at {folder}: `bitgraft train DATA --task NAME --backbone NAME --store {folder}` "
                "makes one"
            ) from None
        except StoreError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as cause:
            raise StoreError(
                f"{self.folder / ABOUT} is damaged ({type(cause).__name__}: {cause}): restore it, or begin another "
                "store and move the task files there"
            ) from cause

    @staticmethod
    def exists(folder: str | Path) -> bool:
        return (Path(folder) / ABOUT).exists()

    @classmethod
    def create(cls, folder: str | Path, backbone: Backbone, net: Network) -> "Store":
        """Begin a store, or open the one that is there if it has the same backbone."""
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise StoreError(f"cannot make a store at {folder}: {cause.strerror}") from cause
        if not cls.exists(path):
            about = {
                "format": FORMAT,
                "backbone": _relative(asdict(backbone), path),
                "fingerprint": net.fingerprint,
                "size": asdict(Size.of(net)),
            }
            _write_first(path / ABOUT, (json.dumps(about, indent=2) + "\n").encode())
        store = cls(path)
        if store.fingerprint != net.fingerprint:
            raise StoreError(
                f"the store at {folder} has the backbone {store.backbone.name}, fingerprint {store.fingerprint[:12]}, "
                f"not {backbone.name}, {net.fingerprint[:12]}: a store holds the tasks of one backbone; choose another "
                "with --store"
            )
        return store

    def network(self, **options: Any) -> Network:
        """The backbone, without any of the tasks; options are those of `Network`."""
        net = Network(self.backbone.build(), **options)
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

    def file(self, task: str) -> Path:
        """The path of a task that is there."""
        if not self.path(task).exists():
            known = ", ".join(self.names()) or "none yet"
            raise UnknownTaskError(f"the store at {self.folder} has no task {task!r}; it has {known}")
        return self.path(task)

    def archive(self, task: str) -> Archive:
        return read_archive(self.file(task))

    def load(self, net: Network, task: str, *, above: tuple[str, ...] = ()) -> Task:
        """Add a task, and first those that it builds on; `above` are those that wait for this one."""
        waiting, there = (*above, task), self.names()
        for earlier in self.archive(task).metadata.depends_on:
            if earlier not in net.tasks and earlier not in waiting and earlier in there:
                self.load(net, earlier, above=waiting)
        return net.load_task(self.path(task), name=task)

    def check_replaceable(self, task: str) -> None:
        """Refuse to write over a task that others lean on."""
        if not self.path(task).exists():
            return
        try:
            held = content(self.archive(task))
        except ArchiveError:  # what is broken carries nobody
            return
        if leaning := [name for name in self.names() if name != task and held in self._leant_on(name)]:
            raise StoreError(
                f"task {task!r} cannot be replaced: {', '.join(map(repr, leaning))} would not run without it; choose "
                "another name"
            )

    def _leant_on(self, task: str) -> list[str]:
        try:
            return list(self.archive(task).metadata.depends_on.values())
        except ArchiveError:
            return []

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Each task with the bytes that its file takes."""
        return ((name, os.path.getsize(self.path(name))) for name in self.names())


def _relative(backbone: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A backbone's record; weights within the store's folder move along with it."""
    weights = Path(backbone["weights"] or "")
    inside = weights.is_relative_to(os.path.abspath(folder))
    return {**backbone, "weights": weights.relative_to(os.path.abspath(folder)).as_posix()} if inside else backbone


def _resolved(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    weights = record.get("weights")
    if weights is None or weights.startswith(PACKAGE):
        return record
    return {**record, "weights": str(folder / weights)}  # an absolute path stays as it is


def _write_first(path: Path, data: bytes) -> None:
    """Write a file unless somebody else has done so meanwhile: the first one stays, and it is whole."""
    part = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        try:
            write_atomically(part, data)
        except ArchiveError as cause:
            raise StoreError(str(cause).replace(part.name, path.name)) from cause
        with contextlib.suppress(FileExistsError):
            try:
                os.link(part, path)
            except (OSError, NotImplementedError) as cause:
                if isinstance(cause, FileExistsError):
                    raise
                os.replace(part, path)  # a file system without links
    finally:
        part.unlink(missing_ok=True)
