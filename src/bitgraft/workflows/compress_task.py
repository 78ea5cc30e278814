"""Compress a fine-tuned copy of the backbone into a task of a store (`bitgraft compress`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from bitgraft.backbone.files import check_name
from bitgraft.compression.compress import Compression, compress
from bitgraft.compression.source import find_file, finetuned_task, is_task_file
from bitgraft.data.dataset import ImageDataset
from bitgraft.data.images import Splits
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.data.splits import open_data
from bitgraft.errors import DataError, TaskError
from bitgraft.network import Network
from bitgraft.store import Backbone, Store
from bitgraft.task import Task
from bitgraft.training.callbacks import Callback
from bitgraft.training.config import Config
from bitgraft.training.inputs import training_images
from bitgraft.workflows.train_task import check_name_free, one_sentence, open_store, preprocessing_for


def compress_into(
    folder: str | Path,
    backbone: Backbone | None,
    finetuned: str,
    task: str,
    *,
    classes: Sequence[str] | None,
    data: str | None,
    distil_on: Literal["drawings", "data"] | None,
    bits: float,
    config: Config,
    options: Mapping[str, Any],
    workers: int,
    overwrite: bool,
    callbacks: Sequence[Callback],
) -> tuple[Compression, str | None]:
    """Compress a copy and write the task to the store in `folder`, which `backbone` creates if needed. Return the split
    of `data`, "test" or "val", on which accuracy was measured as well.

    `finetuned` is a file of plain weights, a task file, or STORE/TASK. An error leaves the store unchanged, and creates
    none.
    """
    if backbone is None or Store.exists(folder):
        store, net = open_store(folder, backbone)
    else:
        store, net = None, Network(backbone.build())  # created only once the task is ready
    check_name(task)
    if store is not None:
        check_name_free(store, task, overwrite)
    splits = open_data(data, seed=config.seed) if data is not None else None
    path, about = find_file(finetuned)
    stated = is_task_file(about)
    if classes is None and splits is not None and not stated and "classes" not in about:
        classes = splits.classes
    resize = config.size is not None or config.resize is not None
    if resize and stated:
        raise TaskError(f"{finetuned} already states the size of its images: leave out --size and --resize")
    preprocessing = preprocessing_for(net, config).to_dict() if resize else None
    torch.manual_seed(config.seed)  # for dropout
    with finetuned_task(net, path, classes, preprocessing) as copy, one_sentence():
        test, measured_on, notes = _test_images(copy, splits)
        calibrate_on: Any = distil_on
        if distil_on == "data" and splits is not None:
            sizes = Preprocessing.from_dict(copy.metadata.preprocessing)
            calibrate_on = training_images(splits.train, splits, sizes, config)
        made = compress(
            net,
            task,
            copy,
            classes,
            calibrate_on=calibrate_on,
            config=config,
            bits=bits,
            test=test,
            callbacks=callbacks,
            workers=workers,
            **options,
        )
    made.warnings += notes
    if measured_on == "val":  # not a test accuracy
        measured = made.task.metrics.pop("test")
        made.task.metrics |= {"last": {"val_accuracy": measured["accuracy"]}, "kept": "last"}
    if store is None:
        assert backbone is not None
        store = Store.create(folder, backbone, net)
    net.save_task(task, store.path(task))
    return made, measured_on


def _test_images(copy: Task, splits: Splits | None) -> tuple[ImageDataset | None, str | None, list[str]]:
    """Return the images to measure accuracy on with the name of their split, and notes."""
    if splits is None:
        return None, None, []
    split = "test" if splits.tested else "val"
    if not getattr(splits, split):
        return None, None, ["accuracy was not measured: there are no test or validation images with labels"]
    try:
        images = splits.labelled(split, copy.classes or (), "the copy")
    except DataError as error:
        return None, None, [f"accuracy was not measured: {error}"]
    return ImageDataset(images, Preprocessing.from_dict(copy.metadata.preprocessing)), split, []
