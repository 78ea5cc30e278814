"""A state dict holds the whole task at any time."""

import copy
import io

import pytest
import safetensors.torch
import torch
from tiny import batch, learn, run, tiny
from torch.utils.data import TensorDataset

from bitgraft import Network, TaskError, fit
from bitgraft.training import cpu
from bitgraft.training.callbacks import Callback
from bitgraft.training.presets import preset

PIGGYBACK = {"k0": 0.0, "k1": 0.0, "k2": 0.0, "k3": 1.0, "threshold": 5e-3, "init": (1e-2, 1e-2)}


def network(**options) -> Network:
    net = Network(tiny())
    net.add_task("t", classes=3, **options)
    return net.eval()


def saved(state):
    """Save and load a state, as checkpoints do."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def as_safetensors(state):
    return safetensors.torch.load(safetensors.torch.save(state))


class Midway(Callback):
    """Records the task's output, state and file after a few steps."""

    def __init__(self, net, path) -> None:
        self.net, self.path = net, path
        self.answer = self.state = None

    def step(self, epoch, step, images) -> None:
        if epoch == 1:
            task = self.net.tasks["t"].eval()
            cpu.set_channels_last(task, False)  # other networks use the default layout, which rounds differently
            self.answer, self.state = run(self.net, batch(), task="t"), copy.deepcopy(task.state_dict())
            self.net.save_task("t", self.path)
            task.train()


def trained(tmp_path, **options) -> tuple[Network, Midway]:
    net, x = network(**options), batch(24)
    seen = Midway(net, tmp_path / "midway.safetensors")
    config = preset("quick", "full").changed(epochs=2, batch=8)
    fit(net, "t", TensorDataset(x, torch.arange(24) % 3), None, config, callbacks=[seen])
    net.eval()
    return net, seen


@pytest.mark.parametrize("through", [dict, saved, as_safetensors])
@pytest.mark.parametrize("per", ["layer", "channel"])
def test_a_state_dict_holds_a_trained_task(per, through, tmp_path):
    net, _ = trained(tmp_path, per=per)
    expected = run(net, batch(), task="t")
    fresh = network(per=per, seed=1)
    assert not torch.equal(run(fresh, batch(), task="t"), expected)
    fresh.tasks["t"].load_state_dict(through(net.tasks["t"].state_dict()))
    assert torch.equal(run(fresh, batch(), task="t"), expected)
    whole = network(per=per, seed=2)
    whole.load_state_dict(through(net.state_dict()))
    assert torch.equal(run(whole, batch(), task="t"), expected)
    fresh.tasks["t"].freeze()
    assert torch.equal(run(fresh, batch(), task="t"), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_holds_a_task_in_the_middle_of_training(assign, tmp_path):
    net, seen = trained(tmp_path)
    assert any("_input_means" in name for name in seen.state)
    fresh = network(seed=1)
    fresh.tasks["t"].load_state_dict(seen.state, assign=assign)
    assert torch.equal(run(fresh, batch(), task="t"), seen.answer)
    again = network(seed=2)
    again.tasks["t"].load_state_dict(fresh.tasks["t"].state_dict())
    assert torch.equal(run(again, batch(), task="t"), seen.answer)
    again.tasks["t"].load_state_dict(net.tasks["t"].state_dict())  # which has no input means
    assert torch.equal(run(again, batch(), task="t"), run(net, batch(), task="t"))
    fresh.tasks["t"].freeze()
    assert torch.equal(run(fresh, batch(), task="t"), seen.answer)


def test_a_state_dict_holds_the_weights_that_packnet_found_free():
    def packed(seed: int) -> Network:
        net = Network(tiny(seed)).eval()
        for name in ("first", "second"):
            net.add_task(name, classes=3, method="packnet", seed=seed)
            learn(net, name, batch())
            net.tasks[name].prune(0.5)
        return net

    net, other = packed(0), packed(1)  # whose backbone prunes other weights
    other.load_state_dict(net.state_dict())
    for name in ("first", "second"):
        assert torch.equal(run(other, batch(), task=name), run(net, batch(), task=name))


def test_corrected_biases_follow_the_statistics():
    net = network()
    task = net.tasks["t"]
    learn(net, "t", batch())
    task.correct_mean_shift({"stem.weight": torch.ones(1, 3, 3, 3)})
    run(net, batch(), task="t")
    task.owned["norm1.running_var"].mul_(9)
    changed = run(net, batch(), task="t")
    net.release("t")
    assert torch.equal(changed, run(net, batch(), task="t"))


def test_a_file_holds_a_task_in_the_middle_of_training(tmp_path):
    _, seen = trained(tmp_path)
    other = Network(tiny()).eval()
    other.load_task(seen.path)
    assert torch.equal(run(other, batch(), task="t"), seen.answer)


def test_part_of_a_state_leaves_the_means_alone(tmp_path):
    _, seen = trained(tmp_path)
    fresh = network()
    fresh.tasks["t"].load_state_dict(seen.state)
    fresh.tasks["t"].load_state_dict({}, strict=False)
    assert torch.equal(run(fresh, batch(), task="t"), seen.answer)


def test_a_frozen_task_and_one_that_learns_do_not_take_each_others_state(tmp_path):
    net, _ = trained(tmp_path)
    learning, expected = copy.deepcopy(net.tasks["t"].state_dict()), run(net, batch(), task="t")
    net.tasks["t"].freeze()
    frozen, fresh = net.tasks["t"].state_dict(), network()
    before = run(fresh, batch(), task="t")
    for strict in (True, False):
        with pytest.raises(TaskError, match=r"is still training, but in this state dict it is frozen: freeze"):
            fresh.tasks["t"].load_state_dict(frozen, strict=strict)
        with pytest.raises(TaskError, match="is frozen, but in this state dict it is still training"):
            net.tasks["t"].load_state_dict(learning, strict=strict)
    assert torch.equal(run(fresh, batch(), task="t"), before)
    fresh.tasks["t"].freeze().load_state_dict(frozen)
    assert torch.equal(run(fresh, batch(), task="t"), expected)
    assert torch.equal(run(net, batch(), task="t"), expected)


def test_a_state_of_another_backbone_or_an_older_one_is_refused(tmp_path):
    _, seen = trained(tmp_path)
    fresh = network()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fresh.tasks["t"].load_state_dict({**seen.state, "_input_means.·elsewhere·weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="_extra_state"):
        fresh.tasks["t"].load_state_dict({n: t for n, t in seen.state.items() if "_extra_state" not in n})


@pytest.mark.parametrize(
    ("ours", "theirs", "odd"),
    [
        ({"method": "lora", "alpha": 8}, {"method": "lora", "alpha": 16}, "alpha=8, .* it is 16"),
        ({"k0": 1.0}, {"k0": "learn", "k3": 0.0}, "k0=1.0, .* it is 'learn'"),  # two rows of k, for other k
        ({"threshold": 0.0}, {"threshold": 1.5e-4}, "threshold=0.0"),
        ({"method": "piggyback-bn"}, {"method": "full", **PIGGYBACK}, "method='piggyback-bn'"),
    ],
)
def test_a_state_of_another_method_or_other_options_is_refused(ours, theirs, odd):
    one, other = network(preset=None, **ours), network(preset=None, **theirs)
    learn(other, "t", batch())
    before = run(one, batch(), task="t")
    with pytest.raises(TaskError, match=odd):
        one.load_state_dict(other.state_dict())
    assert torch.equal(run(one, batch(), task="t"), before)


def test_a_task_says_what_it_is():
    net = network()
    net.add_task("alone", classes=["x"], method="simple")
    net.add_task("none", head=None)
    shown = [repr(net.tasks[name]).splitlines()[1].strip() for name in ("t", "alone", "none")]
    ends = ("'t', method='full', 3 classes", "'alone', method='simple', 1 class", "'none', method='full', no classes")
    assert shown == list(ends)
