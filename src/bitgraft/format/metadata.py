"""What a task says of itself, as the metadata of its file, and back with every field checked."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from bitgraft.backbone.files import check_name
from bitgraft.errors import ClassesError, CorruptError, NewerFormatError, TaskError
from bitgraft.methods import registry

COUNTED_CLASSES = 1 << 20  # more classes than this are written out even if they are called 0, 1, 2, ...
DIGEST = re.compile("[0-9a-f]{64}")
OBJECTS = ("leans_on", "metrics", "options", "preprocessing", "shapes")
_FIRST = {*OBJECTS, "backbone", "checksum", "classes", "format", "head", "head_layer", "method", "name"}
_SECOND = {*_FIRST, "channels", "norms"}
FIELDS = {1: _FIRST, 2: _SECOND, 3: _SECOND}
"""By version of the format."""
Shapes = Mapping[str, tuple[int, ...]]
HeadKind = Literal["classes", "linear", "module", "keep", "none"]
"""classes: the backbone's own last layer with other tensors in it; linear: one put behind a backbone that gives
features, or in the place of a tied last layer; module: the user's; keep: the backbone's, as it is; none: features."""


@dataclass(frozen=True)
class Metadata:
    """What a task says of itself, all of it plain data that goes into its file."""

    name: str
    method: str
    options: Mapping[str, Any]
    head: HeadKind
    classes: tuple[str, ...] | None = None
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    depends_on: Mapping[str, str] = field(default_factory=dict)
    """Earlier tasks that this one cannot run without, with their fingerprints (PackNet, borrowed masks), in order."""


def write_metadata(metadata: Metadata) -> dict[str, Any]:
    """Its fields, where classes called 0 ... n - 1 are written as n."""
    about, names = asdict(metadata), metadata.classes
    if names is not None and len(names) <= COUNTED_CLASSES and names == _counted(len(names)):
        about["classes"] = len(names)
    about["leans_on"] = about.pop("depends_on")
    about["options"] = {name: value for name, value in about["options"].items() if value is not None}
    return about


def read_metadata(about: Mapping[str, Any], source: str) -> Metadata:
    """The metadata in a file's metadata. Whatever is wrong there is an `ArchiveError` that says what."""
    _check_fields(about, source)
    method = _method(about["method"], source)
    most = len(set(about["leans_on"].values())) if method.borrows else int(method.depends_on_previous)
    if len(about["leans_on"]) > most:  # one predecessor, or different tasks to borrow from
        raise CorruptError(f"{source}: a task of method {method.name!r} cannot depend on {list(about['leans_on'])}")
    return Metadata(
        name=check_name(about["name"]),
        method=method.name,
        options=registry.plain(_options(method, about["options"], source)),
        head=about["head"],
        classes=_classes(about["classes"], about["head"], source),
        preprocessing=about["preprocessing"],
        depends_on={check_name(name): digest for name, digest in about["leans_on"].items()},
    )


def read_shapes(about: Mapping[str, Any], source: str) -> Shapes:
    """The shape of each weight that the task transforms."""
    for name, shape in about["shapes"].items():
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise CorruptError(f"{source}: {name!r} has shape {reprlib.repr(shape)}, which is none; it is not usable")
    return {name: tuple(shape) for name, shape in about["shapes"].items()}


def _check_fields(about: Mapping[str, Any], source: str) -> None:
    if set(about) != (expected := FIELDS[about["format"]]):
        raise CorruptError(f"{source} has the metadata fields {sorted(about)}, not {sorted(expected)}: not usable")
    for name in OBJECTS:
        if not isinstance(about[name], dict):
            raise CorruptError(f"{source}: {name!r} is {about[name]!r}, which is no JSON object; it is not usable")
    for digest in [about["backbone"], *about["leans_on"].values()]:
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise CorruptError(f"{source}: {digest!r} should be 64 hexadecimal digits; it is not usable")
    layer = about["head_layer"]
    several = isinstance(layer, list) and len(layer) > 1 and all(isinstance(name, str) for name in layer)
    if not (several or isinstance(layer, str | None)) or (layer is None and about["head"] == "classes"):
        raise CorruptError(f"{source}: {layer!r} is no layer for a head of kind {about['head']!r}; it is not usable")
    if about["head"] not in get_args(HeadKind):
        known = ", ".join(get_args(HeadKind))
        raise CorruptError(f"{source}: there is no kind of head {about['head']!r}, known are {known}; it is not usable")


def _method(name: Any, source: str) -> registry.Method:
    if not isinstance(name, str):
        raise CorruptError(f"{source}: its method is {name!r}, which is no name; it is not usable")
    try:
        return registry.get(name)
    except TaskError as cause:
        raise NewerFormatError(f"{source}: {cause}; install a newer bitgraft, or register the method") from cause


def _options(method: registry.Method, given: Mapping[str, Any], source: str) -> registry.Options:
    if unknown := sorted(set(given) - set(registry.plain(method.options))):
        raise NewerFormatError(
            f"{source}: method {method.name!r} has no option {unknown[0]!r} here; install a newer bitgraft"
        )
    try:
        return method.with_options(given)
    except (TaskError, TypeError, ValueError, OverflowError) as cause:
        raise CorruptError(f"{source}: an option of method {method.name!r} is not usable ({cause})") from cause


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
            f"{source}: its classes, {reprlib.repr(written)}, are neither a number nor a list of different names, "
            f"or do not go with a head of kind {head!r}; it is not usable"
        )
    return names
