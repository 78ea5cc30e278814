"""The one training loop. It knows phases, roles and batches, and no method by name."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor

from bitgraft.errors import TrainingError
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.task import Task
from bitgraft.training import cpu, optimizers
from bitgraft.training.callbacks import Callback
from bitgraft.training.checkpoint import Position, Result, State, copied, load, of_task, save
from bitgraft.training.config import Config, preset
from bitgraft.training.evaluation import Loader, validate
from bitgraft.training.head_init import begin
from bitgraft.training.joint import SHARED, Shared, shared_weights
from bitgraft.training.learner import Learner, Loss, Objective, trainable
from bitgraft.training.loader import Batches, turns
from bitgraft.training.sync_bn import over_processes
from bitgraft.training.to_device import to_device

CHECK_EVERY = 50  # steps between looks at the loss, where each waits for the device or for other processes


class StoppedError(TrainingError):
    """The run was asked to stop, and can be resumed."""


def fit(
    net: Network,
    task: str | Sequence[str],
    train: Any,
    val: Any = None,
    config: Config | None = None,
    *,
    loss: Loss | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    workers: int = 0,
    accelerator: Accelerator | None = None,
    checkpoint_every: float = 60.0,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train one task, or several in turns; with a joint method, what they share of the backbone learns along.

    Args:
        train: a Dataset of (image, label); for a list of tasks, a mapping from their names.
        val: likewise, for accuracy after each epoch and for keeping the best one.
        config: by default the `quick` preset, with the rates of the (first) task's method.
        loss: in place of cross entropy, for heads that do not classify.
        folder: where checkpoints go; none are written without one.
        resume: go on from the checkpoint there.
        callbacks: are told of steps and epochs (progress, metrics).
        workers: processes that load data.
        accelerator: yours, where you have one; it says which device, how many processes, what precision.
        checkpoint_every: seconds between checkpoints within an epoch; each epoch ends with one.
        stop: asked after each step; when it says so, the state is saved and `StoppedError` raised.
    """
    if isinstance(task, str):
        task, train, val = [task], {task: train}, {task: val}
    accelerator = accelerator or Accelerator()
    config = config or preset("quick", trainable(net, task[0]).metadata.method)
    run = _Run(net, list(task), config, accelerator, loss, Path(folder) / "state.pt" if folder is not None else None)
    run.callbacks, run.stop, run.checkpoint_every = callbacks, stop, checkpoint_every
    try:
        run.load_data(train, val, workers)
        return run.go(resume)
    finally:
        run.release()
        for callback in callbacks:
            callback.end()


class _Run:
    """One call of `fit`."""

    callbacks: Sequence[Callback] = ()
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
        self.phases = optimizers.phases_of(registry.get(self.tasks[names[0]].metadata.method), config)
        for task in self.tasks.values():
            task.holds_statistics = config.statistics == "kept"
            cpu.set_channels_last(task, accelerator.device.type == "cpu")  # as `to_device` does with images
            if config.scale_k2_by_r:
                task.scale_k2_by_r(config.scale_k2_by_r, config.seed)
        net.to(accelerator.device)
        self.shared = shared_weights(net, self.tasks)
        self.learned: dict[str, Task | Shared] = {**self.tasks, **({SHARED: self.shared} if self.shared else {})}
        if len(names) > 1 and accelerator.ddp_handler is None:  # the others sit out a turn
            accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.learner = accelerator.prepare(Learner(net, self.learned.values()))
        self.objective = Objective(self.tasks.values(), loss, config.label_smoothing)
        self.at, self.result = Position(), Result()
        self.best_state: dict[str, dict[str, Tensor]] | None = None
        self.sums = torch.zeros(3, device=accelerator.device)  # loss, right answers, images of this epoch
        self.saved_at = time.monotonic()

    def load_data(self, train: Mapping[str, Any], val: Mapping[str, Any], workers: int) -> None:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        config, pin = self.config, self.accelerator.device.type == "cuda"

        def loader(data: Any, size: int, seed: int | None) -> Loader:
            return Loader(data, Batches(len(data), size, seed, rank, world), workers, pin)

        self.train = {name: loader(data, config.batch, config.seed) for name, data in train.items()}
        self.val = {n: loader(data, 4 * config.batch, None) for n, data in (val or {}).items() if data is not None}
        self.turns = turns({name: len(self.train[name].batches) for name in self.names})
        if config.class_weights is not None:
            for name, data in train.items():
                self.objective.weigh(name, config.class_weights, data, self.accelerator.device)

    def go(self, resume: bool) -> Result:
        state = self._resume() if resume else None
        if state is None:
            for name, loader in self.train.items():
                begin(self.net, name, loader, self.objective, self.config, self.accelerator)
        for callback in self.callbacks:
            callback.begin(self.names, sum(map(self._epochs, self.phases)), len(self.turns), self.at.epochs_done)
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
        learned = [pair for held in self.learned.values() for pair in held.roles()]
        built = optimizers.build(learned, self.config, phase)
        self.optimizers = [self.accelerator.prepare(optimizer) for optimizer in built]
        if state is not None and state.optimizers is not None:
            for optimizer, held in zip(self.optimizers, state.optimizers, strict=True):
                optimizer.load_state_dict(held)
        epochs = self._epochs(phase)
        while self.at.epoch < epochs and self.result.hopeful(self.at.epochs_done, self.config.patience):
            self._run_epoch(phase, epochs)
            record = self._record()
            for callback in self.callbacks:
                callback.epoch(record)
            self.at = Position(self.at.phase, self.at.epoch + 1, 0, self.at.epochs_done + 1)
            self._save()

    def _run_epoch(self, phase: registry.Phase, epochs: int) -> None:
        count = len(self.turns)
        if self.at.step == 0:
            self.sums.zero_()
        passed = Counter(name for name, _ in self.turns[: self.at.step])
        streams = {
            name: self.objective.checked(name, loader.from_step(self.at.epochs_done, passed[name]))
            for name, loader in self.train.items()
        }
        for task in self.tasks.values():
            task.train()
        for index in range(self.at.step, count):
            name, step = self.turns[index]
            factor = optimizers.rate_factor(self.config, phase, self.at.epoch * count + index, count, epochs)
            optimizers.set_rates(self.optimizers, factor)
            whole = self.train[name].batches.whole(step)
            self._step(name, next(streams[name]), whole)
            self.at.step = index + 1
            for callback in self.callbacks:
                callback.step(self.at.epochs_done, index + 1, whole)
            self._between_steps(index, count)

    def _step(self, name: str, batch: tuple[Tensor, Any], whole: int) -> None:
        device, world = self.accelerator.device, self.accelerator.num_processes
        images, targets = to_device(batch[0], device), batch[1].to(device, non_blocking=True)
        parts = list(zip(images.chunk(self.config.accumulate), targets.chunk(self.config.accumulate), strict=True))
        for index, (part, wanted) in enumerate(parts):
            last = index == len(parts) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.learner):
                with self.accelerator.autocast(), over_processes(self.accelerator.num_processes):
                    output = self.learner(part, name)
                    loss = self.objective(name, output, wanted)
                self.accelerator.backward(loss * (world / whole))
            with torch.no_grad():
                right = self.objective.correct(output, wanted)
                self.sums += torch.stack([loss.detach().float(), right.float(), right.new_tensor(len(part)).float()])
        optimizers.advance(self.optimizers, self.accelerator.scaler)

    def _between_steps(self, index: int, count: int) -> None:
        """Look at the loss now and then, save now and then, stop when asked to."""
        several = self.accelerator.num_processes > 1
        every = 1 if self.accelerator.device.type == "cpu" and not several else CHECK_EVERY
        usual = (index + 1) % every == 0 or index + 1 == count
        late = time.monotonic() - self.saved_at > self.checkpoint_every and index + 1 < count
        due = late and (usual or not several)  # clocks differ, and processes must look at the same step
        stopping = self.stop()
        if usual or due or stopping:
            self._look()
        if due or stopping:
            self._save()
        if stopping:
            raise StoppedError("training was stopped" + (f"; its state is in {self.path}" if self.path else ""))

    def _look(self) -> None:
        """See how the epoch goes: stop where the loss is not a number any more, in all processes alike."""
        loss, right, images = self.accelerator.reduce(self.sums, "sum").tolist()
        if not math.isfinite(loss):
            raise self._diverged("the loss is not a number any more")
        for callback in self.callbacks:
            callback.look(loss / images, right / images)

    def _diverged(self, what: str) -> TrainingError:
        kept = f"the last good state is in {self.path}" if self.path is not None and self.path.exists() else ""
        return TrainingError(
            f"{what}, in epoch {self.at.epochs_done + 1} at or shortly before step {self.at.step}: lower the rates "
            f"({dict(self.config.rates)}). {kept}".strip()
        )

    def _record(self) -> dict[str, Any]:
        sums = self.accelerator.reduce(self.sums, "sum").tolist()
        record: dict[str, Any] = {
            "epoch": self.at.epochs_done + 1,
            "phase": self.at.phase + 1,
            "train_loss": sums[0] / sums[2],
            "train_accuracy": sums[1] / sums[2],
        }
        record |= validate(self.net, self.val, self.objective, self.accelerator)
        self.result.history.append(record)
        is_last_phase = self.at.phase == len(self.phases) - 1  # an epoch before pruning is not one to keep
        if self.val and is_last_phase and self.result.is_better(record):
            self.result.best = record
            self.best_state = {name: copied(held.state_dict()) for name, held in self.learned.items()}
        return record

    def _finish(self) -> None:
        self.result.best_tasks = self.best_state
        if self.config.keep == "best" and self.best_state is not None:
            for name, held in self.learned.items():
                held.load_state_dict(self.best_state[name])
        for name, task in self.tasks.items():
            task._fold_mean_shift()
            task.eval()
            last, best = (record and of_task(record, name) for record in (self.result.history[-1], self.result.best))
            task.metrics = {"last": last, "best": best, "kept": self.config.keep}
        self.net.joint = False  # from here on it is a backbone like any other

    def release(self) -> None:
        """Leave tasks to normalise as they would without us, and the backbone out of reach, however the run ended."""
        for task in self.tasks.values():
            task.holds_statistics = False
            cpu.set_channels_last(task, False)
            task._fold_mean_shift()
        if self.shared is not None:
            self.shared.release(self.tasks)

    def _epochs(self, phase: registry.Phase) -> int:
        each = len(self.turns) / len(self.names)  # together tasks see as many images as they would apart
        return optimizers.epochs_of(self.config, phase, self.phases, each)

    def _save(self) -> None:
        self.saved_at = time.monotonic()
        if self.path is None:
            return
        if not all(bool(p.isfinite().all()) for held in self.learned.values() for p in held.parameters()):
            raise self._diverged("what is learned is not finite any more")
        if self.accelerator.is_main_process:
            fresh_phase = self.at.epoch == 0 and self.at.step == 0
            optimizers = None if fresh_phase else [optimizer.state_dict() for optimizer in self.optimizers]
            tasks = {name: held.state_dict() for name, held in self.learned.items()}
            scaler = self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None
            state = State(self.at, self.result, tasks, optimizers, self.best_state, self.sums, scaler)
            save(self.path, self.config, state)

    def _resume(self) -> State:
        if self.path is None:
            raise TrainingError("resume needs the folder of the run that is to go on")
        state = load(self.path, self.config, list(self.learned))
        self.at, self.result, self.best_state = state.at, state.result, state.best_tasks
        for name, held in self.learned.items():
            held.load_state_dict(state.tasks[name])
        if self.accelerator.scaler is not None and state.scaler is not None:
            self.accelerator.scaler.load_state_dict(state.scaler)
        self.sums.copy_(state.sums)
        return state
