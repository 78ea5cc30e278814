"""From several data sets to a store of tasks that were trained together, on the backbone that came of it.

new-store/
  store.json                      the backbone's name, its new weights and fingerprint
  weights/backbone.safetensors    what all tasks learned
  flowers.safetensors, ...        what each learned for itself
  runs/_joint/                    metrics, and a checkpoint while it runs
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from bitgraft.data.dataset import ImageDataset
from bitgraft.errors import StoreError, TrainingError
from bitgraft.network import Network
from bitgraft.store import Backbone, Store
from bitgraft.training import runs
from bitgraft.training.callbacks import Callback, JsonLines
from bitgraft.training.evaluation import score
from bitgraft.training.loop import fit
from bitgraft.workflows.train_task import (
    Request,
    TrainData,
    TrainResult,
    one_sentence,
    open_request,
    preprocessing_for,
    training_images,
)


def run_folder(folder: str | Path) -> Path:
    return Path(folder) / "runs" / "_joint"  # no task's name begins so


def check_new(folder: str | Path, requests: Sequence[Request]) -> None:
    """Refuse a store that is there already: its tasks belong to another backbone."""
    names, run = [request.task for request in requests], run_folder(folder)
    if len(set(names)) < len(names):
        raise TrainingError(f"tasks need names that differ, not {', '.join(names)}")
    if requests[0].resume:
        if not runs.begun(run):
            raise TrainingError(f"there is no joint run to resume in {folder}")
    elif runs.interrupted(run) and not requests[0].overwrite:
        raise TrainingError(
            f"a joint run in {folder} was interrupted and can go on: pass --resume, or --overwrite to begin anew"
        )
    elif Store.exists(folder):
        raise StoreError(
            f"there is a store at {folder} already: tasks that are trained jointly get a backbone of their own, so "
            "choose another with --store"
        )


def train_jointly(
    folder: str | Path,
    backbone: Backbone,
    requests: Sequence[Request],
    *,
    data: Sequence[TrainData] | None = None,
    callbacks: Sequence[Callback] = (),
    accelerator: Accelerator | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[TrainResult]:
    """Train tasks in turns, what they share along with them, and begin a store with the backbone that they end on.

    The requests differ in data and task alone. Under a launcher every process calls this; the main one alone writes.
    """
    accelerator = accelerator or Accelerator()
    check_new(folder, requests)
    opened = list(data or map(open_request, requests))
    run, main = run_folder(folder), accelerator.is_main_process
    net = Network(backbone.build()).joint_copy()
    with runs.occupied(run) if main else contextlib.nullcontext():
        if main:
            runs.settle(run, _settings(net, requests, opened), requests[0].resume)
        accelerator.wait_for_everyone()
        with one_sentence("; mend or remove it, or pass --skip-bad-images"):
            outcomes = _train(Path(folder), net, requests, opened, callbacks, accelerator, stop)
        if main:
            _write(Path(folder), backbone, net, outcomes)
            runs.done(run)
        accelerator.wait_for_everyone()
    return outcomes


def _train(
    folder: Path,
    net: Network,
    requests: Sequence[Request],
    opened: Sequence[TrainData],
    callbacks: Sequence[Callback],
    accelerator: Accelerator,
    stop: Callable[[], bool],
) -> list[TrainResult]:
    first, run = requests[0], run_folder(folder)
    config = first.config
    torch.manual_seed(config.seed)  # dropout and the like
    preprocessing = preprocessing_for(net, config)
    for request, data in zip(requests, opened, strict=True):
        net.add_task(
            request.task,
            classes=data.splits.classes,
            method=request.method,
            seed=config.seed,
            preprocessing=preprocessing.to_dict(),
            **request.options,
        )
    named = {request.task: data for request, data in zip(requests, opened, strict=True)}
    result = fit(
        net,
        list(named),
        {name: training_images(d.splits.train, d.splits, preprocessing, config) for name, d in named.items()},
        {name: ImageDataset(d.splits.val, preprocessing) if d.splits.val else None for name, d in named.items()},
        config,
        folder=run,
        resume=first.resume and runs.interrupted(run),
        callbacks=[JsonLines(run / runs.METRICS), *callbacks] if accelerator.is_main_process else callbacks,
        workers=first.workers,
        accelerator=accelerator,
        checkpoint_every=first.checkpoint_every,
        stop=stop,
    )
    outcomes = []
    for name, data in named.items():
        task, tested = net.tasks[name], None
        if data.tested:
            held_out = ImageDataset(data.tested, preprocessing)
            tested = score(net, name, held_out, batch=4 * config.batch, workers=first.workers)
            task.metrics = {**task.metrics, "test": tested}
        task.freeze()
        outcomes.append(TrainResult(task, folder / f"{name}.safetensors", result.history, tested, data.skipped))
    return outcomes


def _write(folder: Path, backbone: Backbone, net: Network, outcomes: Sequence[TrainResult]) -> None:
    """The weights first: a store is one from when its record is there, and must be whole then."""
    weights = folder / "weights" / "backbone.safetensors"
    weights.parent.mkdir(parents=True, exist_ok=True)
    net.save_backbone(weights)
    Store.create(folder, Backbone(backbone.name, str(weights)), net)
    for outcome in outcomes:
        net.save_task(outcome.task.name, outcome.path)


def _settings(net: Network, requests: Sequence[Request], opened: Sequence[TrainData]) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    first = requests[0]
    tasks = {
        f"task {request.task}": {
            "data": request.data,
            "classes": list(data.splits.classes),
            "images": [len(p) if p else 0 for p in (data.splits.train, data.splits.val, data.splits.test)],
        }
        for request, data in zip(requests, opened, strict=True)
    }
    method = {"method": first.method, "options": dict(first.options)}
    return {"backbone": net.fingerprint, **method, **tasks, "config": asdict(first.config)}
