"""What `bitgraft train` does once its command line is understood, in one process or several."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from accelerate import Accelerator
from rich.console import Console

from bitgraft.cli.interrupts import Interrupts
from bitgraft.cli.output import INTERRUPTED, WIDE, megabytes, show_json
from bitgraft.errors import BitgraftError, TrainingError
from bitgraft.methods import registry
from bitgraft.store import Backbone, Store
from bitgraft.training import runs
from bitgraft.training.callbacks import Callback, TensorBoard
from bitgraft.training.loop import StoppedError
from bitgraft.training.progress import Progress
from bitgraft.workflows.train_jointly import check_new, train_jointly
from bitgraft.workflows.train_jointly import run_folder as joint_folder
from bitgraft.workflows.train_task import Request, TrainData, TrainResult, check_free, open_request, open_store, train

Work = Callable[[list[Callback], Callable[[], bool]], list[TrainResult]]
"""(who watches, whether to stop) -> what came of it."""


def run(
    folder: str,
    backbone: Backbone | None,
    requests: list[Request],
    precision: str,
    tensorboard: bool,
    as_json: bool,
    resume: str,
) -> None:
    accelerator = _accelerator(precision)
    main = accelerator.is_main_process
    console = _console(to_stderr=as_json, quiet=not main)
    plan = _joint_plan if registry.get(requests[0].method).joint else _plan
    run_folder, name, work = plan(folder, backbone, requests, console, accelerator)
    callbacks: list[Callback] = [Progress(console)] if main else []
    if tensorboard and main:
        callbacks.append(TensorBoard(run_folder / "tensorboard"))
    said, tasks = "going on with" if requests[0].resume else "training", ", ".join(r.task for r in requests)
    _tell(console, f"{said} {tasks} by method {requests[0].method} on {name}")
    with Interrupts(accelerator) as interrupts:
        try:
            outcomes = work([interrupts, *callbacks], interrupts.stop)
        except (StoppedError, KeyboardInterrupt):
            _leave(run_folder, resume, main)
        except BitgraftError as fault:
            raise _with_remedy(fault, run_folder, resume) from fault
        except RuntimeError as fault:
            if accelerator.num_processes == 1 or not _lost_touch(fault):
                raise
            raise TrainingError("another process has ended, and this one cannot go on without it") from fault
    if main:
        _report(console, Store(folder), run_folder, outcomes, as_json)
    accelerator.end_training()


def _plan(
    folder: str, backbone: Backbone | None, requests: list[Request], console: Console, accelerator: Accelerator
) -> tuple[Path, str, Work]:
    """One task in a store: the folder of its run, what the backbone is called, and what to do."""
    (request,) = requests
    if Store.exists(folder):
        check_free(Store(folder), request)
    data = _open(requests, console)
    store, net = open_store(folder, backbone)

    def work(callbacks: list[Callback], stop: Callable[[], bool]) -> list[TrainResult]:
        return [train(store, net, request, data=data[0], callbacks=callbacks, accelerator=accelerator, stop=stop)]

    return store.run_folder(request.task), store.backbone.name, work


def _joint_plan(
    folder: str, backbone: Backbone | None, requests: list[Request], console: Console, accelerator: Accelerator
) -> tuple[Path, str, Work]:
    """Tasks that are trained together, for a store of their own."""
    check_new(folder, requests)
    if backbone is None:
        raise TrainingError("say with --backbone what the tasks are to be trained on")
    data = _open(requests, console)

    def work(callbacks: list[Callback], stop: Callable[[], bool]) -> list[TrainResult]:
        return train_jointly(
            folder, backbone, requests, data=data, callbacks=callbacks, accelerator=accelerator, stop=stop
        )

    return joint_folder(folder), backbone.name, work


def _open(requests: list[Request], console: Console) -> list[TrainData]:
    opened = []
    for request in requests:
        opened.append(open_request(request))
        _tell_data(console, request, opened[-1])
    return opened


def _lost_touch(fault: RuntimeError) -> bool:
    return isinstance(fault, torch.distributed.DistError) or "gloo" in str(fault)


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


def _tell_data(console: Console, request: Request, data: TrainData) -> None:
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


def _leave(run_folder: Path, resume: str, main: bool) -> None:
    """The command was interrupted: say what is there."""
    if main:
        if runs.interrupted(run_folder):
            _note(f"interrupted; the state is kept. To go on:\n  {_launched(resume)}")
        else:
            _note("interrupted before there was anything to keep")
    raise typer.Exit(INTERRUPTED)


def _with_remedy(fault: BitgraftError, run_folder: Path, resume: str) -> BitgraftError:
    """The same, with the way to go on where there is a state and the fault came while it ran."""
    if runs.interrupted(run_folder) and "cannot write" in str(fault):
        return type(fault)(f"{fault}; the last state is kept, go on with `{_launched(resume)}`")
    return fault


def _launched(command: str) -> str:
    return f"{command}  (under the same launcher)" if "RANK" in os.environ else command


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report(console: Console, store: Store, run_folder: Path, outcomes: list[TrainResult], as_json: bool) -> None:
    if as_json:
        plain = [_plain(run_folder, outcome) for outcome in outcomes]
        show_json(plain[0] if len(plain) == 1 else {"tasks": plain, "weights": store.backbone.weights})
        return
    for outcome in outcomes:
        of = "" if len(outcomes) == 1 else f" of {outcome.task.name}"
        if outcome.test is not None:
            _tell(console, f"test accuracy{of} {100 * outcome.test['accuracy']:.1f} %")
    whole = megabytes(4 * store.size.parameters)
    for outcome in outcomes:
        size = megabytes(outcome.path.stat().st_size)
        _tell(console, f"wrote {outcome.path}, {size}; a copy of the network would take {whole}")
    where = "" if store.folder == Path("bitgraft-store") else f" --store {store.folder}"
    _tell(console, f"next: bitgraft predict IMAGE --task {outcomes[0].task.name}{where}")


def _plain(run_folder: Path, outcome: TrainResult) -> dict[str, Any]:
    return {
        "task": outcome.task.name,
        "method": outcome.task.metadata.method,
        "classes": list(outcome.task.classes or ()),
        "file": str(outcome.path),
        "bytes": outcome.path.stat().st_size,
        "metrics": outcome.task.metrics,
        "metrics_file": str(run_folder / runs.METRICS),
        "history": outcome.history,
        "skipped": [{"file": str(path), "reason": reason} for path, reason in outcome.skipped],
    }
