"""Progress for people: a live bar in a terminal, plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Progress:
    """Epochs, time left, images per second, loss and accuracy."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars: Bars | None = None
        self._bar: TaskID | None = None
        self._images, self._since = 0, time.monotonic()

    def begin(self, tasks: list[str], epochs: int, steps_per_epoch: int, done_epochs: int) -> None:
        self._epochs, self._images, self._since = epochs, 0, time.monotonic()
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bars = Bars(*columns, console=self.console, transient=True)
            self._bar = self._bars.add_task(
                ", ".join(tasks), total=epochs * steps_per_epoch, completed=done_epochs * steps_per_epoch
            )
            self._bars.start()

    def step(self, epoch: int, step: int, images: int) -> None:
        self._images += images
        if self._bars is not None and self._bar is not None:
            self._bars.advance(self._bar)

    def epoch(self, record: dict[str, Any]) -> None:
        rate = self._images / max(1e-9, time.monotonic() - self._since)
        line = (
            f"epoch {record['epoch']:>3}/{self._epochs}  loss {record['train_loss']:.3f}  "
            f"train {100 * record['train_accuracy']:5.1f} %"
        )
        if "val_accuracy" in record:
            line += f"  val {100 * record['val_accuracy']:5.1f} %"
        self.console.print(f"{line}  {rate:.0f} images/s", highlight=False)
        self._images, self._since = 0, time.monotonic()

    def end(self) -> None:
        if self._bars is not None:
            self._bars.stop()
