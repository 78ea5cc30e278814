"""What commands have in common: where the store is, which tasks are in it, and names for the shell to complete."""

from pathlib import Path
from typing import Annotated, Any

import typer

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
