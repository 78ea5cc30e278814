"""Presets: the paper's two protocols, and settings that train in minutes on a CPU. Some differ by method."""

from collections.abc import Mapping
from typing import Any

from bitgraft.errors import TrainingError
from bitgraft.methods import registry
from bitgraft.training.config import ROLES, Config

PAPER = Config(
    epochs=30,
    steps=None,
    minutes=None,
    batch=32,
    accumulate=1,
    rates=dict.fromkeys(ROLES, 1e-4) | {"head": 1e-3},
    relative_rates=False,
    optimizers=dict.fromkeys(ROLES, "adam") | {"head": "sgd"},
    momentum=0.9,
    eps=1e-8,
    weight_decay={},
    schedule="step",
    drop_after=15,
    warmup=0.0,
    own_pace=True,
    label_smoothing=0.0,
    class_weights=None,
    scale_k2_by_r=0.0,
    anneal_masks=0.0,
    gradient_centralization=False,
    mean_shift_correction=False,
    clip_to_ema_norm=False,
    statistics="batch",
    head_init=False,
    patience=None,
    keep="last",
    retreat=False,
    size=None,
    resize=None,
    crop="random",
    squash=False,
    flip=None,
    seed=0,
)
"""Common to the paper's protocols. It states every setting; the other presets change some."""
IMAGENET_TO_SKETCH = PAPER.changed(size=224, crop="random-resized")
DECATHLON = PAPER.changed(epochs=60, drop_after=45, size=64, resize=72)
UNCORRECTED = PAPER.changed(
    steps=250,
    rates={"scores": 1e-3, "k": 1e-3, "k1": 1e-4, "weights": 1e-3, "norms": 1e-3, "head": 1e-3},
    optimizers=dict.fromkeys(ROLES, "adam"),
    eps=1e-12,
    schedule="cosine",
    drop_after=None,
    warmup=0.1,
    scale_k2_by_r=1e-2,
    gradient_centralization=True,
    clip_to_ema_norm=True,
    statistics="kept",
    head_init=True,
)
"""`quick` without mean-shift correction; the tables of docs/results that compare all methods use it."""
QUICK = UNCORRECTED.changed(
    rates={"scores": 2e-2, "k1": 1e-3, "weights": 2e-2},
    relative_rates=True,
    mean_shift_correction=True,
    label_smoothing=0.1,
    keep="best",
    retreat=True,
)
"""The result is never worse on validation than the linear probe it starts from."""
DEFAULT = QUICK.changed(steps="auto", patience=0.25)
"""The length depends on the data."""


def _uncorrected(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that turn `quick` back into `quick-uncorrected`, for methods that were measured with that."""
    rates = {role: UNCORRECTED.rates[role] for role in ("scores", "k1", "weights")} | given.get("rates", {})
    return {"relative_rates": False, "mean_shift_correction": False, "label_smoothing": 0.0, **given, "rates": rates}


_RATES: Mapping[str, Mapping[str, Any]] = {
    "full": {"rates": {"k": 3e-3}},
    "simple": {"rates": {"k": 3e-3}},
    "piggyback-bn": {"rates": {"scores": 3e-4}},
    "piggyback": {"rates": {"scores": 2e-4}},
    "packnet": {"own_pace": False},
    "dan": {"rates": {"weights": 1e-4}},
    "adapters-series": {"rates": {"weights": 1e-4}},
    "adapters-parallel": {"rates": {"weights": 1e-4}},
    "adapters-joint": {"rates": {"weights": 1e-4}},
    "classifier": {},
}
_MASKS: Mapping[str, Any] = {"rates": {"k": 3e-3}, "eps": 1e-8, "anneal_masks": 0.6}
_CORRECTED: Mapping[str, Mapping[str, Any]] = {
    **{method: _uncorrected(given) for method, given in _RATES.items()},
    "full": _MASKS,
    "simple": _MASKS,
    "piggyback-bn": {"rates": {"scores": 5e-4}},
    "lora": {"rates": {"weights": 1e-2}, "eps": 1e-4},
    "norms": {"rates": {"norms": 1e-2}},
}
BY_METHOD: Mapping[tuple[str, str], Mapping[str, Any]] = {
    **{("quick-uncorrected", method): given for method, given in _RATES.items()},
    **{(name, method): given for name in ("default", "quick") for method, given in _CORRECTED.items()},
}
"""(preset, method) -> changed settings; docs/results/quick.md and domains.md have the grids they were chosen from."""
PRESETS = {
    "default": DEFAULT,
    "quick": QUICK,
    "quick-uncorrected": UNCORRECTED,
    "imagenet-to-sketch": IMAGENET_TO_SKETCH,
    "decathlon": DECATHLON,
}


def preset(name: str, method: str = "full") -> Config:
    """Return the settings of a preset for a method: default, quick, imagenet-to-sketch or decathlon."""
    if name not in PRESETS:
        raise TrainingError(f"there is no preset {name!r}; known are {', '.join(PRESETS)}")
    return for_method(PRESETS[name], name, registry.get(method).name)


def for_method(config: Config, preset: str, method: str) -> Config:
    """Apply the changes that a preset makes for a method."""
    return config.changed(**BY_METHOD.get((preset, method), {}))
