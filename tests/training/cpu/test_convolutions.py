"""Every algorithm for a trained convolution gives the gradients of PyTorch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from bitgraft.training.cpu import fast_convolutions, products, winograd
from bitgraft.training.cpu.convolutions import Convolutions, _Convolution
from bitgraft.transforms import kernels


def gradients(x, weight, bias, **kwargs):
    x, weight, bias = (None if t is None else t.clone().requires_grad_() for t in (x, weight, bias))
    y = F.conv2d(x, weight, bias, **kwargs)
    assert y.grad_fn is not None
    y.square().sum().backward()
    return y.detach(), [t.grad for t in (x, weight, bias) if t is not None], type(y.grad_fn).__name__


@settings(deadline=None)
@given(
    st.integers(1, 3),
    st.integers(2, 5),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.contiguous_format, torch.channels_last]),
)
def test_gradients_are_those_of_the_plain_convolution(
    n, c, size, kernel, stride, padding, dilation, dense, biased, layout
):
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if any(s + 2 * p < r for s, p, r in zip(size, padding, reach, strict=True)):
        return
    torch.manual_seed(0)
    x = torch.randn(n, c, *size).contiguous(memory_format=layout)
    outputs, groups = (3, 1) if dense else (c, c)
    weight, bias = torch.randn(outputs, c // groups, *kernel), torch.randn(outputs) if biased else None
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    y, expected, _ = gradients(x, weight, bias, **how)
    with Convolutions():
        z, found, name = gradients(x, weight, bias, **how)
    torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)
    pixels, learned = y[0, 0].numel(), 256 if kernel == (1, 1) else 16
    product = dense and kernel == stride == (1, 1) and padding == (0, 0) and pixels <= 4
    taken = pixels <= (learned if dense else kernel[0] * kernel[1])
    assert name == ("PermuteBackward0" if product else "_ConvolutionBackward" if taken else "ConvolutionBackward0")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_convolutions_in_groups_and_large_maps_are_left_alone():
    x, weight = torch.randn(2, 4, 2, 2), torch.randn(4, 2, 3, 3)
    large, dense = torch.randn(2, 4, 7, 7), torch.randn(4, 4, 3, 3)
    with Convolutions():
        _, _, grouped = gradients(x, weight, None, padding=1, groups=2)
        _, _, wide = gradients(large, dense, None)
    assert "_ConvolutionBackward" not in (grouped, wide)


def test_half_precision_autocast_and_frozen_kernels_are_left_alone(monkeypatch):
    monkeypatch.setattr(_Convolution, "apply", lambda *args: pytest.fail("taken"))
    layer, x = nn.Conv2d(4, 4, 3, padding=1, groups=4), torch.randn(2, 4, 2, 2)
    with Convolutions():
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
        layer.to(torch.bfloat16)(x.to(torch.bfloat16))
        layer.float().requires_grad_(False)(x)
        with torch.no_grad():
            layer.requires_grad_()(x)
        F.conv2d(x, layer.weight, padding="same", groups=4)


def test_a_layer_that_calls_conv2d():
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 6, 5, padding=2, stride=2, groups=6)
    x = torch.randn(3, 6, 4, 4, requires_grad=True)
    layer(x).square().sum().backward()
    expected = [x.grad.clone(), layer.weight.grad.clone(), layer.bias.grad.clone()]
    x.grad = layer.weight.grad = layer.bias.grad = None
    with Convolutions():
        y = layer(x)
    assert type(y.grad_fn).__name__ == "_ConvolutionBackward"
    y.square().sum().backward()
    for one, other in zip([x.grad, layer.weight.grad, layer.bias.grad], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def recorded(monkeypatch) -> list[str]:
    """The names of our functions, as they are called."""
    calls = []
    functions = [(products, name, name) for name in ("convolve", "input_gradient", "weight_gradient")]
    functions += [(winograd, name, f"tiles.{name}") for name in ("convolve", "gradients")]
    for module, name, label in functions:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real, label=label: calls.append(label) or real(*args))
    return calls


@pytest.mark.parametrize(
    ("x", "weight", "how", "expected_calls"),
    [
        ((32, 32, 4, 4), (32, 32, 3, 3), {"padding": 1}, ["tiles.convolve", "tiles.gradients"]),
        ((16, 48, 9, 6), (32, 48, 3, 3), {}, ["tiles.convolve", "tiles.gradients"]),
        ((15, 48, 9, 6), (32, 48, 3, 3), {}, []),  # too few tiles
        ((32, 32, 4, 4), (16, 32, 3, 3), {"padding": 1}, ["weight_gradient"]),  # narrow
        ((32, 40, 8, 8), (32, 40, 3, 3), {"padding": 1}, []),  # channels not a multiple of 16
        ((32, 32, 8, 8), (32, 32, 3, 3), {"padding": 1, "dilation": 2}, []),
        ((32, 32, 8, 8), (32, 32, 3, 3), {"padding": 1, "stride": 2}, ["weight_gradient"]),
        ((32, 32, 8, 8), (32, 32, 5, 5), {"padding": 2}, []),
        ((2, 512, 8, 8), (256, 512, 1, 1), {}, []),  # one product, left to PyTorch
        ((2, 512, 8, 8), (256, 512, 1, 1), {"stride": 2}, ["convolve", "input_gradient", "weight_gradient"]),
        ((2, 64, 8, 8), (64, 64, 1, 1), {}, ["weight_gradient"]),
        ((2, 64, 4, 4), (64, 64, 1, 1), {}, ["input_gradient", "weight_gradient"]),
    ],
)
def test_which_algorithm_a_convolution_uses(monkeypatch, x, weight, how, expected_calls):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(x), torch.randn(weight) / 20, torch.randn(weight[0])
    y, expected, _ = gradients(x, weight, bias, **how)
    calls = recorded(monkeypatch)
    with Convolutions():
        z, found, _ = gradients(x, weight, bias, **how)
    assert calls == expected_calls
    for one, other in zip([z, *found], [y, *expected], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_without_compiled_loops_there_are_no_tiles(monkeypatch):
    monkeypatch.setattr(kernels, "loops", lambda module: None)
    calls = recorded(monkeypatch)
    with Convolutions():
        _, _, name = gradients(torch.randn(32, 32, 8, 8), torch.randn(32, 32, 3, 3), None, padding=1)
    assert name == "ConvolutionBackward0"
    assert not calls


@pytest.mark.parametrize(("switch", "name"), [("on", "_ConvolutionBackward"), ("off", "ConvolutionBackward0")])
def test_a_switch_leaves_convolutions_to_pytorch(monkeypatch, switch, name):
    monkeypatch.setenv("BITGRAFT_KERNELS", switch)
    with fast_convolutions(torch.device("cpu")):
        assert gradients(torch.randn(2, 4, 2, 2), torch.randn(4, 4, 3, 3), None, padding=1)[2] == name
