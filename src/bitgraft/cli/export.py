"""`bitgraft export`: a task for tools that know nothing of bitgraft."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitgraft.cli.names import STORE, AsJson, StoreFolder, complete_tasks
from bitgraft.cli.output import megabytes, show, show_json

if TYPE_CHECKING:
    from torch import Tensor

    from bitgraft.network import Network
    from bitgraft.store import Store

TRY = """\b
Try:
  bitgraft export --task flowers
  bitgraft export --task flowers --format onnx
  bitgraft export --task flowers --format torch-export --output flowers.pt2
  bitgraft export --all-tasks --format onnx --output all.onnx"""


class Format(StrEnum):
    state_dict = "state-dict"
    torch_export = "torch-export"
    onnx = "onnx"


ENDINGS = {Format.state_dict: "-weights.safetensors", Format.torch_export: ".pt2", Format.onnx: ".onnx"}


def export(
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="The task's name in the store; several go into one ONNX file.",
            autocompletion=complete_tasks,
        ),
    ] = None,
    all_tasks: Annotated[bool, typer.Option("--all-tasks", help="Every task in the store, in one ONNX file.")] = False,
    form: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.state_dict,
    store: StoreFolder = STORE,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="[NAME and the format's ending]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Even if the file is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a task as plain weights, as a torch.export program or as an ONNX file.

    Each has the size of the whole network and runs without bitgraft. Programs and ONNX files are opened again and
    compared with the task before they are written. Several tasks share one ONNX file, with the task's number as an
    input.
    """
    from bitgraft.backbone.files import write_atomically
    from bitgraft.errors import StoreError
    from bitgraft.store import Store

    names, bundled = _chosen(store, task or [], all_tasks, form)
    path = Path(output or f"{'tasks' if bundled else names[0]}{ENDINGS[form]}")
    if path.exists() and not overwrite:
        raise StoreError(f"{path} is there already: choose another --output, or pass --overwrite")
    opened = Store(store)
    net = opened.network()
    for name in names:
        if name not in net.tasks:  # another may have needed it
            opened.load(net, name)
    data, recipe = _written(opened, net, names, form, bundled, path)
    write_atomically(path, data)
    if as_json:
        show_json({"file": str(path), "format": form.value, "tasks": names, "bytes": len(data)})
    else:
        show(f"wrote {path}, {megabytes(len(data))}", recipe)


def _chosen(store: str, asked: list[str], every: bool, form: Format) -> tuple[list[str], bool]:
    """The tasks, and whether they go into one file with the task as an input."""
    from bitgraft.store import Store

    if bool(asked) == every:
        raise typer.BadParameter("say --task NAME, or --all-tasks")
    names = Store(store).names() if every else list(dict.fromkeys(asked))
    if not names:
        raise typer.BadParameter(f"the store at {store} has no tasks yet")
    bundled = every or len(names) > 1
    if bundled and form != Format.onnx:
        raise typer.BadParameter("several tasks go into one file only with --format onnx")
    return names, bundled


def _written(
    store: "Store", net: "Network", names: list[str], form: Format, bundled: bool, path: Path
) -> tuple[bytes, Any]:
    """The file's bytes, and what to type to load it."""
    from bitgraft.export import bundle, onnx_file, plain
    from bitgraft.export.plain import Subject

    subject = Subject(net, names[0])
    if bundled:
        feed = "{'images': images, 'task': np.array([0])}"
        numbers = ", ".join(f"{number} {name}" for number, name in enumerate(names))
        return bundle.bundle_bytes(net, names), f"{_runtime(path, feed)}\nTasks by number: {numbers}."
    if form == Format.onnx:
        return onnx_file.onnx_bytes(subject), _runtime(path, "{'images': images}")
    if form == Format.torch_export:
        load = f'model = torch.export.load("{path}").module()'
        return plain.program_bytes(subject), _indented("import torch", load, "logits = model(images)")
    state, classes = plain.weights(subject), len(subject.metadata.classes or ())
    pickled = path.suffix in (".pt", ".pth", ".bin")
    return plain.weights_bytes(state, subject.header(), pickled=pickled), _weights(store, net, state, path, classes)


def _runtime(path: Path, feed: str) -> str:
    session = f'session = onnxruntime.InferenceSession("{path}")'
    return _indented("import numpy as np, onnxruntime", session, f'(logits,) = session.run(["logits"], {feed})')


def _weights(store: "Store", net: "Network", state: "dict[str, Tensor]", path: Path, classes: int) -> str:
    if set(state) != set(net.backbone.state_dict()):
        return (
            "This method adds layers of its own, so that the weights do not load into the plain network: "
            "use net.export(task) in Python, which gives the module with them, or another --format."
        )
    name = store.backbone.name
    if hasattr(net.backbone, "pretrained_cfg") and ":" not in name:
        load = f'model = timm.create_model("{name}", num_classes={classes}, checkpoint_path="{path}")'
        return _indented("import timm", load)
    pickled = path.suffix in (".pt", ".pth", ".bin")
    reader, read = (
        ("import torch", "torch.load") if pickled else ("from safetensors.torch import load_file", "load_file")
    )
    return _indented(reader, f'model.load_state_dict({read}("{path}"))  # model: {name} with {classes} classes')


def _indented(*lines: str) -> str:
    return "\n".join(["To load it:", *(f"  {line}" for line in lines)])
