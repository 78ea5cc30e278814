"""Train a task on a data set and write it to a store (`bitgraft train`, the demo, benchmarks)."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from bitgraft.data.images import Splits
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.data.splits import drop_bad, open_data
from bitgraft.errors import DataError, TrainingError
from bitgraft.format.archive import content_hash
from bitgraft.format.rounding import compact
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.runtime.heads import stated_preprocessing
from bitgraft.store import Backbone, Store
from bitgraft.task import Task
from bitgraft.training import runs
from bitgraft.training.callbacks import Callback, JsonLines
from bitgraft.training.checkpoint import Result
from bitgraft.training.config import Config
from bitgraft.training.evaluation import evaluate
from bitgraft.training.inputs import resized
from bitgraft.training.loop import fit
from bitgraft.workflows.identification import describe


@dataclass(frozen=True)
class Request:
    """One task to train."""

    data: str
    task: str
    method: str
    config: Config
    options: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 0
    resume: bool = False
    overwrite: bool = False
    skip_bad: bool = False
    root: Path | None = None
    """The folder that relative data paths start from."""
    val_share: float = 0.1
    """Share of the training images for validation, if the data set has no validation split."""
    both: bool = False
    """Also test the best epoch on validation."""
    borrow: tuple[str, ...] = ()
    """Tasks of the store whose masks are mixed in."""
    start: str | None = None
    """A task of the store to start from."""
    compact: bool = True
    """Round k and norm layers for a smaller file; not for a task whose norm layers will be trained further."""
    describe: bool = True
    """Store a description of the images, which identifies the task of an image; it needs more images than classes."""

    @property
    def earlier(self) -> tuple[str, ...]:
        """Return the tasks of the store that it builds on."""
        return self.borrow if self.start is None else (*self.borrow, self.start)


@dataclass(frozen=True)
class TrainResult:
    task: Task
    path: Path
    history: list[dict[str, Any]]
    skipped: Sequence[tuple[Path, str]]
    best: dict[str, Any] | None = None
    """The record of the best epoch on validation."""
    best_test: dict[str, float] | None = None
    """The test results of that epoch, if the request has `both`."""

    @property
    def test(self) -> dict[str, float] | None:
        return self.task.metrics.get("test")


def open_store(folder: str | Path, backbone: Backbone | None) -> tuple[Store, Network]:
    """Open the store in a folder, or create it with `backbone`; return it with its network."""
    if backbone is None or (Store.exists(folder) and Store(folder).backbone == backbone):
        store = Store(folder)
        return store, store.network()
    net = Network(backbone.build())
    return Store.create(folder, backbone, net), net


def open_request(request: Request) -> Splits:
    """Open the data set, without unreadable files if the request has `skip_bad`."""
    splits = open_data(request.data, seed=request.config.seed, root=request.root, val_share=request.val_share)
    if len(splits.classes) == 1:
        raise DataError(f"{request.data} has only one class, {splits.classes[0]!r}: training needs at least two")
    if not request.skip_bad:
        return splits
    splits, skipped = drop_bad(splits)
    return replace(splits, skipped=tuple(skipped))


def check_name_free(store: Store, name: str, overwrite: bool) -> None:
    """Refuse to replace a task without `overwrite`, or one that others depend on."""
    if store.path(name).exists() and not overwrite:
        raise TrainingError(f"the store already has a task {name!r}: choose another name, or pass --overwrite")
    store.check_replaceable(name)


def check_run(folder: Path, request: Request, what: str, where: str | Path) -> None:
    """Refuse to resume a run that does not exist, or to discard an interrupted one without `overwrite`."""
    if request.resume and not runs.begun(folder):
        raise TrainingError(f"there is no {what} to resume in {where}")
    if runs.interrupted(folder) and not (request.overwrite or request.resume):
        raise TrainingError(f"a {what} was interrupted: pass --resume to continue it, or --overwrite to start again")


def check_free(store: Store, request: Request) -> None:
    """Refuse a request that would replace a task or an interrupted run, or builds on a missing task."""
    name = request.task
    if name in request.earlier:
        raise TrainingError(f"task {name!r} cannot build on itself: choose another name for the new task")
    for earlier in request.earlier:
        store.archive(earlier)
    check_name_free(store, name, request.overwrite or request.resume)
    check_run(store.run_folder(name), request, f"run of task {name!r}", store.folder)


@dataclass(frozen=True)
class Run:
    """Requests that differ only in data and task; several are trained in turns."""

    net: Network
    requests: Sequence[Request]
    data: Sequence[Splits]
    folder: Path
    accelerator: Accelerator

    @contextlib.contextmanager
    def begun(self, **more: Any) -> Iterator[None]:
        """Lock the run's folder, write its settings, and at last remove them, in the main process; others wait."""
        first, main = self.requests[0], self.accelerator.is_main_process
        with runs.occupied(self.folder) if main else contextlib.nullcontext():
            if main:
                runs.settle(self.folder, {**self._settings(), **more}, first.resume)
            self.accelerator.wait_for_everyone()
            with one_sentence("; repair or remove it, or pass --skip-bad-images"):
                yield
            if main:
                runs.done(self.folder)
            self.accelerator.wait_for_everyone()

    def fit(self, callbacks: Sequence[Callback], stop: Callable[[], bool]) -> Result:
        """Add and train the tasks."""
        first, main, data = self.requests[0], self.accelerator.is_main_process, {}
        for request, splits in zip(self.requests, self.data, strict=True):
            data[request.task] = splits
            self.net.add_task(
                request.task,
                classes=splits.classes,
                method=request.method,
                seed=request.config.seed,
                preset=None,
                borrow=request.borrow,
                start=request.start,
                **request.options,
            )
        return fit(
            self.net,
            list(data),
            data,
            None,
            first.config,
            folder=self.folder,
            resume=first.resume and runs.interrupted(self.folder),
            callbacks=[JsonLines(self.folder / runs.METRICS), *callbacks] if main else callbacks,
            workers=first.workers,
            accelerator=self.accelerator,
            stop=stop,
            progress=False,
        )

    def finish(self) -> None:
        """Freeze the tasks, round them if the requests have `compact`, and measure the results."""
        for request, splits in zip(self.requests, self.data, strict=True):
            task = self.net.tasks[request.task]
            task.freeze()
            if request.compact and compact(task).is_compact and splits.val:
                measured = measure(self.net, request, splits, "val")
                task.metrics[task.metrics["kept"]] |= {f"val_{metric}": value for metric, value in measured.items()}
            if splits.tested:
                task.metrics["test"] = measure(self.net, request, splits, "test")

    def _settings(self) -> dict[str, Any]:
        """Return the settings that must not change when the run is resumed."""
        first = self.requests[0]
        method = {"method": first.method, "options": dict(first.options)}
        settings: dict[str, Any] = {"backbone": self.net.fingerprint, **method, **asdict(first.config)}
        for request, splits in zip(self.requests, self.data, strict=True):
            settings[f"data of {request.task}"] = request.data
            settings[f"classes of {request.task}"] = list(splits.classes)
            counts = [len(part or ()) for part in (splits.train, splits.val, splits.test)]
            settings[f"images of {request.task}"] = counts
        return settings


def measure(net: Network, request: Request, splits: Splits, split: str) -> dict[str, float]:
    batch = 4 * request.config.batch
    return evaluate(net, request.task, splits, split=split, batch=batch, workers=request.workers)


def train(
    store: Store,
    net: Network,
    request: Request,
    *,
    data: Splits | None = None,
    callbacks: Sequence[Callback] = (),
    accelerator: Accelerator | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Train a task on a data set, test it, and write its file to the store.

    Under a launcher every process calls this; only the main one writes. `data` is the result of `open_request`.
    """
    accelerator = accelerator or Accelerator()
    check_free(store, request)
    data = data or open_request(request)
    run = Run(net, [request], [data], store.run_folder(request.task), accelerator)
    path = store.path(request.task)
    built_on = {
        "borrow": [content_hash(store.archive(name)) for name in request.borrow] or None,
        "start": content_hash(store.archive(request.start)) if request.start is not None else None,
    }
    with run.begun(**built_on):
        chained = registry.get(request.method).depends_on_previous  # such as PackNet
        chain = [name for name in store.names() if chained and store.archive(name).metadata.method == request.method]
        for earlier in [*chain, *request.earlier]:
            if earlier not in net.tasks and earlier != request.task:
                store.load(net, earlier)
        if request.task in net.tasks:
            net.remove_task(request.task)
        result = run.fit(callbacks, stop)
        task, best_test = net.tasks[request.task], None
        if request.both and data.tested and result.best_tasks and result.best != result.history[-1]:
            last = {name: tensor.clone() for name, tensor in task.state_dict().items()}
            task.load_state_dict(result.best_tasks[request.task])
            best_test = measure(net, request, data, "test")
            task.load_state_dict(last)
        run.finish()
        if accelerator.is_main_process:
            if request.describe and len(data.train) > len(data.classes):
                describe(net, request.task, data, workers=request.workers)
            net.save_task(request.task, path)
    return TrainResult(task, path, result.history, data.skipped, result.best, best_test or task.metrics.get("test"))


@contextlib.contextmanager
def one_sentence(remedy: str = "") -> Iterator[None]:
    """Reduce the traceback of a data loader worker to one sentence."""
    try:
        yield
    except DataError as error:
        message = re.split(r"\bDataError: ", str(error))[-1].strip().partition("\n")[0]
        raise DataError(message + remedy if message.startswith("cannot read") else message) from error
    except RuntimeError as error:
        if "DataLoader worker" in str(error) and not isinstance(error, TrainingError):
            first_line = str(error).partition("\n")[0]
            raise TrainingError(f"a data loader worker ended ({first_line}): try --workers 0") from error
        raise


def preprocessing_for(net: Network, config: Config) -> Preprocessing:
    """Return the backbone's preprocessing, at the configured size."""
    return resized(stated_preprocessing(net.backbone), config)
