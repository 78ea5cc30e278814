"""One process that loads the store and forks workers, which share the backbone's memory and one listening socket.

A worker that dies is replaced at once; meanwhile the others answer what waits in the socket.
"""

import gc
import logging
import os
import signal
import socket
import time
import warnings
from typing import Any

import torch

from bitgraft.errors import ServingError
from bitgraft.serving.library import Library
from bitgraft.serving.metrics import forget_worker, share_folder
from bitgraft.serving.settings import Settings
from bitgraft.serving.worker import work
from bitgraft.store import Store

log = logging.getLogger("bitgraft.serving")
EVERY_TASK = 1 << 30  # the budget of bytes decides, not a count
STEADY = 10.0  # seconds after which a worker's start counts as a success
SLOWEST = 10.0  # seconds between two starts of workers that die at once


def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    torch.set_num_threads(1)  # a process that has run several threads cannot be forked
    library = open_library(settings)
    listener = _listen(settings)
    with share_folder():
        _Supervisor(settings, library, listener).run()
    return 0


def open_library(settings: Settings) -> Library:
    store = Store(settings.store)
    library = Library(store, store.network(active=EVERY_TASK, memory=settings.memory_budget))
    library.scan()
    return library


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=1024)
    except (OSError, OverflowError) as cause:
        raise ServingError(f"cannot listen on {settings.host} port {settings.port}: {cause}") from cause
    listener.setblocking(False)
    return listener


class _Supervisor:
    def __init__(self, settings: Settings, library: Library, listener: socket.socket) -> None:
        self._settings, self._library, self._listener = settings, library, listener
        self._workers: dict[int, float] = {}  # when each was started
        self._ending = False

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        gc.collect()
        gc.freeze()  # a collection in a worker would write to every object, and so copy their memory
        for _ in range(self._settings.workers):
            self._start()
        host, port = self._listener.getsockname()[:2]
        where = f"[{host}]" if ":" in host else host
        print(f"serving {len(self._library.tasks)} tasks on http://{where}:{port}/", flush=True)
        self._replace_dead()

    def _replace_dead(self) -> None:
        """Wait for workers to end, and start others in their place until the service ends."""
        delay = 0.0
        while self._workers:
            process, status = os.wait()
            started = self._workers.pop(process, 0.0)
            forget_worker(process)
            if self._ending:
                continue
            log.error("worker %d ended with %d: starting another", process, os.waitstatus_to_exitcode(status))
            delay = 0.0 if time.monotonic() - started > STEADY else min(SLOWEST, 2 * delay + 0.1)
            time.sleep(delay)
            if not self._ending:
                self._start()

    def _start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # no Python thread runs here, and none of torch's yet
            process = os.fork()
        if process == 0:
            work(self._settings, self._library, self._listener)
        self._workers[process] = time.monotonic()
        if self._ending:
            os.kill(process, signal.SIGTERM)

    def _end(self, number: int, frame: Any) -> None:
        """Workers finish what they have accepted; nobody accepts anything new."""
        self._ending = True
        self._listener.close()
        for process in self._workers:
            os.kill(process, signal.SIGTERM)
