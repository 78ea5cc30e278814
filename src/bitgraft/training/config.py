"""How a task is trained, as plain data."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from bitgraft.errors import TrainingError, did_you_mean

LENGTHS = ("minutes", "steps", "epochs")  # the first one that is set decides how long a run is
ROLES = ("scores", "k", "k1", "weights", "norms", "head")
COUNTS = {"epochs": 1, "steps": 1, "batch": 1, "accumulate": 1, "seed": 0, "size": 1, "resize": 1}
"""Whole numbers with the least value of each; they must fit into 64 bits."""
MAX_MINUTES = 365 * 24 * 60
AS_PRESET: Any = ...
"""The value of a setting that is not given."""


@dataclass(frozen=True, repr=False)
class Config:
    """Settings of a run. A setting that is not given has the value of the task's preset for its method, so
    `Config(epochs=3)` changes only the epochs. `bitgraft.preset("default", "full")` returns all of them.

    Rates, optimisers and weight decay are given per role: `scores` (R), `k` (k0, k2, k3), `k1`, `norms`, `head` and
    `weights` (everything else).
    """

    epochs: int = AS_PRESET
    """Passes over the training images."""
    steps: int | Literal["auto"] | None = AS_PRESET
    """Instead of epochs: optimiser steps, rounded to whole epochs, at least one. With several tasks, the mean steps per
    task. "auto" depends on the data (`bitgraft.training.budget`). The 250 of `quick` are at most 100 epochs."""
    minutes: float | None = AS_PRESET
    """Instead of epochs and steps: train for as many epochs as fit."""
    batch: int = AS_PRESET
    """Images per optimiser step, over all processes."""
    accumulate: int = AS_PRESET
    """Micro-batches per step, whose gradients are accumulated."""
    rates: Mapping[str, float] = AS_PRESET
    """Learning rates, by role."""
    relative_rates: bool = AS_PRESET
    """Multiply Adam's rates of R, k1 and fine-tuned weights by the RMS of the backbone's weight that they change. The
    size of Adam's steps is the rate itself, so otherwise a rate suits only some layers and networks. Parameters with
    units of their own (LoRA's factors, Piggyback's R) are not affected."""
    optimizers: Mapping[str, str] = AS_PRESET
    """By role: "adam" or "sgd"."""
    momentum: float = AS_PRESET
    """Of SGD."""
    eps: float = AS_PRESET
    """Of Adam."""
    weight_decay: Mapping[str, float] = AS_PRESET
    """By role; decoupled for Adam (AdamW)."""
    schedule: Literal["step", "cosine", "constant"] = AS_PRESET
    """How rates decay: once, at `drop_after`; to 0 at the end; or not at all."""
    drop_after: int | None = AS_PRESET
    """Epochs after which the step schedule divides every rate by ten."""
    warmup: float = AS_PRESET
    """The share of the run over which rates rise from zero."""
    own_pace: bool = AS_PRESET
    """Use the rates and drops of a method's own phases (PackNet) instead of those given here."""
    label_smoothing: float = AS_PRESET
    """The share of each label that is spread over all classes."""
    class_weights: Literal["balanced"] | tuple[float, ...] | None = AS_PRESET
    """Weights of the loss, one per class; "balanced" weighs by inverse class frequency."""
    scale_k2_by_r: float = AS_PRESET
    """Initialise R uniformly in [-x, x] times the RMS of the weight, and scale k2 with mean(abs(R)); 0 is the paper's
    initialisation."""
    anneal_masks: float = AS_PRESET
    """The share of the run over which W~ moves from W + R, as in fine-tuning, to the masked weights. 0 uses masks from
    the first step. Needs `scale_k2_by_r`."""
    gradient_centralization: bool = AS_PRESET
    """Subtract the mean of each filter's gradient. Otherwise a step shifts whole filters, which matters most for inputs
    with a large mean (a white page)."""
    mean_shift_correction: bool = AS_PRESET
    """Apply changes of a weight to its inputs minus their mean over the training images, measured once at the start.
    Only with statistics="kept": batch statistics remove the mean anyway."""
    clip_to_ema_norm: bool = AS_PRESET
    """Clip each tensor's gradient to the norm implied by Adam's second moment. Otherwise one large step makes the next
    gradients larger still, until the network gives the same answer to every image."""
    statistics: Literal["batch", "kept"] = AS_PRESET
    """How a task's own norm layers normalise in training: by the batch over all processes, or by the backbone's fixed
    statistics, which suit small images and batches better. With "batch", a last batch of one image joins the one before
    it, because a variance needs two."""
    head_init: bool = AS_PRESET
    """Before training, fit the task's head on cached features; with batch statistics, set those to the data's first."""
    patience: float | None = AS_PRESET
    """Stop after this many epochs without a better validation accuracy. A value below 1 is a share of the run, at least
    10 epochs."""
    keep: Literal["last", "best"] = AS_PRESET
    """Which epoch to keep: the last, or the best on validation. The result of `head_init` counts as epoch 0."""
    retreat: bool = AS_PRESET
    """Halfway through a run, if no epoch since the warm-up is better on validation than those before, go back to the
    best state and go on with a quarter of the rates."""
    size: int | None = AS_PRESET
    """Pixels of a square input; by default the backbone's own."""
    resize: int | None = AS_PRESET
    """Pixels of the shorter side before the crop."""
    crop: Literal["random", "random-resized", "none"] = AS_PRESET
    """How training images are cropped."""
    squash: bool = AS_PRESET
    """Resize the whole image to a square and ignore its aspect ratio, instead of cropping."""
    flip: bool | None = AS_PRESET
    """Mirror images at random; by default if the data set allows it."""
    seed: int = AS_PRESET
    """Of the order of images, augmentation and random initialisation."""

    def __post_init__(self) -> None:
        given = self.given()
        for name, value in given.items():
            if not _matches(value, _annotations()[name]):
                raise TrainingError(f"{name}={value!r}: give {_describe(_annotations()[name])}")
            if isinstance(value, Mapping) and (unknown := set(value) - set(ROLES)):
                raise TrainingError(f"{name} names the role {min(unknown)!r}; roles are {', '.join(ROLES)}")
            if name in COUNTS and isinstance(value, int) and not COUNTS[name] <= value < 2**63:
                raise TrainingError(f"{name}={value!r}: give a whole number, at least {COUNTS[name]} and below 2**63")
            if name == "minutes" and value is not None and not 0 < value <= MAX_MINUTES:
                raise TrainingError(f"minutes={value!r}: give a number above 0, at most {MAX_MINUTES:,} (a year)")
            if name in ("warmup", "anneal_masks", "label_smoothing") and not 0 <= value < 1:
                raise TrainingError(f"{name}={value!r}: give a share, at least 0 and below 1")
            if not all(0 <= number < math.inf for number in _numbers(value)):
                raise TrainingError(f"{name}={value!r}: numbers must be finite, and not negative")
        for role, kind in given.get("optimizers", {}).items():
            if kind not in ("adam", "sgd"):
                raise TrainingError(f"the optimiser of {role!r} is {kind!r}: choose 'adam' or 'sgd'")

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"

    def given(self) -> dict[str, Any]:
        """The settings that are not left to the preset."""
        return {name: value for name, value in vars(self).items() if value is not AS_PRESET}

    def over(self, preset: "Config") -> "Config":
        """All settings: those given here, and the preset's for the rest."""
        given = self.given()
        return self if len(given) == len(fields(self)) else preset.changed(**given)

    def changed(self, **changes: Any) -> "Config":
        """A copy with some settings changed; mappings by role are merged."""
        known, before = [f.name for f in fields(self)], self.given()
        if length := next((name for name in LENGTHS if changes.get(name) is not None), None):
            changes = {**dict.fromkeys(set(LENGTHS) - {length, "epochs"}), **changes}
        for name, value in changes.items():
            if name not in known:
                raise TrainingError(f"there is no setting {name!r}; {did_you_mean(name, known)}".rstrip("; "))
            if isinstance(value, Mapping):
                changes[name] = {**before.get(name, {}), **value}
        return replace(self, **changes)


@functools.cache
def _annotations() -> dict[str, Any]:
    return get_type_hints(Config)


def _matches(value: Any, annotation: Any) -> bool:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return any(_matches(value, one) for one in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_matches(one, inner[0]) for one in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_matches(one, inner[1]) for one in value.values())
    if annotation in (int, float):
        return isinstance(value, int if annotation is int else int | float) and not isinstance(value, bool)
    return isinstance(value, annotation)


def _numbers(value: Any) -> list[float]:
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else [value]
    return [one for one in values if isinstance(one, int | float)]


def _describe(annotation: Any) -> str:
    origin, words = get_origin(annotation), {int: "a whole number", float: "a number", bool: "true or false"}
    if origin in (Union, UnionType):
        return " or ".join(_describe(one) for one in get_args(annotation) if one is not NoneType)
    if origin is Literal:
        return " or ".join(map(repr, get_args(annotation)))
    if origin is tuple:
        return "a list of numbers"
    return "a value for each role, as in {'head': ...}" if origin is Mapping else words[annotation]
