"""`bitgraft identify` and `describe`: which task an image belongs to, and what a task's images look like."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from bitgraft.cli import options as opt
from bitgraft.cli.app import command
from bitgraft.cli.output import FAILURE, megabytes, percent, show, table

if TYPE_CHECKING:
    from bitgraft.network import Network

UNKNOWN = "unknown"
BATCH = 16


@command("""
  bitgraft identify rose.jpg
  bitgraft identify photos/ --store my-store --json""")
def identify(
    images: Annotated[list[str], Argument(metavar="IMAGE", help="Image files, or folders of them.")],
    store: opt.StoreFolder = opt.STORE,
    top: Annotated[int, Option(min=1, help="How many tasks for each image.")] = 3,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
) -> None:
    """Say which task of a store an image belongs to, or that it is none of them.

    Tasks without a description are left out: `bitgraft describe` makes one.
    """
    found, faults = found_in(images, store, device, 1, top)
    rows = [
        (path if i == 0 else "", (one["task"] or UNKNOWN) if i == 0 else "", guess["task"], percent(guess["score"]))
        for path, one in found.items()
        for i, guess in enumerate(one["route"])
    ]
    data = [{"image": path, "task": one["task"], "route": one["route"]} for path, one in found.items()]
    report(as_json, data, faults, ["image", "task", "likeliest", "score>"], rows)


@command("""
  bitgraft describe flowers photos
  bitgraft describe gtsrb decathlon-1.0:gtsrb --store my-store""")
def describe(
    task: Annotated[str, Argument(metavar="TASK", help="A task in the store.")],
    data: Annotated[str, Argument(metavar="DATA", help="The data set that it was trained on, named as for training.")],
    store: opt.StoreFolder = opt.STORE,
    seed: Annotated[int, Option(min=0, help="The seed of training, if training split the data.")] = 0,
    workers: opt.Workers = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Let a task's file say what its images look like, so that an image can find its task.

    Training does this at its end; this is for older files. Nothing else in the file changes.
    """
    from bitgraft.data.splits import open_data
    from bitgraft.store import Store
    from bitgraft.workflows.describe_task import describe_in_store

    opened, splits = Store(store), open_data(data, seed=seed)
    opened.file(task)
    path, taken = describe_in_store(opened, opened.network().eval(), task, splits, workers=workers)
    said = f"{path} now describes its images, in {megabytes(taken)}"
    show(as_json, {"task": task, "file": str(path), "description_bytes": taken}, said)


def found_in(
    images: Sequence[str], store: str, device: str, top: int, tasks: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """What is found in every readable file, and the faults of the others."""
    from bitgraft.cli.predict import image_files
    from bitgraft.store import Store
    from bitgraft.workflows.identification import find

    files, faults = image_files(images)
    net, found = opt.network_with(store, Store(store).names(), device), dict[str, Any]()
    if silent := [name for name, task in net.tasks.items() if task.description is None]:
        print(f"note: left out, without a description: {', '.join(silent)}", file=sys.stderr)
    for batch in _prepared(net, files, faults):
        found |= zip(batch, find(net, list(batch.values()), top=top, tasks=tasks), strict=True)
    return found, faults


def report(as_json: bool, data: list[Any], faults: dict[str, str], columns: list[str], rows: list[Any]) -> None:
    """Print what was found, and each fault in one sentence; the exit code is then 1."""
    data = data + [{"image": path, "error": reason} for path, reason in faults.items()]
    show(as_json, data, *[table(columns, rows)] * bool(rows))
    for reason in faults.values():
        print(f"error: {reason}", file=sys.stderr)
    if faults:
        raise typer.Exit(FAILURE)


def _prepared(net: "Network", files: Sequence[str], faults: dict[str, str]) -> Iterator[dict[str, Any]]:
    from bitgraft.errors import DataError
    from bitgraft.workflows.identification import prepare

    batch = dict[str, Any]()
    for path in files:
        try:
            batch[path] = prepare(net, Path(path))
        except DataError as fault:
            faults[path] = str(fault)
        if len(batch) == BATCH:
            yield batch
            batch = {}
    if batch:
        yield batch
