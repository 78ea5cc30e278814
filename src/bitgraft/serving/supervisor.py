"""One process that loads the store and forks workers: they share the backbone's memory and one listening socket.

A worker that dies is started again at once, and what waits in the socket goes to the others meanwhile.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from typing import Any

import torch
from PIL import Image

from bitgraft.errors import ServingError
from bitgraft.serving.library import Library
from bitgraft.serving.metrics import forget_worker, share_folder
from bitgraft.serving.settings import Settings
from bitgraft.store import Store

log = logging.getLogger("bitgraft.serving")
EVERY_TASK = 1 << 30  # the budget of bytes decides, not a count
STEADY = 10.0  # seconds after which a worker's start counts as a success
SLOWEST = 10.0  # seconds between two starts of workers that die at once
CONNECTIONS = 1000


def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    torch.set_num_threads(1)  # a process that has run several threads cannot be forked
    library = open_library(settings)
    listener = _listen(settings)
    with share_folder():
        return _Supervisor(settings, library, listener).run()


def open_library(settings: Settings) -> Library:
    store = Store(settings.store)
    library = Library(store, store.network(active=EVERY_TASK, memory=settings.memory_budget))
    library.scan()
    return library


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except (OSError, OverflowError) as cause:
        raise ServingError(f"cannot listen on {settings.host} port {settings.port}: {cause}") from cause
    listener.listen(1024)
    listener.setblocking(False)
    return listener


class _Supervisor:
    def __init__(self, settings: Settings, library: Library, listener: socket.socket) -> None:
        self._settings, self._library, self._listener = settings, library, listener
        self._workers: dict[int, float] = {}  # when each was started
        self._delay = 0.0
        self._ending = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        gc.collect()
        gc.freeze()  # a collection in a worker would write to every object, and end the sharing of their memory
        for _ in range(self._settings.workers):
            self._start()
        host, port = self._listener.getsockname()[:2]
        where = f"[{host}]" if ":" in host else host
        print(f"serving {len(self._library.tasks)} tasks on http://{where}:{port}/", flush=True)
        self._mind()
        return 0

    def _mind(self) -> None:
        """Wait for workers to end, and start others in their place until the service is to end."""
        while self._workers:
            process, status = os.wait()
            started = self._workers.pop(process, 0.0)
            forget_worker(process)
            if self._ending:
                continue
            log.error("worker %d ended with %d: another is started", process, os.waitstatus_to_exitcode(status))
            lasted = time.monotonic() - started
            self._delay = 0.0 if lasted > STEADY else min(SLOWEST, 2 * self._delay + 0.1)
            time.sleep(self._delay)
            if not self._ending:
                self._start()

    def _start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # no Python thread runs here, and none of torch's yet
            process = os.fork()
        if process == 0:
            _work(self._settings, self._library, self._listener)
        self._workers[process] = time.monotonic()
        if self._ending:
            os.kill(process, signal.SIGTERM)

    def _end(self, number: int, frame: Any) -> None:
        """Let workers finish what they have accepted; nobody takes anything new."""
        self._ending = True
        self._listener.close()
        for process in self._workers:
            os.kill(process, signal.SIGTERM)


def _work(settings: Settings, library: Library, listener: socket.socket) -> None:
    """A worker's life. It never returns into what the supervisor was doing."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        torch.set_num_threads(settings.threads_each)
        asyncio.run(answer(settings, library, listener))
        code = 0
    except KeyboardInterrupt:
        code = 0
    except BaseException:
        log.exception("a worker failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


async def answer(settings: Settings, library: Library, listener: socket.socket) -> None:
    """Serve in this process until a signal ends it."""
    import uvicorn

    from bitgraft.serving.app import make_app
    from bitgraft.serving.engine import Engine
    from bitgraft.serving.protocol import patient

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            threading.Thread(target=engine.hurry).start()  # in a thread, since a signal may find this one with the lock
            super().handle_exit(sig, frame)

    engine = Engine(library, settings)
    config = uvicorn.Config(
        make_app(engine),
        http=patient(settings.patience),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=int(settings.grace),
    )
    await Server(config).serve(sockets=[listener])
