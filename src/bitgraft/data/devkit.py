"""The Visual Decathlon's devkit: images in data/<domain>/, COCO annotations in annotations/."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitgraft.data.images import UNLABELLED, Images, Splits, distinct, few
from bitgraft.errors import DataError

UNFLIPPED = frozenset({"dtd", "gtsrb", "omniglot", "svhn"})
"""The domains that the paper does not flip in training."""


def domains(root: Path) -> tuple[str, ...]:
    """Return the domains that have training annotations."""
    suffix = "_train.json"
    return tuple(sorted(path.name.removesuffix(suffix) for path in (root / "annotations").glob(f"*{suffix}")))


def open_devkit(root: Path, domain: str, *, train_on_val: bool = False) -> Splits:
    """Open a domain. `train_on_val` adds val to train, for the final submission. Secret test labels are -1."""
    files = {part: root / "annotations" / f"{domain}_{part}.json" for part in ("train", "val", "test", "test_stripped")}
    parts = ["train", "val", *[part for part in ("test", "test_stripped") if files[part].is_file()][:1]]
    for part in parts:
        if not files[part].is_file():
            known = ", ".join(domains(root)) or "none"
            raise DataError(f"the annotation file {files[part]} is missing; {root} has annotations of {known}")
    read = {part: read_annotations(files[part], root) for part in parts}
    categories = read["train"][0]
    for part, (listed, _) in read.items():
        if listed != categories:
            raise DataError(f"{root}: the {part} and train annotations of {domain} list different categories")
    train, val, *test = (images for _, images in read.values())
    return Splits(
        name=domain,
        classes=distinct([name for _, name in categories]),
        train=train + val if train_on_val else train,
        val=None if train_on_val else val,
        test=test[0] if test else None,
        flip=domain.lower() not in UNFLIPPED,
        category_ids=tuple(number for number, _ in categories),
    )


def read_annotations(file: Path, root: Path) -> tuple[list[tuple[int, str]], Images]:
    """Read a COCO file whose image paths are relative to `root`.

    Returns the sorted ids and names of the categories, and the images. A label is an index into the categories.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        categories = sorted((int(c["id"]), str(c["name"])) for c in content["categories"])
        paths = {int(image["id"]): root / image["file_name"] for image in content["images"]}
        given = {int(a["image_id"]): int(a["category_id"]) for a in content.get("annotations", ())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise DataError(f"cannot read the annotations in {file}: {problem!r}") from problem
    labels = {number: label for label, (number, _) in enumerate(categories)}
    _check(file, paths, given, labels)
    found = tuple(labels[given[image]] if given else UNLABELLED for image in paths)
    return categories, Images(tuple(paths.values()), found, tuple(paths))


def _check(file: Path, paths: dict[int, Path], given: dict[int, int], labels: dict[int, int]) -> None:
    """Raise unless every image exists and, if any image is annotated, has a known category."""
    if given and (unlabelled := [image for image in paths if image not in given]):
        raise DataError(f"{file}: {len(unlabelled)} of {len(paths)} images have no annotation, first {unlabelled[:3]}")
    if unknown := sorted({given[image] for image in paths if image in given} - set(labels)):
        raise DataError(f"{file}: {len(unknown)} category ids are not among the categories, first {unknown[:3]}")
    folders = {path.parent for path in paths.values()}  # listing them is faster than checking each file
    present = {folder: set(os.listdir(folder)) if folder.is_dir() else set() for folder in folders}
    if missing := [path for path in paths.values() if path.name not in present[path.parent]]:
        raise DataError(f"{len(missing)} of the {len(paths)} images listed in {file} are missing: {few(missing, 3)}")


def submission(answers: Sequence[tuple[Splits, Sequence[int]]]) -> list[dict[str, Any]]:
    """Return a submission in the challenge's format, given each domain's splits and predicted test labels."""
    rows = []
    for splits, predicted in answers:
        test, numbers = splits.test, splits.category_ids
        if test is None or test.ids is None or numbers is None or len(predicted) != len(test):
            raise DataError(f"{splits.name}: a submission needs the devkit's test images and one class per image")
        rows += [
            {"image_id": image, "category_id": numbers[label]} for image, label in zip(test.ids, predicted, strict=True)
        ]
    return rows
