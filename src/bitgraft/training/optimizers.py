"""Optimisers by role, and rates by step."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bitgraft.methods.registry import Method, Phase
from bitgraft.training.config import Config


def build(learned: Iterable[tuple[str, nn.Parameter]], config: Config, phase: Phase) -> list[torch.optim.Optimizer]:
    """One optimiser of each kind that the configuration names, with a group for each role."""
    groups: dict[str, dict[str, list[nn.Parameter]]] = {}
    for role, parameter in learned:
        held = groups.setdefault(config.optimizers[role], {}).setdefault(role, [])
        if not any(parameter is other for other in held):
            held.append(parameter)
    built: list[torch.optim.Optimizer] = []
    for kind, roles in groups.items():
        settings = [
            {
                "params": parameters,
                "centralized": config.gradient_centralization and role in ("scores", "weights"),
                "clip_to_ema_norm": config.clip_to_ema_norm and kind == "adam",
                "lr": phase.rate if phase.rate is not None else config.rates[role],
                "weight_decay": config.weight_decay.get(role, 0.0),
            }
            for role, parameters in roles.items()
        ]
        fused = all(p.device.type in ("cpu", "cuda") for parameters in roles.values() for p in parameters)
        if kind == "adam":
            built.append(torch.optim.AdamW(settings, eps=config.eps, fused=fused))  # one pass; unfused takes ten
        else:
            built.append(torch.optim.SGD(settings, momentum=config.momentum, fused=fused))
    for optimizer in built:
        for group in optimizer.param_groups:
            group["base"] = group["lr"]
    return built


def phases_of(method: Method, config: Config) -> tuple[Phase, ...]:
    """A method's phases at its own pace, or at the configuration's."""
    if config.own_pace:
        return method.phases
    return tuple(replace(phase, rate=None, drop_after=None) for phase in method.phases)


def epochs_of(config: Config, phase: Phase, phases: Sequence[Phase], steps_per_epoch: float) -> int:
    """The protocol's epochs, shared out between phases in the proportion of their own."""
    whole = config.epochs_of(steps_per_epoch)
    if phase.epochs is None:
        return whole
    return max(1, round(whole * phase.epochs / sum(one.epochs or 0 for one in phases)))


def rate_factor(config: Config, phase: Phase, step: int, steps_per_epoch: int, epochs: int) -> float:
    """What every rate is multiplied by at a step of a phase."""
    warm = config.warmup * steps_per_epoch
    if step < warm:
        return (step + 1) / warm
    drop_after: float | None = config.drop_after
    if phase.rate is not None:  # at its own point, which moves with the length of the phase
        drop_after = phase.drop_after and phase.drop_after * epochs / (phase.epochs or epochs)
    if phase.rate is not None or config.schedule == "step":
        return 0.1 if drop_after is not None and step >= drop_after * steps_per_epoch else 1.0
    if config.schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1.0, epochs * steps_per_epoch - warm)))


def set_rates(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * factor


@torch.no_grad()
def centralize_gradients(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Take the mean off the gradient of each filter, where the configuration says so (gradient centralisation)."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"] if group.get("centralized") else ():
                if parameter.grad is not None and parameter.dim() > 1 and parameter[0].numel() > 1:
                    parameter.grad -= parameter.grad.mean(tuple(range(1, parameter.dim())), keepdim=True)


@torch.no_grad()
def clip_to_ema_norm(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Scale a tensor's gradient down to the root mean square that Adam remembers of it, where the configuration says
    so (as StableAdamW does with its steps). Nothing is kept but Adam's own state. A tensor whose gradients were all 0
    (R's, as long as k2 and k3 are) has no size to be held to."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"] if group.get("clip_to_ema_norm") else ():
                known = optimizer.state.get(parameter)
                if parameter.grad is None or not known:
                    continue
                past = known["exp_avg_sq"].sum() / (1 - group["betas"][1] ** known["step"])
                now = parameter.grad.square().sum().clamp(min=torch.finfo(past.dtype).tiny)
                parameter.grad *= torch.where(past > 0, (past / now).sqrt().clamp(max=1), 1.0)


def advance(optimizers: Sequence[Any], scaler: torch.amp.GradScaler | None) -> None:
    """One step of each, as accelerate wraps them. The scaler of fp16 may move only when all have taken theirs;
    accelerate would move it after each."""
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
