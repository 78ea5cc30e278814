"""The state of a run on disk, so that a killed one goes on as if nothing had happened."""

import io
from pathlib import Path
from typing import Any

import torch

from bitgraft.errors import TrainingError
from bitgraft.files import write_atomically


def save(path: Path, state: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, buffer.getvalue())


def load(path: Path) -> dict[str, Any]:
    """Tensors and plain data only: nothing in a checkpoint is ever executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise TrainingError(f"there is nothing to resume at {path}: start without --resume") from None
    except Exception as cause:  # torch raises whatever the damage leads to
        raise TrainingError(f"the checkpoint {path} cannot be read ({cause}): remove it and start anew") from cause
    if not isinstance(state, dict):
        raise TrainingError(f"{path} is not a checkpoint of bitgraft")
    return state
