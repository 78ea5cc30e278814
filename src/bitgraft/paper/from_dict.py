"""Build dataclasses from TOML and JSON tables."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from bitgraft.errors import did_you_mean

T = TypeVar("T")
WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", tuple: "a list"}


def from_dict(kind: type[T], table: Any, where: str = "the file", *, ignore_unknown: bool = False) -> T:
    """Build a dataclass; lists become tuples, nested tables dataclasses, and null the default.

    Raises:
        ValueError: a field is missing, unknown or of the wrong type; the message says where.
    """
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} is {table!r}, not a table")
    hints = get_type_hints(kind)
    unknown = sorted(set(table) - set(hints))
    if unknown and not ignore_unknown:
        hint = did_you_mean(unknown[0], hints).strip() or f"it takes {', '.join(sorted(hints))}"
        raise ValueError(f"{where} has no setting {unknown[0]!r}; {hint}")
    values = {}
    for field in fields(cast(Any, kind)):
        required = field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in table:
            raise ValueError(f"{where} lacks {field.name!r}")
        if required or table.get(field.name) is not None:
            place = field.name if where == "the file" else f"{where}: {field.name}"
            values[field.name] = _value(table[field.name], hints[field.name], place, ignore_unknown)
    try:
        return kind(**values)
    except ValueError as fault:
        raise ValueError(str(fault) if where == "the file" else f"{where}: {fault}") from fault


def _value(value: Any, hint: Any, where: str, ignore_unknown: bool) -> Any:
    if NoneType in get_args(hint):  # X | None; the caller has handled null
        hint = get_args(hint)[0]
    inside, origin = get_args(hint), get_origin(hint)
    if is_dataclass(hint):
        return from_dict(cast(type[Any], hint), value, where, ignore_unknown=ignore_unknown)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_value(one, inside[0], f"{where} {i}", ignore_unknown) for i, one in enumerate(value, 1))
    if origin is Literal:
        if value in inside:
            return value
        raise ValueError(f"{where} is {value!r}, not one of {', '.join(map(repr, inside))}")
    plain = origin or hint
    accepted = (int, float) if plain is float else plain
    if not isinstance(value, accepted) or (isinstance(value, bool) and plain is not bool):
        raise ValueError(f"{where} is {value!r}, not {WORDS.get(plain, 'a table')}")
    return value
