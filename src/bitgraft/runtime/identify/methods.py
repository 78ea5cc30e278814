"""What a network can do with images whose task nobody names."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bitgraft.backbone.tracing import logits
from bitgraft.runtime.identify import decision
from bitgraft.task import Task


class Identifying:
    """Methods of `bitgraft.Network`, over its tasks and their descriptions."""

    _identifier: decision.Identifier

    @property
    def tasks(self) -> Mapping[str, Task]:
        raise NotImplementedError

    def identify(self, images: Tensor | Mapping[str, Tensor]) -> decision.Identified:
        """Each image's task by name, or None where it looks like none of them, and the scores.

        One plain pass of the backbone leads to the best few tasks, and those run. Tasks without a description
        (`bitgraft describe`) are left out. Tasks and the order in which they came do not influence one another.

        Args:
            images: a batch, or one for each task by name, where tasks prepare images differently.
        """
        return self.decide(images).identified

    def decide(self, images: Tensor | Mapping[str, Tensor]) -> decision.Decision:
        """What `identify` finds, and the outputs of the tasks that ran for it."""
        tasks, net = self.tasks, self
        given = dict.fromkeys(tasks, images) if isinstance(images, Tensor) else images

        def run(name: str, batch: Tensor) -> Tensor:
            called: Any = net
            return logits(called(batch, task=name))

        return self._identifier.decide(tasks, given, run)

    def union_scores(self, images: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Log-probabilities of `classes()`, (N, classes): minus infinity throughout for an unknown image."""
        return decision.union_scores(self.decide(images), self.tasks, known_only=True)

    def classes(self) -> list[tuple[str, str]]:
        """All classes of all tasks with a description: (task, class), tasks in the order of their names."""
        return decision.union(self.tasks)

    def features(self, images: Tensor) -> Tensor:
        """What the plain backbone's head takes in, pooled and l2-normalised: (N, features)."""
        return self._identifier.features(images)
