"""Load suites from TOML files: a built-in one by name, or a user's own, which may extend another."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from bitgraft.backbone.files import check_name
from bitgraft.errors import BitgraftError, SuiteError, did_you_mean
from bitgraft.methods import registry
from bitgraft.paper.bench.suite import SPLITS, Suite, narrowed
from bitgraft.paper.from_dict import from_dict
from bitgraft.paper.report.records import ORIGINAL

FOLDER = resources.files("bitgraft.paper.bench") / "suites"


def built_in() -> list[str]:
    return sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))


def contents() -> dict[str, dict[str, Any]]:
    """Return the tables of the built-in suites' files, unchecked, for a listing."""
    return {name: _content(name) for name in built_in()}


def load_suite(name: str | Path) -> Suite:
    """Load a built-in suite by name, or a TOML file by path."""
    content = _content(name)
    try:
        return parse(content)
    except SuiteError as fault:
        raise SuiteError(f"suite {name}: {fault}") from fault


def parse(content: Mapping[str, Any]) -> Suite:
    """Build a suite from its table, with the preset's options in each row, and check that it can be run."""
    try:
        suite = from_dict(Suite, content)
    except ValueError as fault:
        raise SuiteError(str(fault)) from fault
    _check(suite)
    rows = tuple(
        replace(r, options={**registry.preset_options(suite.preset, r.method), **r.options}) for r in suite.rows
    )
    own = suite.backbone.trained_on
    datasets = tuple(replace(d, original=True) if d.name == own else d for d in suite.datasets)
    return replace(suite, datasets=datasets, rows=rows)


def _content(name: str | Path, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the table of a file, merged over that of the suite it extends (`like`)."""
    try:
        own = tomllib.loads(_text(name))
    except OSError as cause:
        raise SuiteError(f"cannot read suite {name}: {cause.strerror}") from cause
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise SuiteError(f"suite {name}: {fault}") from fault
    like = own.pop("like", None)
    if like is None:
        return own
    if not isinstance(like, str):
        raise SuiteError(f"suite {name}: like is {like!r}, not the name of a suite or a .toml file")
    if like in seen:
        raise SuiteError(f"suite {name} extends itself through {like}")
    base = _content(Path(name).parent / like if like.endswith(".toml") else like, (*seen, like))
    merged = base | own
    for part, key in (("datasets", "name"), ("rows", "row")):
        try:
            known = {table[key]: table for table in base.get(part, ())}
        except (TypeError, KeyError) as fault:
            raise SuiteError(f"suite {like}: {part} is not a list of tables, each with a {key!r}") from fault
        wanted = merged.get(part)
        if not isinstance(wanted, list):
            continue
        if unknown := [word for word in wanted if isinstance(word, str) and word not in known]:
            raise SuiteError(
                f"suite {name}: {part} has {unknown[0]!r}, but {like} has only {', '.join(known) or 'none'}"
            )
        merged[part] = [known[word] if isinstance(word, str) else word for word in wanted]
        if part == "rows" and isinstance(merged.get("datasets"), list):
            names = {table.get("name") for table in merged["datasets"] if isinstance(table, Mapping)}
            merged[part] = [{**row, **narrowed(row, names)} if row in base["rows"] else row for row in merged[part]]
    return merged


def _text(name: str | Path) -> str:
    if Path(name).suffix == ".toml":
        return Path(name).read_text(encoding="utf-8")
    if name not in built_in():
        hint = did_you_mean(name, built_in())
        raise SuiteError(f"there is no suite {name!r}; {hint}known suites: {', '.join(built_in())}, or a .toml file")
    return (FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def _check(suite: Suite) -> None:
    """Raise SuiteError for anything that would fail in a run."""
    if not suite.datasets or not suite.rows:
        raise SuiteError("at least one [[datasets]] table and one [[rows]] table are needed")
    names, labels = [dataset.name for dataset in suite.datasets], [row.row for row in suite.rows]
    for kind, given in (("data set", names), ("row", labels)):
        for name in given:
            try:
                check_name(name)
            except BitgraftError as fault:
                raise SuiteError(f"the name of {kind} {name!r} is used as a folder name: {fault}") from fault
            if given.count(name) > 1:
                raise SuiteError(f"two {kind}s are called {name!r}")
    if ORIGINAL in labels:
        raise SuiteError(f"no row can be called {ORIGINAL!r}: that is the backbone on its own data")
    if suite.baseline not in (None, *labels):
        raise SuiteError(f"the baseline {suite.baseline!r} is not one of the rows {', '.join(labels)}")
    if (own := suite.backbone.trained_on) not in (None, *names):
        raise SuiteError(f"trained_on is {own!r}, not one of the data sets {', '.join(names)}")
    for dataset in suite.datasets:
        if unknown := set(dataset.images) - set(SPLITS):
            raise SuiteError(f"data set {dataset.name}: images counts {', '.join(SPLITS)}, not {min(unknown)!r}")
    for row in (*suite.rows, suite.row(ORIGINAL)):
        if unknown := set(row.order + (row.datasets or ())) - set(names):
            raise SuiteError(f"row {row.row}: there is no data set {min(unknown)!r}; known: {', '.join(names)}")
        try:
            registry.get(row.method).with_options(row.options)
            for dataset in suite.datasets:
                suite.config_of(row, dataset, 0)
        except BitgraftError as fault:
            raise SuiteError(f"row {row.row}: {fault}") from fault
