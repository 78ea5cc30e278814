import copy
import pickle
import warnings

import pytest
import timm
import torch
from tiny import METHODS, Tiny, batch, learn, run, snapshot, tiny
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitgraft import Network, TaskError, method_names
from bitgraft.errors import UnknownTaskError, UnsafeNameError
from bitgraft.format.archive import pack_task, to_bytes
from bitgraft.task import Task


def file_of(net, name):
    return to_bytes(pack_task(net.tasks[name], net.fingerprint))


def gradients(net, name, images, times=1):
    """Return the gradients of all that the task learns after forward and backward in training mode."""
    task = net.tasks[name].train()
    task.zero_grad()
    for _ in range(times):
        F.cross_entropy(net(images, task=name).float(), torch.arange(len(images)) % 3).backward()
    return {n: p.grad.clone() for n, p in task.named_parameters()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_all_methods_are_tested():
    assert sorted(METHODS) == sorted(method_names())


# no forgetting


@pytest.mark.parametrize("method", METHODS)
def test_no_task_changes_a_bit_of_the_backbone(method, tmp_path):
    backbone = tiny(dropout=0.5).to(memory_format=torch.channels_last).train()
    backbone.norm1.eval()
    backbone.stem.weight.requires_grad_(False)
    backbone.norm2.register_forward_hook(lambda *_: None)
    net, x = Network(backbone), batch()
    before, answer = snapshot(backbone), run(copy.deepcopy(backbone).eval(), x)
    for name in ("one", "two"):
        net.add_task(name, classes=3, method=method)
        learn(net, name, x)
        net.train()
        run(net, x, task=name)
        net.eval()
        if method == "packnet":
            net.tasks[name].prune(0.5)
        net(x, task=name).sum()
        net.export(name)(x)
        net.module(name)(x)
        net.save_task(name, tmp_path / f"{name}.safetensors")
    copy.deepcopy(net)
    assert snapshot(backbone) == before
    net.remove_task("two")
    net.load_task(tmp_path / "two.safetensors")
    net.remove_task("two")
    net.remove_task("one")
    assert snapshot(backbone) == before
    assert torch.equal(run(net, x), answer)


def test_packnets_earlier_tasks_stay_bit_identical():
    net, x = Network(tiny()), batch()
    answers = {}
    for name in ("one", "two", "three"):
        net.add_task(name, classes=3, method="packnet")
        learn(net, name, x)
        net.tasks[name].prune(0.5)
        learn(net, name, x)
        answers[name] = run(net, x, task=name)
    for name, answer in answers.items():
        assert torch.equal(run(net, x, task=name), answer)
        assert torch.equal(run(net.export(name), x), answer)
    with pytest.raises(TaskError, match="'one' cannot be removed: 'two' would not run without it"):
        net.remove_task("one")


def test_tasks_added_in_any_order_give_the_same_files():
    names = [name for name in METHODS if name != "packnet"]
    files = []
    for order in (names, names[::-1], [*names[5:], *names[:5]]):
        net = Network(tiny(dropout=0.5))
        for method in order:
            net.add_task(method, classes=3, method=method, seed=3)
        fresh = {name: file_of(net, name) for name in names}
        for method in order:
            torch.manual_seed(5)
            learn(net, method, batch())
        files.append((fresh, {name: file_of(net, name) for name in names}))
    assert files[0] == files[1] == files[2]
    assert all(files[0][0][name] != files[0][1][name] for name in names)


def test_another_seed_is_another_task():
    net = Network(tiny())
    for seed in (0, 1):
        net.add_task(f"t{seed}", classes=3, seed=seed)
    assert file_of(net, "t0") != file_of(net, "t1").replace(b"t1", b"t0")
    assert not torch.equal(net.tasks["t0"].owned["fc.weight"], net.tasks["t1"].owned["fc.weight"])


# modes


def test_the_network_begins_in_the_backbones_mode_and_never_changes_it():
    backbone = tiny()
    assert not Network(backbone).training
    net = Network(backbone.train())
    net.add_task("t", classes=3)
    assert net.training
    assert net.tasks["t"].training
    net.eval()
    assert not net.tasks["t"].training
    assert backbone.training
    net.add_task("u", classes=3)
    assert not net.tasks["u"].training
    net.train()
    net.tasks["t"].eval()
    assert net.tasks["u"].training


@pytest.mark.parametrize("method", METHODS)
def test_running_statistics_move_only_in_the_task_that_learns(method):
    net, x = Network(tiny()), batch()
    net.add_task("other", classes=3, method="full")
    task = net.add_task("t", classes=3, method=method)
    net.train()
    other = {n: t.clone() for n, t in net.tasks["other"].owned.items()}
    start = {n: t.clone() for n, t in task.owned.items() if not isinstance(t, nn.Parameter)}
    net(x, task="t")
    assert all(torch.equal(tensor, other[n]) for n, tensor in net.tasks["other"].owned.items())
    for name, value in start.items():
        assert not torch.equal(task.owned[name], value), name
    assert bool(start) == (method not in ("classifier", "lora", "piggyback", "packnet"))
    moved = {n: t.clone() for n, t in task.owned.items()}
    task.eval()
    net(x, task="t")
    assert all(torch.equal(tensor, moved[n]) for n, tensor in task.owned.items())


def test_norm_layers_that_a_task_does_not_own_stay_in_evaluation_mode_and_dropout_follows():
    net, x = Network(tiny(dropout=0.5)), batch(64)
    net.add_task("plain", classes=3, method="classifier")
    net.add_task("own", classes=3, method="full")
    net.train()
    modes = {name: {n: m.training for n, m in net.module(name).named_modules()} for name in ("plain", "own")}
    assert (modes["plain"]["norm1"], modes["plain"]["norm2"], modes["plain"]["drop"]) == (False, False, True)
    assert all(modes["own"].values())
    assert not torch.equal(run(net, x, task="plain"), run(net, x, task="plain"))
    net.eval()
    assert not any(m.training for m in net.module("plain").modules())
    assert torch.equal(run(net, x, task="plain"), run(net, x, task="plain"))


def test_dropout_inside_a_norm_that_stays_still_follows_the_mode():
    norm = timm.layers.BatchNormAct2d(4, drop_layer=nn.Dropout)
    net = Network(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)))
    net.add_task("t", classes=2, method="classifier")
    net.train()
    inside = net.module("t")[1]
    assert (inside.training, inside.drop.training) == (False, True)


# cached weights


@pytest.fixture
def counted(monkeypatch):
    calls = []
    tensors = Task.tensors
    monkeypatch.setattr(Task, "tensors", lambda task, **out: calls.append(task.name) or tensors(task, **out))
    return calls


def test_an_evaluating_task_computes_its_tensors_once_and_again_when_something_changed(counted):
    backbone = tiny()
    net, x = Network(backbone), batch()
    task = net.add_task("t", classes=3)

    def runs(times=3):
        counted.clear()
        for _ in range(times):
            run(net, x, task="t")
        return len(counted)

    assert runs() == 1
    assert runs() == 0
    learn(net, "t", x, steps=1)
    assert runs() == 1
    assert runs() == 0
    with torch.no_grad():
        task.transforms["stem.weight"].k.add_(0.1)
    assert runs() == 1
    task.freeze()
    assert runs() == 1
    net.to(torch.float64).to(torch.float32)
    assert runs() == 1
    with torch.no_grad():
        backbone.stem.weight.mul_(2)
    assert runs() == 1
    assert runs() == 0
    counted.clear()
    for _ in range(3):
        net(x, task="t")  # with gradients enabled, which a frozen task does not need
    assert len(counted) == 1


def test_writes_that_torch_does_not_count_are_noticed_after_training():
    net, x = Network(tiny()), batch()
    task = net.add_task("t", classes=3)
    before = run(net, x, task="t")
    net(x, task="t").sum().backward()
    for parameter in task.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
    assert not torch.equal(run(net, x, task="t"), before)
    assert torch.equal(run(net, x, task="t"), run(net.export("t"), x))


@pytest.mark.parametrize("change", ["write", "dtype", "statistics"])
def test_a_backbone_changed_by_its_owner_is_followed(change):
    backbone = tiny()
    net, x = Network(backbone), batch()
    net.add_task("t", classes=3, method="classifier")
    net.add_task("u", classes=3)
    for name in ("original", "t", "u"):
        run(net, x, task=name)
    if change == "dtype":
        backbone.double()
        x = x.double()
    else:
        with torch.no_grad():
            (backbone.pointwise.bias if change == "write" else backbone.norm1.running_mean).add_(1.0)
    assert torch.equal(run(net, x), run(backbone, x))
    for name in ("t", "u"):
        assert torch.equal(run(net, x, task=name), run(net.export(name), x))


def test_at_most_active_tasks_keep_their_weights():
    net, x = Network(tiny(), active=2), batch()
    answers = {}
    for name in "abcd":
        net.add_task(name, classes=3, seed=ord(name))
        answers[name] = run(net, x, task=name)
    assert net.resident == {"c", "d"}
    net.module("a")
    for name in "abcdabcd":
        assert torch.equal(run(net, x, task=name), answers[name])
        assert len(net.resident - {"a"}) <= 2  # "a" is pinned
    assert net.module("a") is net.module("a")


def test_the_module_of_a_task_follows_it_and_carries_hooks():
    net, x = Network(tiny()), batch()
    net.add_task("t", classes=3)
    module, seen = net.module("t"), []
    module.norm1.register_forward_hook(lambda layer, args, output: seen.append(output.shape))
    run(net, x, task="t")
    run(module, x)
    assert seen == [(4, 8, 8, 8)] * 2
    learn(net, "t", x)
    assert torch.equal(run(module, x), run(net, x, task="t"))
    net.to(torch.bfloat16)
    assert torch.equal(run(module, x.bfloat16()), run(net.export("t"), x.bfloat16()))


# mixed batches


@pytest.mark.parametrize(
    ("names", "error", "sentence"),
    [
        (["a"], TaskError, "got 2 images and 1 task names: pass one name per image"),
        (["a", "zebra"], UnknownTaskError, "there is no task 'zebra'; added are 'a'; the backbone's own is 'original'"),
    ],
)
def test_a_mixed_batch_that_does_not_fit_is_refused_before_anything_runs(counted, names, error, sentence):
    net = Network(tiny())
    net.add_task("a", classes=3)
    with pytest.raises(error, match=sentence):
        net(batch(2), task=names)
    assert counted == []


# names


def test_a_task_that_is_no_name_is_unknown():
    net = Network(tiny())
    with pytest.raises(UnknownTaskError, match="there is no task 5"):
        net(batch(), task=5)


def test_the_original_task_is_the_backbone_under_a_name_of_its_own():
    backbone, x = tiny(), batch()
    net = Network(backbone, original="imagenet")
    answer = run(backbone, x)
    for output in (run(net, x), run(net, x, task="imagenet"), run(net.module("imagenet"), x), run(net.export(), x)):
        assert torch.equal(output, answer)
    assert torch.equal(net(x).detach(), answer)
    assert "imagenet" not in net.tasks
    with pytest.raises(TaskError, match="'imagenet' is the backbone's own task: choose another name"):
        net.add_task("imagenet", classes=3)
    for forbidden in (net.remove_task, lambda name: net.save_task(name, "nowhere")):
        with pytest.raises(TaskError, match="'imagenet' is the backbone's own task"):
            forbidden("imagenet")
    with pytest.raises(UnknownTaskError, match="no task 'original'"):
        net(x, task="original")


def test_task_names_may_equal_module_attributes():
    net, x = Network(tiny()), batch()
    names = ["items", "train", "half", "weight", "v1.2_b-3", "0"]
    for name in names:
        net.add_task(name, classes=3)
    assert list(net.tasks) == names
    assert all(run(net, x, task=name).shape == (4, 3) for name in names)


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a b", "ä", "a" * 101, None, 3])
def test_a_name_that_could_not_be_a_files_is_refused(name):
    with pytest.raises(UnsafeNameError, match="cannot be a task's name"):
        Network(tiny()).add_task(name, classes=3)


def test_a_backbone_whose_parts_have_slashes_in_their_names_takes_tasks():
    torch.manual_seed(0)
    backbone = nn.Sequential()
    backbone.add_module("block/conv", nn.Conv2d(3, 4, 3))
    backbone.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    backbone.add_module("out/fc", nn.Linear(4, 2))
    net = Network(backbone)
    assert list(net.add_task("t", classes=3).tensors()) == ["block/conv.weight", "out/fc.weight", "out/fc.bias"]
    assert run(net, batch(), task="t").shape == (4, 3)


def test_removing_and_adding_again_under_the_same_name_runs_the_new_task():
    net, x = Network(tiny()), batch()
    net.add_task("t", classes=3)
    first = run(net, x, task="t")
    net.module("t")
    net.remove_task("t")
    with pytest.raises(UnknownTaskError):
        net(x, task="t")
    net.add_task("t", classes=3, seed=1)
    assert not torch.equal(run(net, x, task="t"), first)


# copies, dtypes, formats


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_is_independent_and_gives_the_same(remake):
    net, x = Network(tiny()), batch()
    for method in METHODS:
        net.add_task(method, classes=3, method=method)
        learn(net, method, x, steps=1)
    net.module("full")
    other = remake(net)
    answers = {name: run(net, x, task=name) for name in METHODS}
    assert all(torch.equal(run(other, x, task=name), answers[name]) for name in METHODS)
    assert other.fingerprint == net.fingerprint
    before = snapshot(net.backbone)
    for name in METHODS[:-1]:
        learn(other, name, x)
        assert not torch.equal(run(other, x, task=name), answers[name])
    other.remove_task("packnet")
    other.double()
    assert all(torch.equal(run(net, x, task=name), answers[name]) for name in METHODS)
    assert snapshot(net.backbone) == before


def test_a_network_goes_through_torch_save(tmp_path):
    net, x = Network(tiny()), batch()
    net.add_task("t", classes=3)
    answer = run(net, x, task="t")
    torch.save(net, tmp_path / "net.pt")
    again = torch.load(tmp_path / "net.pt", weights_only=False)
    assert torch.equal(run(again, x, task="t"), answer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_a_network_in_another_dtype_learns_and_runs_with_what_is_learned_in_float32(method, dtype):
    net, x = Network(tiny().to(dtype)), batch().to(dtype)
    task = net.add_task("t", classes=3, method=method)
    start = file_of(net, "t")
    learn(net, "t", x, rate=0.01)
    assert {p.dtype for p in task.parameters()} == {torch.float32}
    answer = run(net, x, task="t")
    assert answer.dtype == dtype
    assert answer.isfinite().all()
    assert torch.equal(run(net.export("t"), x), answer)
    assert torch.equal(run(net, x), run(net.backbone, x))
    assert file_of(net, "t") != start


@pytest.mark.parametrize("method", METHODS)
def test_a_task_saved_from_a_rounded_network_fits_the_one_it_came_from(method, tmp_path):
    net, x = Network(tiny()), batch()
    net.add_task("t", classes=3, method=method)
    learn(net, "t", x)
    answer, bytes_before = run(net, x, task="t"), file_of(net, "t")
    net.to(torch.bfloat16)
    rounded = run(net, x.bfloat16(), task="t")
    assert not torch.equal(rounded.float(), answer)
    net.save_task("t", tmp_path / "t.safetensors")
    assert (tmp_path / "t.safetensors").read_bytes() == bytes_before
    whole = Network(tiny())
    whole.load_task(tmp_path / "t.safetensors")
    assert torch.equal(run(whole, x, task="t"), answer)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_keep_the_backbones_memory_format(method, when):
    x, backbone = batch(), tiny()
    if when == "before":
        backbone.to(memory_format=torch.channels_last)
    net = Network(backbone)
    task = net.add_task("t", classes=3, method=method)
    if when == "after":
        net.to(memory_format=torch.channels_last)
    for _ in range(2):
        tensors = {**dict(net.module("t").named_parameters()), **task.tensors()}
        assert tensors["stem.weight"].stride() == backbone.stem.weight.stride() == (27, 1, 9, 3)
        task.freeze()
    assert run(net, x, task="t").shape == (4, 3)


def test_moving_to_the_same_device_changes_nothing():
    net, x = Network(tiny()), batch()
    net.add_task("t", classes=3)
    answer = run(net, x, task="t")
    assert torch.equal(run(net.to("cpu"), x, task="t"), answer)


@pytest.mark.parametrize("assign", [True, False])
def test_a_state_dict_loaded_into_a_network_is_followed(assign):
    net, other, x = Network(tiny()), Network(tiny(seed=1)), batch()
    for each, seed in ((net, 0), (other, 1)):
        each.add_task("t", classes=3, seed=seed)
        run(each, x)
        run(each, x, task="t")
    net.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert torch.equal(run(net, x), run(other, x))
    assert torch.equal(run(net, x, task="t"), run(other, x, task="t"))
    learn(net, "t", x)
    assert torch.equal(run(net, x, task="t"), run(net.export("t"), x))
    assert not torch.equal(run(net, x, task="t"), run(other, x, task="t"))


def test_a_network_on_the_meta_device_runs():
    net = Network(tiny())
    net.add_task("t", classes=3)
    net.to("meta").bfloat16()
    assert run(net, batch().to("meta", torch.bfloat16), task="t").shape == (4, 3)


class Scaled(Tiny):
    """Its first parameter is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def test_a_backbone_with_a_scalar_parameter_can_be_converted():
    net = Network(Scaled().eval())
    net.add_task("t", classes=3)
    assert run(net.bfloat16(), batch().bfloat16(), task="t").dtype == torch.bfloat16


def test_weights_do_not_depend_on_autocast_at_the_first_call():
    answers = []
    for first in (True, False):
        net, x = Network(tiny()), batch()
        for method in ("dan", "lora"):
            task = net.add_task(method, classes=3, method=method)
            with torch.no_grad():
                for parameter in task.parameters():
                    parameter.add_(0.01)
            with torch.autocast("cpu", torch.bfloat16, enabled=first):
                run(net, x, task=method)
            answers.append(run(net, x, task=method))
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[3])


# gradient modes


def test_inference_mode_runs_and_leaves_the_task_able_to_learn():
    net, x = Network(tiny()), batch()
    with torch.inference_mode():
        net.add_task("t", classes=3)
        net.add_task("head", classes=3, method="classifier")
        quick = {name: net(x, task=name).clone() for name in ("t", "head")}
        plain = net.export("t")
        net.module("head")
    for name, answer in quick.items():
        assert torch.equal(answer, run(net, x, task=name))
        learn(net, name, x)
        assert not torch.equal(answer, run(net, x, task=name))
        assert all(p.grad is not None for p in net.tasks[name].parameters())
    plain(x).sum().backward()
    assert plain.stem.weight.grad is not None


@pytest.mark.parametrize("method", METHODS)
def test_gradients_reach_what_is_learned_and_nothing_else(method):
    net, x = Network(tiny()), batch().requires_grad_()
    net.add_task("other", classes=3)
    task = net.add_task("t", classes=3, method=method)
    found = gradients(net, "t", x)
    assert found.keys() == dict(task.named_parameters()).keys()
    assert all(p.grad is None for p in [*net.backbone.parameters(), *net.tasks["other"].parameters()])
    assert x.grad.any()


def test_evaluating_between_forward_and_backward_does_not_disturb_gradients():
    net, x = Network(tiny()), batch()
    task = net.add_task("t", classes=3).train()
    expected = gradients(net, "t", x)
    task.zero_grad()
    loss = F.cross_entropy(net(x, task="t"), torch.arange(4) % 3)
    task.eval()
    run(net, x, task="t")
    task.train()
    loss.backward()
    assert same({n: p.grad for n, p in task.named_parameters()}, expected)


def test_gradients_accumulate_over_two_forwards_before_their_backwards():
    net, x = Network(tiny()), batch()
    task = net.add_task("t", classes=3)
    expected = gradients(net, "t", x, times=2)
    task.zero_grad()
    losses = [F.cross_entropy(net(x, task="t"), torch.arange(4) % 3) for _ in range(2)]
    for loss in losses:
        loss.backward()
    assert same({n: p.grad for n, p in task.named_parameters()}, expected)


class Checkpointed(Tiny):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant

    def block(self, x):
        return F.relu(self.norm2(self.depthwise(x)))

    def forward(self, x):
        x = F.relu(self.norm1(self.stem(x)))
        x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.fc(F.relu(self.pointwise(x)).mean((2, 3)))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # if only the head learns
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(method, reentrant):
    results = []
    for setting in (None, reentrant):
        torch.manual_seed(0)
        net, x = Network(Checkpointed(setting)), batch()
        net.add_task("t", classes=3, method=method)
        learn(net, "t", x, steps=1)
        net.tasks["t"].train()
        results.append(gradients(net, "t", x))
    assert same(*results)


@pytest.mark.parametrize(("reentrant", "forwards"), [(False, 2), (True, 1)])
def test_checkpointing_allows_an_evaluation_between_forward_and_backward(reentrant, forwards):
    results = []
    for setting in (None, reentrant):
        torch.manual_seed(0)
        net, x = Network(Checkpointed(setting)), batch()
        task = net.add_task("t", classes=3).train()
        losses = [F.cross_entropy(net(x, task="t"), torch.arange(4) % 3) for _ in range(forwards)]
        with warnings.catch_warnings(action="ignore"):  # a reentrant block warns if there are no gradients
            run(net, x, task="t")
        for loss in losses:
            loss.backward()
        results.append({n: p.grad for n, p in task.named_parameters()})
    assert same(*results)


@pytest.mark.parametrize("order", [lambda losses: [sum(losses)], lambda losses: losses[::-1], lambda losses: losses])
def test_checkpointing_allows_backwards_in_any_order(order):
    results = []
    for setting in (None, False):
        torch.manual_seed(0)
        net = Network(Checkpointed(setting))
        task = net.add_task("t", classes=3).train()
        losses = [F.cross_entropy(net(batch(seed=i), task="t"), torch.arange(4) % 3) * (i + 1) for i in range(3)]
        for loss in order(losses):
            loss.backward()
        results.append({n: p.grad for n, p in task.named_parameters()})
    assert same(*results)


def test_timms_gradient_checkpointing_gives_the_same_gradients():
    results = []
    for enable in (False, True):
        torch.manual_seed(0)
        backbone = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=2)
        backbone.set_grad_checkpointing(enable)
        net = Network(backbone)
        net.add_task("t", classes=3)
        learn(net, "t", batch(4, 3, 32, 32), steps=1)
        results.append(gradients(net, "t", batch(4, 3, 32, 32)))
    assert same(*results)


# compiling

LOOKED_AT = "ignore:The .grad attribute of a Tensor that is not a leaf"  # dynamo reads it


@pytest.mark.filterwarnings(LOOKED_AT)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("through", ["network", "module"])
@pytest.mark.parametrize("method", ["full", "adapters-series"])
def test_a_compiled_network_gives_the_same(backend, through, method):
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        net, x = Network(tiny()), batch()
        task = net.add_task("t", classes=3, method=method)
        call = net if through == "network" else net.module("t")
        call = torch.compile(call, backend=backend) if compiled else call
        named = {"task": "t"} if through == "network" else {}
        outputs = [run(call, x, **named)]
        optimizer = torch.optim.SGD(task.parameters(), 0.1)
        task.train()
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(call(x, **named), torch.arange(4) % 3)
            loss.backward()
            optimizer.step()
            outputs.append(loss.detach())
        task.eval()
        outputs += [run(call, x, **named), run(net.export("t"), x)]
        results.append(outputs)
    for plain, quick in zip(*results, strict=True):
        torch.testing.assert_close(quick, plain)
    torch.testing.assert_close(results[1][-1], results[1][-2])


@pytest.mark.filterwarnings(LOOKED_AT)
def test_a_compiled_network_is_not_compiled_again_at_every_step():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    net, x = Network(tiny()), batch()
    task = net.add_task("t", classes=3).train()
    compiled, counts = torch.compile(net, backend=counter), []
    for _ in range(5):
        compiled(x, task="t").sum().backward()
        with torch.no_grad():
            for parameter in task.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
        counts.append(counter.frame_count)
    assert counts[0] >= 1
    assert counts[1] == counts[-1]


def test_requires_grad_selects_what_tasks_learn():
    net = Network(tiny())
    before = snapshot(net.backbone)
    task = net.add_task("t", classes=3)
    names = dict(net.named_parameters())
    assert {name for name, p in names.items() if p.requires_grad} == {n for n in names if n.startswith("_tasks.")}
    assert {id(p) for p in net.parameters() if p.requires_grad} == {id(p) for p in task.parameters()}
    weight = names["backbone.stem.weight"]
    assert weight.data_ptr() == net.backbone.stem.weight.data_ptr()
    assert snapshot(net.backbone) == before
    assert net.backbone.stem.weight.requires_grad
    assert net.joint_copy().get_parameter("backbone.stem.weight").requires_grad


def test_trainable_parameters_are_printed_as_peft_does(capsys):
    net = Network(tiny())
    shared = sum(p.numel() for p in net.backbone.parameters())
    task = net.add_task("t", classes=3, method="norms")
    own = sum(p.numel() for p in task.parameters())
    net.print_trainable_parameters()
    task.freeze()
    net.print_trainable_parameters()
    every = shared + own
    assert capsys.readouterr().out.splitlines() == [
        f"trainable params: {own:,d} || all params: {every:,d} || trainable%: {100 * own / every:.4f}",
        f"trainable params: 0 || all params: {every:,d} || trainable%: 0.0000",
    ]
