"""A folder of task files for one backbone.

    my-store/
      store.json              the backbone's name, weights, fingerprint and size
      flowers.safetensors     a task
      runs/flowers/           training metrics, and a checkpoint during training

Task files are self-contained: copy them to any store of the same backbone. Listing a store does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitgraft.backbone.files import PACKAGE, check_name, write_atomically
from bitgraft.errors import ArchiveError, StoreError, UnknownTaskError
from bitgraft.format.summary import Summary, read_summary

if TYPE_CHECKING:
    from torch import nn

    from bitgraft.format.archive import Archive
    from bitgraft.network import Network
    from bitgraft.task import Task

SUFFIX = ".safetensors"
FORMAT = 1
RECORD = "store.json"
ORIGINAL = "original"  # the name of the backbone's own task in every store


@dataclass(frozen=True)
class Backbone:
    """The arguments of `load_backbone` that build a store's backbone."""

    name: str
    weights: str | None = None
    pretrained: bool = True

    def __post_init__(self) -> None:
        if self.weights is not None and not self.weights.startswith(PACKAGE):  # valid in any working directory
            object.__setattr__(self, "weights", os.path.abspath(self.weights))

    def build(self) -> nn.Module:
        """Build the backbone in evaluation mode. Random weights are reproducible."""
        import torch

        from bitgraft.backbone.loading import load_backbone

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return load_backbone(self.name, weights=self.weights, pretrained=self.pretrained).eval()


@dataclass(frozen=True)
class Size:
    """The size of a store's backbone."""

    parameters: int
    """Number of parameters, including the head."""
    weights: int
    """Number of parameters that a task can transform."""
    body: int = 0
    """Bytes without the head, including buffers. 0 in stores of earlier versions."""

    @classmethod
    def of(cls, net: Network) -> Size:
        weights = sum(weight.shape.numel() for weight in net.anatomy.weights.values())
        state, head = net.backbone.state_dict(), set(net.anatomy.head_names())
        body = sum(tensor.nbytes for name, tensor in state.items() if name not in head)
        return cls(sum(p.numel() for p in net.backbone.parameters()), weights, body)

    def copy_bytes(self, head: int) -> int:
        """Return the size in bytes of a full copy with a head of this size, as `bitgraft export` writes it."""
        return self.body + head if self.body else 4 * self.parameters


class Store:
    """An existing store. Files are written atomically, so several commands may use it at the same time."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            record = json.loads((self.folder / RECORD).read_text())
            if record["format"] != FORMAT:
                raise StoreError(
                    f"{folder} has store format {record['format']}, but this bitgraft only supports {FORMAT}: update it"
                )
            backbone = Backbone(**record["backbone"])
            self.backbone = replace(backbone, weights=_find(record["backbone"].get("weights"), self.folder))
            self.fingerprint = str(record["fingerprint"])
            self.size = Size(**record["size"])
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(
                f"there is no store at {folder}: create one with "
                f"`bitgraft train DATA --task NAME --backbone NAME --store {folder}`"
            ) from None
        except StoreError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as cause:
            raise StoreError(
                f"{self.folder / RECORD} is damaged ({type(cause).__name__}: {cause}): restore it, or create a new "
                "store and move the task files there"
            ) from cause

    @staticmethod
    def exists(folder: str | Path) -> bool:
        return (Path(folder) / RECORD).exists()

    @classmethod
    def create(cls, folder: str | Path, backbone: Backbone, net: Network) -> Store:
        """Create a store, or open the existing one if it has the same backbone.

        Weights inside the folder are recorded relative to it, so that the folder can be moved.
        """
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise StoreError(f"cannot create a store at {folder}: {cause.strerror}") from cause
        if not cls.exists(path):
            stated, base = asdict(backbone), os.path.abspath(path)
            if backbone.weights is not None and Path(backbone.weights).is_relative_to(base):
                stated["weights"] = Path(backbone.weights).relative_to(base).as_posix()
            record = {
                "format": FORMAT,
                "backbone": stated,
                "fingerprint": net.fingerprint,
                "size": asdict(Size.of(net)),
            }
            _write_once(path / RECORD, (json.dumps(record, indent=2) + "\n").encode())
        store = cls(path)
        if store.fingerprint != net.fingerprint:
            raise StoreError(
                f"the store at {folder} has the backbone {store.backbone.name} ({store.fingerprint[:12]}), not "
                f"{backbone.name} ({net.fingerprint[:12]}), and a store holds the tasks of one backbone: choose "
                "another with --store"
            )
        return store

    def network(self, **options: Any) -> Network:
        """Return a network without tasks. Options are passed to `Network`."""
        from bitgraft.network import Network

        net = Network(self.backbone.build(), **options)
        if net.fingerprint != self.fingerprint:
            raise StoreError(
                f"the weights of {self.backbone.name} have changed since the store at {self.folder} was created: their "
                f"fingerprint is {net.fingerprint[:12]}, not {self.fingerprint[:12]}"
            )
        return net

    def names(self) -> list[str]:
        """Return the names of the tasks, sorted."""
        files = (p for p in self.folder.glob(f"*{SUFFIX}") if not p.name.startswith("."))
        return sorted(p.name.removesuffix(SUFFIX) for p in files)

    def path(self, task: str) -> Path:
        return self.folder / f"{check_name(task)}{SUFFIX}"

    def run_folder(self, task: str) -> Path:
        return self.folder / "runs" / check_name(task)

    def file(self, task: str) -> Path:
        """Return the path of an existing task."""
        if not self.path(task).exists():
            known = ", ".join(self.names()) or "none yet"
            raise UnknownTaskError(f"the store at {self.folder} has no task {task!r}; it has {known}")
        return self.path(task)

    def summary(self, task: str) -> Summary:
        """Read a task's metadata and size, without its weights."""
        return read_summary(self.file(task))

    def archive(self, task: str) -> Archive:
        from bitgraft.format.archive import read_archive

        return read_archive(self.file(task))

    def load(self, net: Network, task: str, *, above: tuple[str, ...] = ()) -> Task:
        """Add a task to the network, after the tasks that it builds on. `above` are the tasks that wait for it."""
        waiting, names = (*above, task), self.names()
        for earlier in self.summary(task).metadata.depends_on:
            if earlier not in net.tasks and earlier not in waiting and earlier in names:
                self.load(net, earlier, above=waiting)
        return net.load_task(self.path(task), name=task)

    def check_replaceable(self, task: str) -> None:
        """Raise if this name must not be written: it is the backbone's own, or other tasks build on it."""
        from bitgraft.format.archive import content_hash

        if task == ORIGINAL:
            raise StoreError(f"{task!r} is the backbone's own task: choose another name")
        try:
            digest = content_hash(self.archive(task))
        except (UnknownTaskError, ArchiveError):  # missing, or damaged, so no task can build on it
            return
        for name in self.names():
            with contextlib.suppress(ArchiveError):
                if name != task and digest in self.summary(name).metadata.depends_on.values():
                    raise StoreError(f"task {task!r} cannot be replaced: {name!r} builds on it; choose another name")

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield each task's name and file size in bytes."""
        return ((name, os.path.getsize(self.path(name))) for name in self.names())


def _find(weights: str | None, folder: Path) -> str | None:
    """Return the path of the weights inside the store's folder if they are there, else the path as recorded."""
    return str(folder / weights) if weights is not None and (folder / weights).exists() else weights


def _write_once(path: Path, data: bytes) -> None:
    """Write a file atomically, unless another process has just written it: the first one stays."""
    part = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        write_atomically(part, data)
        os.link(part, path)
    except FileExistsError:
        pass
    except (OSError, NotImplementedError):  # the file system has no hard links
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
