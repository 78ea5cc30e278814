"""The one training loop: phases of epochs of steps. It knows roles and batches, but no method by name."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from bitgraft.errors import StoppedError, TrainingError
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.training import budget, checkpoint, cpu, optimizers
from bitgraft.training.batches import split_rows, to_device
from bitgraft.training.callbacks import Callback
from bitgraft.training.checkpoint import Position, Result, State, of_task
from bitgraft.training.config import Config
from bitgraft.training.evaluation import validate
from bitgraft.training.init import initialize
from bitgraft.training.inputs import prepared
from bitgraft.training.learner import Learner, Loss, Objective, trainable
from bitgraft.training.loader import InterleavedLoader, Loader, StepBatch, training_loader
from bitgraft.training.processes import check_supported, from_main, random_state_kept
from bitgraft.training.progress import with_progress
from bitgraft.training.sync_bn import explain_single_values, over_processes
from bitgraft.training.weight_sizes import weight_sizes

CHECK_EVERY = 50  # steps between checks of the loss, if a check waits for a device or for other processes


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
    """Train one task, or several in alternating steps. A joint method also trains the backbone weights they share.

    Args:
        train: an image folder, the result of `open_data`, a Dataset of (image, label) with tensors or PIL images, a
            Dataset of mappings with "labels", or a DataLoader over one. For several tasks, a mapping from their names.
        val: likewise; used to measure accuracy after each epoch and to keep the best one. By default the folder's own.
        config: changes to the preset that the (first) task was added with.
        loss: replaces cross entropy: a function of (output, targets), or "model" for the network's own.
        folder: where to write checkpoints; it is created. By default none are written.
        resume: continue from the checkpoint in `folder`.
        callbacks: called at steps and epochs, for progress and metrics.
        workers: processes that load data.
        accelerator: your own, to choose the device, processes and precision.
        checkpoint_every: seconds between checkpoints within an epoch; each epoch ends with one.
        stop: called after each step; if it returns True, save a checkpoint and raise `StoppedError`.
        progress: show a progress bar; by default in a terminal or a notebook.
    """
    if isinstance(task, str):
        task, train, val = [task], {task: train}, {task: val}
    check_supported(accelerator := accelerator or Accelerator())
    tasks = {name: trainable(net, name) for name in task}
    train, val, config, workers = prepared(tasks, train, val or {}, config, workers, labelled=loss is None)
    objective = Objective(tasks.values(), loss, config.label_smoothing)
    train_loaders, val_loaders = {}, {}
    for name in tasks:
        train_loaders[name] = training_loader(tasks[name], train[name], config, accelerator, workers)
        if val.get(name) is not None:
            size = 4 * config.batch
            val_loaders[name] = Loader(val[name], "validation", name, size, accelerator, workers, pad=False)
        objective.set_class_weights(name, config.class_weights, train[name], accelerator.device)
    learner, train_loader = Learner(net, objective, accelerator), InterleavedLoader(train_loaders)
    path = Path(folder) / "state.pt" if folder is not None else None
    callbacks = with_progress(callbacks, progress, accelerator.is_main_process)
    run = _Run(learner, config, train_loader, val_loaders, path, callbacks, stop, checkpoint_every)
    try:
        with explain_single_values(), random_state_kept(accelerator.device):
            torch.manual_seed(config.seed)  # for dropout and the like
            return run.run(resume)
    finally:
        learner.release()
        for callback in callbacks:
            callback.end()


@dataclass
class _Run:
    """One call of `fit`. It can start at any step of any epoch of any phase."""

    learner: Learner
    config: Config
    train_loader: InterleavedLoader
    val_loaders: dict[str, Loader]
    path: Path | None
    callbacks: Sequence[Callback]
    stop: Callable[[], bool]
    checkpoint_every: float

    def __post_init__(self) -> None:
        config, learner, device = self.config, self.learner, self.learner.accelerator.device
        self.tasks, self.objective, self.accelerator = learner.tasks, learner.objective, learner.accelerator
        method = next(task.metadata.method for task in self.tasks.values())
        self.phases = optimizers.phases_of(registry.get(method), config)
        for task in self.tasks.values():
            task.holds_statistics = config.statistics == "kept"
            cpu.set_channels_last(task, device.type == "cpu")  # as `to_device` does with images
            if config.scale_k2_by_r:
                task.scale_k2_by_r(config.scale_k2_by_r, config.seed)
        learner.net.to(device)
        self.sizes = weight_sizes(learner.parts)  # before anything is trained, also when resuming
        self.settings = {**asdict(config), "number of images": self.train_loader.images}
        self.at, self.result = Position(), Result()
        self.good = learner.values()  # the last values known to be finite
        self.checked = 0  # the step up to which the loss is known to be finite
        self.sums = torch.zeros(3, device=device)  # loss, correct answers, images of this epoch
        self.resumed: Sequence[dict[str, Any]] = ()  # the state of a checkpoint's optimisers
        self.saved_at = time.monotonic()

    def run(self, resume: bool) -> Result:
        if resume:
            self._load()
        else:
            for name, loader in self.train_loader.loaders.items():
                initialize(self.tasks[name], loader, self.objective, self.config)
            self._check_finite("the initialised task is not finite", range(len(self.train_loader)))
        plan = budget.plan(self.config, self.phases, self.learner, self.train_loader, self.at)
        if not resume:
            self._record_start()
        self.model = self.learner.distributed(self.train_loader)
        for callback in self.callbacks:
            callback.begin(plan)
        for phase in range(self.at.phase, len(self.phases)):
            self._run_phase()
            self.at = replace(self.at, phase=phase + 1, epoch=0, step=0)
        self._finish()
        return self.result

    def _run_phase(self) -> None:
        phase = self.phases[self.at.phase]
        if phase.prune is not None and self.at.epoch == 0 and self.at.step == 0:
            for task in self.tasks.values():
                task.prune(phase.prune)
        self._build_optimizers(phase)
        for optimizer, held in zip(self.optimizers, self.resumed, strict=False):
            optimizer.load_state_dict(held)
        self.resumed = ()
        epochs = budget.share_of(self.at.epochs, phase, self.phases)
        while self.at.epoch < epochs and self.result.may_improve(self.at, self.config):
            self._run_epoch(phase, epochs)
            record = self._record()
            self.at = replace(self.at, epoch=self.at.epoch + 1, step=0, epochs_done=self.at.epochs_done + 1)
            if (goal := self.result.retreat_to(self.at, self.config)) is not None:
                assert self.result.best_tasks is not None
                self.learner.restore(self.result.best_tasks)
                self.at.slowdown, record["retreat"] = checkpoint.SLOWDOWN, goal
                self._build_optimizers(phase)
            for callback in self.callbacks:
                callback.epoch(record)
            self._save()

    def _build_optimizers(self, phase: registry.Phase) -> None:
        built = optimizers.build(self.learner.roles(), self.config, phase, self.sizes)
        self.optimizers = [self.accelerator.prepare(optimizer) for optimizer in built]

    def _run_epoch(self, phase: registry.Phase, epochs: int) -> None:
        steps_per_epoch, self.checked = len(self.train_loader), self.at.step
        if self.at.step == 0:
            self.sums.zero_()
        for task in self.tasks.values():
            task.train()
        for batch in self.train_loader.from_step(self.at.epochs_done, self.at.step):
            step = self.at.epoch * steps_per_epoch + self.at.step  # of the phase
            factor = optimizers.rate_factor(self.config, phase, step, steps_per_epoch, epochs)
            optimizers.set_rates(self.optimizers, self.at.slowdown * factor)
            hardness = optimizers.hardness(self.config, step, steps_per_epoch * epochs)
            for task in self.tasks.values():
                task.set_hardness(hardness)
            self._step(batch)
            self.at.step += 1
            for callback in self.callbacks:
                callback.step(self.at.epochs_done, self.at.step, batch.global_size)
            self._after_step()

    def _step(self, batch: StepBatch) -> None:
        """One optimiser step: sum gradients over the micro-batches, then update the parameters."""
        accelerator, micro_batches = self.accelerator, batch.micro_batches
        self.objective.check_labels(batch.task, batch.targets, batch.name)
        rows = [micro.rows for micro in micro_batches]
        moved = to_device((batch.inputs, batch.targets), accelerator.device)
        inputs, targets = (split_rows(part, rows) for part in moved)
        for micro, x, y in zip(micro_batches, inputs, targets, strict=True):
            counts = micro.local_size > 0  # otherwise x is a placeholder
            is_last = micro is micro_batches[-1]
            with nullcontext() if is_last else accelerator.no_sync(self.model):
                with accelerator.autocast(), over_processes(accelerator, counts):
                    output = self.model(batch.task, x, y)
                    loss = self.objective(batch.task, output, y, micro.rows)  # the sum over this process's images
                # DDP averages over processes, so this is the gradient of the mean over the whole batch
                accelerator.backward(loss * (accelerator.num_processes * counts / batch.global_size))
            if counts:
                with torch.no_grad():
                    correct = self.objective.num_correct(output, y)
                    self.sums[:2] += torch.stack([loss.detach().float(), correct.float()])
                    self.sums[2] += micro.local_size
        optimizers.update(self.optimizers, accelerator.scaler)

    def _after_step(self) -> None:
        """Check the loss and save a checkpoint now and then, and stop if asked to."""
        several = self.accelerator.num_processes > 1
        every = 1 if self.accelerator.device.type == "cpu" and not several else CHECK_EVERY
        is_last = self.at.step == len(self.train_loader)
        check = self.at.step % every == 0 or is_last
        save = time.monotonic() - self.saved_at > self.checkpoint_every and not is_last
        if several:  # clocks differ, but all processes must save at the same step
            save = check and from_main(save, self.accelerator)
        stopping = self.stop()
        if check or save or stopping:
            self._check_loss()
        if save or stopping:
            self._save()
        if stopping:
            raise StoppedError("training was stopped" + (f"; its state is in {self.path}" if self.path else ""))

    def _check_loss(self) -> None:
        """Raise an error in all processes if the loss is not finite; report it to the callbacks otherwise."""
        loss, correct, images = self.accelerator.reduce(self.sums, "sum").tolist()
        if not math.isfinite(loss):
            raise self._not_finite("the loss is not finite", range(self.checked, self.at.step))
        self.checked = self.at.step
        for callback in self.callbacks:
            callback.look(loss / images, correct / images)

    def _check_finite(self, problem: str = "the task is not finite", steps: range | None = None) -> None:
        if not self.learner.is_finite():
            raise self._not_finite(problem, steps or range(max(0, self.checked - 1), self.at.step))

    def _not_finite(self, problem: str, steps: range) -> TrainingError:
        """Restore the last finite values; return an error that blames an image in these steps or the rates."""
        self.learner.restore(self.good)
        cause = self.train_loader.find_non_finite(self.at.epochs_done, steps)
        where = f"{problem} in epoch {self.at.epochs_done + 1} at or shortly before step {self.at.step}"
        kept = f"; the last good state is in {self.path}" if self.path is not None and self.path.exists() else ""
        return TrainingError(f"{where}: {cause or f'lower the rates ({dict(self.config.rates)})'}{kept}")

    def _record_start(self) -> None:
        """Record the initialised task as epoch 0, which is kept if no epoch is better. Not for methods that prune."""
        if self.val_loaders and self.config.head_init and len(self.phases) == 1:
            self.result.best_tasks = self.good = self.learner.values()
            self.result.start = self.result.best = {"epoch": 0, "phase": 1, **self._validate()}

    def _record(self) -> dict[str, Any]:
        self._check_finite()
        self.good = self.learner.values()
        loss, correct, images = self.accelerator.reduce(self.sums, "sum").tolist()
        record = {"epoch": self.at.epochs_done + 1, "phase": self.at.phase + 1}
        record |= {"train_loss": loss / images, "train_accuracy": correct / images, **self._validate()}
        self.result.history.append(record)
        is_last_phase = self.at.phase == len(self.phases) - 1  # do not keep an epoch before pruning
        if self.val_loaders and is_last_phase and self.result.is_better(record):
            self.result.best, self.result.best_tasks = record, self.good
        return record

    def _validate(self) -> dict[str, Any]:
        return validate(self.learner.net, self.val_loaders, self.objective)

    def _finish(self) -> None:
        result = self.result
        if self.config.keep == "best" and result.best_tasks is not None:
            self.learner.restore(result.best_tasks)
        for name, task in self.tasks.items():
            task._fold_mean_shift()
            task.eval()
            last, best = (record and of_task(record, name) for record in (result.history[-1], result.best))
            task.metrics = {"last": last, "best": best, "kept": self.config.keep}
        self.learner.net.joint = False  # from now on an ordinary backbone

    def _save(self) -> None:
        self.saved_at = time.monotonic()
        if self.path is not None:
            self._check_finite()
            begun = self.at.epoch > 0 or self.at.step > 0  # each phase builds new optimisers
            held = [optimizer.state_dict() for optimizer in self.optimizers] if begun else []
            checkpoint.save(self.path, self.settings, State(self.at, self.result, self.sums, held), self.learner)

    def _load(self) -> None:
        if self.path is None:
            raise TrainingError("resume=True needs the folder of the run: pass folder=...")
        state = checkpoint.load(self.path, self.settings, self.learner)
        self.at, self.result, self.good, self.resumed = state.at, state.result, self.learner.values(), state.optimizers
        self.sums.copy_(state.sums)
