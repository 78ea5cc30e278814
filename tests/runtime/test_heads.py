import copy

import pytest
import timm
import torch
import torchvision
from tiny import batch, learn, run, tiny
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import ViTConfig, ViTForImageClassification, ViTModel

import bitgraft
from bitgraft import BackboneError, Network, TaskError
from bitgraft.errors import ArchiveError, ClassesError


class Mapped(nn.Module):
    """A head with a norm, dropout and two layers."""

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
        (["a", "b", "a"], "class names must be unique; repeated: 'a'"),
        (0, "at least one class"),
        ([], "at least one class"),
        (-2, "at least one class"),
        ("cats", "pass their number or a list of their names"),
        (True, "pass their number or a list of their names"),
        (2.5, "pass their number or a list of their names"),
    ],
)
def test_invalid_classes_are_refused(classes, sentence):
    net = Network(tiny())
    with pytest.raises(ClassesError, match=sentence):
        net.add_task("t", classes=classes)
    assert not net.tasks


def test_a_task_without_an_output_is_refused():
    with pytest.raises(TaskError, match="the task has no output: pass classes="):
        Network(tiny()).add_task("t")
    with pytest.raises(TaskError, match="head='linear': pass a module"):
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
    with pytest.raises(TaskError, match=r"with a head module: pass one like it, load_task\(path, head=\.\.\.\)"):
        net.load_task(tmp_path / "t.safetensors", name="again")
    with pytest.raises(TaskError, match="does not match"):
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


class Tied(nn.Module):
    """The head's weight is that of an earlier layer, as language models tie it to their embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x).relu())


@pytest.mark.parametrize("kind", ["classes", "keep", "module", "features"])
def test_a_tied_head_is_kept_or_replaced_by_one_that_is_not_tied(kind, tmp_path):
    torch.manual_seed(0)
    net, x = Network(Tied()), batch(4, 4)
    assert net.anatomy.head == "last"
    given = {"classes": {"classes": 3}, "keep": {"head": "keep"}, "module": {"head": nn.Linear(4, 2)}}
    task = net.add_task("t", **given.get(kind, {"head": None}))
    assert list(task.transforms) == ["first.weight"]
    learn(net, "t", x)
    answer = run(net, x, task="t")
    assert answer.shape == (4, {"classes": 3, "module": 2}.get(kind, 4))
    plain = net.export("t")
    assert torch.equal(run(plain, x), answer)
    assert (getattr(plain.last, "weight", None) is plain.first.weight) == (kind == "keep")
    kept(net, "t", tmp_path, nn.Linear(4, 2) if kind == "module" else None)
    assert torch.equal(run(net, x, task="again"), answer)
    assert torch.equal(net.backbone.last.weight, net.backbone.first.weight)


class Distilled(nn.Module):
    """Two classifiers whose scores are averaged, as in timm's distilled networks."""

    num_classes = 6

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head, self.head_dist = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu().mean((2, 3))
        return (self.head(x) + self.head_dist(x)) / 2


@pytest.mark.parametrize("named", ["auto", ("head", "head_dist"), "head*"])
def test_each_of_several_heads_gets_the_tasks_classes(named, tmp_path):
    torch.manual_seed(0)
    net, x = Network(Distilled().eval(), head=named), batch()
    assert net.anatomy.head == net.anatomy.heads == ("head", "head_dist")
    net.add_task("t", classes=3)
    learn(net, "t", x)
    answer = run(net, x, task="t")
    assert answer.shape == (4, 3)
    plain = net.export("t")
    assert (plain.head.out_features, plain.head_dist.out_features, plain.num_classes) == (3, 3, 3)
    assert torch.equal(run(plain, x), answer)
    kept(net, "t", tmp_path)
    assert torch.equal(run(net, x, task="again"), answer)
    net.add_task("features", head=None)
    assert run(net, x, task="features").shape == (4, 8)


def test_several_heads_are_replaced_by_as_many_modules(tmp_path):
    net, x = Network(Distilled().eval()), batch()
    with pytest.raises(TaskError, match=r"combines head, head_dist: pass a torch.nn.ModuleList of 2 heads"):
        net.add_task("t", classes=4, head=nn.Linear(8, 4))
    net.add_task("t", classes=4, head=nn.ModuleList([Mapped(), nn.Linear(8, 4)]))
    learn(net, "t", x)
    answer = run(net, x, task="t")
    assert torch.equal(run(net.export("t"), x), answer)
    kept(net, "t", tmp_path, nn.ModuleList([Mapped(), nn.Linear(8, 4)]))
    assert torch.equal(run(net, x, task="again"), answer)


def test_a_file_of_several_heads_is_refused_where_there_is_one(tmp_path):
    net = Network(Distilled().eval())
    net.add_task("t", classes=3)
    net.save_task("t", tmp_path / "t.safetensors")
    assert bitgraft.read_archive(tmp_path / "t.safetensors").head_layer == ("head", "head_dist")
    other = Distilled().eval()
    other.load_state_dict(net.backbone.state_dict())
    with pytest.raises(ArchiveError, match="belongs to a backbone"):
        Network(other, head=None).load_task(tmp_path / "t.safetensors")


def detectors():
    models, small = torchvision.models, {"weights": None, "weights_backbone": None, "num_classes": 3}
    yield "retinanet", lambda: models.detection.retinanet_resnet50_fpn(min_size=64, max_size=64, **small), "head"
    yield "ssdlite", lambda: models.detection.ssdlite320_mobilenet_v3_large(**small), "head"
    yield "lraspp", lambda: models.segmentation.lraspp_mobilenet_v3_large(**small), "classifier"


@pytest.mark.parametrize(("make", "name"), [pytest.param(m, n, id=i) for i, m, n in detectors()])
def test_a_head_module_takes_whatever_the_backbone_hands_it_and_has_its_own_methods(make, name):
    torch.manual_seed(0)
    net, x = Network(make().eval(), example=(2, 3, 64, 64), head=name), batch(2, 3, 64, 64)
    head = copy.deepcopy(net.backbone.get_submodule(name)).requires_grad_(True)
    net.add_task("t", head=head, method="classifier", norms=True)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    net.tasks["t"].train()
    box = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    if name == "head":
        sum(net(list(x), [box, box], task="t").values()).backward()  # calls the head's compute_loss
    else:
        net(x, task="t")["out"].square().mean().backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())
    net.tasks["t"].eval()
    with torch.no_grad():
        answer, exported = net(x, task="t"), net.export("t")(x)
    for ours, theirs in zip(tree_leaves(answer), tree_leaves(exported), strict=True):
        assert torch.equal(ours, theirs)


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
    with pytest.raises(BackboneError, match=r"returns a BaseModelOutput.*which a head cannot take: wrap it"):
        net.add_task("t", classes=3)
    assert net.add_task("features", head=None).classes is None


def test_preprocessing_is_the_backbones_unless_given():
    net = Network(timm.create_model("resnet10t"), example=(1, 3, 32, 32))
    stated = net.add_task("stated", classes=2).metadata.preprocessing
    assert (stated["size"], stated["interpolation"]) == ([176, 176], "bicubic")
    assert net.add_task("given", classes=2, preprocessing={"size": [64, 64]}).metadata.preprocessing == {
        "size": [64, 64]
    }


def test_a_tied_head_that_is_no_linear_layer_asks_for_a_module():
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 3, 1), nn.Flatten())
    net[3].weight = net[0].weight
    with pytest.raises(BackboneError, match=r"the head '3' shares weights with other layers.*: pass a head module"):
        Network(net).add_task("t", classes=2)


def test_a_head_module_belongs_to_one_task():
    """Training a shared one would change another task, or the backbone's own answers."""
    net, head = Network(tiny()), nn.Linear(8, 4)
    net.add_task("a", classes=4, head=head)
    with pytest.raises(TaskError, match="has parameters of task 'a': pass a copy"):
        net.add_task("b", classes=4, head=head)
    with pytest.raises(TaskError, match="has parameters of the backbone: pass a copy"):
        net.add_task("b", classes=6, head=net.backbone.fc)
    net.add_task("b", classes=4, head=copy.deepcopy(head))


def test_one_module_loads_the_heads_of_several_tasks(tmp_path):
    net, x = Network(tiny()), batch()
    for name in "ab":
        net.add_task(name, classes=4, head=Mapped(), method="classifier")
        net.save_task(name, tmp_path / name)
    other, head = Network(tiny()), Mapped()
    for name in "ab":
        other.load_task(tmp_path / name, head=head)
    for name in "ab":
        assert torch.equal(run(other, x, task=name), run(net, x, task=name))
