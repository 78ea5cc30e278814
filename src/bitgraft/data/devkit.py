"""The Visual Decathlon's devkit: images in data/<domain>/, COCO annotations in annotations/."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bitgraft.data.images import UNLABELLED, Images, Splits
from bitgraft.errors import DataError

FLIPS = {
    "aircraft": True,
    "cifar100": True,
    "daimlerpedcls": True,
    "dtd": False,
    "gtsrb": False,
    "imagenet12": True,
    "omniglot": False,
    "svhn": False,
    "ucf101": True,
    "vgg-flowers": True,
}
"""The ten domains, and whether the paper mirrors their training images."""


class Listing(NamedTuple):
    """One annotation file."""

    categories: tuple[tuple[int, str], ...]
    """Id and name of each class, in the order of the ids; a class's place here is its label."""
    images: Images


def default_flip(domain: str) -> bool:
    """Whether training images of this domain may be mirrored; yes for those that the decathlon does not know."""
    return FLIPS.get(domain.lower(), True)


def domains(root: Path) -> tuple[str, ...]:
    """The domains that have training annotations here."""
    suffix = "_train.json"
    return tuple(sorted(path.name.removesuffix(suffix) for path in (root / "annotations").glob(f"*{suffix}")))


def open_devkit(root: Path, domain: str, *, train_on_val: bool = False) -> Splits:
    """A domain; `train_on_val` joins train and val, for the final submission. Secret test labels are -1."""
    train, val = _required(root, domain, "train"), _required(root, domain, "val")
    test_file = next(
        (path for part in ("test", "test_stripped") if (path := annotation_file(root, domain, part)).is_file()), None
    )
    test = None if test_file is None else read_annotations(test_file, root)
    for part, listing in (("val", val), ("test", test)):
        if listing is not None and listing.categories != train.categories:
            raise DataError(f"{root}: the {part} annotations of {domain} list other categories than the train ones")
    return Splits(
        name=domain,
        classes=distinct([name for _, name in train.categories]),
        train=train.images + val.images if train_on_val else train.images,
        val=None if train_on_val else val.images,
        test=None if test is None else test.images,
        flip=default_flip(domain),
        category_ids=tuple(number for number, _ in train.categories),
    )


def annotation_file(root: Path, domain: str, part: str) -> Path:
    return root / "annotations" / f"{domain}_{part}.json"


def read_annotations(file: Path, root: Path) -> Listing:
    """A COCO file whose image paths start at `root`; every image must be there."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        categories = tuple(sorted((int(c["id"]), str(c["name"])) for c in content["categories"]))
        paths = {int(image["id"]): root / image["file_name"] for image in content["images"]}
        given = {int(a["image_id"]): int(a["category_id"]) for a in content.get("annotations", ())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise DataError(f"cannot read the annotations in {file}: {problem!r}") from problem
    labels = _labels(file, list(paths), given, {number: label for label, (number, _) in enumerate(categories)})
    _check_present(file, list(paths.values()))
    return Listing(categories, Images(tuple(paths.values()), labels, tuple(paths)))


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Names of classes must differ: one that comes again gets its number behind it."""
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    return tuple(f"{name} ({label})" if name in twice else name for label, name in enumerate(names))


def _required(root: Path, domain: str, part: str) -> Listing:
    file = annotation_file(root, domain, part)
    if not file.is_file():
        here = ", ".join(domains(root)) or "none"
        raise DataError(f"the annotation file {file} is missing; domains with annotations in {root}: {here}")
    return read_annotations(file, root)


def _labels(file: Path, ids: list[int], given: dict[int, int], numbers: dict[int, int]) -> tuple[int, ...]:
    if not given:
        return (UNLABELLED,) * len(ids)
    if unlabelled := [image for image in ids if image not in given]:
        raise DataError(f"{file}: {len(unlabelled)} of {len(ids)} images have no annotation, first {unlabelled[:3]}")
    if strange := sorted({given[image] for image in ids} - set(numbers)):
        raise DataError(f"{file}: {len(strange)} category ids are not among the categories, first {strange[:3]}")
    return tuple(numbers[given[image]] for image in ids)


def _check_present(file: Path, paths: list[Path]) -> None:
    """One look into each folder instead of one for each image."""
    present: dict[Path, set[str]] = {
        folder: set(os.listdir(folder)) if folder.is_dir() else set() for folder in {path.parent for path in paths}
    }
    if missing := [path for path in paths if path.name not in present[path.parent]]:
        few = ", ".join(map(str, missing[:3])) + (", ..." if len(missing) > 3 else "")
        raise DataError(f"{len(missing)} of the {len(paths)} images listed in {file} are missing: {few}")


def submission(answers: Sequence[tuple[Splits, Sequence[int]]]) -> list[dict[str, Any]]:
    """The challenge's format, one flat list over all domains: for each the splits, and a class for each test image."""
    rows = []
    for splits, predicted in answers:
        test, numbers = splits.test, splits.category_ids
        if test is None or test.ids is None or numbers is None or len(predicted) != len(test):
            raise DataError(f"{splits.name}: a submission needs a devkit's test images, and a class for each of them")
        rows += [
            {"image_id": image, "category_id": numbers[label]} for image, label in zip(test.ids, predicted, strict=True)
        ]
    return rows
