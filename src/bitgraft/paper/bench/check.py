"""Compare data sets with what a suite says of them."""

import hashlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bitgraft.data.images import Splits
from bitgraft.data.splits import open_data
from bitgraft.errors import DataError
from bitgraft.paper.bench.suite import SPLITS, Dataset, Suite


def check_suite(suite: Suite, root: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """Each data set with what is wrong with it, one sentence each."""
    return ((dataset.name, _missing(dataset, root)) for dataset in suite.datasets)


def _missing(dataset: Dataset, root: Path) -> Iterator[str]:
    for name, published in dataset.checksums.items():
        path, (kind, _, wanted) = root / name, published.partition(":")
        if path.exists():  # an archive need not be kept once it is unpacked
            with path.open("rb") as file:
                digest = partial(hashlib.new, kind, usedforsecurity=False)
                found = hashlib.file_digest(file, digest).hexdigest()
            if found != wanted.lower():
                yield f"the file {path} has the {kind} {found}, and should have {wanted}: fetch it again"
    try:
        splits = open_data(dataset.data, root=root, val_share=dataset.val_share)
    except DataError as fault:
        yield str(fault).partition(". A data set is one of")[0]
    else:
        yield from faults(dataset, splits)


def faults(dataset: Dataset, splits: Splits) -> Iterator[str]:
    """Numbers of images and classes that are not as the suite says."""
    for part, wanted in dataset.images.items():
        if (found := len(getattr(splits, part) or ())) != wanted:
            yield f"{part} has {found:,} images, and must have {wanted:,}"
    if dataset.classes is not None and (found := len(splits.classes)) != dataset.classes:
        yield f"there are {found:,} classes, and must be {dataset.classes:,}"


def layout(dataset: Dataset) -> str:
    """Which files are read, below the root."""
    if dataset.data.startswith(("package:", "torchvision:")):
        return dataset.data
    if found := re.fullmatch(r"(.+?):([\w.-]+)(:train\+val)?", dataset.data):
        kit, domain = found[1], found[2]
        return f"{kit}/annotations/{domain}_{{train,val,test}}.json, and below {kit} the images that they list"
    parts = ",".join(part for part in SPLITS if part in dataset.images) or "train,val,test"
    return f"{dataset.data}/{{{parts}}}/CLASS/IMAGE, or {dataset.data}/CLASS/IMAGE"


def unchecked(dataset: Dataset, root: Path) -> list[str]:
    """Files with a published checksum that are not there (any more)."""
    return [file for file in dataset.checksums if not (root / file).exists()]
