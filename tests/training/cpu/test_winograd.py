"""Winograd convolutions: each transform against its matrix, the result against PyTorch in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from bitgraft.training.cpu import tile_loops as loops
from bitgraft.training.cpu import winograd

pytestmark = pytest.mark.usefixtures("threads")
SIZES = st.tuples(st.integers(4, 11), st.integers(4, 11))
PADDINGS = st.tuples(st.integers(0, 2), st.integers(0, 2))


def channels_last(*shape: int) -> torch.Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def windows(maps: torch.Tensor, window: int, padding: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
    """(tiles, window, window, channels), the slow reference."""
    cut, (down, across) = [], winograd._grid(size)
    far = F.pad(maps, (padding[1], window + 4, padding[0], window + 4))
    for one in far:
        for i in range(down):
            for j in range(across):
                cut.append(one[:, 4 * i : 4 * i + window, 4 * j : 4 * j + window].permute(1, 2, 0))
    return torch.stack(cut)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 3), st.sampled_from([16, 32, 48]), SIZES, PADDINGS)
def test_tiles_are_the_matrix_times_each_window_times_the_matrix(maps, channels, size, padding):
    torch.manual_seed(0)
    outputs = (size[0] + 2 * padding[0] - 2, size[1] + 2 * padding[1] - 2)
    for kind, matrix, pad in [("inputs", loops._INPUTS, padding), ("outputs", loops._OUTPUTS, (0, 0))]:
        given = channels_last(maps, channels, *(size if kind == "inputs" else outputs))
        found = winograd._to_tiles(kind, given, outputs, pad)
        m = torch.from_numpy(matrix)
        expected = torch.einsum("ri,tijc,sj->rstc", m, windows(given, matrix.shape[1], pad, outputs), m).flatten(0, 1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    kernel = channels_last(maps, channels, 3, 3)
    g = torch.from_numpy(loops._FILTERS)
    expected = torch.einsum("ri,ocij,sj->rsoc", g, kernel, g).flatten(0, 1)
    torch.testing.assert_close(winograd._to_tiles("filters", kernel), expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 3), st.sampled_from([16, 32, 48]), SIZES, PADDINGS)
def test_from_tiles_is_the_transpose_of_to_tiles(maps, channels, size, padding):
    """<S x, t> = <x, S' t>, and previous values of the output do not matter."""
    torch.manual_seed(0)
    outputs = (size[0] + 2 * padding[0] - 2, size[1] + 2 * padding[1] - 2)
    cases = [
        ("inputs", size, outputs, padding),
        ("outputs", outputs, outputs, (0, 0)),
        ("filters", (3, 3), (1, 1), (0, 0)),
    ]
    for kind, shape, whole, pad in cases:
        x = channels_last(maps, channels, *shape)
        tiles = winograd._to_tiles(kind, x, whole, pad)
        t = torch.randn_like(tiles)
        out = torch.full_like(x, float("nan"))
        back = winograd._from_tiles(kind, t, out, whole, pad)
        assert back is out
        one, other = (tiles.double() * t.double()).sum(), (x.double() * back.double()).sum()
        assert abs(one - other) < 1e-4 * float(tiles.double().norm() * t.double().norm())


@settings(deadline=None, max_examples=20)
@given(
    st.integers(1, 5),
    st.sampled_from([16, 32, 48]),
    st.sampled_from([16, 64]),
    st.tuples(st.integers(4, 13), st.integers(4, 13)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.sampled_from([torch.contiguous_format, torch.channels_last]),
    st.booleans(),
)
def test_convolutions_and_their_gradients_are_those_of_pytorch(n, inputs, outputs, size, padding, layout, in_chunks):
    torch.manual_seed(0)
    x = torch.randn(n, inputs, *size).contiguous(memory_format=layout)
    weight = (torch.randn(outputs, inputs, 3, 3) / 20).contiguous(memory_format=layout)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    y = F.conv2d(*exact, padding=padding)
    grad = torch.randn(y.shape).contiguous(memory_format=layout)
    y.backward(grad.double())
    with pytest.MonkeyPatch.context() as patch:
        if in_chunks:
            patch.setattr(winograd, "CHUNK_BYTES", 1 << 17)
        found = winograd.convolve(x, weight, y.shape[2:], padding)
        to_x, to_weight = winograd.gradients(x, grad, weight, padding)
        none, same = winograd.gradients(x, grad, weight, padding, needs_grad_x=False)
    assert none is None
    assert torch.equal(same, to_weight)
    for one, other in [(found, y.detach()), (to_x, exact[0].grad), (to_weight, exact[1].grad)]:
        assert one.shape == other.shape
        assert float((one - other).abs().max()) < 5e-5 * float(other.abs().max())


@pytest.mark.parametrize("odd", ["nan", "inf", "-inf"])
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 8), st.integers(0, 8))
def test_values_that_are_not_finite_propagate_as_in_a_plain_convolution(odd, row, column):
    """To the output and to both gradients."""
    torch.manual_seed(0)
    maps, kernel = channels_last(1, 32, 9, 9), channels_last(32, 32, 3, 3)
    for place in ("x", "grad", "weight"):
        x, grad, weight = maps.clone(), maps.clone() + 1, kernel.clone()
        {"x": x, "grad": grad, "weight": weight}[place][0, 3, row % 3, column % 3] = float(odd)
        if place != "weight":
            {"x": x, "grad": grad}[place][0, 5, row, column] = float(odd)
        exact = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = F.conv2d(*exact, padding=1)
        y.backward(grad)
        found = winograd.convolve(x, weight, (9, 9), (1, 1)), *winograd.gradients(x, grad, weight, (1, 1))
        for one, other in zip(found, (y, exact[0].grad, exact[1].grad), strict=True):
            assert bool((one.isfinite() <= other.isfinite()).all())


def test_values_that_are_not_finite_stay_in_their_tiles():
    x, weight = channels_last(1, 16, 9, 9), channels_last(16, 16, 3, 3)
    x[0, 3, 4, 4] = float("nan")
    assert bool(winograd.convolve(x, weight, (9, 9), (1, 1))[0, :, 8].isfinite().all())


def test_chunks_cover_all_maps_and_have_similar_sizes():
    for n, room in [(32, 1 << 22), (5, 1 << 10), (7, 1 << 18)]:  # bytes in all
        x = torch.empty(n, 64, 16, 16)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(winograd, "CHUNK_BYTES", room // torch.get_num_threads())
            sizes = [len(x[some]) for some in winograd._chunks(x, x)]
        assert sum(sizes) == n
        assert max(sizes) - min(sizes) < len(sizes) + 1
        assert max(sizes) <= 1 + room // (4 * 36 * 16 * 64)


def test_matrices_give_a_convolution():
    """A'[(G w) ∘ (B' x)] of a row, in exact arithmetic, is its convolution."""
    x, w = np.array([3, 1, 4, 1, 5, 9.0]), np.array([2, 7, 1.0])
    products = (np.round(loops._FILTERS.astype(float) * 24) / 24 @ w) * (loops._INPUTS.astype(float) @ x)
    np.testing.assert_allclose(loops._OUTPUTS.T @ products, [x[i : i + 3] @ w for i in range(4)])
