"""Files that are written whole or not at all, and read with a plain sentence where they cannot be."""

import contextlib
import os
import re
import secrets
import stat
import time
from pathlib import Path

from bitgraft.errors import ArchiveError, UnsafeNameError

PACKAGE = "package:"  # before the name of an installed package that holds weights
PART = ".bitgraft-{}.part"  # what a save is called until it is whole; hidden, and never a task's file name
STALE = 3600.0  # seconds after which a part must be one that a killed save left behind
BUFFER = 1 << 20  # bytes; a task's hundreds of small tensors go out in few calls
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def check_name(name: str) -> str:
    """A task's name is also a file's: letters, digits, dot, dash and underscore, no path."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UnsafeNameError(
            f"{name!r} cannot be a task's name: use up to 100 letters, digits, '.', '-' and '_', "
            "starting with a letter or digit"
        )
    return name


def write_atomically(path: str | Path, *chunks: bytes | memoryview) -> None:
    """Write beside the file, make sure that it is on disk, then put it in the file's place in one step."""
    try:
        target = Path(os.path.realpath(path))  # a link stays a link
        if target.exists() and not target.is_file():
            raise ArchiveError(f"cannot write {path}: it is {_kind(target)}; give the name of a file")
        sweep_parts(target.parent)
        part = target.parent / PART.format(secrets.token_hex(8))
        try:
            with os.fdopen(os.open(part, NEW, 0o666), "wb", BUFFER) as file:  # the kernel takes the umask off
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    except (OSError, ValueError) as cause:
        if isinstance(cause, ArchiveError):
            raise
        raise ArchiveError(f"cannot write {path}: {_reason(cause, path)}; nothing was changed") from cause
    _flush_folder(target.parent)


def aligned_room(size: int) -> memoryview:
    """Room for so many bytes that begins on a cache line, as torch's own tensors do: a product's last bit depends on
    where its matrices lie."""
    import numpy as np  # few of those who write files need it

    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room.data[start : start + size]


def read_whole(path: str | Path) -> memoryview:
    """A file's bytes, to be used where they are. Only of a plain file: reading a pipe or a device might never end."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ArchiveError(f"cannot read {path}: it is {_kind(Path(path))}; give the name of a file")
        with open(path, "rb") as file:
            room = aligned_room(os.fstat(file.fileno()).st_size)
            return room[: file.readinto(room)]
    except (OSError, ValueError) as cause:
        if isinstance(cause, ArchiveError):
            raise
        raise ArchiveError(f"cannot read {path}: {_reason(cause, path)}") from cause


def sweep_parts(folder: Path) -> None:
    """Remove what killed saves left behind long ago."""
    for part in folder.glob(PART.format("*")):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > STALE:
                part.unlink()


def _flush_folder(folder: Path) -> None:
    """Make the new name last through a power cut, where the system can: the file is in place in any case."""
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
