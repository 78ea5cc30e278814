"""`bitgraft export`: a task as plain weights, for those who do not have bitgraft."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitgraft.cli.names import STORE, StoreFolder, TaskName
from bitgraft.cli.output import megabytes, show

if TYPE_CHECKING:
    from torch import Tensor

    from bitgraft.network import Network
    from bitgraft.store import Store

TRY = """\b
Try:
  bitgraft export --task flowers
  bitgraft export --task flowers --output resnet50-flowers.safetensors"""


def export(
    task: TaskName,
    store: StoreFolder = STORE,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="[NAME-weights.safetensors]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Even if the file is there.")] = False,
) -> None:
    """Write a task as an ordinary state dict, in safetensors.

    It has the size of the whole network, and loads into the backbone's own class with as many classes as the task.
    """
    import safetensors.torch

    from bitgraft.errors import StoreError
    from bitgraft.files import write_atomically
    from bitgraft.store import Store

    path = Path(output or f"{task}-weights.safetensors")
    if path.exists() and not overwrite:
        raise StoreError(f"{path} is there already: choose another --output, or pass --overwrite")
    opened = Store(store)
    net = opened.network()
    card = opened.load(net, task).card
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in net.export(task).state_dict().items()}
    about = {"task": task, "classes": json.dumps(card.classes), "preprocessing": json.dumps(dict(card.preprocessing))}
    data = safetensors.torch.save({name: tensor.clone() for name, tensor in state.items()}, about)
    write_atomically(path, data)
    show(f"wrote {path}, {megabytes(len(data))}", _recipe(opened, net, state, path, len(card.classes or ())))


def _recipe(store: "Store", net: "Network", state: "dict[str, Tensor]", path: Path, classes: int) -> str:
    """What to type to load it."""
    if set(state) != set(net.backbone.state_dict()):
        return (
            "This method adds layers of its own, so that the weights do not load into the plain network: "
            "use net.export(task) in Python, which gives the module with them."
        )
    name = store.backbone.name
    if hasattr(net.backbone, "pretrained_cfg") and ":" not in name:
        lines = ["import timm", f'model = timm.create_model("{name}", num_classes={classes}, checkpoint_path="{path}")']
    else:
        lines = [
            "from safetensors.torch import load_file",
            f'model.load_state_dict(load_file("{path}"))  # model: {name} with {classes} classes',
        ]
    return "\n".join(["To load it:", *(f"  {line}" for line in lines)])
