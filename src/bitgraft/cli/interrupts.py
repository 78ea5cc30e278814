"""Ctrl-C and SIGTERM: a run stops after the step that it is in, keeps its state, and says how to go on."""

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

AGREE_EVERY = 10  # steps between the times that several processes ask one another whether to stop


class Interrupts:
    """An observer, so that it knows when there is a state to keep; before and after, a signal ends the command.

    with Interrupts(accelerator) as interrupts:
        fit(..., stop=interrupts.stop, observers=[interrupts])
    """

    def __init__(self, accelerator: "Accelerator") -> None:
        self.accelerator = accelerator
        self.asked = self.running = False
        self._process, self._steps = os.getpid(), 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        for kind in (signal.SIGINT, signal.SIGTERM):
            self._before[kind] = signal.signal(kind, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker that loads images; the main process ends it
            return
        if self.asked or not self.running:
            raise KeyboardInterrupt
        self.asked = True
        if self.accelerator.is_main_process:
            os.write(sys.stderr.fileno(), b"\nstopping after this step; once more stops at once\n")

    def stop(self) -> bool:
        """Asked after each step, in every process alike; they must stop at the same one."""
        if self.accelerator.num_processes == 1:
            return self.asked
        self._steps += 1
        return self._steps % AGREE_EVERY == 0 and self._agree()

    def _agree(self) -> bool:
        import torch

        asked = torch.tensor(float(self.asked), device=self.accelerator.device)
        return bool(self.accelerator.reduce(asked, "sum") > 0)

    def begin(self, tasks: list[str], epochs: int, steps_per_epoch: int, done_epochs: int) -> None:
        self.running = True

    def step(self, epoch: int, step: int, images: int) -> None:
        pass

    def epoch(self, record: dict[str, Any]) -> None:
        pass

    def end(self) -> None:
        self.running = False
