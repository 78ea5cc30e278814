"""Check that data sets match their suite: image counts, classes and checksums."""

import hashlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bitgraft.data.images import Splits
from bitgraft.data.splits import open_data
from bitgraft.errors import DataError
from bitgraft.paper.bench.suite import SPLITS, Dataset


def problems(dataset: Dataset, root: Path) -> Iterator[str]:
    """Yield what is wrong with a data set, one sentence each."""
    for name, checksum in dataset.checksums.items():
        path, (kind, _, wanted) = root / name, checksum.partition(":")
        if path.exists():  # archives may be deleted once unpacked
            with path.open("rb") as file:
                digest = partial(hashlib.new, kind, usedforsecurity=False)
                found = hashlib.file_digest(file, digest).hexdigest()
            if found != wanted.lower():
                yield f"{path} has {kind} {found} instead of {wanted}; download it again"
    try:
        splits = open_data(dataset.data, root=root, val_share=dataset.val_share)
    except DataError as fault:
        yield str(fault).partition("; give a FOLDER")[0]
    else:
        yield from faults(dataset, splits)


def faults(dataset: Dataset, splits: Splits) -> Iterator[str]:
    """Yield the image and class counts that differ from the suite's."""
    for part, wanted in dataset.images.items():
        if (found := len(getattr(splits, part) or ())) != wanted:
            yield f"{part} has {found:,} images instead of {wanted:,}"
    if dataset.classes is not None and (found := len(splits.classes)) != dataset.classes:
        yield f"there are {found:,} classes instead of {dataset.classes:,}"


def layout(dataset: Dataset) -> str:
    """Return the files that are read, relative to the root."""
    if dataset.data.startswith(("package:", "torchvision:")):
        return dataset.data
    if found := re.fullmatch(r"(.+?):([\w.-]+)(:train\+val)?", dataset.data):
        kit, domain = found[1], found[2]
        return f"{kit}/annotations/{domain}_{{train,val,test}}.json, and the images they list, relative to {kit}"
    parts = ",".join(part for part in SPLITS if part in dataset.images) or "train,val,test"
    return f"{dataset.data}/{{{parts}}}/CLASS/IMAGE, or {dataset.data}/CLASS/IMAGE"


def unchecked(dataset: Dataset, root: Path) -> list[str]:
    """Return the files that have a published checksum but are missing."""
    return [file for file in dataset.checksums if not (root / file).exists()]
