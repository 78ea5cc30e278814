"""`bitgraft eval`: how often a task in a store is right."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitgraft.cli.names import STORE, AsJson, StoreFolder, TaskName, Workers
from bitgraft.cli.output import show, show_json, table

if TYPE_CHECKING:
    from bitgraft.data.images import Images, Splits
    from bitgraft.network import Network

TRY = """\b
Try:
  bitgraft eval photos --task flowers
  bitgraft eval photos --task flowers --split val --by-class --json"""


class Split(StrEnum):
    train = "train"
    val = "val"
    test = "test"


def evaluate(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A data set, named as for `bitgraft train`.")],
    task: TaskName,
    store: StoreFolder = STORE,
    split: Annotated[Split, typer.Option(help="Which of its images.")] = Split.test,
    by_class: Annotated[bool, typer.Option("--by-class", help="Also for each class.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="With which training split the data, where it did.")] = 0,
    workers: Workers = 0,
    as_json: AsJson = False,
) -> None:
    """Measure a task's accuracy on labelled images.

    Classes are matched by name; the data may have fewer than the task.
    """
    from bitgraft.data.splits import open_data
    from bitgraft.store import Store

    opened = Store(store)
    archive = opened.archive(task)
    splits = open_data(data, seed=seed)
    images = _matched(splits, _part(splits, data, split.value), archive.metadata.classes, task)
    net = opened.network()
    opened.load(net, task)
    rows = _tally(net, task, images, batch, workers)
    report = _report(data, task, split.value, rows, archive.metadata.classes or ())
    if not by_class:
        report.pop("by_class")
    show_json(report) if as_json else _show(report)


def _part(splits: "Splits", data: str, part: str) -> "Images":
    from bitgraft.errors import DataError

    parts = {name: getattr(splits, name) for name in ("train", "val", "test")}
    images: Images | None = parts[part]
    if not images:
        there = ", ".join(f"--split {name}" for name, held in parts.items() if held)
        raise DataError(f"{data} has no {part} images: choose {there}")
    if min(images.labels) < 0:
        raise DataError(f"the {part} images of {data} have no labels, so nothing can be measured on them")
    return images


def _matched(splits: "Splits", images: "Images", classes: Sequence[str] | None, task: str) -> "Images":
    """The images with the task's numbers for their classes."""
    from dataclasses import replace

    from bitgraft.errors import DataError

    numbers = {name: number for number, name in enumerate(classes or ())}
    present = [splits.classes[label] for label in sorted(set(images.labels))]
    if strange := [name for name in present if name not in numbers]:
        raise DataError(
            f"{len(strange)} of the {len(present)} classes in the data are not task {task!r}'s: {_few(strange)}; "
            f"it knows {_few(list(numbers)) or 'none'}"
        )
    return replace(images, labels=tuple(numbers[splits.classes[label]] for label in images.labels))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _tally(net: "Network", task: str, images: "Images", batch: int, workers: int) -> list[tuple[int, int]]:
    """What each image is, and what the task says."""
    import torch
    from torch.utils.data import DataLoader

    from bitgraft.backbone.tracing import logits
    from bitgraft.data.dataset import ImageDataset
    from bitgraft.data.preprocessing import Preprocessing
    from bitgraft.workflows.train_task import one_sentence

    data = ImageDataset(images, Preprocessing.from_dict(net.tasks[task].metadata.preprocessing))
    rows: list[tuple[int, int]] = []
    with torch.no_grad(), one_sentence():
        for pixels, labels in DataLoader(data, batch_size=batch, num_workers=workers):
            said = logits(net.eval()(pixels, task=task)).argmax(1)
            rows += zip(labels.tolist(), said.tolist(), strict=True)
    return rows


def _report(data: str, task: str, split: str, rows: list[tuple[int, int]], classes: Sequence[str]) -> dict[str, Any]:
    counts: dict[int, list[int]] = {label: [0, 0] for label in sorted({label for label, _ in rows})}
    for label, said in rows:
        counts[label][0] += said == label
        counts[label][1] += 1
    right = sum(hits for hits, _ in counts.values())
    return {
        "data": data,
        "split": split,
        "task": task,
        "images": len(rows),
        "correct": right,
        "accuracy": right / len(rows),
        "by_class": [
            {"class": classes[label], "images": count, "correct": hits, "accuracy": hits / count}
            for label, (hits, count) in counts.items()
        ],
    }


def _show(report: dict[str, Any]) -> None:
    said = f"{report['correct']:,} of {report['images']:,} {report['split']} images are right"
    parts: list[Any] = [f"{report['task']} on {report['data']}: {100 * report['accuracy']:.1f} % ({said})"]
    if "by_class" in report:
        rows = [
            (row["class"], row["images"], row["correct"], f"{100 * row['accuracy']:.1f} %")
            for row in report["by_class"]
        ]
        parts.append(table(["class", "images>", "right>", "accuracy>"], rows))
    show(*parts)
