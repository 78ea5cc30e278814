"""What `bitgraft train` does once its command line is understood, in one process or several."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import typer
from accelerate import Accelerator
from rich.console import Console

from bitgraft.cli.interrupts import Interrupts
from bitgraft.cli.output import INTERRUPTED, WIDE, megabytes, show_json
from bitgraft.errors import BitgraftError, TrainingError
from bitgraft.network import Network
from bitgraft.session import Opened, Outcome, Request, check_free, open_request, open_store, train
from bitgraft.store import Backbone, Size, Store
from bitgraft.training import runs
from bitgraft.training.loop import StoppedError
from bitgraft.training.observers import Observer, TensorBoard
from bitgraft.training.progress import Progress


def run(
    folder: str,
    backbone: Backbone | None,
    request: Request,
    precision: str,
    tensorboard: bool,
    as_json: bool,
    resume: str,
) -> None:
    accelerator = _accelerator(precision)
    main = accelerator.is_main_process
    console = _console(to_stderr=as_json, quiet=not main)
    if Store.exists(folder):
        check_free(Store(folder), request)
    data = open_request(request)
    _tell_data(console, request, data)
    store, net = open_store(folder, backbone)
    observers: list[Observer] = [Progress(console)] if main else []
    if tensorboard and main:
        observers.append(TensorBoard(store.run_folder(request.task) / "tensorboard"))
    said = "going on with" if request.resume else "training"
    _tell(console, f"{said} {request.task} by method {request.method} on {store.backbone.name}")
    with Interrupts(accelerator) as interrupts:
        try:
            outcome = train(
                store,
                net,
                request,
                data=data,
                observers=[interrupts, *observers],
                accelerator=accelerator,
                stop=interrupts.stop,
            )
        except (StoppedError, KeyboardInterrupt):
            _leave(store, request, resume, main)
        except BitgraftError as fault:
            raise _with_remedy(fault, store, request, resume) from fault
    if main:
        _report(console, store, net, outcome, as_json)
    accelerator.end_training()


def _accelerator(precision: str) -> Accelerator:
    try:
        return Accelerator(mixed_precision=precision, cpu=not torch.accelerator.is_available())
    except ValueError as fault:  # fp16 on a CPU, for one
        raise TrainingError(f"--mixed-precision {precision} does not go here: {fault}") from fault


def _console(to_stderr: bool, quiet: bool) -> Console:
    stream = sys.stderr if to_stderr else sys.stdout
    terminal = stream.isatty()
    return Console(file=stream, force_terminal=terminal, width=None if terminal else WIDE, highlight=False, quiet=quiet)


def _tell(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _tell_data(console: Console, request: Request, data: Opened) -> None:
    splits = data.splits
    parts = {"train": splits.train, "validate": splits.val, "test": data.tested}
    counts = ", ".join(f"{len(images):,} to {part}" for part, images in parts.items() if images)
    _tell(console, f"{request.data}: {len(splits.classes)} classes, images: {counts}")
    for warning in splits.warnings:
        _tell(console, f"warning: {warning}")
    if request.skip_bad:
        _tell(console, f"skipped {len(data.skipped)} files that cannot be read{':' if data.skipped else ''}")
        for path, reason in data.skipped:
            _tell(console, f"  {path}: {reason}")


def _leave(store: Store, request: Request, resume: str, main: bool) -> None:
    """The command was interrupted: say what is there."""
    if main:
        if runs.interrupted(store.run_folder(request.task)):
            _note(f"interrupted; the state is kept. To go on:\n  {_launched(resume)}")
        else:
            _note("interrupted before there was anything to keep")
    raise typer.Exit(INTERRUPTED)


def _with_remedy(fault: BitgraftError, store: Store, request: Request, resume: str) -> BitgraftError:
    """The same, with the way to go on where there is a state and the fault came while it ran."""
    kept = runs.interrupted(store.run_folder(request.task))
    if kept and "cannot write" in str(fault):
        return type(fault)(f"{fault}; the last state is kept, go on with `{_launched(resume)}`")
    return fault


def _launched(command: str) -> str:
    return f"{command}  (under the same launcher)" if "RANK" in os.environ else command


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report(console: Console, store: Store, net: Network, outcome: Outcome, as_json: bool) -> None:
    size, whole = outcome.path.stat().st_size, 4 * Size.of(net).parameters
    if as_json:
        show_json(_plain(store, outcome, size))
        return
    if outcome.test is not None:
        _tell(console, f"test accuracy {100 * outcome.test['accuracy']:.1f} %")
    _tell(console, f"wrote {outcome.path}, {megabytes(size)}; a copy of the network would take {megabytes(whole)}")
    where = "" if store.folder == Path("bitgraft-store") else f" --store {store.folder}"
    _tell(console, f"next: bitgraft predict IMAGE --task {outcome.task.name}{where}")


def _plain(store: Store, outcome: Outcome, size: int) -> dict[str, Any]:
    return {
        "task": outcome.task.name,
        "method": outcome.task.card.method,
        "classes": list(outcome.task.classes or ()),
        "file": str(outcome.path),
        "bytes": size,
        "metrics": outcome.task.metrics,
        "metrics_file": str(store.run_folder(outcome.task.name) / runs.METRICS),
        "history": outcome.history,
        "skipped": [{"file": str(path), "reason": reason} for path, reason in outcome.skipped],
    }
