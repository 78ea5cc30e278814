"""`bitgraft anatomy`, `params` and `methods`: what a task changes in a backbone, its cost, and the methods."""

import re
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from bitgraft.cli.app import command, count, setting
from bitgraft.cli.options import AsJson, Head, Weights
from bitgraft.cli.output import megabytes, show, table
from bitgraft.methods import registry

if TYPE_CHECKING:
    from bitgraft.backbone.anatomy import Anatomy

Patterns = list[str] | None
NAMES = "A timm model, wrn-DEPTH-WIDTH, resnet26, or package.module:function."
LEGEND = """\
# params:  parameters of the backbone and all tasks / those of the backbone, as
           the paper counts: 32 bits are one parameter; no classifiers or
           running statistics.
task file: one task as `bitgraft train` writes it, without the classifier.
all files: (backbone + all task files) / backbone, in bytes.
PackNet:   ceil(log2 tasks) bits per weight for all tasks; the paper's 1.10 and
           1.11 come from rounded megabytes. Files also hold the task's own
           values; the size is their mean."""


@command("""
  bitgraft anatomy resnet50
  bitgraft anatomy vit_base_patch16_224 --skip "patch_embed.*"
  bitgraft anatomy mypackage.nets:build --example 1,3,64,64 --json""")
def anatomy(
    name: Annotated[str, Argument(metavar="NAME", help=NAMES)],
    weights: Weights = None,
    head: Head = None,
    transform: Annotated[Patterns, setting("PATTERN", "Weights to transform [all]; repeatable.")] = None,
    skip: Annotated[Patterns, setting("PATTERN", "Weights not to transform; repeatable.")] = None,
    norms: Annotated[Patterns, setting("PATTERN", "Norm layers that each task owns [all]; repeatable.")] = None,
    example: Annotated[str | None, setting("SHAPE", "The shape of an input batch, such as 1,3,64,64.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a task changes in a backbone.

    Lists the weights it transforms, the norm layers it owns, the head, and what tasks share. Downloads nothing.
    """
    from bitgraft.backbone.loading import read_backbone

    given = {"transform": transform, "skip": skip, "norms": norms, "example": _shape(example)}
    chosen = {option: value for option, value in given.items() if value}
    data = _as_json(name, read_backbone(name, weights=weights, **chosen, **_head(head)))
    show(as_json, data, *_as_text(data))


def _head(layer: str | None) -> dict[str, str | None]:
    return {} if layer is None else {"head": None if layer.lower() == "none" else layer}


def _as_json(name: str, read: "Anatomy") -> dict[str, Any]:
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


def _as_text(data: dict[str, Any]) -> list[Any]:
    rows = []
    for weight in data["weights"]:
        kind = weight["kind"] + (f", {weight['groups']} groups" if weight["groups"] > 1 else "")
        k0 = "fixed at 1" if weight["k0"] == "fixed" else "learned"
        rows.append((weight["name"], "×".join(map(str, weight["shape"])), kind, weight["feeds"], k0))
    count, features, head = data["parameters"], data["features"], data["head"]
    if head is not None:
        head += f" ({features} features)" if features else ""
    elif data["head_known"]:
        head = f"none: the backbone returns {features} features" if features else "none: the backbone returns features"
    else:
        head = "unknown: give --head LAYER, or --head none for a backbone that returns features"
    summary = [
        ("transformed, about one bit each", count["transformed"], "the weights above"),
        ("norm layers, one copy per task", count["norms"], grouped(data["norms"])),
        ("head, one per task", count["head"], head),
        ("shared, unchanged", count["shared"], grouped(data["shared"])),
        ("all", count["all"], ""),
    ]
    return [
        f"{data['name']}: the weights that a task transforms, in the order of the forward pass",
        table(["weight", "shape>", "kind", "feeds norm", "k0"], rows),
        table(["parameters", "count>", "which"], summary),
        f"For the cost of tasks: bitgraft params {data['name']}",
    ]


def grouped(names: Any) -> str:
    """Join names, with those that differ only in numbers as one pattern and their count."""
    patterns = Counter(re.sub(r"\d+", "*", name) for name in names)
    first = {re.sub(r"\d+", "*", name): name for name in names}
    return ", ".join(f"{p} ({n})" if n > 1 else first[p] for p, n in patterns.items()) or "none"


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise typer.BadParameter(f"--example {text}: give whole numbers separated by commas, such as 1,3,64,64")
    return tuple(map(int, text.split(",")))


@command("""
  bitgraft params
  bitgraft params convnext_tiny --tasks 100""")
def params(
    name: Annotated[str | None, Argument(metavar="NAME", help="A backbone [the paper's].")] = None,
    tasks: Annotated[int | None, count("Tasks, including the backbone's own [6].", least=2)] = None,
    head: Head = None,
    as_json: AsJson = False,
) -> None:
    """Show the parameters and bytes that tasks take, by method.

    Computes the paper's "# Params" column for its architectures, or for the given backbone.
    """
    if name is None and (tasks is not None or head is not None):
        raise typer.BadParameter("--tasks and --head need the name of a backbone")

    from bitgraft.backbone.loading import read_backbone
    from bitgraft.paper.parameter_counts import account, paper_accounts

    counted = [account(read_backbone(name, **_head(head)), tasks or 6, name)] if name else paper_accounts()
    parts: list[Any] = []
    for one in counted:
        paper = any(row.printed for row in one.rows)
        rows = [
            [r.method, f"{r.relative:.2f}", *[r.printed] * paper, megabytes(r.file_bytes), f"{r.relative_files:.2f}"]
            for r in one.rows
        ]
        title = f"{one.backbone}, {one.tasks} tasks, {one.parameters / 1e6:.2f} M parameters without the classifier"
        parts += [title, table(["method", "# params>", *["paper>"] * paper, "task file>", "all files>"], rows)]
    show(as_json, [asdict(one) for one in counted], *parts, LEGEND)


@command("\n  bitgraft methods")
def methods(as_json: AsJson = False) -> None:
    """List the methods with their equations."""
    known = [registry.get(name) for name in registry.method_names()]
    rows = [{"name": one.name, "equation": one.equation, "summary": one.summary} for one in known]
    data = [{**row, "options": asdict(one.options)} for row, one in zip(rows, known, strict=True)]
    show(as_json, data, table(["method", "equation", "description"], [list(row.values()) for row in rows]))
