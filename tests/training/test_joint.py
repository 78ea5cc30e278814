"""Joint training: tasks also train the weights they share, on a copy of the backbone."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from stripes import SHORT, backbone, stop_after, stripes, without_dropout
from tiny import snapshot
from torch.nn import functional as F

from bitgraft.errors import StoppedError, TrainingError, WrongBackboneError
from bitgraft.network import Network
from bitgraft.training.loop import fit

NAMES = ("a", "b")
TRAIN = {name: stripes(50, ord(name)) for name in NAMES}
VAL = {name: stripes(15, ord(name) + 9) for name in NAMES}
CONFIG = SHORT.changed(epochs=3, rates={"weights": 1e-2})


def joint_network() -> Network:
    net = Network(backbone()).joint_copy()
    for name in NAMES:
        net.add_task(name, classes=3, method="adapters-joint")
    return net


@torch.no_grad()
def losses(net: Network) -> dict[str, float]:
    net.eval()
    pairs = {name: data.tensors for name, data in TRAIN.items()}
    return {name: float(F.cross_entropy(net(images, task=name), labels)) for name, (images, labels) in pairs.items()}


def everything(net: Network, folder) -> dict[str, bytes]:
    net.save_backbone(folder / "backbone.safetensors")
    for name in NAMES:
        net.save_task(name, folder / f"{name}.safetensors")
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_shared_weights_and_all_tasks_learn_and_the_original_stays(tmp_path):
    original = Network(backbone())
    original.add_task("before", classes=3)
    before, fingerprint = snapshot(original.backbone), original.fingerprint
    net = original.joint_copy()
    assert not net.tasks
    assert net.fingerprint == fingerprint
    start = {name: tensor.clone() for name, tensor in net.backbone.state_dict().items()}
    for name in NAMES:
        net.add_task(name, classes=3, method="adapters-joint")
    first = losses(net)
    result = fit(net, NAMES, TRAIN, VAL, CONFIG)
    last = losses(net)
    assert all(last[name] < first[name] for name in NAMES)
    moved = {name for name, tensor in net.backbone.state_dict().items() if not torch.equal(tensor, start[name])}
    assert moved == {"0.weight", "3.weight"}  # norm layers and heads are each task's own
    assert snapshot(original.backbone) == before
    assert original.fingerprint == fingerprint != net.fingerprint
    assert set(result.history[0]["by_task"]) == set(NAMES)
    for name in NAMES:
        assert net.tasks[name].metrics["last"]["val_loss"] == result.history[-1]["by_task"][name]["loss"]


def test_afterwards_it_is_an_ordinary_backbone(tmp_path):
    net = joint_network()
    flags = [p.requires_grad for p in net.backbone.parameters()]
    fit(net, NAMES, TRAIN, None, CONFIG)
    assert [p.requires_grad for p in net.backbone.parameters()] == flags
    before = snapshot(net.backbone)
    net.train()(TRAIN["a"].tensors[0], task="a").sum().backward()  # gradients no longer reach it
    assert snapshot(net.backbone) == before
    answers = losses(net)
    net.add_task("later", classes=3)
    fit(net, "later", TRAIN["a"], None, CONFIG)
    assert snapshot(net.backbone) == before
    assert losses(net) == answers
    net.add_task("c", classes=3, method="adapters-joint")
    with pytest.raises(TrainingError, match=r"net\.joint_copy\(\)"):
        fit(net, "c", TRAIN["a"], None, CONFIG)


def test_gradients_of_shared_weights_are_those_of_an_ordinary_module():
    """The reference: exported modules, and one step of plain SGD per task."""
    sgd = SHORT.changed(
        epochs=1, batch=50, optimizers=dict.fromkeys(SHORT.optimizers, "sgd"), rates=dict.fromkeys(SHORT.rates, 0.1),
        momentum=0.0, head_init=False, statistics="batch", warmup=0.0, schedule="constant", eps=1e-8,
        gradient_centralization=False, label_smoothing=0.0,
    )  # fmt: skip
    net = without_dropout(joint_network())
    plain = {name: net.export(name).train() for name in NAMES}
    expected = {key: net.backbone.state_dict()[key].clone() for key in ("0.weight", "3.weight")}
    for name in NAMES:
        module = plain[name]
        convs = {"0.weight": module[0], "3.weight": module[3]}
        weights = {k: next(p for p in m.parameters() if p.shape == expected[k].shape) for k, m in convs.items()}
        with torch.no_grad():
            for key, weight in weights.items():
                weight.copy_(expected[key]).requires_grad_(True)
        images, labels = TRAIN[name].tensors
        F.cross_entropy(module(images), labels).backward()
        expected = {key: (weight - 0.1 * weight.grad).detach() for key, weight in weights.items()}
    fit(net, NAMES, TRAIN, None, sgd)
    for key, tensor in expected.items():
        assert torch.allclose(net.backbone.state_dict()[key], tensor, atol=1e-6)


@pytest.mark.parametrize("steps", [3, 8, 14])
def test_a_resumed_run_gives_the_same_bytes(tmp_path, steps):
    config = CONFIG.changed(keep="best")
    whole = joint_network()
    fit(whole, NAMES, TRAIN, VAL, config)
    (tmp_path / "whole").mkdir()
    (tmp_path / "again").mkdir()
    with pytest.raises(StoppedError):
        fit(joint_network(), NAMES, TRAIN, VAL, config, folder=tmp_path, stop=stop_after(steps))
    again = joint_network()
    torch.manual_seed(99)
    fit(again, NAMES, TRAIN, VAL, config, folder=tmp_path, resume=True)
    assert everything(again, tmp_path / "again") == everything(whole, tmp_path / "whole")


LOAD = textwrap.dedent(
    """
    import sys, torch
    sys.path[:0] = [{tests!r}, {tests!r} + "/training"]
    torch.set_num_threads(1)
    import test_joint as t
    from bitgraft.backbone import weight_files
    module = t.backbone()
    module.load_state_dict(weight_files.read_weights({folder!r} + "/backbone.safetensors"))
    net = t.Network(module)
    for name in t.NAMES:
        net.load_task({folder!r} + "/" + name + ".safetensors")
    torch.save(t.losses(net), {folder!r} + "/losses.pt")
    """
)


def test_files_belong_to_the_new_backbone_only(tmp_path):
    net = joint_network()
    fit(net, NAMES, TRAIN, None, CONFIG)
    everything(net, tmp_path)
    source = LOAD.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)
    assert torch.load(tmp_path / "losses.pt") == pytest.approx(losses(net), rel=1e-5)
    old = Network(backbone())
    for name in NAMES:
        with pytest.raises(WrongBackboneError, match="belongs to a backbone with fingerprint"):
            old.load_task(tmp_path / f"{name}.safetensors")


def test_joint_training_that_would_change_other_tasks_is_refused():
    net = Network(backbone())
    net.add_task("a", classes=3, method="adapters-joint")
    with pytest.raises(TrainingError, match=r"trains the weights that tasks share.*net\.joint_copy\(\)"):
        fit(net, "a", TRAIN["a"], None, CONFIG)
    copy = joint_network()
    with pytest.raises(TrainingError, match="would change task 'b'"):
        fit(copy, "a", TRAIN["a"], None, CONFIG)
    mixed = net.joint_copy()
    mixed.add_task("a", classes=3, method="adapters-joint")
    mixed.add_task("b", classes=3, method="full")
    with pytest.raises(TrainingError, match="all tasks must use that method"):
        fit(mixed, NAMES, TRAIN, None, CONFIG)
    half = joint_network().half()
    with pytest.raises(TrainingError, match="float32"):
        fit(half, NAMES, TRAIN, None, CONFIG)


def test_a_copy_is_read_as_its_original_was():
    net = Network(backbone(), head="9", skip=["3.*"], original="own", active=2)
    copy = net.joint_copy()
    assert list(copy.anatomy.weights) == list(net.anatomy.weights) == ["0.weight"]
    assert (copy.original, copy.active) == ("own", 2)
