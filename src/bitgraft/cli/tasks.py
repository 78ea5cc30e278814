"""`bitgraft tasks` and `inspect`: show the contents of a store and of task files."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from typer import Argument

from bitgraft.cli.app import command, flag, setting
from bitgraft.cli.options import STORE, AsJson, StoreFolder
from bitgraft.cli.output import megabytes, percent, show, table
from bitgraft.errors import BitgraftError, FigureError, WrongBackboneError
from bitgraft.format.summary import Summary, read_summary
from bitgraft.store import Store

HEADS = {
    "classes": "a classifier that replaces the backbone's",
    "linear": "a linear layer after the backbone",
    "module": "a custom module",
    "keep": "the backbone's own",
    "none": "none: the task returns features",
}


@command("""
  bitgraft tasks
  bitgraft tasks --store my-store --json""")
def tasks(store: StoreFolder = STORE, as_json: AsJson = False) -> None:
    """List the tasks of a store and their sizes.

    A broken file is listed with the reason.
    """
    opened, rows = Store(store), []
    for name, size in opened.sizes():
        try:
            found = opened.summary(name)
            if found.backbone != opened.fingerprint:
                raise WrongBackboneError(f"{opened.path(name)} belongs to another backbone ({found.backbone[:12]})")
            row = found.listed(name, opened.size.weights)
            row["copy_bytes"] = opened.size.copy_bytes(found.bytes["head"])
            rows.append({**row, "leans_on": list(found.metadata.depends_on)})
        except BitgraftError as error:
            rows.append({"name": name, "bytes": size, "error": str(error)})
    whole, together = 4 * opened.size.parameters, sum(row["bytes"] for row in rows)
    separate = whole + sum(row.get("copy_bytes", whole) for row in rows)
    report = {
        "store": str(opened.folder),
        "backbone": opened.backbone.name,
        "weights": opened.backbone.weights,
        "fingerprint": opened.fingerprint,
        "backbone_bytes": whole,
        "tasks": rows,
        "tasks_bytes": together,
        "total_bytes": whole + together,
        "separate_bytes": separate,
    }
    files = "1 task file" if len(rows) == 1 else f"{len(rows)} task files"
    parts: list[Any] = [f"{store}: {files} for {opened.backbone.name}"]
    if rows:
        parts.append(table(["task", "method", "classes>", "accuracy>", "size>", "bits per weight>"], map(_cells, rows)))
        if broken := [f"{row['name']} is broken: {row['error']}" for row in rows if "error" in row]:
            parts.append("\n".join(broken))
        parts.append(
            f"The backbone ({megabytes(whole)}) and {files} take {megabytes(whole + together)}.\n{len(rows) + 1} "
            f"separate networks, including the backbone's own, would take {megabytes(separate)}."
        )
    show(as_json, report, *parts)


def _cells(row: dict[str, Any]) -> list[Any]:
    if "error" in row:
        return [row["name"], "broken", "", "", megabytes(row["bytes"]), ""]
    accuracy = "" if row["accuracy"] is None else f"{row['measured_on']} {percent(row['accuracy'])}"
    bits = f"{row['bits_per_weight']:.2f}"
    return [row["name"], row["method"], row["classes"], accuracy, megabytes(row["bytes"]), bits]


@command("""
  bitgraft inspect flowers.safetensors
  bitgraft inspect flowers.safetensors --layers
  bitgraft inspect bitgraft-store/*.safetensors --figure masks.png""")
def inspect(
    files: Annotated[list[str], Argument(metavar="FILE", help="Task files; the backbone is not needed.")],
    layers: Annotated[bool, flag("--layers", "Add the share of ones and k of each layer.")] = False,
    as_json: AsJson = False,
    figure: Annotated[str | None, setting("OUT", "Draw a figure instead: .png, .svg or .pdf.")] = None,
) -> None:
    """Show the contents of task files.

    Prints the method, classes, metrics, size and bits per weight of each task. The figure is the paper's last one: the
    share of ones by depth, and k1, k2 and k3.
    """
    if figure is not None:
        _draw(files, figure)
        show(as_json, {"figure": figure}, f"wrote {figure}")
        return
    plain = [_read(file, layers).plain() for file in files]
    parts: list[Any] = []
    for task in plain:
        parts.append(table(["task", task["name"]], [(fact, value) for fact, value in _facts(task) if value]))
        if task.get("layers"):
            parts += [_layers(task["layers"]), "Layers are in the order of the forward pass."]
    show(as_json, plain if len(plain) > 1 else plain[0], *parts)


def _read(file: str, layers: bool) -> Summary:
    if not layers:
        return read_summary(file)
    from bitgraft.format.inspect import inspect_file  # masks and k need torch

    return inspect_file(file)


def _draw(files: list[str], figure: str) -> None:
    from bitgraft.format.inspect import inspect_file
    from bitgraft.paper.figures import check_path, parameter_analysis, save

    try:
        check_path(figure)
    except FigureError as error:
        raise typer.BadParameter(str(error), param_hint="--figure") from error
    save(parameter_analysis([inspect_file(file) for file in files]), figure)


def _facts(task: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "method", task["method"]
    yield "options", _pairs(task["options"])
    yield "head", HEADS[task["head"]]
    yield "classes", _classes(task["classes"])
    yield "preprocessing", _pairs(task["preprocessing"])
    records = {name: record for name, record in task["metrics"].items() if isinstance(record, Mapping)}
    yield "metrics", _pairs({k: v for k, v in task["metrics"].items() if k not in records and v is not None})
    for name, record in records.items():  # last, best, test
        yield f"metrics, {name}", _pairs(record)
    yield "backbone fingerprint", task["backbone"]
    yield "builds on", ", ".join(task["leans_on"])
    by_kind = ", ".join(f"{kind} {megabytes(size)}" for kind, size in task["bytes"].items() if size)
    yield "size", f"{megabytes(task['size'])}: {by_kind}"
    if task["weights"]:
        yield "weights with steps" if task["bytes"]["levels"] else "weights under masks", f"{task['weights']:,}"
        yield "bits per weight", f"{task['bits_per_weight']:.3f}, without head and description"
    if task.get("density") is not None:
        yield "share changed" if task["bytes"]["levels"] else "share of ones", f"{task['density']:.3f}"


def _layers(layers: list[dict[str, Any]]) -> Any:
    """Return a table without the columns that are empty for this method."""
    masks, values = (any(layer[name] for layer in layers) for name in ("weights", "values"))
    ks = [k for k in ("k0", "k1", "k2", "k3") if any(k in layer for layer in layers)]
    rows: list[list[Any]] = []
    for layer in layers:
        share = "" if layer["density"] is None else f"{layer['density']:.3f}"
        k = [f"{layer[k]['mean']:.4g}" if k in layer else "" for k in ks]
        rows.append([layer["name"], *[layer["weights"], share] * masks, *k, *[layer["values"]] * values])
    heads = ["layer", *["weights>", "ones>"] * masks, *[f"{k}>" for k in ks], *["values>"] * values]
    return table(heads, rows)


def _classes(classes: list[str] | None) -> str:
    if classes is None:
        return ""
    if classes == [str(number) for number in range(len(classes))]:
        return f"{len(classes)}, without names"
    return f"{len(classes)}: {', '.join(classes[:8])}{', ...' if len(classes) > 8 else ''}"


def _pairs(values: Any) -> str:
    return ", ".join(f"{key}={_short(value)}" for key, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
