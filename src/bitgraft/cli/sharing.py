"""`bitgraft push` and `pull`: upload a task to the Hugging Face Hub, and add a task file to a store."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bitgraft.cli.app import command, flag, setting
from bitgraft.cli.options import STORE, AsJson, Overwrite, Pretrained, StoreFolder, TaskName, Weights
from bitgraft.cli.output import megabytes, show
from bitgraft.errors import BitgraftError, WrongBackboneError
from bitgraft.store import RECORD, Backbone, Store


@command("""
  bitgraft push me/flowers-resnet50 --task flowers
  bitgraft push me/flowers-resnet50 --task flowers --license cc-by-4.0 --private""")
def push(
    repo: Annotated[str, Argument(metavar="OWNER/NAME", help="The repository; created if it does not exist.")],
    task: TaskName,
    store: StoreFolder = STORE,
    licence: Annotated[str | None, Option("--license", metavar="NAME", help="The Hub's name for the license.")] = None,
    private: Annotated[bool, flag("--private", "Make a new repository private.")] = False,
    no_card: Annotated[bool, flag("--no-card", "Do not write the repository's README.md.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a task to the Hugging Face Hub, with a model card.

    Log in with `hf auth login` or HF_TOKEN. Without --license, the card names no license.
    """
    from bitgraft.sharing.pushing import push as send

    address = send(Store(store), task, repo, licence=licence, private=private, card=not no_card)
    show(as_json, {"task": task, "repository": repo, "commit": address}, f"uploaded {task} to {repo}: {address}")


@command("""
  bitgraft pull hf:me/flowers-resnet50
  bitgraft pull hf:me/flowers-resnet50 --backbone resnet50 --store new-store
  bitgraft pull https://example.org/flowers.safetensors#sha256=DIGEST
  bitgraft pull ../other-store --task flowers --as their-flowers""")
def pull(
    source: Annotated[str, Argument(metavar="SOURCE", help="hf:OWNER/NAME[@REVISION], https://..., a folder or file.")],
    task: Annotated[str | None, setting("NAME", "The task, if the source has several.")] = None,
    store: StoreFolder = STORE,
    name: Annotated[str | None, Option("--as", metavar="NAME", help="Its name in the store [unchanged].")] = None,
    sha256: Annotated[str | None, setting("DIGEST", "Refuse a file with another digest.")] = None,
    overwrite: Overwrite = False,
    max_size: Annotated[int, Option(min=1, metavar="MB", help="Refuse larger files.")] = 2000,
    backbone: Annotated[str | None, setting("NAME", "Create the store, with this backbone.")] = None,
    weights: Weights = None,
    pretrained: Pretrained = True,
    as_json: AsJson = False,
) -> None:
    """Fetch a task file, check it and add it to the store.

    The file must be intact (checksum), of a known format version, and made for the store's backbone (fingerprint).
    Otherwise the store does not change.
    """
    from bitgraft.network import Network
    from bitgraft.sharing.pulling import fetch, install

    new = backbone is not None and not Store.exists(store)
    if not new and (weights or not pretrained):
        raise typer.BadParameter("--weights and --no-pretrained need --backbone and a new store")
    if not new:
        Store(store)  # report a broken store before fetching anything
    fetched = fetch(source, task, sha256=sha256, limit=max_size * 1_000_000)
    if new:
        chosen = Backbone(backbone or "", weights, pretrained)
        net = Network(chosen.build())
        if net.fingerprint != fetched.archive.backbone:
            raise WrongBackboneError(
                f"{fetched.source} belongs to a backbone with fingerprint {fetched.archive.backbone[:12]}, "
                f"but {chosen.name} with these weights has {net.fingerprint[:12]}: no store was created"
            )
        Store.create(store, chosen, net)
    try:
        added, size = install(fetched, Store(store), name, overwrite=overwrite), len(fetched.data)
    except BitgraftError:
        if new:  # leave nothing behind
            Path(store, RECORD).unlink()
            with suppress(OSError):  # not empty
                Path(store).rmdir()
        raise
    data: dict[str, object] = {"task": added, "store": store, "source": fetched.source, "sha256": fetched.sha256}
    data |= {"method": fetched.archive.metadata.method, "bytes": size}
    show(as_json, data, f"added {added} to {store}: {megabytes(size)}, SHA-256 {fetched.sha256}")
