"""Parameter groups, schedules, and what happens to gradients before an update."""

import pytest
import torch
from accelerate import Accelerator
from stripes import SHORT, network, saved_bytes, stop_after, stripes
from torch.nn import Parameter

from bitgraft.errors import StoppedError
from bitgraft.methods.registry import Phase
from bitgraft.training.loop import fit
from bitgraft.training.optimizers import build, centralize_gradients, clip_to_ema_norm, rate_factor
from bitgraft.training.presets import PAPER, QUICK


def test_centralized_gradients_have_zero_mean_per_filter():
    learned = {role: Parameter(torch.randn(4, 3, 2)) for role in ("scores", "weights", "head")}
    learned["norms"] = Parameter(torch.randn(5))
    config = PAPER.changed(gradient_centralization=True)
    optimizers = build(learned.items(), config, Phase())
    before = {role: torch.randn_like(parameter) for role, parameter in learned.items()}
    for role, parameter in learned.items():
        parameter.grad = before[role].clone()
    centralize_gradients(optimizers)
    for role in ("head", "norms"):
        assert torch.equal(learned[role].grad, before[role])
    for role in ("scores", "weights"):
        for mine, theirs in zip(learned[role].grad, before[role], strict=True):
            assert torch.allclose(mine, theirs - theirs.mean(), atol=1e-6)


def test_gradients_are_clipped_to_adams_second_moment():
    parameter, still = (Parameter(torch.zeros(3, 4)) for _ in range(2))
    config = PAPER.changed(clip_to_ema_norm=True)
    optimizers = build([("scores", parameter), ("norms", still)], config, Phase())
    seen = [torch.randn(3, 4) * size for size in (1.0, 3.0, 0.5)]
    for grad in seen:
        parameter.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    weights = [0.999 ** (len(seen) - 1 - i) for i in range(len(seen))]
    past = sum(w * g.square() for w, g in zip(weights, seen, strict=True)) / sum(weights)  # Adam's, without its bias
    for size in (0.01, 100.0):
        grad = torch.randn(3, 4) * size
        parameter.grad = grad.clone()
        clip_to_ema_norm(optimizers)
        bound = min(1.0, float(past.sum().sqrt() / grad.norm()))
        assert torch.allclose(parameter.grad, grad * bound, rtol=1e-4)
        assert (bound == 1.0) == (size < 1)
    assert still.grad is None
    parameter.grad = torch.zeros(3, 4)
    clip_to_ema_norm(optimizers)
    assert torch.equal(parameter.grad, torch.zeros(3, 4))


def test_a_tensor_whose_first_gradients_are_0_is_not_clipped():
    """R has no gradient while k2 = k3 = 0, the paper's initialisation. Bits must flip nevertheless."""
    net = network("full")
    config = SHORT.changed(clip_to_ema_norm=True, scale_k2_by_r=0.0, epochs=4, rates=dict.fromkeys(QUICK.rates, 1e-2))
    fit(net, "stripes", stripes(48, 1), None, config)
    masks = [transform.mask() for transform in net.tasks["stripes"].transforms.values()]
    assert all(0 < mask.float().mean() < 1 for mask in masks)


def scaled_accelerator():
    """With the gradient scaler of fp16, and a scale that changes often, but in float32."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    return accelerator


def test_the_gradient_scaler_is_saved_and_resumed(tmp_path):
    config = SHORT.changed(optimizers={"head": "sgd"})  # two optimisers, one scaler
    data = "stripes", stripes(52, 1), None, config
    whole, accelerator = network("finetune"), scaled_accelerator()
    fit(whole, *data, accelerator=accelerator)
    assert accelerator.scaler.state_dict()["scale"] == 2.0**12  # doubled after each two of eight steps
    stopped, accelerator = network("finetune"), scaled_accelerator()
    with pytest.raises(StoppedError):
        fit(stopped, *data, accelerator=accelerator, folder=tmp_path, stop=stop_after(5))
    held = torch.load(tmp_path / "state.pt", weights_only=True)["scaler"]
    assert (held["scale"], held["_growth_tracker"]) == (2.0**10, 1)
    again, accelerator = network("finetune"), scaled_accelerator()
    fit(again, *data, accelerator=accelerator, folder=tmp_path, resume=True)
    assert accelerator.scaler.state_dict()["scale"] == 2.0**12
    assert saved_bytes(again, tmp_path / "a") == saved_bytes(whole, tmp_path / "b")


def test_scaled_gradients_equal_plain_ones(tmp_path):
    """Powers of two scale without rounding."""
    config, found = SHORT.changed(optimizers={"head": "sgd"}), []
    for accelerator in (Accelerator(cpu=True), scaled_accelerator()):
        net = network("finetune")
        fit(net, "stripes", stripes(52, 1), None, config, accelerator=accelerator)
        found.append(saved_bytes(net, tmp_path / "a"))
    assert found[0] == found[1]


def test_rate_schedules():
    step = PAPER.changed(epochs=4, drop_after=2)
    assert [rate_factor(step, Phase(), s, 10, 4) for s in (0, 19, 20, 39)] == [1.0, 1.0, 0.1, 0.1]
    cosine = PAPER.changed(schedule="cosine", warmup=0.25)
    assert rate_factor(cosine, Phase(), 4, 10, 4) == pytest.approx(0.5)
    assert rate_factor(cosine, Phase(), 10, 10, 4) == pytest.approx(1.0)
    assert rate_factor(cosine, Phase(), 25, 10, 4) == pytest.approx(0.5)
    own = Phase(epochs=4, rate=1e-3, drop_after=1)
    assert [rate_factor(cosine.changed(warmup=0.0), own, s, 10, 4) for s in (0, 10)] == [1.0, 0.1]
