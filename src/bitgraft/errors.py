"""All exceptions that bitgraft raises on purpose:

    BitgraftError
    ├── BackboneError          the backbone cannot be used, or does not fit the call
    │   └── UnknownBackboneError   no network has that name
    ├── TaskError              a task's name, classes, head or options are invalid
    │   ├── UnknownTaskError   no task has that name
    │   └── NoFreeWeightsError PackNet has no weights left for another task
    ├── TrainingError          training cannot start or continue
    │   └── StoppedError       training was stopped on request, and can be resumed
    ├── StoreError             a folder is not a store, or belongs to another backbone
    ├── SuiteError             a benchmark suite is invalid
    ├── ServingError           the service cannot start, or cannot answer a request
    ├── FigureError            a figure cannot be drawn or written
    ├── ExportError            a task cannot be exported, or the exported file gives different results
    ├── SharingError           a task file cannot be downloaded or uploaded
    ├── DataError              images, labels or splits are missing, unreadable or inconsistent
    └── ArchiveError           a task file cannot be read or written
        ├── CorruptError       truncated, modified, or not a task file
        ├── NewerFormatError   written by a newer bitgraft
        ├── WrongBackboneError made for another backbone
        ├── UnsafeNameError    the task's name is not a plain file name
        ├── ClassesError       the class list does not fit the head
        └── MissingTaskError   depends on a task that is not loaded

Every message says what is wrong, where, and what to do. Warnings are `BackboneWarning` and `DataWarning`.
"""

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "did you mean 'X'? " if one of the known names is like this one, else an empty text."""
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f"did you mean {close[0]!r}? " if close else ""


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra. bitgraft is not on a package index yet."""
    return f"in your clone of bitgraft, pip install '.[{extra}]'"


class BitgraftError(Exception):
    """The base class: `except BitgraftError` catches everything that the user can fix."""


class BackboneError(BitgraftError, ValueError): ...


class BackboneWarning(UserWarning):
    """A backbone works, but tasks can change little of it."""


class UnknownBackboneError(BackboneError): ...


class TaskError(BitgraftError, ValueError): ...


class UnknownTaskError(TaskError, KeyError):
    __str__ = Exception.__str__  # KeyError would quote the message


class NoFreeWeightsError(TaskError): ...


class TrainingError(BitgraftError, RuntimeError): ...


class StoppedError(TrainingError): ...


class DataWarning(UserWarning):
    """The images can be used for training, but the task may be poor."""


class DataError(BitgraftError, ValueError): ...


class StoreError(BitgraftError, ValueError): ...


class SuiteError(BitgraftError, ValueError): ...


class ServingError(BitgraftError, ValueError): ...


class FigureError(BitgraftError, ValueError): ...


class ExportError(BitgraftError, ValueError): ...


class SharingError(BitgraftError, ValueError): ...


class ArchiveError(BitgraftError, ValueError): ...


class CorruptError(ArchiveError): ...


class NewerFormatError(ArchiveError): ...


class WrongBackboneError(ArchiveError): ...


class UnsafeNameError(ArchiveError, TaskError): ...


class ClassesError(ArchiveError, TaskError): ...


class MissingTaskError(ArchiveError): ...
