"""Ctrl-C and SIGTERM: a run stops after the current step and keeps its state."""

import os
import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from bitgraft.training.callbacks import Callback

if TYPE_CHECKING:
    from accelerate import Accelerator

AGREE_WITHIN = 1.0  # seconds, about, between the times that several processes ask each other whether to stop
SELDOM = 100  # steps between those times at the most


class Interrupts(Callback):
    """A callback, so that it knows when there is a state to keep; before and after, a signal ends the command.

    with Interrupts(accelerator) as interrupts:
        fit(..., stop=interrupts.stop, callbacks=[interrupts])
    """

    def __init__(self, accelerator: "Accelerator") -> None:
        self.accelerator, self.alone = accelerator, accelerator.num_processes == 1
        self.asked = self.running = False
        self._process, self._since = os.getpid(), time.monotonic()
        self._steps, self._agree_at, self._passed = 0, 1, 1
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        self._before = {kind: signal.signal(kind, self._handle) for kind in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker that loads images; the main process ends it
            return
        if not self.running or (self.asked and self.alone):
            raise KeyboardInterrupt
        if self.asked:  # the launcher passes on what all have got already
            return
        self.asked = True
        if self.accelerator.is_main_process:
            once_more = b"; once more stops at once" if self.alone else b""
            os.write(sys.stderr.fileno(), b"\nstopping after this step" + once_more + b"\n")

    def stop(self) -> bool:
        """Asked after each step, in every process alike; they must stop at the same one."""
        if self.alone:
            return self.asked
        self._steps += 1
        return self._steps == self._agree_at and self._agree()

    def _agree(self) -> bool:
        """Whether any process was asked to stop. The time that steps take decides when to ask again."""
        import torch

        now = time.monotonic()
        mine = torch.tensor([float(self.asked), now - self._since], device=self.accelerator.device)
        asked, seconds = self.accelerator.reduce(mine, "sum").tolist()
        pace = seconds / self.accelerator.num_processes / self._passed
        self._since, self._passed = now, max(1, min(SELDOM, int(AGREE_WITHIN / max(pace, 1e-9))))
        self._agree_at = self._steps + self._passed
        return bool(asked)

    def begin(self, tasks: list[str], epochs: int, steps_per_epoch: int, done_epochs: int) -> None:
        self.running, self._since = True, time.monotonic()

    def end(self) -> None:
        self.running = False
