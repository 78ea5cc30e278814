"""Rank the tasks for an image, run the best few, and decide on one or none of them."""

import threading
from collections.abc import Callable, Mapping
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
    """The task of each image."""

    tasks: list[str | None]
    """The task's name, or None if the image resembles no task."""
    scores: Tensor
    """(N, tasks): the probability of each task, given that it is one of them."""
    names: tuple[str, ...]
    """The tasks in the order of the scores."""
    margins: Tensor
    """(N): the best task's typicality minus its threshold. Negative margins mean None."""


class Decision(NamedTuple):
    """The tasks of a batch, and the outputs of the tasks that ran."""

    identified: Identified
    best: list[str]
    """The most likely task of each image, known or not."""
    outputs: dict[str, tuple[list[int], Tensor]]
    """For each task that ran, the rows of its images and its logits for them."""


class Identifier:
    """Decides on tasks. It caches the stacked descriptions while the tasks stay the same."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy = anatomy
        self._lock = threading.Lock()
        self._features: PlainFeatures | None = None
        self._stacked: tuple[list[tuple[str, Description]], Likelihood] | None = None

    def features(self, images: Tensor) -> Tensor:
        """Return what the plain backbone sees in images, l2-normalised, (N, features)."""
        with self._lock:
            self._features = self._features or PlainFeatures(self._anatomy)
        return self._features(images)

    @torch.no_grad()
    def decide(
        self, tasks: Mapping[str, Task], images: Mapping[str, Tensor], run: Callable[[str, Tensor], Tensor]
    ) -> Decision:
        """Decide on each image's task.

        `images` has one batch per task. Tasks with the same preprocessing share one tensor. `run` returns a task's
        output.
        """
        names = described(tasks)
        route = self.route([(name, tasks[name].description) for name in names], images)  # type: ignore[misc]
        best, outputs = route.topk(min(RUNS, len(names))).indices, {}
        scores, margins = route - torch.inf, route - torch.inf  # (N, tasks)
        for i, name in enumerate(names):
            rows = (best == i).any(1).nonzero()[:, 0]
            if len(rows):
                output = self._anatomy.as_logits(run(name, images[name][rows]))
                own, calibration = energy(output), tasks[name].description.calibrated  # type: ignore[union-attr]
                scores[rows, i] = route[rows, i] + WEIGHT * certainty(own, calibration)
                margins[rows, i] = typicality(route[rows, i], own, calibration) - calibration.threshold
                outputs[name] = rows.tolist(), output
        chosen = scores.argmax(1)
        margin = margins.gather(1, chosen[:, None])[:, 0]
        likeliest = [names[i] for i in chosen.tolist()]
        known = [name if above >= 0 else None for name, above in zip(likeliest, margin.tolist(), strict=True)]
        return Decision(Identified(known, (scores / TEMPERATURE).softmax(1), tuple(names), margin), likeliest, outputs)

    def route(self, descriptions: list[tuple[str, Description]], images: Mapping[str, Tensor]) -> Tensor:
        """Return the log-likelihood of each image's features, (N, tasks), with one backbone pass per distinct batch."""
        batches = {id(images[name]): images[name] for name, _ in descriptions}
        features = {key: self.features(batch) for key, batch in batches.items()}
        for name, description in descriptions:
            if description.basis.shape[1] != features[id(images[name])].shape[1]:
                raise TaskError(
                    f"the description of task {name!r} is from another version of bitgraft: make it again with "
                    "`bitgraft describe TASK DATA`"
                )
        scorer = self._scorer(descriptions, next(iter(batches.values())).device)
        scores = {key: scorer(found) for key, found in features.items()}
        return torch.stack([scores[id(images[name])][:, i] for i, (name, _) in enumerate(descriptions)], 1)

    def _scorer(self, descriptions: list[tuple[str, Description]], device: torch.device) -> Likelihood:
        with self._lock:
            if self._stacked is None or self._stacked[1].mean.device != device or self._stacked[0] != descriptions:
                self._stacked = descriptions, Likelihood([description for _, description in descriptions], device)
            return self._stacked[1]


def described(tasks: Mapping[str, Task]) -> list[str]:
    """Return the names of the tasks that have a description, sorted, so that the order of tasks does not matter."""
    names = sorted(name for name, task in tasks.items() if task.description is not None)
    if not names:
        what = f"none of {', '.join(tasks)} has" if tasks else "there is no task that has"
        raise TaskError(
            f"{what} a description of its images: make one with `bitgraft describe TASK DATA`, or in Python "
            "bitgraft.describe(net, task, data)"
        )
    return names


def union(tasks: Mapping[str, Task]) -> list[tuple[str, str]]:
    """Return the classes of all tasks that have a description, as (task, class), sorted by task."""
    return [(name, label) for name in described(tasks) for label in tasks[name].classes or ()]


def union_scores(decision: Decision, tasks: Mapping[str, Task], *, known_only: bool = False) -> Tensor:
    """Return log P(task) + log P(class | task), (N, classes of `union`), minus infinity for tasks that did not run.

    With `known_only`, the rows of unknown images are minus infinity.
    """
    names, scores = decision.identified.names, decision.identified.scores
    by_task = {name: scores.new_full((len(scores), len(tasks[name].classes or ())), -torch.inf) for name in names}
    for name, (rows, output) in decision.outputs.items():
        by_task[name][rows] = output.log_softmax(1) + scores[rows, names.index(name), None].log()
    unknown = (decision.identified.margins < 0)[:, None]
    return torch.cat([by_task[name] for name in names], 1).masked_fill(unknown & known_only, -torch.inf)
