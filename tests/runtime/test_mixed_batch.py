"""A mixed batch gives the same scores as one task at a time, to the last bit."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
import timm
import torch
from tiny import batch, learn, run, tiny
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from bitgraft import Network
from bitgraft.errors import TaskError

NAMES = ["b", "a", "original", "c", "b", "b", "a", "c"]
FAMILIES = {
    "resnet": ("resnet18", {}),
    "norm with activation": ("tf_efficientnet_lite0", {}),
    "convnext": ("convnext_atto", {}),
    "vit": ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 2}),
}


def taught(backbone: nn.Module, x: torch.Tensor, methods=("full", "piggyback-bn", "finetune"), **options) -> Network:
    """Return a network with tasks a, b and c of 3, 4 and 5 classes, which keeps the weights of one."""
    net = Network(backbone, **{"active": 1, **options})
    for seed, (name, method) in enumerate(zip("abc", methods, strict=True)):
        net.add_task(name, classes=3 + seed, method=method, seed=seed)
        learn(net, name, x, rate=1e-2)
    return net.eval()


def rows_of(name, names=NAMES):
    return [i for i, wanted in enumerate(names) if wanted == name]


def assert_as_one_by_one(net, x, names=NAMES, **inputs):
    """Compare a mixed batch with one batch per task, and return its output."""
    with torch.no_grad():
        mixed = net(x, task=names, **inputs)
    for name in set(names):
        rows = rows_of(name, names)
        alone = run(net, x[rows], task=name, **{key: value[rows] for key, value in inputs.items()})
        assert torch.equal(torch.stack([mixed[row] for row in rows]), alone), name
    return mixed


@pytest.mark.parametrize("active", [1, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_gives_what_one_task_at_a_time_gives(family, active):
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    x = batch(8, 3, 32, 32)
    net = taught(timm.create_model(name, num_classes=6, **options).eval(), x, active=active)
    mixed = assert_as_one_by_one(net, x)
    assert [len(row) for row in mixed] == [4, 3, 6, 5, 4, 4, 3, 5]
    assert len({round(float(row[0]), 4) for row in mixed}) > 4, "tasks and images can be told apart"
    assert len(net.resident) <= active


def test_names_may_be_an_array():
    x = batch(8)
    net = taught(tiny(), x)
    mixed = run(net, x, task=np.array(NAMES))
    assert all(map(torch.equal, mixed, run(net, x, task=NAMES)))


class Ending(nn.Module):
    """A classifier followed by a function of all of its outputs."""

    def __init__(self, last) -> None:
        super().__init__()
        self.conv, self.norm, self.fc, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 6), last

    def forward(self, x):
        return self.last(self.fc(self.norm(self.conv(x)).relu().mean((2, 3))), dim=1)


@pytest.mark.parametrize("active", [1, 8])
@pytest.mark.parametrize("last", [F.softmax, F.log_softmax])
def test_layers_after_the_head_see_only_the_tasks_classes(last, active):
    torch.manual_seed(0)
    net, x = taught(Ending(last).eval(), batch(8), head="fc", active=active), batch(8)
    for scores in assert_as_one_by_one(net, x):
        chances = scores if last is F.softmax else scores.exp()
        assert float(chances.sum()) == pytest.approx(1)


@pytest.mark.parametrize("active", [1, 8])
def test_tasks_of_every_kind_in_one_batch(active):
    net, x = Network(tiny(), active=active), batch(14)
    for method in ("full", "adapters-series", "adapters-parallel", "lora", "dan", "classifier", "packnet"):
        net.add_task(method, classes=3, method=method)
        learn(net, method, x)
    net.add_task("masked", classes=5, seed=1).freeze()
    net.add_task("borrows", classes=4, borrow=["masked"], seed=2)
    net.add_task("keeps", head="keep")
    net.add_task("features", head=None)
    net.add_task("module", head=nn.Sequential(nn.Linear(8, 4), nn.Tanh()))
    net.eval()
    mixed = assert_as_one_by_one(net, x, [*net.tasks, "original", "full"])
    assert [len(row) for row in mixed] == [3, 3, 3, 3, 3, 3, 3, 5, 4, 6, 8, 4, 6, 3]


@pytest.mark.parametrize("active", [1, 2])
def test_features_of_a_backbone_without_a_head(active):
    backbone = tiny()
    backbone.fc = nn.Identity()
    net, x = Network(backbone, active=active, head=None), batch(4)
    for name, classes in (("a", 3), ("b", 5), ("c", 2)):
        learn(net, net.add_task(name, classes=classes).name, x)
    assert_as_one_by_one(net.eval(), x, ["c", "a", "b", "original"])


def test_changes_between_two_batches_are_followed():
    x = batch(8)
    net = taught(tiny(), x)
    before = assert_as_one_by_one(net, x)
    with torch.no_grad():
        net.tasks["a"].owned["norm1.bias"].add_(1.0)
        net.backbone.get_parameter("stem.weight").mul_(1.5)
    after = assert_as_one_by_one(net, x)
    assert not any(torch.equal(before[row], after[row]) for name in ("a", "b", "original") for row in rows_of(name))


def test_training_mode_moves_each_tasks_own_statistics():
    x = batch(8)
    net, alone = taught(tiny(), x), taught(tiny(), x)
    for each in (net, alone):
        each.train()
    with torch.no_grad():
        net(x, task=NAMES)
        for name in dict.fromkeys(NAMES):
            alone(x[rows_of(name)], task=name)
    for name in "abc":
        theirs = alone.tasks[name].state_dict()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in net.tasks[name].state_dict().items())


def test_gradients_reach_every_task_of_a_batch():
    x = batch(8)
    net, alone = taught(tiny(), x), taught(tiny(), x)
    torch.stack([row.sum() for row in net(x, task=NAMES)]).sum().backward()
    for name in "abc":
        alone(x[rows_of(name)], task=name).sum().backward()
        theirs = dict(alone.tasks[name].named_parameters())
        assert all(torch.equal(p.grad, theirs[key].grad) for key, p in net.tasks[name].named_parameters())


class Watched(nn.Module):
    """Records the address of its weights at each call."""

    seen: ClassVar[list[int]] = []
    last: ClassVar[weakref.ref[torch.Tensor]]

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Conv2d(3, 64, 16), nn.BatchNorm2d(64), nn.Linear(64, 6)

    def forward(self, x):
        self.seen.append(self.inner.weight.data_ptr())
        type(self).last = weakref.ref(self.inner.weight)
        return self.head(self.norm(self.inner(x)).flatten(1))


def test_tasks_that_do_not_fit_take_turns_in_the_same_memory(tmp_path):
    torch.manual_seed(0)
    backbone, x = Watched().eval(), batch(8, 3, 16, 16)
    weight = backbone.inner.weight.detach().clone()
    net = taught(backbone, x, ("full", "simple", "piggyback"), example=x)
    for name in "abc":
        net.save_task(name, tmp_path / name)
        net.remove_task(name)
        net.load_task(tmp_path / name)
    Watched.seen.clear()
    with torch.no_grad():
        net(x, task=["a", "b", "c"] + ["a"] * 5)
        net(x, task=["c", "b"] * 4)
    assert len(Watched.seen) == 5
    assert len(set(Watched.seen)) == 1
    spare = Watched.last
    run(net, x, task="a")
    assert spare() is None, "a task that is kept takes its place"
    assert backbone.inner.weight.data_ptr() not in Watched.seen
    assert_as_one_by_one(net, x)
    assert torch.equal(backbone.inner.weight, weight)
    assert len(net.resident) <= 1


class Meeting(nn.Module):
    """Waits in forward until another thread is there, too."""

    both: ClassVar[threading.Barrier | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Conv2d(3, 8, 8), nn.BatchNorm2d(8), nn.Linear(8, 6)

    def forward(self, x):
        if self.both is not None:
            self.both.wait()
        return self.head(self.norm(self.inner(x)).flatten(1))


def test_tasks_that_do_not_fit_run_concurrently(monkeypatch):
    torch.manual_seed(0)
    x = batch(4, 3, 8, 8)
    net = taught(Meeting().eval(), x, ("full", "simple", "piggyback"), example=x, memory=0)
    wanted = {name: run(net, x, task=name) for name in "ab"}

    def mixed(name: str) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack(net(x, task=[name] * 4))

    monkeypatch.setattr(Meeting, "both", threading.Barrier(2, timeout=60))
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            given = dict(zip("ab", threads.map(mixed, "ab"), strict=True))
            assert all(torch.equal(given[name], wanted[name]) for name in "ab")


def test_the_memory_limit_applies_to_mixed_batches():
    x = batch(8)
    net = taught(tiny(), x, ("full", "simple", "piggyback"), active=8, memory=1)
    assert_as_one_by_one(net, x)
    assert len(net.resident) <= 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_network_takes_mixed_batches():
    torch._dynamo.reset()
    x = batch(8)
    net = taught(tiny(), x)
    expected = assert_as_one_by_one(net, x)
    with torch.no_grad():
        found = torch.compile(net, backend="eager")(x, task=NAMES)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# keyword inputs, as in transformers


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=12, **sizes)).eval()


def text(count=8):
    """Token ids, and a mask that hides some of them."""
    rng = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 50, (count, 7), generator=rng)
    return {"input_ids": ids, "attention_mask": (torch.arange(7) < 2 + torch.arange(count)[:, None] % 6).long()}


def language_network(**options) -> Network:
    net = Network(bert(), example=torch.zeros(1, 4, dtype=torch.long), **options)
    for seed, name in enumerate("abc"):
        learn(net, net.add_task(name, classes=3 + seed, seed=seed).name, text()["input_ids"], rate=1e-2)
    return net.eval()


def test_inputs_may_come_by_name():
    net, inputs = language_network(), text()
    by_position = run(net, inputs["input_ids"], inputs["attention_mask"], task="a")
    assert torch.equal(run(net, **inputs, task="a"), by_position)
    assert torch.equal(run(net, inputs["input_ids"], attention_mask=inputs["attention_mask"], task="a"), by_position)
    assert torch.equal(run(net, **inputs), run(net.backbone, **inputs))
    assert not torch.equal(by_position, run(net, inputs["input_ids"], task="a")), "the mask counts"


@pytest.mark.parametrize("active", [1, 8])
def test_named_inputs_are_split_by_task(active):
    net, inputs = language_network(active=active), text()
    with torch.no_grad():
        mixed = net(**inputs, return_dict=True, task=NAMES)
    for name in set(NAMES):
        rows = rows_of(name)
        alone = run(net, **{key: value[rows] for key, value in inputs.items()}, task=name)
        assert torch.equal(torch.stack([mixed[row] for row in rows]), alone)
    assert_as_one_by_one(net, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    with pytest.raises(TaskError, match="got 8 images and 2 task names"):
        net(**inputs, task=["a", "b"])
    with pytest.raises(TaskError, match="needs a tensor with one row per name"):
        net(return_dict=True, task=["a", "b"])


def test_the_task_may_come_second():
    net, x = taught(tiny(), batch(8)), batch(8)
    assert torch.equal(run(net, x, "a"), run(net, x, task="a"))
    with torch.no_grad():
        assert all(map(torch.equal, net(x, NAMES), net(x, task=NAMES)))


class OneTask(nn.Module):
    """What transformers' Trainer takes: a module with the task's parameters, called with a batch by name."""

    def __init__(self, net: Network, name: str) -> None:
        super().__init__()
        self.task, self._net, self._name = net.tasks[name], (net,), name

    def forward(self, **inputs):
        return self._net[0](**inputs, task=self._name)


def test_transformers_trainer_trains_a_task(tmp_path):
    net = Network(bert(), example=torch.zeros(1, 4, dtype=torch.long))
    net.add_task("t", classes=3)
    before, columns = run(net.eval(), **text(), task="t"), text()
    data = [{**{key: value[i] for key, value in columns.items()}, "labels": i % 3} for i in range(8)]
    settings = {"max_steps": 2, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), remove_unused_columns=False, learning_rate=0.01, **settings)
    weights = {name: tensor.clone() for name, tensor in net.backbone.state_dict().items()}
    trainer = Trainer(OneTask(net, "t"), arguments, train_dataset=data)
    assert trainer.train().training_loss > 0
    assert not torch.equal(run(net.eval(), **text(), task="t"), before)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in net.backbone.state_dict().items())
