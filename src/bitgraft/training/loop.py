"""The one training loop. It knows phases, roles and batches, and no method by name."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from bitgraft.errors import StoppedError, TrainingError
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.training import budget, checkpoint, cpu, optimizers
from bitgraft.training.batches import split, to_device
from bitgraft.training.callbacks import Callback
from bitgraft.training.checkpoint import Position, Result, State, of_task
from bitgraft.training.config import Config
from bitgraft.training.evaluation import validate
from bitgraft.training.init import begin
from bitgraft.training.inputs import prepared
from bitgraft.training.learner import Learner, Loss, Objective, Values, distributed, takes_batch_statistics, trainable
from bitgraft.training.loader import Turn, Turns, loader
from bitgraft.training.processes import check_supported, from_main, gathered, seeded
from bitgraft.training.progress import with_progress
from bitgraft.training.sync_bn import over_processes, single_values_explained

CHECK_EVERY = 50  # steps between looks at the loss, where each waits for the device or for other processes


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
    progress: bool | None = None,
) -> Result:
    """Train one task, or several in turns; with a joint method, what they share of the backbone learns along.

    Args:
        train: a folder of images, what `open_data` gives, a Dataset of (image, label) with tensors or PIL images, or of
            mappings with "labels", or a DataLoader over one; for a list of tasks, a mapping from their names.
        val: likewise, for accuracy after each epoch and for keeping the best one; by default the folder's own.
        config: what to change in the preset that the (first) task was added with.
        loss: in place of cross entropy: a function of (output, targets), or "model" for the network's own.
        folder: where checkpoints go; none are written without one.
        resume: go on from the checkpoint there.
        callbacks: are told of steps and epochs (progress, metrics).
        workers: processes that load data.
        accelerator: yours, where you have one; it says which device, how many processes, what precision.
        checkpoint_every: seconds between checkpoints within an epoch; each epoch ends with one.
        stop: asked after each step; when it says so, the state is saved and `StoppedError` raised.
        progress: show how it goes; by default in a terminal or a notebook.
    """
    if isinstance(task, str):
        task, train, val = [task], {task: train}, {task: val}
    check_supported(accelerator := accelerator or Accelerator())
    tasks = [trainable(net, name) for name in task]
    train, val, config, workers = prepared(tasks, train, val or {}, config, workers, labelled=loss is None)
    callbacks = with_progress(callbacks, progress, accelerator.is_main_process)
    run = _Run(net, list(task), config, accelerator, loss, Path(folder) / "state.pt" if folder is not None else None)
    run.callbacks, run.stop, run.checkpoint_every = callbacks, stop, checkpoint_every
    try:
        run.load_data(train, val, workers)
        with single_values_explained(), seeded(config.seed, accelerator.device):
            return run.go(resume)
    finally:
        run.learner.release()
        for callback in callbacks:
            callback.end()


class _Run:
    """One call of `fit`: phases of epochs of steps, from any of them on."""

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
        self.net, self.config, self.accelerator, self.path = net, config, accelerator, path
        self.tasks = {name: trainable(net, name) for name in names}
        self.phases = optimizers.phases_of(registry.get(self.tasks[names[0]].metadata.method), config)
        for task in self.tasks.values():
            task.holds_statistics = config.statistics == "kept"
            cpu.set_channels_last(task, accelerator.device.type == "cpu")  # as `to_device` does with images
            if config.scale_k2_by_r:
                task.scale_k2_by_r(config.scale_k2_by_r, config.seed)
        net.to(accelerator.device)
        self.learner = Learner(net, self.tasks.values())
        self.objective = Objective(self.tasks.values(), loss, config.label_smoothing)
        self.at, self.result = Position(), Result()
        self.best: Values | None = None  # what was learned at the end of the best epoch
        self.good: Values = self.learner.values()  # and of the last epoch, or at the start; all of it is finite
        self.looked = 0  # the step before which the loss was last known to be finite
        self.sums = torch.zeros(3, device=accelerator.device)  # loss, right answers, images of this epoch
        self.saved_at = time.monotonic()

    def load_data(self, train: Mapping[str, Any], val: Mapping[str, Any], workers: int) -> None:
        config, accelerator = self.config, self.accelerator
        self.data, self.workers = {name: train[name] for name in self.tasks}, workers
        loaders, self.val = {}, {}
        for name, task in self.tasks.items():
            parts = {"accumulate": config.accumulate, "smallest": 2 if takes_batch_statistics(task) else 1}
            loaders[name] = loader(
                train[name], "training", name, config.batch, accelerator, workers, config.seed, **parts
            )
            if (held_out := val.get(name)) is not None:
                size = 4 * config.batch
                self.val[name] = loader(held_out, "validation", name, size, accelerator, workers, pad=False)
            if config.class_weights is not None:
                self.objective.weigh(name, config.class_weights, train[name], accelerator.device)
        self.turns = Turns(loaders)

    def go(self, resume: bool) -> Result:
        state = self._resume() if resume else None
        if state is None:
            for name, data in self.data.items():
                begin(self.net, name, data, self.objective, self.config, self.accelerator, self.workers)
            self._check_finite("what the task starts from is not finite", range(len(self.turns)))
        plan = budget.plan(
            self.config, self.phases, self.learner, self.turns, self.objective, self.at, self.accelerator
        )
        if state is None:
            self._record_start()
        self.model = distributed(self.learner, self.turns, self.objective, self.accelerator)
        for callback in self.callbacks:
            callback.begin(plan)
        for phase in range(self.at.phase, len(self.phases)):
            self._run_phase(state)
            state = None
            self.at = Position(phase + 1, epochs_done=self.at.epochs_done, epochs=self.at.epochs)
        self._finish()
        return self.result

    def _run_phase(self, state: State | None) -> None:
        phase = self.phases[self.at.phase]
        if phase.prune is not None and self.at.epoch == 0 and self.at.step == 0:
            for task in self.tasks.values():
                task.prune(phase.prune)
        built = optimizers.build(self.learner.roles(), self.config, phase)
        self.optimizers = [self.accelerator.prepare(optimizer) for optimizer in built]
        if state is not None and state.optimizers:
            for optimizer, held in zip(self.optimizers, state.optimizers, strict=True):
                optimizer.load_state_dict(held)
        epochs = budget.share_of(self.at.epochs, phase, self.phases)
        while self.at.epoch < epochs and self.result.hopeful(self.at, self.config):
            self._run_epoch(phase, epochs)
            record = self._record()
            for callback in self.callbacks:
                callback.epoch(record)
            self.at = Position(self.at.phase, self.at.epoch + 1, 0, self.at.epochs_done + 1, self.at.epochs)
            self._save()

    def _run_epoch(self, phase: registry.Phase, epochs: int) -> None:
        count, self.looked = len(self.turns), self.at.step
        if self.at.step == 0:
            self.sums.zero_()
        for task in self.tasks.values():
            task.train()
        for index, turn in enumerate(self.turns.from_step(self.at.epochs_done, self.at.step), self.at.step):
            factor = optimizers.rate_factor(self.config, phase, self.at.epoch * count + index, count, epochs)
            optimizers.set_rates(self.optimizers, factor)
            hardness = optimizers.hardness(self.config, self.at.epoch * count + index, count * epochs)
            for task in self.tasks.values():
                task.set_hardness(hardness)
            self._step(turn)
            self.at.step = index + 1
            for callback in self.callbacks:
                callback.step(self.at.epochs_done, index + 1, turn.whole)
            self._between_steps(index, count)

    def _step(self, turn: Turn) -> None:
        device, world = self.accelerator.device, self.accelerator.num_processes
        self.objective.check(turn.task, turn.batch[1], turn.what)
        rows = [part.rows for part in turn.parts]
        inputs, wanted = (split(to_device(half, device), rows) for half in turn.batch)
        for part, some, target in zip(turn.parts, inputs, wanted, strict=True):
            counts = part.own > 0
            with nullcontext() if part is turn.parts[-1] else self.accelerator.no_sync(self.model):
                with self.accelerator.autocast(), over_processes(world, counts):
                    output = self.model(some, turn.task, self.objective.given(target))
                    loss = self.objective(turn.task, output, target)
                self.accelerator.backward(loss * (world * counts / turn.whole))
            if counts:
                with torch.no_grad():
                    right = self.objective.correct(output, target)
                    self.sums[:2] += torch.stack([loss.detach().float(), right.float()])
                    self.sums[2] += part.own
        optimizers.advance(self.optimizers, self.accelerator.scaler)

    def _between_steps(self, index: int, count: int) -> None:
        """Look at the loss now and then, save now and then, stop when asked to."""
        several = self.accelerator.num_processes > 1
        every = 1 if self.accelerator.device.type == "cpu" and not several else CHECK_EVERY
        usual = (index + 1) % every == 0 or index + 1 == count
        due = time.monotonic() - self.saved_at > self.checkpoint_every and index + 1 < count
        if several:  # clocks differ, and processes must look and save at the same step
            due = usual and from_main(due, self.accelerator)
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
            raise self._not_finite("the loss is not a number any more", range(self.looked, self.at.step))
        self.looked = self.at.step
        for callback in self.callbacks:
            callback.look(loss / images, right / images)

    def _not_finite(self, what: str, steps: range) -> TrainingError:
        """Leave tasks as they last were good, and say whether an image in these steps or the rates are to blame."""
        self.learner.restore(self.good)
        cause = self.turns.not_finite(self.accelerator, self.at.epochs_done, steps)
        where = f"{what}, in epoch {self.at.epochs_done + 1} at or shortly before step {self.at.step}"
        kept = f"; the last good state is in {self.path}" if self.path is not None and self.path.exists() else ""
        return TrainingError(f"{where}: {cause or f'lower the rates ({dict(self.config.rates)})'}{kept}")

    def _check_finite(self, what: str = "what is learned is not finite any more", steps: range | None = None) -> None:
        if not all(gathered(self.learner.is_finite(), self.accelerator)):
            raise self._not_finite(what, steps or range(max(0, self.looked - 1), self.at.step))

    def _record(self) -> dict[str, Any]:
        self._check_finite()
        self.good = self.learner.values()
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
            self.result.best, self.best = record, self.good
        return record

    def _finish(self) -> None:
        self.result.best_tasks = self.best
        if self.config.keep == "best" and self.best is not None:
            self.learner.restore(self.best)
        for name, task in self.tasks.items():
            task._fold_mean_shift()
            task.eval()
            last, best = (record and of_task(record, name) for record in (self.result.history[-1], self.result.best))
            task.metrics = {"last": last, "best": best, "kept": self.config.keep}
        self.net.joint = False  # from here on it is a backbone like any other

    def _record_start(self) -> None:
        """The head start is epoch 0: a run that comes to nothing better ends as that. A method that prunes has none."""
        if self.val and self.config.head_init and len(self.phases) == 1:
            self.good = self.learner.values()
            validated = validate(self.net, self.val, self.objective, self.accelerator)
            self.result.start = self.result.best = {"epoch": 0, "phase": 1, **validated}
            self.best = self.good

    def _save(self) -> None:
        self.saved_at = time.monotonic()
        if self.path is not None:
            self._check_finite()
            begun = self.at.epoch > 0 or self.at.step > 0  # a phase builds its optimisers anew
            state = State(self.at, self.result, self.best, self.sums, self.optimizers if begun else ())
            checkpoint.save(self.path, self.config, state, self.learner, self.accelerator)

    def _resume(self) -> State:
        if self.path is None:
            raise TrainingError("resume needs the folder of the run that is to go on")
        state = checkpoint.load(self.path, self.config, self.learner, self.accelerator)
        self.at, self.result, self.best, self.good = state.at, state.result, state.best_tasks, self.learner.values()
        self.sums.copy_(state.sums)
        return state
