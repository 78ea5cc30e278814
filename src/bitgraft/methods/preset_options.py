"""The method options that each preset sets. They shape a task, so they are needed before training."""

from collections.abc import Mapping
from typing import Any

from bitgraft.errors import TaskError

PRESETS = ("default", "quick", "quick-uncorrected", "imagenet-to-sketch", "decathlon")
PAPER = PRESETS[-2:]
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "full": {"per": "channel"},
    "simple": {"per": "channel"},
    "packnet": {"keep": 0.75},
}
"""method -> options that differ from the method's own, except in the paper's presets."""


def preset_options(name: str | None, method: str) -> dict[str, Any]:
    """Return the options that a preset sets for a method; none without a preset."""
    if name not in (None, *PRESETS):
        raise TaskError(f"there is no preset {name!r}; known are {', '.join(PRESETS)}")
    return {} if name in (None, *PAPER) else dict(OPTIONS.get(method, {}))
