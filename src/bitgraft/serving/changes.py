"""Changes to a store's tasks: the file is checked, then moved, and served at once."""

from pathlib import Path
from typing import Any

from bitgraft.errors import TaskError, UnsafeNameError
from bitgraft.serving.http_error import HttpError
from bitgraft.serving.library import Library
from bitgraft.serving.versions import Versions


def change(library: Library, action: str, name: str, *args: Any) -> dict[str, Any]:
    """Call the `Versions` method called `action` and return the task that is served afterwards, as JSON."""
    versions = Versions(library.store)
    try:
        if name == library.net.original:
            raise HttpError(409, f"{name!r} is the backbone's own task: it cannot be changed")
        if action in ("put", "put_canary"):
            _check(library, name, args[0])
        elif action == "rollback" and versions.previous(name).exists():
            _check(library, name, versions.previous(name))  # it may have been broken when it was replaced
        getattr(versions, action)(name, *args)
    except UnsafeNameError as problem:
        raise HttpError(400, str(problem)) from problem
    except OSError as problem:
        raise HttpError(507, f"cannot write to the store: {problem.strerror}") from problem
    library.scan()
    entry = library.tasks.get(name)
    served = {"name": name, "version": None} if entry is None else library.info(entry)
    return {**served, "previous": versions.previous(name).exists()}


def _check(library: Library, name: str, file: Path) -> None:
    try:
        library.check(name, file)
    except TaskError as problem:
        raise HttpError(422, f"the task file was rejected: {problem}") from problem
