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

Patterns = list[str] | None
NAMES = "timm's name, wrn-DEPTH-WIDTH, resnet26, or package.module:function."
TRY = """
  bitgraft anatomy resnet50
  bitgraft anatomy vit_base_patch16_224 --skip "patch_embed.*"
  bitgraft anatomy mypackage.nets:build --example 1,3,64,64 --json"""


def anatomy(
    name: Annotated[str, Argument(metavar="NAME", help=NAMES)],
    weights: Weights = None,
    head: Head = None,
    transform: Annotated[Patterns, Option(metavar="PATTERN", help="Weights to transform [all]; repeatable.")] = None,
    skip: Annotated[Patterns, Option(metavar="PATTERN", help="Weights to leave out; repeatable.")] = None,
    norms: Annotated[Patterns, Option(metavar="PATTERN", help="Norm layers per task [all]; repeatable.")] = None,
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

    data = _plain(name, read_backbone(name, weights=weights, **reading))
    show(as_json, data, *_parts(data))


def _plain(name: str, read: "Anatomy") -> dict[str, Any]:
    parameters = {name: tensor.numel() for name, tensor in read.backbone.named_parameters()}
    groups = {
        "transformed": list(read.weights),
        "norms": [name for names in read.norms.values() for name in names],
        "shared": list(read.outside),
        "head": read.head_names(),
    }
    counts = {group: sum(parameters.get(name, 0) for name in names) for group, names in groups.items()}
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
        "shared": groups["shared"],
        "parameters": {**counts, "all": sum(parameters.values())},
    }


def _parts(data: dict[str, Any]) -> list[Any]:
    rows = []
    for weight in data["weights"]:
        kind = weight["kind"] + (f", {weight['groups']} groups" if weight["groups"] > 1 else "")
        k0 = "fixed at 1" if weight["k0"] == "fixed" else "learned"
        rows.append((weight["name"], "×".join(map(str, weight["shape"])), kind, weight["feeds"], k0))
    count, features, head = data["parameters"], data["features"], data["head"]
    if head is not None:
        head += f" ({features} features)" if features else ""
    elif data["head_known"]:
        head = f"none: the backbone gives {features} features" if features else "none: the backbone gives features"
    else:
        head = "unknown: give --head LAYER, or --head none for features"
    summary = [
        ("transformed, about one bit each", count["transformed"], "the weights above"),
        ("norm layers, a copy per task", count["norms"], grouped(data["norms"])),
        ("head, another per task", count["head"], head),
        ("shared, unchanged", count["shared"], grouped(data["shared"])),
        ("all", count["all"], ""),
    ]
    return [
        f"{data['name']}: the weights that a task transforms, in the order in which data reaches them",
        table(["weight", "shape>", "kind", "feeds norm", "k0"], rows),
        table(["parameters", "count>", "which"], summary),
        f"What tasks cost: bitgraft params {data['name']}",
    ]


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
