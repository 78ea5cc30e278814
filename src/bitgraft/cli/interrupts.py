"""Ctrl-C and SIGTERM: a run stops after the current step and keeps its state."""

import os
import signal
import sys
from types import FrameType

import torch
from accelerate import Accelerator

from bitgraft.training.callbacks import Callback

SELDOM = 100  # steps, at most, between the times that several processes ask each other whether to stop


class Interrupts(Callback):
    """A callback, so that it knows when there is a state to keep; before and after, a signal ends the command.

    with Interrupts(accelerator) as interrupts:
        fit(..., stop=interrupts.stop, callbacks=[interrupts])
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.alone = accelerator, accelerator.num_processes == 1
        self.asked = self.running = False
        self._process, self._steps, self._every = os.getpid(), 0, 1

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
        if self._steps % self._every:
            return False
        asked = torch.tensor(float(self.asked), device=self.accelerator.device)
        return bool(self.accelerator.reduce(asked, "sum"))

    def begin(self, tasks: list[str], epochs: int, steps_per_epoch: int, done_epochs: int) -> None:
        self.running, self._every = True, max(1, min(SELDOM, steps_per_epoch // 50))

    def end(self) -> None:
        self.running = False
