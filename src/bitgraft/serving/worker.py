"""One worker process: uvicorn, with a limit on the time that a client takes to send its headers."""

import asyncio
import logging
import os
import signal
import socket
import sys
import warnings
from functools import partial
from typing import Any, NoReturn

import torch
import uvicorn
from PIL import Image
from uvicorn.protocols.http.h11_impl import H11Protocol

from bitgraft.serving.app import make_app
from bitgraft.serving.engine import Engine
from bitgraft.serving.library import Library
from bitgraft.serving.settings import Settings

log = logging.getLogger("bitgraft.serving")
CONNECTIONS = 1000


def work(settings: Settings, library: Library, listener: socket.socket) -> NoReturn:
    """A worker's life, after the fork; it never returns to what the supervisor was doing."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        torch.set_num_threads(settings.threads_each)
        asyncio.run(_serve(settings, library, listener))
        code = 0
    except BaseException:
        log.exception("a worker failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


async def _serve(settings: Settings, library: Library, listener: socket.socket) -> None:
    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            engine.hurry()
            super().handle_exit(sig, frame)

    engine = Engine(library, settings)
    config = uvicorn.Config(
        make_app(engine),
        http=partial(PatientProtocol, patience=settings.patience),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=int(settings.grace),
    )
    await Server(config).serve(sockets=[listener])


class PatientProtocol(H11Protocol):
    """uvicorn limits the time between two requests, but not the time until a request's headers have arrived."""

    def __init__(self, *args: Any, patience: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience = patience
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start()

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and self._between_requests():
            self._start()
        super().data_received(data)
        if not self._between_requests():
            self._cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start(self) -> None:
        self._deadline = self.loop.call_later(self._patience, self._expire)

    def _expire(self) -> None:
        self._deadline = None
        if self._between_requests() and not self.transport.is_closing():
            self.transport.close()

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
