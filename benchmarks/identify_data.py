"""Data of `python -m benchmarks.identify`: plain features and each task's logits, computed once and cached."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from bitgraft.data.dataset import ImageDataset
from bitgraft.data.images import Images, Splits
from bitgraft.data.splits import open_data
from bitgraft.paper.bench.reading import load_suite
from bitgraft.store import Backbone
from bitgraft.training.presets import preset
from bitgraft.workflows.prediction import torch_scores
from bitgraft.workflows.train_task import Request, open_store, preprocessing_for, train

BATCH = 64
MOST = {"val": 100, "test": 200}  # images per domain that every task runs on


@dataclass(frozen=True)
class Domain:
    """Normalised plain features and labels of a data set's splits."""

    name: str
    classes: tuple[str, ...]
    features: dict[str, Tensor]
    labels: dict[str, Tensor]


def picked(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced indices."""
    return [i * count // most for i in range(most)] if count > most else list(range(count))


def some_classes(splits: Splits, classes: range) -> Splits:
    """The images of some classes, labelled from 0."""

    def chosen(images: Images | None) -> Images | None:
        if images is None:
            return None
        kept = images.pick([i for i, label in enumerate(images.labels) if label in classes])
        return replace(kept, labels=tuple(label - classes.start for label in kept.labels))

    parts = {part: chosen(getattr(splits, part)) for part in ("train", "val", "test")}
    return replace(splits, classes=splits.classes[classes.start : classes.stop], category_ids=None, **parts)


class Collection:
    """The domains of the suite `domains`, a store with a task for each, and a cache folder."""

    def __init__(self, root: Path, store: Path, cache: Path, steps: int) -> None:
        self.root, self.cache, self.steps = root, cache, steps
        self.suite = load_suite("domains")
        about = self.suite.backbone
        self.config = preset("default").changed(size=64, resize=72, steps=steps)
        self.store, self.net = open_store(store, Backbone(about.name, about.weights))
        self.net.eval()
        self.preprocessing = preprocessing_for(self.net, self.config)
        cache.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return sorted(dataset.name for dataset in self.suite.datasets)

    def open(self, name: str) -> Any:
        return open_data(self.suite.dataset(name).data, root=self.root)

    def task(self, name: str) -> None:
        """Load the domain's task, after training it if it is missing."""
        if name not in self.store.names():
            spec = self.suite.dataset(name).data
            train(self.store, self.net, Request(spec, name, "full", self.config, root=self.root, describe=False))
        elif name not in self.net.tasks:
            self.store.load(self.net, name)
        self.net.eval()

    def domain(self, name: str) -> Domain:
        """Return the plain features of every image."""
        file = self.cache / f"plain-{name}.pt"
        if not file.exists():
            splits = self.open(name)
            held: dict[str, Any] = {"classes": splits.classes}
            for part in ("train", "val", "test"):
                batches = self._batches(getattr(splits, part))
                seen = [(self.net.features(pixels), labels) for pixels, labels in batches]
                held[part] = torch.cat([f for f, _ in seen]), torch.cat([labels for _, labels in seen])
            torch.save(held, file)
        held = torch.load(file, weights_only=True)
        parts = ("train", "val", "test")
        features = {part: F.normalize(held[part][0].float(), dim=1) for part in parts}
        return Domain(name, tuple(held["classes"]), features, {part: held[part][1] for part in parts})

    def logits(self, task: str, domain: str) -> dict[str, Tensor]:
        """Return a task's logits for some of a domain's images, by split."""
        file = self.cache / f"logits-{task}-{domain}.pt"
        if not file.exists():
            self.task(task)
            splits, held = self.open(domain), {}
            for part, most in MOST.items():
                images = getattr(splits, part)
                rows = picked(len(images), most)
                found = [torch_scores(self.net, task, pixels) for pixels, _ in self._batches(images, rows)]
                held[part] = torch.cat(found)
            torch.save(held, file)
        return torch.load(file, weights_only=True)  # type: ignore[no-any-return]

    def split_logits(self, name: str, classes: range, steps: int) -> dict[str, Tensor]:
        """Logits of a task for some classes of a domain, trained first if needed: all validation and test images."""
        task = f"{name}-{classes.start}"
        file = self.cache / f"split-{task}.pt"
        if not file.exists():
            splits = self.open(name)
            if task not in self.store.names():
                request = Request(task, task, "full", self.config.changed(steps=steps), describe=False)
                train(self.store, self.net, request, data=some_classes(splits, classes))
            elif task not in self.net.tasks:
                self.store.load(self.net, task)
            self.net.eval()
            held = {}
            for part in ("val", "test"):
                batches = self._batches(getattr(splits, part))
                held[part] = torch.cat([torch_scores(self.net, task, pixels) for pixels, _ in batches])
            torch.save(held, file)
        return torch.load(file, weights_only=True)  # type: ignore[no-any-return]

    def _batches(self, images: Any, rows: list[int] | None = None) -> Any:
        data: Any = ImageDataset(images, self.preprocessing, cache_bytes=0)
        return DataLoader(data if rows is None else Subset(data, rows), batch_size=BATCH)
