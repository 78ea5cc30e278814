"""What `bitgraft train` does once its command line is understood, in one process or several."""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import typer
from accelerate import Accelerator
from rich.console import Console

from bitgraft.cli.options import STORE
from bitgraft.cli.output import INTERRUPTED, megabytes, percent, show
from bitgraft.cli.output import console as make_console
from bitgraft.errors import BitgraftError, StoppedError, TrainingError
from bitgraft.format.inspect import inspect_file
from bitgraft.methods import registry
from bitgraft.store import Backbone, Store
from bitgraft.training import runs
from bitgraft.training.callbacks import Callback, Plan, TensorBoard
from bitgraft.training.progress import Progress
from bitgraft.workflows import train_jointly as jointly
from bitgraft.workflows.train_task import Request, TrainData, TrainResult, check_free, open_request, open_store, train

SELDOM = 100  # steps, at most, between the times that several processes ask each other whether to stop


def run(
    folder: str,
    backbone: Backbone | None,
    requests: list[Request],
    precision: str,
    tensorboard: bool,
    as_json: bool,
    resume: str,
) -> None:
    """Train, and say how it went; `resume` is the command that continues an interrupted run."""
    try:
        accelerator = Accelerator(mixed_precision=precision, cpu=not torch.accelerator.is_available())
    except ValueError as fault:  # fp16 on a CPU, for one
        raise TrainingError(f"--mixed-precision {precision} does not work here: {fault}") from fault
    main = accelerator.is_main_process
    console = make_console(sys.stderr if as_json else sys.stdout, markup=False, soft_wrap=True, quiet=not main)
    run_folder, name, work = _plan(folder, backbone, requests, console)
    callbacks: list[Callback] = [Progress(console)] if main else []
    if tensorboard and main:
        callbacks.append(TensorBoard(run_folder / "tensorboard"))
    doing, tasks = "resuming" if requests[0].resume else "training", ", ".join(r.task for r in requests)
    console.print(f"{doing} {tasks} by method {requests[0].method} on {name}")
    if "RANK" in os.environ:
        resume += "  (under the same launcher)"
    with Interrupts(accelerator) as interrupts:
        try:
            results = work(callbacks=[interrupts, *callbacks], accelerator=accelerator, stop=interrupts.stop)
        except (StoppedError, KeyboardInterrupt):
            if main:
                saved = runs.interrupted(run_folder)
                how = f"; the state is saved. To resume:\n  {resume}" if saved else " before there was anything to save"
                print(f"interrupted{how}", file=sys.stderr, flush=True)
            raise typer.Exit(INTERRUPTED) from None
        except BitgraftError as fault:
            if runs.interrupted(run_folder) and "cannot write" in str(fault):
                raise type(fault)(f"{fault}; the last state is saved, resume with `{resume}`") from fault
            raise
        except RuntimeError as fault:
            lost = isinstance(fault, torch.distributed.DistError) or "gloo" in str(fault)
            if accelerator.num_processes == 1 or not lost:
                raise
            raise TrainingError("another process has ended, and this one cannot continue without it") from fault
    if main:
        _report(console, Store(folder), run_folder, results if isinstance(results, list) else [results], as_json)
    accelerator.end_training()


def _plan(folder: str, backbone: Backbone | None, requests: list[Request], console: Console) -> tuple[Path, str, Any]:
    """The folder of the run, the backbone's name, and what to call: `train` or, for a joint method, `train_jointly`."""
    first = requests[0]
    if registry.get(first.method).joint:
        jointly.check_new(folder, requests)
        if backbone is None:
            raise TrainingError("name the backbone to train the tasks on with --backbone")
        work = partial(jointly.train_jointly, folder, backbone, requests, data=_open(requests, console))
        return jointly.run_folder(folder), backbone.name, work
    if Store.exists(folder):
        check_free(Store(folder), first)
    (data,) = _open(requests, console)
    store, net = open_store(folder, backbone)
    return store.run_folder(first.task), store.backbone.name, partial(train, store, net, first, data=data)


def _open(requests: list[Request], console: Console) -> list[TrainData]:
    opened = []
    for request in requests:
        data = open_request(request)
        opened.append(data)
        parts = {"train": data.splits.train, "validate": data.splits.val, "test": data.tested}
        counts = ", ".join(f"{len(images):,} to {part}" for part, images in parts.items() if images)
        console.print(f"{request.data}: {len(data.splits.classes)} classes, images: {counts}")
        for warning in data.splits.warnings:
            console.print(f"warning: {warning}")
        if request.skip_bad:
            console.print(f"skipped {len(data.skipped)} files that cannot be read{':' if data.skipped else ''}")
        for path, reason in data.skipped:
            console.print(f"  {path}: {reason}")
    return opened


def _report(console: Console, store: Store, run_folder: Path, results: list[TrainResult], as_json: bool) -> None:
    if as_json:
        plain = [
            {
                "task": result.task.name,
                "method": result.task.metadata.method,
                "classes": list(result.task.classes or ()),
                "file": str(result.path),
                "bytes": result.path.stat().st_size,
                "metrics": result.task.metrics,
                "metrics_file": str(run_folder / runs.METRICS),
                "history": result.history,
                "skipped": [{"file": str(path), "reason": reason} for path, reason in result.skipped],
            }
            for result in results
        ]
        show(True, plain[0] if len(plain) == 1 else {"tasks": plain, "weights": store.backbone.weights})
        return
    for result in results:
        of = "" if len(results) == 1 else f" of {result.task.name}"
        if said := _kept(result):
            console.print(said)
        if result.test is not None:
            console.print(f"test accuracy{of} {percent(result.test['accuracy'])}")
    for result in results:
        found = inspect_file(result.path)
        size, copy = megabytes(found.size), megabytes(store.size.copy_bytes(found.bytes["head"]))
        console.print(f"wrote {result.path}, {size} (a copy of the network is {copy})")
    where = "" if store.folder == Path(STORE) else f" --store {store.folder}"
    console.print(f"next: bitgraft predict IMAGE --task {results[0].task.name}{where}")


def _kept(result: TrainResult) -> str | None:
    """Which epoch the task was kept as, if that is not the last."""
    best, last = result.best, result.history[-1]
    if result.task.metrics["kept"] != "best" or best is None or best["epoch"] == last["epoch"]:
        return None
    better = f"{percent(best['val_accuracy'])} on validation, {percent(last['val_accuracy'])} at the end"
    if best["epoch"] == 0:
        return (
            f"kept the linear probe that training started from ({better}): train for longer (--steps), with lower "
            "rates (--rate), or on more images"
        )
    return f"kept epoch {best['epoch']} of {last['epoch']} ({better}): lower rates (--rate) may do better"


class Interrupts(Callback):
    """Ctrl-C and SIGTERM: a run stops after the current step and keeps its state.

    It is a callback, so that it knows when there is a state to keep; before and after, a signal ends the command.
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

    def begin(self, plan: Plan) -> None:
        self.running, self._every = True, max(1, min(SELDOM, plan.steps_per_epoch // 50))

    def end(self) -> None:
        self.running = False
