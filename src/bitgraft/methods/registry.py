"""The registry of methods, and the transforms and tensors that a method gives a new task.

torch is imported only where it is needed, so that listing methods is fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from bitgraft.errors import TaskError, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bitgraft.backbone.anatomy import Anatomy
    from bitgraft.transforms.base import Transform, Weight

    Build = Callable[[Weight, Tensor, Any, torch.Generator | None, Sequence[Transform]], Transform | None]
    """(weight, its tensor, options, generator, earlier tasks' transforms of the same weight) -> a transform, or None to
    leave the weight alone. Without a generator the values are not initialised."""


@dataclass(frozen=True)
class Options:
    """The options of every method."""

    norms: bool = True
    """Give the task its own norm layers. Otherwise it uses the backbone's, in evaluation mode."""
    own: tuple[str, ...] = ()
    """Patterns of other tensors to train and store as they are, for example ("*.bias",)."""

    def __post_init__(self) -> None:
        require(isinstance(self.norms, bool), "norms", self.norms, "give True or False")
        patterns = isinstance(self.own, tuple) and all(isinstance(pattern, str) for pattern in self.own)
        require(patterns, "own", self.own, "give a list of patterns, for example ['*.bias']")


def require(valid: bool, option: str, value: Any, remedy: str) -> None:
    if not valid:
        raise TaskError(f"{option}={value!r}: {remedy}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Phase:
    """One phase of training: prune, then train. None leaves epochs and rate to the training configuration."""

    epochs: int | None = None
    rate: float | None = None
    drop_after: int | None = None
    """Divide the rate by ten after this many epochs."""
    prune: float | None = None


@dataclass(frozen=True)
class Method:
    """Which transform each weight gets, which tensors a task owns, and in which phases it is trained."""

    name: str
    summary: str
    equation: str
    options: Options
    build: Build | None = None
    owns_everything: bool = False
    depends_on_previous: bool = False
    """Each task builds on the previous one (PackNet)."""
    borrows: bool = False
    """A task may reuse the masks of earlier tasks, or start from one of them."""
    joint: bool = False
    """The shared weights are trained too, which makes a new backbone (`Network.joint_copy`)."""
    phases: tuple[Phase, ...] = (Phase(),)
    check: Callable[[Mapping[str, Transform]], None] | None = None
    """Raises if the transforms leave nothing to train."""

    def with_options(self, given: Mapping[str, Any]) -> Options:
        """Return the method's options, overridden by those given."""
        known = {f.name for f in fields(self.options)}
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known).strip() or f"it takes {', '.join(sorted(known))}"
                raise TaskError(f"method {self.name!r} has no option {name!r}; {hint}")
        if isinstance(given.get("own"), str):
            given = {**given, "own": (given["own"],)}  # one pattern, not one per letter
        changes: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        return replace(self.options, **changes)


_METHODS: dict[str, Method] = {}
PRESETS = ("default", "quick", "quick-uncorrected", "imagenet-to-sketch", "decathlon")
TUNED: Mapping[str, Mapping[str, Any]] = {
    "full": {"per": "channel"},
    "simple": {"per": "channel"},
    "packnet": {"keep": 0.75},
}
"""method -> the options that a preset sets, other than the paper's two. They shape a task, so they are needed before
training; `bitgraft.training.presets` has the other settings."""


def register_method(method: Method) -> Method:
    """Add a method, or replace the one of that name."""
    _METHODS[method.name] = method
    return method


def get(name: str) -> Method:
    if name not in _METHODS:
        hint = did_you_mean(name, _METHODS)
        raise TaskError(f"there is no method {name!r}; {hint}known are {', '.join(_METHODS)}")
    return _METHODS[name]


def method_names() -> list[str]:
    """Return the names of all methods, which `Network.add_task` takes."""
    return list(_METHODS)


def preset_options(preset: str | None, method: str) -> dict[str, Any]:
    """Return the options that a preset sets for a method; none without a preset."""
    if preset not in (None, *PRESETS):
        raise TaskError(f"there is no preset {preset!r}; known are {', '.join(PRESETS)}")
    return {} if preset in (None, "imagenet-to-sketch", "decathlon") else dict(TUNED.get(method, {}))


def transforms(
    method: Method,
    anatomy: Anatomy,
    options: Options,
    rng: torch.Generator | None,
    before: Sequence[Mapping[str, Transform]] = (),
) -> dict[str, Transform]:
    """Return a new task's transforms by weight; `before` are those of the tasks that it depends on."""
    if method.build is None:
        return {}
    built, owned = {}, owned_names(method, anatomy, options)
    for name, weight in anatomy.weights.items():
        if name in owned:
            continue
        tensor = anatomy.tensor(name).detach()
        if (transform := method.build(weight, tensor, options, rng, earlier_transforms(name, before))) is not None:
            built[name] = transform
    if method.check is not None:
        method.check(built)
    return built


def earlier_transforms(name: str, before: Sequence[Mapping[str, Transform]]) -> list[Transform]:
    """Return the earlier tasks' transforms of one weight, in order."""
    return [transforms[name] for transforms in before if name in transforms]


def owned_names(method: Method, anatomy: Anatomy, options: Options) -> set[str]:
    """Return the tensors that a task trains and stores as they are, without the head. They get no transform."""
    norms = {name for names in anatomy.norms.values() for name in names}
    chosen = set(anatomy.places) - norms if method.owns_everything else set()
    if options.norms:
        chosen |= norms
    for pattern in options.own:
        found = {name for name in anatomy.places if fnmatchcase(name, pattern)}
        if not found:
            raise TaskError(f"own={pattern!r} matches no tensor of the backbone; `bitgraft anatomy` lists their names")
        chosen |= found
    return chosen - set(anatomy.head_names())


def owned(method: Method, anatomy: Anatomy, options: Options) -> dict[str, Tensor]:
    """Return copies of the backbone's tensors for a new task to own, without the head; parameters in float32."""
    import torch
    from torch import nn

    chosen, copies = owned_names(method, anatomy, options), {}
    for name in (name for name in anatomy.places if name in chosen):
        tensor = anatomy.tensor(name)
        learned = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        copy = tensor.detach().clone()
        copies[name] = nn.Parameter(copy.to(torch.float32)) if learned else copy
    return copies


def uniform(
    shape: torch.Size | tuple[int, ...], low: float, high: float, rng: torch.Generator | None, like: Tensor
) -> Tensor:
    """Draw float32 values from U(low, high) on `like`'s device and, for an equal shape, in its memory format.

    They have no values without a generator, or on the meta device.
    """
    import torch

    same = like.shape == shape
    out = torch.empty_like(like, dtype=torch.float32) if same else like.new_empty(shape, dtype=torch.float32)
    if rng is None or out.is_meta:
        return out
    values = torch.rand(shape, generator=rng)  # drawn on the CPU, so that a seed gives the same values on every device
    return out.copy_(values.mul_(high - low).add_(low))
