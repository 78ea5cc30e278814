"""A task's description of itself: write it as a file's metadata, and read it back with every field checked."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from bitgraft.backbone.files import check_name
from bitgraft.errors import ClassesError, CorruptError, NewerFormatError, TaskError
from bitgraft.format.header import is_shape
from bitgraft.methods import registry

COUNTED_CLASSES = 1 << 20  # beyond this, classes named 0, 1, 2, ... are listed, not counted
DIGEST = re.compile("[0-9a-f]{64}")
OBJECTS = ("leans_on", "metrics", "options", "preprocessing", "shapes")
_FIRST = {*OBJECTS, "backbone", "checksum", "classes", "format", "head", "head_layer", "method", "name"}
_SECOND = {*_FIRST, "channels", "norms"}
FIELDS = {1: _FIRST, 2: _SECOND, 3: _SECOND}
"""By format version."""
Shapes = Mapping[str, tuple[int, ...]]
HeadLayer = str | tuple[str, ...] | None
HeadKind = Literal["classes", "linear", "module", "keep", "none"]
"""classes: the backbone's last layer with new tensors; linear: a new layer after a backbone that returns features, or
instead of a tied last layer; module: the user's own; keep: the backbone's last layer, unchanged; none: features."""


@dataclass(frozen=True)
class Metadata:
    """A task's description of itself, as plain data."""

    name: str
    method: str
    options: Mapping[str, Any]
    head: HeadKind
    classes: tuple[str, ...] | None = None
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    depends_on: Mapping[str, str] = field(default_factory=dict)
    """Earlier tasks that this one needs (PackNet, borrowed masks), in order, each with its content hash: the
    one in the file or, for a new task, that when it was added. A save computes it again."""


@dataclass(frozen=True)
class FileInfo:
    """What a task file says besides its tensors."""

    metadata: Metadata
    backbone: str
    """The fingerprint of the task's backbone."""
    head_layer: HeadLayer
    """The name of the backbone's last layer, or layers; None for a backbone that returns features."""
    shapes: Shapes
    """The shapes of the transformed weights, in the order of the forward pass."""
    metrics: Mapping[str, Any]
    format: int = field(default=1, kw_only=True)
    """The format version: 2 for a compact task, 3 for one with a description, 1 otherwise."""


def write_info(info: FileInfo) -> dict[str, Any]:
    """Return the metadata's fields as JSON. Classes named 0 ... n - 1 are written as n."""
    about, names = asdict(info.metadata), info.metadata.classes
    if names is not None and len(names) <= COUNTED_CLASSES and names == _counted(len(names)):
        about["classes"] = len(names)
    about["leans_on"] = about.pop("depends_on")
    about["options"] = {name: value for name, value in about["options"].items() if value is not None}
    rest = {name: getattr(info, name) for name in ("backbone", "format", "head_layer")}
    return {**about, **rest, "shapes": dict(info.shapes), "metrics": dict(info.metrics)}


def read_info(about: Mapping[str, Any], source: str) -> FileInfo:
    """Check the metadata's fields and return what they say. Any fault is an `ArchiveError`."""
    _check_fields(about, source)
    method = _method(about["method"], source)
    most = len(set(about["leans_on"].values())) if method.borrows else int(method.depends_on_previous)
    if len(about["leans_on"]) > most:  # one predecessor, or different tasks to borrow from
        raise CorruptError(f"{source} is corrupt: method {method.name!r} cannot depend on {list(about['leans_on'])}")
    metadata = Metadata(
        name=check_name(about["name"]),
        method=method.name,
        options=asdict(_options(method, about["options"], source)),
        head=about["head"],
        classes=_classes(about["classes"], about["head"], source),
        preprocessing=about["preprocessing"],
        depends_on={check_name(name): digest for name, digest in about["leans_on"].items()},
    )
    layer = about["head_layer"]
    layer = tuple(layer) if isinstance(layer, list) else layer
    shapes = {name: tuple(shape) for name, shape in about["shapes"].items()}
    return FileInfo(metadata, about["backbone"], layer, shapes, about["metrics"], format=about["format"])


def _check_fields(about: Mapping[str, Any], source: str) -> None:
    if set(about) != (expected := FIELDS[about["format"]]):
        raise CorruptError(f"{source} is corrupt: its metadata fields are {sorted(about)}, not {sorted(expected)}")
    for name in OBJECTS:
        if not isinstance(about[name], dict):
            raise CorruptError(f"{source} is corrupt: {name!r} is {about[name]!r}, not a JSON object")
    for digest in [about["backbone"], *about["leans_on"].values()]:
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise CorruptError(f"{source} is corrupt: {digest!r} is not a hash of 64 hexadecimal digits")
    for name, shape in about["shapes"].items():
        if not is_shape(shape):
            raise CorruptError(f"{source} is corrupt: {reprlib.repr(shape)} is not a shape ({name!r})")
    layer = about["head_layer"]
    several = isinstance(layer, list) and len(layer) > 1 and all(isinstance(name, str) for name in layer)
    if not (several or isinstance(layer, str | None)) or (layer is None and about["head"] == "classes"):
        raise CorruptError(f"{source} is corrupt: a head of kind {about['head']!r} cannot have head_layer {layer!r}")
    if about["head"] not in (known := get_args(HeadKind)):
        raise CorruptError(f"{source} is corrupt: its head is {about['head']!r}, not one of {', '.join(known)}")


def _method(name: Any, source: str) -> registry.Method:
    if not isinstance(name, str):
        raise CorruptError(f"{source} is corrupt: its method is {name!r}, not a name")
    try:
        return registry.get(name)
    except TaskError as cause:
        raise NewerFormatError(f"{source}: {cause}; install a newer bitgraft, or register the method") from cause


def _options(method: registry.Method, given: Mapping[str, Any], source: str) -> registry.Options:
    if unknown := sorted(set(given) - set(asdict(method.options))):
        raise NewerFormatError(
            f"{source}: this bitgraft has no option {unknown[0]!r} for method {method.name!r}: install a newer one"
        )
    try:
        return method.with_options(given)
    except (TaskError, TypeError, ValueError, OverflowError) as cause:
        raise CorruptError(f"{source} is corrupt: invalid option of method {method.name!r} ({cause})") from cause


def _counted(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def _classes(written: Any, head: str, source: str) -> tuple[str, ...] | None:
    if written is None and head in ("keep", "module", "none"):
        return None
    names: tuple[str, ...] = ()
    if type(written) is int and 0 < written <= COUNTED_CLASSES:
        names = _counted(written)
    elif isinstance(written, list) and all(isinstance(name, str) for name in written):
        names = tuple(written)
    if not names or len(set(names)) != len(names) or head == "none":
        raise ClassesError(
            f"{source} is corrupt: classes {reprlib.repr(written)} are not a number or a list of distinct names, "
            f"or do not match a head of kind {head!r}"
        )
    return names
