"""`bitgraft serve`: every task of a store over HTTP."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from bitgraft.cli.app import command
from bitgraft.cli.options import STORE, Engine, StoreFolder

LogFormat = Literal["text", "json"]


@command("""
  bitgraft serve --store my-store
  curl --data-binary @rose.jpg -H 'Content-Type: image/jpeg' localhost:8000/v1/predict/flowers
  bitgraft serve --host 0.0.0.0 --workers 4 --memory-budget 1GB --api-key-file keys.txt""")
def serve(
    context: typer.Context,
    store: StoreFolder = STORE,
    host: Annotated[str, Option(help="The address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    workers: Annotated[int, Option(min=1, help="Processes; they share the backbone's memory.")] = 1,
    threads: Annotated[int, Option(min=0, help="Threads that compute, per worker; 0 divides the cores.")] = 0,
    turns: Annotated[int, Option(min=0, help="Batches at once, which divide the threads; 0: at most 4.")] = 0,
    memory_budget: Annotated[str, Option(metavar="SIZE", help="Memory for computed weights, per worker.")] = "2GB",
    max_batch: Annotated[int, Option(min=1, help="Images of one task that run in one turn.")] = 32,
    max_wait_ms: Annotated[float, Option(min=0, help="How long an image waits for others of its task.")] = 0.0,
    max_queue: Annotated[int, Option(min=1, help="Images waiting for one task; four times as many for all.")] = 64,
    max_upload: Annotated[str, Option(metavar="SIZE", help="The largest request.")] = "20MB",
    max_pixels: Annotated[int, Option(min=1, help="The largest image, checked before decoding.")] = 32_000_000,
    patience: Annotated[float, Option(min=0.1, help="Seconds for a client to send a request.")] = 20.0,
    grace: Annotated[float, Option(min=0, help="Seconds to finish accepted requests at the end.")] = 30.0,
    poll: Annotated[float, Option(min=0.05, help="Seconds between checks for changed task files.")] = 1.0,
    exact: Annotated[bool, Option("--exact", help="PyTorch, image by image: answers to the last bit.")] = False,
    engine: Engine = "auto",
    pin: Annotated[
        list[str] | None, Option(metavar="TASK", help="A task to keep ready from the start; repeatable.")
    ] = None,
    device: Annotated[str, Option(help="Where the network runs, as torch calls it.")] = "cpu",
    api_key_file: Annotated[Path | None, Option(metavar="FILE", help="API keys, one per line.")] = None,
    admin_key_file: Annotated[
        Path | None, Option(metavar="FILE", help="Keys that may add, replace and remove tasks over HTTP.")
    ] = None,
    max_task: Annotated[str, Option(metavar="SIZE", help="The largest task file that may be added so.")] = "500MB",
    log_format: Annotated[LogFormat, Option(help="json: one object per line, requests included.")] = "text",
    otlp: Annotated[str, Option(metavar="URL", help="Send traces to this collector, by OTLP over HTTP.")] = "",
    ray: Annotated[bool, Option("--ray", help="Deploy on Ray Serve, with --workers replicas.")] = False,
) -> None:
    """Serve every task of a store over HTTP, with a page to try them.

    Task files that are added, replaced or removed are picked up without a restart.
    """
    from bitgraft.errors import ServingError, how_to_install

    extra = "ray" if ray else "serve"
    try:
        from bitgraft.serving.access import read_keys
        from bitgraft.serving.settings import Settings

        if ray:
            from bitgraft.serving.ray_app import serve as run
        else:
            from bitgraft.serving.supervisor import serve as run
        if otlp:
            extra = "otel"
            import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError as missing:
        raise typer.BadParameter(f"{missing.name} is not installed: {how_to_install(extra)}") from missing
    keys = {
        "keys": read_keys(api_key_file) if api_key_file else (),
        "admin_keys": read_keys(admin_key_file) if admin_key_file else (),
    }
    try:
        settings = Settings(**{**context.params, "pin": pin or ()}, **keys)  # the options have the settings' names
    except ServingError as fault:
        name, _, problem = str(fault).partition(" ")
        raise typer.BadParameter(f"--{name.replace('_', '-')} {problem}") from fault
    raise typer.Exit(run(settings))
