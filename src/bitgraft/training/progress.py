"""Progress of a run: a live bar in a terminal, plain lines elsewhere."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from bitgraft.training.callbacks import Callback, Plan

QUIET = 30.0  # without a bar, print a line after this many seconds of silence


class Progress(Callback):
    """Epochs, time left, images per second, loss and accuracy."""

    def __init__(self, console: Console, setting: str = "--steps ") -> None:
        self.console, self._setting = console, setting
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            TextColumn("{task.fields[seen]}{task.fields[rate]}", markup=False),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def begin(self, plan: Plan) -> None:
        epochs, done = plan.epochs, plan.done_epochs
        self._epochs, self._steps, self._images, self._done = epochs, plan.steps_per_epoch, 0, done
        steps = epochs * plan.steps_per_epoch
        if plan.seconds_per_step is not None:
            seconds = (steps - done * plan.steps_per_epoch) * plan.seconds_per_step
            longer = f"; twice as many ({self._setting}{2 * steps}) would take {format_duration(2 * seconds)}"
            self._say(f"{epochs} epochs, {steps:,} steps: about {format_duration(seconds)}{'' if done else longer}")
        self._since = self._began = self._spoke = time.monotonic()
        fields: dict[str, Any] = {"epoch": min(done + 1, epochs), "epochs": epochs, "rate": "", "seen": ""}
        self._bar = self._bars.add_task(", ".join(plan.tasks), total=steps, completed=done * self._steps, **fields)
        self._bars.start()

    def step(self, epoch: int, step: int, images: int) -> None:
        self._images += images
        self._at = (epoch, step)
        self._bars.update(self._bar, completed=epoch * self._steps + step, epoch=epoch + 1, rate=self._rate())

    def look(self, loss: float, accuracy: float) -> None:
        epoch, step = self._at
        seen = f"loss {loss:.3f}  train {100 * accuracy:5.1f} %  "
        self._bars.update(self._bar, seen=seen)
        if self._bars.disable and step < self._steps and time.monotonic() - self._spoke > QUIET:
            self._say(f"{self._of(epoch + 1)}  step {step}/{self._steps}  {seen}{self._rate()}")

    def epoch(self, record: dict[str, Any]) -> None:
        accuracy = f"train {100 * record['train_accuracy']:5.1f} %"
        if "val_accuracy" in record:
            accuracy += f"  val {100 * record['val_accuracy']:5.1f} %"
        line = f"{self._of(record['epoch'])}  loss {record['train_loss']:.3f}  {accuracy}  {self._rate()}"
        if self._bars.disable and record["epoch"] < self._epochs:  # at the mean speed of this process
            seconds_per_epoch = (time.monotonic() - self._began) / max(1, record["epoch"] - self._done)
            line += f"  {format_duration(seconds_per_epoch * (self._epochs - record['epoch']))} left"
        self._say(line)
        self._images, self._since = 0, time.monotonic()

    def end(self) -> None:
        self._bars.stop()

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._spoke = time.monotonic()

    def _of(self, epoch: int) -> str:
        return f"epoch {epoch:>{len(str(self._epochs))}}/{self._epochs}"

    def _rate(self) -> str:
        return f"{self._images / max(1e-9, time.monotonic() - self._since):.0f} images/s"


def with_progress(callbacks: Sequence[Callback], wanted: bool | None, main: bool) -> list[Callback]:
    """Add a bar in the main process if it is wanted; by default in a terminal or a notebook."""
    console = Console()
    seen = console.is_terminal or console.is_jupyter if wanted is None else wanted
    return [*callbacks, Progress(console, "steps=")] if seen and main else list(callbacks)


def format_duration(seconds: float) -> str:
    """45 s, 3 min 20 s or 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
