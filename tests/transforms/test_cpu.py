"""The compiled loops against the same thing in plain PyTorch, to the last bit."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bitgraft.methods.masked import MaskOptions
from bitgraft.transforms import cpu
from bitgraft.transforms.affine import AtRest, MaskRule, affine, from_bits, one_by_one
from bitgraft.transforms.bits import pack
from bitgraft.transforms.cpu import Packed, Scored
from bitgraft.transforms.masked import Masked, Weight

ODD = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-38, 3e38])


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Take tensors of any size, in pieces so short that weights of a few elements have several."""
    monkeypatch.setattr(cpu, "SMALL", 0)
    monkeypatch.setattr(cpu, "PIECE", 37)
    cpu._pieces.cache_clear()
    cpu._places.cache_clear()
    yield
    cpu._pieces.cache_clear()
    cpu._places.cache_clear()


def draw(seed: int, rows: int, length: int, odd: bool) -> tuple[torch.Tensor, ...]:
    """A weight, scores, a gradient and k for its rows."""
    rng = torch.Generator().manual_seed(seed)
    weight, scores, grad = torch.randn(3, rows, length, generator=rng).unbind()
    k = torch.randn(4, rows, generator=rng)
    if odd:
        places = torch.randint(0, rows * length, (3, len(ODD)), generator=rng)
        for tensor, some in zip((weight, scores, grad), places, strict=True):
            tensor.view(-1)[some] = ODD
    return weight, scores, grad, k


def forward(scores, at, weight, k, channels_last=False):
    return cpu.forward([Scored(weight, scores, at, k, channels_last)])[0]


def backward(grad, scores, at, weight, k):
    return cpu.backward(grad, Scored(weight, scores, at, k))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    nan = one.isnan()
    assert torch.equal(nan, other.isnan())
    assert torch.equal(one.contiguous().view(torch.int32)[~nan], other.contiguous().view(torch.int32)[~nan])


SIZES = (st.integers(0, 2**20), st.integers(1, 5), st.integers(1, 300), st.booleans())


@settings(deadline=None, max_examples=60)
@given(*SIZES, st.floats(-1, 1, width=32))
def test_w_is_the_references_to_the_last_bit_from_scores_and_from_bits(seed, rows, length, odd, at):
    weight, scores, _, k = draw(seed, rows, length, odd)
    mask = scores >= at
    expected = affine(weight, mask, k.view(4, rows, 1))
    same_bits(forward(scores, at, weight, k), expected)
    same_bits(cpu.switch([Packed(weight, pack(mask), k)])[0], expected)
    layer = affine(weight, mask, k[:, 0])
    same_bits(forward(scores, at, weight, k[:, 0]), layer)
    same_bits(cpu.switch([Packed(weight, pack(mask), k[:, 0])])[0], layer)


@settings(deadline=None, max_examples=60)
@given(*SIZES, st.floats(-1, 1, width=32))
def test_the_gradient_to_m_is_the_references_to_the_last_bit_and_sums_are_exact_enough(seed, rows, length, odd, at):
    weight, scores, grad, k = draw(seed, rows, length, odd)
    to_mask, sums = backward(grad, scores, at, weight, k)
    same_bits(to_mask, (weight * k[3][:, None] + k[2][:, None]) * grad)
    g, w, m = grad.double(), weight.double(), (scores >= at).double()
    exact = torch.stack([(g * w).sum(1), g.sum(1), (g * m).sum(1), (g * w * m).sum(1)])
    if not odd:
        torch.testing.assert_close(sums.double(), exact, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**20),
    st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 4), st.integers(1, 4)),
    st.booleans(),
    st.booleans(),
)
def test_with_the_channels_innermost_there_is_the_same(seed, shape, per_row, odd):
    filters, *rest = shape
    weight, scores, grad, k = draw(seed, filters, int(np.prod(rest)), odd)
    weight, scores, grad = (t.view(shape) for t in (weight, scores, grad))
    k = k if per_row else k[:, 0].clone()
    plain = forward(scores, 0.1, weight, k)
    transposed = forward(scores, 0.1, weight, k, channels_last=True)
    assert transposed.is_contiguous(memory_format=torch.channels_last)
    same_bits(transposed, plain)
    laid_out = grad.contiguous(memory_format=torch.channels_last)
    to_mask, sums = backward(laid_out, scores, 0.1, weight, k)
    expected, expected_sums = backward(grad, scores, 0.1, weight, k)
    assert to_mask.stride() == scores.stride()
    same_bits(to_mask, expected)
    if not odd:
        torch.testing.assert_close(sums, expected_sums, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("threads")
def test_results_do_not_depend_on_threads():
    weight, scores, grad, k = draw(1, 3, 5000, False)
    to_mask, sums = backward(grad, scores, 0.1, weight, k)
    mask = scores >= 0.1
    assert torch.equal(cpu.switch([Packed(weight, pack(mask), k)])[0], affine(weight, mask, k.view(4, 3, 1)))
    assert torch.equal(forward(scores, 0.1, weight, k), affine(weight, mask, k.view(4, 3, 1)))
    assert torch.equal(to_mask, (weight * k[3][:, None] + k[2][:, None]) * grad)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(sums, backward(grad, scores, 0.1, weight, k)[1])
    torch.set_num_threads(before)


def test_bits_that_lie_anywhere_in_memory_are_read_alike():
    weight, scores, _, k = draw(2, 1, 1000, False)
    packed = pack(scores >= 0)
    for offset in range(4):
        room = torch.zeros(packed.numel() + 4, dtype=torch.uint8)
        moved = room[offset : offset + packed.numel()].copy_(packed)
        assert torch.equal(cpu.switch([Packed(weight, moved, k[:, 0])])[0], affine(weight, scores >= 0, k[:, 0]))


@pytest.mark.usefixtures("threads")
def test_a_prepared_switch_can_be_called_again_in_memory_that_others_have_used():
    weight, scores, _, k = draw(3, 3, 40_000, False)
    prepared = cpu.Switch(Packed(weight, pack(scores >= 0), k, torch.empty_like(weight)))
    expected = affine(weight, scores >= 0, k.view(4, 3, 1))
    for _ in range(2):
        room = prepared()
        assert torch.equal(room, expected)
        room.fill_(float("nan"))


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 70), st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_many_weights_in_one_call_are_as_one_by_one(sizes):
    """With one k for a layer or for each row, some into memory that is given, some laid out as no loop takes it."""
    held, rooms = [], []
    for seed, (rows, length, by_row, in_order) in enumerate(sizes):
        weight, scores, _, k = draw(seed, rows, length, False)
        weight = weight.reshape(rows, length)
        weight = weight if in_order else weight.t().contiguous().t()
        k, channel = (k, (rows, 1)) if by_row else (k[:, 0].contiguous(), ())
        rooms.append(torch.empty_like(weight) if seed % 2 else None)
        mask = Packed(weight, pack(scores.reshape(rows, length) >= 0), k, rooms[-1])
        held.append(AtRest(mask, weight.shape, channel))
    for one, room, call, found in zip(held, rooms, one_by_one(held), from_bits(held), strict=True):
        assert torch.equal(found, one.plain())
        assert torch.equal(found, from_bits([one])[0])
        assert torch.equal(found, call())
        assert room is None or not one.mask.weight.is_contiguous() or found.data_ptr() == room.data_ptr()


@settings(deadline=None, max_examples=20)
@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 3), st.booleans(), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_many_masks_that_learn_are_in_one_call_as_one_by_one(sizes):
    """Each with its own threshold, one k for a layer or for each filter, some transposed on the way."""
    masks = []
    for seed, (rows, inputs, edge, by_row, channels_last) in enumerate(sizes):
        weight, scores, _, k = draw(seed, rows, inputs * edge * edge, True)
        shape = (rows, inputs, edge, edge)
        k = k if by_row else k[:, 0].contiguous()
        masks.append(Scored(weight.view(shape), scores.view(shape), seed / 10, k, channels_last))
    for mask, found in zip(masks, cpu.forward(masks), strict=True):
        expected = affine(mask.weight, mask.scores >= mask.threshold, mask.k.view(4, -1, 1, 1, 1))
        same_bits(found.contiguous(), expected.contiguous())
        same_bits(found, cpu.forward([mask])[0])
        assert not mask.channels_last or found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(8, 1, 3, 3), (6, 4, 1, 1), (6, 4, 3, 3)])
def test_masks_that_learn_are_laid_out_alike_either_way(shape, monkeypatch):
    """Convolutions look at strides that mean nothing, of dimensions of size 1, and round otherwise."""
    rule = MaskRule((None,) * 4, 0.0, "identity", False)
    mask = Masked(Weight("w", torch.Size(shape), "conv", 1), rule, torch.randn(shape))
    mask.channels_last = True
    one = mask(torch.randn(shape))
    monkeypatch.setattr(cpu, "native", lambda: None)
    monkeypatch.setattr(cpu, "worth_a_call", lambda weights: False)
    assert mask(torch.randn(shape)).stride() == one.stride()


LAYERS = [nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 3, groups=2), nn.Linear(7, 5), nn.ConvTranspose2d(4, 6, 3, groups=2)]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: str(layer))
@pytest.mark.parametrize("per", ["layer", "channel"])
@pytest.mark.parametrize("surrogate", ["identity", "sigmoid"])
@pytest.mark.parametrize(
    "k", [("learn",) * 4, (1.0, "learn", "learn", 0.0), (0.0, 0.0, 0.0, 1.0), (1.0, 0.5, "learn", 2.0)]
)
@pytest.mark.parametrize("k2_scaled_by_r", [False, True])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_layer_learns_the_same_with_and_without_the_compiled_loops(
    layer, per, surrogate, k, k2_scaled_by_r, memory, channels_last, monkeypatch
):
    tensor = layer.weight.detach()
    tensor = tensor.to(memory_format=memory) if tensor.dim() == 4 else tensor
    options = MaskOptions(*[True, ()], *k, per=per, surrogate=surrogate, threshold=0.25)
    kind = "transposed" if isinstance(layer, nn.ConvTranspose2d) else "linear" if tensor.dim() == 2 else "conv"
    weight = Weight("w", tensor.shape, kind, getattr(layer, "groups", 1))
    upstream = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(4))
    results = []
    for fast in (True, False):
        monkeypatch.setattr(cpu, "SMALL", 0 if fast else 1 << 40)
        made = build(weight, options.rule(weight), tensor, k2_scaled_by_r)
        made.channels_last = channels_last
        learning = made(tensor)
        if channels_last and kind == "conv":
            assert learning.is_contiguous(memory_format=torch.channels_last)
        elif not channels_last:
            assert learning.stride() == tensor.stride()
        learning.backward(upstream)
        gradients = [p.grad for p in (made.k, made.k1) if p is not None]
        scores = made.scores.grad
        made.freeze()
        assert torch.equal(made(tensor), learning)
        results.append((learning.detach(), scores, gradients))
    (w, r, ks), (slow_w, slow_r, slow_ks) = results
    same_bits(w, slow_w)
    same_bits(r, slow_r)
    for one, other in zip(ks, slow_ks, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def build(weight: Weight, rule: MaskRule, tensor: torch.Tensor, k2_scaled_by_r: bool) -> Masked:
    rng = torch.Generator().manual_seed(3)
    made = Masked(weight, rule, torch.empty_like(tensor).copy_(torch.randn(tensor.shape, generator=rng)))
    made.k2_scaled_by_r = k2_scaled_by_r and rule.fixed[1] is rule.fixed[2] is None  # as `scale_k2_by_r` has it
    for parameter in (made.k, made.k1):
        if parameter is not None:
            parameter.data = torch.randn(parameter.shape, generator=rng)
    return made


def test_what_the_loops_do_not_take():
    good = torch.zeros(64, 64)
    assert cpu.takes(good, good)
    assert cpu.is_large(good)
    for bad in (good.double(), good.half(), good[:, ::2], good.t(), good.expand(2, 64, 64), good.to("meta")):
        assert not cpu.takes(good, bad) or not cpu.takes(bad)
    assert not cpu.takes(good[:, ::2])


def test_without_numba_the_reference_runs(monkeypatch):
    monkeypatch.setattr(cpu, "native", lambda: None)
    assert not cpu.is_large(torch.zeros(64, 64))


FORKED = """
import os, torch
from bitgraft.transforms import cpu
from bitgraft.transforms.cpu import Packed
torch.set_num_threads(2)
weight, maps, bits = torch.randn(1 << 18), torch.randn(1, 4), torch.full((1 << 15,), 85, dtype=torch.uint8)
here = cpu.switch([Packed(weight, bits, maps)])[0]
child = os.fork()
if child == 0:
    again = cpu.switch([Packed(weight, bits, maps)])[0]  # PyTorch itself would wait for its threads for ever
    os._exit(0 if (again.numpy() == here.numpy()).all() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


SMALL = """
import sys, torch
from bitgraft.transforms import cpu
from bitgraft.transforms.affine import AtRest, from_bits
from bitgraft.transforms.cpu import Packed, Scored
weight = torch.randn(64, 64)
bits, k = torch.full((512,), 85, dtype=torch.uint8), torch.tensor([1.0, 0.5, 0.25, 2.0])
held = AtRest(Packed(weight, bits, k), weight.shape)
plain = from_bits([held])[0]
assert "numba" not in sys.modules and torch.equal(plain, held.plain())
assert cpu.native() is not None and cpu.worth_a_call([weight])
assert torch.equal(from_bits([held])[0], plain)
"""


def test_small_weights_alone_import_no_compiler_and_use_it_where_it_is():
    done = subprocess.run([sys.executable, "-c", SMALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("off", ["", "off"])
def test_a_forked_process_computes_the_same_in_one_thread_and_the_switch_off_works(off, tmp_path):
    script = FORKED if not off else "from bitgraft.transforms import cpu\nassert cpu.native() is None"
    done = subprocess.run(
        [sys.executable, "-c", script], env={"BITGRAFT_KERNELS": off, "PATH": ""}, timeout=120, check=False
    )
    assert done.returncode == 0


def test_pieces_cover_every_element_once():
    for count, rows in [(1, 1), (36, 1), (37, 1), (38, 1), (1000, 1), (12, 12), (400, 4)]:
        starts, sizes, row = cpu._pieces((count, 1, 1), rows)
        covered = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)])
        assert covered.tolist() == list(range(count))
        assert row.tolist() == [start // (count // rows) for start in starts]


def test_pieces_of_turned_weights_are_whole_filters():
    for filters, rows in [((5, 3, 9), 1), ((5, 3, 9), 5), ((7, 50, 2), 1), ((7, 2, 4), 1)]:
        size = filters[1] * filters[2]
        starts, sizes, row = cpu._pieces(filters, rows)
        covered = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)])
        assert covered.tolist() == list(range(filters[0] * size))
        assert not (starts % size).any()
        assert row.tolist() == [start // (filters[0] * size // rows) for start in starts]
