"""Files of tasks that build on other tasks, when an earlier task changed after the later one was added."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bitgraft
from bitgraft.errors import TaskError
from bitgraft.format import archive
from tests.tiny import batch, learn, run, tiny

torch.set_num_threads(1)


def chain(method: str, seed: int = 0) -> bitgraft.Network:
    """Three trained tasks, each of which builds on the one before."""
    net = bitgraft.Network(tiny())
    for i, name in enumerate(("a", "b", "c")):
        borrowed = {"borrow": list(net.tasks)[-1:]} if method == "full" else {}
        net.add_task(name, classes=3, method=method, seed=seed + i, **borrowed)
        learn(net, name, batch(seed=seed + i), rate=1.0)
        if method == "packnet":
            net.tasks[name].prune(0.5)
    return net.eval()


def assert_files_give_the_same_answers(net: bitgraft.Network, folder: Path) -> None:
    again = bitgraft.Network(tiny())
    for name in net.tasks:
        net.save_task(name, folder / name)
    for name in net.tasks:
        again.load_task(folder / name)
        assert torch.equal(run(again, batch(), task=name), run(net, batch(), task=name)), name


@pytest.mark.parametrize("method", ["full", "packnet"])
def test_the_state_of_another_network_was_loaded(method: str, tmp_path: Path) -> None:
    net, other = chain(method), chain(method, seed=5)
    for each in (net, other):
        each.tasks["c"].freeze()
    net.load_state_dict(other.state_dict())
    for name in net.tasks:
        assert torch.equal(run(net, batch(), task=name), run(other, batch(), task=name)), name
    assert_files_give_the_same_answers(net, tmp_path)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_task_was_rounded(name: str, tmp_path: Path) -> None:
    net = chain("full")
    bitgraft.compact(net.tasks[name])
    assert_files_give_the_same_answers(net, tmp_path)


@pytest.mark.parametrize("assign", [False, True])
def test_a_task_follows_the_masks_that_it_borrows(assign: bool, tmp_path: Path) -> None:
    net, other = chain("full"), chain("full", seed=5)
    before = run(net, batch(), task="b")
    net.tasks["a"].load_state_dict(other.tasks["a"].state_dict(), assign=assign)
    assert not torch.equal(run(net, batch(), task="b"), before)
    assert_files_give_the_same_answers(net, tmp_path)


def test_packnet_keeps_the_weights_that_it_was_trained_on_but_has_no_file_for_them(tmp_path: Path) -> None:
    net, other = chain("packnet"), chain("packnet", seed=5)
    before = [run(net, batch(), task=name) for name in ("b", "c")]
    net.tasks["a"].load_state_dict(other.tasks["a"].state_dict())
    assert all(torch.equal(run(net, batch(), task=n), old) for n, old in zip(("b", "c"), before, strict=True))
    for name in ("b", "c"):
        with pytest.raises(TaskError, match="'a' has changed since 'b' was trained"):
            net.save_task(name, tmp_path / name)


@pytest.mark.parametrize("change", [lambda net: net.half().float(), lambda net: net.double()])
def test_a_chain_is_saved_after_its_backbone_was_rounded(change: Callable[[bitgraft.Network], object]) -> None:
    net = chain("packnet")
    before = [archive.pack_task(task, "") for task in net.tasks.values()]
    change(net)
    after = [archive.pack_task(task, "") for task in net.tasks.values()]
    assert [one.metadata for one in after] == [one.metadata for one in before]
