"""The options that a preset gives a method. They say what a task is made of, so they are needed before training."""

from collections.abc import Mapping
from typing import Any

from bitgraft.errors import TaskError

_MEASURED: Mapping[str, Mapping[str, Any]] = {
    "full": {"per": "channel"},
    "simple": {"per": "channel"},
    "packnet": {"keep": 0.75},
}
OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "default": _MEASURED,
    "quick": _MEASURED,
    "quick-uncorrected": _MEASURED,
    "imagenet-to-sketch": {},
    "decathlon": {},
}
"""By preset and method, where they are not the method's own; `bitgraft.training.presets` has the presets' settings."""


def preset_options(name: str | None, method: str) -> dict[str, Any]:
    """The options of a method in a preset; without a preset the method keeps its own."""
    if name is None:
        return {}
    if name not in OPTIONS:
        raise TaskError(f"there is no preset {name!r}; known are {', '.join(OPTIONS)}")
    return dict(OPTIONS[name].get(method, {}))
