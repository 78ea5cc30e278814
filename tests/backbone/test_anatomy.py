import copy

import pytest
import timm
import torch
import torchvision
from tiny import Tiny, batch, run, snapshot, tiny
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from bitgraft import BackboneError, Network, read_anatomy, resnet26, wide_resnet
from bitgraft.errors import BackboneWarning, TaskError


def layered(*layers):
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def facts(anatomy):
    return {name: (weight.feeds, weight.scale_free) for name, weight in anatomy.weights.items()}


# layers that feed a norm


def test_a_convolution_that_feeds_only_a_batch_norm_is_scale_free_even_with_a_bias():
    net = layered(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4))
    assert facts(read_anatomy(net)) == {"0.weight": ("1", True), "3.weight": ("4", True)}


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.LayerNorm([4, 8, 8])])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_and_group_norm_cancel_a_scale_only_without_a_bias(norm, bias):
    net = layered(nn.Conv2d(3, 4, 3, padding=1, bias=bias), norm)
    assert facts(read_anatomy(net, example=(1, 3, 8, 8))) == {"0.weight": ("1", not bias)}


@pytest.mark.parametrize(
    ("norm", "bias", "undone"),
    [
        (nn.BatchNorm2d(4), True, True),
        (nn.InstanceNorm2d(4), True, True),
        (nn.InstanceNorm2d(4, affine=True), True, True),
        (nn.GroupNorm(2, 4), False, False),
        (nn.GroupNorm(4, 4), True, True),  # one group per channel
        (nn.LayerNorm([4, 8, 8]), False, False),
    ],
)
def test_only_per_channel_norms_cancel_a_scale_per_channel(norm, bias, undone):
    net = layered(nn.Conv2d(3, 4, 3, padding=1, bias=bias), norm).eval()
    weight = read_anatomy(net, example=(1, 3, 8, 8)).weights["0.weight"]
    assert (weight.feeds, weight.scale_free, weight.channels_scale_free) == ("1", True, undone)
    task = Network(net, example=(1, 3, 8, 8)).add_task("t", classes=2, per="channel")
    assert (0 in task.transforms["0.weight"].rule.learned) == (not undone)
    images, scaled = batch(2, 3, 8, 8), nn.Conv2d(3, 4, 3, padding=1, bias=bias)
    scaled.load_state_dict(net[0].state_dict())
    scaled.weight.data *= torch.tensor([0.5, 2.0, 3.0, 5.0]).view(4, 1, 1, 1)
    norm.train()  # as in training
    assert torch.allclose(norm(scaled(images)), norm(net[0](images)), atol=1e-3) == undone


def test_a_frozen_batch_norm_cancels_nothing():
    net = layered(nn.Conv2d(3, 4, 3, bias=False), timm.layers.FrozenBatchNormAct2d(4))
    assert facts(read_anatomy(net)) == {"0.weight": ("1", False)}


def test_a_layer_feeds_a_norm_only_directly():
    net = layered(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.MaxPool2d(2), nn.BatchNorm2d(4)
    )
    assert facts(read_anatomy(net)) == {"0.weight": (None, False), "3.weight": (None, False)}


class Residual(nn.Module):
    """A pre-activation block: the convolution's output goes into the norm, and optionally around it."""

    def __init__(self, around: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.around = around

    def forward(self, x):
        y = self.conv(x)
        z = F.relu(self.norm(y))
        return self.fc((z + y if self.around else z).mean((2, 3)))


def test_a_weight_is_not_scale_free_if_a_residual_bypasses_the_norm():
    assert facts(read_anatomy(Residual(around=False))) == {"conv.weight": ("norm", True)}
    assert facts(read_anatomy(Residual(around=True))) == {"conv.weight": (None, False)}


class Early(Residual):
    def forward(self, x):
        y = self.conv(x)
        return self.fc(F.relu(self.norm(y)).mean((2, 3))), y


def test_a_weight_is_not_scale_free_if_its_output_is_also_returned():
    assert facts(read_anatomy(Early(around=False))) == {"conv.weight": (None, False)}


def test_the_scale_free_weights_of_a_wide_resnet():
    weights = read_anatomy(wide_resnet(10, 1, 5)).weights
    assert {name for name, w in weights.items() if w.scale_free} == {
        "conv1.weight",
        *(f"stages.{i}.0.conv1.weight" for i in range(3)),
    }


def test_every_convolution_of_resnet26_feeds_a_norm():
    anatomy = read_anatomy(resnet26(5, 0.25))
    assert all(weight.scale_free for weight in anatomy.weights.values())
    assert len(anatomy.weights) == 25
    assert len(anatomy.norms) == 26


def test_attention_projections_are_weights_and_never_scale_free():
    anatomy = read_anatomy(Encoder())
    assert list(anatomy.weights) == [
        "embed.weight",
        "encoder.self_attn.in_proj_weight",
        "encoder.self_attn.out_proj.weight",
        "encoder.linear1.weight",
        "encoder.linear2.weight",
    ]
    assert not any(weight.scale_free for weight in anatomy.weights.values())
    assert anatomy.weights["encoder.self_attn.in_proj_weight"].shape == (24, 8)


class Encoder(nn.Module):
    input_size = (5, 6)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.encoder(self.embed(x)).mean(1))


# order and ties


class Backwards(nn.Module):
    """Defines its layers in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.third, self.second, self.first = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x):
        return self.fc(self.third(self.second(self.first(x)).relu()).relu())


def test_weights_come_in_the_order_in_which_they_run():
    expected = ["first.weight", "second.weight", "third.weight"]
    assert list(read_anatomy(Backwards(), example=(1, 3)).weights) == expected
    assert list(read_anatomy(Backwards(), example=(1, 3), transform="*.weight").weights) == expected


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.b.weight = self.a.weight
        self.norm, self.fc = nn.BatchNorm2d(3), nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(self.b(self.norm(self.a(x)).relu()).mean((2, 3)))


def test_a_tied_weight_is_scale_free_only_if_every_use_is():
    anatomy = read_anatomy(Tied())
    assert facts(anatomy) == {"a.weight": (None, False)}
    assert anatomy.places["a.weight"] == [("a", "weight"), ("b", "weight")]


def test_a_task_replaces_a_tied_weight_everywhere():
    torch.manual_seed(0)
    backbone = Tied().eval()
    net, x = Network(backbone), batch()
    task = net.add_task("t", classes=2, method="finetune")
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.mul_(1.5)
    plain = net.export("t")
    assert plain.a.weight is plain.b.weight
    assert torch.equal(plain.a.weight, 1.5 * backbone.a.weight)
    assert torch.equal(run(net, x, task="t"), run(plain, x))


# the head


def test_the_head_is_the_linear_layer_whose_output_is_returned():
    anatomy = read_anatomy(tiny())
    assert (anatomy.head, anatomy.head_known, anatomy.features) == ("fc", True, 8)
    assert anatomy.head_names() == ["fc.weight", "fc.bias"]
    assert "fc.weight" not in anatomy.weights


def test_a_head_before_pooling_is_found_by_the_number_of_classes():
    net = torchvision.models.squeezenet1_1(num_classes=7)
    assert read_anatomy(net, example=(1, 3, 64, 64)).head == "classifier.1"
    del net.num_classes
    assert not read_anatomy(net, example=(1, 3, 64, 64)).head_known


def test_heads_that_are_combined_must_be_named_together():
    with pytest.raises(BackboneError, match=r"combines head, head_dist: pass head=\('head', 'head_dist'\)"):
        read_anatomy(timm.create_model("deit_tiny_distilled_patch16_224", depth=1), head="head")


def test_a_head_is_found_through_a_view_of_its_output():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 2, 1), nn.Flatten())
    anatomy = read_anatomy(net)
    assert (anatomy.head, anatomy.features) == ("3", 4)


def test_timms_feature_backbones_have_no_head():
    anatomy = read_anatomy(timm.create_model("resnet10t", num_classes=0), example=(1, 3, 32, 32))
    assert (anatomy.head, anatomy.head_known, anatomy.features) == (None, True, 512)


@pytest.mark.parametrize("ending", [nn.ReLU(inplace=True), nn.Softmax(1), nn.Sigmoid()])
def test_an_activation_after_the_last_layer_hides_the_head(ending):
    net = Network(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), ending))
    assert (net.anatomy.head, net.anatomy.head_known) == (None, False)
    for head in ("auto", None, nn.Linear(4, 2)):
        with pytest.raises(
            BackboneError, match=r"its last linear layers are '0', '2'.*Network\(backbone, head=\.\.\.\)"
        ):
            net.add_task("t", classes=None if head is None else 2, head=head)
    assert net.add_task("kept", head="keep").name == "kept"


# overriding


def test_patterns_choose_weights_norms_and_what_is_scale_free():
    anatomy = read_anatomy(
        tiny(), transform=["stem.*", "*wise.weight"], skip="depth*", norms="norm2", scale_free="point*"
    )
    assert list(anatomy.weights) == ["stem.weight", "pointwise.weight"]
    assert {n: w.scale_free for n, w in anatomy.weights.items()} == {"stem.weight": False, "pointwise.weight": True}
    assert list(anatomy.norms) == ["norm2"]
    assert set(anatomy.norms["norm2"]) == {
        f"norm2.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }


def test_a_pattern_for_everything_leaves_the_head_out():
    assert list(read_anatomy(tiny(), transform="*").weights) == ["stem.weight", "depthwise.weight", "pointwise.weight"]


def test_the_head_can_be_named_or_none():
    named = read_anatomy(tiny(), head="pointwise")
    assert (named.head, named.features) == ("pointwise", 8)
    assert "fc.weight" in named.weights
    denied = read_anatomy(tiny(), head=None)
    assert (denied.head, denied.head_known, denied.features) == (None, True, 6)
    assert "fc.weight" in denied.weights


@pytest.mark.parametrize("what", ["transform", "skip", "norms", "scale_free"])
def test_a_pattern_that_matches_nothing_is_refused(what):
    with pytest.raises(BackboneError, match=rf"{what}='layer9\.\*' matches nothing in the backbone; names look like"):
        read_anatomy(tiny(), **{what: ["layer9.*"]})


def test_a_head_that_is_not_there_is_refused():
    with pytest.raises(BackboneError, match=r"no layer 'classifier' with weights.*'fc'"):
        read_anatomy(tiny(), head="classifier")


def test_parameters_that_tasks_do_not_change_are_listed():
    assert read_anatomy(tiny()).outside == ("pointwise.bias",)


class Table(nn.Module):
    """Most of its parameters are in no layer."""

    input_size = (4,)

    def __init__(self, entries: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.entries, self.inner, self.fc = entries, nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.inner(x) + (self.entries(torch.tensor(0)) if callable(self.entries) else self.entries[0]))


def test_a_backbone_that_tasks_hardly_change_warns_with_the_share():
    table = Table(nn.Parameter(torch.zeros(10, 4)))
    with pytest.warns(
        BackboneWarning, match=r"only 37% of the parameters of Table; it leaves 'entries', 'inner\.bias'"
    ):
        Network(table)
    read_anatomy(table, transform="*")  # no warning if the user chooses the weights


def test_embeddings_do_not_count():
    read_anatomy(Table(nn.Embedding(1000, 4)))


# backbones that are refused


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        if x.shape != (2, 7, 3):
            raise RuntimeError("I only take (2, 7, 3)")
        return self.fc(x)


def test_a_backbone_that_cannot_be_run_asks_for_an_example():
    with pytest.raises(BackboneError, match=r"Picky could not be run.*I only take.*Network\(backbone, example="):
        Network(Picky())
    assert Network(Picky(), example=(2, 7, 3)).anatomy.head == "fc"
    assert Network(Picky(), example=torch.zeros(2, 7, 3)).anatomy.head == "fc"


class Uncopyable(Tiny):
    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle a socket")


def lazy():
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten())


def integer():
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.int8), requires_grad=False)
    layer.forward = lambda x: x @ layer.weight.to(x.dtype).T
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(2, 2))


class Int8(torch.Tensor):
    """Like torchao's quantised weights: a tensor subclass with a float dtype."""


def subclassed():
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Int8), requires_grad=False)
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(2, 2))


def scripted():
    return torch.jit.trace(tiny(), batch())


REFUSED = {
    "script": (scripted, "TorchScript module.*pass the Python module"),
    "compiled": (lambda: torch.compile(tiny(), backend="eager"), "already compiled: pass the plain module"),
    "parallel": (lambda: nn.DataParallel(tiny()), r"parallel training: pass `backbone\.module`"),
    "parametrized": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2))),
        "layer '0' computes its weight with a parametrization.*remove_parametrizations",
    ),
    "lazy": (lazy, r"'0\.weight' is lazy and has no shape yet: run the backbone once"),
    "integer": (integer, r"'0\.weight' is of type torch\.int8.*before quantisation"),
    "subclassed": (subclassed, r"'0\.weight' is a Int8, not a plain tensor: pass the backbone before it is quantised"),
    "quantised": (
        lambda: nn.Sequential(nn.Linear(3, 4), torch.ao.nn.quantized.dynamic.Linear(4, 2)),
        "layer '1' is quantised: pass the backbone before quantisation",
    ),
    "uncopyable": (Uncopyable, r"Uncopyable cannot be copied \(TypeError: cannot pickle a socket\).*deepcopy"),
    "weightless": (nn.ReLU, "ReLU has no weights"),
    "name": (lambda: "resnet50", r"a torch\.nn\.Module, not a str: build it first"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_modules_that_cannot_be_a_backbone_are_refused(case):
    make, sentence = REFUSED[case]
    with pytest.raises(BackboneError, match=sentence):
        Network(make())


def test_a_backbone_that_returns_no_tensor_is_refused():
    class Odd(Tiny):
        def forward(self, x):
            super().forward(x)
            return "done"

    with pytest.raises(BackboneError, match="returned a str, with no tensor of scores"):
        read_anatomy(Odd())


class Counting(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_reading_a_backbone_changes_nothing_in_it():
    backbone = Counting().train()
    backbone.norm1.eval()
    before = snapshot(backbone)
    read_anatomy(backbone)
    assert snapshot(backbone) == before


def test_the_size_that_timm_states_is_only_a_first_guess():
    anatomy = read_anatomy(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1))
    assert anatomy.head == "head"


def test_a_backbone_without_values_can_be_read_but_not_fingerprinted():
    with torch.device("meta"):
        backbone = Tiny()
    net = Network(backbone)
    assert list(net.anatomy.weights) == ["stem.weight", "depthwise.weight", "pointwise.weight"]
    with pytest.raises(BackboneError, match="has no values"):
        _ = net.fingerprint


def test_the_fingerprint_leaves_the_head_out_and_nothing_else():
    first = read_anatomy(tiny()).fingerprint()
    for name, changes in [
        ("fc.weight", False),
        ("stem.weight", True),
        ("norm1.running_var", True),
        ("pointwise.bias", True),
    ]:
        backbone = tiny()
        with torch.no_grad():
            {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}[name].mul_(1.01)
        assert (read_anatomy(backbone).fingerprint() != first) is changes, name


def test_active_must_be_a_number_of_tasks():
    with pytest.raises(TaskError, match="active=0"):
        Network(tiny(), active=0)


class Closed(Tiny):
    def __init__(self):
        super().__init__()
        self.step = lambda x: self.pointwise(x)

    def forward(self, x):
        return self.fc(self.step(self.stem(x)).mean((2, 3)))


def wrapped():
    backbone = tiny()
    forward = backbone.forward
    backbone.forward = lambda x: forward(x)
    return backbone


class Listed(Tiny):
    def __init__(self):
        super().__init__()
        self.kernels = [self.pointwise.weight]  # besides being the layer's own

    def forward(self, x):
        return self.fc(F.conv2d(self.norm1(self.stem(x)), self.kernels[0]).mean((2, 3)))


class Enclosed(Tiny):
    def __init__(self):
        super().__init__()
        self.step = lambda x: F.conv2d(x, self.pointwise.weight, self.pointwise.bias)

    def forward(self, x):
        return self.fc(self.step(self.norm1(self.stem(x))).mean((2, 3)))


class Recurrent(nn.Module):
    """Its layer has a list of its own weights, which copies keep up to date."""

    def __init__(self):
        super().__init__()
        self.layer, self.fc = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.layer(x)[0][:, -1])


@pytest.mark.parametrize(("make", "names"), [(Listed, "'pointwise.weight'"), (Enclosed, "'pointwise.weight', .*bias'")])
def test_parameters_that_a_copy_would_share_are_refused(make, names):
    """A task's weights would be ignored there, without a word."""
    with pytest.raises(BackboneError, match=f"{make.__name__} also uses {names} through a list, a lambda"):
        read_anatomy(make())
    assert len(read_anatomy(Recurrent(), example=(1, 5, 3)).weights) == 2


@pytest.mark.parametrize("run_before", [True, False])
def test_a_layer_replaced_after_reading_is_refused(run_before, tmp_path):
    """Tasks would go on running on the old one, and be saved as if they fitted the backbone."""
    backbone = tiny()
    net = Network(backbone)
    net.add_task("t", classes=2)
    if run_before:
        run(net, batch(), task="t")
    backbone.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    calls = [lambda: net(batch()), lambda: net(batch(), task="t"), lambda: net.save_task("t", tmp_path / "t")]
    for call in calls:
        with pytest.raises(BackboneError, match="layer 'stem' was replaced after Network"):
            call()
    assert not list(tmp_path.iterdir())
    copy.deepcopy(Network(backbone))(batch())


def test_a_weight_that_is_a_buffer_is_not_transformed():
    """Fixed filters, for example."""
    backbone = tiny()
    fixed = backbone.stem.weight.detach()
    del backbone.stem.weight
    backbone.stem.register_buffer("weight", fixed)
    net = Network(backbone)
    assert list(net.anatomy.weights) == ["depthwise.weight", "pointwise.weight"]
    net.add_task("t", classes=2)
    assert run(net, batch(), task="t").shape == (4, 2)


class Repeated(nn.Module):
    """One convolution that runs twice, before two norm layers."""

    def __init__(self, second):
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), second
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(self.first(self.conv(self.second(self.conv(x)))).mean((2, 3)))


@pytest.mark.parametrize(("second", "free"), [(nn.BatchNorm2d(3), True), (nn.GroupNorm(1, 3), False)])
def test_a_layer_that_runs_twice_is_scale_free_only_if_every_norm_cancels_its_scale(second, free):
    assert facts(read_anatomy(Repeated(second))) == {"conv.weight": (None, free)}


@pytest.mark.parametrize(("make", "layer"), [(Closed, "pointwise"), (wrapped, "stem")])
def test_layers_that_a_copy_would_share_are_refused(make, layer):
    """A task's weights would be ignored, and its answers the backbone's own."""
    with pytest.raises(BackboneError, match=f"calls its layer '{layer}' through a lambda or a wrapped function"):
        read_anatomy(make())
    tiny()(batch())  # nothing stays behind
