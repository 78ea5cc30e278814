"""`bitgraft eval`: the accuracy of a task in a store."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from bitgraft.cli.options import STORE, AsJson, StoreFolder, TaskName, Workers, network_with
from bitgraft.cli.output import percent, show, table

if TYPE_CHECKING:
    from bitgraft.data.images import Images, Splits
    from bitgraft.network import Network

TRY = """
  bitgraft eval photos --task flowers
  bitgraft eval photos --task flowers --split val --by-class --json"""


def evaluate(
    data: Annotated[str, Argument(metavar="DATA", help="A data set, named as for `bitgraft train`.")],
    task: TaskName,
    store: StoreFolder = STORE,
    split: Annotated[Literal["train", "val", "test"], Option(help="Which of its images.")] = "test",
    by_class: Annotated[bool, Option("--by-class", help="Also for each class.")] = False,
    batch: Annotated[int, Option(min=1, help="Images at a time.")] = 128,
    seed: Annotated[int, Option(min=0, help="The seed of training, if training split the data.")] = 0,
    workers: Workers = 0,
    as_json: AsJson = False,
) -> None:
    """Measure a task's accuracy on labelled images.

    Classes are matched by name; the data may have fewer than the task.
    """
    from bitgraft.data.splits import open_data
    from bitgraft.store import Store

    classes = Store(store).archive(task).metadata.classes or ()
    images = _images(open_data(data, seed=seed), data, split, classes, task)
    right, total = _right(network_with(store, [task]), task, images, batch, workers), Counter(images.labels)
    rows: list[dict[str, Any]] = [
        {"class": classes[label], "images": count, "correct": right[label], "accuracy": right[label] / count}
        for label, count in sorted(total.items())
    ]
    correct, count, accuracy = right.total(), total.total(), right.total() / total.total()
    report = {"data": data, "split": split, "task": task, "images": count, "correct": correct, "accuracy": accuracy}
    said = f"{task} on {data}: {percent(accuracy)} ({correct:,} of {count:,} {split} images are right)"
    if not by_class:
        show(as_json, report, said)
        return
    cells = [(row["class"], row["images"], row["correct"], percent(row["accuracy"])) for row in rows]
    show(as_json, report | {"by_class": rows}, said, table(["class", "images>", "right>", "accuracy>"], cells))


def _images(splits: "Splits", data: str, split: str, classes: Sequence[str], task: str) -> "Images":
    """The images of a split, with the task's numbers for their classes."""
    from bitgraft.errors import DataError

    parts = {name: getattr(splits, name) for name in ("train", "val", "test")}
    images: Images | None = parts[split]
    if not images:
        there = ", ".join(f"--split {name}" for name, held in parts.items() if held)
        raise DataError(f"{data} has no {split} images: choose {there}")
    if min(images.labels) < 0:
        raise DataError(f"the {split} images of {data} have no labels, so accuracy cannot be measured on them")
    present = [splits.classes[label] for label in sorted(set(images.labels))]
    if strange := [name for name in present if name not in classes]:
        raise DataError(
            f"task {task!r} does not know {len(strange)} of the {len(present)} classes in the data: {_few(strange)}; "
            f"it knows {_few(classes) or 'none'}"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    return replace(images, labels=tuple(numbers[splits.classes[label]] for label in images.labels))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _right(net: "Network", task: str, images: "Images", batch: int, workers: int) -> "Counter[int]":
    """How many images of each class the task gets right."""
    import torch
    from torch.utils.data import DataLoader

    from bitgraft.backbone.tracing import logits
    from bitgraft.data.dataset import ImageDataset
    from bitgraft.serving.predictions import preprocessing_of
    from bitgraft.workflows.train_task import one_sentence

    data, right = ImageDataset(images, preprocessing_of(net, task)), Counter[int]()
    with torch.no_grad(), one_sentence():
        for pixels, labels in DataLoader(data, batch_size=batch, num_workers=workers):
            right.update(labels[logits(net(pixels, task=task)).argmax(1) == labels].tolist())
    return right
