"""Holds data sets to what a suite says of them."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from bitgraft.bench.suite import Dataset, Suite
from bitgraft.data.images import Splits
from bitgraft.data.splits import open_data
from bitgraft.errors import DataError, SuiteError

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


def demand(dataset: Dataset, splits: Splits) -> None:
    if fault := next(faults(dataset, splits), None):
        raise SuiteError(f"data set {dataset.name}: {fault}")


def _checksum_fault(path: Path, published: str) -> Iterator[str]:
    kind, _, wanted = published.partition(":")
    if not path.is_file():
        yield f"the file {path} is missing"
        return
    found = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    if found.hexdigest() != wanted.lower():
        yield f"the file {path} has the {kind} {found.hexdigest()}, and should have {wanted}: fetch it again"
