"""The method options that each preset sets. They shape a task, so they are needed before training."""

from collections.abc import Mapping
from typing import Any

from bitgraft.errors import TaskError

_TUNED: Mapping[str, Mapping[str, Any]] = {
    "full": {"per": "channel"},
    "simple": {"per": "channel"},
    "packnet": {"keep": 0.75},
}
OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "default": _TUNED,
    "quick": _TUNED,
    "quick-uncorrected": _TUNED,
    "imagenet-to-sketch": {},
    "decathlon": {},
}
"""preset -> method -> options that differ from the method's own. `bitgraft.training.presets` has the other settings."""


def preset_options(name: str | None, method: str) -> dict[str, Any]:
    """Return the options that a preset sets for a method; none without a preset."""
    if name is None:
        return {}
    if name not in OPTIONS:
        raise TaskError(f"there is no preset {name!r}; known are {', '.join(OPTIONS)}")
    return dict(OPTIONS[name].get(method, {}))
