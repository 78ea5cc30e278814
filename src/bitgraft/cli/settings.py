"""Settings of a run from what is typed: a preset with changes, options of a method, and how they are shown."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from bitgraft.training.config import Config


class Schedule(StrEnum):
    step = "step"
    cosine = "cosine"
    constant = "constant"


class Keep(StrEnum):
    best = "best"
    last = "last"


class ClassWeights(StrEnum):
    balanced = "balanced"


class Precision(StrEnum):
    no = "no"
    bf16 = "bf16"
    fp16 = "fp16"


def settled(preset: str, method: str, changes: Mapping[str, Any]) -> "Config":
    """The preset as it is for the method, with what was given in place of its own; what was not given is None."""
    from bitgraft.errors import TrainingError
    from bitgraft.training.presets import preset as find_preset

    given = {key: value for key, value in changes.items() if value is not None}
    try:
        return find_preset(preset, method).changed(
            **{key: value.value if isinstance(value, StrEnum) else value for key, value in given.items()}
        )
    except TrainingError as fault:
        raise typer.BadParameter(str(fault)) from fault


def by_role(given: Sequence[str] | None, option: str) -> dict[str, float] | None:
    """ROLE=VALUE pairs; a value alone is for every role."""
    if not given:
        return None
    from bitgraft.training.config import ROLES

    values: dict[str, float] = {}
    for text in given:
        role, _, value = text.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            raise typer.BadParameter(f"{option} {text}: give ROLE=NUMBER, as in {option} k=3e-3") from None
        if not 0 <= number < float("inf"):
            raise typer.BadParameter(f"{option} {text}: the number must not be negative")
        if role and role not in ROLES:
            raise typer.BadParameter(f"{option} {text}: there is no role {role!r}; roles are {', '.join(ROLES)}")
        values |= {role: number} if role else dict.fromkeys(ROLES, number)
    return values


def method_options(method: str, given: Sequence[str] | None, preset: str | None = None) -> dict[str, Any]:
    """NAME=VALUE pairs on top of the preset's own, checked against the method; values are JSON, or else plain words."""
    from bitgraft.errors import TaskError
    from bitgraft.methods import registry
    from bitgraft.training.presets import preset_options

    options = {} if preset is None else preset_options(preset, method)
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"--option {text}: give NAME=VALUE, as in --option k1=0")
        options[name] = _value(value)
    try:
        registry.get(method).with_options(options)
    except (TaskError, TypeError) as fault:
        raise typer.BadParameter(str(fault)) from fault
    return options


def _value(text: str) -> Any:
    words = {"True": True, "False": False, "yes": True, "no": False}
    try:
        return words[text] if text in words else json.loads(text)
    except ValueError:
        return text


def plain(config: "Config") -> dict[str, Any]:
    return asdict(config)


def toml(preset: str, config: "Config", options: Mapping[str, Any]) -> str:
    """The configuration and the method's options as TOML; what is not set is a comment."""
    values = {**plain(config), "options": options}
    lines = [f"# preset {preset}, with what was changed"]
    lines += [_line(name, value) for name, value in values.items() if not isinstance(value, Mapping)]
    for name, table in values.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *(_line(role, value) for role, value in table.items())]
    return "\n".join(lines)


def _line(name: str, value: Any) -> str:
    return f"# {name} is not set" if value is None else f"{name} = {json.dumps(value)}"
