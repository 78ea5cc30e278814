"""The training loop: it learns, resumes exactly, knows phases, and says what went wrong."""

import math
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DistributedType
from hypothesis import given
from hypothesis import strategies as st
from launching import TORCHRUN, launched
from stripes import SHORT, backbone, network, stripes
from torch import nn
from torch.utils.data import TensorDataset

from bitgraft.errors import StoppedError, TrainingError
from bitgraft.methods import registry
from bitgraft.network import Network
from bitgraft.training.callbacks import Callback
from bitgraft.training.evaluation import evaluate
from bitgraft.training.loader import Batches, Part
from bitgraft.training.loop import fit
from bitgraft.training.optimizers import build, centralize_gradients, clip_to_ema_norm, rate_factor
from bitgraft.training.presets import DECATHLON, IMAGENET_TO_SKETCH, PAPER, QUICK, preset

TESTS = str(Path(__file__).parents[1])


def trained_bytes(net: Network, path) -> bytes:
    net.save_task("stripes", path)
    return path.read_bytes()


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


def test_settled_statistics_are_the_mean_over_one_pass():
    from bitgraft.training.init import settle_statistics

    net, data = network(), stripes(32, 1)
    batches = [(images, None, Part(16, 16)) for images in data.tensors[0].split(16)]
    settle_statistics(net, "stripes", batches, Accelerator(cpu=True))
    outputs = [net.backbone[0](images) for images, _, _ in batches]
    expected = torch.stack([y.mean((0, 2, 3)) for y in outputs]).mean(0)
    variance = torch.stack([y.var((0, 2, 3)) for y in outputs]).mean(0)
    owned = net.tasks["stripes"].owned
    assert torch.allclose(owned["1.running_mean"], expected, atol=1e-6)
    assert torch.allclose(owned["1.running_var"], variance, atol=1e-5)


def test_records_name_last_and_best_epoch():
    net = network()
    result = fit(net, "stripes", stripes(48, 1), stripes(30, 2), SHORT.changed(epochs=3))
    assert [record["epoch"] for record in result.history] == [1, 2, 3]
    best = max([result.start, *result.history], key=lambda r: (r["val_accuracy"], -r["val_loss"]))
    assert result.best == best
    assert net.tasks["stripes"].metrics["last"] == result.history[-1]


def test_keeping_the_best_epoch_gives_its_accuracy():
    net = network()
    high = {"k": 0.5, "norms": 0.3}  # far too high: accuracy goes up and down
    config = SHORT.changed(epochs=5, keep="best", rates=high, head_init=False)
    result = fit(net, "stripes", stripes(48, 1), stripes(60, 2), config)
    assert result.best is not None
    accuracies = [record["val_accuracy"] for record in result.history]
    assert result.best["val_accuracy"] == max(accuracies)
    assert evaluate(net, "stripes", stripes(60, 2))["accuracy"] == pytest.approx(max(accuracies), abs=1e-6)


def test_a_run_that_comes_to_nothing_ends_as_the_head_start():
    net = network()
    config = SHORT.changed(epochs=2, keep="best", rates={"k": 0.5, "norms": 3.0})
    result = fit(net, "stripes", stripes(48, 1), stripes(60, 2), config)
    assert result.best == result.start
    assert result.best["epoch"] == 0
    assert max(record["val_accuracy"] for record in result.history) < result.start["val_accuracy"]
    found = evaluate(net, "stripes", stripes(60, 2))["accuracy"]
    assert found == pytest.approx(result.start["val_accuracy"], abs=1e-6)
    assert net.tasks["stripes"].metrics["best"]["epoch"] == 0


def test_the_same_seed_gives_the_same_file_and_another_does_not(tmp_path):
    files = []
    for seed in (0, 0, 1):
        net = network()
        torch.manual_seed(5)  # dropout
        fit(net, "stripes", stripes(48, 1), None, SHORT.changed(seed=seed))
        files.append(trained_bytes(net, tmp_path / "a.safetensors"))
    assert files[0] == files[1]
    assert files[0] != files[2]


@pytest.mark.parametrize("method", ["full", "packnet"])
@pytest.mark.parametrize("stop_after", [1, 3, 4, 7])
def test_a_run_stopped_at_any_step_resumes_to_the_same_bytes(tmp_path, method, stop_after, monkeypatch):
    shorten_phases(monkeypatch)
    whole = network(method)
    torch.manual_seed(5)
    fit(whole, "stripes", stripes(52, 1), stripes(9, 2), SHORT)
    expected = trained_bytes(whole, tmp_path / "whole.safetensors")

    steps = iter(range(1, 1000))
    net = network(method)
    torch.manual_seed(5)
    with pytest.raises(StoppedError):
        fit(
            net,
            "stripes",
            stripes(52, 1),
            stripes(9, 2),
            SHORT,
            folder=tmp_path,
            stop=lambda: next(steps) == stop_after,
        )
    again = network(method)
    torch.manual_seed(99)  # whatever the new process begins with
    fit(again, "stripes", stripes(52, 1), stripes(9, 2), SHORT, folder=tmp_path, resume=True)
    assert trained_bytes(again, tmp_path / "again.safetensors") == expected


def shorten_phases(monkeypatch):
    from dataclasses import replace

    from bitgraft.methods import registry

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
    torch.manual_seed(5)
    resume = {resume}
    fit(net, "stripes", stripes(52, 1), stripes(9, 2), SHORT.changed(epochs=4), folder={folder!r}, resume=resume,
        checkpoint_every=0.0)
    net.save_task("stripes", {folder!r} + "/done.safetensors")
    """
)


def test_a_killed_process_resumes_to_the_same_bytes(tmp_path):
    whole = network()
    torch.manual_seed(5)
    fit(whole, "stripes", stripes(52, 1), stripes(9, 2), SHORT.changed(epochs=4))
    expected = trained_bytes(whole, tmp_path / "whole.safetensors")
    folder = tmp_path / "run"
    folder.mkdir()
    kills = 0
    while kills < 3:
        source = KILLED.format(tests=TESTS, folder=str(folder), resume=(folder / "state.pt").exists())
        process = subprocess.Popen([sys.executable, "-c", source])
        seen = (folder / "state.pt").stat().st_mtime_ns if (folder / "state.pt").exists() else 0
        while process.poll() is None:  # kill as soon as it has written a state since it began
            if (folder / "state.pt").exists() and (folder / "state.pt").stat().st_mtime_ns != seen:
                process.send_signal(signal.SIGKILL)
                process.wait()
        if (folder / "done.safetensors").exists():
            break
        kills += 1
    if not (folder / "done.safetensors").exists():
        subprocess.run(
            [sys.executable, "-c", KILLED.format(tests=TESTS, folder=str(folder), resume=True)],
            check=True,
        )
    assert kills >= 1
    assert (folder / "done.safetensors").read_bytes() == expected


def test_packnet_goes_through_its_phases(monkeypatch):
    shorten_phases(monkeypatch)
    net = network("packnet")
    result = fit(net, "stripes", stripes(48, 1), None, SHORT)
    assert [record["phase"] for record in result.history] == [1, 2]
    for transform in net.tasks["stripes"].transforms.values():
        free, own = int(transform.free.sum()), int(transform.own.sum())
        assert own == free - round(free * 0.75)
    net.add_task("second", classes=3, method="packnet")  # there is room left


def test_tasks_trained_in_turns_equal_tasks_trained_apart(tmp_path):
    """They share nothing that is learned, so that taking turns changes nothing but the order of the steps."""
    config = SHORT.changed(schedule="constant", warmup=0.0, head_init=False)
    still = backbone()
    for module in still.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    apart, together = Network(still), Network(still)
    for name in ("a", "b"):
        apart.add_task(name, classes=3)
        together.add_task(name, classes=3)
        fit(apart, name, stripes(40, ord(name)), None, config)
    fit(together, ["a", "b"], {"a": stripes(40, ord("a")), "b": stripes(40, ord("b"))}, None, config)
    for name in ("a", "b"):
        mine, theirs = apart.tasks[name].tensors(), together.tasks[name].tensors()
        assert all(torch.allclose(mine[key], theirs[key], atol=1e-6) for key in mine)


def test_steps_are_each_tasks_own():
    """Tasks that take turns see as many images as they would apart."""
    config, data = SHORT.changed(steps=12), {name: stripes(40, ord(name)) for name in ("a", "b")}
    apart, together = Network(backbone()), Network(backbone())
    for net in (apart, together):
        for name in data:
            net.add_task(name, classes=3)
    alone = fit(apart, "a", data["a"], None, config)
    assert len(alone.history) > 1
    assert len(fit(together, ["a", "b"], data, None, config).history) == len(alone.history)


def test_accumulation_equals_one_batch_where_no_statistics_are_taken():
    """Piggyback keeps norm layers frozen, so that a batch in parts is the batch."""
    tensors = []
    for accumulate in (1, 4):
        net = network("piggyback")
        for module in net.backbone.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        fit(net, "stripes", stripes(48, 1), None, SHORT.changed(accumulate=accumulate))
        tensors.append(net.tasks["stripes"].owned["9.weight"])
    assert torch.allclose(tensors[0], tensors[1], atol=1e-5)


def test_centred_gradients_have_no_mean_over_a_filter():
    """Of what makes up most of a task; norms, k and the head keep theirs."""
    learned = {role: torch.nn.Parameter(torch.randn(4, 3, 2)) for role in ("scores", "weights", "head")}
    learned["norms"] = torch.nn.Parameter(torch.randn(5))
    config = PAPER.changed(gradient_centralization=True)
    optimizers = build(learned.items(), config, registry.get("full").phases[0])
    before = {role: torch.randn_like(parameter) for role, parameter in learned.items()}
    for role, parameter in learned.items():
        parameter.grad = before[role].clone()
    centralize_gradients(optimizers)
    for role in ("head", "norms"):
        assert torch.equal(learned[role].grad, before[role])
    for role in ("scores", "weights"):
        for mine, theirs in zip(learned[role].grad, before[role], strict=True):
            assert torch.allclose(mine, theirs - theirs.mean(), atol=1e-6)


def test_steady_gradients_are_at_most_what_adam_remembers():
    parameter, still = (torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(2))
    config = PAPER.changed(clip_to_ema_norm=True)
    optimizers = build([("scores", parameter), ("norms", still)], config, registry.get("full").phases[0])
    seen = [torch.randn(3, 4) * size for size in (1.0, 3.0, 0.5)]
    for grad in seen:
        parameter.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    weights = [0.999 ** (len(seen) - 1 - i) for i in range(len(seen))]
    past = sum(w * g.square() for w, g in zip(weights, seen, strict=True)) / sum(weights)  # Adam's, without its bias
    for size in (0.01, 100.0):
        grad = torch.randn(3, 4) * size
        parameter.grad = grad.clone()
        clip_to_ema_norm(optimizers)
        bound = min(1.0, float(past.sum().sqrt() / grad.norm()))
        assert torch.allclose(parameter.grad, grad * bound, rtol=1e-4)
        assert (bound == 1.0) == (size < 1)
    assert still.grad is None
    parameter.grad = torch.zeros(3, 4)
    clip_to_ema_norm(optimizers)
    assert torch.equal(parameter.grad, torch.zeros(3, 4))


def test_a_tensor_whose_first_gradients_are_0_is_not_held_there():
    """R has none while k2 = k3 = 0, as the paper begins: bits must flip all the same."""
    net = network("full")
    config = SHORT.changed(clip_to_ema_norm=True, scale_k2_by_r=0.0, epochs=4, rates=dict.fromkeys(QUICK.rates, 1e-2))
    fit(net, "stripes", stripes(48, 1), None, config)
    masks = [transform.mask() for transform in net.tasks["stripes"].transforms.values()]
    assert all(0 < mask.float().mean() < 1 for mask in masks)


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_good_state(tmp_path):
    net = network("finetune")
    config = SHORT.changed(epochs=50, rates=dict.fromkeys(QUICK.rates, 1e30), schedule="constant")
    with pytest.raises(TrainingError, match=r"not a number.*epoch \d+.*step \d+.*lower the rates"):
        fit(net, "stripes", stripes(48, 1), None, config, folder=tmp_path)
    if (tmp_path / "state.pt").exists():
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        assert math.isfinite(float(state["processes"][0]["sums"][0]))


@pytest.mark.parametrize("head_init", [True, False])
def test_labels_outside_the_head_are_named(head_init):
    images, labels = stripes(30, 1).tensors
    with pytest.raises(TrainingError, match=r"label 7, but task 'stripes' has 3 classes"):
        fit(
            network(),
            "stripes",
            TensorDataset(images, labels.where(labels != 2, torch.tensor(7))),
            None,
            SHORT.changed(head_init=head_init),
        )


def flat_backbone() -> nn.Module:
    """Its last norm has one value per channel and image, so that one image has no variance."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 3)]
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize("protocol", [IMAGENET_TO_SKETCH, DECATHLON, QUICK])
def test_a_last_batch_of_one_image_joins_the_one_before(protocol):
    net, seen = Network(flat_backbone()), []

    class Counting(Callback):
        def step(self, epoch, step, images):
            seen.append(images)

    net.add_task("stripes", classes=3)
    config = protocol.changed(epochs=1)
    fit(net, "stripes", stripes(33, 1), stripes(5, 2), config, callbacks=[Counting()])
    assert seen == ([33] if config.statistics == "batch" else [32, 1])


def test_batches_of_one_image_are_refused_where_statistics_need_two():
    net = Network(flat_backbone())
    net.add_task("stripes", classes=3)
    with pytest.raises(TrainingError, match="at least 2 images, or with statistics='kept'"):
        fit(net, "stripes", stripes(6, 1), None, DECATHLON.changed(batch=1))
    fit(net, "stripes", stripes(7, 1), None, DECATHLON.changed(epochs=1, batch=3, accumulate=3))  # parts of 2 at least


def broken(data: TensorDataset, index: int) -> TensorDataset:
    data.tensors[0][index, 0, 3, 3] = float("nan")
    return data


@pytest.mark.parametrize("method", ["full", "finetune"])
@pytest.mark.parametrize("head_init", [True, False])
@pytest.mark.parametrize("statistics", ["batch", "kept"])
def test_an_image_that_is_not_finite_is_named_and_the_task_stays_as_it_was(method, head_init, statistics):
    net = network(method)
    config = SHORT.changed(head_init=head_init, statistics=statistics)
    with pytest.raises(TrainingError, match=r"image 17 of the training data of task 'stripes' has values") as e:
        fit(net, "stripes", broken(stripes(40, 1), 17), None, config)
    assert "rates" not in str(e.value)
    assert all(tensor.isfinite().all() for tensor in net.tasks["stripes"].state_dict().values())
    fit(net, "stripes", stripes(40, 1), None, config)  # as good as new
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


def test_no_images_are_one_sentence():
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


def scaled_accelerator():
    """As on a GPU in mixed precision fp16, but for the precision: losses are scaled, and the scale moves often."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    return accelerator


def test_the_scale_of_gradients_is_kept_and_comes_back(tmp_path):
    config = SHORT.changed(optimizers={"head": "sgd"})  # two optimisers, one scale
    whole, accelerator = network("finetune"), scaled_accelerator()
    torch.manual_seed(5)
    fit(whole, "stripes", stripes(52, 1), None, config, accelerator=accelerator)
    assert accelerator.scaler.state_dict()["scale"] == 2.0**12  # doubled after each two of eight steps
    steps, stopped = iter(range(1, 1000)), network("finetune")
    torch.manual_seed(5)
    with pytest.raises(StoppedError):
        fit(
            stopped, "stripes", stripes(52, 1), None, config, accelerator=scaled_accelerator(),
            folder=tmp_path, stop=lambda: next(steps) == 5,
        )  # fmt: skip
    held = torch.load(tmp_path / "state.pt", weights_only=True)["scaler"]
    assert (held["scale"], held["_growth_tracker"]) == (2.0**10, 1)
    again, accelerator = network("finetune"), scaled_accelerator()
    fit(
        again, "stripes", stripes(52, 1), None, config, accelerator=accelerator, folder=tmp_path, resume=True
    )  # fmt: skip
    assert accelerator.scaler.state_dict()["scale"] == 2.0**12
    assert trained_bytes(again, tmp_path / "a") == trained_bytes(whole, tmp_path / "b")


def test_scaled_gradients_give_what_plain_ones_give(tmp_path):
    """Powers of two scale without rounding; and the two optimisers of a step are scaled alike."""
    config, found = SHORT.changed(optimizers={"head": "sgd"}), []
    for accelerator in (Accelerator(cpu=True), scaled_accelerator()):
        net = network("finetune")
        torch.manual_seed(5)
        fit(net, "stripes", stripes(52, 1), None, config, accelerator=accelerator)
        found.append(trained_bytes(net, tmp_path / "a"))
    assert found[0] == found[1]


def test_what_is_not_finite_is_never_saved(tmp_path):
    """The loss of a step is known before the step is taken, so that it can look well when the weights do not."""
    fit(network(), "stripes", stripes(52, 1), None, SHORT, folder=tmp_path)
    before = (tmp_path / "state.pt").read_bytes()
    net = network()

    def spoil():
        with torch.no_grad():
            net.tasks["stripes"].owned["9.bias"][0] = float("inf")
        return True

    with pytest.raises(TrainingError, match=r"not finite any more.*the last good state is in"):
        fit(net, "stripes", stripes(52, 1), None, SHORT, folder=tmp_path, stop=spoil)
    assert (tmp_path / "state.pt").read_bytes() == before


def test_masks_that_form_end_as_bits_and_resume_to_the_same_bytes(tmp_path):
    """What validation sees, what the run ends as, and what is saved are one and the same."""
    config = SHORT.changed(epochs=4, anneal_masks=0.6, keep="best", head_init=False)
    files = []
    for stop in (None, 5, 9):
        net, count = network(), iter(range(100))
        torch.manual_seed(5)  # dropout
        folder = tmp_path / str(stop)
        folder.mkdir()
        data = stripes(48, 1), stripes(60, 2), config
        if stop is not None:
            with pytest.raises(StoppedError):
                fit(net, "stripes", *data, folder=folder, stop=lambda: next(count) == stop)  # noqa: B023
            net = network()
        result = fit(net, "stripes", *data, folder=folder, resume=stop is not None)
        assert evaluate(net, "stripes", data[1])["accuracy"] == pytest.approx(result.best["val_accuracy"], abs=1e-6)
        files.append(trained_bytes(net, tmp_path / "a.safetensors"))
        assert evaluate(net, "stripes", data[1])["accuracy"] == pytest.approx(result.best["val_accuracy"], abs=1e-6)
    assert files[0] == files[1] == files[2]


def test_early_stopping():
    config = SHORT.changed(epochs=30, patience=2, rates=dict.fromkeys(QUICK.rates, 0.0))
    result = fit(
        network("piggyback"), "stripes", stripes(32, 1), stripes(9, 2), config
    )  # nothing moves: the first is best
    assert [record["epoch"] for record in result.history] == [1, 2]
    result = fit(network("piggyback"), "stripes", stripes(32, 1), stripes(9, 2), config.changed(patience=0.4))
    assert len(result.history) == 27  # of 30 epochs: 12 from the middle on
    short = config.changed(epochs=8, patience=0.1)
    assert len(fit(network("piggyback"), "stripes", stripes(32, 1), stripes(9, 2), short).history) == 8
    late = config.changed(patience=2, anneal_masks=0.2)
    result = fit(network("piggyback"), "stripes", stripes(32, 1), stripes(9, 2), late)
    assert len(result.history) == 8  # masks take 6 of 30 epochs to form


def test_a_frozen_or_unknown_task_is_refused(tmp_path):
    net = network()
    with pytest.raises(TrainingError, match=r"no task 'flowers' to train: add it first"):
        fit(net, "flowers", stripes(8, 1))
    net.tasks["stripes"].freeze()
    with pytest.raises(TrainingError, match=r"'stripes' is frozen"):
        fit(net, "stripes", stripes(8, 1))


def test_resuming_with_other_settings_or_nothing_there_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="nothing to resume"):
        fit(network(), "stripes", stripes(8, 1), None, SHORT, folder=tmp_path, resume=True)
    fit(network(), "stripes", stripes(32, 1), None, SHORT, folder=tmp_path)
    with pytest.raises(TrainingError, match=r"other settings \(batch\)"):
        fit(network(), "stripes", stripes(32, 1), None, SHORT.changed(batch=8), folder=tmp_path, resume=True)
    (tmp_path / "state.pt").write_bytes(b"nonsense")
    with pytest.raises(TrainingError, match="cannot be read"):
        fit(network(), "stripes", stripes(32, 1), None, SHORT, folder=tmp_path, resume=True)


def test_a_loss_and_a_head_of_ones_own():
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
        fit(net, "stripes", data, None, SHORT.changed(class_weights=weights, head_init=False, rates={"head": 1e-2}))
        with torch.no_grad():
            said.append(net(images, task="stripes").softmax(1)[:, 1].mean())
    assert said[1] > said[0]


TWO = textwrap.dedent(
    """
    import os, sys, torch
    sys.path.insert(0, {tests!r})
    torch.set_num_threads(1)
    import stripes as t
    from accelerate import Accelerator, DistributedType
    from bitgraft import fit
    net = t.network({method!r})
    for module in net.backbone.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    accelerator = Accelerator(cpu=True)
    result = fit(net, "stripes", t.stripes(50, 1), t.stripes(31, 2), t.PROPORTIONATE, accelerator=accelerator)
    if accelerator.is_main_process:
        torch.save({{"tensors": net.tasks["stripes"].state_dict(), "history": result.history}}, {out!r})
    if accelerator.num_processes > 1:
        torch.distributed.destroy_process_group()
    """
)


@pytest.mark.parametrize(("method", "rounding"), [("full", 1e-3), ("finetune", 1e-5)])
def test_two_processes_give_what_one_gives(tmp_path, method, rounding):
    """Same global batch, batch-norm statistics over both, within rounding."""
    found = []
    for world in (1, 2):
        out = tmp_path / f"{world}.pt"
        script = tmp_path / f"{world}.py"
        script.write_text(TWO.format(tests=TESTS, method=method, out=str(out)))
        with launched(*((sys.executable,) if world == 1 else TORCHRUN), str(script), folder=tmp_path) as group:
            assert group.ended() == 0, group.err
        found.append(torch.load(out, weights_only=True))
    one, two = found
    for name, tensor in one["tensors"].items():
        if tensor.is_floating_point():
            # with levelling k1 has next to no gradient, of whose rounding Adam makes steps; biases make up for it
            assert torch.allclose(tensor, two["tensors"][name], rtol=rounding, atol=rounding / 10), name
    for a, b in zip(one["history"], two["history"], strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=max(rounding, 1e-4))
        assert a["val_accuracy"] == pytest.approx(b["val_accuracy"], abs=0.04)


def test_batches_cover_every_image_once_and_shares_make_up_the_batch():
    whole = list(Batches(23, 5, 3).at(1))
    assert sorted(index for batch in whole for index in batch) == list(range(23))
    assert list(map(len, whole)) == [Batches(23, 5, 3).whole(step) for step in range(5)]
    assert list(Batches(23, 5, 3).at(1, 2)) == whole[2:]
    shares = [list(Batches(23, 5, 3, rank, 2).at(1)) for rank in range(2)]
    for step, batch in enumerate(whole):
        assert sorted(shares[0][step] + shares[1][step]) == sorted(batch)
    assert list(Batches(23, 5, 3).at(2)) != whole


@given(st.integers(1, 70), st.integers(1, 32), st.integers(1, 5), st.integers(1, 4), st.integers(1, 2))
def test_processes_run_the_same_parts_and_each_image_counts_once(count, size, world, accumulate, smallest):
    ranks = [Batches(count, size, 3, rank, world, accumulate=accumulate, smallest=smallest) for rank in range(world)]
    shares, seen = [list(batches.at(1)) for batches in ranks], []
    for step in range(len(ranks[0])):
        each = [batches.parts(step) for batches in ranks]
        assert len({tuple(part.whole for part in parts) for parts in each}) == 1  # so many collective calls, and alike
        assert sum(part.whole for part in each[0]) == ranks[0].whole(step)
        for number, part in enumerate(each[0]):
            own = [parts[number].own for parts in each]
            assert sum(own) == part.whole
            assert max(own) - min(own) <= 1
            assert part.whole >= smallest or ranks[0].whole(step) < smallest
        for parts, share in zip(each, (of_rank[step] for of_rank in shares), strict=True):
            rows = torch.tensor(share).split([part.rows for part in parts])
            seen += [index for part, some in zip(parts, rows, strict=True) if part.own for index in some.tolist()]
    assert sorted(seen) == list(range(count))
    skipping = [Batches(count, size, None, rank, world, pad=False) for rank in range(world)]
    assert sorted(index for batches in skipping for share in batches for index in share) == list(range(count))


def test_the_papers_protocols_are_as_published():
    for config, epochs, drop, size in ((IMAGENET_TO_SKETCH, 30, 15, 224), (DECATHLON, 60, 45, 64)):
        assert (config.epochs, config.drop_after, config.size, config.batch) == (epochs, drop, size, 32)
        assert config.rates["head"] == 1e-3
        assert config.optimizers["head"] == "sgd"
        assert config.momentum == 0.9
        assert {config.rates[role] for role in ("scores", "k", "k1", "norms", "weights")} == {1e-4}
        assert {config.optimizers[role] for role in ("scores", "k", "k1", "norms", "weights")} == {"adam"}
        assert not config.weight_decay
        assert not config.head_init
    assert DECATHLON.resize == 72


def test_methods_that_were_not_measured_with_levelling_have_the_settings_they_were_measured_with():
    as_before = ["classifier", "dan", "adapters-series", "adapters-parallel", "adapters-joint", "packnet", "lora"]
    for name in [*as_before, "piggyback"]:
        assert preset("quick", name) == preset("quick-uncorrected", name)
    for name in ("full", "simple", "piggyback-bn", "finetune"):
        assert preset("quick", name).mean_shift_correction
        assert not preset("quick-uncorrected", name).mean_shift_correction


def test_rates_by_step():
    from bitgraft.methods.registry import Phase

    step = PAPER.changed(epochs=4, drop_after=2)
    assert [rate_factor(step, Phase(), s, 10, 4) for s in (0, 19, 20, 39)] == [1.0, 1.0, 0.1, 0.1]
    cosine = PAPER.changed(schedule="cosine", warmup=0.25)
    assert rate_factor(cosine, Phase(), 4, 10, 4) == pytest.approx(0.5)
    assert rate_factor(cosine, Phase(), 10, 10, 4) == pytest.approx(1.0)
    assert rate_factor(cosine, Phase(), 25, 10, 4) == pytest.approx(0.5)
    own = Phase(epochs=4, rate=1e-3, drop_after=1)
    assert [rate_factor(cosine.changed(warmup=0.0), own, s, 10, 4) for s in (0, 10)] == [1.0, 0.1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs=0: give a whole number from 1 on"),
        ({"epoch": 3}, "no setting 'epoch'; did you mean 'epochs'"),
        ({"rates": {"masks": 1.0}}, "names the role 'masks'"),
        ({"optimizers": {"k": "lion"}}, "choose 'adam' or 'sgd'"),
        ({"rates": {"k": -1.0}}, "must not be negative"),
    ],
)
def test_bad_settings_are_one_sentence(changes, message):
    with pytest.raises(TrainingError, match=message):
        QUICK.changed(**changes)


def test_unknown_preset():
    with pytest.raises(
        TrainingError, match="known are default, quick, quick-uncorrected, imagenet-to-sketch, decathlon"
    ):
        preset("fast")
