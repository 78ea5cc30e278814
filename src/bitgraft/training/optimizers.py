"""Optimisers with a parameter group per role, the schedules of rates and masks, and the update of one step."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from bitgraft.methods.registry import Method, Phase
from bitgraft.training.config import Config

CHANGES = ("scores", "k1", "weights")
"""Roles whose rates can be relative to the weights that they change."""


def build(
    learned: Iterable[tuple[str, nn.Parameter]],
    config: Config,
    phase: Phase,
    sizes: Mapping[nn.Parameter, float] = MappingProxyType({}),
) -> list[torch.optim.Optimizer]:
    """One optimiser of each kind in the configuration, with a parameter group per role and size.

    `sizes` are those of the weights that parameters change (`weight_sizes`), for relative rates.
    """
    kinds: dict[str, dict[tuple[str, float], list[nn.Parameter]]] = {}
    for parameter, role in {parameter: role for role, parameter in learned}.items():  # a tied one only once
        kind = config.optimizers[role]
        relative = config.relative_rates and kind == "adam" and role in CHANGES
        size = sizes.get(parameter, 1.0) if relative else 1.0
        kinds.setdefault(kind, {}).setdefault((role, size), []).append(parameter)
    built: list[torch.optim.Optimizer] = []
    for kind, found in kinds.items():
        groups = [
            {
                "params": parameters,
                "centralized": config.gradient_centralization and role in ("scores", "weights"),
                "clip_to_ema_norm": config.clip_to_ema_norm and kind == "adam",
                "base": phase.rate if phase.rate is not None else config.rates[role] * size,
                "weight_decay": config.weight_decay.get(role, 0.0),
            }
            for (role, size), parameters in found.items()
        ]
        fused = all(p.device.type in ("cpu", "cuda") for parameters in found.values() for p in parameters)
        if kind == "adam":
            built.append(torch.optim.AdamW(groups, eps=config.eps, fused=fused))  # one pass over memory, not ten
        else:
            built.append(torch.optim.SGD(groups, momentum=config.momentum, fused=fused))
    set_rates(built, 1.0)
    return built


def phases_of(method: Method, config: Config) -> tuple[Phase, ...]:
    """A method's phases, with their own rates and drops only if `config.own_pace`."""
    if config.own_pace:
        return method.phases
    return tuple(replace(phase, rate=None, drop_after=None) for phase in method.phases)


def rate_factor(config: Config, phase: Phase, step: int, steps_per_epoch: int, epochs: int) -> float:
    """The factor of every rate at a step of a phase."""
    warm = config.warmup * steps_per_epoch * epochs
    if step < warm:
        return (step + 1) / warm
    drop_after: float | None = config.drop_after
    if phase.rate is not None:  # the phase's own drop, scaled to its actual length
        drop_after = phase.drop_after and phase.drop_after * epochs / (phase.epochs or epochs)
    if phase.rate is not None or config.schedule == "step":
        return 0.1 if drop_after is not None and step >= drop_after * steps_per_epoch else 1.0
    if config.schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1.0, epochs * steps_per_epoch - warm)))


def hardness(config: Config, step: int, steps: int) -> float:
    """How far masks are annealed at a step: near 0 is W + R, 1 is the masked weights."""
    annealing = config.anneal_masks * steps
    return min(1.0, (step + 1) / annealing) if annealing else 1.0


def set_rates(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * factor


def update(optimizers: Sequence[Any], scaler: torch.amp.GradScaler | None) -> None:
    """Centralise and clip gradients, step all optimisers (wrapped by accelerate), and clear gradients.

    The scaler of fp16 is updated once, after all of them; accelerate would update it after each.
    """
    if scaler is not None:
        for optimizer in optimizers:
            scaler.unscale_(optimizer.optimizer)
    centralize_gradients(optimizers)
    clip_to_ema_norm(optimizers)
    for optimizer in optimizers:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer.optimizer)
    if scaler is not None:
        scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()


@torch.no_grad()
def centralize_gradients(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Subtract the mean of each filter's gradient, in the groups with "centralized" (gradient centralisation)."""
    for _, group in _groups(optimizers, "centralized"):
        kernels = [p for p in group["params"] if p.grad is not None and p.dim() > 1 and p[0].numel() > 1]
        if grads := [p.grad for p in kernels]:
            torch._foreach_sub_(grads, [grad.mean(tuple(range(1, grad.dim())), keepdim=True) for grad in grads])


@torch.no_grad()
def clip_to_ema_norm(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Clip each tensor's gradient to the norm implied by Adam's second moment, in the groups with "clip_to_ema_norm".

    StableAdamW clips its steps likewise. There is no state beside Adam's. A tensor whose gradients were all 0 so far
    (as R's are while k2 = k3 = 0) is not clipped.
    """
    for optimizer, group in _groups(optimizers, "clip_to_ema_norm"):
        known = [(p.grad, optimizer.state[p]) for p in group["params"] if p.grad is not None and optimizer.state.get(p)]
        if not known:
            continue
        grads, states = [grad for grad, _ in known], [state for _, state in known]
        steps = torch.stack([state["step"] for state in states]).to(grads[0].device, non_blocking=True)
        past = torch.stack(_sums([state["exp_avg_sq"] for state in states])) / (1 - group["betas"][1] ** steps)
        now = torch.stack(_square_sums(grads)).clamp(min=torch.finfo(past.dtype).tiny)
        factors = torch.where(past > 0, (past / now).sqrt().clamp(max=1), 1.0)
        torch._foreach_mul_(grads, list(factors.unbind()))


def _groups(optimizers: Iterable[torch.optim.Optimizer], flag: str) -> Iterator[tuple[torch.optim.Optimizer, Any]]:
    return ((optimizer, group) for optimizer in optimizers for group in optimizer.param_groups if group.get(flag))


def _sums(tensors: list[Tensor]) -> list[Tensor]:
    """The sum of each tensor; none has negative values. One kernel on an accelerator, plain sums on a CPU, where a norm
    would add in another order."""
    return [t.sum() for t in tensors] if tensors[0].is_cpu else list(torch._foreach_norm(tensors, 1))


def _square_sums(tensors: list[Tensor]) -> list[Tensor]:
    if tensors[0].is_cpu:
        return [tensor.square().sum() for tensor in tensors]
    return list(torch._foreach_pow(torch._foreach_norm(tensors), 2))
