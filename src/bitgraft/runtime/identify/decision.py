"""Route an image to the best few tasks, run those, and decide: a task, or none of them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.errors import TaskError
from bitgraft.format.description import Description
from bitgraft.runtime.identify.features import PlainFeatures
from bitgraft.runtime.identify.scorers import Likelihood, certainty, energy, typicality
from bitgraft.task import Task

RUNS = 3  # tasks that are run for an image
WEIGHT = 40.0  # nats of the route's log-likelihood that a deviation of a task's own energy is worth
TEMPERATURE = 20.0  # nats; features are far from independent, so their likelihoods are too sure


class Identified(NamedTuple):
    """The task of each image."""

    tasks: list[str | None]
    """Names; None where no task's images look like it."""
    scores: Tensor
    """(N, tasks): the probability of each task, if it is one of them."""
    names: tuple[str, ...]
    """The tasks in the order of the scores."""
    margins: Tensor
    """(N): how far the best task's typicality lies above its threshold; below 0 the answer is None."""


class Decision(NamedTuple):
    """`Identified`, the best task in any case, and the outputs of the tasks that ran."""

    identified: Identified
    best: list[str]
    outputs: dict[str, tuple[list[int], Tensor]]
    """Each task that ran: the rows of its images, and its logits for them."""


class Identifier:
    """Descriptions stacked once for as long as the tasks stay the same, and the backbone's features."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy = anatomy
        self._lock = threading.Lock()
        self._features: PlainFeatures | None = None
        self._stacked: tuple[list[tuple[str, Description]], Likelihood] | None = None

    def features(self, images: Tensor) -> Tensor:
        """The plain backbone's, (N, features)."""
        with self._lock:
            self._features = self._features or PlainFeatures(self._anatomy)
        return self._features(images)

    @torch.no_grad()
    def decide(
        self, tasks: Mapping[str, Task], images: Mapping[str, Tensor], run: Callable[[str, Tensor], Tensor]
    ) -> Decision:
        """Each image's task. `images` are as each task takes them: one tensor for all that prepare them alike."""
        names = described(tasks)
        route = self.route([(name, tasks[name].description) for name in names], images)  # type: ignore[misc]
        best, outputs = route.topk(min(RUNS, len(names))).indices, {}
        scores, typical = route - torch.inf, route - torch.inf
        for i, name in enumerate(names):
            rows = (best == i).any(1).nonzero()[:, 0]
            if len(rows):
                output, known = run(name, images[name][rows]), tasks[name].description.calibrated  # type: ignore[union-attr]
                own = energy(output)
                scores[rows, i] = route[rows, i] + WEIGHT * certainty(own, known)
                typical[rows, i] = typicality(route[rows, i], own, known) - known.threshold
                outputs[name] = rows.tolist(), output
        chosen = scores.argmax(1)
        margins = typical.gather(1, chosen[:, None])[:, 0]
        found = [names[i] for i in chosen.tolist()]
        shown = [name if margin >= 0 else None for name, margin in zip(found, margins.tolist(), strict=True)]
        return Decision(Identified(shown, (scores / TEMPERATURE).softmax(1), tuple(names), margins), found, outputs)

    def route(self, known: Sequence[tuple[str, Description]], images: Mapping[str, Tensor]) -> Tensor:
        """(N, tasks): the log-likelihood of each image's plain features, from one pass for each way of preparing it."""
        alike = {id(images[name]): images[name] for name, _ in known}
        device = next(iter(alike.values())).device
        scorer, scores = self._scorer(known, device), {key: Tensor() for key in alike}
        for key, batch in alike.items():
            scores[key] = scorer(self.features(batch))
        columns = [scores[id(images[name])][:, i] for i, (name, _) in enumerate(known)]
        return torch.stack(columns, 1)

    def _scorer(self, known: Sequence[tuple[str, Description]], device: torch.device) -> Likelihood:
        with self._lock:
            if self._stacked is None or self._stacked[1].mean.device != device or not _same(self._stacked[0], known):
                self._stacked = list(known), Likelihood([description for _, description in known], device)
            return self._stacked[1]


def described(tasks: Mapping[str, Task]) -> list[str]:
    """The tasks that an image can be found to belong to, sorted, so that the order of adding them does not matter."""
    names = sorted(name for name, task in tasks.items() if task.description is not None)
    if not names:
        which = f"none of {', '.join(tasks)} has" if tasks else "there is no task, and so no"
        raise TaskError(f"{which} a description of its inputs: make one with `bitgraft describe TASK DATA`")
    return names


def union(tasks: Mapping[str, Task]) -> list[tuple[str, str]]:
    """The classes of all tasks with a description: (task, class), tasks in the order of their names."""
    return [(name, label) for name in described(tasks) for label in tasks[name].classes or ()]


def union_scores(decision: Decision, tasks: Mapping[str, Task], *, known_only: bool = False) -> Tensor:
    """(N, classes of `union`): log P(task) + log P(class | task), minus infinity for tasks that were not run.

    With `known_only` the rows of unknown images are minus infinity throughout.
    """
    names, scores = decision.identified.names, decision.identified.scores
    found = {name: scores.new_full((len(scores), len(tasks[name].classes or ())), -torch.inf) for name in names}
    for name, (rows, output) in decision.outputs.items():
        within = output.float().log_softmax(1)
        found[name][rows] = within + scores[rows, names.index(name), None].log()
    every = torch.cat([found[name] for name in names], 1)
    return every.masked_fill((decision.identified.margins < 0)[:, None] & known_only, -torch.inf)


def _same(one: Sequence[tuple[str, Description]], other: Sequence[tuple[str, Description]]) -> bool:
    return len(one) == len(other) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(one, other, strict=True))
