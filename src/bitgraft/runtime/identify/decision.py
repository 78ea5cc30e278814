"""Rank the tasks for an image, run the best few, and decide on one or none of them."""

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.errors import TaskError
from bitgraft.format.description import Description
from bitgraft.runtime.identify.features import PlainFeatures
from bitgraft.runtime.identify.scorers import Likelihood, certainty, energy, typicality
from bitgraft.task import Task

RUNS = 3  # tasks to run per image
WEIGHT = 40.0  # nats of log-likelihood that one standard deviation of a task's energy is worth
TEMPERATURE = 20.0  # nats; features are correlated, so their likelihoods are overconfident


class Identified(NamedTuple):
    """The task of each image, and the outputs of the tasks that ran."""

    tasks: list[str | None]
    """The task's name, or None if the image resembles no task."""
    scores: Tensor
    """(N, tasks): the probability of each task, given that it is one of them."""
    names: tuple[str, ...]
    """The tasks in the order of the scores."""
    margins: Tensor
    """(N): the best task's typicality minus its threshold. Negative margins mean None."""
    likeliest: list[str]
    """The most likely task of each image, known or not."""
    outputs: dict[str, tuple[list[int], Tensor]]
    """For each task that ran, the rows of its images and its logits for them."""


class Identifier:
    """Decides on tasks. It caches the stacked descriptions while the tasks stay the same."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy = anatomy
        self._likelihood = lru_cache(maxsize=1)(Likelihood)

    @cached_property
    def features(self) -> PlainFeatures:
        return PlainFeatures(self._anatomy)

    @torch.no_grad()
    def decide(
        self, tasks: Mapping[str, Task], images: Mapping[str, Tensor], run: Callable[[str, Tensor], Tensor]
    ) -> Identified:
        """Decide on each image's task.

        `images` has one batch per task. Tasks with the same preprocessing share one tensor. `run` returns a task's
        output.
        """
        descriptions = described(tasks)
        if missing := descriptions.keys() - images.keys():
            raise TaskError(f"there is no batch for {', '.join(sorted(missing))}: pass one per task with a description")
        names, route = tuple(descriptions), self._route(descriptions, images)
        best, outputs = route.topk(min(RUNS, len(names))).indices, {}
        scores, margins = route - torch.inf, route - torch.inf  # (N, tasks)
        for i, (name, description) in enumerate(descriptions.items()):
            rows = (best == i).any(1).nonzero()[:, 0]
            if len(rows):
                output = self._anatomy.as_logits(run(name, images[name][rows]))
                own, calibration = energy(output), description.calibrated
                scores[rows, i] = route[rows, i] + WEIGHT * certainty(own, calibration)
                margins[rows, i] = typicality(route[rows, i], own, calibration) - calibration.threshold
                outputs[name] = rows.tolist(), output
        chosen = scores.argmax(1)
        margin = margins.gather(1, chosen[:, None])[:, 0]
        likeliest = [names[i] for i in chosen.tolist()]
        known = [name if above >= 0 else None for name, above in zip(likeliest, margin.tolist(), strict=True)]
        return Identified(known, (scores / TEMPERATURE).softmax(1), names, margin, likeliest, outputs)

    def _route(self, descriptions: Mapping[str, Description], images: Mapping[str, Tensor]) -> Tensor:
        """Return the log-likelihood of each image's features, (N, tasks), with one backbone pass per distinct batch."""
        batches = {id(images[name]): images[name] for name in descriptions}
        features = {key: self.features(batch) for key, batch in batches.items()}
        for name, description in descriptions.items():
            if description.basis.shape[1] != features[id(images[name])].shape[1]:
                raise TaskError(
                    f"the description of task {name!r} is from another version of bitgraft: make it again with "
                    "`bitgraft describe TASK DATA`"
                )
        scorer = self._likelihood(tuple(descriptions.values()), next(iter(batches.values())).device)
        scores = {key: scorer(found) for key, found in features.items()}
        return torch.stack([scores[id(images[name])][:, i] for i, name in enumerate(descriptions)], 1)


def described(tasks: Mapping[str, Task]) -> dict[str, Description]:
    """Return the descriptions of the tasks that have one, sorted, so that the order of tasks does not matter."""
    found = {name: task.description for name, task in sorted(tasks.items()) if task.description is not None}
    if not found:
        what = f"none of {', '.join(tasks)} has" if tasks else "there is no task that has"
        raise TaskError(
            f"{what} a description of its images: make one with `bitgraft describe TASK DATA`, or in Python "
            "bitgraft.describe(net, task, data)"
        )
    return found


def union(tasks: Mapping[str, Task]) -> list[tuple[str, str]]:
    """Return the classes of all tasks that have a description, as (task, class), sorted by task."""
    return [(name, label) for name in described(tasks) for label in tasks[name].classes or ()]


def union_scores(found: Identified, tasks: Mapping[str, Task], *, known_only: bool = False) -> Tensor:
    """Return log P(task) + log P(class | task), (N, classes of `union`), minus infinity for tasks that did not run.

    With `known_only`, the rows of unknown images are minus infinity.
    """
    names, scores = found.names, found.scores
    by_task = {name: scores.new_full((len(scores), len(tasks[name].classes or ())), -torch.inf) for name in names}
    for name, (rows, output) in found.outputs.items():
        by_task[name][rows] = output.log_softmax(1) + scores[rows, names.index(name), None].log()
    unknown = (found.margins < 0)[:, None]
    return torch.cat([by_task[name] for name in names], 1).masked_fill(unknown & known_only, -torch.inf)
