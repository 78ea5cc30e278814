"""Image files on the command line, and the tasks they belong to."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bitgraft.cli.options import network_with
from bitgraft.errors import DataError
from bitgraft.store import Store

UNKNOWN = "unknown"
BATCH = 16  # images to identify at once
READERS = 2  # threads that decode images
T = TypeVar("T")


def identified(
    images: Sequence[str], store: str, device: str, *, classes: int, tasks: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the likeliest tasks and classes of each image, and why the other images have none."""
    from bitgraft.workflows.identification import find, prepare

    files, errors = image_files(images)
    net, found = network_with(store, Store(store).names(), device), dict[str, Any]()
    if left_out := [name for name, task in net.tasks.items() if task.description is None]:
        print(f"note: left out, without a description: {', '.join(left_out)}", file=sys.stderr)
    for batch in read(files, partial(prepare, net), BATCH, errors):
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


def read(
    files: Sequence[str], prepare: Callable[[Path], T], size: int, errors: dict[str, str]
) -> Iterator[dict[str, T]]:
    """Yield the prepared images in batches, by path. Unreadable ones are added to `errors`."""

    def batch(start: int) -> tuple[dict[str, T], dict[str, str]]:
        images, unreadable = dict[str, T](), dict[str, str]()
        for path in files[start : start + size]:
            try:
                images[path] = prepare(Path(path))
            except DataError as error:
                unreadable[path] = str(error)
        return images, unreadable

    for images, unreadable in ahead(batch, range(0, len(files), size)):
        errors |= unreadable
        if images:
            yield images


def ahead(load: Callable[[int], T], starts: Sequence[int]) -> Iterator[T]:
    """Yield `load(start)` for each start, in order; threads load the next ones meanwhile."""
    with ThreadPoolExecutor(READERS) as readers:
        loading = [readers.submit(load, start) for start in starts[:READERS]]
        for later in [*starts[READERS:], *[None] * len(loading)]:
            yield loading.pop(0).result()
            if later is not None:
                loading.append(readers.submit(load, later))
