"""The folder of a run: settings, checkpoint, metrics, and a lock against other commands."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bitgraft.backbone.files import write_atomically
from bitgraft.errors import TrainingError

STATE, SETTINGS, METRICS = "state.pt", "run.json", "metrics.jsonl"


def begun(folder: Path) -> bool:
    """Whether an unfinished run is here, with or without a checkpoint."""
    return interrupted(folder) or (folder / SETTINGS).exists()


def interrupted(folder: Path) -> bool:
    """Whether an unfinished run left a checkpoint here."""
    return (folder / STATE).exists()


def done(folder: Path) -> None:
    """Remove everything but the metrics, once the task is written."""
    (folder / STATE).unlink(missing_ok=True)
    (folder / SETTINGS).unlink(missing_ok=True)


@contextlib.contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Lock the folder against other commands, until the process ends at the latest; remove a new one if the run fails
    before its first checkpoint."""
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except OSError as cause:
        raise TrainingError(f"cannot write to {folder}: {cause.strerror}") from cause
    try:
        import fcntl  # not on Windows, where a folder cannot be opened

        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(
                f"another command is training in {folder}: wait for it, or choose another name"
            ) from None
        try:
            yield
        except Exception:
            if new and not interrupted(folder):
                done(folder)
                (folder / METRICS).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()
                    folder.parent.rmdir()
            raise
    finally:
        os.close(held)


def settle(folder: Path, settings: dict[str, Any], resume: bool) -> None:
    """Write the settings of a new run, or check that a resumed one has the same."""
    text = json.dumps(settings, indent=2)
    if not resume:
        (folder / STATE).unlink(missing_ok=True)  # of an earlier run
        write_atomically(folder / SETTINGS, text.encode())
        return
    try:
        was, wanted = json.loads((folder / SETTINGS).read_text()), json.loads(text)
    except (OSError, ValueError) as cause:
        raise TrainingError(f"{folder / SETTINGS} cannot be read ({cause}): pass --overwrite to start again") from cause
    if other := [name for name in wanted if was.get(name) != wanted[name]]:
        shown = "; ".join(f"{name} was {_short(was.get(name))}, is {_short(wanted[name])}" for name in other)
        raise TrainingError(
            f"the run in {folder} was started with other settings ({shown}): resume it with the same ones, or pass "
            "--overwrite to start again"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
