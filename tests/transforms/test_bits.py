import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitgraft.transforms import bits

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


def random_mask(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


@settings(deadline=None)
@given(SHAPES, st.integers(0, 2**32))
def test_packing_uses_numpys_little_bit_order_and_is_invertible(shape, seed):
    mask = random_mask(shape, seed)
    packed = bits.pack(mask)
    assert packed.dtype == torch.uint8
    assert packed.numpy().tobytes() == np.packbits(mask.numpy().reshape(-1), bitorder="little").tobytes()
    back = bits.unpack(packed, mask.shape)
    assert back.dtype == torch.bool
    assert torch.equal(back, mask)
    assert packed.numel() == bits.packed_size(mask.numel())
    assert bits.ones(packed) == int(mask.numpy().sum())


@settings(deadline=None)
@given(SHAPES, st.sampled_from([0.0, 3e38, torch.inf, -torch.inf, torch.nan]), st.integers(0, 2**32))
def test_is_finite_equals_isfinite_for_every_value_and_place(shape, odd, seed):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if values.numel():
        values.view(-1)[seed % values.numel()] = odd
    assert bool(bits.is_finite(values)) == bool(values.isfinite().all())


def test_the_lowest_bit_comes_first_and_the_padding_is_zero():
    mask = torch.tensor([[True, False, False], [False, False, False], [False, False, True], [True, False, False]])
    assert bits.pack(mask).tolist() == [0b00000001, 0b00000011]


def test_packing_is_row_major_whatever_the_memory_format():
    mask = random_mask((3, 5, 2, 4), seed=0)
    assert torch.equal(bits.pack(mask.to(memory_format=torch.channels_last)), bits.pack(mask))


def test_a_score_equal_to_the_threshold_gives_one():
    scores = torch.tensor([-0.1, 0.0, 0.1, 0.2])
    assert bits.threshold(scores, 0.0).tolist() == [False, True, True, True]
    assert bits.threshold(scores, 0.1).tolist() == [False, False, True, True]


@pytest.mark.parametrize("at", [0.0, 0.3, -2.0])
@pytest.mark.parametrize("surrogate", ["identity", "sigmoid"])
def test_the_gradient_has_the_slope_of_the_surrogate(surrogate, at):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(50, dtype=torch.float64, generator=generator)
    grad = torch.randn(50, dtype=torch.float64, generator=generator)
    soft = {"identity": lambda r: r, "sigmoid": lambda r: 1 / (1 + torch.exp(-r))}[surrogate]
    step = 1e-6
    slope = (soft(scores - at + step) - soft(scores - at - step)) / (2 * step)
    torch.testing.assert_close(bits.surrogate_grad(grad, scores, at, surrogate), grad * slope)


def test_other_devices_pack_to_the_same_bits(monkeypatch):
    """Run the code for other devices on the CPU."""
    shapes = [(0,), (1,), (7, 3), (2, 3, 4, 5)]
    made = [random_mask(shape, seed) for seed, shape in enumerate(shapes)]
    packed = [bits.pack(mask) for mask in made]
    monkeypatch.setattr(bits, "_on_cpu", lambda tensor: False)
    for mask, held in zip(made, packed, strict=True):
        assert torch.equal(bits.pack(mask), held)
        assert torch.equal(bits.unpack(held, mask.shape), mask)
        assert bits.ones(held) == int(mask.sum())
