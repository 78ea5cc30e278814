"""`bitgraft predict`, `eval`, `identify` and `describe`: run tasks of a store on images, and find an image's task."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from bitgraft.cli import options as opt
from bitgraft.cli.app import command, count, flag
from bitgraft.cli.images import UNKNOWN, ahead, identified, image_files, read
from bitgraft.cli.output import megabytes, percent, show, show_images, table
from bitgraft.store import Store

if TYPE_CHECKING:
    from torch import Tensor

    from bitgraft.data.images import Images
    from bitgraft.network import Network

BATCH = 8  # images; larger batches are no faster on a CPU
COLUMNS = ["image", "task", "class", "probability>"]
ROUTE = 3  # tasks to list for an image whose task is not given


@command("""
  bitgraft predict rose.jpg
  bitgraft predict rose.jpg --task flowers
  bitgraft predict photos/ --all-tasks --top 1 --json
  bitgraft predict rose.jpg --task original""")
def predict(
    images: opt.ImageFiles,
    task: opt.TaskNames = None,
    all_tasks: opt.AllTasks = False,
    store: opt.StoreFolder = opt.STORE,
    top: Annotated[int, count("Classes to list for each image.")] = 5,
    device: opt.Device = "cpu",
    engine: opt.Engine = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Classify images.

    Without --task, in a store of several tasks, each image is classified by the task it belongs to. `--task original`
    is the backbone's own task. Unreadable files are reported, and the exit code is then 1.
    """
    opened = Store(store)
    if not task and not all_tasks and len(opened.names()) > 1:
        found, errors = identified(images, store, device, classes=top, tasks=ROUTE)
        data = [{"image": path, **one} for path, one in found.items()]
        rows = _rows({path: {one["task"] or UNKNOWN: one["answers"] or [None]} for path, one in found.items()})
        show_images(as_json, data, errors, COLUMNS, rows)
        return
    import torch

    from bitgraft.data.preprocessing import evaluation_tensor
    from bitgraft.workflows.prediction import best, class_names, preprocessing_of, probabilities

    names, threads = opt.chosen_tasks(store, task, all_tasks), torch.get_num_threads()
    files, errors = image_files(images)
    net, answers = opt.network_with(store, names, device), {path: dict[str, Any]() for path in files}
    for name in names:
        classes = class_names(net, name, opened.backbone)
        prepare = partial(evaluation_tensor, preprocessing=preprocessing_of(net, name))
        readable = [path for path in files if path not in errors]
        scores = _scores(net, name, engine, len(readable), threads)
        for batch in read(readable, prepare, BATCH, errors):
            for path, row in zip(batch, probabilities(net, scores(torch.stack(list(batch.values())))), strict=True):
                answers[path][name] = best(row, classes, top)
    answers = {path: by_task for path, by_task in answers.items() if path not in errors}
    data = [{"image": path, "tasks": by_task} for path, by_task in answers.items()]
    show_images(as_json, data, errors, COLUMNS, _rows(answers))


def _scores(
    net: "Network", name: str, engine: opt.EngineName, images: int, threads: int | None = None
) -> "Callable[[Tensor], Tensor]":
    """Return the function that computes the task's scores, in torch's number of threads by default."""
    import torch

    from bitgraft.runtime.engines import Session
    from bitgraft.workflows.prediction import choose_engine

    scores, reason = choose_engine(net, name, engine, images, threads)
    if isinstance(scores, Session):
        torch.set_num_threads(1)  # idle torch threads would compete with the session's own
    if reason:
        print(f"note: {name} runs on PyTorch: {reason}", file=sys.stderr)
    return scores


def _rows(answers: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return table rows that name the image and the task on their first line only."""
    rows = []
    for path, by_task in answers.items():
        for t, (task, best) in enumerate(by_task.items()):
            for b, answer in enumerate(best):
                head = (path if t == b == 0 else "", task if b == 0 else "")
                rows.append((*head, *((answer["class"], percent(answer["probability"])) if answer else ("", ""))))
    return rows


@command(
    """
  bitgraft eval photos --task flowers
  bitgraft eval photos --task flowers --split val --by-class --json""",
    name="eval",
)
def evaluate(
    data: Annotated[str, Argument(metavar="DATA", help="A data set, as for `bitgraft train`.")],
    task: opt.TaskName,
    store: opt.StoreFolder = opt.STORE,
    split: Annotated[Literal["train", "val", "test"], Option(help="The images to use.")] = "test",
    by_class: Annotated[bool, flag("--by-class", "Add the accuracy of each class.")] = False,
    union: Annotated[bool, flag("--union", "Choose among the classes of all tasks.")] = False,
    batch: Annotated[int, count("Images per batch.")] = 128,
    seed: opt.SplitSeed = 0,
    workers: opt.Workers = 0,
    device: opt.Device = "cpu",
    engine: opt.Engine = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Measure a task's accuracy on labelled images.

    Classes are matched by name; the data may lack some of the task's classes. All images of a folder without splits are
    used.
    """
    from bitgraft.data.splits import open_to_evaluate
    from bitgraft.workflows.identification import evaluate_union
    from bitgraft.workflows.train_task import one_sentence

    if union and (by_class or engine == "onnxruntime"):
        raise typer.BadParameter("--union takes neither --by-class nor --engine onnxruntime")
    classes = Store(store).summary(task).metadata.classes or ()
    opened = open_to_evaluate(data, split, seed=seed)
    images = opened.labelled(split, classes, f"task {task!r}", "--split {}")
    net = opt.network_with(store, Store(store).names() if union else [task], device)
    about = {"data": data, "task": task, "images": len(images)}
    if union:
        with one_sentence():
            found = evaluate_union(net, task, images, batch=batch, workers=workers)
        said = (
            f"{task} on {data}, {len(images):,} images, among {len(net.classes()):,} classes of {found['tasks']} "
            f"tasks: accuracy {percent(found['accuracy'])}, with the task given {percent(found['told_accuracy'])}; "
            f"task right {percent(found['task_accuracy'])}; unknown {percent(found['unknown'])}"
        )
        show(as_json, about | found, said)
        return
    scores = _scores(net, task, engine, len(images))
    right, total = _right(net, task, images, batch, workers, scores), Counter(images.labels)
    rows: list[dict[str, Any]] = [
        {"class": classes[label], "images": count, "correct": right[label], "accuracy": right[label] / count}
        for label, count in sorted(total.items())
    ]
    correct, accuracy = right.total(), right.total() / len(images)
    kind = "" if opened.train is opened.test else f"{split} "  # a folder without train/
    said = f"{task} on {data}: {percent(accuracy)} ({correct:,} of {len(images):,} {kind}images are right)"
    if not kind and not (Path(data) / "test").is_dir():
        remark = "all images of the folder were used: if the task was trained on them, this is not its test accuracy"
        print(f"note: {remark}", file=sys.stderr)
    report: dict[str, Any] = {**about, "split": split, "correct": correct, "accuracy": accuracy}
    if not by_class:
        show(as_json, report, said)
        return
    cells = [(row["class"], row["images"], row["correct"], percent(row["accuracy"])) for row in rows]
    show(as_json, report | {"by_class": rows}, said, table(["class", "images>", "right>", "accuracy>"], cells))


def _right(
    net: "Network", task: str, images: "Images", batch: int, workers: int, scores: "Callable[[Tensor], Tensor]"
) -> "Counter[int]":
    """Count the correct answers by class."""
    from torch.utils.data import DataLoader, default_collate

    from bitgraft.data.dataset import ImageDataset
    from bitgraft.runtime.engines import Session
    from bitgraft.workflows.prediction import preprocessing_of
    from bitgraft.workflows.train_task import one_sentence

    data, right = ImageDataset(images, preprocessing_of(net, task)), Counter[int]()
    with one_sentence():
        if isinstance(scores, Session):
            batch = min(batch, BATCH)
        indices = range(len(data))
        read = ahead(lambda at: default_collate(data.__getitems__(indices[at : at + batch])), indices[::batch])
        for pixels, labels in DataLoader(data, batch_size=batch, num_workers=workers) if workers else read:
            right.update(labels[scores(pixels).argmax(1) == labels].tolist())
    return right


@command("""
  bitgraft identify rose.jpg
  bitgraft identify photos/ --store my-store --json""")
def identify(
    images: opt.ImageFiles,
    store: opt.StoreFolder = opt.STORE,
    top: Annotated[int, count("Tasks to list for each image.")] = 3,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
) -> None:
    """Find the task of a store that an image belongs to, or none.

    Tasks without a description are left out; `bitgraft describe` adds one.
    """
    found, errors = identified(images, store, device, classes=1, tasks=top)
    rows = [
        (path if i == 0 else "", (one["task"] or UNKNOWN) if i == 0 else "", guess["task"], percent(guess["score"]))
        for path, one in found.items()
        for i, guess in enumerate(one["route"])
    ]
    data = [{"image": path, "task": one["task"], "route": one["route"]} for path, one in found.items()]
    show_images(as_json, data, errors, ["image", "task", "likeliest", "score>"], rows)


@command("""
  bitgraft describe flowers photos
  bitgraft describe gtsrb decathlon-1.0:gtsrb --store my-store""")
def describe(
    task: Annotated[str, Argument(metavar="TASK", help="A task in the store.")],
    data: Annotated[str, Argument(metavar="DATA", help="The data set it was trained on, as for `bitgraft train`.")],
    store: opt.StoreFolder = opt.STORE,
    seed: opt.SplitSeed = 0,
    workers: opt.Workers = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Add a description of a task's images to its file.

    `identify` and `predict` need it to find the task of an image. `train` writes one; use this command for older
    files. Nothing else in the file changes.
    """
    from bitgraft.data.splits import open_data
    from bitgraft.workflows.identification import describe as describe_task
    from bitgraft.workflows.train_task import one_sentence

    splits, path = open_data(data, seed=seed), Store(store).file(task)
    net = opt.network_with(store, [task])
    with one_sentence():
        size = describe_task(net, task, splits, workers=workers).nbytes
    net.save_task(task, path)
    report = {"task": task, "file": str(path), "description_bytes": size}
    show(as_json, report, f"added a description of {megabytes(size)} to {path}")
