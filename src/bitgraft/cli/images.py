"""Image files on the command line, and the tasks they belong to."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitgraft.cli.options import network_with

if TYPE_CHECKING:
    from bitgraft.network import Network

UNKNOWN = "unknown"
BATCH = 16


def identified(
    images: Sequence[str], store: str, device: str, *, classes: int, tasks: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the likeliest tasks and classes of each image, and why the other images have none."""
    from bitgraft.store import Store
    from bitgraft.workflows.identification import find

    files, errors = image_files(images)
    net, found = network_with(store, Store(store).names(), device), dict[str, Any]()
    if left_out := [name for name, task in net.tasks.items() if task.description is None]:
        print(f"note: left out, without a description: {', '.join(left_out)}", file=sys.stderr)
    for batch in _prepared(net, files, errors):
        found |= zip(batch, find(net, list(batch.values()), top=classes, tasks=tasks), strict=True)
    return found, errors


def image_files(given: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return all image files, including those in the given folders, and an error for each folder without images."""
    from bitgraft.data.folders import SUFFIXES

    files, errors = [], {}
    for text in given:
        path = Path(text)
        found = [str(p) for p in sorted(path.rglob("*")) if p.suffix.lower() in SUFFIXES] if path.is_dir() else [text]
        if not found:
            errors[text] = f"there are no images in {text}"
        files += found
    return list(dict.fromkeys(files)), errors


def _prepared(net: "Network", files: Sequence[str], errors: dict[str, str]) -> Iterator[dict[str, Any]]:
    from bitgraft.errors import DataError
    from bitgraft.workflows.identification import prepare

    for start in range(0, len(files), BATCH):
        batch = {}
        for path in files[start : start + BATCH]:
            try:
                batch[path] = prepare(net, Path(path))
            except DataError as error:
                errors[path] = str(error)
        if batch:
            yield batch
