"""`bitgraft export`: write a task in a format that runs without bitgraft."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from bitgraft.backbone.files import write_atomically
from bitgraft.cli.app import command, setting
from bitgraft.cli.options import STORE, AllTasks, AsJson, Overwrite, StoreFolder, TaskNames, chosen_tasks, network_with
from bitgraft.cli.output import megabytes, show
from bitgraft.errors import StoreError
from bitgraft.store import Store

if TYPE_CHECKING:
    from bitgraft.network import Network

Format = Literal["state-dict", "torch-export", "onnx"]
ENDINGS = {"state-dict": "-weights.safetensors", "torch-export": ".pt2", "onnx": ".onnx"}


@command("""
  bitgraft export --task flowers
  bitgraft export --task flowers --format torch-export --output flowers.pt2
  bitgraft export --all-tasks --format onnx --output all.onnx""")
def export(
    task: TaskNames = None,
    all_tasks: AllTasks = False,
    form: Annotated[Format, Option("--format", help="The file's format.")] = "state-dict",
    store: StoreFolder = STORE,
    output: Annotated[str | None, setting("FILE", "The file to write [TASK with the format's suffix].")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a task as plain weights, a torch.export program or an ONNX file.

    The file is as large as the whole network and runs without bitgraft. torch.export and ONNX files are loaded and
    compared with the task before they are written. One ONNX file can hold several tasks; the task's number is an input.
    """
    names = chosen_tasks(store, task, all_tasks)
    for name in names:
        Store(store).file(name)  # `original` has no file
    bundled = all_tasks or len(names) > 1
    if bundled and form != "onnx":
        raise typer.BadParameter("only --format onnx can hold several tasks in one file")
    path = Path(output or f"{'tasks' if bundled else names[0]}{ENDINGS[form]}")
    if path.exists() and not overwrite:
        raise StoreError(f"{path} already exists: choose another --output, or pass --overwrite")
    net = network_with(store, names)
    data, recipe = _exported(net, names, form, bundled, path, Store(store).backbone.name)
    write_atomically(path, data)
    report = {"file": str(path), "format": form, "tasks": names, "bytes": len(data)}
    show(as_json, report, f"wrote {path}, {megabytes(len(data))}", recipe)


def _exported(net: "Network", names: list[str], form: str, bundled: bool, path: Path, name: str) -> tuple[bytes, str]:
    """Return the file's bytes and instructions for loading it; `name` is the backbone's."""
    from bitgraft.export import onnx_file, plain

    subject = plain.Subject(net, names[0])
    if form == "onnx":
        data = onnx_file.bundle_bytes(net, names) if bundled else onnx_file.onnx_bytes(subject)
        feed = "{'images': images, 'task': np.array([0])}" if bundled else "{'images': images}"
        load = f'session = onnxruntime.InferenceSession("{path}")'
        recipe = _recipe("import numpy as np, onnxruntime", load, f'(logits,) = session.run(["logits"], {feed})')
        numbers = ", ".join(f"{number} {task}" for number, task in enumerate(names))
        return data, f"{recipe}\nTasks by number: {numbers}." if bundled else recipe
    if form == "torch-export":
        load = f'model = torch.export.load("{path}").module()'
        return plain.program_bytes(subject), _recipe("import torch", load, "logits = model(images)")
    state, pickled = plain.weights(subject), path.suffix in (".pt", ".pth", ".bin")
    data = plain.weights_bytes(state, subject.header(), pickled=pickled)
    if set(state) != set(net.backbone.state_dict()):
        return data, (
            "This method adds layers of its own, so the weights do not load into the plain network: "
            "choose another --format, or call net.export(task) in Python, which returns the module with its layers."
        )
    classes = len(subject.metadata.classes or ())
    if hasattr(net.backbone, "pretrained_cfg") and ":" not in name:
        load = f'model = timm.create_model("{name}", num_classes={classes}, checkpoint_path="{path}")'
        return data, _recipe("import timm", load)
    reader = "import torch" if pickled else "from safetensors.torch import load_file"
    read = "torch.load" if pickled else "load_file"
    load = f'model.load_state_dict({read}("{path}"))  # model: {name} with {classes} classes'
    return data, _recipe(reader, load)


def _recipe(*lines: str) -> str:
    return "\n".join(["To load it:", *(f"  {line}" for line in lines)])
