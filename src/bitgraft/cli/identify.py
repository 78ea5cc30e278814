"""`bitgraft identify` and `describe`: find the task of an image, and describe a task's images."""

from typing import Annotated

from typer import Argument

from bitgraft.cli import options as opt
from bitgraft.cli.app import command, count
from bitgraft.cli.images import UNKNOWN, identified
from bitgraft.cli.output import megabytes, percent, show, show_images
from bitgraft.store import Store


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

    splits, path = open_data(data, seed=seed), Store(store).file(task)
    net = opt.network_with(store, [task])
    size = describe_task(net, task, splits, workers=workers).nbytes
    net.save_task(task, path)
    report = {"task": task, "file": str(path), "description_bytes": size}
    show(as_json, report, f"added a description of {megabytes(size)} to {path}")
