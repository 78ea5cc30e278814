"""`bitgraft pull`: a task from elsewhere into a store."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from bitgraft.cli.options import STORE, AsJson, Overwrite, StoreFolder, Weights
from bitgraft.cli.output import megabytes, show

if TYPE_CHECKING:
    from bitgraft.sharing.pulling import Fetched
    from bitgraft.store import Backbone, Store

TRY = """
  bitgraft pull hf:me/flowers-resnet50
  bitgraft pull hf:me/flowers-resnet50 --backbone resnet50 --store new-store
  bitgraft pull https://example.org/flowers.safetensors#sha256=DIGEST
  bitgraft pull ../other-store --task flowers --as their-flowers"""


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
    from bitgraft.sharing.pulling import enter, fetch
    from bitgraft.store import Backbone, Store

    new = None
    if backbone is not None and not Store.exists(store):
        new = Backbone(backbone, weights, not no_pretrained and weights is None)
    elif weights or no_pretrained:
        raise typer.BadParameter("--weights and --no-pretrained are for a new store: add --backbone")
    else:
        Store(store)  # a bad one is reported before anything is fetched
    fetched = fetch(source, task, sha256=sha256, limit=max_size * 1_000_000)
    opened = _begin(store, new, fetched) if new else Store(store)
    called = enter(fetched, opened, name, overwrite=overwrite)
    data: dict[str, Any] = {
        "task": called,
        "store": str(opened.folder),
        "source": fetched.source,
        "sha256": fetched.sha256,
    }
    data |= {"method": fetched.archive.metadata.method, "bytes": len(fetched.data)}
    size = megabytes(len(fetched.data))
    show(as_json, data, f"{called} is in {opened.folder}: {size}, SHA-256 {fetched.sha256}")


def _begin(folder: str, backbone: "Backbone", fetched: "Fetched") -> "Store":
    """A new store, if the task was made for this backbone."""
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
