"""Suites from TOML files: the built-in ones by name, or a user's own, which may start from another one."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from bitgraft.backbone.files import check_name
from bitgraft.errors import BitgraftError, SuiteError
from bitgraft.methods import registry
from bitgraft.methods.preset_options import preset_options
from bitgraft.paper.bench.suite import SPLITS, Suite, narrowed
from bitgraft.paper.from_dict import from_dict
from bitgraft.paper.report.records import ORIGINAL

FOLDER = resources.files("bitgraft.paper.bench") / "suites"


def built_in() -> list[str]:
    return sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))


def contents() -> dict[str, dict[str, Any]]:
    """The built-in suites as their files state them, for a list; they are checked when they are loaded."""
    return {name: _content(name) for name in built_in()}


def load_suite(name: str | Path) -> Suite:
    """A built-in suite by its name, or one from a TOML file."""
    content = _content(name)
    try:
        return parse(content)
    except SuiteError as fault:
        raise SuiteError(f"suite {name}: {fault}") from fault


def parse(content: Mapping[str, Any]) -> Suite:
    try:
        suite = from_dict(Suite, content)
    except ValueError as fault:
        raise SuiteError(str(fault)) from fault
    _check(suite)
    rows = tuple(replace(r, options={**preset_options(suite.preset, r.method), **r.options}) for r in suite.rows)
    own = suite.backbone.trained_on
    datasets = tuple(replace(d, original=True) if d.name == own else d for d in suite.datasets)
    return replace(suite, datasets=datasets, rows=rows)


def _content(name: str | Path, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The content of a file, with what it does not set taken from the suite that it is `like`."""
    try:
        own = tomllib.loads(_text(name))
    except OSError as cause:
        raise SuiteError(f"cannot read the suite {name}: {cause.strerror}") from cause
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise SuiteError(f"suite {name}: {fault}") from fault
    base = own.pop("like", None)
    if base is None:
        return own
    if not isinstance(base, str):
        raise SuiteError(f"suite {name}: like is {base!r}, not the name of a suite or a .toml file")
    if base in seen:
        raise SuiteError(f"suite {name} is like {base}, which is like it again")
    other = _content(Path(name).parent / base if base.endswith(".toml") else base, (*seen, base))
    made = other | own
    for part, key in (("datasets", "name"), ("rows", "row")):
        known = {table[key]: table for table in other.get(part, ())}
        wanted = made.get(part)
        if not isinstance(wanted, list):
            continue
        if strange := [word for word in wanted if isinstance(word, str) and word not in known]:
            raise SuiteError(
                f"suite {name}: {part} has {strange[0]!r}, but the suite that it is like has {', '.join(known)}"
            )
        made[part] = [known[word] if isinstance(word, str) else word for word in wanted]
        if part == "rows" and isinstance(made.get("datasets"), list):
            names = {table.get("name") for table in made["datasets"] if isinstance(table, Mapping)}
            made[part] = [{**row, **narrowed(row, names)} if row in other["rows"] else row for row in made[part]]
    return made


def _text(name: str | Path) -> str:
    if Path(name).suffix == ".toml":
        return Path(name).read_text(encoding="utf-8")
    if name not in built_in():
        close = difflib.get_close_matches(str(name), built_in(), 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise SuiteError(f"there is no suite {name!r}; {hint}known are {', '.join(built_in())}, or a .toml file")
    return (FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def _check(suite: Suite) -> None:
    """Refuse before the first run what could not be run."""
    if not suite.datasets or not suite.rows:
        raise SuiteError("it needs at least one of [[datasets]] and of [[rows]]")
    names, labels = [dataset.name for dataset in suite.datasets], [row.row for row in suite.rows]
    for kind, given in (("data set", names), ("row", labels)):
        for name in given:
            try:
                check_name(name)
            except BitgraftError as fault:
                raise SuiteError(f"the {kind} {name!r} is a folder's name, too: {fault}") from fault
            if given.count(name) > 1:
                raise SuiteError(f"two of the {kind}s are called {name!r}")
    if ORIGINAL in labels:
        raise SuiteError(f"no row can be called {ORIGINAL!r}: that is the backbone on its own data")
    if suite.baseline not in (None, *labels):
        raise SuiteError(f"the baseline is {suite.baseline!r}, which is none of the rows")
    if (own := suite.backbone.trained_on) not in (None, *names):
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
