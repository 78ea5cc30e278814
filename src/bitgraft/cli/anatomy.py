"""`bitgraft anatomy`: what a task would change in a backbone."""

import re
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitgraft.cli.output import show, show_json, table

if TYPE_CHECKING:
    from bitgraft.backbone.anatomy import Anatomy

NAMES = "timm's name, wrn-DEPTH-WIDTH, resnet26, or package.module:function."
TRY = """\b
Try:
  bitgraft anatomy resnet50
  bitgraft anatomy vit_base_patch16_224 --skip "patch_embed.*"
  bitgraft anatomy mypackage.nets:build --example 1,3,64,64 --json"""


def anatomy(
    name: Annotated[str, typer.Argument(metavar="NAME", help=NAMES)],
    weights: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Weights to load: a file, or package:NAME.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(metavar="LAYER", help="The layer that a task replaces; none for features.")
    ] = None,
    transform: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Weights to transform, instead of all; repeatable.")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Weights to leave out; repeatable.")] = None,
    norms: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Norm layers per task, instead of all; repeatable.")
    ] = None,
    example: Annotated[str | None, typer.Option(metavar="SHAPE", help="A batch to run, for example 1,3,64,64.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Show what a task changes in a backbone.

    Which weights it transforms, which norm layers it owns, where the head is, what is shared. Downloads nothing.
    """
    reading: dict[str, Any] = {"transform": transform, "skip": skip, "norms": norms, "example": _shape(example)}
    reading = {key: value for key, value in reading.items() if value}
    if head is not None:
        reading["head"] = None if head.lower() == "none" else head

    from bitgraft.backbone.loading import read_backbone

    read = read_backbone(name, weights=weights, **reading)
    if as_json:
        show_json(plain(name, read))
    else:
        _show(name, read)


def plain(name: str, read: "Anatomy") -> dict[str, Any]:
    """An anatomy as JSON holds it."""
    return {
        "name": name,
        "head": read.head,
        "head_known": read.head_known,
        "features": read.features,
        "weights": [
            {
                "name": weight.name,
                "shape": list(weight.shape),
                "kind": weight.kind,
                "groups": weight.groups,
                "feeds": weight.feeds,
                "k0": "fixed" if weight.scale_free else "learned",
            }
            for weight in read.weights.values()
        ],
        "norms": {norm: list(names) for norm, names in read.norms.items()},
        "shared": list(read.outside),
        "parameters": _totals(read),
    }


def _totals(read: "Anatomy") -> dict[str, int]:
    """How many parameters are transformed, in norm layers, shared and in the head."""
    parameters = {name: tensor.numel() for name, tensor in read.backbone.named_parameters()}
    groups = {
        "transformed": list(read.weights),
        "norms": [name for names in read.norms.values() for name in names],
        "shared": list(read.outside),
        "head": read.head_names(),
    }
    counts = {group: sum(parameters.get(name, 0) for name in names) for group, names in groups.items()}
    return {**counts, "all": sum(parameters.values())}


def _show(name: str, read: "Anatomy") -> None:
    count = _totals(read)
    rows = [
        (
            w.name,
            "×".join(map(str, w.shape)),
            _kind(w.kind, w.groups),
            w.feeds,
            "fixed at 1" if w.scale_free else "learned",
        )
        for w in read.weights.values()
    ]
    summary = [
        ("transformed, about one bit each", f"{count['transformed']:,}", "the weights above"),
        ("norm layers, a copy per task", f"{count['norms']:,}", grouped(read.norms)),
        ("head, another per task", f"{count['head']:,}", _head(read)),
        ("shared untouched", f"{count['shared']:,}", grouped(read.outside)),
        ("all", f"{count['all']:,}", ""),
    ]
    show(
        f"{name}: the weights that a task transforms, in the order in which data reaches them",
        table(["weight", "shape>", "kind", "feeds norm", "k0"], rows),
        table(["parameters", "count>", "which"], summary),
        f"What tasks cost: bitgraft params {name}",
    )


def _kind(kind: str, groups: int) -> str:
    return kind if groups == 1 else f"{kind}, {groups} groups"


def _head(read: "Anatomy") -> str:
    if read.heads:
        return ", ".join(read.heads) + (f" ({read.features} features)" if read.features else "")
    if read.head_known:
        return f"none: the backbone gives {read.features or ''} features".replace("  ", " ")
    return "cannot be told: say --head LAYER, or --head none for features"


def grouped(names: Any) -> str:
    """Names that differ in numbers alone as one pattern, with their count."""
    patterns = Counter(re.sub(r"\d+", "*", name) for name in names)
    first = {re.sub(r"\d+", "*", name): name for name in names}
    return ", ".join(f"{p} ({n})" if n > 1 else first[p] for p, n in patterns.items()) or "none"


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise typer.BadParameter(f"{text!r} is no shape: give whole numbers with commas between, as in 1,3,64,64")
    return shape
