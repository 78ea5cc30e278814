"""The compiled loops against plain PyTorch, to the last bit."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bitgraft.methods.masked import MaskOptions
from bitgraft.transforms import affine as equation
from bitgraft.transforms import cpu, kernels
from bitgraft.transforms.affine import Operands, affine, compute, compute_in_torch
from bitgraft.transforms.base import Weight
from bitgraft.transforms.bits import pack
from bitgraft.transforms.masked import Masked, MaskRule, transformed

ODD = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-38, 3e38])


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Compile for tensors of any size, and split even small weights into several pieces."""
    monkeypatch.setattr(equation, "MIN_COMPILED", 0)
    monkeypatch.setattr(cpu, "PIECE", 37)


def draw(seed: int, rows: int, length: int, odd: bool) -> tuple[torch.Tensor, ...]:
    """Draw a weight, scores, a gradient and k per row."""
    rng = torch.Generator().manual_seed(seed)
    weight, scores, grad = torch.randn(3, rows, length, generator=rng).unbind()
    k = torch.randn(4, rows, generator=rng)
    if odd:
        places = torch.randint(0, rows * length, (3, len(ODD)), generator=rng)
        for tensor, some in zip((weight, scores, grad), places, strict=True):
            tensor.view(-1)[some] = ODD
    return weight, scores, grad, k


def spread(k: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Shape k, one per layer or one per row, to broadcast against the weight."""
    return k if k.dim() == 1 else k.view(4, -1, *(1 for _ in weight.shape[1:]))


def from_scores(scores, at, weight, k, channels_last=False):
    return cpu.affine([Operands(weight, scores, spread(k, weight), at, channels_last=channels_last)])[0]


def backward(grad, scores, at, weight, k):
    to_mask, to_k = cpu.gradients(grad, Operands(weight, scores, spread(k, weight), at))
    return to_mask, to_k.view_as(k)


def from_bits(weight, packed, k):
    return cpu.affine([Operands(weight, packed, spread(k, weight))])[0]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    nan = one.isnan()
    assert torch.equal(nan, other.isnan())
    assert torch.equal(one.contiguous().view(torch.int32)[~nan], other.contiguous().view(torch.int32)[~nan])


SIZES = (st.integers(0, 2**20), st.integers(1, 5), st.integers(1, 300), st.booleans())


@settings(deadline=None, max_examples=60)
@given(*SIZES, st.floats(-1, 1, width=32))
def test_w_from_scores_and_from_bits_equals_the_reference_bit_by_bit(seed, rows, length, odd, at):
    weight, scores, _, k = draw(seed, rows, length, odd)
    mask = scores >= at
    expected = affine(weight, mask, k.view(4, rows, 1))
    same_bits(from_scores(scores, at, weight, k), expected)
    same_bits(from_bits(weight, pack(mask), k), expected)
    layer = affine(weight, mask, k[:, 0])
    same_bits(from_scores(scores, at, weight, k[:, 0]), layer)
    same_bits(from_bits(weight, pack(mask), k[:, 0]), layer)


@settings(deadline=None, max_examples=60)
@given(*SIZES, st.floats(-1, 1, width=32))
def test_the_gradient_to_m_equals_the_reference_bit_by_bit_and_that_to_k_closely(seed, rows, length, odd, at):
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
def test_channels_last_gives_the_same_values(seed, shape, per_row, odd):
    filters, *rest = shape
    weight, scores, grad, k = draw(seed, filters, int(np.prod(rest)), odd)
    weight, scores, grad = (t.view(shape) for t in (weight, scores, grad))
    k = k if per_row else k[:, 0].clone()
    plain = from_scores(scores, 0.1, weight, k)
    transposed = from_scores(scores, 0.1, weight, k, channels_last=True)
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
    assert torch.equal(from_bits(weight, pack(mask), k), affine(weight, mask, k.view(4, 3, 1)))
    assert torch.equal(from_scores(scores, 0.1, weight, k), affine(weight, mask, k.view(4, 3, 1)))
    assert torch.equal(to_mask, (weight * k[3][:, None] + k[2][:, None]) * grad)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(sums, backward(grad, scores, 0.1, weight, k)[1])
    torch.set_num_threads(before)


def test_unaligned_bits_are_read_correctly():
    weight, scores, _, k = draw(2, 1, 1000, False)
    packed = pack(scores >= 0)
    for offset in range(4):
        room = torch.zeros(packed.numel() + 4, dtype=torch.uint8)
        moved = room[offset : offset + packed.numel()].copy_(packed)
        assert torch.equal(from_bits(weight, moved, k[:, 0]), affine(weight, scores >= 0, k[:, 0]))


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 70), st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_many_frozen_weights_in_one_call_equal_one_call_each(sizes):
    """One k per layer or per row, some with a buffer, some in a layout that the loops do not support."""
    held = []
    for seed, (rows, length, by_row, in_order) in enumerate(sizes):
        weight, scores, _, k = draw(seed, rows, length, False)
        weight = weight if in_order else weight.t().contiguous().t()
        k = spread(k if by_row else k[:, 0].contiguous(), weight)
        out = torch.full_like(weight, float("nan")) if seed % 2 else None
        held.append(Operands(weight, pack(scores >= 0), k, out=out))
    for one, found in zip(held, compute(held), strict=True):
        assert torch.equal(found, compute_in_torch(one))
        assert torch.equal(found, compute([one])[0])
        assert one.out is None or not one.weight.is_contiguous() or found is one.out


def test_a_buffer_that_does_not_fit_is_not_written():
    weight, scores, _, k = draw(0, 4, 9, False)
    expected = affine(weight, scores >= 0, k[:, 0])
    for out in (torch.zeros(4, 8), torch.zeros(9, 4).t(), torch.zeros(4, 9, dtype=torch.double)):
        found = compute([Operands(weight, pack(scores >= 0), k[:, 0], out=out)])[0]
        assert torch.equal(found, expected)
        assert not out.any()


def test_weights_of_a_frozen_task_are_written_to_the_given_buffer():
    rule = MaskRule((None,) * 4, 0.0, "identity", True)
    weight = torch.randn(6, 4, 3, 3)
    mask = Masked(Weight("w", weight.shape, "conv"), rule, torch.randn(weight.shape))
    mask.freeze()
    out = torch.empty_like(weight)
    found = transformed({"w": mask}, {"w": weight}, {"w": out})["w"]
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(out, mask(weight))


@settings(deadline=None, max_examples=20)
@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 3), st.booleans(), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_many_training_masks_in_one_call_equal_one_call_each(sizes):
    """Different thresholds, one k per layer or per filter, some channels-last."""
    masks = []
    for seed, (rows, inputs, edge, by_row, channels_last) in enumerate(sizes):
        weight, scores, _, k = draw(seed, rows, inputs * edge * edge, True)
        weight, scores = (tensor.view(rows, inputs, edge, edge) for tensor in (weight, scores))
        k = spread(k if by_row else k[:, 0].contiguous(), weight)
        masks.append(Operands(weight, scores, k, seed / 10, channels_last=channels_last))
    for mask, found in zip(masks, cpu.affine(masks), strict=True):
        same_bits(found.contiguous(), affine(mask.weight, mask.mask >= mask.threshold, mask.k))
        same_bits(found, cpu.affine([mask])[0])
        assert not mask.channels_last or found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(8, 1, 3, 3), (6, 4, 1, 1), (6, 4, 3, 3)])
def test_training_masks_have_the_same_strides_with_and_without_compiled_loops(shape, monkeypatch):
    """Convolutions depend on the strides of dimensions of size 1, and round differently."""
    rule = MaskRule((None,) * 4, 0.0, "identity", False)
    mask = Masked(Weight("w", torch.Size(shape), "conv", 1), rule, torch.randn(shape))
    mask.channels_last = True
    one = mask(torch.randn(shape))
    monkeypatch.setattr(kernels, "loops", lambda: None)
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
def test_a_layer_trains_the_same_with_and_without_compiled_loops(
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
        monkeypatch.setattr(equation, "MIN_COMPILED", 0 if fast else 1 << 40)
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
    made.k2_scaled_by_r = k2_scaled_by_r and rule.fixed[1] is rule.fixed[2] is None  # as in `scale_k2_by_r`
    for parameter in (made.k, made.k1):
        if parameter is not None:
            parameter.data = torch.randn(parameter.shape, generator=rng)
    return made


def test_inputs_that_the_compiled_loops_do_not_support(monkeypatch):
    monkeypatch.setattr(cpu, "affine", lambda given: pytest.fail("a compiled loop ran"))
    good, k = torch.randn(64, 64), torch.randn(4)
    for bad in (good.double(), good.half(), good[:, ::2], good.expand(2, 64, 64), good.to("meta")):
        compute([Operands(bad, torch.empty_like(bad), k.to(bad.device))])
    compute([Operands(good.t(), pack(good >= 0), k)])  # not in the order of its bits
    compute([Operands(good, good.t(), k)])
    compute([Operands(good, good, torch.randn(4, 1, 64))])  # each filter has many k


def run(script: str, folder, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": f"{folder}:{':'.join(sys.path)}", "PATH": "", **env},
    )


COMPUTED = """
import os, sys, torch
from bitgraft.transforms import kernels
from bitgraft.transforms.affine import Operands, compute, compute_in_torch
torch.set_num_threads(2)
def given(rows):
    weight, bits = torch.randn(rows, 64), torch.full((rows * 8,), 85, dtype=torch.uint8)
    return Operands(weight, bits, torch.tensor([1.0, 0.5, 0.25, 2.0]))
"""
FORKED = """
large = given(1 << 12)
here = compute([large])[0]
child = os.fork()
if child == 0:
    again = compute([large])[0]  # PyTorch itself would deadlock
    os._exit(0 if (again.numpy() == here.numpy()).all() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
SMALL = """
small = given(64)
assert torch.equal(compute([small])[0], compute_in_torch(small)) and "numba" not in sys.modules
found = compute([small, given(1 << 12)])[0]
assert torch.equal(found, compute_in_torch(small)) and "numba" in sys.modules
"""
OFF = """
large = given(1 << 12)
assert torch.equal(compute([large])[0], compute_in_torch(large)) and kernels.loops() is None
assert compute([large])[0].shape == large.weight.shape  # a second time
"""


@pytest.mark.parametrize("script", [FORKED, SMALL], ids=["a forked process", "small weights import no compiler"])
def test_a_separate_process_computes_the_same(script, tmp_path):
    done = run(COMPUTED + script, tmp_path)
    assert done.returncode == 0, done.stderr


def test_without_compiled_loops_plain_pytorch_runs_silently(tmp_path):
    for absent, env in [("", {"BITGRAFT_KERNELS": "off"}), ("import sys; sys.modules['numba'] = None", {})]:
        done = run(absent + COMPUTED + OFF, tmp_path, **env)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("error", ["ImportError('no libllvm')", "OSError('bad ELF')", "AttributeError('np.bool')"])
def test_a_broken_numba_is_reported_once_and_plain_pytorch_runs(error, tmp_path):
    (tmp_path / "numba.py").write_text(f"raise {error}\n")
    done = run(COMPUTED + OFF, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("numba is installed but does not work") == 1
    assert error.partition("(")[0] in done.stderr
    assert "Plain PyTorch runs instead" in done.stderr


def test_pieces_cover_every_filter_once():
    for shape in [(1, 1), (36, 1), (1, 37), (1000, 1), (12, 12), (4, 400)]:
        for piece in (1, 8, 100, 10_000):
            ranges = list(cpu._ranges(np.empty(shape, np.float32), piece))
            assert [row for first, last in ranges for row in range(first, last)] == list(range(shape[0]))


CACHED = """
import hashlib, torch
from bitgraft.training.cpu import winograd
from bitgraft.transforms import cpu
from bitgraft.transforms.affine import Operands
torch.manual_seed(0)
weight, scores, grad = torch.randn(3, 24, 96, 3, 3).unbind()
found = [*cpu.gradients(grad, Operands(weight, scores, torch.randn(4)))]
last = {"memory_format": torch.channels_last}
maps, kernel = torch.randn(2, 32, 9, 9).to(**last), torch.randn(2, 32, 3, 3).to(**last)
found += [winograd._to_tiles("inputs", maps, (9, 9), (1, 1)), winograd._to_tiles("filters", kernel)]
print([hashlib.sha1(tensor.numpy().tobytes()).hexdigest() for tensor in found])
"""


def test_loops_from_numbas_cache_give_the_same_bits_as_those_just_compiled(tmp_path):
    """A run that is killed and resumed compiles the loops in its first process and loads them in its second."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    run = [
        subprocess.run([sys.executable, "-c", CACHED], env=environment, capture_output=True, check=True) for _ in "12"
    ]
    assert any(tmp_path.rglob("*.nbc"))
    assert run[0].stdout == run[1].stdout
