"""The one registry of methods, and how a method becomes a task. Methods are listed without torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from bitgraft.errors import TaskError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bitgraft.backbone.anatomy import Anatomy
    from bitgraft.transforms.base import Transform, Weight

    Build = Callable[[Weight, Tensor, Any, torch.Generator | None, Sequence[Transform]], Transform | None]
    """(weight, its tensor, options, randomness or None to leave values unset, the transforms that tasks which it
    depends on have for it) -> a transform, or None where the method leaves that weight alone."""


@dataclass(frozen=True)
class Options:
    """What every method takes."""

    norms: bool = True
    """The task gets norm layers of its own; otherwise they stay the backbone's, in evaluation mode."""
    own: tuple[str, ...] = ()
    """Patterns of further tensors to own outright, for example ("*.bias",)."""

    def __post_init__(self) -> None:
        require(isinstance(self.norms, bool), "norms", self.norms, "give True or False")
        patterns = isinstance(self.own, tuple) and all(isinstance(pattern, str) for pattern in self.own)
        require(patterns, "own", self.own, "give a list of patterns, for example ['*.bias']")


def require(fits: bool, name: str, value: Any, remedy: str) -> None:
    if not fits:
        raise TaskError(f"{name}={value!r}: {remedy}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Phase:
    """One stretch of training: prune first, then train; epochs and rate None means what the protocol says."""

    epochs: int | None = None
    rate: float | None = None
    drop_after: int | None = None
    """The rate is divided by ten after this many epochs."""
    prune: float | None = None


@dataclass(frozen=True)
class Method:
    """A named recipe: which transform a weight gets, what a task owns outright, in which phases it is trained."""

    name: str
    summary: str
    equation: str
    options: Options
    build: Build | None = None
    owns_everything: bool = False
    depends_on_previous: bool = False
    """Each task stands on the one before it (PackNet)."""
    borrows: bool = False
    """A task may name earlier ones, to add their masks to its own or to begin from one of them."""
    joint: bool = False
    """The weights that tasks share learn along with them, which makes another backbone (`Network.joint_copy`)."""
    phases: tuple[Phase, ...] = (Phase(),)
    check: Callable[[Mapping[str, Transform]], None] | None = None
    """Refuses a set of transforms with which nothing could be learned."""

    def with_options(self, given: Mapping[str, Any]) -> Options:
        """The method's options with the user's in place of its own."""
        known = {f.name for f in fields(self.options)}
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(sorted(known))}"
                raise TaskError(f"method {self.name!r} has no option {name!r}; {hint}")
        if isinstance(given.get("own"), str):
            given = {**given, "own": (given["own"],)}  # one pattern; its letters would be patterns too
        changes: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        return replace(self.options, **changes)


_METHODS: dict[str, Method] = {}


def register_method(method: Method) -> Method:
    """Make a method known by its name."""
    _METHODS[method.name] = method
    return method


def get(name: str) -> Method:
    if name not in _METHODS:
        close = difflib.get_close_matches(str(name), _METHODS, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise TaskError(f"there is no method {name!r}; {hint}known are {', '.join(_METHODS)}")
    return _METHODS[name]


def method_names() -> list[str]:
    return list(_METHODS)


def transforms(
    method: Method,
    anatomy: Anatomy,
    options: Options,
    rng: torch.Generator | None,
    before: Sequence[Mapping[str, Transform]] = (),
) -> dict[str, Transform]:
    """A new task's transforms, one for each weight that the method takes; `before` are of tasks it depends on.

    Without randomness values are left unset.
    """
    if method.build is None:
        return {}
    built, outright = {}, owned_names(method, anatomy, options)
    for name in (name for name in anatomy.weights if name not in outright):
        weight, tensor = anatomy.weights[name], anatomy.tensor(name).detach()
        if (transform := method.build(weight, tensor, options, rng, at(name, before))) is not None:
            built[name] = transform
    if method.check is not None:
        method.check(built)
    return built


def at(name: str, before: Sequence[Mapping[str, Transform]]) -> list[Transform]:
    """What earlier tasks do to one weight, in their order, without those that leave it alone."""
    return [transforms[name] for transforms in before if name in transforms]


def owned_names(method: Method, anatomy: Anatomy, options: Options) -> set[str]:
    """The tensors that a task has outright, head apart: no transform takes those."""
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
    """Copies of the backbone's tensors that a new task starts from, head apart; learned ones in float32."""
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
    """Float32 values, U(low, high), in `like`'s device and, for the same shape, its memory format."""
    import torch

    same = like.shape == shape
    out = torch.empty_like(like, dtype=torch.float32) if same else like.new_empty(shape, dtype=torch.float32)
    if rng is None:
        return out
    values = torch.rand(shape, generator=rng)  # drawn on the CPU, so that a seed means the same everywhere
    return out.copy_(values.mul_(high - low).add_(low))


def plain(options: Options) -> dict[str, Any]:
    """Options as a file or a message holds them."""
    return asdict(options)
