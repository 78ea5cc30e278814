"""`bitgraft push`: a task to the Hugging Face Hub."""

from typing import Annotated

from typer import Argument, Option

from bitgraft.cli.options import STORE, AsJson, StoreFolder, TaskName
from bitgraft.cli.output import show

TRY = """
  bitgraft push me/flowers-resnet50 --task flowers
  bitgraft push me/flowers-resnet50 --task flowers --license cc-by-4.0 --private"""


def push(
    repo: Annotated[str, Argument(metavar="OWNER/NAME", help="The repository; created if there is none.")],
    task: TaskName,
    store: StoreFolder = STORE,
    licence: Annotated[str | None, Option("--license", metavar="NAME", help="The Hub's name of the license.")] = None,
    private: Annotated[bool, Option("--private", help="Make a new repository private.")] = False,
    no_card: Annotated[bool, Option("--no-card", help="Leave the repository's README.md as it is.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a task to the Hugging Face Hub, with a model card.

    Log in with `hf auth login` or HF_TOKEN. Without --license, the card states none: that is your choice to make.
    """
    from bitgraft.sharing.pushing import push as send
    from bitgraft.store import Store

    address = send(Store(store), task, repo, licence=licence, private=private, card=not no_card)
    show(as_json, {"task": task, "repository": repo, "commit": address}, f"sent {task} to {repo}: {address}")
