"""`bitgraft predict`: the answers of tasks in a store to images."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from bitgraft.cli.options import STORE, AllTasks, AsJson, StoreFolder, TaskNames, chosen_tasks, network_with
from bitgraft.cli.output import FAILURE, percent, show, table

if TYPE_CHECKING:
    from bitgraft.network import Network

BATCH = 32
TRY = """
  bitgraft predict rose.jpg --task flowers
  bitgraft predict photos/ --all-tasks --top 1 --json
  bitgraft predict rose.jpg --task original"""


def predict(
    images: Annotated[list[str], Argument(metavar="IMAGE", help="Image files, or folders of them.")],
    task: TaskNames = None,
    all_tasks: AllTasks = False,
    store: StoreFolder = STORE,
    top: Annotated[int, Option(min=1, help="How many classes for each image.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Classify images with one task, several or all.

    The backbone's own task is `original`. A file that cannot be read is named, and the exit code is then 1.
    """
    names = chosen_tasks(store, task, all_tasks)
    files, faults = _files(images)
    net = network_with(store, names)
    answers: dict[str, dict[str, Any]] = {path: {} for path in files}
    for name in names:
        for path, best in _run(net, name, [path for path in files if path not in faults], top, faults):
            answers[path][name] = best
    answers = {path: by_task for path, by_task in answers.items() if path not in faults}
    good = [{"image": path, "tasks": by_task} for path, by_task in answers.items()]
    data = good + [{"image": path, "error": reason} for path, reason in faults.items()]
    show(as_json, data, *[table(["image", "task", "class", "probability>"], _rows(answers))] * bool(answers))
    for reason in faults.values():
        print(f"error: {reason}", file=sys.stderr)
    if faults:
        raise typer.Exit(FAILURE)


def _files(given: Sequence[str]) -> tuple[list[str], dict[str, str]]:
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


def _run(net: "Network", name: str, files: Sequence[str], top: int, faults: dict[str, str]) -> Iterator[Any]:
    """Each readable file with its likeliest classes; the others become faults."""
    import torch

    from bitgraft.data.preprocessing import evaluation_tensor
    from bitgraft.errors import DataError
    from bitgraft.serving.predictions import best, preprocessing_of, probabilities

    preprocessing = preprocessing_of(net, name)
    classes = None if name == net.original else net.tasks[name].classes
    for start in range(0, len(files), BATCH):
        read = {}
        for path in files[start : start + BATCH]:
            try:
                read[path] = evaluation_tensor(Path(path), preprocessing)
            except DataError as fault:
                faults[path] = str(fault)
        if read:
            for path, scores in zip(read, probabilities(net, name, torch.stack(list(read.values()))), strict=True):
                yield path, best(scores, classes, top)


def _rows(answers: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """The image and the task are named on their first line only."""
    rows = []
    for path, by_task in answers.items():
        for t, (task, best) in enumerate(by_task.items()):
            for b, answer in enumerate(best):
                head = (path if t == b == 0 else "", task if b == 0 else "")
                rows.append((*head, answer["class"], percent(answer["probability"])))
    return rows
