"""Compress a fine-tuned copy of the backbone into a task of a store (`bitgraft compress`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from bitgraft.backbone.files import check_name
from bitgraft.compression.compress import BITS, DRAWINGS, Compression, compress
from bitgraft.compression.distil import ON_DRAWINGS
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
from bitgraft.training.inputs import labelled, training_images
from bitgraft.workflows.train_task import check_name_free, one_sentence, open_store, preprocessing_for


@dataclass(frozen=True)
class Job:
    """One fine-tuned copy to compress."""

    finetuned: str
    """A file of plain weights, a task file, or STORE/TASK."""
    task: str
    classes: Sequence[str] | None = None
    data: str | None = None
    """A data set for measuring accuracy, and for distillation if `distil_on` is "data"."""
    distil_on: Literal["drawings", "data"] | None = DRAWINGS
    """None only rounds the weights."""
    bits: float = BITS
    """File size in bits per weight, without the head."""
    config: Config = ON_DRAWINGS
    options: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 0
    overwrite: bool = False


@dataclass(frozen=True)
class CompressResult:
    made: Compression
    path: Path
    measured_on: str | None
    """"test" or "val"."""
    notes: list[str]


def run(
    folder: str | Path, backbone: Backbone | None, job: Job, *, callbacks: Sequence[Callback] = ()
) -> CompressResult:
    """Compress a copy and write the task to the store in `folder`, which `backbone` creates if needed.

    An error leaves the store unchanged, and creates none.
    """
    if backbone is None or Store.exists(folder):
        store, net = open_store(folder, backbone)
    else:
        store, net = None, Network(backbone.build())  # created only once the task is ready
    check_name(job.task)
    if store is not None:
        check_name_free(store, job.task, job.overwrite)
    splits = open_data(job.data, seed=job.config.seed) if job.data is not None else None
    path, about = find_file(job.finetuned)
    classes = job.classes
    if classes is None and splits is not None and not is_task_file(about) and "classes" not in about:
        classes = splits.classes
    torch.manual_seed(job.config.seed)  # for dropout
    with finetuned_task(net, path, classes, _preprocessing(net, job, is_task_file(about))) as copy, one_sentence():
        training, test, measured_on, notes = _data(copy, splits, job)
        made = compress(
            net,
            job.task,
            copy,
            classes,
            calibrate_on=job.distil_on if training is None else training,
            config=job.config,
            bits=job.bits,
            test=test,
            callbacks=callbacks,
            workers=job.workers,
            **job.options,
        )
    if measured_on == "val":
        made.task.metrics = _as_validation(made.task.metrics)
    if store is None:
        assert backbone is not None
        store = Store.create(folder, backbone, net)
    net.save_task(job.task, store.path(job.task))
    return CompressResult(made, store.path(job.task), measured_on, [*made.warnings, *notes])


def _preprocessing(net: Network, job: Job, is_task: bool) -> dict[str, Any] | None:
    """Return the preprocessing, if the job sets its size."""
    if job.config.size is None and job.config.resize is None:
        return None
    if is_task:
        raise TaskError(f"{job.finetuned} already states the size of its images: leave out --size and --resize")
    return preprocessing_for(net, job.config).to_dict()


def _data(copy: Task, splits: Splits | None, job: Job) -> tuple[Any, Any, str | None, list[str]]:
    """Return the images for calibration, the images for accuracy with the name of their split, and notes."""
    if splits is None:
        return None, None, None, []
    preprocessing = Preprocessing.from_dict(copy.metadata.preprocessing)
    training = training_images(splits.train, splits, preprocessing, job.config) if job.distil_on == "data" else None
    split = "test" if splits.test and min(splits.test.labels) >= 0 else "val"
    if not getattr(splits, split):
        return training, None, None, ["accuracy was not measured: there are no test or validation images with labels"]
    try:
        images = labelled(splits, split, copy.classes or (), "the copy")
    except DataError as error:
        return training, None, None, [f"accuracy was not measured: {error}"]
    return training, ImageDataset(images, preprocessing), split, []


def _as_validation(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Store an accuracy on validation images as such, not as a test accuracy."""
    other = {key: value for key, value in metrics.items() if key != "test"}
    return {**other, "last": {"val_accuracy": metrics["test"]["accuracy"]}, "kept": "last"}
