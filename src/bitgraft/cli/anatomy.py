"""`bitgraft anatomy`: what a task would change in a backbone."""

import re
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from bitgraft.cli.options import AsJson, Head, Weights
from bitgraft.cli.output import show, table

if TYPE_CHECKING:
    from bitgraft.backbone.anatomy import Anatomy

NAMES = "timm's name, wrn-DEPTH-WIDTH, resnet26, or package.module:function."
TRY = """
  bitgraft anatomy resnet50
  bitgraft anatomy vit_base_patch16_224 --skip "patch_embed.*"
  bitgraft anatomy mypackage.nets:build --example 1,3,64,64 --json"""


def _patterns(help: str) -> Any:
    return Option(metavar="PATTERN", help=f"{help}; repeatable.")


def anatomy(
    name: Annotated[str, Argument(metavar="NAME", help=NAMES)],
    weights: Weights = None,
    head: Head = None,
    transform: Annotated[list[str] | None, _patterns("Weights to transform, instead of all")] = None,
    skip: Annotated[list[str] | None, _patterns("Weights to leave out")] = None,
    norms: Annotated[list[str] | None, _patterns("Norm layers per task, instead of all")] = None,
    example: Annotated[str | None, Option(metavar="SHAPE", help="A batch to run, for example 1,3,64,64.")] = None,
    as_json: AsJson = False,
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
    show(as_json, _plain(name, read), *_parts(name, read))


def _plain(name: str, read: "Anatomy") -> dict[str, Any]:
    return {
        "name": name,
        "head": read.head,
        "head_known": read.head_known,
        "features": read.features,
        "weights": [
            {field: getattr(weight, field) for field in ("name", "shape", "kind", "groups", "feeds")}
            | {"k0": "fixed" if weight.scale_free else "learned"}
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


def _parts(name: str, read: "Anatomy") -> list[Any]:
    rows = []
    for weight in read.weights.values():
        kind = weight.kind if weight.groups == 1 else f"{weight.kind}, {weight.groups} groups"
        k0 = "fixed at 1" if weight.scale_free else "learned"
        rows.append((weight.name, "×".join(map(str, weight.shape)), kind, weight.feeds, k0))
    count = _totals(read)
    summary = [
        ("transformed, about one bit each", count["transformed"], "the weights above"),
        ("norm layers, a copy per task", count["norms"], grouped(read.norms)),
        ("head, another per task", count["head"], _head(read)),
        ("shared, unchanged", count["shared"], grouped(read.outside)),
        ("all", count["all"], ""),
    ]
    return [
        f"{name}: the weights that a task transforms, in the order in which data reaches them",
        table(["weight", "shape>", "kind", "feeds norm", "k0"], rows),
        table(["parameters", "count>", "which"], summary),
        f"What tasks cost: bitgraft params {name}",
    ]


def _head(read: "Anatomy") -> str:
    if read.head is not None:
        return f"{read.head} ({read.features} features)" if read.features else read.head
    if read.head_known:
        return f"none: the backbone gives {read.features or ''} features".replace("  ", " ")
    return "unknown: give --head LAYER, or --head none for features"


def grouped(names: Any) -> str:
    """Names that differ only in numbers as one pattern, with their count."""
    patterns = Counter(re.sub(r"\d+", "*", name) for name in names)
    first = {re.sub(r"\d+", "*", name): name for name in names}
    return ", ".join(f"{p} ({n})" if n > 1 else first[p] for p, n in patterns.items()) or "none"


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise typer.BadParameter(f"--example {text}: give whole numbers with commas, as in 1,3,64,64")
    return tuple(map(int, text.split(",")))
