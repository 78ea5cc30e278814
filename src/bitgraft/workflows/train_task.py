"""From a data set to a task file in a store: what `bitgraft train` and the demo both do."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from bitgraft.data.dataset import ImageDataset
from bitgraft.data.images import Images, Splits
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
from bitgraft.training.inputs import labelled as labelled
from bitgraft.training.inputs import resized
from bitgraft.training.loop import fit
from bitgraft.workflows.describe_task import describe


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
    checkpoint_every: float = 60.0
    """Seconds between checkpoints within an epoch; each epoch ends with one."""
    root: Path | None = None
    """Where relative folders of data start."""
    val_share: float = 0.1
    """What is held back for validation where the data set has no such split of its own."""
    both: bool = False
    """Try the epoch that validation would choose on the test images, too."""
    borrow: tuple[str, ...] = ()
    """Tasks of the store whose masks are mixed in."""
    start: str | None = None
    """A task of the store to begin as."""
    compact: bool = True
    """Round k and norm layers to what a small file holds; a task whose norm layers are to be trained on is not."""
    describe: bool = True
    """Let the file say what its images look like, so that an image can find its task."""

    @property
    def earlier(self) -> tuple[str, ...]:
        """The tasks of the store that it names."""
        return self.borrow if self.start is None else (*self.borrow, self.start)


@dataclass(frozen=True)
class TrainData:
    """The data set of a request, and the files that were left out of it with the reasons."""

    splits: Splits
    skipped: list[tuple[Path, str]]

    @property
    def tested(self) -> Images | None:
        """Test images with labels."""
        test = self.splits.test
        return test if test and all(label >= 0 for label in test.labels) else None


@dataclass(frozen=True)
class TrainResult:
    task: Task
    path: Path
    history: list[dict[str, Any]]
    test: dict[str, float] | None
    skipped: list[tuple[Path, str]]
    best: dict[str, Any] | None = None
    """The record of the epoch that validation would choose."""
    best_test: dict[str, float] | None = None
    """How that epoch does on the test images, where the request asks for both."""


def open_store(folder: str | Path, backbone: Backbone | None) -> tuple[Store, Network]:
    """The store in a folder and its network, begun with `backbone` where there is none yet."""
    if backbone is None or (Store.exists(folder) and Store(folder).backbone == backbone):
        store = Store(folder)
        return store, store.network()
    net = Network(backbone.build())
    return Store.create(folder, backbone, net), net


def open_request(request: Request) -> TrainData:
    """Find the images, without those that cannot be read where the request says so."""
    splits = open_data(request.data, seed=request.config.seed, root=request.root, val_share=request.val_share)
    if len(splits.classes) == 1:
        raise DataError(
            f"all images of {request.data} are of one class, {splits.classes[0]!r}, so there is nothing to tell apart: "
            "give it images of at least two classes"
        )
    return TrainData(*drop_bad(splits)) if request.skip_bad else TrainData(splits, [])


def check_name_free(store: Store, name: str, overwrite: bool) -> None:
    """Refuse to write over a task, unless asked to and nothing depends on it."""
    if store.path(name).exists() and not overwrite:
        raise TrainingError(f"the store has a task {name!r} already: choose another name, or pass --overwrite")
    store.check_replaceable(name)


def check_run(folder: Path, request: Request, what: str, where: str | Path) -> None:
    """Refuse to resume a run that is not there, or to write over one that can go on, unless asked to."""
    if request.resume and not runs.begun(folder):
        raise TrainingError(f"there is no {what} to resume in {where}")
    if runs.interrupted(folder) and not (request.overwrite or request.resume):
        raise TrainingError(f"a {what} was interrupted and can go on: pass --resume, or --overwrite to begin anew")


def check_free(store: Store, request: Request) -> None:
    """Refuse to write over a task, or over a run that can go on, unless asked to, and to build on what is not there."""
    name = request.task
    if name in request.earlier:
        raise TrainingError(f"task {name!r} cannot build on itself: choose another name for the new one")
    for earlier in request.earlier:
        store.archive(earlier)
    check_name_free(store, name, request.overwrite or request.resume)
    check_run(store.run_folder(name), request, f"run of task {name!r}", store.folder)


def train(
    store: Store,
    net: Network,
    request: Request,
    *,
    data: TrainData | None = None,
    callbacks: Sequence[Callback] = (),
    accelerator: Accelerator | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Train a task on a data set, try it on the test images, and write its file to the store.

    Under a launcher every process calls this; the main one alone writes. `data` is what `open_request` gives.
    """
    accelerator = accelerator or Accelerator()
    check_free(store, request)
    data = data or open_request(request)
    folder, path = store.run_folder(request.task), store.path(request.task)
    built_on = {
        "borrow": [content_hash(store.archive(name)) for name in request.borrow] or None,
        "start": content_hash(store.archive(request.start)) if request.start is not None else None,
    }
    with run_in(folder, settings(net, [request], [data], **built_on), request.resume, accelerator):
        chained = registry.get(request.method).depends_on_previous  # on all tasks of the method so far
        chain = [name for name in store.names() if chained and store.archive(name).metadata.method == request.method]
        for earlier in [*chain, *request.earlier]:
            if earlier not in net.tasks and earlier != request.task:
                store.load(net, earlier)
        if request.task in net.tasks:
            net.remove_task(request.task)
        result = fit_requests(net, [request], [data], folder, callbacks, accelerator, stop)
        task = net.tasks[request.task]
        other_test = None
        if request.both and result.best_tasks and result.best != result.history[-1]:
            last = {name: tensor.clone() for name, tensor in task.state_dict().items()}
            task.load_state_dict(result.best_tasks[request.task])
            other_test = tested(net, request, data)
            task.load_state_dict(last)
        finish(net, request, data)
        test = task.metrics.get("test")
        best_test = other_test or test
        if accelerator.is_main_process:
            if request.describe:
                describe(net, request.task, data.splits, workers=request.workers)
            net.save_task(request.task, path)
            runs.done(folder)
        accelerator.wait_for_everyone()
    return TrainResult(task, path, result.history, test, data.skipped, result.best, best_test)


def finish(net: Network, request: Request, data: TrainData) -> Task:
    """Freeze a task, round it to what its file holds, and measure it as it is then."""
    task = net.tasks[request.task]
    task.freeze()
    if request.compact and compact(task).is_compact and data.splits.val:
        found = _measured(net, request, data.splits.val)
        task.metrics[task.metrics["kept"]] |= {f"val_{what}": value for what, value in found.items()}
    if test := tested(net, request, data):
        task.metrics["test"] = test
    return task


@contextlib.contextmanager
def run_in(folder: Path, settings: dict[str, Any], resume: bool, accelerator: Accelerator) -> Iterator[None]:
    """Hold the folder of a run in the main process, with its settings; the others follow."""
    with runs.occupied(folder) if accelerator.is_main_process else contextlib.nullcontext():
        if accelerator.is_main_process:
            runs.settle(folder, settings, resume)
        accelerator.wait_for_everyone()
        with one_sentence("; mend or remove it, or pass --skip-bad-images"):
            yield


def fit_requests(
    net: Network,
    requests: Sequence[Request],
    opened: Sequence[TrainData],
    folder: Path,
    callbacks: Sequence[Callback],
    accelerator: Accelerator,
    stop: Callable[[], bool],
) -> Result:
    """Add the tasks of requests that differ in data and task alone, and train them, in turns if there are several."""
    first, config = requests[0], requests[0].config
    for request, data in zip(requests, opened, strict=True):
        net.add_task(
            request.task,
            classes=data.splits.classes,
            method=request.method,
            seed=config.seed,
            preset=None,
            borrow=request.borrow,
            start=request.start,
            **request.options,
        )
    return fit(
        net,
        [request.task for request in requests],
        {request.task: data.splits for request, data in zip(requests, opened, strict=True)},
        None,
        config,
        folder=folder,
        resume=first.resume and runs.interrupted(folder),
        callbacks=[JsonLines(folder / runs.METRICS), *callbacks] if accelerator.is_main_process else callbacks,
        workers=first.workers,
        accelerator=accelerator,
        checkpoint_every=first.checkpoint_every,
        stop=stop,
        progress=False,
    )


def tested(net: Network, request: Request, data: TrainData) -> dict[str, float] | None:
    """How a task does on the test images, if there are some with labels."""
    return _measured(net, request, data.tested) if data.tested else None


def _measured(net: Network, request: Request, images: Images) -> dict[str, float]:
    seen = ImageDataset(images, preprocessing_for(net, request.config))
    return evaluate(net, request.task, seen, batch=4 * request.config.batch, workers=request.workers)


def settings(net: Network, requests: Sequence[Request], opened: Sequence[TrainData], **more: Any) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    first, tasks = requests[0], {}
    for request, data in zip(requests, opened, strict=True):
        splits = (data.splits.train, data.splits.val, data.splits.test)
        images = [len(split) if split else 0 for split in splits]
        tasks[f"task {request.task}"] = {"data": request.data, "classes": list(data.splits.classes), "images": images}
    about = tasks if len(tasks) > 1 else tasks[f"task {first.task}"]
    method = {"backbone": net.fingerprint, "method": first.method, "options": dict(first.options)}
    return {**method, **about, **more, "config": asdict(first.config)}


@contextlib.contextmanager
def one_sentence(remedy: str = "") -> Iterator[None]:
    """Faults that came through a loader's worker as a traceback, as one sentence."""
    try:
        yield
    except DataError as fault:
        said = re.split(r"\bDataError: ", str(fault))[-1].strip().partition("\n")[0]
        raise DataError(said + remedy if said.startswith("cannot read") else said) from fault
    except RuntimeError as fault:
        if "DataLoader worker" in str(fault) and not isinstance(fault, TrainingError):
            first = str(fault).partition("\n")[0]
            raise TrainingError(f"a process that loads images ended ({first}): try --workers 0") from fault
        raise


def preprocessing_for(net: Network, config: Config) -> Preprocessing:
    """The backbone's own, at the size that the settings ask for."""
    return resized(stated_preprocessing(net.backbone), config)
