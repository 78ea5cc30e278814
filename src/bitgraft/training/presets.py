"""The paper's protocols, and one for a CPU and minutes, with what each has otherwise for a method."""

from collections.abc import Mapping
from typing import Any

from bitgraft.errors import TrainingError
from bitgraft.training.config import ROLES, Config

IMAGENET_TO_SKETCH = Config(size=224, crop="random-resized")
DECATHLON = Config(epochs=60, drop_after=45, size=64, resize=72)
UNCORRECTED = Config(
    steps=250,
    rates={"scores": 1e-3, "k": 1e-3, "k1": 1e-4, "weights": 1e-3, "norms": 1e-3, "head": 1e-3},
    optimizers=dict.fromkeys(ROLES, "adam"),
    eps=1e-12,
    schedule="cosine",
    drop_after=None,
    warmup=1.0,
    scale_k2_by_r=1e-3,
    gradient_centralization=True,
    clip_to_ema_norm=True,
    statistics="kept",
    head_init=True,
)
"""What `quick` was before levelling: the tables of docs/results that have every method were made with it."""
QUICK = UNCORRECTED.changed(rates={"scores": 2e-3, "weights": 2e-3}, mean_shift_correction=True, label_smoothing=0.1)


def _uncorrected(given: Mapping[str, Any]) -> dict[str, Any]:
    """For methods that have been measured so: back from `quick` to what it was."""
    rates = {role: UNCORRECTED.rates[role] for role in ("scores", "weights")} | given.get("rates", {})
    return {"mean_shift_correction": False, "label_smoothing": 0.0, **given, "rates": rates}


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
    "lora": {},
}
BY_METHOD: Mapping[tuple[str, str], Mapping[str, Any]] = {
    **{("quick-uncorrected", method): given for method, given in _RATES.items()},
    **{("quick", method): _uncorrected(given) for method, given in _RATES.items()},
    **{("quick", method): {"rates": {"scores": 4e-3, "k": 3e-3}, "eps": 2e-3} for method in ("full", "simple")},
    ("quick", "piggyback-bn"): {"rates": {"scores": 5e-4}},
}
"""(preset, method) -> what that method has otherwise; docs/results/quick.md has the grid it was chosen from."""
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "full": {"per": "channel"},
    "simple": {"per": "channel"},
    "packnet": {"keep": 0.75},
}
OPTIONS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    (name, method): given for name in ("quick", "quick-uncorrected") for method, given in _OPTIONS.items()
}
"""(preset, method) -> the method's options, where the protocol has others than the method."""
PRESETS = {
    "quick": QUICK,
    "quick-uncorrected": UNCORRECTED,
    "imagenet-to-sketch": IMAGENET_TO_SKETCH,
    "decathlon": DECATHLON,
}


def preset(name: str, method: str = "full") -> Config:
    """A protocol by its name, with the method's own rates where the protocol has some."""
    if name not in PRESETS:
        raise TrainingError(f"there is no preset {name!r}; known are {', '.join(PRESETS)}")
    return for_method(PRESETS[name], name, method)


def for_method(config: Config, preset: str, method: str) -> Config:
    """A protocol's settings with those that it has for a method in their place."""
    return config.changed(**BY_METHOD.get((preset, method), {}))


def preset_options(name: str, method: str) -> dict[str, Any]:
    """The options that a protocol gives a method: for `net.add_task(..., **preset_options("quick", "full"))`."""
    return dict(OPTIONS.get((name, method), {}))
