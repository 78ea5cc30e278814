"""Suites from TOML files: ours by name, or a user's own, which may begin with another one."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bitgraft.errors import BitgraftError, SuiteError
from bitgraft.methods import registry
from bitgraft.paper.bench.suite import SPLITS, Backbone, Dataset, Row, Suite
from bitgraft.paper.report.records import ORIGINAL
from bitgraft.task import check_name
from bitgraft.training.presets import preset_options

LIKE = "like"


def built_in() -> list[str]:
    folder = resources.files("bitgraft.paper.bench") / "suites"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load_suite(name: str | Path) -> Suite:
    """A suite by the name of one of ours, or from a TOML file."""
    content = _content(name)
    try:
        return parse(content)
    except SuiteError as fault:
        raise SuiteError(f"suite {name}: {fault}") from fault


def parse(content: Mapping[str, Any]) -> Suite:
    tables = {
        "backbone": _made(Backbone, content.get("backbone", {}), "[backbone]"),
        "datasets": _several(Dataset, content, "datasets"),
        "rows": _several(Row, content, "rows"),
    }
    suite: Suite = _made(Suite, {**content, **tables}, "the file")
    _check(suite)
    rows = tuple(replace(r, options={**preset_options(suite.preset, r.method), **r.options}) for r in suite.rows)
    own = suite.backbone.trained_on
    datasets = tuple(replace(d, original=True) if d.name == own else d for d in suite.datasets)
    return replace(suite, datasets=datasets, rows=rows)


def _content(name: str | Path, after: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a file says, and for the rest what the suite says that it is like."""
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8") if path.suffix == ".toml" else _ours(str(name))
        own = tomllib.loads(text)
    except OSError as cause:
        raise SuiteError(f"cannot read the suite {path}: {cause.strerror}") from cause
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise SuiteError(f"suite {name}: {fault}") from fault
    if LIKE not in own:
        return own
    base = own.pop(LIKE)
    if not isinstance(base, str):
        raise SuiteError(f"suite {name}: like is {base!r}, not the name of a suite or a .toml file")
    if base in after:
        raise SuiteError(f"suite {name} is like {base}, which is like it again")
    held = _content(path.parent / base if base.endswith(".toml") else base, (*after, base))
    picked: dict[str, Any] = {
        part: _picked(own[part], held, part, name) for part in ("datasets", "rows") if part in own
    }
    made: dict[str, Any] = {**held, **own, **picked}
    if isinstance(made.get("rows"), list) and isinstance(made.get("datasets"), list):
        names = [table.get("name") for table in made["datasets"] if isinstance(table, Mapping)]
        made["rows"] = [_narrowed(row, names) if row in held["rows"] else row for row in made["rows"]]
    return made


def _narrowed(row: Mapping[str, Any], names: Sequence[Any]) -> dict[str, Any]:
    """A row of another suite where there are fewer data sets."""
    lists = {part: [name for name in row[part] if name in names] for part in ("order", "datasets") if part in row}
    return {**row, **lists}


def _picked(wanted: Any, held: Mapping[str, Any], part: str, name: str | Path) -> Any:
    """Tables of one's own, and those of the other suite that are named in their place."""
    if not isinstance(wanted, list):
        return wanted
    known = {table["row" if part == "rows" else "name"]: table for table in held.get(part, ())}
    if strange := [word for word in wanted if isinstance(word, str) and word not in known]:
        raise SuiteError(
            f"suite {name}: {part} has {strange[0]!r}, but the suite that it is like has {', '.join(known)}"
        )
    return [known[word] if isinstance(word, str) else word for word in wanted]


def _ours(name: str) -> str:
    if name not in built_in():
        close = difflib.get_close_matches(name, built_in(), 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise SuiteError(f"there is no suite {name!r}; {hint}known are {', '.join(built_in())}, or a .toml file")
    return (resources.files("bitgraft.paper.bench") / "suites" / f"{name}.toml").read_text(encoding="utf-8")


def _several(kind: type[Any], content: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    tables = content.get(name, [])
    if not isinstance(tables, list | tuple):
        raise SuiteError(f"{name} must be tables, [[{name}]]")
    return tuple(_made(kind, table, f"[[{name}]] {number}") for number, table in enumerate(tables, 1))


def _made(kind: type[Any], given: Any, where: str) -> Any:
    """A dataclass from a table of the file; what is missing, unknown or of another type is said by name."""
    if not isinstance(given, Mapping):
        raise SuiteError(f"{where} must be a table")
    known = {f.name for f in fields(kind)}
    if strange := sorted(set(given) - known):
        close = difflib.get_close_matches(strange[0], known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(sorted(known))}"
        raise SuiteError(f"{where} has no setting {strange[0]!r}; {hint}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    for name, hint in get_type_hints(kind).items():
        if name in values and not _fits(values[name], hint):
            raise SuiteError(f"{where}: {name} is {given[name]!r}, not {_in_words(hint)}")
    try:
        return kind(**values)
    except TypeError as fault:
        missing = str(fault).partition("argument")[2].partition(":")[2].strip()
        raise SuiteError(f"{where} lacks {missing or fault}") from fault


def _fits(value: Any, hint: Any) -> bool:
    inside = get_args(hint)
    if isinstance(hint, UnionType):
        return any(_fits(value, one) for one in inside)
    if get_origin(hint) is Literal:
        return value in inside
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(one, inside[0]) for one in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, get_origin(hint) or hint)


def _in_words(hint: Any) -> str:
    if isinstance(hint, UnionType):
        return _in_words(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    if get_origin(hint) is tuple:
        return f"a list, each {_in_words(get_args(hint)[0])}"
    words: dict[Any, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    return words.get(hint, "a table")


def _check(suite: Suite) -> None:
    """All that can be known to be wrong before the first run."""
    if not suite.datasets or not suite.rows:
        raise SuiteError("it needs at least one of [[datasets]] and of [[rows]]")
    names = [dataset.name for dataset in suite.datasets]
    for what, labels in (("data set", names), ("row", [row.row for row in suite.rows])):
        for label in labels:
            try:
                check_name(label)
            except BitgraftError as fault:
                raise SuiteError(f"the {what} {label!r} is a folder's name, too: {fault}") from fault
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise SuiteError(f"two of the {what}s are called {twice[0]!r}")
    if any(row.row == ORIGINAL for row in suite.rows):
        raise SuiteError(f"no row can be called {ORIGINAL!r}: that is the backbone on its own data")
    if suite.baseline is not None and suite.baseline not in [row.row for row in suite.rows]:
        raise SuiteError(f"the baseline is {suite.baseline!r}, which is none of the rows")
    if (own := suite.backbone.trained_on) is not None and own not in names:
        raise SuiteError(f"the backbone is trained on {own!r}, which is none of the data sets {', '.join(names)}")
    for dataset in suite.datasets:
        if strange := set(dataset.images) - set(SPLITS):
            raise SuiteError(f"data set {dataset.name}: images are those of {', '.join(SPLITS)}, not {min(strange)!r}")
    for row in (*suite.rows, suite.row(ORIGINAL)):
        if strange := set(row.order + (row.datasets or ())) - set(names):
            raise SuiteError(f"row {row.row}: there is no data set {min(strange)!r}; known are {', '.join(names)}")
        try:
            registry.get(row.method).with_options(row.options)
            for dataset in suite.datasets:
                suite.config_of(row, dataset, 0)
        except BitgraftError as fault:
            raise SuiteError(f"row {row.row}: {fault}") from fault
