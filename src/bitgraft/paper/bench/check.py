"""Holds data sets to what a suite says of them."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from bitgraft.data.images import Splits
from bitgraft.data.splits import open_data
from bitgraft.errors import DataError, SuiteError
from bitgraft.paper.bench.suite import SPLITS, Dataset, Suite

CHUNK = 1 << 20


def check_suite(suite: Suite, root: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """Each data set with what is wrong with it, a sentence each."""
    return ((dataset.name, missing(dataset, root)) for dataset in suite.datasets)


def missing(dataset: Dataset, root: Path) -> Iterator[str]:
    for file, published in dataset.checksums.items():
        yield from _checksum_fault(root / file, published)
    try:
        splits = open_data(dataset.data, root=root, val_share=dataset.val_share)
    except DataError as fault:
        yield str(fault).partition(". A data set is one of")[0]
        return
    yield from faults(dataset, splits)


def faults(dataset: Dataset, splits: Splits) -> Iterator[str]:
    """What is not as the suite says."""
    for part, wanted in dataset.images.items():
        images = getattr(splits, part)
        if (found := len(images) if images else 0) != wanted:
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
    parts = ",".join(part for part in SPLITS if part in dataset.images)
    return f"{dataset.data}/{{{parts or 'train,val,test'}}}/CLASS/IMAGE, or {dataset.data}/CLASS/IMAGE"


def unchecked(dataset: Dataset, root: Path) -> list[str]:
    """Files with a published checksum that are not there (any more)."""
    return [file for file in dataset.checksums if not (root / file).exists()]


def demand(dataset: Dataset, splits: Splits) -> None:
    if fault := next(faults(dataset, splits), None):
        raise SuiteError(f"data set {dataset.name}: {fault}")


def _checksum_fault(path: Path, published: str) -> Iterator[str]:
    kind, _, wanted = published.partition(":")
    if not path.exists():  # an archive need not be kept once it is unpacked
        return
    found = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    if found.hexdigest() != wanted.lower():
        yield f"the file {path} has the {kind} {found.hexdigest()}, and should have {wanted}: fetch it again"
