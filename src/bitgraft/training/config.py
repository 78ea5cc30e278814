"""How a task is trained, as plain data."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from bitgraft.errors import TrainingError

ROLES = ("scores", "k", "k1", "weights", "norms", "head")


@dataclass(frozen=True)
class Config:
    """Rates and optimisers go by role: `scores` (R), `k` (k0, k2, k3), `k1`, `norms`, `head`, `weights` (the rest)."""

    epochs: int = 30
    """Passes over the training images."""
    steps: int | None = None
    """In place of epochs: as many as come nearest to so many steps, and at least one; where tasks are trained together,
    to so many for each of them in the mean."""
    batch: int = 32
    """Images per optimiser step, over all processes."""
    accumulate: int = 1
    """A step's batch is run in so many parts."""
    rates: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(ROLES, 1e-4) | {"head": 1e-3})
    optimizers: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(ROLES, "adam") | {"head": "sgd"})
    """By role: "adam" or "sgd"."""
    momentum: float = 0.9
    """Of SGD."""
    eps: float = 1e-8
    """Of Adam."""
    weight_decay: Mapping[str, float] = field(default_factory=dict)
    """By role; decoupled from the rate's moments for Adam (as AdamW does)."""
    schedule: Literal["step", "cosine", "constant"] = "step"
    """How rates fall: once, at `drop_after`; to 0 at the end; or not at all."""
    drop_after: int | None = 15
    """Epochs after which the step schedule divides every rate by ten."""
    warmup: float = 0.0
    """Epochs over which rates rise from zero."""
    own_pace: bool = True
    """A method whose phases have rates and drops of their own (PackNet) keeps to them; else to those given here."""
    label_smoothing: float = 0.0
    """How much of each label is spread over all classes."""
    class_weights: Literal["balanced"] | tuple[float, ...] | None = None
    """Of the loss, one for each class; "balanced" is the inverse of how often a class comes."""
    scale_k2_by_r: float = 0.0
    """R starts at random in [-x, x], and k2 scales with mean(abs(R)); 0 is the paper's start."""
    gradient_centralization: bool = False
    """Subtract the mean of each filter's gradient. Otherwise a step shifts a whole filter, which inputs with a large
    mean (a white page) feel most."""
    mean_shift_correction: bool = False
    """Apply changes of a weight to its inputs minus their mean over the training images, measured once at the start.
    Only with statistics="kept": batch statistics remove the mean anyway."""
    clip_to_ema_norm: bool = False
    """Clip each tensor's gradient to the norm that Adam's second moment remembers. Otherwise one step too far makes the
    next gradients larger still, until the network gives the same answer to every image."""
    statistics: Literal["batch", "kept"] = "batch"
    """What a task's own norm layers normalise by in training: the batch over all processes, or running statistics that
    stay as they are (small images and batches make for poor statistics). A batch has a variance from two images on, so
    a last batch of one image joins the one before it."""
    head_init: bool = False
    """Set the task's norm statistics to those of its data and fit its head on cached features, before anything else
    learns."""
    patience: int | None = None
    """Stop after so many epochs without a better validation accuracy."""
    keep: Literal["last", "best"] = "last"
    """Which epoch the task ends as: the last, or the best on validation."""
    size: int | None = None
    """Pixels of a square input; by default the backbone's own."""
    resize: int | None = None
    """Pixels of the shorter side before the crop."""
    crop: Literal["random", "random-resized", "none"] = "random"
    """Which part of an image training sees."""
    squash: bool = False
    """Fit the whole image in, out of proportion, where otherwise the shorter side fills the frame."""
    flip: bool | None = None
    """Mirror images at random; by default as the data set allows."""
    seed: int = 0
    """Of the order of images, augmentation and what is random at the start."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "accumulate"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise TrainingError(f"{name}={value!r}: give a whole number from 1 on")
        for name in ("rates", "optimizers", "weight_decay"):
            stray = set(getattr(self, name)) - set(ROLES)
            if stray:
                raise TrainingError(f"{name} names the role {sorted(stray)[0]!r}; roles are {', '.join(ROLES)}")
        for role, kind in self.optimizers.items():
            if kind not in ("adam", "sgd"):
                raise TrainingError(f"the optimiser of {role!r} is {kind!r}: choose 'adam' or 'sgd'")
        if any(rate < 0 for rate in self.rates.values()):
            raise TrainingError(f"rates must not be negative: {dict(self.rates)}")

    def changed(self, **changes: Any) -> "Config":
        """A copy with some fields set; mappings by role take in what is given and keep the rest."""
        known = {f.name for f in fields(self)}
        if "epochs" in changes:
            changes = {"steps": None, **changes}
        for name, value in changes.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                raise TrainingError(
                    f"there is no setting {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
                )
            if isinstance(value, Mapping):
                changes[name] = {**getattr(self, name), **value}
        return replace(self, **changes)

    def epochs_of(self, steps_per_epoch: float) -> int:
        return self.epochs if self.steps is None else max(1, round(self.steps / steps_per_epoch))
