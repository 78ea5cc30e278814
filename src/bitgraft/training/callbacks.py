"""Callbacks: a run reports its start, steps, losses, epochs and end to them."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitgraft.backbone.files import write_atomically
from bitgraft.errors import TrainingError, how_to_install


@dataclass(frozen=True)
class Plan:
    """What a run will do, known before its first step."""

    tasks: list[str]
    epochs: int
    """Of the whole run, including finished ones."""
    steps_per_epoch: int
    done_epochs: int
    seconds_per_step: float | None
    """An estimate; None if not measured."""


class Callback:
    """Subclasses override the methods they need."""

    def begin(self, plan: Plan) -> None: ...

    def step(self, epoch: int, step: int, images: int) -> None: ...

    def look(self, loss: float, accuracy: float) -> None:
        """Called with the epoch's means so far, whenever the loop reads them from the device."""

    def epoch(self, record: dict[str, Any]) -> None: ...

    def end(self) -> None: ...


class JsonLines(Callback):
    """Write one line of JSON per epoch. A resumed run writes the same file as an uninterrupted one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []

    def begin(self, plan: Plan) -> None:
        if plan.done_epochs and self.path.exists():
            lines = self.path.read_text().splitlines()
            self.records = [json.loads(line) for line in lines[: plan.done_epochs]]

    def epoch(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        write_atomically(self.path, "".join(json.dumps(r) + "\n" for r in self.records).encode())


class Clock(Callback):
    """Measure the wall time, CPU time and images of training steps, without validation.

    A resumed run is measured from where it resumes.
    """

    def __init__(self) -> None:
        self.seconds, self.processor_seconds, self.images = 0.0, 0.0, 0
        self._restart()

    def _restart(self) -> None:
        self._since, self._processor_since = time.perf_counter(), time.process_time()

    def begin(self, plan: Plan) -> None:
        self._restart()

    def step(self, epoch: int, step: int, images: int) -> None:
        self.seconds += time.perf_counter() - self._since
        self.processor_seconds += time.process_time() - self._processor_since
        self.images += images
        self._restart()

    def epoch(self, record: dict[str, Any]) -> None:
        self._restart()


class TensorBoard(Callback):
    """Log each epoch's losses and accuracies. A resumed run continues the curves from its checkpoint."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as cause:
            raise TrainingError(
                f"TensorBoard is not installed: {how_to_install('tensorboard')}, or leave out --tensorboard"
            ) from cause
        self._open, self.folder = SummaryWriter, folder
        self._writer: Any = None

    def begin(self, plan: Plan) -> None:
        self._writer = self._open(str(self.folder), purge_step=plan.done_epochs + 1)

    def epoch(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, float):
                split, _, metric = name.partition("_")
                self._writer.add_scalar(f"{metric}/{split}", value, record["epoch"])
        self._writer.flush()

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
