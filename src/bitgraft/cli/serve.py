"""`bitgraft serve`: serve every task of a store over HTTP."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from bitgraft.cli.app import command, count, flag, number, setting
from bitgraft.cli.options import STORE, Device, Engine, StoreFolder
from bitgraft.errors import ServingError, how_to_install

LogFormat = Literal["text", "json"]


@command("""
  bitgraft serve --store my-store
  curl --data-binary @rose.jpg -H 'Content-Type: image/jpeg' localhost:8000/v1/predict/flowers
  bitgraft serve --host 0.0.0.0 --workers 4 --memory-budget 1GB --api-key-file keys.txt""")
def serve(
    context: typer.Context,
    store: StoreFolder = STORE,
    host: Annotated[str, setting("ADDRESS", "The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, metavar="N", help="The port; 0 picks a free one.")] = 8000,
    workers: Annotated[int, count("Processes; they share the backbone's memory.")] = 1,
    threads: Annotated[int, count("Compute threads per worker; 0 divides the cores.", least=0)] = 0,
    turns: Annotated[int, count("Batches that run at once and share the threads; 0: up to 4.", least=0)] = 0,
    memory_budget: Annotated[str, setting("SIZE", "Memory for computed weights, per worker.")] = "2GB",
    max_batch: Annotated[int, count("Largest batch of one task's images.")] = 32,
    max_wait_ms: Annotated[float, number("How long an image waits for a fuller batch.", 0, metavar="MS")] = 0.0,
    max_queue: Annotated[int, count("Images queued per task; all tasks: four times that.")] = 64,
    max_upload: Annotated[str, setting("SIZE", "Largest request.")] = "20MB",
    max_pixels: Annotated[int, count("Largest image, checked before decoding.")] = 32_000_000,
    patience: Annotated[float, number("Time for a client to send a request.", 0.1, metavar="SECONDS")] = 20.0,
    grace: Annotated[float, number("Time to finish accepted requests at shutdown.", 0, metavar="SECONDS")] = 30.0,
    poll: Annotated[float, number("Time between checks for changed task files.", 0.05, metavar="SECONDS")] = 1.0,
    exact: Annotated[bool, flag("--exact", "PyTorch, one image at a time: bitwise reproducible answers.")] = False,
    engine: Engine = "auto",
    pin: Annotated[list[str] | None, setting("TASK", "A task to load at the start and keep ready; repeatable.")] = None,
    device: Device = "cpu",
    api_key_file: Annotated[Path | None, setting("FILE", "API keys, one per line.")] = None,
    admin_key_file: Annotated[
        Path | None, setting("FILE", "Keys that may change tasks over HTTP, one per line.")
    ] = None,
    max_task: Annotated[str, setting("SIZE", "Largest task file that may be added over HTTP.")] = "500MB",
    log_format: Annotated[LogFormat, Option(help="json: one object per line, including requests.")] = "text",
    otlp: Annotated[str, setting("URL", "Send traces to this OTLP collector over HTTP.")] = "",
    ray: Annotated[bool, flag("--ray", "Deploy on Ray Serve, with --workers replicas.")] = False,
) -> None:
    """Serve every task of a store over HTTP, with a page to try them.

    Changes to the store's task files take effect without a restart.
    """
    extra = "ray" if ray else "serve"
    try:
        from bitgraft.serving.access import read_keys
        from bitgraft.serving.settings import Settings

        if ray:
            from bitgraft.serving.ray_app import serve as run
        else:
            from bitgraft.serving.supervisor import check_device
            from bitgraft.serving.supervisor import serve as run
        if otlp:
            extra = "otel"
            import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError as missing:
        raise typer.BadParameter(f"{missing.name} is not installed: {how_to_install(extra)}") from missing
    keys = {"keys": read_keys(api_key_file), "admin_keys": read_keys(admin_key_file)}
    try:
        settings = Settings(**{**context.params, "pin": pin or ()}, **keys)  # the options have the settings' names
        if device != "cpu" and not ray:
            check_device(device)
    except ServingError as error:
        name, _, problem = str(error).partition(" ")
        raise typer.BadParameter(f"--{name.replace('_', '-')} {problem}") from error
    run(settings)
