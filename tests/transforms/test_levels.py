"""Levels: quantization, the bits they take, and training to a given number of bits."""

import math

import pytest
import torch
from tiny import batch, run, tiny
from torch.utils.data import TensorDataset

from bitgraft import Config, Network, TaskError, compact, fit
from bitgraft.format.inspect import inspect_file
from bitgraft.transforms.base import Weight
from bitgraft.transforms.levels import Levels, entropy, fit_cells, quantize


def levels(shape: tuple[int, ...] = (40, 50), seed: int = 0, scale: float = 0.01) -> Levels:
    made = Levels(Weight("w", torch.Size(shape), "linear"), torch.zeros(shape))
    with torch.no_grad():
        made.scores.copy_(scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return made.eval()


def test_quantization_against_the_definition():
    change = torch.tensor([0.0, 0.1, -0.64, 0.66, -1.64, 1.66, 1000.0])
    assert quantize(change, 1.0).tolist() == [0, 0, 0, 1, -1, 2, 127]


def test_entropy_against_the_definition():
    counts = torch.tensor([[12, 2, 2], [5, 0, 0]])
    expected = -(0.75 * math.log2(0.75) + 2 * 0.125 * math.log2(0.125)) + 0.25
    torch.testing.assert_close(entropy(counts), torch.tensor([expected, 0.0]))


def test_the_step_is_the_least_squares_fit_and_freezing_changes_nothing():
    made = levels()
    made.cell.fill_(0.02)
    weight = torch.randn(40, 50)
    before, change = made(weight), made.change()
    for other in (0.98, 1.02):
        assert (made.scores - change).square().sum() <= (made.scores - other * change).square().sum()
    made.freeze()
    assert made.scores is None
    assert torch.equal(made(weight), before)


def test_frozen_levels_take_a_bit_per_weight_and_a_byte_per_change():
    made = levels((400, 500))
    made.cell.fill_(0.03)
    expected = made.parts()["levels"]
    made.freeze()
    assert torch.equal(made.parts()["levels"], expected)
    held = sum(buffer.nbytes for buffer in made.buffers())
    assert held == 400 * 500 / 8 + int((expected != 0).sum()) + 4


def test_a_state_dict_of_frozen_levels_loads_into_others_with_more_changes():
    weight, (one, other) = torch.randn(40, 50), (levels(seed=1), levels(seed=2))
    one.cell.fill_(0.03)
    other.cell.fill_(0.01)
    one.freeze()
    other.freeze()
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(weight), other(weight))


def test_gradients_are_straight_through_and_hardness_interpolates():
    made, weight = levels().train(), torch.randn(40, 50)
    made.cell.fill_(0.02)
    made.hardness = 0.25
    out = made(weight)
    torch.testing.assert_close(out, weight + 0.25 * made.change() + 0.75 * made.scores)
    out.backward(grad := torch.randn(40, 50))
    assert torch.equal(made.scores.grad, grad)


def test_no_change_is_clipped_at_many_bits():
    """A weight that changed far more than the others has finer cells for its size, and most outliers to lose."""
    some = [levels((60, 70), 1, scale=1e-4), levels((60, 70), 2, scale=1.0)]
    fit_cells(some, 6.0 * 2 * 60 * 70)
    for one in some:
        assert (one.scores - one.change()).abs().max() <= one.cell


@pytest.mark.parametrize("budget", [0.3, 1.0, 3.0])
def test_cells_meet_the_budget(budget):
    some = [levels((60, 70), 1), levels((50, 99), 2, scale=0.1), levels((9, 9), 3, scale=0.0)]
    fit_cells(some, budget * (60 * 70 + 50 * 99), sample=1 << 20)
    taken = sum(one.bits() - 32 for one in some)
    assert taken == pytest.approx(budget * (60 * 70 + 50 * 99), rel=0.02)
    assert float(some[0].cell) < float(some[1].cell)


def test_a_state_dict_of_frozen_levels_does_not_load_into_training_ones():
    learning, frozen = levels(), levels()
    frozen.freeze()
    with pytest.raises(TaskError, match="is still training, but in this state dict it is frozen: freeze"):
        learning.load_state_dict(frozen.state_dict())


def test_training_meets_the_requested_bits(tmp_path):
    net = Network(tiny(width=160))
    images = batch(32)
    labels = (images.mean((1, 2, 3)) > 0).long()
    task = net.add_task("small", classes=2, bits=0.9)
    result = fit(net, "small", TensorDataset(images, labels), config=Config(steps=30, batch=16), progress=False)
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
    compact(task)
    said = run(net.eval(), images, task="small")
    net.save_task("small", tmp_path / "small.safetensors")
    assert 0.8 < inspect_file(tmp_path / "small.safetensors").bits_per_weight <= 0.9
    fresh = Network(tiny(width=160)).eval()
    fresh.load_task(tmp_path / "small.safetensors")
    assert torch.equal(run(fresh.eval(), images, task="small"), said)


def test_invalid_bits_are_refused(tmp_path):
    net = Network(tiny())
    for bits in (0, 5, "few", float("nan")):
        with pytest.raises(TaskError, match=r"bits=.*: give a number from"):
            net.add_task("small", classes=2, bits=bits)
    with pytest.raises(TaskError, match="method 'simple' has no option 'bits'"):
        net.add_task("small", classes=2, method="simple", bits=1)
    net.add_task("first", classes=2)
    with pytest.raises(TaskError, match="does not work with masks of earlier tasks"):
        net.add_task("small", classes=2, borrow=["first"], bits=1)
    net.add_task("small", classes=2, bits=1)
    with pytest.raises(TaskError, match="bits=1 cannot be met: norm layers and the header alone take"):
        compact(net.tasks["small"])
    net.add_task("other", classes=2, bits=1)
    with pytest.raises(TaskError, match="bits=1 cannot be met"):
        fit(net, "other", TensorDataset(batch(8), torch.arange(8) % 2), progress=False)
