"""`bitgraft push` and `pull`: a task to the Hugging Face Hub, and from elsewhere into a store."""

from typing import Annotated

import typer
from typer import Argument, Option

from bitgraft.cli.app import command
from bitgraft.cli.options import STORE, AsJson, Overwrite, StoreFolder, TaskName, Weights
from bitgraft.cli.output import megabytes, show


@command("""
  bitgraft push me/flowers-resnet50 --task flowers
  bitgraft push me/flowers-resnet50 --task flowers --license cc-by-4.0 --private""")
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


@command("""
  bitgraft pull hf:me/flowers-resnet50
  bitgraft pull hf:me/flowers-resnet50 --backbone resnet50 --store new-store
  bitgraft pull https://example.org/flowers.safetensors#sha256=DIGEST
  bitgraft pull ../other-store --task flowers --as their-flowers""")
def pull(
    source: Annotated[str, Argument(metavar="SOURCE", help="hf:OWNER/NAME[@REVISION], https://..., a folder or file.")],
    task: Annotated[str | None, Option(metavar="NAME", help="Which one, if there are several.")] = None,
    store: StoreFolder = STORE,
    name: Annotated[str | None, Option("--as", metavar="NAME", help="What to call it here.")] = None,
    sha256: Annotated[str | None, Option(metavar="DIGEST", help="The digest that the file must have.")] = None,
    overwrite: Overwrite = False,
    max_size: Annotated[int, Option(min=1, metavar="MB", help="Refuse larger files.")] = 2000,
    backbone: Annotated[str | None, Option(metavar="NAME", help="The backbone of a new store.")] = None,
    weights: Weights = None,
    no_pretrained: Annotated[bool, Option("--no-pretrained", help="The backbone has random weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a task file, check it and add it to the store.

    It must be whole (checksum), of a format that this bitgraft knows, and made for the store's backbone (fingerprint).
    Otherwise the store stays as it was.
    """
    from bitgraft.errors import WrongBackboneError
    from bitgraft.network import Network
    from bitgraft.sharing.pulling import fetch, install
    from bitgraft.store import Backbone, Store

    new = backbone is not None and not Store.exists(store)
    if not new and (weights or no_pretrained):
        raise typer.BadParameter("--weights and --no-pretrained are for a new store: add --backbone")
    if not new:
        Store(store)  # a bad one is reported before anything is fetched
    fetched = fetch(source, task, sha256=sha256, limit=max_size * 1_000_000)
    if new:
        asked = Backbone(backbone or "", weights, not no_pretrained and weights is None)
        net = Network(asked.build())
        if net.fingerprint != fetched.archive.backbone:
            raise WrongBackboneError(
                f"{fetched.source} belongs to a backbone with fingerprint {fetched.archive.backbone[:12]}, "
                f"{asked.name} with these weights has {net.fingerprint[:12]}: no store was made"
            )
        Store.create(store, asked, net)
    called, size = install(fetched, Store(store), name, overwrite=overwrite), len(fetched.data)
    data: dict[str, object] = {"task": called, "store": store, "source": fetched.source, "sha256": fetched.sha256}
    data |= {"method": fetched.archive.metadata.method, "bytes": size}
    show(as_json, data, f"{called} is in {store}: {megabytes(size)}, SHA-256 {fetched.sha256}")
