"""`bitgraft predict` and `eval`: classify images with tasks of a store, and measure accuracy."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from typer import Argument, Option

from bitgraft.cli import options as opt
from bitgraft.cli.app import command, count, flag
from bitgraft.cli.images import UNKNOWN, identified, image_files
from bitgraft.cli.output import percent, show, show_images, table

if TYPE_CHECKING:
    from torch import Tensor

    from bitgraft.data.images import Images
    from bitgraft.data.preprocessing import Preprocessing
    from bitgraft.network import Network

Batch = TypeVar("Batch")
BATCH = 8  # images; larger batches are no faster on a CPU
READERS = 2  # threads that decode images
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
    from bitgraft.store import Store
    from bitgraft.workflows.prediction import class_names

    opened = Store(store)
    if not task and not all_tasks and len(opened.names()) > 1:
        found, errors = identified(images, store, device, classes=top, tasks=ROUTE)
        data = [{"image": path, **one} for path, one in found.items()]
        rows = _rows({path: {one["task"] or UNKNOWN: one["answers"] or [None]} for path, one in found.items()})
        show_images(as_json, data, errors, COLUMNS, rows)
        return
    names = opt.chosen_tasks(store, task, all_tasks)
    files, errors = image_files(images)
    net, answers = opt.network_with(store, names, device), {path: dict[str, Any]() for path in files}
    for name in names:
        readable = [path for path in files if path not in errors]
        for path, best in _run(net, name, class_names(net, name, opened.backbone), readable, top, engine, errors):
            answers[path][name] = best
    answers = {path: by_task for path, by_task in answers.items() if path not in errors}
    data = [{"image": path, "tasks": by_task} for path, by_task in answers.items()]
    show_images(as_json, data, errors, COLUMNS, _rows(answers))


def _run(
    net: "Network",
    name: str,
    classes: Sequence[str] | None,
    files: Sequence[str],
    top: int,
    engine: opt.EngineName,
    errors: dict[str, str],
) -> Iterator[Any]:
    """Yield each readable file with its likeliest classes; add the others to `errors`."""
    import torch

    from bitgraft.workflows.prediction import best, preprocessing_of, probabilities

    scores = _scores(net, name, engine, len(files))
    for read in _read(files, preprocessing_of(net, name), errors):
        for path, row in zip(read, probabilities(net, scores(torch.stack(list(read.values())))), strict=True):
            yield path, best(row, classes, top)


def _scores(net: "Network", name: str, engine: opt.EngineName, images: int) -> "Callable[[Tensor], Tensor]":
    """Return the function that computes the task's scores."""
    import torch

    from bitgraft.runtime.engines import Session
    from bitgraft.workflows.prediction import choose_engine

    scores, reason = choose_engine(net, name, engine, images, _threads())
    if isinstance(scores, Session):
        torch.set_num_threads(1)  # idle torch threads would compete with the session's own
    if reason:
        print(f"note: {name} runs on PyTorch: {reason}", file=sys.stderr)
    return scores


@cache
def _threads() -> int:
    """Return torch's number of threads at the first call, before `_scores` changes it."""
    import torch

    return torch.get_num_threads()


def _read(files: Sequence[str], wanted: "Preprocessing", errors: dict[str, str]) -> "Iterator[dict[str, Tensor]]":
    """Yield batches of preprocessed images; the next batch is decoded while one is in use."""
    from bitgraft.data.preprocessing import evaluation_tensor
    from bitgraft.errors import DataError

    def tensor(path: str) -> "Tensor | DataError":
        try:
            return evaluation_tensor(Path(path), wanted)
        except DataError as error:
            return error

    def batch(start: int) -> "list[tuple[str, Tensor | DataError]]":
        return [(path, tensor(path)) for path in files[start : start + BATCH]]

    for read in _ahead(batch, range(0, len(files), BATCH)):
        errors |= {path: str(error) for path, error in read if isinstance(error, DataError)}
        if good := {path: pixels for path, pixels in read if not isinstance(pixels, DataError)}:
            yield good


def _ahead(load: Callable[[int], Batch], starts: Sequence[int]) -> Iterator[Batch]:
    """Yield `load(start)` for each start, in order; threads load the next ones meanwhile."""
    with ThreadPoolExecutor(READERS) as readers:
        loading = [readers.submit(load, start) for start in starts[:READERS]]
        for later in [*starts[READERS:], *[None] * len(loading)]:
            yield loading.pop(0).result()
            if later is not None:
                loading.append(readers.submit(load, later))


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
    from bitgraft.store import Store
    from bitgraft.training.inputs import labelled

    classes = Store(store).archive(task).metadata.classes or ()
    opened = open_to_evaluate(data, split, seed=seed)
    images = labelled(opened, split, classes, f"task {task!r}", "--split {}")
    if union:
        _evaluate_union(store, task, images, batch, device, workers, data, as_json)
        return
    net, total = opt.network_with(store, [task], device), Counter(images.labels)
    right = _right(net, task, images, batch, workers, _scores(net, task, engine, len(images)))
    rows: list[dict[str, Any]] = [
        {"class": classes[label], "images": count, "correct": right[label], "accuracy": right[label] / count}
        for label, count in sorted(total.items())
    ]
    correct, count, accuracy = right.total(), total.total(), right.total() / total.total()
    report = {"data": data, "split": split, "task": task, "images": count, "correct": correct, "accuracy": accuracy}
    kind = "" if opened.train is opened.test else f"{split} "  # a folder without train/
    said = f"{task} on {data}: {percent(accuracy)} ({correct:,} of {count:,} {kind}images are right)"
    if not kind and not (Path(data) / "test").is_dir():
        remark = "all images of the folder were used: if the task was trained on them, this is not its test accuracy"
        print(f"note: {remark}", file=sys.stderr)
    if not by_class:
        show(as_json, report, said)
        return
    cells = [(row["class"], row["images"], row["correct"], percent(row["accuracy"])) for row in rows]
    show(as_json, report | {"by_class": rows}, said, table(["class", "images>", "right>", "accuracy>"], cells))


def _evaluate_union(
    store: str, task: str, images: "Images", batch: int, device: str, workers: int, data: str, as_json: bool
) -> None:
    """Print the accuracy when the task of an image is not given."""
    from bitgraft.store import Store
    from bitgraft.workflows.identification import evaluate_union

    net = opt.network_with(store, Store(store).names(), device)
    found = evaluate_union(net, task, images, batch=batch, workers=workers)
    said = (
        f"{task} on {data}, {len(images):,} images, among {len(net.classes()):,} classes of {found['tasks']} tasks: "
        f"accuracy {percent(found['accuracy'])}, with the task given {percent(found['told_accuracy'])}; "
        f"task right {percent(found['task_accuracy'])}; unknown {percent(found['unknown'])}"
    )
    show(as_json, {"data": data, "task": task, "images": len(images), **found}, said)


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
        read = _ahead(lambda at: default_collate(data.__getitems__(indices[at : at + batch])), indices[::batch])
        for pixels, labels in DataLoader(data, batch_size=batch, num_workers=workers) if workers else read:
            right.update(labels[scores(pixels).argmax(1) == labels].tolist())
    return right
