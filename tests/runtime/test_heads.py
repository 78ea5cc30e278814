import pytest
import timm
import torch
from tiny import batch, learn, run, tiny
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTModel

from bitgraft import BackboneError, Network, TaskError
from bitgraft.errors import ClassesError


class Mapped(nn.Module):
    """A head with a norm, dropout and two layers: not something that could be guessed."""

    def __init__(self, features: int = 8, outputs: int = 4) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(features, 5), nn.BatchNorm1d(5)
        self.drop, self.outer = nn.Dropout(0.5), nn.Linear(5, outputs)

    def forward(self, x):
        return self.outer(self.drop(self.norm(self.inner(x)).relu()))


def features_only():
    backbone = tiny()
    backbone.fc = nn.Identity()
    backbone.num_classes = 0
    return backbone


def kept(net, name, path, head=None):
    """Save a task and load it under another name."""
    net.save_task(name, path / "t.safetensors")
    return net.load_task(path / "t.safetensors", name="again", head=head)


@pytest.mark.parametrize(
    ("classes", "names"), [(3, ("0", "1", "2")), (["cat", "dog"], ("cat", "dog")), (("x",), ("x",))]
)
def test_classes_are_a_number_or_names(classes, names, tmp_path):
    net, x = Network(tiny()), batch()
    task = net.add_task("t", classes=classes)
    assert task.classes == names
    assert run(net, x, task="t").shape == (4, len(names))
    plain = net.export("t")
    assert plain.fc.out_features == plain.fc.weight.shape[0] == len(names)
    assert kept(net, "t", tmp_path).classes == names
    assert net.backbone.fc.out_features == 6


@pytest.mark.parametrize(
    ("classes", "sentence"),
    [
        (["a", "b", "a"], "class names must differ, but 'a' come more than once"),
        (0, "at least one class"),
        ([], "at least one class"),
        (-2, "at least one class"),
        ("cats", "give their number or a list of their names"),
        (True, "give their number or a list of their names"),
        (2.5, "give their number or a list of their names"),
    ],
)
def test_classes_that_make_no_sense_are_refused(classes, sentence):
    net = Network(tiny())
    with pytest.raises(ClassesError, match=sentence):
        net.add_task("t", classes=classes)
    assert not net.tasks


def test_a_task_must_say_what_it_gives():
    with pytest.raises(TaskError, match="say what the task gives: classes="):
        Network(tiny()).add_task("t")
    with pytest.raises(TaskError, match="head='linear': give a module"):
        Network(tiny()).add_task("t", classes=3, head="linear")
    with pytest.raises(TaskError, match="has no classes"):
        Network(tiny()).add_task("t", classes=3, head=None)


def test_the_backbones_own_output_can_be_kept(tmp_path):
    net, x = Network(tiny()), batch()
    task = net.add_task("t", head="keep", method="full")
    assert not any(name.startswith("fc.") for name in task.tensors())
    learn(net, "t", x)
    answer = run(net, x, task="t")
    assert answer.shape == (4, 6)
    assert not torch.equal(answer, run(net, x))
    kept(net, "t", tmp_path)
    assert torch.equal(run(net, x, task="again"), answer)
    assert torch.equal(run(net.export("t"), x), answer)


def test_no_head_gives_features(tmp_path):
    net, x = Network(tiny()), batch()
    net.add_task("t", head=None, method="full")
    net.tasks["t"].train()
    net(x, task="t").square().mean().backward()
    net.tasks["t"].eval()
    answer = run(net, x, task="t")
    assert answer.shape == (4, 8)
    kept(net, "t", tmp_path)
    assert torch.equal(run(net, x, task="again"), answer)
    assert torch.equal(run(net.export("t"), x), answer)


def test_timms_number_of_classes_is_kept_true():
    backbone = timm.create_model("resnet10t")
    net, x = Network(backbone, example=(1, 3, 32, 32)), batch(2, 3, 32, 32)
    net.add_task("some", classes=3)
    net.add_task("none", head=None)
    net.add_task("own", classes=4, head=nn.Linear(512, 4))
    net.add_task("kept", head="keep")
    counts = {name: net.export(name).num_classes for name in net.tasks}
    assert counts == {"some": 3, "none": 0, "own": 4, "kept": 1000}
    assert {name: run(net, x, task=name).shape[1] for name in net.tasks} == {**counts, "none": 512}
    assert backbone.num_classes == 1000


@pytest.mark.parametrize("make", [tiny, features_only])
def test_a_head_module_takes_the_last_layers_place_or_stands_behind_the_features(make, tmp_path):
    torch.manual_seed(0)
    net, x, head = Network(make()), batch(), Mapped()
    task = net.add_task("t", classes=4, head=head, method="full")
    assert task.head is head
    learn(net, "t", x)
    assert all(p.grad is not None for p in head.parameters())
    assert head.norm.num_batches_tracked == 2
    assert {role for role, _ in task.roles()} == {"scores", "k", "k1", "norms", "head"}
    answer = run(net, x, task="t")
    assert answer.shape == (4, 4)
    plain = net.export("t")
    assert torch.equal(run(plain, x), answer)
    assert torch.equal(run(net.module("t"), x), answer)
    with torch.no_grad():
        head.outer.weight.zero_()
    assert torch.equal(run(plain, x), answer)
    assert not torch.equal(run(net, x, task="t"), answer)

    net.save_task("t", tmp_path / "t.safetensors")
    with pytest.raises(TaskError, match=r"head module of its own: pass one like it, load_task\(path, head=\.\.\.\)"):
        net.load_task(tmp_path / "t.safetensors", name="again")
    with pytest.raises(TaskError, match="does not fit"):
        net.load_task(tmp_path / "t.safetensors", name="again", head=Mapped(outputs=5))
    net.load_task(tmp_path / "t.safetensors", name="again", head=Mapped())
    assert torch.equal(run(net, x, task="again"), run(net, x, task="t"))


@pytest.mark.parametrize("method", ["full", "classifier"])
def test_a_linear_head_goes_behind_a_backbone_that_gives_features(method, tmp_path):
    net, x = Network(features_only()), batch()
    net.add_task("t", classes=["a", "b", "c"], method=method)
    learn(net, "t", x)
    answer = run(net, x, task="t")
    assert answer.shape == (4, 3)
    plain = net.export("t")
    assert torch.equal(run(plain, x), answer)
    assert plain[1].out_features == 3
    assert torch.equal(run(net.module("t"), x), answer)
    assert kept(net, "t", tmp_path).classes == ("a", "b", "c")
    assert torch.equal(run(net, x, task="again"), answer)
    assert run(net, x).shape == (4, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [tiny, features_only])
@pytest.mark.parametrize("own", [True, False])
def test_heads_learn_in_float32_on_a_backbone_of_another_dtype(dtype, make, own):
    torch.manual_seed(0)
    net, x = Network(make()).to(dtype), batch().to(dtype)
    task = net.add_task("t", classes=4, head=Mapped() if own else "auto", method="classifier")
    learn(net, "t", x)
    assert {p.dtype for p in task.parameters()} == {torch.float32}
    answer = run(net, x, task="t")
    assert answer.dtype == dtype
    assert torch.equal(run(net.export("t"), x), answer)


def test_a_head_tied_to_the_backbone_asks_for_a_module():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(self.first(x).relu())

    net = Network(Tied(), head="last")
    with pytest.raises(BackboneError, match=r"the head's 'last\.weight' is tied to another weight"):
        net.add_task("t", classes=3)


def small():
    return ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=16
    )


def test_transformers_tasks_of_every_head():
    torch.manual_seed(0)
    net, x = Network(ViTForImageClassification(small()).eval()), batch(2, 3, 32, 32)
    net.add_task("classes", classes=5)
    net.add_task("module", classes=4, head=nn.Linear(16, 4))
    net.add_task("none", head=None)
    net.add_task("keep", head="keep")
    for name, width in [("classes", 5), ("module", 4), ("none", 16), ("keep", 2)]:
        answer = run(net, x, task=name)
        assert answer.shape == (2, width)
        assert torch.equal(run(net.export(name), x), answer)
    assert net.export("module").config.num_labels == 4


def test_a_backbone_that_wraps_its_features_gets_no_head_behind():
    net = Network(ViTModel(small(), add_pooling_layer=False), head=None)
    with pytest.raises(BackboneError, match=r"gives a BaseModelOutput.*which no head takes: wrap it"):
        net.add_task("t", classes=3)
    assert net.add_task("features", head=None).classes is None


def test_preprocessing_is_the_backbones_unless_given():
    net = Network(timm.create_model("resnet10t"), example=(1, 3, 32, 32))
    stated = net.add_task("stated", classes=2).metadata.preprocessing
    assert (stated["size"], stated["interpolation"]) == ([176, 176], "bicubic")
    assert net.add_task("given", classes=2, preprocessing={"size": [64, 64]}).metadata.preprocessing == {
        "size": [64, 64]
    }
