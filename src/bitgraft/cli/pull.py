"""`bitgraft pull`: a task from elsewhere into a store."""

from typing import TYPE_CHECKING, Annotated

import typer

from bitgraft.cli.names import STORE, AsJson, StoreFolder
from bitgraft.cli.output import megabytes, show, show_json

if TYPE_CHECKING:
    from bitgraft.sharing.pulling import Fetched
    from bitgraft.store import Backbone, Store

TRY = """\b
Try:
  bitgraft pull hf:me/flowers-resnet50
  bitgraft pull hf:me/flowers-resnet50 --backbone resnet50 --store new-store
  bitgraft pull https://example.org/flowers.safetensors#sha256=DIGEST
  bitgraft pull ../other-store --task flowers --as their-flowers"""


def pull(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="hf:OWNER/NAME[@REVISION], https://..., a folder or a file.")
    ],
    task: Annotated[str | None, typer.Option(metavar="NAME", help="Which one, where there are several.")] = None,
    store: StoreFolder = STORE,
    name: Annotated[str | None, typer.Option("--as", metavar="NAME", help="What to call it here.")] = None,
    sha256: Annotated[str | None, typer.Option(metavar="DIGEST", help="What the file must have.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Even if the task is there.")] = False,
    max_size: Annotated[int, typer.Option(min=1, metavar="MB", help="Refuse what is larger.")] = 2000,
    backbone: Annotated[
        str | None, typer.Option(metavar="NAME", help="To begin a store with, if there is none.")
    ] = None,
    weights: Annotated[str | None, typer.Option(metavar="FILE", help="That backbone's.")] = None,
    no_pretrained: Annotated[bool, typer.Option("--no-pretrained", help="That backbone has random weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a task file into the store, checked first.

    It must be whole (checksum), of a format that this bitgraft knows, and made on the store's backbone (fingerprint).
    A file that is not leaves the store as it was.
    """
    from bitgraft.sharing.pulling import enter, fetch
    from bitgraft.store import Backbone, Store

    new = not Store.exists(store) and backbone is not None
    if not new and (weights or no_pretrained):
        raise typer.BadParameter("--weights and --no-pretrained say what a new store begins with: add --backbone")
    if not new:
        Store(store)
    fetched = fetch(source, task, sha256=sha256, limit=max_size * 1_000_000)
    begun = Backbone(backbone or "", weights, not no_pretrained and weights is None)
    opened = _begin(store, begun, fetched) if new else Store(store)
    called = enter(fetched, opened, name, overwrite=overwrite)
    if as_json:
        held = {"task": called, "store": str(opened.folder), "source": fetched.source, "sha256": fetched.sha256}
        show_json({**held, "method": fetched.archive.metadata.method, "bytes": len(fetched.data)})
    else:
        show(f"{called} is in {opened.folder}: {megabytes(len(fetched.data))}, SHA-256 {fetched.sha256}")


def _begin(folder: str, backbone: "Backbone", fetched: "Fetched") -> "Store":
    """A new store, if the task belongs to this backbone."""
    from bitgraft.errors import WrongBackboneError
    from bitgraft.network import Network
    from bitgraft.store import Store

    net = Network(backbone.build())
    if net.fingerprint != fetched.archive.backbone:
        raise WrongBackboneError(
            f"{fetched.source} belongs to a backbone with fingerprint {fetched.archive.backbone[:12]}, "
            f"{backbone.name} with these weights has {net.fingerprint[:12]}: no store was made"
        )
    return Store.create(folder, backbone, net)
