"""From several data sets to a store of tasks that were trained together, on the backbone that came of it.

new-store/
  store.json                      the backbone's name, its new weights and fingerprint
  weights/backbone.safetensors    what all tasks learned
  flowers.safetensors, ...        what each learned for itself
  runs/_joint/                    metrics, and a checkpoint while it runs
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate import Accelerator

from bitgraft.errors import StoreError, TrainingError
from bitgraft.network import Network
from bitgraft.store import Backbone, Store
from bitgraft.training import runs
from bitgraft.training.callbacks import Callback
from bitgraft.workflows.train_task import (
    Request,
    TrainData,
    TrainResult,
    check_run,
    finish,
    fit_requests,
    open_request,
    run_in,
    settings,
)

WEIGHTS = "weights/backbone.safetensors"


def run_folder(folder: str | Path) -> Path:
    return Path(folder) / "runs" / "_joint"  # no task's name begins so


def check_new(folder: str | Path, requests: Sequence[Request]) -> None:
    """Refuse a store that is there already: its tasks belong to another backbone."""
    names, first = [request.task for request in requests], requests[0]
    if len(set(names)) < len(names):
        raise TrainingError(f"tasks need names that differ, not {', '.join(names)}")
    check_run(run_folder(folder), first, "joint run", folder)
    if Store.exists(folder) and not first.resume:
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
    run, net = run_folder(folder), Network(backbone.build()).joint_copy()
    with run_in(run, settings(net, requests, opened), requests[0].resume, accelerator):
        result = fit_requests(net, requests, opened, run, callbacks, accelerator, stop)
        outcomes = []
        for request, one in zip(requests, opened, strict=True):
            task = finish(net, request, one)
            path = Path(folder) / f"{task.name}.safetensors"
            outcomes.append(TrainResult(task, path, result.history, task.metrics.get("test"), one.skipped))
        if accelerator.is_main_process:
            _write(Path(folder), backbone, net, outcomes)
            runs.done(run)
        accelerator.wait_for_everyone()
    return outcomes


def _write(folder: Path, backbone: Backbone, net: Network, outcomes: Sequence[TrainResult]) -> None:
    """The weights first: a store is one from when its record is there, and must be whole then."""
    (folder / WEIGHTS).parent.mkdir(parents=True, exist_ok=True)
    net.save_backbone(folder / WEIGHTS)
    Store.create(folder, Backbone(backbone.name, str(folder / WEIGHTS)), net)
    for outcome in outcomes:
        net.save_task(outcome.task.name, outcome.path)
