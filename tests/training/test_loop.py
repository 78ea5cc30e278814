"""The training loop: it learns, resumes exactly, runs phases, and explains what went wrong."""

import math
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DistributedType
from stripes import SHORT, backbone, network, saved_bytes, stop_after, stripes, without_dropout
from torch import nn
from torch.utils.data import TensorDataset

from bitgraft.errors import StoppedError, TrainingError
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.training.callbacks import Callback
from bitgraft.training.config import Config
from bitgraft.training.evaluation import evaluate
from bitgraft.training.init import reset_statistics
from bitgraft.training.learner import Objective
from bitgraft.training.loader import Loader
from bitgraft.training.loop import fit
from bitgraft.training.presets import QUICK, preset

TESTS = str(Path(__file__).parents[1])


@pytest.mark.parametrize("method", ["full", "piggyback-bn", "finetune", "lora", "dan", "adapters-series"])
def test_every_method_learns_more_than_the_classifier_alone(method):
    accuracy = {}
    for name in (method, "classifier"):
        net = network(name)
        fit(net, "stripes", stripes(192, 1), None, QUICK.changed(epochs=6, batch=16, rates={"scores": 3e-3}))
        accuracy[name] = evaluate(net, "stripes", stripes(90, 2))["accuracy"]
    assert accuracy[method] > 0.6
    assert accuracy[method] >= accuracy["classifier"]


def test_the_backbone_is_untouched():
    net = network()
    before = {name: tensor.clone() for name, tensor in net.backbone.state_dict().items()}
    fit(net, "stripes", stripes(32, 1), stripes(9, 2), SHORT)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.backbone.state_dict().items())
    assert not net.backbone.training


@pytest.mark.parametrize(("statistics", "moved"), [("batch", True), ("kept", False)])
def test_statistics_of_the_batch_or_kept(statistics, moved):
    net = network()
    fit(net, "stripes", stripes(32, 1), None, SHORT.changed(statistics=statistics, head_init=False))
    task = net.tasks["stripes"]
    same = torch.equal(task.owned["1.running_mean"], net.backbone[1].running_mean)
    assert same is not moved
    assert not torch.equal(task.owned["1.weight"], net.backbone[1].weight)
    assert not task.holds_statistics


def test_reset_statistics_are_the_mean_over_one_pass():
    net, data = network(), stripes(32, 1)
    task = net.tasks["stripes"]
    reset_statistics(task, Loader(data, "training", "stripes", 16, Accelerator(cpu=True)), Objective([task]))
    outputs = [net.backbone[0](images) for images in data.tensors[0].split(16)]
    expected = torch.stack([y.mean((0, 2, 3)) for y in outputs]).mean(0)
    variance = torch.stack([y.var((0, 2, 3)) for y in outputs]).mean(0)
    owned = task.owned
    assert torch.allclose(owned["1.running_mean"], expected, atol=1e-6)
    assert torch.allclose(owned["1.running_var"], variance, atol=1e-5)


def test_the_result_has_the_last_and_the_best_epoch():
    net = network()
    result = fit(net, "stripes", stripes(48, 1), stripes(30, 2), SHORT.changed(epochs=3))
    assert [record["epoch"] for record in result.history] == [1, 2, 3]
    best = max([result.start, *result.history], key=lambda r: (r["val_accuracy"], -r["val_loss"]))
    assert result.best == best
    assert net.tasks["stripes"].metrics["last"] == result.history[-1]


def test_keeping_the_best_epoch_restores_its_accuracy():
    net = network()
    high = {"k": 0.5, "norms": 0.3}  # far too high: accuracy goes up and down
    config = SHORT.changed(epochs=5, keep="best", rates=high, head_init=False)
    result = fit(net, "stripes", stripes(48, 1), stripes(60, 2), config)
    assert result.best is not None
    accuracies = [record["val_accuracy"] for record in result.history]
    assert result.best["val_accuracy"] == max(accuracies)
    assert evaluate(net, "stripes", stripes(60, 2))["accuracy"] == pytest.approx(max(accuracies), abs=1e-6)


def test_a_run_that_does_not_improve_ends_as_the_linear_probe():
    net = network()
    config = SHORT.changed(epochs=2, keep="best", rates={"k": 0.5, "norms": 3.0})
    result = fit(net, "stripes", stripes(48, 1), stripes(60, 2), config)
    assert result.best == result.start
    assert result.best["epoch"] == 0
    assert max(record["val_accuracy"] for record in result.history) < result.start["val_accuracy"]
    found = evaluate(net, "stripes", stripes(60, 2))["accuracy"]
    assert found == pytest.approx(result.start["val_accuracy"], abs=1e-6)
    assert net.tasks["stripes"].metrics["best"]["epoch"] == 0


def test_a_run_that_is_worse_than_its_start_goes_back_with_lower_rates_and_resumes_to_the_same_bytes(tmp_path):
    """The rates are too high: no epoch up to the fourth is better than the linear probe."""
    config = SHORT.changed(epochs=8, warmup=0.1, keep="best", rates={"norms": 0.5, "head": 0.5})
    files, found = [], []
    for stop in (None, 14, 17):  # epochs have 4 steps
        net, folder = network("norms"), tmp_path / str(stop)
        data = stripes(52, 1), stripes(60, 2), config
        if stop is not None:
            with pytest.raises(StoppedError):
                fit(net, "stripes", *data, folder=folder, stop=stop_after(stop))
            net = network("norms")
        result = fit(net, "stripes", *data, folder=folder, resume=stop is not None)
        files.append(saved_bytes(net, tmp_path / "a.safetensors"))
        found.append([record.get("retreat") for record in result.history])
    assert found == [[None, None, None, 0, None, None, None, None]] * 3
    assert files[0] == files[1] == files[2]
    stayed = fit(network("norms"), "stripes", *data[:2], config.changed(retreat=False))
    assert stayed.history[:3] == result.history[:3]
    assert not any("retreat" in record for record in stayed.history)


class Killed(Callback):
    """Ends a run like a kill after this many steps: nothing is saved, so the work since the last checkpoint is lost."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def step(self, epoch: int, step: int, images: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("method", "too_high"), [("full", 3.0), ("finetune", 0.5)])
def test_a_killed_run_of_the_default_preset_resumes_to_the_same_bytes(tmp_path, method, too_high):
    """It retreats after epoch 15 and runs out of patience after epoch 28 of 30; epochs have 3 steps."""
    settings = preset("default", method)
    assert settings.retreat
    assert settings.patience == 0.25
    assert settings.relative_rates
    config = Config(epochs=30, batch=16, rates={"norms": too_high, "head": too_high}, anneal_masks=0.6)
    files, histories = [], []
    for run, kills in enumerate([(), (7, 40, 35), (44, 8, 34), (46, 35, 3)]):
        for steps in (*kills, 0):
            net = Network(backbone())
            net.add_task("stripes", classes=3, method=method)
            torch.manual_seed(99 + steps)  # a new process may start with any seed
            how = {"folder": tmp_path / str(run), "resume": (tmp_path / str(run) / "state.pt").exists()}
            how |= {"callbacks": [Killed(steps)], "checkpoint_every": 0.0 if run == 1 else 60.0}
            with pytest.raises(KeyboardInterrupt) if steps else nullcontext():
                result = fit(net, "stripes", stripes(48, 1), stripes(60, 2), config, **how)
        files.append(saved_bytes(net, tmp_path / "a.safetensors"))
        histories.append(result.history)
    assert [record["epoch"] for record in histories[0] if "retreat" in record] == [15]
    assert len(histories[0]) == 28
    assert histories == [histories[0]] * 4
    assert files == [files[0]] * 4


def test_after_a_retreat_training_goes_on_from_the_best_state(monkeypatch):
    monkeypatch.setattr("bitgraft.training.checkpoint.SLOWDOWN", 0.0)
    config = SHORT.changed(epochs=8, warmup=0.1, keep="best", rates={"norms": 3.0, "head": 3.0})
    result = fit(network("norms"), "stripes", stripes(52, 1), stripes(60, 2), config)
    losses = [record["val_loss"] for record in result.history]
    assert all(loss > 1.1 * result.start["val_loss"] for loss in losses[:4])
    assert losses[4:] == pytest.approx([result.start["val_loss"]] * 4)


def test_the_same_seed_gives_the_same_file_and_another_does_not(tmp_path):
    files = []
    for seed in (0, 0, 1):
        net = network()
        fit(net, "stripes", stripes(48, 1), None, SHORT.changed(seed=seed))
        files.append(saved_bytes(net, tmp_path / "a.safetensors"))
    assert files[0] == files[1]
    assert files[0] != files[2]


@pytest.mark.parametrize("method", ["full", "packnet"])
@pytest.mark.parametrize("steps", [1, 3, 4, 7])
def test_a_run_stopped_at_any_step_resumes_to_the_same_bytes(tmp_path, method, steps, monkeypatch):
    shorten_phases(monkeypatch)
    whole, data = network(method), ("stripes", stripes(52, 1), stripes(9, 2))
    fit(whole, *data, SHORT)
    expected = saved_bytes(whole, tmp_path / "whole.safetensors")
    net = network(method)
    with pytest.raises(StoppedError):
        fit(net, *data, SHORT, folder=tmp_path, stop=stop_after(steps))
    again = network(method)
    torch.manual_seed(99)  # a new process may start with any seed
    fit(again, *data, SHORT, folder=tmp_path, resume=True)
    assert saved_bytes(again, tmp_path / "again.safetensors") == expected


def shorten_phases(monkeypatch):
    packnet = registry.get("packnet")
    phases = tuple(replace(phase, epochs=1, drop_after=None) for phase in packnet.phases)
    monkeypatch.setitem(registry._METHODS, "packnet", replace(packnet, phases=phases))


KILLED = textwrap.dedent(
    """
    import sys, torch
    sys.path.insert(0, {tests!r})
    torch.set_num_threads(1)
    from stripes import SHORT, network, stripes
    from bitgraft import fit
    net = network()
    resume = {resume}
    fit(net, "stripes", stripes(52, 1), stripes(9, 2), SHORT.changed(epochs=4), folder={folder!r}, resume=resume,
        checkpoint_every=0.0)
    net.save_task("stripes", {folder!r} + "/done.safetensors")
    """
)


def test_a_killed_process_resumes_to_the_same_bytes(tmp_path):
    whole = network()
    fit(whole, "stripes", stripes(52, 1), stripes(9, 2), SHORT.changed(epochs=4))
    expected = saved_bytes(whole, tmp_path / "whole.safetensors")
    state, done, kills = tmp_path / "state.pt", tmp_path / "done.safetensors", 0
    while not done.exists():
        source = KILLED.format(tests=TESTS, folder=str(tmp_path), resume=state.exists())
        process = subprocess.Popen([sys.executable, "-c", source])
        written = state.stat().st_mtime_ns if state.exists() else 0
        while kills < 2 and process.poll() is None:  # kill it once it has written a checkpoint
            time.sleep(0.001)
            if state.exists() and state.stat().st_mtime_ns != written:
                process.kill()
                kills += 1
                break
        assert process.wait() in (0, -signal.SIGKILL)
    assert kills >= 1
    assert done.read_bytes() == expected


def test_packnet_runs_its_phases(monkeypatch):
    shorten_phases(monkeypatch)
    net = network("packnet")
    result = fit(net, "stripes", stripes(48, 1), None, SHORT)
    assert [record["phase"] for record in result.history] == [1, 2]
    for transform in net.tasks["stripes"].transforms.values():
        free, own = int(transform.free.sum()), int(transform.own.sum())
        assert own == free - round(free * 0.75)
    net.add_task("second", classes=3, method="packnet")  # there is room left


def test_alternating_tasks_equal_tasks_trained_alone(tmp_path):
    """They share no parameters, so alternating changes only the order of the steps."""
    config = SHORT.changed(schedule="constant", warmup=0.0, head_init=False)
    apart, together = without_dropout(Network(backbone())), without_dropout(Network(backbone()))
    for name in ("a", "b"):
        apart.add_task(name, classes=3)
        together.add_task(name, classes=3)
        fit(apart, name, stripes(40, ord(name)), None, config)
    fit(together, ["a", "b"], {"a": stripes(40, ord("a")), "b": stripes(40, ord("b"))}, None, config)
    for name in ("a", "b"):
        mine, theirs = apart.tasks[name].tensors(), together.tasks[name].tensors()
        assert all(torch.allclose(mine[key], theirs[key], atol=1e-6) for key in mine)


def test_steps_are_per_task():
    """A task sees as many images as if trained alone."""
    config, data = SHORT.changed(steps=12), {name: stripes(40, ord(name)) for name in ("a", "b")}
    apart, together = Network(backbone()), Network(backbone())
    for net in (apart, together):
        for name in data:
            net.add_task(name, classes=3)
    alone = fit(apart, "a", data["a"], None, config)
    assert len(alone.history) > 1
    assert len(fit(together, ["a", "b"], data, None, config).history) == len(alone.history)


def test_accumulation_equals_one_batch_without_batch_statistics():
    """Piggyback keeps norm layers frozen, so images of a batch do not interact."""
    tensors = []
    for accumulate in (1, 4):
        net = without_dropout(network("piggyback"))
        fit(net, "stripes", stripes(48, 1), None, SHORT.changed(accumulate=accumulate))
        tensors.append(net.tasks["stripes"].owned["9.weight"])
    assert torch.allclose(tensors[0], tensors[1], atol=1e-5)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(tmp_path):
    net = network("finetune")
    config = SHORT.changed(epochs=50, rates=dict.fromkeys(QUICK.rates, 1e30), schedule="constant")
    with pytest.raises(TrainingError, match=r"not finite in epoch \d+.*step \d+.*lower the rates"):
        fit(net, "stripes", stripes(48, 1), None, config, folder=tmp_path)
    if (tmp_path / "state.pt").exists():
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        assert math.isfinite(float(state["processes"][0]["sums"][0]))


@pytest.mark.parametrize("head_init", [True, False])
def test_labels_outside_the_head_are_named(head_init):
    images, labels = stripes(30, 1).tensors
    labels[labels == 2] = 7
    with pytest.raises(TrainingError, match=r"label 7, but task 'stripes' has 3 classes"):
        fit(network(), "stripes", TensorDataset(images, labels), None, SHORT.changed(head_init=head_init))


def broken(data: TensorDataset, index: int) -> TensorDataset:
    data.tensors[0][index, 0, 3, 3] = float("nan")
    return data


@pytest.mark.parametrize("method", ["full", "finetune"])
@pytest.mark.parametrize("head_init", [True, False])
@pytest.mark.parametrize("statistics", ["batch", "kept"])
def test_an_image_that_is_not_finite_is_named_and_the_task_is_restored(method, head_init, statistics):
    net = network(method)
    config = SHORT.changed(head_init=head_init, statistics=statistics)
    with pytest.raises(TrainingError, match=r"image 17 of the training data of task 'stripes' has NaN") as e:
        fit(net, "stripes", broken(stripes(40, 1), 17), None, config)
    assert "rates" not in str(e.value)
    assert all(tensor.isfinite().all() for tensor in net.tasks["stripes"].state_dict().values())
    fit(net, "stripes", stripes(40, 1), None, config)  # the task is still usable
    assert evaluate(net, "stripes", stripes(30, 2))["accuracy"] > 0.3


def test_rates_that_are_too_high_leave_the_last_good_epoch(tmp_path):
    net, values = network("finetune"), []

    class Keeping(Callback):
        def epoch(self, record):
            values.append({name: tensor.clone() for name, tensor in net.tasks["stripes"].stored().items()})

    config = SHORT.changed(epochs=4, schedule="constant", warmup=0.0, clip_to_ema_norm=False)
    spoil = iter([False] * 4 + [True] * 100)  # from the second epoch on

    def loss(output, target):
        return nn.functional.cross_entropy(output, target) * (float("inf") if next(spoil) else 1.0)

    with pytest.raises(TrainingError, match=r"in epoch 2 at or shortly before step 1: lower the rates"):
        fit(net, "stripes", stripes(64, 1), None, config, loss=loss, callbacks=[Keeping()])
    (last,) = values
    assert all(torch.equal(tensor, last[name]) for name, tensor in net.tasks["stripes"].owned.items())


def test_validation_and_test_images_that_are_not_finite_are_named():
    net = network()
    with pytest.raises(TrainingError, match=r"loss on the validation data of task 'stripes' is not finite: image 4 of"):
        fit(net, "stripes", stripes(32, 1), broken(stripes(9, 2), 4), SHORT)
    assert all(tensor.isfinite().all() for tensor in net.tasks["stripes"].state_dict().values())
    with pytest.raises(TrainingError, match=r"loss on the test data of task 'stripes' is not finite: image 8 of"):
        evaluate(net, "stripes", broken(stripes(9, 2), 8))


def test_empty_data_is_refused():
    with pytest.raises(TrainingError, match="training data of task 'stripes' is empty: give it at least one image"):
        fit(network(), "stripes", stripes(0, 1))
    with pytest.raises(TrainingError, match="validation data of task 'stripes' is empty"):
        fit(network(), "stripes", stripes(6, 1), stripes(0, 1))
    with pytest.raises(TrainingError, match="test data of task 'stripes' is empty"):
        evaluate(network(), "stripes", stripes(0, 1))


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_sharded_training_is_refused(kind, monkeypatch):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(type(accelerator), "distributed_type", DistributedType[kind])
    with pytest.raises(TrainingError, match=f"training under {kind} is not supported: use one process or plain data"):
        fit(network(), "stripes", stripes(6, 1), None, SHORT, accelerator=accelerator)


def test_values_that_are_not_finite_are_never_saved(tmp_path):
    """The loss is computed before the update, so it can be finite when the weights no longer are."""
    fit(network(), "stripes", stripes(52, 1), None, SHORT, folder=tmp_path)
    before = (tmp_path / "state.pt").read_bytes()
    net = network()

    def spoil():
        with torch.no_grad():
            net.tasks["stripes"].owned["9.bias"][0] = float("inf")
        return True

    with pytest.raises(TrainingError, match=r"task is not finite.*the last good state is in"):
        fit(net, "stripes", stripes(52, 1), None, SHORT, folder=tmp_path, stop=spoil)
    assert (tmp_path / "state.pt").read_bytes() == before


def test_annealed_masks_end_as_bits_and_resume_to_the_same_bytes(tmp_path):
    """Validation, the trained task and the saved file all use bits."""
    config = SHORT.changed(epochs=4, anneal_masks=0.6, keep="best", head_init=False)
    files = []
    for stop in (None, 5, 9):
        net = network()
        folder = tmp_path / str(stop)
        folder.mkdir()
        data = stripes(48, 1), stripes(60, 2), config
        if stop is not None:
            with pytest.raises(StoppedError):
                fit(net, "stripes", *data, folder=folder, stop=stop_after(stop))
            net = network()
        result = fit(net, "stripes", *data, folder=folder, resume=stop is not None)
        assert evaluate(net, "stripes", data[1])["accuracy"] == pytest.approx(result.best["val_accuracy"], abs=1e-6)
        files.append(saved_bytes(net, tmp_path / "a.safetensors"))
        assert evaluate(net, "stripes", data[1])["accuracy"] == pytest.approx(result.best["val_accuracy"], abs=1e-6)
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize(
    ("changes", "epochs"),
    [
        ({"epochs": 30, "patience": 2}, 2),
        ({"epochs": 30, "patience": 2, "anneal_masks": 0.2}, 8),  # counted from epoch 6, when masks are annealed
        ({"epochs": 30, "patience": 0.4}, 27),  # 12 epochs, counted from the middle
        ({"epochs": 8, "patience": 0.1}, 8),  # at least 10 epochs
    ],
)
def test_early_stopping(changes, epochs):
    config = SHORT.changed(rates=dict.fromkeys(QUICK.rates, 0.0), **changes)  # nothing learns, so epoch 0 is the best
    result = fit(network("piggyback"), "stripes", stripes(32, 1), stripes(9, 2), config)
    assert len(result.history) == epochs


def test_a_frozen_or_unknown_task_is_refused(tmp_path):
    net = network()
    with pytest.raises(TrainingError, match=r"no task 'flowers' to train: add it first"):
        fit(net, "flowers", stripes(8, 1))
    net.tasks["stripes"].freeze()
    with pytest.raises(TrainingError, match=r"'stripes' is frozen"):
        fit(net, "stripes", stripes(8, 1))


def test_resuming_with_other_settings_or_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="nothing to resume"):
        fit(network(), "stripes", stripes(8, 1), None, SHORT, folder=tmp_path, resume=True)
    fit(network(), "stripes", stripes(32, 1), None, SHORT, folder=tmp_path)
    with pytest.raises(TrainingError, match=r"other settings \(batch\)"):
        fit(network(), "stripes", stripes(32, 1), None, SHORT.changed(batch=8), folder=tmp_path, resume=True)
    with pytest.raises(TrainingError, match=r"other settings \(number of images\)"):
        fit(network(), "stripes", stripes(40, 1), None, SHORT, folder=tmp_path, resume=True)
    with pytest.raises(TrainingError, match="was started with another method, other options or other classes"):
        fit(network("simple"), "stripes", stripes(32, 1), None, SHORT, folder=tmp_path, resume=True)
    (tmp_path / "state.pt").write_bytes(b"nonsense")
    with pytest.raises(TrainingError, match="cannot be read"):
        fit(network(), "stripes", stripes(32, 1), None, SHORT, folder=tmp_path, resume=True)


def test_the_folder_of_checkpoints_is_created_and_a_finished_run_resumes(tmp_path):
    first, again = network(), network()
    fit(first, "stripes", stripes(32, 1), None, SHORT, folder=tmp_path / "new" / "run")
    result = fit(again, "stripes", stripes(32, 1), None, SHORT, folder=tmp_path / "new" / "run", resume=True)
    assert len(result.history) == SHORT.epochs
    assert saved_bytes(again, tmp_path / "again") == saved_bytes(first, tmp_path / "first")


def test_a_custom_loss_and_head():
    net = Network(backbone())
    net.add_task("energy", head=nn.Linear(16, 1))
    images = stripes(64, 1).tensors[0]
    target = images.square().mean((1, 2, 3))[:, None]
    mse = nn.functional.mse_loss
    before = float(mse(net.eval()(images, task="energy").detach(), target))
    fit(net, "energy", TensorDataset(images, target), None, SHORT.changed(epochs=10, rates={"head": 2e-2}), loss=mse)
    with torch.no_grad():
        assert float(mse(net(images, task="energy"), target)) < before / 2


def test_class_weights():
    images, labels = stripes(90, 1).tensors
    few = torch.cat([torch.where(labels == 0)[0], torch.where(labels == 1)[0][:3]])
    data = TensorDataset(images[few], labels[few])
    data.labels = labels[few].tolist()
    said = []
    for weights in (None, "balanced"):
        net = network("classifier")
        with pytest.raises(TrainingError, match="2 class weights for task 'stripes', which has 3 classes"):
            fit(net, "stripes", data, None, SHORT.changed(class_weights=(1.0, 2.0)))
        fit(net, "stripes", data, None, SHORT.changed(class_weights=weights, head_init=False, rates={"head": 1e-2}))
        with torch.no_grad():
            said.append(net(images, task="stripes").softmax(1)[:, 1].mean())
    assert said[1] > said[0]
