"""Score submissions with the paper's accuracies (Table 4) on the challenge's test labels, and compare with Table 3.

    python benchmarks/published_scores.py --labels LABELS --out docs/results/decathlon-scores.md

LABELS is the folder with the ten <domain>_test.json. Takes five seconds.
"""

import argparse
import json
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import floor
from pathlib import Path

from bitgraft.paper.report.results import PublishedRow, published_tables
from bitgraft.paper.scores import (
    Labels,
    Score,
    challenge_baselines,
    decathlon_score,
    domain_titles,
    read_labels,
    read_submission,
    score_submission,
)

HALF = 0.05  # rounding error of a printed accuracy, in per cent
HALF_POINT = 0.5  # rounding error of a printed S


@dataclass(frozen=True)
class Cell:
    """One domain of one row: the printed numbers, and the range of S that the printed accuracy allows."""

    domain: str
    images: int
    accuracy: float
    printed: float
    low: float
    high: float

    @property
    def fits(self) -> bool:
        return self.low - HALF_POINT <= self.printed <= self.high + HALF_POINT

    def scores(self) -> dict[int, float]:
        """Return S for every number of correct answers close to the printed accuracy."""
        return {
            right: _score(right, self.images, self.domain)
            for right in range(self.images + 1)
            if abs(100 * right / self.images - self.accuracy) <= 2 * HALF
        }

    def counts(self) -> list[int]:
        """Return the numbers of correct answers that give both printed numbers."""
        return [
            right
            for right, score in self.scores().items()
            if self._rounds(right) and abs(score - self.printed) <= HALF_POINT
        ]

    def readings(self) -> list[str]:
        """Return other explanations of both numbers: S truncated instead of rounded, or accuracy rounded twice."""
        found = []
        for right, score in self.scores().items():
            told = f"{right:,} of {self.images:,} correct: {100 * right / self.images:.3f} %, S = {score:.2f}"
            if self._rounds(right) and floor(score) == self.printed:
                found.append(f"{told}, truncated to {self.printed:.0f}")
            if self._rounds_twice(right) and abs(score - self.printed) <= HALF_POINT:
                found.append(f"{told}, if the accuracy was rounded to two decimals and then to one")
        return found

    def _rounds(self, right: int) -> bool:
        return abs(100 * right / self.images - self.accuracy) <= HALF

    def _rounds_twice(self, right: int) -> bool:
        hundredths = floor(10_000 * right / self.images + 0.5)  # halves round up
        return (hundredths + 5) // 10 == round(10 * self.accuracy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    labels = read_labels(args.labels)
    tables = {table.form: table for table in published_tables()}
    rows = list(zip(tables["decathlon"].rows, tables["scores"].rows, strict=True))
    page = _page(labels, [(a, s, _scored(a, labels), _cells(a, s, labels)) for a, s in rows])
    if args.out is None:
        print(page, end="")
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page, encoding="utf-8")


def _scored(row: PublishedRow, labels: list[Labels]) -> Score:
    """Write a submission with this row's accuracies, then read and score it as a user would."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        file.write_text(json.dumps([answer for one in labels for answer in _answers(one, row.values[one.domain])]))
        return score_submission(read_submission(file), labels)


def _answers(labels: Labels, accuracy: float) -> Iterable[Mapping[str, int]]:
    """Yield the correct category for the first images, and the next one in the list for the rest."""
    order = sorted(labels.categories)
    other = dict(zip(order, [*order[1:], order[0]], strict=True))
    right = round(len(labels.answers) * accuracy / 100)
    for place, (image, category) in enumerate(labels.answers.items()):
        yield {"image_id": image, "category_id": category if place < right else other[category]}


def _cells(accuracies: PublishedRow, scores: PublishedRow, labels: list[Labels]) -> list[Cell]:
    errors = challenge_baselines().errors
    return [
        Cell(
            domain=one.domain,
            images=len(one.answers),
            accuracy=accuracies.values[one.domain],
            printed=scores.values[one.domain],
            low=decathlon_score(100 - accuracies.values[one.domain] + HALF, errors[one.domain]),
            high=decathlon_score(100 - accuracies.values[one.domain] - HALF, errors[one.domain]),
        )
        for one in labels
    ]


def _score(right: int, images: int, domain: str) -> float:
    return decathlon_score(100 - 100 * right / images, challenge_baselines().errors[domain])


def _page(labels: list[Labels], rows: list[tuple[PublishedRow, PublishedRow, Score, list[Cell]]]) -> str:
    titles = domain_titles()
    images = sum(len(one.answers) for one in labels)
    lines = [
        "# The paper's decathlon scores, from its accuracies",
        "",
        _paragraph(
            "This page checks `bitgraft score` against the paper's decathlon scores. For each row of its Table 4 we "
            f"built a submission with those accuracies on the challenge's {images:,} test labels, as closely as a "
            "whole number of images allows, and scored it with the challenge's baseline errors. Table 4 "
            "has one decimal, so S is only known within an interval: lowest and highest move each "
            "accuracy down and up by 0.05 points. Run on 2026-11-15 with"
        ),
        "",
        "    python benchmarks/published_scores.py --labels LABELS --out docs/results/decathlon-scores.md",
        "",
        "| row | S of the submission | lowest | highest | printed | within | domains within |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for accuracies, printed, score, some in rows:
        low, high = sum(cell.low for cell in some), sum(cell.high for cell in some)
        whole = printed.whole or 0.0
        within = "yes" if low - HALF_POINT <= whole <= high + HALF_POINT else "**no**"
        lines.append(
            f"| {accuracies.title} | {score.total:.1f} | {low:.1f} | {high:.1f} | {whole:.0f} | {within} "
            f"| {sum(cell.fits for cell in some)} of {len(some)} |"
        )
    lines += ["", "## By domain", "", "S of the submission, with the paper's value in parentheses.", ""]
    lines += [f"| row | {' | '.join(titles.values())} |", f"|---|{'---:|' * len(titles)}"]
    for accuracies, _, score, some in rows:
        shown = [
            f"{one.score:.1f} ({cell.printed:.0f})" + ("" if cell.fits else " †")
            for one, cell in zip(score.domains, some, strict=True)
        ]
        lines.append(f"| {accuracies.title} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *_remarks(rows)]) + "\n"


def _remarks(rows: list[tuple[PublishedRow, PublishedRow, Score, list[Cell]]]) -> list[str]:
    cells = [(accuracies.title, cell) for accuracies, _, _, some in rows for cell in some]
    odd = [(title, cell) for title, cell in cells if not cell.counts()]
    lines = [
        _paragraph(
            f"{sum(cell.fits for _, cell in cells)} of {len(cells)} cells are within their interval († is outside). "
            f"For {len(cells) - len(odd)} cells, some whole number of correct answers gives both the printed accuracy "
            "and the printed S. The table below lists what would explain the others. The counts are not published, so "
            "the actual cause is unknown, and neither rounding nor truncation explains every row."
        ),
        "",
        "| row | domain | accuracy | S | would explain both |",
        "|---|---|---:|---:|---|",
    ]
    for title, cell in odd:
        domain = domain_titles()[cell.domain] + ("" if cell.fits else " †")
        told = "; or ".join(cell.readings()) or "nothing found"
        lines.append(f"| {title} | {domain} | {cell.accuracy} | {cell.printed:.0f} | {told} |")
    lines.append("")
    for _, printed, _, _ in rows:
        summed = sum(printed.values.values())
        if printed.whole is not None and summed != printed.whole:
            told = f"the printed cells add up to {summed:.0f}, the printed total is {printed.whole:.0f}"
            lines += [f"{printed.title}: {told}.", ""]
    return [
        *lines,
        _paragraph(
            "The baseline errors are those of the challenge's own Finetune row, with two decimals "
            "(`src/bitgraft/paper/decathlon.toml`). That row differs from 2500 here only because Table 4 prints one "
            "decimal."
        ),
    ]


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 120)


if __name__ == "__main__":
    main()
