"""Compression of fine-tuned copies, with and without data, from every kind of source."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from images import bitgraft, exit_code, furnish, photos
from safetensors.torch import load_file, save_file
from tiny import batch, learn, run, snapshot, tiny
from torch import nn
from torch.utils.data import TensorDataset

from bitgraft import BackboneError, Network, TaskError, compress
from bitgraft.compression.distil import CALIBRATION, Unlabelled, distillation_loss
from bitgraft.compression.drawings import Drawings, coloured_noise
from bitgraft.compression.input_means import solve_means
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.errors import ClassesError, WrongBackboneError
from bitgraft.format.inspect import inspect_file
from bitgraft.store import Store
from bitgraft.transforms.base import Weight
from bitgraft.transforms.levels import Levels

rounded = partial(compress, calibrate_on=None)
WIDE = 160  # so that the header of a file takes less than half a bit of each weight


# Input means


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_input_means_follow_from_norm_layers(groups):
    rng = torch.Generator().manual_seed(0)
    weight = Weight("w", torch.Size((24, 8 // groups, 3, 3)), "conv", groups)
    matrix = torch.randn(24, 8 // groups, generator=rng, dtype=torch.float64)
    mean = torch.rand(groups, 8 // groups, generator=rng, dtype=torch.float64)
    shift = (matrix * mean.repeat_interleave(24 // groups, 0)).sum(1)
    found = solve_means(weight, matrix, shift)
    assert torch.zeros(weight.shape).add(found).shape == weight.shape
    expected = mean.repeat_interleave(24 // groups, 0) if groups > 1 else mean
    torch.testing.assert_close(found[:, :, 0, 0].double(), expected, rtol=0, atol=0.01)


def test_underdetermined_means_stay_near_the_prior():
    weight = Weight("w", torch.Size((1, 50, 1, 1)), "conv")
    found = solve_means(weight, torch.ones(1, 50).double(), torch.tensor([30.0]).double())
    torch.testing.assert_close(found.flatten(), torch.full((50,), 0.6), rtol=0, atol=1e-3)


@pytest.mark.parametrize("moved", [True, False])
def test_rounding_keeps_output_means_without_data(moved):
    """Both kinds of copy: norms with new statistics, and norms whose bias absorbed the change."""
    net = Network(tiny(width=WIDE))
    rng = torch.Generator().manual_seed(5)
    images = 2 + 0.3 * batch(64)
    state = {name: tensor.clone() for name, tensor in net.backbone.state_dict().items()}
    change = state["stem.weight"].std() * torch.randn(state["stem.weight"].shape, generator=rng)
    state["stem.weight"] += change
    mean = images.mean((0, 2, 3)).view(1, 3, 1, 1)
    if moved:
        state["norm1.running_mean"] = (state["stem.weight"] * mean).flatten(1).sum(1)
    else:
        scale = state["norm1.weight"] * (state["norm1.running_var"] + 1e-5).rsqrt()
        state["norm1.bias"] -= scale * (change * mean).flatten(1).sum(1)
    copy = tiny(width=WIDE)
    copy.load_state_dict(state)
    rounded(net, "small", state, bits=1.0)
    with torch.no_grad():
        inner = (slice(None), slice(None), slice(1, -1), slice(1, -1))  # padding has another mean
        module = net.export("small")
        wanted, got = (m.norm1(m.stem(images))[inner].mean((0, 2, 3)) for m in (copy.eval(), module))
        module.norm1.load_state_dict(copy.norm1.state_dict())
        plain = module.norm1(module.stem(images))[inner].mean((0, 2, 3))
    assert (got - wanted).abs().mean() < 0.5 * (plain - wanted).abs().mean()


# Copies


def finetuned(net: Network, outputs: int = 4) -> dict[str, torch.Tensor]:
    """The state dict of a fine-tuned module with its own head, plus noise."""
    net.add_task("made", classes=outputs, method="finetune")
    learn(net, "made", batch(8), steps=2)
    state = net.export("made").state_dict()
    net.remove_task("made")
    rng = torch.Generator().manual_seed(7)
    moved = {n: t + 0.3 * t.std() * torch.randn(t.shape, generator=rng) for n, t in state.items() if t.dim() > 1}
    return {name: tensor.clone() for name, tensor in {**state, **moved}.items()}


@pytest.fixture
def net() -> Network:
    return Network(tiny(width=WIDE))


def test_head_and_biases_are_copied_and_the_rest_is_close(net):
    before, state = snapshot(net.backbone), finetuned(net)
    made = rounded(net, "small", state, bits=2)
    tensors = {name: tensor.detach() for name, tensor in made.task.tensors().items()}
    for name in ("fc.weight", "fc.bias", "pointwise.bias"):
        assert torch.equal(tensors[name], state[name])
    assert made.task.metadata.options["own"] == ("pointwise.bias",)
    assert made.task.metadata.options["bits"] == 2
    left = sum(float((state[n] - tensors[n]).square().sum()) for n in net.anatomy.weights if n in tensors)
    ours = net.anatomy.tensors()
    change = sum(float((state[n] - ours[n].detach()).square().sum()) for n in net.anatomy.weights if n in tensors)
    assert made.kept == pytest.approx(1 - left / change, abs=1e-3)
    assert made.kept > 0.7
    assert made.cosine > 0.9
    assert made.warnings == []
    assert list(net.tasks) == ["small"]
    assert snapshot(net.backbone) == before


@pytest.mark.parametrize("bits", [0.9, 2, 4])
def test_the_file_has_the_requested_size_and_the_same_outputs(net, bits, tmp_path):
    made = rounded(net, "small", finetuned(net), ["a", "b", "c", "d"], bits=bits)
    said = run(net.eval(), batch(), task="small")
    net.save_task("small", tmp_path / "small.safetensors")
    found = inspect_file(tmp_path / "small.safetensors")
    assert 0.92 * bits < found.bits_per_weight <= bits
    assert found.weights == sum(weight.shape.numel() for weight in net.anatomy.weights.values())
    assert found.bytes["levels"] > 0
    fresh = Network(tiny(width=WIDE))
    task = fresh.load_task(tmp_path / "small.safetensors")
    assert task.classes == ("a", "b", "c", "d")
    assert torch.equal(run(fresh.eval(), batch(), task="small"), said)
    assert all(isinstance(transform, Levels) for transform in task.transforms.values())
    assert made.task.metadata == task.metadata


def test_more_bits_keep_more(net):
    state = finetuned(net)
    kept = [rounded(net, f"small{bits}", state, bits=bits).kept for bits in (0.8, 1.5, 4)]
    assert kept[0] < kept[1] < kept[2]


def test_bits_that_cannot_be_met_leave_no_task(net):
    with pytest.raises(TaskError, match=r"bits=0.1 cannot be met: norm layers and the header alone take \d\.\d+ bits"):
        rounded(net, "small", finetuned(net), bits=0.1)
    with pytest.raises(TaskError, match="bits=9: give a number from"):
        rounded(net, "small", finetuned(net), bits=9)
    assert not net.tasks


def test_a_copy_that_changed_nothing_is_the_backbone(net):
    made = rounded(net, "same", net.backbone)
    assert made.kept == 1.0
    torch.testing.assert_close(run(net.eval(), batch(), task="same"), run(net.backbone, batch()))


@pytest.mark.parametrize(
    "source", ["module", "state", "safetensors", "prefixed torch file", "half", "task file", "task"]
)
def test_copies_from_everywhere_give_the_same_task(net, source, tmp_path):
    state = finetuned(net, 6)
    net.add_task("copy", classes=6, method="finetune")
    with torch.no_grad():
        for name, tensor in net.tasks["copy"].owned.items():
            tensor.copy_(state[name])
    copy = tiny(width=WIDE)
    copy.load_state_dict(state)
    given = {"module": copy, "state": state, "task": net.tasks["copy"]}.get(source, tmp_path / "copy")
    if source == "safetensors":
        save_file(state, given, {"format": "pt", "classes": "a, b"})  # another tool's metadata
    elif source == "prefixed torch file":
        torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}, "epoch": 3}, given)
    elif source == "half":
        save_file({n: t.half() if t.is_floating_point() else t for n, t in state.items()}, given)
    elif source == "task file":
        net.save_task("copy", given)
    task = rounded(net, "small", given).task
    expected = rounded(net, "expected", state).task
    assert task.metadata.classes == expected.metadata.classes
    answers = [run(net.eval(), batch(), task=name) for name in ("small", "expected")]
    torch.testing.assert_close(*answers, rtol=0, atol=5e-2 if source == "half" else 0)


def test_a_linear_head_after_features_is_kept(tmp_path):
    class Features(nn.Sequential):
        num_classes = 0

    torch.manual_seed(0)
    model = Features(nn.Conv2d(3, 9, 3), nn.ReLU(), nn.Conv2d(9, 400, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = Network(model.eval(), example=(1, 3, 8, 8))
    net.add_task("copy", classes=3, method="finetune")
    learn(net, "copy", batch(8), steps=2)
    head = net.tasks["copy"].head.state_dict()
    small = rounded(net, "small", net.tasks["copy"]).task
    assert small.metadata.head == "linear"
    assert all(torch.equal(tensor, head[name]) for name, tensor in small.head.state_dict().items())


def broken(state: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    state = dict(state)
    if how == "missing":
        del state["stem.weight"]
    elif how == "stray":
        state["other.weight"] = torch.zeros(3)
    elif how == "shape":
        state["stem.weight"] = torch.zeros(160, 3, 5, 5)
    elif how == "head":
        state["fc.weight"] = torch.zeros(4, 9)
    elif how == "nan":
        state["norm1.running_var"] = state["norm1.running_var"].clone()
        state["norm1.running_var"][2] = float("nan")
    return state


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", r"1 tensors of the network are missing \('stem.weight'\)"),
        ("stray", r"1 tensors are not in the network \('other.weight'\)"),
        ("shape", r"'stem.weight' is \(160, 3, 5, 5\) but \(160, 3, 3, 3\) in the network"),
        ("head", r"'fc.weight' is \(4, 9\) but \(4, 160\) in the network"),
        ("nan", "not finite in 1 tensors, first 'norm1.running_var'"),
    ],
)
def test_copies_that_do_not_fit_are_refused_by_name(net, how, said):
    with pytest.raises(BackboneError, match=said):
        rounded(net, "small", broken(finetuned(net), how))
    assert not net.tasks


def test_other_refusals(net, tmp_path):
    state = finetuned(net)
    with pytest.raises(ClassesError, match=r"'fc', has 4 outputs, but 3 classes were given"):
        rounded(net, "small", state, ["a", "b", "c"])
    rounded(net, "small", state)
    with pytest.raises(TaskError, match="there is a task 'small' already"):
        rounded(net, "small", state)
    with pytest.raises(TaskError, match="no option 'perr'; did you mean 'per'"):
        rounded(net, "other", state, perr="channel")
    net.add_task("series", classes=4, method="adapters-series")
    with pytest.raises(TaskError, match="method 'adapters-series' adds layers"):
        rounded(net, "other", net.tasks["series"])
    elsewhere = Network(tiny(seed=3, width=WIDE))
    with pytest.raises(TaskError, match="does not belong to this network"):
        rounded(elsewhere, "other", net.tasks["small"])
    net.save_task("small", tmp_path / "small.safetensors")
    with pytest.raises(WrongBackboneError, match="fingerprint"):
        rounded(elsewhere, "other", tmp_path / "small.safetensors")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(BackboneError, match="cannot load the weights"):
        rounded(net, "other", tmp_path / "text")
    assert set(net.tasks) == {"small", "series"}


def test_tied_weights_must_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.fc = nn.Linear(99, 99), nn.Linear(99, 99), nn.Linear(99, 2)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.fc(self.two(self.one(x)))

    torch.manual_seed(0)
    net = Network(Tied().eval(), example=(1, 99))
    state = {name: tensor + 0.1 for name, tensor in net.backbone.state_dict().items()}
    del state["two.weight"]  # as safetensors' save_model has it
    assert rounded(net, "small", state, bits=4).kept > 0.9
    with pytest.raises(BackboneError, match=r"'two.weight' and 'one.weight' differ in"):
        rounded(net, "other", {**state, "two.weight": state["one.weight"] + 1})


def test_a_copy_of_another_pretraining_is_compressed_with_a_warning(net):
    (warning,) = rounded(net, "small", tiny(seed=5, width=WIDE)).warnings
    assert "was it fine-tuned from these?" in warning


# Calibration


def images(count: int = 24) -> TensorDataset:
    return TensorDataset(batch(count), torch.arange(count) % 4)


def test_calibration_brings_answers_nearer_and_leaves_the_head(net):
    state = finetuned(net)
    state["fc.weight"] *= 50  # so that features matter to the scores
    rounded(net, "first", state)
    config = CALIBRATION.changed(steps=60, batch=8)
    made = compress(net, "small", state, calibrate_on=images(), config=config, test=images())
    task = made.task
    with torch.no_grad():
        copy = tiny(width=WIDE)
        copy.fc = nn.Linear(WIDE, 4)
        copy.load_state_dict(state)
        wanted = copy.eval()(batch(24))
        far = [distillation_loss(run(net.eval(), batch(24), task=name), wanted, 2.0) for name in ("first", "small")]
    assert far[1] < 0.8 * far[0]
    assert made.history[-1]["train_loss"] < made.history[0]["train_loss"]
    assert torch.equal(task.owned["fc.weight"], state["fc.weight"])
    assert set(made.accuracy) == {"finetuned", "calibrated"}
    assert task.metrics["test"] == {"accuracy": made.accuracy["calibrated"]}
    right = (wanted.argmax(1) == torch.arange(24) % 4).float().mean()
    assert made.accuracy["finetuned"] == pytest.approx(float(right))
    assert list(net.tasks) == ["first", "small"]


@pytest.mark.parametrize("calibrate_on", ["drawings", None])
def test_a_network_in_half_precision_is_distilled(net, calibrate_on, monkeypatch):
    monkeypatch.setattr("bitgraft.compression.drawings.COUNT", 8)
    state = finetuned(net)
    net.half()
    config = CALIBRATION.changed(steps=1, batch=4)
    made = compress(
        net, "small", state, calibrate_on=calibrate_on or images(), config=config, preprocessing={"size": 8}
    )
    assert made.warnings == []
    assert np.isfinite(made.history[-1]["train_loss"])


def test_a_fault_in_calibration_leaves_no_half_made_task(net):
    class Broken(TensorDataset):
        def __getitem__(self, index):
            raise TaskError("cannot be had")

    with pytest.raises(TaskError, match="cannot be had"):
        compress(net, "small", finetuned(net), calibrate_on=Broken(batch(8)))
    assert not net.tasks


def test_images_are_their_own_targets_also_with_augmentation_by_epoch():
    class Shifting(TensorDataset):
        def set_epoch(self, epoch):
            self.tensors = (self.tensors[0] + epoch,)

    data = Unlabelled(Shifting(torch.zeros(3, 1, 2, 2)))
    data.set_epoch(2)
    image, target = data[1]
    assert len(data) == 3
    assert torch.equal(image, target)
    assert float(image.sum()) == 8.0


def test_soft_targets_against_the_definition():
    given, wanted = batch(5, 7), batch(5, 7, seed=2)
    p, q = ((scores / 3.0).double().softmax(1) for scores in (wanted, given))
    slow = 9.0 * (p * (p / q).log()).sum(1).mean()
    assert float(distillation_loss(given, wanted, 3.0)) == pytest.approx(float(slow), rel=1e-5)


# Drawings


def drawing(seed=0, epoch=0, index=0, **stated):
    data = Drawings(Preprocessing.from_dict({"size": (24, 40), **stated}), seed)
    data.set_epoch(epoch)
    return data[index][0]


def test_a_drawing_depends_on_seed_epoch_and_index_alone():
    first = drawing()
    assert torch.equal(first, drawing())
    others = [drawing(seed=1), drawing(epoch=1), drawing(index=1)]
    assert not any(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("channels", [1, 3])
def test_drawings_are_images_of_the_given_size_and_range(channels):
    mean, std = [0.25] * channels, [0.5] * channels
    images = torch.stack([drawing(index=index, channels=channels, mean=mean, std=std) for index in range(30)])
    assert images.shape == (30, channels, 24, 40)
    pixels = images * 0.5 + 0.25
    assert -1e-6 <= float(pixels.min()) < 0.05
    assert 0.95 < float(pixels.max()) <= 1 + 1e-6
    assert float(images.flatten(1).std(1).max()) > 0.3  # not flat


def test_noise_has_the_stated_spectrum():
    noise = coloured_noise(np.random.default_rng(0), 256, 256, 1.5)[:, :, 0]
    power = np.abs(np.fft.fft2(noise)) ** 2
    frequency = np.hypot(np.fft.fftfreq(256)[:, None], np.fft.fftfreq(256))
    rings = [power[(low <= frequency) & (frequency < 1.2 * low)].mean() for low in (0.05, 0.2)]
    assert np.log(rings[0] / rings[1]) / np.log(4) == pytest.approx(2 * 1.5, abs=0.3)  # power is amplitude squared
    assert noise.mean() == pytest.approx(0, abs=1e-9)


def test_distilling_on_drawings_brings_answers_nearer_without_data(net):
    state = finetuned(net)
    state["fc.weight"] *= 50
    config = CALIBRATION.changed(steps=60, batch=8)
    size = {"size": [12, 12], "mean": [0.5] * 3, "std": [0.25] * 3}
    made = compress(net, "drawn", state, preprocessing=size, config=config)
    assert len(made.history) == 1
    rounded(net, "rounded", state, preprocessing=size)
    again = compress(net, "again", state, preprocessing=size, config=config)
    copy = tiny(width=WIDE)
    copy.fc = nn.Linear(WIDE, 4)
    copy.load_state_dict(state)
    unseen = torch.stack([drawing(seed=7, index=i, **size) for i in range(32)])
    with torch.no_grad():
        wanted = copy.eval()(unseen)
        far = {n: float(distillation_loss(run(net.eval(), unseen, task=n), wanted)) for n in ("drawn", "rounded")}
    assert far["drawn"] < 0.8 * far["rounded"]
    assert torch.equal(run(net.eval(), unseen, task="drawn"), run(net.eval(), unseen, task="again"))
    assert not again.warnings


@pytest.mark.parametrize("kind", ["linear", "detector"])
def test_a_network_that_takes_no_images_is_only_rounded_and_says_so(kind):
    class Detector(nn.Module):
        """Answers a list of images with a list of boxes."""

        def __init__(self):
            super().__init__()
            self.body, self.boxes = nn.Conv2d(3, 200, 3), nn.Conv2d(200, 4, 3)

        def forward(self, images):
            boxes = self.boxes(self.body(torch.stack(list(images))).relu()).amax((2, 3))
            return boxes if torch.jit.is_tracing() else [{"boxes": box[None]} for box in boxes]

    torch.manual_seed(0)
    if kind == "linear":
        net, head = Network(nn.Sequential(nn.Linear(99, 99), nn.ReLU(), nn.Linear(99, 2)).eval(), example=(1, 99)), "2"
    else:
        net, head = Network(Detector().eval(), example=(1, 3, 8, 8), head="boxes"), "boxes"
    state = {name: tensor + 0.1 for name, tensor in net.backbone.state_dict().items()}
    made = compress(net, "small", state, bits=4)
    assert net.anatomy.head == head
    assert made.history == []
    (warning,) = made.warnings
    assert warning.startswith("weights were only rounded, because the network has no scores for random images (")


# The command


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with images, a network and a store with a fine-tuned task."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        furnish(folder, patch)
        train = "train photos --size 16 --batch 8 --epochs 3 --method finetune --task colours --store source --backbone"
        for command in (
            [*train.split(), "own_net:wide"],
            ["export", "--task", "colours", "--store", "source", "--output", "plain.safetensors"],
        ):
            assert exit_code(patch, *command) == 0
    (folder / "names.txt").write_text("blue\ngreen\n\nred\n")
    save_file(load_file(folder / "plain.safetensors"), folder / "bare.safetensors")  # without metadata
    return folder


@pytest.fixture
def command(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    return lambda *args: bitgraft(capsys, monkeypatch, "compress", *args)


def test_a_task_of_another_store_into_a_new_one(command, place, tmp_path):
    store = str(tmp_path / "new")
    code, out, err = command(
        *["source/colours", "--backbone", "own_net:wide", "--task", "small", "--store", store, "--eval", "photos"],
        *["--steps", "70", "--batch", "8"],
    )
    assert (code, err) == (0, "")
    assert "test accuracy: finetuned " in out
    assert "epoch 1/1  distance " in out  # on drawings
    assert f"wrote {store}/small.safetensors" in out
    opened = Store(store)
    archive = opened.archive("small")
    assert archive.metadata.method == "full"
    assert archive.metadata.classes == ("blue", "green", "red")
    assert archive.metadata.preprocessing == Store("source").archive("colours").metadata.preprocessing
    assert archive.metrics["test"]["accuracy"] == archive.metrics["compressed"]["accuracy_compressed"]
    code, _, err = command("source/colours", "--task", "small", "--store", store)
    assert code == 1
    assert "already has a task 'small'" in err


def test_plain_weights_with_calibration_as_json(command):
    more = ["--calibrate", "photos", "--size", "16", "--steps", "6", "--batch", "8", "--rate", "norms=1e-3", "--json"]
    code, out, err = command("bare.safetensors", "--task", "plain", "--store", "source", *more)
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["classes"] == ["blue", "green", "red"]  # from the data, since the file has none
    assert set(report["accuracy"]) == {"finetuned", "calibrated"}
    assert report["measured_on"] == "test"
    assert len(report["history"]) == 2
    assert report["bytes"] == Store("source").path("plain").stat().st_size
    assert 0.9 < report["bits_per_weight"] <= 1
    accuracy = Store("source").archive("colours").metrics["test"]["accuracy"]
    assert report["accuracy"]["finetuned"] == pytest.approx(accuracy)
    again = json.loads(command("source/plain", "--task", "again", "--store", "source", "--no-distil", "--json")[1])
    assert again["finetuned_bytes"] == report["finetuned_bytes"]  # a whole network, whatever the copy's file holds


def test_exported_weights_state_their_classes_and_size(command):
    assert (
        command("plain.safetensors", "--task", "exported", "--store", "source", "--eval", "photos", "--no-distil")[0]
        == 0
    )
    metadata = Store("source").archive("exported").metadata
    assert metadata.classes == ("blue", "green", "red")
    assert metadata.preprocessing["size"] == [16, 16]


def test_data_of_other_classes_calibrates_but_does_not_measure(command, tmp_path):
    folder = photos(tmp_path / "some")
    for part in ("train", "val", "test"):
        (folder / part / "red").rename(folder / part / "pink")
    store = ["--store", "source", "--task", "unlabelled"]
    code, out, _ = command("plain.safetensors", *store, "--calibrate", str(folder), "--steps", "1", "--batch", "8")
    assert code == 0
    assert "accuracy was not measured: the copy does not know 1 of the 3 classes in the data: pink; it" in out
    assert "distance" in out


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ("bare.safetensors --task t --store nowhere", 2, "name the fine-tuned network with --backbone"),
        ("bare.safetensors --task t --steps 9 --no-distil", 2, "--no-distil only rounds: leave out --calibrate, --st"),
        ("bare.safetensors --task t --bits 9", 2, "--bits must be at most 4"),
        ("bare.safetensors --task t --calibrate photos --eval photos", 2, "leave out --eval"),
        ("bare.safetensors --task t --store source --seed 99999999999999999999", 2, "at least 0 and below 2**63"),
        ("bare.safetensors --task t --option perr=channel", 2, "did you mean 'per'"),
        ("bare.safetensors --task ../t --store source", 1, "cannot be a task's name"),
        ("source/colors --task t --store source", 1, "has no task 'colors'; it has "),
        ("missing.pth --task t --store source", 1, "cannot read the weights missing.pth"),
        ("bare.safetensors --task t --store source --classes a,b", 1, "has 3 outputs, but 2 classes were given"),
        ("bare.safetensors --task t --store source --classes photos/test/red/0.png", 2, "cannot be read as text"),
        ("bare.safetensors --task t --store new --backbone own_net:other", 1, "have a different shape"),
        ("bare.safetensors --task t --store source --backbone own_net:other", 1, "holds the tasks of one backbone"),
        ("source/colours --task t --store source --size 16", 1, "leave out --size"),
        ("source/colours --task t --store source --eval nothing-here", 1, "no data set at 'nothing-here'"),
    ],
)
def test_a_refused_command_leaves_no_trace(command, place, args, code, said):
    before = sorted(str(path) for path in place.rglob("*"))
    result = command(*args.split())
    assert result[0] == code
    assert said in result[2]
    assert result[2].count("\n") == 1
    assert sorted(str(path) for path in place.rglob("*")) == before


def test_classes_from_a_file_and_from_the_command_line(command):
    for name, names in (("a", "names.txt"), ("b", "blue, green,red")):
        store = ["--store", "source", "--no-distil"]
        assert command("bare.safetensors", "--task", name, *store, "--classes", names)[0] == 0
        assert Store("source").archive(name).metadata.classes == ("blue", "green", "red")
