"""The hard case: one domain split by its classes into five tasks of method `full`, each trained by itself."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.identify_data import Collection, Domain
from bitgraft.format.description import Description
from bitgraft.paper.report.records import read_records
from bitgraft.runtime.identify import scorers
from bitgraft.runtime.identify.decision import TEMPERATURE, WEIGHT
from bitgraft.runtime.identify.fitting import calibrated, fit_description, rank_for

SPLIT = {"cub": "birds", "cars": "cars", "omniglot": "Omniglot"}
PARTS = 5
JOINT = Path("docs/results/domains/records.jsonl")
Split = tuple[Tensor, Description]
"""A task's logits for all test images of its domain, and its description."""


def split_tables(collection: Collection, steps: int) -> Iterator[str]:
    yield (
        "| domain | task right % | classes right, last % | average over 1 to 5 tasks % | nearest class mean, last % | "
        "average % | one task with all classes % | task told % |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, title in SPLIT.items():
        domain = collection.domain(name)
        per = len(domain.classes) // PARTS
        tasks = [split_task(collection, domain, range(i * per, (i + 1) * per), steps) for i in range(PARTS)]
        cells = " | ".join(f"{100 * value:.1f}" for value in measured(domain, tasks, per))
        yield f"| {title}, {PARTS} x {per} | {cells} |"


def split_task(collection: Collection, domain: Domain, classes: range, steps: int) -> Split:
    def rows(part: str) -> Tensor:
        return (domain.labels[part] >= classes.start) & (domain.labels[part] < classes.stop)

    logits = collection.split_logits(domain.name, classes, steps)
    features, labels = domain.features["train"][rows("train")], domain.labels["train"][rows("train")]
    rank = rank_for(features.shape[1], len(classes), 0)
    fitted = fit_description(features, labels - classes.start, len(classes), rank)
    return logits["test"].float(), calibrated(fitted, domain.features["val"][rows("val")], logits["val"][rows("val")])


def measured(domain: Domain, tasks: Sequence[Split], per: int) -> list[float]:
    """Return the cells of a row, in the order of the header."""
    features, labels = domain.features["train"], domain.labels["train"]
    means = F.normalize(torch.stack([features[labels == c].mean(0) for c in range(per * PARTS)]), dim=1)
    ours, nearest, right, told = [], [], 0.0, 0.0
    for known in range(1, PARTS + 1):
        seen = domain.labels["test"] < known * per
        features, truth = domain.features["test"][seen], domain.labels["test"][seen]
        union, right, told = classified(
            [(logits[seen], about) for logits, about in tasks[:known]], features, truth, per
        )
        ours.append(union)
        nearest.append(_share((features @ means[: known * per].T).argmax(1) == truth))
    joint = [r for r in read_records(JOINT) if (r.row, r.dataset) == ("full", domain.name)]
    ceiling = mean(record.selected.test_accuracy or 0.0 for record in joint)
    return [right, ours[-1], mean(ours), nearest[-1], mean(nearest), ceiling, told]


def classified(tasks: Sequence[Split], features: Tensor, truth: Tensor, per: int) -> tuple[float, float, float]:
    """Return the accuracies over all classes, of the task, and of the class with the task given."""
    route = scorers.Likelihood([about for _, about in tasks])(features)
    for i, (logits, about) in enumerate(tasks):
        route[:, i] += WEIGHT * scorers.certainty(scorers.energy(logits), about.calibrated)
    which = (route / TEMPERATURE).log_softmax(1)
    every = torch.cat([logits.log_softmax(1) + which[:, i, None] for i, (logits, _) in enumerate(tasks)], 1)
    own = torch.stack([logits.argmax(1) for logits, _ in tasks], 1).gather(1, (truth // per)[:, None])[:, 0]
    return _share(every.argmax(1) == truth), _share(route.argmax(1) == truth // per), _share(own == truth % per)


def _share(right: Tensor) -> float:
    return float(right.float().mean())
