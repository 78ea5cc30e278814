"""`bitgraft serve`: every task of a store over HTTP."""

from pathlib import Path
from typing import Annotated, Any

import typer

from bitgraft.cli.names import STORE, StoreFolder

TRY = """\b
Try:
  bitgraft serve --store my-store
  curl --data-binary @rose.jpg -H 'Content-Type: image/jpeg' localhost:8000/v1/predict/flowers
  bitgraft serve --host 0.0.0.0 --workers 4 --memory-budget 1GB --api-key-file keys.txt"""


def serve(
    store: StoreFolder = STORE,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, help="Processes; they share the backbone's memory.")] = 1,
    threads: Annotated[int, typer.Option(min=0, help="PyTorch's threads in each; 0 shares the cores out.")] = 0,
    memory_budget: Annotated[
        str, typer.Option(metavar="SIZE", help="What computed weights may take in each worker.")
    ] = "2GB",
    max_batch: Annotated[int, typer.Option(min=1, help="Images of one task that are run in one turn.")] = 32,
    max_wait_ms: Annotated[float, typer.Option(min=0, help="How long an image waits for others of its task.")] = 5.0,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Images waiting for one task, 429 beyond; four times as many for all, 503.")
    ] = 64,
    max_upload: Annotated[str, typer.Option(metavar="SIZE", help="The largest request.")] = "20MB",
    max_pixels: Annotated[
        int, typer.Option(min=1, help="The largest image, looked up before it is decoded.")
    ] = 32_000_000,
    patience: Annotated[float, typer.Option(min=0.1, help="Seconds for a client to send a request.")] = 20.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to finish what was accepted when told to end.")] = 30.0,
    poll: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks for changed task files.")] = 1.0,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact/--fused", help="Run a batch image by image, so that answers equal offline ones to the last bit."
        ),
    ] = True,
    device: Annotated[str, typer.Option(help="Where the network runs, as torch calls it.")] = "cpu",
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys, one to a line, one of which all but health must bring.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Deploy on Ray Serve, --workers replicas.")] = False,
) -> None:
    """Serve every task of a store from one backbone, and a page to try them.

    Task files that are added, replaced or removed are picked up without a restart.
    """
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as missing:
        raise typer.BadParameter(f"{missing.name} is not installed: pip install 'bitgraft[serve]'") from missing
    from bitgraft.errors import ServingError
    from bitgraft.serving.keys import read_keys
    from bitgraft.serving.settings import Settings, size

    try:
        given: dict[str, Any] = {"memory_budget": size(memory_budget), "max_upload": size(max_upload)}
    except ServingError as problem:
        raise typer.BadParameter(str(problem)) from problem
    settings = Settings(
        store=Path(store),
        host=host,
        port=port,
        workers=workers,
        threads=threads,
        max_batch=max_batch,
        max_wait=max_wait_ms / 1000,
        max_queue=max_queue,
        max_pixels=max_pixels,
        patience=patience,
        grace=grace,
        poll=poll,
        exact=exact,
        device=device,
        keys=read_keys(api_key_file) if api_key_file else (),
        **given,
    )
    raise typer.Exit(_run(settings, ray))


def _run(settings: Any, on_ray: bool) -> int:
    if not on_ray:
        from bitgraft.serving.supervisor import serve as run

        return run(settings)
    try:
        import ray.serve  # noqa: F401
    except ImportError as missing:
        raise typer.BadParameter(f"{missing.name} is not installed: pip install 'bitgraft[ray]'") from missing
    from bitgraft.serving.ray_app import serve as deploy

    return deploy(settings)
