"""`bitgraft inspect`: what is in a task file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from bitgraft.cli.options import AsJson
from bitgraft.cli.output import megabytes, show, table

if TYPE_CHECKING:
    from bitgraft.format.inspect import Inspection, Spread

TRY = """
  bitgraft inspect flowers.safetensors
  bitgraft inspect bitgraft-store/*.safetensors --figure masks.png"""

HEADS = {
    "classes": "a classifier in place of the backbone's",
    "linear": "a linear layer after the backbone",
    "module": "a module of the user's",
    "keep": "the backbone's own",
    "none": "none: the task gives features",
}


def inspect(
    files: Annotated[list[str], Argument(metavar="FILE...", help="Task files. Their backbones are not needed.")],
    as_json: AsJson = False,
    figure: Annotated[str | None, Option(metavar="OUT", help="Draw into this .png, .svg or .pdf instead.")] = None,
) -> None:
    """Show what is in task files.

    The method, classes and size of a task, bits per weight, and the share of ones and k of each layer. The figure is
    the paper's last one: ones by depth of layer, and k1, k2 and k3; several tasks and backbones side by side.
    """
    from bitgraft.errors import FigureError
    from bitgraft.format.inspect import inspect_file

    if figure is not None:
        from bitgraft.paper.figures import check_path, parameter_analysis, save

        try:
            check_path(figure)
        except FigureError as error:
            raise typer.BadParameter(str(error), param_hint="--figure") from error
    found = [inspect_file(file) for file in files]
    if figure is not None:
        save(parameter_analysis(found, _backbones(files)), figure)
    parts = [part for task in found for part in _parts(task)] if figure is None else [f"wrote {figure}"]
    plain = [task.plain() for task in found]
    show(as_json, plain if len(plain) > 1 else plain[0], *parts)


def _backbones(files: Sequence[str]) -> dict[str, str]:
    """Names of backbones by fingerprint, from the stores that the files are in."""
    from bitgraft.store import Store

    folders = {Path(file).parent for file in files}
    stores = [Store(folder) for folder in folders if Store.exists(folder)]
    return {store.fingerprint: store.backbone.name for store in stores}


def _parts(found: "Inspection") -> list[Any]:
    parts: list[Any] = [table(["task", found.archive.metadata.name], _facts(found))]
    if found.layers:
        parts += [_layers(found), "Layers are listed in the order in which data reaches them."]
    return parts


def _facts(found: "Inspection") -> list[tuple[str, str]]:
    metadata, metrics = found.archive.metadata, found.archive.metrics
    records = {name: record for name, record in metrics.items() if isinstance(record, Mapping)}  # last, best, test
    rest = {name: value for name, value in metrics.items() if name not in records and value is not None}
    by_kind = ", ".join(f"{kind} {megabytes(size)}" for kind, size in found.bytes.items() if size)
    facts = [
        ("method", metadata.method),
        ("options", _pairs(metadata.options)),
        ("head", HEADS[metadata.head]),
        ("classes", _classes(metadata.classes)),
        ("preprocessing", _pairs(metadata.preprocessing)),
        ("metrics", _pairs(rest)),
        *((f"metrics, {name}", _pairs(record)) for name, record in records.items()),
        ("backbone fingerprint", found.archive.backbone),
        ("builds on", ", ".join(metadata.leans_on)),
        ("size", f"{megabytes(found.size)}: {by_kind}"),
    ]
    if found.bits_per_weight is not None:
        facts += [
            ("weights under masks", f"{found.weights:,}"),
            ("bits per weight", f"{found.bits_per_weight:.3f}, without the head"),
            ("share of ones", f"{found.density:.3f}"),
        ]
    return [(name, value) for name, value in facts if value]


def _layers(found: "Inspection") -> Any:
    """Without the columns that are empty for this method."""
    masks = any(layer.weights for layer in found.layers)
    ks = max(len(layer.k) for layer in found.layers)
    values = any(layer.values for layer in found.layers)
    heads = ["layer", *["weights>", "ones>"] * masks, *[f"k{i}>" for i in range(ks)], *["values>"] * values]
    rows: list[list[Any]] = []
    for layer in found.layers:
        share = "" if layer.density is None else f"{layer.density:.3f}"
        k = [_k(layer.k[i]) if i < len(layer.k) else "" for i in range(ks)]
        rows.append([layer.name, *[layer.weights, share][: 2 * masks], *k, *[layer.values] * values])
    return table(heads, rows)


def _k(k: "Spread") -> str:
    return f"{k.mean:.4g}" if k.low == k.high else f"{k.mean:.3g} ({k.low:.3g} to {k.high:.3g})"


def _classes(classes: tuple[str, ...] | None) -> str:
    if classes is None:
        return ""
    if classes == tuple(map(str, range(len(classes)))):
        return f"{len(classes)}, without names"
    return f"{len(classes)}: {', '.join(classes[:8])}{', ...' if len(classes) > 8 else ''}"


def _pairs(values: Any) -> str:
    return ", ".join(f"{key}={_short(value)}" for key, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
