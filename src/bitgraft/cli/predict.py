"""`bitgraft predict` and `eval`: the answers of tasks in a store to images, and how many of them are right."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from typer import Argument, Option

from bitgraft.cli import options as opt
from bitgraft.cli.app import command
from bitgraft.cli.output import FAILURE, percent, show, table

if TYPE_CHECKING:
    from torch import Tensor

    from bitgraft.data.images import Images
    from bitgraft.data.preprocessing import Preprocessing
    from bitgraft.network import Network

Made = TypeVar("Made")
BATCH = 8  # images at a time: on a CPU more are no faster
READERS = 2  # threads that decode images
EVALUATE = """
  bitgraft eval photos --task flowers
  bitgraft eval photos --task flowers --split val --by-class --json"""


@command("""
  bitgraft predict rose.jpg
  bitgraft predict rose.jpg --task flowers
  bitgraft predict photos/ --all-tasks --top 1 --json
  bitgraft predict rose.jpg --task original""")
def predict(
    images: Annotated[list[str], Argument(metavar="IMAGE", help="Image files, or folders of them.")],
    task: opt.TaskNames = None,
    all_tasks: opt.AllTasks = False,
    store: opt.StoreFolder = opt.STORE,
    top: Annotated[int, Option(min=1, help="How many classes for each image.")] = 5,
    device: opt.Device = "cpu",
    engine: opt.Engine = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Classify images with one task, several or all; without a name, with the task that each belongs to.

    The backbone's own task is `original`. A file that cannot be read is named, and the exit code is then 1.
    """
    if not task and not all_tasks and opt.several_tasks(store):
        _find_and_answer(images, store, device, top, as_json)
        return
    names = opt.chosen_tasks(store, task, all_tasks)
    files, faults = image_files(images)
    net, answers = opt.network_with(store, names, device), {path: dict[str, Any]() for path in files}
    for name in names:
        for path, best in _run(net, name, [path for path in files if path not in faults], top, engine, faults):
            answers[path][name] = best
    answers = {path: by_task for path, by_task in answers.items() if path not in faults}
    good = [{"image": path, "tasks": by_task} for path, by_task in answers.items()]
    data = good + [{"image": path, "error": reason} for path, reason in faults.items()]
    show(as_json, data, *[table(["image", "task", "class", "probability>"], _rows(answers))] * bool(answers))
    for reason in faults.values():
        print(f"error: {reason}", file=sys.stderr)
    if faults:
        raise typer.Exit(FAILURE)


def image_files(given: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Every image, folders searched; and the folders without any."""
    from bitgraft.data.folders import SUFFIXES

    files, faults = [], {}
    for text in given:
        path = Path(text)
        found = [str(p) for p in sorted(path.rglob("*")) if p.suffix.lower() in SUFFIXES] if path.is_dir() else [text]
        if not found:
            faults[text] = f"there is no image in {text}"
        files += found
    return list(dict.fromkeys(files)), faults


def _find_and_answer(images: list[str], store: str, device: str, top: int, as_json: bool) -> None:
    """Each image's answers from the task that it belongs to."""
    from bitgraft.cli.identify import UNKNOWN, found_in, report

    found, faults = found_in(images, store, device, top, 3)
    data = [{"image": path, **one} for path, one in found.items()]
    rows = _rows({path: {one["task"] or UNKNOWN: one["answers"] or [None]} for path, one in found.items()})
    report(as_json, data, faults, ["image", "task", "class", "probability>"], rows)


def _run(
    net: "Network", name: str, files: Sequence[str], top: int, engine: opt.EngineName, faults: dict[str, str]
) -> Iterator[Any]:
    """Each readable file with its likeliest classes; the others become faults."""
    import torch

    from bitgraft.workflows.prediction import best, preprocessing_of, probabilities

    scores = _scores(net, name, engine, len(files))
    classes = None if name == net.original else net.tasks[name].classes
    for read in _read(files, preprocessing_of(net, name), faults):
        for path, row in zip(read, probabilities(scores(torch.stack(list(read.values())))), strict=True):
            yield path, best(row, classes, top)


def _scores(net: "Network", name: str, engine: opt.EngineName, images: int) -> "Callable[[Tensor], Tensor]":
    import torch

    from bitgraft.workflows.prediction import choose_engine, torch_scores

    scores, reason = choose_engine(net, name, engine, images, _threads())
    if getattr(scores, "func", None) is not torch_scores:
        torch.set_num_threads(1)  # the session has threads of its own: those of torch would wait for work beside them
    if reason:
        print(f"note: {name} runs on PyTorch: {reason}", file=sys.stderr)
    return scores


@cache
def _threads() -> int:
    """What torch has at first: it gets one thread once a session has these."""
    import torch

    return torch.get_num_threads()


def _read(files: Sequence[str], wanted: "Preprocessing", faults: dict[str, str]) -> "Iterator[dict[str, Tensor]]":
    """Batches of readable files as the network takes them. The next batch is decoded while one is used."""
    from bitgraft.data.preprocessing import evaluation_tensor
    from bitgraft.errors import DataError

    def tensor(path: str) -> "Tensor | DataError":
        try:
            return evaluation_tensor(Path(path), wanted)
        except DataError as fault:
            return fault

    def batch(start: int) -> "list[tuple[str, Tensor | DataError]]":
        return [(path, tensor(path)) for path in files[start : start + BATCH]]

    for read in _ahead(batch, range(0, len(files), BATCH)):
        faults |= {path: str(fault) for path, fault in read if isinstance(fault, DataError)}
        if good := {path: pixels for path, pixels in read if not isinstance(pixels, DataError)}:
            yield good


def _ahead(load: Callable[[int], Made], starts: Sequence[int]) -> Iterator[Made]:
    """What `load` makes of each, in order; the next ones are made while one is used."""
    with ThreadPoolExecutor(READERS) as readers:
        made = [readers.submit(load, start) for start in starts[:READERS]]
        for later in [*starts[READERS:], *[None] * len(made)]:
            yield made.pop(0).result()
            if later is not None:
                made.append(readers.submit(load, later))


def _rows(answers: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """The image and the task are named on their first line only."""
    rows = []
    for path, by_task in answers.items():
        for t, (task, best) in enumerate(by_task.items()):
            for b, answer in enumerate(best):
                head = (path if t == b == 0 else "", task if b == 0 else "")
                rows.append((*head, *((answer["class"], percent(answer["probability"])) if answer else ("", ""))))
    return rows


@command(EVALUATE, name="eval")
def evaluate(
    data: Annotated[str, Argument(metavar="DATA", help="A data set, named as for `bitgraft train`.")],
    task: opt.TaskName,
    store: opt.StoreFolder = opt.STORE,
    split: Annotated[Literal["train", "val", "test"], Option(help="Which of its images.")] = "test",
    by_class: Annotated[bool, Option("--by-class", help="Also for each class.")] = False,
    union: Annotated[bool, Option("--union", help="Among the classes of all tasks, the task not being told.")] = False,
    batch: Annotated[int, Option(min=1, help="Images at a time.")] = 128,
    seed: Annotated[int, Option(min=0, help="The seed of training, if training split the data.")] = 0,
    workers: opt.Workers = 0,
    device: opt.Device = "cpu",
    engine: opt.Engine = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Measure a task's accuracy on labelled images.

    Classes are matched by name; the data may have fewer than the task.
    """
    from bitgraft.data.splits import open_data
    from bitgraft.store import Store
    from bitgraft.workflows.train_task import labelled

    classes = Store(store).archive(task).metadata.classes or ()
    images = labelled(open_data(data, seed=seed), split, classes, f"task {task!r}")
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
    said = f"{task} on {data}: {percent(accuracy)} ({correct:,} of {count:,} {split} images are right)"
    if not by_class:
        show(as_json, report, said)
        return
    cells = [(row["class"], row["images"], row["correct"], percent(row["accuracy"])) for row in rows]
    show(as_json, report | {"by_class": rows}, said, table(["class", "images>", "right>", "accuracy>"], cells))


def _evaluate_union(
    store: str, task: str, images: "Images", batch: int, device: str, workers: int, data: str, as_json: bool
) -> None:
    """How often the task and the class are right if nobody says which task it is."""
    from bitgraft.store import Store
    from bitgraft.workflows.identification import evaluate_union

    net = opt.network_with(store, Store(store).names(), device)
    found = evaluate_union(net, task, images, batch=batch, workers=workers)
    said = (
        f"{task} on {data}, {len(images):,} images, among {len(net.classes()):,} classes of {found['tasks']} tasks: "
        f"class right {percent(found['accuracy'])}, with the task told {percent(found['told_accuracy'])}; "
        f"task right {percent(found['task_accuracy'])}; called unknown {percent(found['unknown'])}"
    )
    show(as_json, {"data": data, "task": task, "images": len(images), **found}, said)


def _right(
    net: "Network", task: str, images: "Images", batch: int, workers: int, scores: "Callable[[Tensor], Tensor]"
) -> "Counter[int]":
    """How many images of each class the task gets right."""
    from torch.utils.data import DataLoader, default_collate

    from bitgraft.data.dataset import ImageDataset
    from bitgraft.runtime.engines import Session
    from bitgraft.workflows.prediction import preprocessing_of
    from bitgraft.workflows.train_task import one_sentence

    data, right = ImageDataset(images, preprocessing_of(net, task)), Counter[int]()
    with one_sentence():
        if isinstance(scores, Session):
            batch = min(batch, BATCH)
        places = range(len(data))
        read = _ahead(lambda start: default_collate(data.__getitems__(places[start : start + batch])), places[::batch])
        for pixels, labels in DataLoader(data, batch_size=batch, num_workers=workers) if workers else read:
            right.update(labels[scores(pixels).argmax(1) == labels].tolist())
    return right
