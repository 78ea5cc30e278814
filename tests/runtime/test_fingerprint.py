"""A task is saved with the fingerprint of the weights it runs on, and loads only on the same weights."""

import copy
import pickle

import pytest
import torch
from tiny import batch, learn, run, tiny
from torch import nn

from bitgraft import Network
from bitgraft.errors import WrongBackboneError


def with_task(path, seed=0):
    """A network whose task is also in a file."""
    net = Network(tiny(seed=seed))
    net.add_task("t", classes=3)
    learn(net, "t", batch())
    net.save_task("t", path)
    return net


@torch.no_grad()
def in_place(net):
    net.backbone.stem.weight.mul_(1.5)


@torch.inference_mode()
def in_inference_mode(net):
    net.backbone.stem.weight.mul_(1.5)


def through_data(net):
    net.backbone.stem.weight.data.mul_(1.5)


def data_replaced(net):
    net.backbone.stem.weight.data = net.backbone.stem.weight.data * 1.5


def parameter_replaced(net):
    net.backbone.stem.weight = nn.Parameter(net.backbone.stem.weight.detach() * 1.5)


def loaded(net):
    net.backbone.load_state_dict(tiny(seed=1).state_dict())


def assigned(net):
    net.backbone.load_state_dict(tiny(seed=1).state_dict(), assign=True)


def statistics_moved(net):
    net.backbone.train()(batch())
    net.backbone.eval()


def rounded_behind_the_networks_back(net):
    net.backbone.half().float()


def by_a_fused_optimizer(net):
    backbone = net.backbone
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=0.01, fused=True)
    backbone(batch()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


WRITES = [
    in_place,
    in_inference_mode,
    through_data,
    data_replaced,
    parameter_replaced,
    loaded,
    assigned,
    statistics_moved,
    rounded_behind_the_networks_back,
    by_a_fused_optimizer,
]


@pytest.mark.parametrize("write", WRITES)
def test_a_task_is_saved_under_the_weights_that_it_runs_on(write, tmp_path):
    net = with_task(tmp_path / "before")
    write(net)
    net.save_task("t", tmp_path / "after")
    with pytest.raises(WrongBackboneError, match="belongs to a backbone with fingerprint"):
        Network(tiny()).load_task(tmp_path / "after")
    again = Network(copy.deepcopy(net.backbone))
    again.load_task(tmp_path / "after")
    assert torch.equal(run(again, batch(), task="t"), run(net, batch(), task="t"))
    net.load_task(tmp_path / "after", name="again")


@pytest.mark.parametrize("write", WRITES)
def test_a_task_is_refused_once_its_weights_are_gone(write, tmp_path):
    net = with_task(tmp_path / "t")
    net.load_task(tmp_path / "t", name="again")
    write(net)
    with pytest.raises(WrongBackboneError):
        net.load_task(tmp_path / "t", name="more")
    assert list(net.tasks) == ["t", "again"]


@pytest.mark.parametrize("assign", [True, False])
def test_the_right_weights_loaded_after_a_refusal_are_accepted(assign, tmp_path):
    with_task(tmp_path / "t")
    other = Network(tiny(seed=1))
    with pytest.raises(WrongBackboneError):
        other.load_task(tmp_path / "t")
    other.backbone.load_state_dict(tiny().state_dict(), assign=assign)
    other.load_task(tmp_path / "t")
    assert torch.equal(run(other, batch(), task="t"), run(with_task(tmp_path / "u"), batch(), task="t"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "then",
    [
        lambda net: net,
        lambda net: net.to(memory_format=torch.channels_last),
        lambda net: net.to("cpu"),
        lambda net: net.float(),
        copy.deepcopy,
        lambda net: copy.deepcopy(copy.deepcopy(net)).to("cpu"),
        lambda net: pickle.loads(pickle.dumps(net)),
    ],
)
def test_a_rounded_network_keeps_its_tasks_until_it_is_written_to(dtype, then, tmp_path):
    fingerprint = with_task(tmp_path / "t").fingerprint
    net = then(Network(tiny()).to(dtype))
    assert net.fingerprint == fingerprint
    net.load_task(tmp_path / "t")
    net.save_task("t", tmp_path / "again")
    Network(tiny()).load_task(tmp_path / "again")
    with torch.no_grad():
        net.backbone.fc.bias.add_(1)  # the head is not part of the fingerprint
        net.backbone.norm1.num_batches_tracked.add_(1)
    assert net.fingerprint == fingerprint
    in_place(net)
    assert net.fingerprint == net.anatomy.fingerprint() != fingerprint
    with pytest.raises(WrongBackboneError):
        net.load_task(tmp_path / "t", name="more")


def test_a_network_emptied_and_filled_again_is_known_by_what_it_was_filled_with(tmp_path):
    net = with_task(tmp_path / "t")
    state = copy.deepcopy(net.backbone.state_dict())
    net.to("meta").to_empty(device="cpu")
    net.backbone.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    with pytest.raises(WrongBackboneError):
        net.load_task(tmp_path / "t", name="more")
    net.backbone.load_state_dict(state)
    net.load_task(tmp_path / "t", name="more")


def test_weights_made_in_inference_mode_run_and_are_known():
    with torch.inference_mode():
        backbone = tiny()
    net = Network(backbone)
    net.add_task("t", classes=3)
    before, answer = net.fingerprint, run(net, batch(), task="t")
    assert torch.equal(run(net, batch(), task="t"), answer)
    with torch.inference_mode():
        backbone.stem.weight.mul_(1.5)
    assert net.fingerprint != before


def test_reading_a_fingerprint_twice_hashes_once(monkeypatch):
    net = Network(tiny())
    first = net.fingerprint
    monkeypatch.setattr(type(net.anatomy), "fingerprint", lambda anatomy: "hashed again")
    run(net, batch())
    assert net.fingerprint == first
    in_place(net)
    assert net.fingerprint == "hashed again"
