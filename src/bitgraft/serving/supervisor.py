"""One process that loads the store and forks workers, which share the backbone's memory and one listening socket.

A worker that dies is replaced at once; meanwhile the others answer what waits in the socket.
"""

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import warnings
from contextlib import suppress
from typing import Any, NoReturn

import torch
import uvicorn
from PIL import Image
from uvicorn.protocols.http.h11_impl import H11Protocol

from bitgraft.errors import ExportError, ServingError
from bitgraft.serving.app import make_app
from bitgraft.serving.engine import Engine
from bitgraft.serving.library import Library
from bitgraft.serving.logs import set_up_logging
from bitgraft.serving.metrics import forget_worker, share_folder
from bitgraft.serving.settings import Settings
from bitgraft.store import Store
from bitgraft.workflows.prediction import task_session

log = logging.getLogger("bitgraft.serving")
CONNECTIONS = 1000
EVERY_TASK = 1 << 30  # the budget of bytes decides, not a count
STEADY, PAUSE = 10.0, 1.0  # seconds; a worker that dies earlier than that is replaced after a pause


def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code."""
    set_up_logging(settings.log_format)
    torch.set_num_threads(1)  # a process that has run several threads cannot be forked
    library = open_library(settings)
    listener = listen(settings)
    if settings.sessions:
        prepare_graphs(settings, library)
    with share_folder():
        _Supervisor(settings, library, listener).run()
    return 0


def open_library(settings: Settings) -> Library:
    store = Store(settings.store)
    library = Library(store, store.network(active=EVERY_TASK, memory=settings.memory_budget))
    library.scan()
    if missing := [name for name in settings.pin if name not in library.tasks]:
        raise ServingError(f"there is no task {missing[0]!r} to pin; the store has {', '.join(library.tasks)}")
    return library


def prepare_graphs(settings: Settings, library: Library) -> None:
    """Export the backbone's graph into the cache, unless it is there: in a process of its own, whose memory then goes.

    Tasks that need other graphs than these get them later, beside the traffic.
    """
    receive, send = multiprocessing.Pipe(duplex=False)
    shapes = {str((e.about["method"], e.preprocessing.size)): e.inner for e in library.tasks.values()}

    def export() -> None:
        for inner in shapes.values():
            try:
                task_session(library.net, inner)
            except ExportError as problem:
                send.send(str(problem))
        send.send("")

    process = multiprocessing.get_context("fork").Process(target=export)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # as for workers
        process.start()
    send.close()
    reason = ""
    with suppress(EOFError):  # it died
        reason = receive.recv()
    process.join()
    if reason and settings.engine == "onnxruntime":
        raise ServingError(f"the tasks cannot run on onnxruntime: {reason}")
    if reason:
        log.warning("tasks run on PyTorch: %s", reason)


def listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=1024)
    except (OSError, OverflowError) as cause:
        raise ServingError(f"cannot listen on {settings.host} port {settings.port}: {cause}") from cause
    listener.setblocking(False)
    # asyncio does this for sockets that it binds itself. Without it each answer waits 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
        while self._workers:  # one that ends is replaced, until the service ends
            process, status = os.wait()
            started = self._workers.pop(process, 0.0)
            forget_worker(process)
            if self._ending:
                continue
            log.error("worker %d ended with %d: starting another", process, os.waitstatus_to_exitcode(status))
            if time.monotonic() - started < STEADY:
                time.sleep(PAUSE)
            if not self._ending:
                self._start()
        gc.unfreeze()  # else nanobind takes what nobody collected at the end for leaks

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
        """Workers finish what they have accepted; nobody accepts anything new."""
        self._ending = True
        self._listener.close()
        for process in self._workers:
            os.kill(process, signal.SIGTERM)


def _work(settings: Settings, library: Library, listener: socket.socket) -> NoReturn:
    """A worker's life, after the fork; it never returns to what the supervisor was doing."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        torch.set_num_threads(settings.threads_per_turn)
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
            engine.scheduler.hurry()  # what waits need not wait for more
            super().handle_exit(signal.SIGTERM, frame)  # Ctrl-C comes along with it, and must not cut requests off

    engine = Engine(library, settings)
    engine.start()
    config = uvicorn.Config(
        make_app(engine),
        http=PatientProtocol,
        timeout_keep_alive=settings.patience,  # type: ignore[arg-type]  # seconds, of which it says they are whole
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=int(settings.grace),
    )
    await Server(config).serve(sockets=[listener])
    engine.tracing.close()


class PatientProtocol(H11Protocol):
    """uvicorn stops the clock of a connection at the first byte; here it runs until a request's headers are complete.

    A client therefore has `timeout_keep_alive` seconds for them, from the start of the connection or the last response.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        self.conn.receive_data(data)
        self.handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._unset_keepalive_if_required()
