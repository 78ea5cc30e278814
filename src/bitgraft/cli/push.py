"""`bitgraft push`: a task to the Hugging Face Hub."""

from typing import Annotated

import typer

from bitgraft.cli.names import STORE, AsJson, StoreFolder, TaskName
from bitgraft.cli.output import show, show_json

TRY = """\b
Try:
  bitgraft push me/flowers-resnet50 --task flowers
  bitgraft push me/flowers-resnet50 --task flowers --license cc-by-4.0 --private"""


def push(
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository; it is made if there is none.")],
    task: TaskName,
    store: StoreFolder = STORE,
    licence: Annotated[str | None, typer.Option("--license", metavar="NAME", help="As the Hub calls it.")] = None,
    private: Annotated[bool, typer.Option("--private", help="If the repository is new, for you alone.")] = False,
    no_card: Annotated[bool, typer.Option("--no-card", help="Leave the repository's README.md as it is.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a task's file to the Hugging Face Hub, with a model card made from what the file says.

    You are who `hf auth login` or HF_TOKEN says. Without --license, the card states none: that is for you to choose.
    """
    from bitgraft.sharing.pushing import push as send
    from bitgraft.store import Store

    address = send(Store(store), task, repo, licence=licence, private=private, card=not no_card)
    if as_json:
        show_json({"task": task, "repository": repo, "commit": address})
    else:
        show(f"sent {task} to {repo}: {address}")
