"""How a task is trained, as plain data."""

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from bitgraft.errors import TrainingError

LENGTHS = ("minutes", "steps", "epochs")  # the first of them that is set says how long a run is
ROLES = ("scores", "k", "k1", "weights", "norms", "head")


AS_PRESET: Any = ...
"""The value of a setting that is not given."""


@dataclass(frozen=True, repr=False)
class Config:
    """Settings of a run. Those that are not given are what the task's preset has for its method: `Config(epochs=3)`
    changes the epochs and nothing else. `bitgraft.preset("default", "full")` has all of them.

    Rates and optimisers go by role: `scores` (R), `k` (k0, k2, k3), `k1`, `norms`, `head`, `weights` (the rest).
    """

    epochs: int = AS_PRESET
    """Passes over the training images."""
    steps: int | Literal["auto"] | None = AS_PRESET
    """In place of epochs: as many as come nearest to so many steps, and at least one; where tasks are trained together,
    to so many for each of them in the mean. "auto" follows the data (`bitgraft.training.budget`)."""
    minutes: float | None = AS_PRESET
    """In place of epochs and steps: as many epochs as fit."""
    batch: int = AS_PRESET
    """Images per optimiser step, over all processes."""
    accumulate: int = AS_PRESET
    """A step's batch is run in so many parts."""
    rates: Mapping[str, float] = AS_PRESET
    optimizers: Mapping[str, str] = AS_PRESET
    """By role: "adam" or "sgd"."""
    momentum: float = AS_PRESET
    """Of SGD."""
    eps: float = AS_PRESET
    """Of Adam."""
    weight_decay: Mapping[str, float] = AS_PRESET
    """By role; decoupled from the rate's moments for Adam (as AdamW does)."""
    schedule: Literal["step", "cosine", "constant"] = AS_PRESET
    """How rates fall: once, at `drop_after`; to 0 at the end; or not at all."""
    drop_after: int | None = AS_PRESET
    """Epochs after which the step schedule divides every rate by ten."""
    warmup: float = AS_PRESET
    """The share of the run over which rates rise from zero."""
    own_pace: bool = AS_PRESET
    """A method whose phases have rates and drops of their own (PackNet) keeps to them; else to those given here."""
    label_smoothing: float = AS_PRESET
    """How much of each label is spread over all classes."""
    class_weights: Literal["balanced"] | tuple[float, ...] | None = AS_PRESET
    """Of the loss, one for each class; "balanced" is the inverse of how often a class comes."""
    scale_k2_by_r: float = AS_PRESET
    """R starts at random in [-x, x], and k2 scales with mean(abs(R)); 0 is the paper's start."""
    anneal_masks: float = AS_PRESET
    """The share of the run over which masks form: W~ goes from W + R, as fine-tuning would have it, to what the mask
    and k give. 0: masks from the first step on. Only where k2 is scaled by R."""
    gradient_centralization: bool = AS_PRESET
    """Subtract the mean of each filter's gradient. Otherwise a step shifts a whole filter, which inputs with a large
    mean (a white page) feel most."""
    mean_shift_correction: bool = AS_PRESET
    """Apply changes of a weight to its inputs minus their mean over the training images, measured once at the start.
    Only with statistics="kept": batch statistics remove the mean anyway."""
    clip_to_ema_norm: bool = AS_PRESET
    """Clip each tensor's gradient to the norm that Adam's second moment remembers. Otherwise one step too far makes the
    next gradients larger still, until the network gives the same answer to every image."""
    statistics: Literal["batch", "kept"] = AS_PRESET
    """What a task's own norm layers normalise by in training: the batch over all processes, or running statistics that
    stay as they are (small images and batches make for poor statistics). A batch has a variance from two images on, so
    a last batch of one image joins the one before it."""
    head_init: bool = AS_PRESET
    """Set the task's norm statistics to those of its data and fit its head on cached features, before anything else
    learns."""
    patience: float | None = AS_PRESET
    """Stop after so many epochs without a better validation accuracy; below 1, a share of the run,
    and at least 10 epochs."""
    keep: Literal["last", "best"] = AS_PRESET
    """Which epoch the task ends as: the last, or the best on validation. The head start counts as epoch 0."""
    size: int | None = AS_PRESET
    """Pixels of a square input; by default the backbone's own."""
    resize: int | None = AS_PRESET
    """Pixels of the shorter side before the crop."""
    crop: Literal["random", "random-resized", "none"] = AS_PRESET
    """Which part of an image training sees."""
    squash: bool = AS_PRESET
    """Fit the whole image in, out of proportion, where otherwise the shorter side fills the frame."""
    flip: bool | None = AS_PRESET
    """Mirror images at random; by default as the data set allows."""
    seed: int = AS_PRESET
    """Of the order of images, augmentation and what is random at the start."""

    def __post_init__(self) -> None:
        given = self.given()
        for name in given.keys() & {"epochs", "batch", "accumulate"}:
            value = given[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise TrainingError(f"{name}={value!r}: give a whole number from 1 on")
        steps, minutes = given.get("steps"), given.get("minutes")
        if not (steps in (None, "auto") or (type(steps) is int and steps >= 1)):
            raise TrainingError(f"steps={steps!r}: give a whole number from 1 on, or 'auto'")
        for name, value in given.items():
            if not _fits(value, _kinds()[name]):
                raise TrainingError(f"{name}={value!r}: give {_said(_kinds()[name])}")
        for name in given.keys() & {"rates", "optimizers", "weight_decay"}:
            stray = set(given[name]) - set(ROLES)
            if stray:
                raise TrainingError(f"{name} names the role {sorted(stray)[0]!r}; roles are {', '.join(ROLES)}")
        for role, kind in given.get("optimizers", {}).items():
            if kind not in ("adam", "sgd"):
                raise TrainingError(f"the optimiser of {role!r} is {kind!r}: choose 'adam' or 'sgd'")
        if minutes is not None and not minutes > 0:
            raise TrainingError(f"minutes={minutes!r}: give a number above 0")
        for name in given.keys() & {"warmup", "anneal_masks"}:
            if not 0 <= given[name] < 1:
                raise TrainingError(f"{name}={given[name]!r}: give a share of the run, from 0 up to 1")
        if any(rate < 0 for rate in given.get("rates", {}).values()):
            raise TrainingError(f"rates must not be negative: {dict(self.rates)}")

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"

    def given(self) -> dict[str, Any]:
        """The settings that it states."""
        return {name: value for name, value in vars(self).items() if value is not AS_PRESET}

    def over(self, preset: "Config") -> "Config":
        """All settings: those that it states, and the preset's for the rest."""
        given = self.given()
        return self if len(given) == len(fields(self)) else preset.changed(**given)

    def changed(self, **changes: Any) -> "Config":
        """A copy with some settings changed; mappings by role take in what is given and keep the rest."""
        known, before = {f.name for f in fields(self)}, self.given()
        if length := next((name for name in LENGTHS if changes.get(name) is not None), None):
            changes = {**dict.fromkeys(set(LENGTHS) - {length, "epochs"}), **changes}
        for name, value in changes.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                raise TrainingError(
                    f"there is no setting {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
                )
            if isinstance(value, Mapping):
                changes[name] = {**before.get(name, {}), **value}
        return replace(self, **changes)


@functools.cache
def _kinds() -> dict[str, Any]:
    return get_type_hints(Config)


def _fits(value: Any, kind: Any) -> bool:
    """A value is of the kind that a setting's annotation names."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_fits(one, inner[0]) for one in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(one, inner[1]) for one in value.values())
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, kind)


def _said(kind: Any) -> str:
    """A kind in words."""
    origin, words = get_origin(kind), {int: "a whole number", float: "a number", bool: "true or false"}
    if origin in (Union, UnionType):
        return " or ".join(_said(one) for one in get_args(kind) if one is not NoneType)
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if origin is tuple:
        return "a list of numbers"
    return "a value for each role, as in {'head': ...}" if origin is Mapping else words[kind]
