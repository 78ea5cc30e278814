"""The Visual Decathlon's score S, and scoring of submissions."""

import json
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bitgraft.errors import DataError

PERFECT = 1000.0


def decathlon_score(error: float, baseline: float) -> float:
    """Return S of one domain, α · max(0, Emax - E)² with Emax = 2 · baseline and α = 1000 / Emax²; errors in %."""
    worst = 2 * baseline
    return PERFECT * worst**-2 * max(0.0, worst - error) ** 2


@dataclass(frozen=True)
class Baselines:
    """Errors in per cent of networks fine-tuned on each domain alone."""

    errors: Mapping[str, float]
    source: str

    def error(self, domain: str) -> float:
        if domain not in self.errors:
            known = ", ".join(self.errors)
            raise DataError(f"there is no baseline error for {domain} in {self.source}; it has {known}")
        return self.errors[domain]


@dataclass(frozen=True)
class Labels:
    """The test labels of one domain."""

    domain: str
    answers: Mapping[int, int]
    """Category ids by image id."""
    categories: frozenset[int]


@dataclass(frozen=True)
class DomainScore:
    domain: str
    images: int
    correct: int
    baseline: float
    """Baseline error in per cent."""

    @property
    def accuracy(self) -> float:
        return self.correct / self.images

    @property
    def score(self) -> float:
        return decathlon_score(100 * (self.images - self.correct) / self.images, self.baseline)


@dataclass(frozen=True)
class Score:
    domains: tuple[DomainScore, ...]

    @property
    def total(self) -> float:
        return sum(one.score for one in self.domains)

    @property
    def accuracy(self) -> float:
        """Mean over the domains."""
        return sum(one.accuracy for one in self.domains) / len(self.domains)

    @property
    def absent(self) -> tuple[str, ...]:
        """Domains of the challenge that were not scored."""
        return tuple(name for name in domain_titles() if name not in {one.domain for one in self.domains})


@cache
def _challenge() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("decathlon.toml").read_text(encoding="utf-8"))


def challenge_baselines() -> Baselines:
    return Baselines(_challenge()["errors"], "the challenge's baselines")


def domain_titles() -> dict[str, str]:
    """Return the ten domains and their titles, in the order of the paper's tables."""
    return dict(_challenge()["titles"])


def read_baselines(file: Path) -> Baselines:
    """Read a TOML file with a table `errors`: the error of each domain in per cent."""
    with _reading("baseline errors in", file):
        errors = tomllib.loads(file.read_text("utf-8"))["errors"]
        if not all(type(error) in (int, float) and 0 < error <= 100 for error in errors.values()):
            raise ValueError(
                "each domain needs a line such as gtsrb = 2.47 in [errors], above 0 and at most 100 per cent"
            )
    return Baselines(errors, str(file))


def read_labels(folder: Path) -> list[Labels]:
    """Read every `<domain>_test.json` in a folder of annotations, in the order of the paper's tables."""
    suffix, order = "_test.json", list(domain_titles())
    files = {file.name.removesuffix(suffix): file for file in sorted(folder.glob(f"*{suffix}"))}
    if not files:
        raise DataError(f"there are no test labels in {folder}: the devkit calls them <domain>{suffix}")
    found = sorted(files, key=lambda name: order.index(name) if name in order else len(order))
    labels = [_read_labels(files[name], name) for name in found]
    homes: dict[int, str] = {}
    for one in labels:
        for image in one.answers:
            if homes.setdefault(image, one.domain) != one.domain:
                raise DataError(f"image id {image} is in the annotations of both {homes[image]} and {one.domain}")
    return labels


def _read_labels(file: Path, domain: str) -> Labels:
    with _reading("the annotations", file):
        content = json.loads(file.read_bytes())
        answers = {int(a["image_id"]): int(a["category_id"]) for a in content.get("annotations", ())}
        categories = frozenset(int(category["id"]) for category in content["categories"])
        images = {int(image["id"]) for image in content["images"]}
    if not images or images != set(answers):
        unlabelled = len(images - set(answers))
        raise DataError(f"{file} has no label for {unlabelled} of its {len(images)} images, so it cannot be scored")
    if unknown := set(answers.values()) - categories:
        raise DataError(f"{file}: {len(unknown)} labels are not among its categories; the first is {min(unknown)}")
    return Labels(domain, answers, categories)


def read_submission(file: Path) -> list[tuple[int, int]]:
    """Read a submission in the challenge's format: one flat list of {"image_id", "category_id"}."""
    with _reading("the submission", file):
        entries = json.loads(file.read_bytes())
    if not isinstance(entries, list):
        raise DataError(f'{file} is not a submission, a list of {{"image_id": ..., "category_id": ...}}')
    pairs = []
    for place, entry in enumerate(entries):
        image, category = (entry.get("image_id"), entry.get("category_id")) if isinstance(entry, dict) else (None, None)
        if type(image) is not int or type(category) is not int:  # isinstance accepts bool as int
            shown = json.dumps(entry)[:80]
            raise DataError(f"{file}: entry {place} lacks an integer image_id or category_id: {shown}")
        pairs.append((image, category))
    return pairs


def score_submission(
    pairs: Sequence[tuple[int, int]], labels: Sequence[Labels], baselines: Baselines | None = None
) -> Score:
    """Score predictions (image, category); every test image must have exactly one."""
    _check(pairs, {image: one.categories for one in labels for image in one.answers})
    baselines, given = baselines or challenge_baselines(), dict(pairs)
    domains = []
    for one in labels:
        correct = sum(given[image] == category for image, category in one.answers.items())
        domains.append(DomainScore(one.domain, len(one.answers), correct, baselines.error(one.domain)))
    return Score(tuple(domains))


def _check(pairs: Sequence[tuple[int, int]], categories: Mapping[int, Collection[int]]) -> None:
    """Raise DataError for predictions that cannot be scored; `categories` holds the allowed ones of each image."""
    times = Counter(image for image, _ in pairs)
    faults = {
        "answered more than once": [image for image, count in times.items() if count > 1],
        "missing": [image for image in categories if image not in times],
        "unknown": [image for image in times if image not in categories],
        "given a category_id that is not in the annotations": [i for i, c in pairs if c not in categories.get(i, [c])],
    }
    found = [
        f"{len(ids)} image id{' is' if len(ids) == 1 else 's are'} {fault} "
        f"({', '.join(map(str, ids[:3]))}{', ...' if len(ids) > 3 else ''})"
        for fault, ids in faults.items()
        if ids
    ]
    if found:
        raise DataError(
            "the submission needs one category_id of the annotations (not a class index from 0) per test image, but "
            + "; ".join(found)
        )


@contextmanager
def _reading(what: str, file: Path) -> Iterator[None]:
    """Report anything wrong with a file in one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        why = f"{fault} is missing" if isinstance(fault, KeyError) else getattr(fault, "strerror", None) or fault
        raise DataError(f"cannot read {what} {file}: {why}") from fault
