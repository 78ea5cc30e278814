"""The one training loop. It knows phases, roles and batches, and no method by name."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor

from bitgraft.errors import TrainingError
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.training import optimisers
from bitgraft.training.batches import Batches
from bitgraft.training.config import QUICK, Config
from bitgraft.training.evaluation import Loader, evaluate
from bitgraft.training.headstart import fit_head, settle_statistics
from bitgraft.training.learner import Learner, Loss, Objective, trainable
from bitgraft.training.observers import Observer
from bitgraft.training.state import Position, Result, State, load, save
from bitgraft.training.statistics import synchronised

CHECK_EVERY = 50  # steps between looks at the loss, each of which waits for the device


class StoppedError(TrainingError):
    """The run was asked to stop, and can be resumed."""


def fit(
    net: Network,
    task: str | Sequence[str],
    train: Any,
    val: Any = None,
    config: Config = QUICK,
    *,
    loss: Loss | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    workers: int = 0,
    accelerator: Accelerator | None = None,
    checkpoint_every: float = 60.0,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train one task, or several in turns.

    Args:
        train: a Dataset of (image, label); for several tasks, a mapping from their names.
        val: likewise, for accuracy after each epoch and for keeping the best one.
        loss: in place of cross entropy, for heads that do not classify.
        folder: where checkpoints go; none are written without one.
        resume: go on from the checkpoint there.
        observers: are told of steps and epochs (progress, metrics).
        workers: processes that load data.
        accelerator: yours, where you have one; it says which device, how many processes, what precision.
        checkpoint_every: seconds between checkpoints within an epoch; each epoch ends with one.
        stop: asked after each step; when it says so, the state is saved and `StoppedError` raised.
    """
    names = [task] if isinstance(task, str) else list(task)
    accelerator = accelerator or Accelerator(
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=len(names) > 1)]
    )
    run = _Run(net, names, config, accelerator, loss, Path(folder) / "state.pt" if folder is not None else None)
    run.observers, run.stop, run.checkpoint_every = observers, stop, checkpoint_every
    run.load_data(train if len(names) > 1 else {names[0]: train}, val if len(names) > 1 else {names[0]: val}, workers)
    try:
        return run.go(resume)
    finally:
        run.release()


class _Run:
    """One call of `fit`."""

    observers: Sequence[Observer] = ()
    stop: Callable[[], bool]
    checkpoint_every: float

    def __init__(
        self,
        net: Network,
        names: list[str],
        config: Config,
        accelerator: Accelerator,
        loss: Loss | None,
        path: Path | None,
    ) -> None:
        self.net, self.names, self.config, self.accelerator, self.path = net, names, config, accelerator, path
        self.tasks = {name: trainable(net, name) for name in names}
        self.phases = registry.get(self.tasks[names[0]].card.method).phases
        for task in self.tasks.values():
            task.holds_statistics = config.statistics == "kept"
            task.centre(config.centred)
        net.to(accelerator.device)
        self.learner = accelerator.prepare(Learner(net, names))
        self.objective = Objective(self.tasks.values(), loss, config.label_smoothing)
        self.at, self.result = Position(), Result()
        self.best_state: dict[str, dict[str, Tensor]] | None = None
        self.sums = torch.zeros(3, device=accelerator.device)  # loss, right answers, images of this epoch
        self.saved_at = time.monotonic()

    def load_data(self, train: Mapping[str, Any], val: Mapping[str, Any], workers: int) -> None:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        config, pin = self.config, self.accelerator.device.type == "cuda"
        self.train = {
            name: Loader(data, Batches(len(data), config.batch, config.seed, rank, world), workers, pin)
            for name, data in train.items()
        }
        self.val = {
            name: Loader(data, Batches(len(data), 4 * config.batch, None, rank, world), workers, pin)
            for name, data in (val or {}).items()
            if data is not None
        }
        if config.class_weights is not None:
            for name, data in train.items():
                self.objective.weigh(name, config.class_weights, data, self.accelerator.device)

    def go(self, resume: bool) -> Result:
        state = self._resume() if resume else None
        if state is None and self.config.head_start:
            for name, loader in self.train.items():
                with self._over_processes():
                    settle_statistics(self.net, name, loader, self.accelerator.device)
                fit_head(self.net, name, loader.plain(), self.accelerator.device)
        for observer in self.observers:
            observer.begin(self.names, self._epochs(), len(self._turns()), self.at.epochs_done)
        for phase in range(self.at.phase, len(self.phases)):
            self._run_phase(state)
            state = None
            self.at = Position(phase + 1, epochs_done=self.at.epochs_done)
        self._finish()
        return self.result

    def _run_phase(self, state: State | None) -> None:
        phase = self.phases[self.at.phase]
        if phase.prune is not None and self.at.epoch == 0 and self.at.step == 0:
            for task in self.tasks.values():
                task.prune(phase.prune)
        learned = [pair for task in self.tasks.values() for pair in task.roles()]
        built = optimisers.build(learned, self.config, phase)
        self.optimizers = [self.accelerator.prepare(optimizer) for optimizer in built]
        if state is not None and state.optimizers is not None:
            for optimizer, held in zip(self.optimizers, state.optimizers, strict=True):
                optimizer.load_state_dict(held)
        epochs = phase.epochs if phase.epochs is not None else self.config.epochs
        while self.at.epoch < epochs and not self._out_of_patience():
            self._run_epoch(phase, epochs)
            record = self._record()
            for observer in self.observers:
                observer.epoch(record)
            self.at = Position(self.at.phase, self.at.epoch + 1, 0, self.at.epochs_done + 1)
            self._save()

    def _run_epoch(self, phase: registry.Phase, epochs: int) -> None:
        turns = self._turns()
        if self.at.step == 0:
            self.sums.zero_()
        streams = {
            name: self.train[name].from_step(self.at.epochs_done, sum(n == name for n, _ in turns[: self.at.step]))
            for name in self.names
        }
        for task in self.tasks.values():
            task.train()
        for index in range(self.at.step, len(turns)):
            name, step = turns[index]
            factor = optimisers.rate_factor(self.config, phase, self.at.epoch * len(turns) + index, len(turns), epochs)
            optimisers.set_rates(self.optimizers, factor)
            whole = self.train[name].batches.whole(step)
            self._step(name, next(streams[name]), whole)
            self.at.step = index + 1
            for observer in self.observers:
                observer.step(self.at.epochs_done, index + 1, whole)
            self._between_steps(index, len(turns))

    def _step(self, name: str, batch: tuple[Tensor, Any], whole: int) -> None:
        images, targets = batch
        self.objective.check(name, targets, f"the training data of task {name!r}")
        images = images.to(self.accelerator.device, non_blocking=True)
        targets = targets.to(self.accelerator.device, non_blocking=True)
        world = self.accelerator.num_processes
        parts = list(zip(images.chunk(self.config.accumulate), targets.chunk(self.config.accumulate), strict=True))
        for index, (part, wanted) in enumerate(parts):
            last = index == len(parts) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.learner):
                with self.accelerator.autocast(), self._over_processes():
                    output = self.learner(part, name)
                    loss = self.objective(name, output, wanted)
                self.accelerator.backward(loss * (world / whole))
            with torch.no_grad():
                right = self.objective.correct(output, wanted)
                self.sums += torch.stack([loss.detach().float(), right.float(), right.new_tensor(len(part)).float()])
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _over_processes(self) -> AbstractContextManager[Any]:
        """Batch norm takes its statistics over the batch of all processes."""
        return synchronised() if self.accelerator.num_processes > 1 else nullcontext()

    def _between_steps(self, index: int, count: int) -> None:
        """Look at the loss now and then, save now and then, stop when asked to."""
        stopping = self.stop()
        due = time.monotonic() - self.saved_at > self.checkpoint_every and index + 1 < count
        if stopping or due or (index + 1) % CHECK_EVERY == 0 or index + 1 == count:
            self._check_loss()
        if stopping or due:
            self._save()
        if stopping:
            raise StoppedError("training was stopped" + (f"; its state is in {self.path}" if self.path else ""))

    def _check_loss(self) -> None:
        if not torch.isfinite(self.sums[0]):
            kept = f"the last good state is in {self.path}" if self.path is not None and self.path.exists() else ""
            raise TrainingError(
                f"the loss is not a number any more, in epoch {self.at.epochs_done + 1} at or shortly before step "
                f"{self.at.step}: lower the rates ({dict(self.config.rates)}). {kept}".strip()
            )

    def _record(self) -> dict[str, Any]:
        sums = self.accelerator.reduce(self.sums, "sum").tolist()
        record: dict[str, Any] = {
            "epoch": self.at.epochs_done + 1,
            "phase": self.at.phase + 1,
            "train_loss": sums[0] / sums[2],
            "train_accuracy": sums[1] / sums[2],
        }
        if self.val:
            scores = {
                name: evaluate(self.net, name, loader, self.objective, self.accelerator)
                for name, loader in self.val.items()
            }
            record["val_loss"] = sum(s["loss"] for s in scores.values()) / len(scores)
            record["val_accuracy"] = sum(s["accuracy"] for s in scores.values()) / len(scores)
            if len(scores) > 1:
                record["by_task"] = scores
        self.result.history.append(record)
        is_last_phase = self.at.phase == len(self.phases) - 1  # an epoch before pruning is not one to keep
        if self.val and is_last_phase and self.result.is_better(record):
            self.result.best = record
            self.best_state = {name: _copy(task.state_dict()) for name, task in self.tasks.items()}
        return record

    def _out_of_patience(self) -> bool:
        if self.config.patience is None or self.result.best is None:
            return False
        return bool(self.at.epochs_done - self.result.best["epoch"] >= self.config.patience)

    def _finish(self) -> None:
        if self.config.keep == "best" and self.best_state is not None:
            for name, task in self.tasks.items():
                task.load_state_dict(self.best_state[name])
        for task in self.tasks.values():
            task.eval()
            task.metrics = {"last": self.result.history[-1], "best": self.result.best, "kept": self.config.keep}
        for observer in self.observers:
            observer.end()

    def release(self) -> None:
        """Leave tasks to normalise as they would without us, however the run ended."""
        for task in self.tasks.values():
            task.holds_statistics = False

    def _epochs(self) -> int:
        return sum(p.epochs if p.epochs is not None else self.config.epochs for p in self.phases)

    def _turns(self) -> list[tuple[str, int]]:
        """The steps of an epoch: tasks take turns, and one whose data is through sits out."""
        longest = max(len(loader.batches) for loader in self.train.values())
        return [(name, step) for step in range(longest) for name in self.names if step < len(self.train[name].batches)]

    def _save(self) -> None:
        self.saved_at = time.monotonic()
        if self.path is not None and self.accelerator.is_main_process:
            fresh_phase = self.at.epoch == 0 and self.at.step == 0
            held = None if fresh_phase else [optimizer.state_dict() for optimizer in self.optimizers]
            tasks = {name: task.state_dict() for name, task in self.tasks.items()}
            save(self.path, self.config, State(self.at, self.result, tasks, held, self.best_state, self.sums))

    def _resume(self) -> State:
        if self.path is None:
            raise TrainingError("resume needs the folder of the run that is to go on")
        state = load(self.path, self.config, self.names)
        self.at, self.result, self.best_state = state.at, state.result, state.best_tasks
        for name, task in self.tasks.items():
            task.load_state_dict(state.tasks[name])
        self.sums.copy_(state.sums)
        return state


def _copy(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
