"""Atomic writes and whole reads of files, with readable errors."""

import contextlib
import os
import re
import secrets
import stat
import time
from pathlib import Path

from bitgraft.errors import ArchiveError, UnsafeNameError

PACKAGE = "package:"  # prefix of an installed package that contains weights
PART = ".bitgraft-{}.part"  # a file that is being written; hidden, and never a task's file name
STALE = 3600.0  # seconds after which a part must be left over from a killed process
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def check_name(name: str) -> str:
    """Return the name if it can be a task's, and so a file's: letters, digits, dot, dash and underscore, no path."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UnsafeNameError(
            f"{name!r} cannot be a task's name: use up to 100 letters, digits, '.', '-' and '_', "
            "starting with a letter or digit"
        )
    return name


def write_atomically(path: str | Path, data: bytes | memoryview) -> None:
    """Write to a part file, flush it to disk, then rename it: the target is complete or unchanged."""
    try:
        target = Path(os.path.realpath(path))  # a link stays a link
        if target.exists() and not target.is_file():
            raise OSError(f"it is {_kind(target)}; give the name of a file")
        sweep_parts(target.parent)
        part = target.parent / PART.format(secrets.token_hex(8))
        try:
            with os.fdopen(os.open(part, NEW, 0o666), "wb") as file:  # the kernel applies the umask
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    except (OSError, ValueError) as cause:
        raise ArchiveError(f"cannot write {path}: {_reason(cause, path)}; nothing was changed") from cause
    _flush_folder(target.parent)


def aligned_buffer(size: int) -> memoryview:
    """Return a buffer aligned to a cache line, like torch's tensors: alignment can change the last bit of a product."""
    import numpy as np  # slow to import, and not needed to write files

    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer.data[start : start + size]


def read_whole(path: str | Path) -> memoryview:
    """Return a regular file's bytes in an aligned buffer. Reading a pipe or a device might never end."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(f"it is {_kind(Path(path))}; give the name of a file")
        with open(path, "rb") as file:
            buffer = aligned_buffer(os.fstat(file.fileno()).st_size)
            return buffer[: file.readinto(buffer)]
    except (OSError, ValueError) as cause:
        raise ArchiveError(f"cannot read {path}: {_reason(cause, path)}") from cause


def sweep_parts(folder: Path) -> None:
    """Remove old part files, left over from killed processes."""
    for part in folder.glob(PART.format("*")):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > STALE:
                part.unlink()


def _flush_folder(folder: Path) -> None:
    """Make the rename survive a power cut, if the file system can."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: no O_DIRECTORY on Windows
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _kind(path: Path) -> str:
    return "a folder" if path.is_dir() else "a device or a pipe"


def _reason(cause: OSError | ValueError, path: str | Path) -> str:
    folder = Path(os.path.realpath(path)).parent if "\0" not in str(path) else None
    if isinstance(cause, FileNotFoundError) and folder is not None and not folder.exists():
        return f"there is no folder {folder}"
    return (isinstance(cause, OSError) and cause.strerror) or str(cause)
