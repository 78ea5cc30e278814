import copy
import re

import pytest
import torch
from torch import nn

import bitgraft
from bitgraft.errors import CorruptError, MissingTaskError, NoFreeWeightsError, TaskError
from bitgraft.methods import registry
from bitgraft.transforms.base import Weight
from bitgraft.transforms.packed import Packed, largest

TASKS = ("a", "b", "c")


def backbone() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 10),
        nn.ReLU(),
        nn.Linear(10, 4),
    )


def network() -> bitgraft.Network:
    return bitgraft.Network(backbone(), example=(1, 3, 8, 8))


def images(seed: int = 3) -> torch.Tensor:
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def train(net: bitgraft.Network, name: str, steps: int = 5) -> None:
    """Train with momentum and weight decay, which would change weights that are not properly frozen."""
    learned = [parameter for _, parameter in net.tasks[name].roles()]
    optimiser = torch.optim.SGD(learned, lr=0.05, momentum=0.9, weight_decay=0.01)
    labels = torch.arange(8) % 3
    for step in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(images(step), task=name), labels).backward()
        optimiser.step()


def learn(net: bitgraft.Network, name: str, prune: float | None = 0.5, **options: object) -> bitgraft.Task:
    task = net.add_task(name, classes=3, method="packnet", preset=None, **options)
    net.train()
    train(net, name)
    if prune is not None:
        task.prune(prune)
        train(net, name, steps=2)
    net.eval()
    return task


def packed(task: bitgraft.Task) -> dict[str, Packed]:
    assert all(isinstance(transform, Packed) for transform in task.transforms.values())
    return task.transforms


def free(task: bitgraft.Task) -> int:
    return sum(int(transform.left().sum()) for transform in packed(task).values())


def smallest_kept(values: torch.Tensor, share: float) -> torch.Tensor:
    """Slow reference: sort and take the largest; among equals the first win."""
    flat = values.reshape(-1).tolist()
    order = sorted(range(len(flat)), key=lambda i: (-abs(flat[i]), i))
    kept = torch.zeros(len(flat), dtype=torch.bool)
    kept[order[: len(flat) - round(len(flat) * share)]] = True
    return kept.view(values.shape)


def test_the_first_task_keeps_the_largest_weights_of_each_layer_and_owns_the_rest():
    net = network()
    task = net.add_task("a", classes=3, method="packnet", keep=0.7)
    for name, transform in packed(task).items():
        weight = net.anatomy.tensor(name)
        kept = smallest_kept(weight, 0.3)
        assert int(kept.sum()) == round(0.7 * weight.numel())
        assert torch.equal(task.tensors()[name], weight * kept)
        assert torch.equal(transform.own, ~kept)
        assert torch.equal(transform.free, ~kept)
        assert not transform.left().any()


def test_the_first_of_equals_is_kept():
    assert largest(torch.tensor([1.0, 3.0, 1.0, 1.0]), 2).tolist() == [True, True, False, False]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.75])
def test_pruning_keeps_the_largest_of_what_the_task_owns_in_each_layer(share):
    net = network()
    task = net.add_task("a", classes=3, method="packnet")
    train(net, "a")
    before = {n: (t.values.detach().clone(), t.own.clone()) for n, t in packed(task).items()}
    task.prune(share)
    for name, transform in packed(task).items():
        values, own = before[name]
        expected = own.clone()
        expected[own] = smallest_kept(values[own], share)
        assert torch.equal(transform.own, expected)
        assert int(transform.left().sum()) == round(share * int(own.sum()))
        w, base = task.tensors()[name], net.anatomy.tensor(name)
        assert torch.equal(w[expected], values[expected])
        assert not w[transform.left()].any()
        assert torch.equal(w[~transform.free], base[~transform.free])


def test_training_after_pruning_changes_only_owned_weights():
    net = network()
    task = learn(net, "a", prune=0.5)
    pruned = {name: transform.left() for name, transform in packed(task).items()}
    before = task.tensors()
    train(net, "a")
    for name, after in task.tensors().items():
        if name in pruned:
            transform = packed(task)[name]
            assert not after[pruned[name]].any()
            assert torch.equal(after[~transform.free], before[name][~transform.free])
            assert not torch.equal(after[transform.own], before[name][transform.own])


def test_a_second_task_changes_only_free_weights():
    net = network()
    first = learn(net, "a")
    second = learn(net, "b", prune=None)
    for name, transform in packed(second).items():
        held = ~packed(first)[name].left()
        assert torch.equal(second.tensors()[name][held], first.tensors()[name][held])
        assert torch.equal(transform.own, ~held)
        assert second.tensors()[name][~held].any()


def test_earlier_tasks_and_the_backbone_never_change():
    net = network()
    state = copy.deepcopy(net.backbone.state_dict())
    seen: dict[str, torch.Tensor] = {}
    for name in TASKS:
        learn(net, name)
        seen[name] = net(images(), task=name).detach().clone()
        for earlier, output in seen.items():
            assert torch.equal(net(images(), task=earlier), output), (earlier, name)
    assert len({tuple(output.flatten().tolist()) for output in seen.values()}) == len(TASKS)
    for name, tensor in net.backbone.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_order_matters():
    forward, backward = network(), network()
    for name in ("a", "b"):
        learn(forward, name)
    for name in ("b", "a"):
        learn(backward, name)
    assert not torch.equal(forward(images(), task="b"), backward(images(), task="b"))
    assert forward.tasks["b"].metadata.depends_on.keys() == {"a"}
    assert backward.tasks["b"].metadata.depends_on == {}


def test_tasks_of_other_methods_do_not_join_the_chain():
    net = network()
    learn(net, "a")
    net.add_task("mask", classes=3, method="full")
    assert learn(net, "b").metadata.depends_on.keys() == {"a"}


def test_a_full_network_is_refused():
    net = network()
    learn(net, "a", prune=None)
    with pytest.raises(NoFreeWeightsError, match="no free weights left"):
        net.add_task("b", classes=3, method="packnet")
    assert list(net.tasks) == ["a"]
    net.tasks["a"].prune(0.75)  # the remedy in the message
    assert learn(net, "b").metadata.depends_on.keys() == {"a"}


def test_the_base_task_owns_everything_and_starts_from_the_backbone():
    net = network()
    task = net.add_task("base", method="packnet", base=True, head="keep")
    for name, transform in packed(task).items():
        assert transform.own.all()
        assert torch.equal(task.tensors()[name], net.anatomy.tensor(name))
    assert torch.equal(net(images(), task="base"), net(images()))
    task.prune(0.5)
    for name, transform in packed(task).items():
        weight = net.anatomy.tensor(name)
        assert torch.equal(task.tensors()[name], weight * smallest_kept(weight, 0.5))
        assert int(transform.left().sum()) == round(0.5 * weight.numel())
    learn(net, "b")
    with pytest.raises(TaskError, match="base=True is for PackNet's first task"):
        net.add_task("c", classes=3, method="packnet", base=True)


def test_a_chain_on_a_retrained_base_uses_the_retrained_weights():
    net = network()
    base = learn(net, "base", base=True)
    second = net.add_task("b", classes=3, method="packnet")
    for name in packed(base):
        assert torch.equal(second.tensors()[name], base.tensors()[name])
        assert not torch.equal(second.tensors()[name], net.anatomy.tensor(name))


def test_a_task_that_others_build_on_cannot_be_removed_or_pruned():
    net = network()
    learn(net, "a")
    learn(net, "b")
    before = net(images(), task="a")
    with pytest.raises(TaskError, match="cannot be removed: 'b' would not run without it"):
        net.remove_task("a")
    with pytest.raises(TaskError, match="a frozen task cannot be pruned"):
        net.tasks["a"].prune(0.5)
    assert torch.equal(net(images(), task="a"), before)
    net.remove_task("b")
    net.remove_task("a")
    assert not net.tasks


@pytest.mark.parametrize("share", [-0.1, 1.0, 2])
def test_an_invalid_share_is_refused(share):
    net = network()
    task = net.add_task("a", classes=3, method="packnet")
    with pytest.raises(TaskError, match=re.escape(f"prune({share})")):
        task.prune(share)


def test_methods_that_own_no_weights_have_nothing_to_prune():
    task = network().add_task("a", classes=3, method="full")
    with pytest.raises(TaskError, match="has nothing to prune"):
        task.prune(0.5)


def saved_chain(net: bitgraft.Network, folder, names=TASKS) -> None:
    for name in names:
        net.save_task(name, folder / f"{name}.safetensors")


@pytest.mark.parametrize("base", [True, False])
def test_a_chain_is_restored_exactly_and_can_be_continued(base, tmp_path):
    net, again = network(), network()
    for name in TASKS:
        learn(net, name, base=base and name == "a")
    saved_chain(net, tmp_path)
    for name in TASKS:
        again.load_task(tmp_path / f"{name}.safetensors")
    for name in TASKS:
        assert torch.equal(again(images(), task=name), net(images(), task=name))
        tensors = net.tasks[name].tensors()
        assert all(torch.equal(tensor, tensors[key]) for key, tensor in again.tasks[name].tensors().items())
        assert again.tasks[name].bits() == net.tasks[name].bits()
    assert free(again.tasks["c"]) == free(net.tasks["c"]) > 0
    learn(net, "d")
    learn(again, "d")
    assert torch.equal(again(images(), task="d"), net(images(), task="d"))


def test_a_chain_loads_onto_a_rounded_backbone(tmp_path):
    close = backbone()
    close[3].weight.data = 1 + 1e-3 * close[3].weight.data  # all equal in bfloat16
    net, again = (bitgraft.Network(copy.deepcopy(close), example=(1, 3, 8, 8)) for _ in range(2))
    for name in ("a", "b"):
        learn(net, name)
    saved_chain(net, tmp_path, ("a", "b"))
    again.to(torch.bfloat16)
    for name in ("a", "b"):
        again.load_task(tmp_path / f"{name}.safetensors")
    for name in ("a", "b"):
        rounded = {key: tensor.bfloat16() for key, tensor in net.tasks[name].tensors().items()}
        assert all(torch.equal(tensor, rounded[key]) for key, tensor in again.tasks[name].tensors().items())


def test_a_chain_loads_under_other_names(tmp_path):
    net, again = network(), network()
    for name in TASKS:
        learn(net, name)
    saved_chain(net, tmp_path)
    again.load_task(tmp_path / "a.safetensors", name="b")  # so another task has the name "b"
    again.load_task(tmp_path / "b.safetensors", name="second")
    again.load_task(tmp_path / "c.safetensors", name="a")
    for old, new in [("a", "b"), ("b", "second"), ("c", "a")]:
        assert torch.equal(again(images(), task=new), net(images(), task=old))
    assert [list(task.metadata.depends_on) for task in again.tasks.values()] == [[], ["b"], ["second"]]
    with pytest.raises(TaskError, match="'second' would not run without it"):
        again.remove_task("b")
    with pytest.raises(TaskError, match="'a' would not run without it"):
        again.remove_task("second")
    (tmp_path / "renamed").mkdir()
    saved_chain(again, tmp_path / "renamed", ("b", "second", "a"))
    third = network()
    for name in ("b", "second", "a"):
        third.load_task(tmp_path / "renamed" / f"{name}.safetensors")
    assert torch.equal(third(images(), task="a"), net(images(), task="c"))
    third.load_task(tmp_path / "c.safetensors", name="twin")  # a file from before the renaming
    assert torch.equal(third(images(), task="twin"), net(images(), task="c"))
    learn(net, "d")
    learn(again, "d")
    assert torch.equal(again(images(), task="d"), net(images(), task="d"))


def test_a_missing_or_different_earlier_task_is_refused(tmp_path):
    net, again = network(), network()
    learn(net, "a")
    learn(net, "b")
    saved_chain(net, tmp_path, ("a", "b"))
    with pytest.raises(MissingTaskError, match="builds on 'a', not here"):
        again.load_task(tmp_path / "b.safetensors")
    again.add_task("a", classes=3, method="packnet", seed=1)
    train(again, "a", steps=1)
    with pytest.raises(MissingTaskError, match="builds on another task 'a'"):
        again.load_task(tmp_path / "b.safetensors")
    assert list(again.tasks) == ["a"]


def test_bits_count_masks_and_values():
    net = network()
    entries = {name: weight.shape.numel() for name, weight in net.anatomy.weights.items()}
    first, second = learn(net, "a", prune=0.5), learn(net, "b", prune=0.75)
    pruned = {name: count - round(count * 0.5) for name, count in entries.items()}
    owned = {name: count - round(count * 0.5) for name, count in pruned.items()}
    assert first.bits() == sum(2 * entries[name] + 32 * owned[name] for name in entries)
    left = {name: pruned[name] - owned[name] for name in entries}
    owned = {name: count - round(count * 0.75) for name, count in left.items()}
    assert second.bits() == sum(entries[name] + 32 * owned[name] for name in entries)


def test_parts_that_do_not_fit_are_refused_and_change_nothing():
    weight = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    method, about = registry.get("packnet"), Weight("w", weight.shape, "linear")
    first = method.build(about, weight, method.options, None, ())
    first.prune(0.5)
    parts = first.parts()
    blank = method.build(about, weight, method.options, None, ())
    everything = torch.full((3,), 255, dtype=torch.uint8)
    for bad, message in [
        ({"values": parts["values"]}, "parts should be"),
        ({**parts, "mask": parts["mask"][1:]}, "parts should be"),
        ({**parts, "values": parts["values"][1:]}, "parts should be"),
        ({"mask": parts["mask"], "values": parts["values"]}, "parts should be"),
        ({**parts, "mask": everything, "values": torch.zeros(20)}, "owns weights of an earlier task"),
    ]:
        with pytest.raises(CorruptError, match=message):
            blank.restore(bad)
        assert blank.values.requires_grad
    blank.restore(parts)
    assert torch.equal(blank(weight), first(weight))
    assert torch.equal(blank.left(), first.left())
