"""Run `bitgraft train` in one process or several, once its options are parsed."""

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
from bitgraft.data.images import Splits
from bitgraft.errors import BitgraftError, StoppedError, TrainingError
from bitgraft.format.summary import read_summary
from bitgraft.methods import registry
from bitgraft.store import Backbone, Store
from bitgraft.training import runs
from bitgraft.training.callbacks import Callback, Plan, TensorBoard
from bitgraft.training.progress import Progress
from bitgraft.workflows import train_jointly as jointly
from bitgraft.workflows.train_task import Request, TrainResult, check_free, open_request, open_store, train

MAX_INTERVAL = 100  # most steps between two checks, by several processes, whether one of them is to stop


def run(
    folder: str,
    backbone: Backbone | None,
    requests: list[Request],
    precision: str,
    tensorboard: bool,
    as_json: bool,
    resume: str,
) -> None:
    """Train and print the results; `resume` is the command that continues an interrupted run."""
    try:
        accelerator = Accelerator(mixed_precision=precision, cpu=not torch.accelerator.is_available())
    except ValueError as error:  # such as fp16 on a CPU
        raise TrainingError(f"--mixed-precision {precision} does not work here: {error}") from error
    main = accelerator.is_main_process
    console = make_console(sys.stderr if as_json else sys.stdout, markup=False, soft_wrap=True, quiet=not main)
    run_folder, name, train_all = _plan(folder, backbone, requests, console)
    callbacks: list[Callback] = [Progress(console)] if main else []
    if tensorboard and main:
        callbacks.append(TensorBoard(run_folder / "tensorboard"))
    verb, tasks = "resuming" if requests[0].resume else "training", ", ".join(r.task for r in requests)
    console.print(f"{verb} {tasks} with method {requests[0].method} on {name}")
    if "RANK" in os.environ:
        resume += "  (under the same launcher)"
    with Interrupts(accelerator) as interrupts:
        try:
            results = train_all(callbacks=[interrupts, *callbacks], accelerator=accelerator, stop=interrupts.stop)
        except (StoppedError, KeyboardInterrupt):
            if main:
                saved = runs.interrupted(run_folder)
                rest = f"; the state is saved. To resume:\n  {resume}" if saved else " before the first checkpoint"
                print(f"interrupted{rest}", file=sys.stderr, flush=True)
            raise typer.Exit(INTERRUPTED) from None
        except BitgraftError as error:
            if runs.interrupted(run_folder) and "cannot write" in str(error):
                raise type(error)(f"{error}; the last state is saved, resume with `{resume}`") from error
            raise
        except RuntimeError as error:
            lost = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
            if accelerator.num_processes == 1 or not lost:
                raise
            raise TrainingError("another process ended, and this one cannot continue without it") from error
    if main:
        _report(console, Store(folder), run_folder, results if isinstance(results, list) else [results], as_json)


def _plan(folder: str, backbone: Backbone | None, requests: list[Request], console: Console) -> tuple[Path, str, Any]:
    """Return the run's folder, the backbone's name, and `train` or `train_jointly` with its arguments bound."""
    first = requests[0]
    if registry.get(first.method).joint:
        jointly.check_new(folder, requests)
        if backbone is None:
            raise TrainingError("joint training needs --backbone NAME")
        train_all = partial(jointly.train_jointly, folder, backbone, requests, data=_open(requests, console))
        return jointly.run_folder(folder), backbone.name, train_all
    if Store.exists(folder):
        check_free(Store(folder), first)
    (data,) = _open(requests, console)
    store, net = open_store(folder, backbone)
    return store.run_folder(first.task), store.backbone.name, partial(train, store, net, first, data=data)


def _open(requests: list[Request], console: Console) -> list[Splits]:
    opened = []
    for request in requests:
        data = open_request(request)
        opened.append(data)
        parts = {"train": data.train, "validate": data.val, "test": data.tested}
        counts = ", ".join(f"{len(images):,} to {part}" for part, images in parts.items() if images)
        console.print(f"{request.data}: {len(data.classes)} classes, images: {counts}")
        for warning in data.warnings:
            console.print(f"warning: {warning}")
        if request.skip_bad:
            console.print(f"skipped {len(data.skipped)} unreadable files{':' if data.skipped else ''}")
        for path, reason in data.skipped:
            console.print(f"  {path}: {reason}")
    return opened


def _report(console: Console, store: Store, run_folder: Path, results: list[TrainResult], as_json: bool) -> None:
    if as_json:
        reports = [
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
        show(True, reports[0] if len(reports) == 1 else {"tasks": reports, "weights": store.backbone.weights})
        return
    for result in results:
        of_task = "" if len(results) == 1 else f" of {result.task.name}"
        for note in filter(None, (_retreat(result), _kept_epoch(result))):
            console.print(note)
        if result.test is not None:
            console.print(f"test accuracy{of_task} {percent(result.test['accuracy'])}")
    for result in results:
        found = read_summary(result.path)
        size, copy = megabytes(found.size), megabytes(store.size.copy_bytes(found.bytes["head"]))
        console.print(f"wrote {result.path}, {size} (a full copy of the network: {copy})")
    in_store = "" if store.folder == Path(STORE) else f" --store {store.folder}"
    console.print(f"next: bitgraft predict IMAGE --task {results[0].task.name}{in_store}")


def _retreat(result: TrainResult) -> str | None:
    """Say that training went back to an earlier epoch."""
    record = next((record for record in result.history if "retreat" in record), None)
    if record is None:
        return None
    start = f"epoch {record['retreat']}" if record["retreat"] else "the linear probe that training started from"
    return f"no epoch up to {record['epoch']} was better than {start}: went back to it, at a quarter of the rates"


def _kept_epoch(result: TrainResult) -> str | None:
    """Say which epoch was kept, if it is not the last."""
    best, last = result.best, result.history[-1]
    if result.task.metrics["kept"] != "best" or best is None or best["epoch"] == last["epoch"]:
        return None
    lost = best["val_accuracy"] > last["val_accuracy"]
    scores = f"validation {percent(best['val_accuracy'])}, last epoch {percent(last['val_accuracy'])}"
    if best["epoch"] == 0:
        advice = ": train longer (--steps), with lower rates (--rate), or on more images"
        return f"kept the linear probe that training started from ({scores}){advice if lost else ''}"
    advice = ": lower rates (--rate) may help"
    return f"kept epoch {best['epoch']} of {last['epoch']} ({scores}){advice if lost else ''}"


class Interrupts(Callback):
    """Stops a run after the current step on Ctrl-C or SIGTERM, with its state saved.

    As a callback it knows when training runs; before and after that, a signal ends the command at once.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.single = accelerator, accelerator.num_processes == 1
        self.requested = self.running = False
        self._process, self._steps, self._interval = os.getpid(), 0, 1

    def __enter__(self) -> "Interrupts":
        self._before = {kind: signal.signal(kind, self._handle) for kind in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a data loader worker; the main process ends it
            return
        if not self.running or (self.requested and self.single):
            raise KeyboardInterrupt
        if self.requested:  # a launcher forwards a signal that the process has already received
            return
        self.requested = True
        if self.accelerator.is_main_process:
            again = b"; press again to stop now" if self.single else b""
            os.write(sys.stderr.fileno(), b"\nstopping after this step" + again + b"\n")

    def stop(self) -> bool:
        """Return whether to stop. Every process calls this after each step, and all stop at the same step."""
        if self.single:
            return self.requested
        self._steps += 1
        if self._steps % self._interval:
            return False
        requested = torch.tensor(float(self.requested), device=self.accelerator.device)
        return bool(self.accelerator.reduce(requested, "sum"))

    def begin(self, plan: Plan) -> None:
        self.running, self._interval = True, max(1, min(MAX_INTERVAL, plan.steps_per_epoch // 50))

    def end(self) -> None:
        self.running = False
