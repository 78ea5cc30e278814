"""What an admin's request does to the store: the file is checked, then moved; the library follows at once."""

from pathlib import Path
from typing import Any

from bitgraft.errors import TaskError, UnsafeNameError
from bitgraft.serving.library import Library
from bitgraft.serving.refusals import Refusal
from bitgraft.serving.versions import Versions


def change(library: Library, action: str, name: str, file: str = "", canary: float | None = None) -> dict[str, Any]:
    """Put a file, or do what the method of `Versions` of this name does; returns what is served then."""
    versions = Versions(library.store)
    try:
        if name == library.net.original:
            raise Refusal(409, f"{name!r} is the backbone's own task: it cannot be changed")
        if action == "put":
            _put(library, versions, name, Path(file), canary)
        else:
            if action == "rollback" and versions.previous(name).exists():
                _check(library, name, versions.previous(name))  # it may have been broken when it was replaced
            getattr(versions, action)(name)
    except UnsafeNameError as problem:
        raise Refusal(400, str(problem)) from problem
    except OSError as problem:
        raise Refusal(507, f"the store cannot be written: {problem.strerror}") from problem
    library.scan()
    entry = library.tasks.get(name)
    served = {"name": name, "version": None} if entry is None else library.about(entry)
    return {**served, "previous": versions.previous(name).exists()}


def _put(library: Library, versions: Versions, name: str, file: Path, canary: float | None) -> None:
    _check(library, name, file)
    if canary is None:
        versions.put(name, file)
    else:
        versions.put_canary(name, file, canary)


def _check(library: Library, name: str, file: Path) -> None:
    try:
        library.check(name, file)
    except TaskError as problem:
        raise Refusal(422, f"the task file is refused: {problem}") from problem
