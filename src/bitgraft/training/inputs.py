"""Turn the user's data (a folder, splits, a Dataset, a DataLoader) into data sets of tensors.

Images that are not tensors get the task's preprocessing, which is saved in its file, and in training the configured
augmentation.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL.Image import Image
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from bitgraft.data.dataset import CACHE_BYTES, ImageDataset
from bitgraft.data.images import Images, Splits, few
from bitgraft.data.preprocessing import Augmentation, Preprocessing
from bitgraft.data.splits import open_data, open_to_evaluate
from bitgraft.data.vision import read_dataset
from bitgraft.errors import DataError, DataWarning, TrainingError
from bitgraft.task import Task
from bitgraft.training.config import Config
from bitgraft.training.presets import preset


class LoaderDataset(Dataset[Any]):
    """The data set of a DataLoader, with its `collate_fn`."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self.data: Any = loader.dataset
        self.collate_fn: Callable[[list[Any]], Any] = loader.collate_fn

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def prepared(
    tasks: Mapping[str, Task],
    train: Mapping[str, Any],
    val: Mapping[str, Any],
    config: Config | None,
    workers: int,
    labelled: bool = True,
) -> tuple[dict[str, Any], dict[str, Any], Config, int]:
    """Resolve the arguments of `fit`: (training data by task, validation data by task, settings, workers)."""
    if config is not None and not isinstance(config, Config):
        raise TrainingError(f"config is a {type(config).__name__}: pass a bitgraft.Config, such as Config(epochs=3)")
    if not tasks or not isinstance(train, Mapping) or not isinstance(val, Mapping) or not train.keys() >= tasks.keys():
        raise TrainingError("to train several tasks, name them, and pass data as a mapping from their names")
    given, config = {}, config or Config()
    for name in tasks:
        given[name] = unwrapped(loader := train[name])
        if isinstance(loader, DataLoader) and loader.batch_size is not None:  # None for a stream, which is refused
            config = Config().changed(**{"batch": loader.batch_size, **config.given()})
            workers = workers or loader.num_workers
    first = next(iter(tasks.values()))
    config = config.over(preset(first.preset, first.metadata.method))
    train_data, val_data = {}, {}
    for name, task in tasks.items():
        train_data[name], val_data[name] = to_train(task, given[name], val.get(name), config)
        if labelled:
            check_several_classes(task, known_labels(train_data[name]))
    return train_data, val_data, config, workers


def unwrapped(given: Any) -> Any:
    """The data set of a DataLoader, with its `collate_fn` if that is the user's own; other data as is."""
    if not isinstance(given, DataLoader):
        return given
    if isinstance(given.dataset, IterableDataset):
        return given.dataset  # which is refused
    sampler, takes_all = given.sampler, isinstance(given.sampler, SequentialSampler)
    if isinstance(sampler, RandomSampler):
        takes_all = not sampler.replacement and len(sampler) == len(sampler.data_source)
    if given.batch_size is None or not takes_all:
        raise TrainingError(
            "a DataLoader with its own sampler cannot be used, because bitgraft chooses the batches: pass "
            "loader.dataset, or a torch.utils.data.Subset of it, and class_weights='balanced' for rare classes"
        )
    return given.dataset if given.collate_fn is default_collate else LoaderDataset(given)


def to_train(task: Task, given: Any, val: Any, config: Config) -> tuple[Any, Any]:
    """(training data, validation data); by default a folder or splits provide both."""
    _check_order(task, given)
    if isinstance(given, str | Path):
        given = open_data(given, seed=config.seed, val_share=0.1 if val is None else 0.0)
        for text in given.warnings:
            warnings.warn(text, DataWarning, stacklevel=4)
    if isinstance(given, Splits):
        if task.classes == tuple(map(str, range(len(given.classes)))):  # added with a number of classes
            task.metadata = replace(task.metadata, classes=given.classes)
        val = given if val is None and given.val else val
    train = given
    if (images := _images(task, given, "train")) is not None:
        preprocessing = resized(task.metadata.preprocessing, config)
        task.metadata = replace(task.metadata, preprocessing=preprocessing.to_dict())
        train = training_images(images, given, preprocessing, config)
    if isinstance(val, str | Path):
        val = open_data(val, val_share=0.0)
    split = "val" if isinstance(val, Splits) and val.val else "train"
    return train, None if val is None else to_evaluate(task, val, split)


def to_evaluate(task: Task, given: Any, split: str = "test", seed: int = 0) -> Any:
    """A data set with the task's preprocessing; `split` chooses images of a folder, split by `seed`, or of splits."""
    given = unwrapped(given)
    _check_order(task, given)
    if isinstance(given, str | Path):
        given = open_to_evaluate(given, split, seed=seed)
    images = _images(task, given, split)
    return given if images is None else ImageDataset(images, Preprocessing.from_dict(task.metadata.preprocessing))


def _images(task: Task, data: Any, split: str) -> Images | None:
    """The images of a split or of a data set of PIL images; None for a data set of tensors."""
    if isinstance(data, Splits):
        return data.labelled(split, task.classes or (), f"task {task.name!r}")
    return read_dataset(data, f"the data of task {task.name!r}") if _has_pil_images(data) else None


def _check_order(task: Task, data: Any) -> None:
    """Refuse a data set (torchvision's, or a subset of one) that numbers the task's classes in another order."""
    whole = getattr(data, "dataset", data)
    if isinstance(data, Splits) or getattr(whole, "target_transform", None) is not None:
        return  # splits are matched by name
    names, known = list(getattr(whole, "classes", None) or ()), list(task.classes or ())
    if names != known and sorted(map(str, names)) == sorted(known):
        raise DataError(
            f"the data numbers its classes {few(names)}, but task {task.name!r} {few(known)}: "
            "add the task with classes=dataset.classes"
        )


def check_several_classes(task: Task, labels: Sequence[int] | None) -> None:
    """Refuse training data of a single class."""
    if labels is None or len(labels) == 0 or task.classes is None or len(present := set(map(int, labels))) > 1:
        return
    label = present.pop()
    name = task.classes[label] if 0 <= label < len(task.classes) else label
    raise TrainingError(
        f"all {len(labels)} training images of task {task.name!r} are of one class, {name!r}, so there is nothing to "
        "tell apart: give it images of at least two classes"
    )


def known_labels(data: Any) -> Sequence[int] | None:
    """The labels if the data set lists them."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2 and data.tensors[1].dim() == 1:
        return data.tensors[1].tolist()
    labels = data.labels if isinstance(data, ImageDataset) else getattr(data, "targets", None)  # torchvision's name
    return labels if isinstance(labels, Sequence) and all(isinstance(label, int) for label in labels) else None


def resized(stated: Mapping[str, Any], config: Config) -> Preprocessing:
    """A task's stated preprocessing at the size of the settings."""
    preprocessing = Preprocessing.from_dict(stated)
    if config.squash:
        preprocessing = replace(preprocessing, crop="squash")
    if config.size is None and config.resize is None:
        return preprocessing
    return preprocessing.at(config.size or preprocessing.size, config.resize)


def training_images(images: Images, data: Any, preprocessing: Preprocessing, config: Config) -> ImageDataset:
    """Images with augmentation. `data` is where they are from: Splits, or a Dataset, which may return another image
    each time."""
    splits = data if isinstance(data, Splits) else None
    flip = (splits is None or splits.flip) if config.flip is None else config.flip
    cache = CACHE_BYTES if splits is not None or images.files is not None else 0
    return ImageDataset(
        images, preprocessing, Augmentation(flip=flip, crop=config.crop), config.seed, cache_bytes=cache
    )


def _has_pil_images(data: Any) -> bool:
    """Whether this is a data set of PIL images with labels."""
    if isinstance(data, LoaderDataset | ImageDataset | TensorDataset | str | Path | Splits):
        return False
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise TrainingError(
            f"a {type(data).__name__} has no length or no items: give a folder, a Dataset of (image, label), or a "
            "DataLoader over one"
        )
    item = data[0] if len(data) else None
    return isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Image)
