"""From a data set to a task file in a store: what `bitgraft train` and the demo both do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from bitgraft.data.dataset import ImageDataset
from bitgraft.data.images import Images, Splits
from bitgraft.data.preprocessing import Augmentation, Preprocessing
from bitgraft.data.splits import open_data
from bitgraft.errors import TrainingError
from bitgraft.heads import stated_preprocessing
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.store import Backbone, Store
from bitgraft.task import Task
from bitgraft.training.config import Config
from bitgraft.training.evaluation import score
from bitgraft.training.loop import fit
from bitgraft.training.observers import JsonLines, Observer


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


@dataclass(frozen=True)
class Outcome:
    task: Task
    path: Path
    history: list[dict[str, Any]]
    test: dict[str, float] | None
    skipped: list[tuple[Path, str]]


def open_store(folder: str | Path, backbone: Backbone | None) -> tuple[Store, Network]:
    """The store in a folder and its network, begun with `backbone` where there is none yet."""
    if backbone is None or ((Path(folder) / "store.json").exists() and Store(folder).backbone == backbone):
        store = Store(folder)
        return store, store.network()
    net = Network(backbone.build().eval())
    return Store.create(folder, backbone, net.fingerprint), net


def train(
    store: Store,
    net: Network,
    request: Request,
    *,
    observers: Sequence[Observer] = (),
    accelerator: Accelerator | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Train a task on a data set, try it on the test images, and write its file to the store."""
    path, folder, config = store.path(request.task), store.run_folder(request.task), request.config
    if path.exists() and not request.overwrite:
        raise TrainingError(f"the store has a task {request.task!r} already: choose another name, or pass --overwrite")
    splits = open_data(request.data, seed=config.seed)
    preprocessing = _preprocessing(net, config)
    for earlier in _chain(store, request.method):
        if earlier not in net.tasks and earlier != request.task:
            store.load(net, earlier)
    if request.task in net.tasks:
        net.remove_task(request.task)
    net.add_task(
        request.task,
        classes=splits.classes,
        method=request.method,
        seed=config.seed,
        preprocessing=preprocessing.to_dict(),
        **request.options,
    )
    flip = splits.flip if config.flip is None else config.flip
    skip = request.skip_bad
    training = ImageDataset(
        splits.train, preprocessing, Augmentation(flip=flip, crop=config.crop), config.seed, skip_bad=skip
    )
    validation = _evaluation(splits.val, preprocessing, skip)
    folder.mkdir(parents=True, exist_ok=True)
    result = fit(
        net,
        request.task,
        training,
        validation,
        config,
        folder=folder,
        resume=request.resume,
        observers=[JsonLines(folder / "metrics.jsonl"), *observers],
        workers=request.workers,
        accelerator=accelerator,
        stop=stop,
    )
    held_out = _evaluation(splits.test, preprocessing, skip) if _labelled(splits) else None
    tested = score(net, request.task, held_out, batch=4 * config.batch, workers=request.workers) if held_out else None
    task = net.tasks[request.task]
    task.metrics = {**task.metrics, **({"test": tested} if tested else {})}
    task.freeze()
    net.save_task(request.task, path)
    skipped = [bad for data in (training, validation, held_out) if data is not None for bad in data.skipped]
    return Outcome(task, path, result.history, tested, skipped)


def _preprocessing(net: Network, config: Config) -> Preprocessing:
    stated = Preprocessing.from_dict(stated_preprocessing(net.backbone))
    return stated if config.size is None else stated.at(config.size, config.resize)


def _evaluation(images: Images | None, preprocessing: Preprocessing, skip_bad: bool) -> ImageDataset | None:
    return ImageDataset(images, preprocessing, skip_bad=skip_bad) if images is not None and len(images) else None


def _labelled(splits: Splits) -> bool:
    return splits.test is not None and all(label >= 0 for label in splits.test.labels)


def _chain(store: Store, method: str) -> list[str]:
    """Tasks that a further one of a leaning method builds on, the earliest first."""
    if not registry.get(method).leans:
        return []
    cards = {name: store.archive(name).card for name in store.names()}
    chain = [name for name, card in cards.items() if card.method == method]
    return sorted(chain, key=lambda name: _depth(name, cards))


def _depth(name: str, cards: Mapping[str, Any]) -> int:
    return 1 + max((_depth(earlier, cards) for earlier in cards[name].leans_on), default=0)
