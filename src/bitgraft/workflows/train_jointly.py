"""Train tasks together with the weights they share, and write them to a new store.

new-store/
  store.json                      the backbone's name, its new weights and fingerprint
  weights/backbone.safetensors    the weights that tasks share
  flowers.safetensors, ...        the tasks
  runs/_joint/                    metrics, and a checkpoint during training
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate import Accelerator

from bitgraft.data.images import Splits
from bitgraft.errors import StoreError, TrainingError
from bitgraft.network import Network
from bitgraft.store import Backbone, Store
from bitgraft.training.callbacks import Callback
from bitgraft.workflows.train_task import Request, Run, TrainResult, check_run, open_request

WEIGHTS = "weights/backbone.safetensors"


def run_folder(folder: str | Path) -> Path:
    return Path(folder) / "runs" / "_joint"  # no task name starts with _


def check_new(folder: str | Path, requests: Sequence[Request]) -> None:
    """Refuse an existing store, since joint training changes the backbone."""
    names, first = [request.task for request in requests], requests[0]
    if len(set(names)) < len(names):
        raise TrainingError(f"each task needs its own name, but the names are {', '.join(names)}")
    check_run(run_folder(folder), first, "joint run", folder)
    if Store.exists(folder) and not first.resume:
        raise StoreError(
            f"there is a store at {folder} already, and joint training makes a new backbone: choose another folder "
            "with --store"
        )


def train_jointly(
    folder: str | Path,
    backbone: Backbone,
    requests: Sequence[Request],
    *,
    data: Sequence[Splits] | None = None,
    callbacks: Sequence[Callback] = (),
    accelerator: Accelerator | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[TrainResult]:
    """Train tasks in turns, together with the weights they share, and create a store with the resulting backbone.

    The requests differ only in data and task. Under a launcher every process calls this; only the main one writes.
    """
    accelerator = accelerator or Accelerator()
    check_new(folder, requests)
    opened, net = list(data or map(open_request, requests)), Network(backbone.build()).joint_copy()
    run, results = Run(net, requests, opened, run_folder(folder), accelerator), []
    with run.begun():
        fitted = run.fit(callbacks, stop)
        run.finish()
        for request, one in zip(requests, opened, strict=True):
            task, path = net.tasks[request.task], Path(folder) / f"{request.task}.safetensors"
            results.append(TrainResult(task, path, fitted.history, one.skipped))
        if accelerator.is_main_process:
            _write(Path(folder), backbone, net, results)
    return results


def _write(folder: Path, backbone: Backbone, net: Network, results: Sequence[TrainResult]) -> None:
    """Write the weights first: once store.json exists, the store must be complete."""
    (folder / WEIGHTS).parent.mkdir(parents=True, exist_ok=True)
    net.save_backbone(folder / WEIGHTS)
    Store.create(folder, Backbone(backbone.name, str(folder / WEIGHTS)), net)
    for result in results:
        net.save_task(result.task.name, result.path)
