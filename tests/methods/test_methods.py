import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import bitgraft
from bitgraft.errors import TaskError
from bitgraft.methods import registry
from bitgraft.transforms.base import Weight
from bitgraft.transforms.baselines import LowRank, Parallel, Recombined, Series
from bitgraft.transforms.masked import Masked

DOCS = Path(__file__).parents[2] / "docs" / "methods.md"
METHODS = bitgraft.method_names()
UNCHANGED = [name for name in METHODS if name != "packnet"]
"""Methods whose tasks start as the backbone. PackNet's first task starts with pruned weights."""


def backbone(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Dense, depthwise, 1x1, transposed with groups and linear layers; three kinds of norm."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 6, 1),
        nn.GroupNorm(2, 6),
        nn.ConvTranspose2d(6, 4, 3, groups=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 12),
        nn.LayerNorm(12),
        nn.Linear(12, 5),
    )
    layers[1].running_mean.normal_()
    layers[1].running_var.uniform_(0.5, 2)
    layers.to(dtype)
    for parameter in layers.parameters():
        parameter.data *= 1 + 1e-9  # a float64 weight is not a float32 one
    return layers.eval()


def network(dtype: torch.dtype = torch.float32) -> bitgraft.Network:
    return bitgraft.Network(backbone(dtype), example=(1, 3, 8, 8))


def images(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3)).to(dtype)


def shake(task: bitgraft.Task) -> None:
    """Change every learned parameter, like training."""
    rng = torch.Generator().manual_seed(5)
    for role, parameter in task.roles():
        spread = 0.02 if role == "scores" else 0.1
        parameter.data += spread * torch.randn(parameter.shape, generator=rng)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", UNCHANGED)
def test_a_task_starts_as_the_backbone(method, dtype):
    net = network(dtype)
    task = net.add_task("t", method=method, head="keep")
    for name, tensor in task.tensors().items():
        base = net.anatomy.tensor(name)
        assert tensor.dtype == base.dtype
        if name in task.owned and isinstance(base, nn.Parameter):
            base = base.to(torch.float32).to(dtype)  # tasks and files hold owned parameters in float32
        assert torch.equal(tensor, base), name
    if dtype != torch.float64:
        assert torch.equal(net(images(dtype), task="t"), net(images(dtype)))


@pytest.mark.parametrize("method", METHODS)
def test_w_keeps_the_memory_format_of_the_weight(method):
    body = backbone().to(memory_format=torch.channels_last)
    net = bitgraft.Network(body, example=(1, 3, 8, 8))
    task = net.add_task("t", method=method, head="keep")
    shake(task)
    learning = task.tensors()
    for tensors in (learning, task.freeze().tensors()):
        for name in task.transforms:
            assert tensors[name].is_contiguous(memory_format=torch.channels_last) or tensors[name].dim() == 2, name


@pytest.mark.parametrize("method", METHODS)
def test_freezing_changes_no_tensor_and_no_output(method):
    net = network()
    task = net.add_task("t", classes=3, method=method)
    shake(task)
    before, output = task.tensors(), net(images(), task="t")
    task.freeze()
    after = task.tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(net(images(), task="t"), output)
    assert not list(task.roles())
    assert not any(parameter.requires_grad for parameter in task.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_every_learned_parameter_gets_a_gradient_and_changes_the_weights(method):
    net = network().train()
    task = net.add_task("t", classes=3, method=method, **({"keep": 0.3} if method == "packnet" else {}))
    shake(task)
    net(images(), task="t").square().sum().backward()
    roles = list(task.roles())
    assert {id(p) for _, p in roles} == {id(p) for p in task.parameters()}
    for role, parameter in roles:
        assert parameter.grad is not None, (role, parameter.shape)
        assert parameter.grad.isfinite().all()
    changed = [name for name in task.transforms if not torch.equal(task.tensors()[name], net.anatomy.tensor(name))]
    assert changed or method in ("classifier", "norms", "finetune", "adapters-series", "adapters-joint")


WEIGHTS = {
    "0.weight": (8, 27),  # output channels, entries per channel
    "3.weight": (8, 9),
    "4.weight": (6, 8),
    "6.weight": (4, 27),
    "10.weight": (12, 4),
}
ENTRIES = sum(outputs * inputs for outputs, inputs in WEIGHTS.values())
NORM_PARAMETERS = 2 * 8 + 2 * 6 + 2 * 12
STATISTICS = 2 * 8
OTHER_BIASES = 8 + 6 + 4 + 12
EXPECTED = {
    "classifier": 0,
    "norms": 32 * (NORM_PARAMETERS + STATISTICS),
    "finetune": 32 * (ENTRIES + NORM_PARAMETERS + STATISTICS + OTHER_BIASES),
    "piggyback": ENTRIES,
    "piggyback-bn": ENTRIES + 32 * (NORM_PARAMETERS + STATISTICS),
    "dan": 32 * (8 * 8 + 8 * 8 + 6 * 6 + 4 * 4 + 12 * 12 + NORM_PARAMETERS + STATISTICS),
    "lora": 32 * sum(min(8, o, i) * (o + i) for o, i in WEIGHTS.values()),
    "adapters-parallel": 32 * (8 * 3 + 8 * 1 + 6 * 2 + NORM_PARAMETERS + STATISTICS),
    "adapters-series": 32 * (sum(c * c + 4 * c for c in (8, 8, 4)) + NORM_PARAMETERS + STATISTICS),
    "adapters-joint": 32 * (sum(c * c + 4 * c for c in (8, 8, 4)) + NORM_PARAMETERS + STATISTICS),
    # the first task owns the pruned half of every layer, and stores two masks
    "packnet": 2 * ENTRIES + 32 * sum(o * i - round(o * i * 0.5) for o, i in WEIGHTS.values()),
}


@pytest.mark.parametrize("method", METHODS)
def test_bits_against_an_independent_count(method):
    net = network()
    assert {name: (w.outputs, w.shape.numel() // w.outputs) for name, w in net.anatomy.weights.items()} == WEIGHTS
    free_scale = sum(not w.scale_free for w in net.anatomy.weights.values())
    learned = {"simple": 2, "full": 3}
    if method in learned:
        expected = ENTRIES + 32 * (learned[method] * len(WEIGHTS) + free_scale + NORM_PARAMETERS + STATISTICS)
    else:
        expected = EXPECTED[method]
    task = net.add_task("t", classes=3, method=method, preset=None)
    assert task.bits() == expected
    assert task.freeze().bits() == expected


def test_statistics_can_be_left_out_of_the_bits_including_an_adapters_own():
    task = network().add_task("t", classes=3, method="adapters-series")
    assert task.bits(statistics=False) == 32 * (sum(c * c + 2 * c for c in (8, 8, 4)) + NORM_PARAMETERS)
    adapter = Series(Weight("w", torch.Size((6, 3, 3, 3)), "conv"), torch.device("cpu"))
    assert adapter.bits(statistics=True) == 32 * (6 * 6 + 6 + 6 + 6 + 6)
    assert adapter.bits(statistics=False) == 32 * (6 * 6 + 6 + 6)


def test_bits_of_channel_wise_k():
    net = network()
    task = net.add_task("t", classes=3, k0=1, per="channel", norms=False)
    assert task.bits() == ENTRIES + 32 * 3 * sum(outputs for outputs, _ in WEIGHTS.values())


ROLES = {
    "classifier": {"head"},
    "norms": {"norms", "head"},
    "finetune": {"weights", "norms", "head"},
    "packnet": {"weights", "head"},
    "piggyback": {"scores", "head"},
    "piggyback-bn": {"scores", "norms", "head"},
    "simple": {"scores", "k", "k1", "norms", "head"},
    "full": {"scores", "k", "k1", "norms", "head"},
    "adapters-series": {"weights", "norms", "head"},
    "adapters-joint": {"weights", "norms", "head"},
    "adapters-parallel": {"weights", "norms", "head"},
    "dan": {"weights", "norms", "head"},
    "lora": {"weights", "head"},
}


def test_norms_is_the_classifier_with_its_own_norm_layers():
    net = network()
    first = net.add_task("norms", classes=3, method="norms", seed=1)
    second = net.add_task("classifier", classes=3, method="classifier", norms=True, seed=1)
    for task in (first, second):
        shake(task)
    assert first.tensors().keys() == second.tensors().keys()
    assert torch.equal(net(images(), task="norms"), net(images(), task="classifier"))


@pytest.mark.parametrize("method", METHODS)
def test_roles_name_what_is_learned(method):
    task = network().add_task("t", classes=3, method=method)
    assert {role for role, _ in task.roles()} == ROLES[method]


@pytest.mark.parametrize("method", METHODS)
def test_initial_values_depend_only_on_the_seed(method):
    one, other = network(), network()
    other.add_task("earlier", classes=7, method="full", seed=9)
    first = one.add_task("t", classes=3, method=method, seed=1)
    second = other.add_task("t", classes=3, method=method, seed=1)
    assert [role for role, _ in first.roles()] == [role for role, _ in second.roles()]
    for (_, a), (_, b) in zip(first.roles(), second.roles(), strict=True):
        assert torch.equal(a, b)


def test_masks_are_initialised_as_in_the_papers():
    net = network()
    for method in ("simple", "full"):
        for made in net.add_task(method, classes=3, method=method).transforms.values():
            assert 1e-4 <= made.scores.min() < made.scores.max() <= 2e-4
            assert made.rule.threshold == 0
    for method in ("piggyback", "piggyback-bn"):
        for made in net.add_task(method, classes=3, method=method).transforms.values():
            assert torch.equal(made.scores, torch.full_like(made.scores, 1e-2))
            assert made.rule.threshold == 5e-3


def test_piggyback_is_full_with_k_0001():
    net = network()
    task = net.add_task("piggyback", classes=3, method="piggyback")
    options = {"k0": 0, "k1": 0, "k2": 0, "k3": 1, "threshold": 5e-3, "init": [1e-2, 1e-2], "norms": False}
    other = net.add_task("special-case", classes=3, method="full", **options)
    for t in (task, other):
        shake(t)
        net(images(), task=t.name).square().sum().backward()
    for name, made in task.transforms.items():
        assert 0 < made.mask().float().mean() < 1
        assert torch.equal(made.mask(), made.scores >= 5e-3)
        assert torch.equal(task.tensors()[name], net.anatomy.tensor(name) * made.mask())
    for (_, a), (_, b) in zip(task.roles(), other.roles(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.grad, b.grad)
    assert task.tensors().keys() == other.tensors().keys()
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in task.tensors().items())
    assert torch.equal(net(images(), task="piggyback"), net(images(), task="special-case"))
    assert task.bits() == other.bits()


def test_k0_is_one_if_a_norm_cancels_the_scale_and_learned_otherwise():
    net = network()
    task = net.add_task("t", classes=3)
    by_k0 = {name: made.rule.fixed[0] for name, made in task.transforms.items()}
    assert by_k0 == {name: 1.0 if w.scale_free else None for name, w in net.anatomy.weights.items()}
    assert by_k0["0.weight"] == 1.0
    assert by_k0["6.weight"] is None


@pytest.mark.parametrize("groups", [1, 2])
def test_a_parallel_adapter_is_a_parallel_1x1_convolution(groups):
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 7, 9), torch.randn(6, 4 // groups, 3, 5)
    adapter = Parallel(Weight("w", w.shape, "conv", groups), w.device)
    adapter.a.data.normal_()
    together = F.conv2d(x, adapter(w), stride=2, padding=(1, 2), groups=groups)
    apart = F.conv2d(x, w, stride=2, padding=(1, 2), groups=groups) + F.conv2d(x, adapter.a, stride=2, groups=groups)
    torch.testing.assert_close(together, apart)


def test_adapters_need_larger_kernels_and_parallel_ones_odd_kernels():
    net = network()
    assert list(net.add_task("s", classes=3, method="adapters-series").transforms) == [
        "0.weight",
        "3.weight",
        "6.weight",
    ]
    even = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    task = bitgraft.Network(even, example=(1, 3, 8, 8)).add_task("p", classes=3, method="adapters-parallel")
    assert list(task.transforms) == ["1.weight"]


def test_a_series_adapter_is_between_its_layer_and_the_norm():
    net = network()
    task = net.add_task("t", method="adapters-series", head="keep")
    shake(task)
    tail, body, x = task.transforms["0.weight"].tail, net.backbone, images()
    for name in ("3.weight", "6.weight"):
        task.transforms[name].tail.a.weight.data.zero_()
    y = F.conv2d(x, body[0].weight, padding=1)
    normal = F.batch_norm(y, tail.norm.running_mean, tail.norm.running_var, tail.norm.weight, tail.norm.bias)
    y = y + torch.einsum("oi,bihw->bohw", tail.a.weight[:, :, 0, 0], normal)
    owned = task.owned
    y = F.batch_norm(y, owned["1.running_mean"], owned["1.running_var"], owned["1.weight"], owned["1.bias"])
    y = body[4](body[3](F.relu(y)))
    y = F.relu(body[6](F.group_norm(y, 2, owned["5.weight"], owned["5.bias"])))
    y = body[10](y.mean((2, 3)))
    y = body[12](F.layer_norm(y, (12,), owned["11.weight"], owned["11.bias"]))
    torch.testing.assert_close(net(x, task="t"), y)


def test_dan_recombines_filters():
    torch.manual_seed(0)
    for shape, kind, groups in [((6, 4, 3, 3), "conv", 1), ((5, 7), "linear", 1), ((4, 3, 3), "transposed", 2)]:
        w, weight = torch.randn(shape), Weight("w", torch.Size(shape), kind, groups)
        made = Recombined(weight, w.device)
        made.p.data.normal_()
        got = made(w)
        for i in range(weight.outputs):
            expected = sum(made.p[i, j] * weight.filters(w)[j] for j in range(weight.outputs))
            torch.testing.assert_close(weight.filters(got)[i], expected)


def test_lora_adds_a_scaled_product_of_low_rank():
    task = network().add_task("t", classes=3, method="lora", rank=2, alpha=6)
    shake(task)
    for name, made in task.transforms.items():
        assert isinstance(made, LowRank)
        w, weight = task.anatomy.tensor(name), task.anatomy.weights[name]
        assert (made.b.shape, made.a.shape) == ((weight.outputs, 2), (2, weight.shape.numel() // weight.outputs))
        change = weight.filters(made(w) - w)
        torch.testing.assert_close(change, 3 * made.b @ made.a)
        assert torch.linalg.matrix_rank(change, atol=1e-4) <= 2


def test_lora_starts_as_peft_does():
    task = network().add_task("t", classes=3, method="lora", rank=2)
    for made in task.transforms.values():
        bound = 1 / math.sqrt(made.a.shape[1])
        assert not made.b.any()
        assert made.a.any()
        assert made.a.abs().max() <= bound


BAD = [
    ("full", {"k4": 1}, "no option 'k4'"),
    ("full", {"surogate": "sigmoid"}, "did you mean 'surrogate'"),
    ("classifier", {"rank": 1}, "it takes norms, own"),
    ("full", {"k0": "yes"}, "k0='yes': give a number, or 'learn' or 'auto'"),
    ("full", {"k1": "auto"}, "k1='auto': give a number, or 'learn'"),
    ("full", {"k2": True}, "k2=True"),
    ("full", {"k3": float("nan")}, "k3=nan"),
    ("full", {"k3": None}, "k3=None"),
    ("simple", {"per": "row"}, "per='row': choose 'layer' or 'channel'"),
    ("simple", {"surrogate": "tanh"}, "surrogate='tanh'"),
    ("simple", {"threshold": "high"}, "threshold='high'"),
    ("simple", {"threshold": float("inf")}, "threshold=inf"),
    ("piggyback", {"init": 0.1}, "init=0.1"),
    ("piggyback", {"init": (2.0, 1.0)}, "init="),
    ("piggyback", {"init": ("a", "b")}, "init="),
    ("piggyback", {"norms": "no"}, "norms='no': give True or False"),
    ("lora", {"rank": 0}, "rank=0"),
    ("lora", {"rank": 1.5}, "rank=1.5"),
    ("lora", {"rank": True}, "rank=True"),
    ("lora", {"alpha": "8"}, "alpha='8'"),
    ("packnet", {"keep": 1.0}, "keep=1.0"),
    ("packnet", {"keep": "half"}, "keep='half'"),
    ("packnet", {"base": 1}, "base=1"),
    ("dan", {"own": 3}, "own=3"),
    ("dan", {"own": [3]}, "own="),
    ("dan", {"own": "nothing.*"}, "own='nothing.*' matches no tensor"),
]


@pytest.mark.parametrize(("method", "options", "message"), BAD)
def test_a_bad_option_gets_one_clear_sentence(method, options, message):
    net = network()
    with pytest.raises(TaskError, match=re.escape(message)) as caught:
        net.add_task("t", classes=3, method=method, **options)
    assert "\n" not in str(caught.value)
    assert not net.tasks


@pytest.mark.parametrize(
    ("name", "hint"), [("ful", "did you mean 'full'?"), ("magic", "known are"), (None, "known are")]
)
def test_an_unknown_method_gets_one_clear_sentence(name, hint):
    with pytest.raises(TaskError, match=re.escape(hint)) as caught:
        network().add_task("t", classes=3, method=name)
    assert f"there is no method {name!r}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_own_takes_one_pattern_or_several():
    net = network()
    one = net.add_task("one", classes=3, method="classifier", own="*.bias")
    several = net.add_task("several", classes=3, method="classifier", own=["3.bias", "4.bias"])
    biases = {"1.bias", "3.bias", "4.bias", "5.bias", "6.bias", "10.bias", "11.bias"}
    assert set(one.owned) - {"12.weight", "12.bias"} == biases
    assert set(several.owned) - {"12.weight", "12.bias"} == {"3.bias", "4.bias"}


def test_an_owned_weight_is_not_transformed():
    task = network().add_task("t", classes=3, own="10.weight")
    assert "10.weight" in task.owned
    assert "10.weight" not in task.transforms
    assert task.transforms.keys() == WEIGHTS.keys() - {"10.weight"}


class Filtering(nn.Module):
    """A network with a filter in the frequency domain."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.filter = nn.Parameter(torch.ones(8, 1, 1, dtype=torch.complex64))

    def forward(self, x):
        x = torch.fft.ifft2(torch.fft.fft2(self.norm(self.conv(x))) * self.filter).real
        return self.fc(x.relu().mean((2, 3)))


def test_a_complex_tensor_is_left_to_the_backbone_or_refused_before_training(tmp_path):
    net = bitgraft.Network(Filtering().eval(), example=(1, 3, 8, 8))
    net.add_task("t", classes=3)
    net.save_task("t", tmp_path / "t.safetensors")
    for given in ({"method": "finetune"}, {"own": "filter"}):
        with pytest.raises(TaskError, match=r"^task 'u' would own 'filter', which is torch.complex64 and fits in no"):
            net.add_task("u", classes=3, **given)
    assert "u" not in net.tasks


def test_finetuning_without_norms():
    net = network()
    task = net.add_task("t", classes=3, method="finetune", norms=False)
    norms = {name for names in net.anatomy.norms.values() for name in names}
    assert set(task.owned) == set(net.anatomy.places) - norms
    assert task.bits() == 32 * (ENTRIES + OTHER_BIASES)


def test_a_custom_method_is_one_function(monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))

    def mean_free(weight, tensor, options, rng, before):
        return Recombined(weight, tensor.device) if weight.kind == "linear" else None

    bitgraft.register_method(
        bitgraft.Method(name="mine", summary="", equation="", options=registry.Options(norms=False), build=mean_free)
    )
    task = network().add_task("t", classes=3, method="mine")
    assert list(task.transforms) == ["10.weight"]


def table(heading: str) -> list[dict[str, str]]:
    """Return the first table below a heading of docs/methods.md, one dict per row."""
    text = DOCS.read_text().split(f"\n{heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE).group().splitlines()
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


PAPER = [
    # the paper's row, k0..k3 (None is learned), norms, surrogate, per channel
    ("Piggyback", (0, 0, 0, 1), False, "identity", False),
    ("Piggyback*", (0, 0, 0, 1), False, "identity", False),
    ("Piggyback* with BN", (0, 0, 0, 1), True, "identity", False),
    ("Piggyback* with BN, k1", (0, None, 0, 1), True, "identity", False),
    ("Ours (Simple, no bias)", (1, 0, None, 0), True, "identity", False),
    ("Ours (Simple)", (1, None, None, 0), True, "identity", False),
    ("Ours (Simple with Sigmoid)", (1, None, None, 0), True, "sigmoid", False),
    ("Ours (Full)", (1, None, None, None), True, "identity", False),
    ("Ours (Full with Sigmoid)", (1, None, None, None), True, "sigmoid", False),
    ("Ours (Full, channel-wise)", (1, None, None, None), True, "identity", True),
]


def read_options(cell: str) -> dict[str, object]:
    return eval(f"dict({cell.strip('`')})", {"__builtins__": {}}, {"dict": dict})


def test_the_ablation_in_the_docs_is_the_papers():
    rows = table("## The paper's ablation")
    assert [row["row"] for row in rows] == [row for row, *_ in PAPER]
    net = bitgraft.Network(timm.create_model("test_resnet"))
    for index, (row, (name, fixed, norms, surrogate, channels)) in enumerate(zip(rows, PAPER, strict=True)):
        printed = tuple(None if row[k] == "learned" else float(row[k]) for k in ("k0", "k1", "k2", "k3"))
        assert printed == fixed, name
        task = net.add_task(
            str(index), classes=3, method=row["method"].strip("`"), preset=None, **read_options(row["options"])
        )
        assert task.metadata.options["norms"] is norms, name
        for made in task.transforms.values():
            assert isinstance(made, Masked)
            assert made.rule.fixed == fixed, name
            assert made.rule.surrogate == surrogate, name
            assert made.rule.per_channel is channels, name
        net.remove_task(str(index))


def test_the_docs_name_every_method_and_every_option():
    methods = {row["method"].strip("`"): row for row in table("## All methods")}
    assert set(methods) == set(METHODS)
    for name in METHODS:
        assert methods[name]["equation"].strip("`") == registry.get(name).equation
        assert methods[name]["own norm layers"] == ("yes" if registry.get(name).options.norms else "no")
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCS.read_text(), re.MULTILINE))
    for name in METHODS:
        for field in fields(registry.get(name).options):
            assert field.name in documented
