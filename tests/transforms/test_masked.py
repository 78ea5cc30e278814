import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bitgraft.errors import CorruptError
from bitgraft.methods.masked import MaskOptions, masked
from bitgraft.transforms import bits, kernels
from bitgraft.transforms.affine import affine
from bitgraft.transforms.base import Weight, strided_like
from bitgraft.transforms.masked import PACE, Masked

torch.manual_seed(0)
LAYERS = {
    "conv1d": nn.Conv1d(3, 4, 3),
    "conv2d": nn.Conv2d(3, 4, 3),
    "conv2d-1x1": nn.Conv2d(1, 4, 1),
    "conv3d": nn.Conv3d(2, 3, (1, 2, 3)),
    "grouped": nn.Conv2d(4, 6, 3, groups=2),
    "depthwise": nn.Conv2d(4, 4, 3, groups=4),
    "transposed1d": nn.ConvTranspose1d(4, 3, 3),
    "transposed2d": nn.ConvTranspose2d(3, 2, (3, 2)),
    "transposed3d": nn.ConvTranspose3d(2, 3, 2),
    "transposed-grouped": nn.ConvTranspose2d(4, 6, 3, groups=2),
    "linear": nn.Linear(5, 4),
    "linear-1": nn.Linear(1, 3),
}
LEARNED = ("learn", "learn", "learn", "learn")
PER = ("layer", "channel")
CHOICES = list(itertools.product([True, False], repeat=4))


def normal(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def describe(layer: nn.Module, name: str = "weight") -> Weight:
    kind = "linear"
    if isinstance(layer, nn.modules.conv._ConvNd):
        kind = "transposed" if layer.transposed else "conv"
    return Weight(name, layer.weight.shape, kind, getattr(layer, "groups", 1))


def output_channel(weight: Weight, index: tuple[int, ...]) -> int:
    """Return the output channel of an entry of the weight, by torch's documented layouts."""
    if weight.kind != "transposed":
        return index[0]
    group = index[0] // (weight.shape[0] // weight.groups)
    return group * weight.shape[1] + index[1]


def reference(weight: Weight, tensor: torch.Tensor, mask: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Equation (2) entry by entry, in float64."""
    out = torch.empty(weight.shape, dtype=torch.float64)
    for index in itertools.product(*map(range, weight.shape)):
        k0, k1, k2, k3 = (row if k.dim() == 1 else row[output_channel(weight, index)] for row in k.double())
        w, m = tensor[index].double(), mask[index].double()
        out[index] = k0 * w + k1 + k2 * m + k3 * w * m
    return out


def transform(weight: Weight, tensor: torch.Tensor, k=LEARNED, seed: int = 0, **options) -> Masked:
    """A transform in the middle of training: R of both signs, and k away from their initial values."""
    chosen = MaskOptions(**dict(zip(("k0", "k1", "k2", "k3"), k, strict=True)), **options)
    rng = torch.Generator().manual_seed(seed)
    scores = strided_like(tensor, chosen.threshold + torch.randn(weight.shape, generator=rng))
    made = Masked(weight, chosen.rule(weight), scores)
    for parameter in (made.k, made.k1):
        if parameter is not None:
            parameter.data = torch.randn(parameter.shape, generator=rng)
    return made


def fresh(weight: Weight, tensor: torch.Tensor, k, **options) -> Masked:
    """A transform before training."""
    chosen = MaskOptions(**dict(zip(("k0", "k1", "k2", "k3"), k, strict=True)), **options)
    return masked(weight, tensor, chosen, torch.Generator().manual_seed(0), ())


def gradients(made: Masked) -> torch.Tensor:
    """Return the gradients to the learned k, in the order k0..k3."""
    kept = {} if made.k is None else dict(zip([i for i in made.rule.learned if i != 1], made.k.grad, strict=True))
    return torch.stack([made.k1.grad if i == 1 else kept[i] for i in made.rule.learned])


def naive(made: Masked, tensor: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Equation (2) as written, differentiable in k and M."""
    shape = made.weight.channel_shape if made.rule.per_channel else ()
    k0, k1, k2, k3 = k.view(4, *shape)
    w, m = tensor.view(made.weight.grouped_shape), mask.view(made.weight.grouped_shape)
    return (k0 * w + k1 + k2 * m + k3 * w * m).view(tensor.shape)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("name", LAYERS)
def test_w_is_equation_2_for_every_layer(name, per):
    layer = LAYERS[name]
    weight, tensor = describe(layer), layer.weight.detach()
    made = transform(weight, tensor, per=per)
    expected = reference(weight, tensor, made.scores >= 0, made.values())
    torch.testing.assert_close(made(tensor).double(), expected, rtol=1e-5, atol=1e-6)
    assert made(tensor).dtype == tensor.dtype


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("learned", CHOICES)
def test_w_is_equation_2_for_every_choice_of_learned_and_constant_k(learned, per):
    layer = LAYERS["transposed-grouped"]
    weight, tensor = describe(layer), layer.weight.detach()
    constants = (0.5, -0.25, 2.0, 3.0)
    made = transform(
        weight, tensor, ["learn" if yes else c for yes, c in zip(learned, constants, strict=True)], per=per
    )
    values = made.values()
    for yes, row, constant in zip(learned, values, constants, strict=True):
        assert yes or torch.equal(row, torch.full_like(row, constant))
    assert made.rule.learned == [i for i, yes in enumerate(learned) if yes]
    assert sum(p.numel() for n, p in made.named_parameters() if n in ("k", "k1")) == sum(learned) * values[0].numel()
    expected = reference(weight, tensor, made.scores >= 0, values)
    torch.testing.assert_close(made(tensor).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.half, 2**-10)],
)
@pytest.mark.parametrize("per", PER)
def test_w_has_the_weights_dtype_and_precision(dtype, tolerance, per):
    layer = LAYERS["grouped"]
    weight, tensor = describe(layer), layer.weight.detach().to(dtype)
    made = transform(weight, tensor, per=per)
    got = made(tensor)
    assert got.dtype == dtype
    expected = reference(weight, tensor, made.scores >= 0, made.values())
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=1e-6 if dtype != torch.float64 else 1e-14)
    got.sum().backward()
    assert made.scores.grad.dtype == made.k.grad.dtype == torch.float32
    made.freeze()
    assert torch.equal(made(tensor), got)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(LAYERS)),
    st.tuples(*[st.one_of(st.just("learn"), st.floats(-4, 4, width=32))] * 4),
    st.sampled_from(PER),
    st.floats(-2, 2, width=32),
    st.integers(0, 1000),
)
def test_w_is_equation_2_for_any_setting(name, k, per, threshold, seed):
    layer = LAYERS[name]
    weight, tensor = describe(layer), layer.weight.detach()
    made = transform(weight, tensor, k, seed, per=per, threshold=threshold)
    learning = made(tensor)
    expected = reference(weight, tensor, made.scores >= threshold, made.values())
    torch.testing.assert_close(learning.double(), expected, rtol=1e-5, atol=1e-5)
    made.freeze()
    assert torch.equal(made(tensor), learning)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("name", ["conv2d", "grouped", "depthwise", "transposed2d", "transposed-grouped"])
def test_channels_last_weights_give_channels_last_w(name, per):
    layer = LAYERS[name]
    weight, tensor = describe(layer), layer.weight.detach().to(memory_format=torch.channels_last)
    made = transform(weight, tensor, per=per)
    learning = made(tensor)
    plain = made(tensor.contiguous())
    made.freeze()
    for got in (learning, made(tensor)):
        assert got.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(got, plain)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize("surrogate", ["identity", "sigmoid"])
@pytest.mark.parametrize("k", [LEARNED, (1.0, "learn", "learn", 0.0), (0.0, 0.0, 0.0, 1.0)])
def test_the_gradient_to_r_is_the_gradient_to_m_times_the_surrogates_slope(k, surrogate, threshold, per):
    for layer in LAYERS.values():
        weight, tensor = describe(layer), layer.weight.detach().double()
        made = transform(weight, tensor, k, per=per, surrogate=surrogate, threshold=threshold).double()
        upstream = normal(weight.shape)
        (made(tensor) * upstream).sum().backward()
        mask = (made.scores >= threshold).double().requires_grad_()
        (naive(made, tensor, made.values().detach(), mask) * upstream).sum().backward()
        soft = torch.sigmoid(made.scores - threshold)
        slope = soft * (1 - soft) if surrogate == "sigmoid" else 1
        torch.testing.assert_close(made.scores.grad, mask.grad * slope)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_to_k_match_finite_differences_and_plain_autograd(name, per):
    layer = LAYERS[name]
    weight, tensor = describe(layer), layer.weight.detach().double()
    made = transform(weight, tensor, per=per).double()
    upstream = normal(weight.shape)

    def error() -> torch.Tensor:
        return (made(tensor).square() * upstream).sum()

    error().backward()
    k = made.values().detach().requires_grad_()
    (naive(made, tensor, k, (made.scores >= 0).double()).square() * upstream).sum().backward()
    torch.testing.assert_close(gradients(made), k.grad)
    step = 1e-5
    for parameter in (made.k, made.k1):
        flat = parameter.data.view(-1)
        for i, exact in enumerate(parameter.grad.view(-1)):
            flat[i] += step
            above = error().detach()
            flat[i] -= 2 * step
            below = error().detach()
            flat[i] += step
            torch.testing.assert_close((above - below) / (2 * step), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("learned", CHOICES)
def test_a_constant_k_changes_no_other_gradient(learned):
    layer = LAYERS["linear-1"]  # one entry per channel, so sums over a channel are exact
    weight, tensor = describe(layer), layer.weight.detach().double()
    for per in PER:
        every = transform(weight, tensor, per=per).double()
        upstream = normal(weight.shape)
        (every(tensor) * upstream).sum().backward()
        some = transform(weight, tensor, ["learn" if yes else 1.0 for yes in learned], per=per).double()
        some.scores.data.copy_(every.scores)
        (some(tensor) * upstream).sum().backward()
        rows = [i for i, yes in enumerate(learned) if yes]
        assert (some.k is None) == (not [i for i in rows if i != 1])
        assert (some.k1 is None) == (1 not in rows)
        if rows:
            torch.testing.assert_close(gradients(some), gradients(every)[rows])


def test_gradients_of_a_half_precision_weight_are_summed_in_float32():
    layer = nn.Linear(64, 64)
    weight, tensor = describe(layer), layer.weight.detach().bfloat16()
    made = transform(weight, tensor)
    upstream = normal(weight.shape).bfloat16()
    made(tensor).backward(upstream)
    mask = (made.scores >= 0).double().requires_grad_()
    k = made.values().detach().double().requires_grad_()
    naive(made, tensor.double(), k, mask).backward(upstream.double())
    torch.testing.assert_close(gradients(made).double(), k.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made.scores.grad.double(), mask.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("k", [LEARNED, (1.0, "learn", "learn", 0.0), (0.0, 0.0, 0.0, 1.0)])
@pytest.mark.parametrize("name", ["conv2d", "transposed-grouped", "linear"])
def test_backward_saves_references_to_r_k_and_w_and_nothing_else(name, k, per):
    layer = LAYERS[name]
    weight, tensor = describe(layer), layer.weight.detach()
    made = transform(weight, tensor, k, per=per)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        made(tensor).sum()
    scores, table, base = saved
    assert scores.data_ptr() == made.scores.data_ptr()
    assert base.data_ptr() == tensor.data_ptr()
    assert torch.equal(table.view_as(made.values()), made.values())
    assert made.k is not None or table.data_ptr() == made.constants.data_ptr()


def test_the_weight_gets_no_gradient():
    tensor = normal((3, 3)).float().requires_grad_()
    weight = Weight("w", tensor.shape, "linear")
    made = transform(weight, tensor.detach())
    made(tensor).sum().backward()
    assert tensor.grad is None


def test_a_frozen_transform_holds_the_bits_and_all_four_k():
    layer = LAYERS["conv2d"]
    weight, tensor = describe(layer), layer.weight.detach()
    made = transform(weight, tensor, (1.0, "learn", "learn", 0.0))
    before, mask, bits = made(tensor), made.mask(), made.bits()
    assert bits == weight.shape.numel() + 2 * 32
    made.freeze()
    assert torch.equal(made(tensor), before)
    assert torch.equal(made.mask(), mask)
    assert made.bits() == bits
    assert not list(made.parameters())
    assert {name: t.numel() for name, t in made.named_buffers()} == {"packed": -(-tensor.numel() // 8), "constants": 4}
    made.freeze()
    assert torch.equal(made(tensor), before)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("name", LAYERS)
def test_parts_restore_the_transform_exactly(name, per):
    layer = LAYERS[name]
    weight, tensor = describe(layer), layer.weight.detach()
    made = transform(weight, tensor, (1.0, "learn", "learn", "learn"), per=per)
    blank = transform(weight, tensor, (1.0, "learn", "learn", "learn"), seed=1, per=per)
    assert not torch.equal(blank(tensor), made(tensor))
    blank.restore(made.parts())
    assert torch.equal(blank(tensor), made(tensor))


def test_parts_of_the_wrong_names_or_shapes_are_refused():
    layer = LAYERS["conv2d"]
    weight, tensor = describe(layer), layer.weight.detach()
    made = transform(weight, tensor)
    parts = made.parts()
    for bad in (
        {"mask": parts["mask"]},
        {**parts, "extra": parts["k"]},
        {**parts, "mask": parts["mask"][1:]},
        {**parts, "k": torch.zeros(4, 4)},
    ):
        with pytest.raises(CorruptError, match="a transform's parts should be"):
            made.restore(bad)
    assert made.scores is not None


def test_filters_are_the_output_channels_and_are_invertible():
    for layer in LAYERS.values():
        weight = describe(layer)
        channel = torch.empty(weight.shape)
        for index in itertools.product(*map(range, weight.shape)):
            channel[index] = output_channel(weight, index)
        rows = weight.filters(channel)
        assert torch.equal(rows, torch.arange(weight.outputs).float()[:, None].expand_as(rows))
        assert torch.equal(weight.from_filters(weight.filters(layer.weight)), layer.weight)


def test_affine_by_hand():
    weight, k = torch.tensor([2.0, 2.0]), torch.tensor([3.0, 5.0, 7.0, 11.0])
    assert affine(weight, torch.tensor([False, True]), k).tolist() == [11.0, 40.0]


def slow_scaled_by_r(made: Masked, tensor: torch.Tensor) -> torch.Tensor:
    """W~ with k2 scaled by R, one output channel at a time, as documented in `Masked.scale_k2_by_r`."""
    k = dict(zip(made.rule.k_rows, made.k.detach(), strict=True))
    out = torch.empty_like(tensor)
    for channel in range(len(tensor)):
        rows = slice(channel, channel + 1) if made.rule.per_channel else slice(None)
        one = (lambda value: value[channel]) if made.rule.per_channel else (lambda value: value)  # noqa: B023
        size = made.scores.detach()[rows].abs().mean() * torch.exp(PACE * one(k[2]))
        mask = (made.scores.detach()[channel] >= 0).float()
        kept = tensor[channel] * (one(k[0]) if 0 in k else 1) + one(k[3]) * tensor[channel] * mask
        out[channel] = kept + one(made.k1.detach()) + size * (2 * mask - 1)
    return out


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("k", [LEARNED, (1.0, "learn", "learn", "learn")])
def test_k2_scaled_by_r(k, per):
    layer = nn.Conv2d(30, 40, 3)
    weight, tensor = describe(layer), layer.weight.detach()
    made = fresh(weight, tensor, k, per=per)
    made.scale_k2_by_r(1e-3, torch.Generator().manual_seed(0))
    assert 0.45 < made.mask().float().mean() < 0.55
    assert torch.allclose(made(tensor), slow_scaled_by_r(made, tensor), atol=1e-7)
    assert torch.allclose((made(tensor).detach() - tensor).abs().mean(), torch.tensor(5e-4), rtol=0.05)
    rng = torch.Generator().manual_seed(1)
    for parameter in (made.scores, made.k, made.k1):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=rng)
    learned = made(tensor).detach()
    assert torch.allclose(learned, slow_scaled_by_r(made, tensor), atol=1e-6)
    made.scale_k2_by_r(0.5, torch.Generator().manual_seed(1))  # no effect after training
    assert torch.equal(made(tensor), learned)
    made.freeze()
    assert made.k1 is None
    assert torch.equal(made(tensor), learned)


@pytest.mark.parametrize("per", PER)
def test_gradients_with_k2_scaled_by_r(per):
    """Gradients to k and k1 match autograd of the slow form; that to R is that to M divided by k2."""
    layer = nn.Conv2d(3, 4, 3)
    tensor, rng = layer.weight.detach(), torch.Generator().manual_seed(2)
    made = fresh(describe(layer), tensor, LEARNED, per=per)
    made.scale_k2_by_r(1e-3, rng)
    made.k.data += 0.1 * torch.randn(made.k.shape, generator=rng)
    upstream = torch.randn(tensor.shape, generator=rng)
    made(tensor).backward(upstream)
    k0, kappa, k3 = (row.clone().requires_grad_() for row in made.k.detach())
    k1 = made.k1.detach().clone().requires_grad_()
    wide = (-1, 1, 1, 1) if per == "channel" else ()
    size = made.scores.detach().abs().mean((1, 2, 3) if per == "channel" else None)
    mask = made.mask().float()
    slow = k0.view(wide) * tensor + k3.view(wide) * tensor * mask + k1.view(wide)
    slow = slow + (size * torch.exp(PACE * kappa)).view(wide) * (2 * mask - 1)
    slow.backward(upstream)
    for mine, theirs in zip(made.k.grad, (k0.grad, kappa.grad, k3.grad), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert torch.allclose(made.k1.grad, k1.grad, rtol=1e-4, atol=1e-6)
    k2 = 2 * (size * torch.exp(PACE * kappa.detach())).view(wide)
    assert torch.allclose(made.scores.grad, upstream * (1 + k3.detach().view(wide) * tensor / k2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [3, 130])  # plain PyTorch, and the compiled loops
def test_hardness_interpolates_between_w_plus_r_and_the_mask(channels, layout):
    """In training, W~ and its gradients are interpolated; in evaluation, W~ is always the mask's."""
    layer = nn.Conv2d(channels, 16, 3)
    tensor, rng = layer.weight.detach(), torch.Generator().manual_seed(2)
    made = fresh(describe(layer), tensor, LEARNED, per="channel")
    made.scale_k2_by_r(1e-2, rng)
    made.k.data += 0.1 * torch.randn(made.k.shape, generator=rng)
    made.channels_last = layout == torch.channels_last
    upstream = torch.randn(tensor.shape, generator=rng).contiguous(memory_format=layout)
    (hard := made(tensor)).backward(upstream)
    grads = {name: parameter.grad for name, parameter in made.named_parameters()}
    for hardness in (0.0, 0.3, 1.0):
        made.hardness = hardness
        made.zero_grad()
        (found := made.train()(tensor)).backward(upstream)
        soft = tensor + made.scores.detach()
        assert torch.allclose(found, hardness * hard + (1 - hardness) * soft, atol=1e-6)
        for name, parameter in made.named_parameters():
            direct = upstream if name == "scores" else 0.0
            wanted = hardness * grads[name] + (1 - hardness) * direct
            assert torch.allclose(parameter.grad, torch.as_tensor(wanted), rtol=1e-4, atol=1e-6), name
        assert torch.equal(made.eval()(tensor), hard)
    made.train().freeze()
    assert torch.equal(made(tensor), hard)


class NoSync(TorchDispatchMode):
    """Counts operations, and fails on those that would synchronise the host with its device."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        assert function.overloadpacket not in (aten._local_scalar_dense, aten.lift_fresh, aten.nonzero, aten.equal)
        found = function(*args, **(kwargs or {}))
        self.kernels += isinstance(found, torch.Tensor) and found.numel() > 1000 and not function.is_view
        return found


@pytest.mark.parametrize("per", PER)
def test_other_devices_never_synchronise_and_launch_few_kernels(per, monkeypatch):
    """Run the code for other devices on the CPU: no NumPy, no compiled loops."""
    monkeypatch.setattr(bits, "_on_cpu", lambda tensor: False)
    monkeypatch.setattr(kernels, "loops", lambda: None)
    layer = nn.Conv2d(30, 40, 3)
    tensor = layer.weight.detach()
    made = fresh(describe(layer), tensor, LEARNED, per=per)
    made.scale_k2_by_r(1e-3, torch.Generator().manual_seed(0))
    with NoSync() as learning:
        learned = made(tensor)
    assert learning.kernels <= 8
    with NoSync():
        learned.sum().backward()
        made.freeze()
        with NoSync() as frozen:
            found = made(tensor)
    assert frozen.kernels <= 8
    assert torch.equal(found, learned)


@pytest.mark.parametrize("k", [(0.0, "learn", 0.0, 1.0), (1.0, 0.0, "learn", 0.0), (0.0, 0.0, 0.0, 1.0)])
def test_k2_is_scaled_only_if_k1_and_k2_are_learned(k):
    layer = nn.Conv2d(3, 4, 3)
    made = fresh(describe(layer), layer.weight.detach(), k)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    made.scale_k2_by_r(1e-3, torch.Generator().manual_seed(0))
    assert not made.k2_scaled_by_r
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
