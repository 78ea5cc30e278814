"""Convolutions on small maps learn from the very gradients that PyTorch's own convolution gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from bitgraft.training.smallmaps import SmallMaps, _SmallMap


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
    with SmallMaps():
        z, found, name = gradients(x, weight, bias, **how)
    torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)
    pixels = 256 if kernel == (1, 1) else 16
    assert (name == "_SmallMapBackward") == (y[0, 0].numel() <= (pixels if dense else kernel[0] * kernel[1]))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_convolutions_in_groups_and_large_maps_are_left_alone():
    x, weight = torch.randn(2, 4, 2, 2), torch.randn(4, 2, 3, 3)
    large, dense = torch.randn(2, 4, 7, 7), torch.randn(4, 4, 3, 3)
    with SmallMaps():
        _, _, grouped = gradients(x, weight, None, padding=1, groups=2)
        _, _, wide = gradients(large, dense, None)
    assert "_SmallMapBackward" not in (grouped, wide)


def test_half_precision_autocast_and_frozen_kernels_are_left_alone(monkeypatch):
    monkeypatch.setattr(_SmallMap, "apply", lambda *args: pytest.fail("taken"))
    layer, x = nn.Conv2d(4, 4, 3, padding=1, groups=4), torch.randn(2, 4, 2, 2)
    with SmallMaps():
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
        layer.to(torch.bfloat16)(x.to(torch.bfloat16))
        layer.float().requires_grad_(False)(x)
        with torch.no_grad():
            layer.requires_grad_()(x)
        F.conv2d(x, layer.weight, padding="same", groups=4)


def test_the_layer_as_modules_call_it():
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 6, 5, padding=2, stride=2, groups=6)
    x = torch.randn(3, 6, 4, 4, requires_grad=True)
    layer(x).square().sum().backward()
    expected = [x.grad.clone(), layer.weight.grad.clone(), layer.bias.grad.clone()]
    x.grad = layer.weight.grad = layer.bias.grad = None
    with SmallMaps():
        y = layer(x)
    assert type(y.grad_fn).__name__ == "_SmallMapBackward"
    y.square().sum().backward()
    for one, other in zip([x.grad, layer.weight.grad, layer.bias.grad], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
