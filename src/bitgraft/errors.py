"""Everything that bitgraft raises on purpose, one tree:

    BitgraftError
    ├── BackboneError          the backbone cannot be read, or is not what a call needs
    │   └── UnknownBackboneError   no network goes by that name
    ├── TaskError              a task's name, classes, head or options do not fit
    │   ├── UnknownTaskError   no task of that name
    │   └── NoFreeWeightsError PackNet has no weights left for a further task
    ├── TrainingError          training cannot start, or cannot go on
    │   └── StoppedError       it was asked to stop, and can be resumed
    ├── StoreError             a folder is no store, or of another backbone
    ├── SuiteError             a benchmark's suite says something that cannot be run
    ├── ServingError           a service cannot start, or cannot answer a request
    ├── FigureError            a figure cannot be drawn or written
    ├── ExportError            a task cannot be written in another format, or the file would not say the same
    ├── SharingError           a task file cannot be fetched or sent
    ├── DataError              images, labels or splits are missing, unreadable or do not fit together
    └── ArchiveError           a task file is refused
        ├── CorruptError       truncated, changed, or not a task file at all
        ├── NewerFormatError   written by a later bitgraft
        ├── WrongBackboneError belongs to another backbone
        ├── UnsafeNameError    a task name that is no plain file name
        ├── ClassesError       the class list does not fit the head
        └── MissingTaskError   depends on a task that is not here

Every message says what is wrong, where, and what to do. What is only worth knowing is a `BackboneWarning` or a
`DataWarning`.
"""


def how_to_install(extra: str) -> str:
    """What to type for packages that not everybody needs. bitgraft is not on a package index yet."""
    return f"in your clone of bitgraft, pip install '.[{extra}]'"


class BitgraftError(Exception):
    """The root: `except BitgraftError` catches whatever a user can mend."""


class BackboneError(BitgraftError, ValueError):
    pass


class BackboneWarning(UserWarning):
    """A backbone works, but hardly any of it could be changed by a task."""


class UnknownBackboneError(BackboneError):
    pass


class TaskError(BitgraftError, ValueError):
    pass


class UnknownTaskError(TaskError, KeyError):
    __str__ = Exception.__str__  # KeyError would show the message in quotes


class NoFreeWeightsError(TaskError):
    pass


class TrainingError(BitgraftError, RuntimeError):
    pass


class StoppedError(TrainingError):
    """The run was asked to stop, and can be resumed."""


class DataWarning(UserWarning):
    """Images will do for training, but not as well as they might."""


class DataError(BitgraftError, ValueError):
    pass


class StoreError(BitgraftError, ValueError):
    pass


class SuiteError(BitgraftError, ValueError):
    pass


class ServingError(BitgraftError, ValueError):
    pass


class FigureError(BitgraftError, ValueError):
    pass


class ExportError(BitgraftError, ValueError):
    pass


class SharingError(BitgraftError, ValueError):
    pass


class ArchiveError(BitgraftError, ValueError):
    pass


class CorruptError(ArchiveError):
    pass


class NewerFormatError(ArchiveError):
    pass


class WrongBackboneError(ArchiveError):
    pass


class UnsafeNameError(ArchiveError, TaskError):
    pass


class ClassesError(ArchiveError, TaskError):
    pass


class MissingTaskError(ArchiveError):
    pass
