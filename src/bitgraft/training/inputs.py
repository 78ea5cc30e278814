"""What people train and evaluate on, as data sets of tensors: a folder, opened splits, a Dataset, a DataLoader.

Images that are not tensors yet go through the task's preprocessing, which its file then states, and in training
through the augmentation of the settings.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL.Image import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset, default_collate

from bitgraft.data.dataset import CACHE_BYTES, ImageDataset
from bitgraft.data.images import Images, Splits, few
from bitgraft.data.preprocessing import Augmentation, Preprocessing
from bitgraft.data.splits import open_data
from bitgraft.data.vision import read_dataset
from bitgraft.errors import DataError, DataWarning, TrainingError
from bitgraft.task import Task
from bitgraft.training.config import Config
from bitgraft.training.presets import preset


class FromLoader(Dataset[Any]):
    """The data set of a DataLoader, with the way in which that makes batches of it."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self.data: Any = loader.dataset
        self.collate_fn: Callable[[list[Any]], Any] = loader.collate_fn

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def prepared(
    tasks: Sequence[Task],
    train: Mapping[str, Any],
    val: Mapping[str, Any],
    config: Config | None,
    workers: int,
    labelled: bool = True,
) -> tuple[dict[str, Any], dict[str, Any], Config, int]:
    """What `fit` was given, with all that it leaves open: (data to train on, to validate on, settings, workers)."""
    given, config = {}, config or Config()
    for task in tasks:
        given[task.name], config, workers = from_loader(train[task.name], config, workers)
    config = config.over(preset(tasks[0].preset, tasks[0].metadata.method))
    pairs = {task.name: to_train(task, given[task.name], val.get(task.name), config) for task in tasks}
    for task in tasks if labelled else ():
        check_labels(task, known_labels(pairs[task.name][0]))
    return {n: pair[0] for n, pair in pairs.items()}, {n: pair[1] for n, pair in pairs.items()}, config, workers


def from_loader(given: Any, config: Config, workers: int) -> tuple[Any, Config, int]:
    """A DataLoader's batch size and workers are taken where the settings have none; other data stay as they are."""
    if not isinstance(given, DataLoader):
        return given, config, workers
    if not isinstance(given.sampler, RandomSampler | SequentialSampler) or given.batch_size is None:
        raise TrainingError(
            "a DataLoader with a sampler of its own cannot be used: `fit` chooses the batches, so that a run can be "
            "resumed; pass loader.dataset, and class_weights='balanced' for rare classes"
        )
    return unwrapped(given), Config(batch=given.batch_size).changed(**config.given()), workers or given.num_workers


def unwrapped(given: Any) -> Any:
    """The data of a DataLoader, with its `collate_fn` if that is the user's own; other data as they are."""
    if not isinstance(given, DataLoader):
        return given
    return given.dataset if given.collate_fn is default_collate else FromLoader(given)


def to_train(task: Task, given: Any, val: Any, config: Config) -> tuple[Any, Any]:
    """Data sets to train and to validate on; a folder or splits have both, unless others are given to validate on."""
    if isinstance(given, str | Path):
        given = open_data(given, seed=config.seed, val_share=0.1 if val is None else 0.0)
        for text in given.warnings:
            warnings.warn(text, DataWarning, stacklevel=5)
    if isinstance(given, Splits):
        _name_classes(task, given)
        preprocessing, whose = _prepare(task, config), f"task {task.name!r}"
        images = labelled(given, "train", task.classes or (), whose)
        train = training_images(images, given, preprocessing, config)
        if val is None and given.val:
            val = ImageDataset(labelled(given, "val", task.classes or (), whose), preprocessing)
    elif _has_pictures(given):
        pictures = read_dataset(given, f"the training data of task {task.name!r}")
        train = training_images(pictures, None, _prepare(task, config), config)
    else:
        train = given
    if isinstance(val, str | Path):
        val = open_data(val, val_share=0.0)
    split = "val" if isinstance(val, Splits) and val.val else "train"
    return train, None if val is None else to_evaluate(task, val, split)


def to_evaluate(task: Task, given: Any, split: str = "test") -> Any:
    """A data set as the task evaluates it; of a folder or of splits, those images."""
    given, preprocessing = unwrapped(given), Preprocessing.from_dict(task.metadata.preprocessing)
    if isinstance(given, str | Path):
        given = open_data(given, val_share=0.0 if split == "train" else 0.1)
    if isinstance(given, Splits):
        return ImageDataset(labelled(given, split, task.classes or (), f"task {task.name!r}"), preprocessing)
    if _has_pictures(given):
        return ImageDataset(read_dataset(given, f"the data of task {task.name!r}"), preprocessing)
    return given


def check_labels(task: Task, labels: Sequence[int] | None) -> None:
    """Refuse data with which there is nothing to tell apart."""
    if labels is None or len(labels) == 0 or task.classes is None or len(present := set(map(int, labels))) > 1:
        return
    label = present.pop()
    name = task.classes[label] if 0 <= label < len(task.classes) else label
    raise TrainingError(
        f"all {len(labels)} training images of task {task.name!r} are of one class, {name!r}, so there is nothing to "
        "tell apart: give it images of at least two classes"
    )


def known_labels(data: Any) -> Sequence[int] | None:
    """The labels, where the data set shows them."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2 and data.tensors[1].dim() == 1:
        return data.tensors[1].tolist()
    labels = (
        data.labels if isinstance(data, ImageDataset) else getattr(data, "targets", None)
    )  # as torchvision has them
    return labels if isinstance(labels, Sequence) and all(isinstance(label, int) for label in labels) else None


def resized(stated: Mapping[str, Any], config: Config) -> Preprocessing:
    """A preprocessing at the size that the settings ask for."""
    made = Preprocessing.from_dict(stated)
    if config.squash:
        made = replace(made, crop="squash")
    if config.size is None and config.resize is None:
        return made
    return made.at(config.size or made.size, config.resize)


def training_images(
    images: Images, splits: Splits | None, preprocessing: Preprocessing, config: Config
) -> ImageDataset:
    """Images of a data set as training sees them; mirrored as the settings say, or else as the data set allows."""
    allowed = splits is None or splits.flip
    augmentation = Augmentation(flip=allowed if config.flip is None else config.flip, crop=config.crop)
    cached = splits is not None or images.files is not None  # a Dataset may give another image each time
    return ImageDataset(images, preprocessing, augmentation, config.seed, cache_bytes=CACHE_BYTES if cached else 0)


def labelled(splits: Splits, part: str, classes: Sequence[str], whose: str) -> Images:
    """The images of a split with a task's numbers for their classes, which are matched by name."""
    parts = {name: getattr(splits, name) for name in ("train", "val", "test")}
    images: Images | None = parts[part]
    if not images:
        there = ", ".join(f"--split {name}" for name, held in parts.items() if held)
        raise DataError(f"{splits.name} has no {part} images: choose {there}")
    if min(images.labels) < 0:
        raise DataError(f"the {part} images of {splits.name} have no labels, so accuracy cannot be measured on them")
    present = [splits.classes[label] for label in sorted(set(images.labels))]
    if strange := [name for name in present if name not in classes]:
        raise DataError(
            f"{whose} does not know {len(strange)} of the {len(present)} classes in the data: {few(strange)}; "
            f"it knows {few(classes) or 'none'}"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    return replace(images, labels=tuple(numbers[splits.classes[label]] for label in images.labels))


def _prepare(task: Task, config: Config) -> Preprocessing:
    """The task's preprocessing at the size of the settings; its file is going to state it."""
    preprocessing = resized(task.metadata.preprocessing, config)
    task.metadata = replace(task.metadata, preprocessing=preprocessing.to_dict())
    return preprocessing


def _name_classes(task: Task, splits: Splits) -> None:
    """A task that was added with a number of classes gets the names that the data has for them."""
    if task.classes == tuple(map(str, range(len(splits.classes)))):
        task.metadata = replace(task.metadata, classes=splits.classes)


def _has_pictures(data: Any) -> bool:
    """A data set of PIL images with labels."""
    if isinstance(data, FromLoader | ImageDataset | TensorDataset | str | Path | Splits):
        return False
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise TrainingError(
            f"a {type(data).__name__} has no length or no items: give a folder, a Dataset of (image, label), or a "
            "DataLoader over one"
        )
    item = data[0] if len(data) else None
    return isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Image)
