"""What commands have in common: where the store is, which tasks are in it, and names for the shell to complete."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bitgraft.store import Backbone

STORE = "bitgraft-store"


def complete_tasks(context: typer.Context, incomplete: str) -> list[str]:
    """Names of task files, without opening any."""
    store: Any = context.params.get("store") or STORE
    return sorted(p.stem for p in Path(store).glob("[!.]*.safetensors") if p.stem.startswith(incomplete))


StoreFolder = Annotated[str, typer.Option("--store", metavar="DIR", help="The store's folder.")]
TaskName = Annotated[
    str, typer.Option("--task", metavar="NAME", help="The task's name in the store.", autocompletion=complete_tasks)
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]
Workers = Annotated[int, typer.Option(min=0, metavar="N", help="Processes that load images.")]
Weights = Annotated[str | None, typer.Option(metavar="SOURCE", help="The backbone's weights: a file, or package:NAME.")]
Pretrained = Annotated[bool, typer.Option(help="Published weights where no others are given.")]


def asked_backbone(
    store: str, name: str | None, weights: str | None, pretrained: bool, remedy: str
) -> "Backbone | None":
    """What was asked for; None where the store says it. Where neither does, `remedy` says what to do."""
    from bitgraft.store import Backbone, Store

    if name is not None:
        return Backbone(name, weights, pretrained)
    if not Store.exists(store):
        raise typer.BadParameter(f"there is no store at {store} yet: {remedy}")
    return None if weights is None else Backbone(Store(store).backbone.name, weights, pretrained)
