"""One process loads the store and forks workers, which share the backbone's memory and one listening socket.

A worker that dies is replaced at once. Meanwhile the others answer the connections that wait in the socket.
"""

import asyncio
import gc
import logging
import multiprocessing
import re
import signal
import socket
import time
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import uvicorn
from PIL import Image
from prometheus_client import multiprocess
from uvicorn.protocols.http.h11_impl import H11Protocol

from bitgraft.errors import ExportError, ServingError
from bitgraft.serving.app import make_app
from bitgraft.serving.engine import Engine
from bitgraft.serving.library import Library
from bitgraft.serving.logs import set_up_logging
from bitgraft.serving.metrics import share_folder
from bitgraft.serving.settings import Settings
from bitgraft.store import Store
from bitgraft.workflows.prediction import task_session

log = logging.getLogger("bitgraft.serving")
FORK = multiprocessing.get_context("fork")
MAX_CONNECTIONS = 1000
EVERY_TASK = 1 << 30  # no limit on the number of tasks in memory: the budget in bytes decides
EARLY_EXIT, RESTART_DELAY = 10.0, 1.0  # seconds; a worker that dies early is replaced after a delay


def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    set_up_logging(settings.log_format)
    torch.set_num_threads(1)  # a process that has used several threads cannot be forked
    library = open_library(settings)
    listener = listen(settings)
    if settings.use_sessions:
        prepare_graphs(settings, library)
    with share_folder():
        _Supervisor(settings, library, listener).run()


def open_library(settings: Settings) -> Library:
    store = Store(settings.store)
    library = Library(store, store.network(active=EVERY_TASK, memory=settings.memory_budget))
    if missing := [name for name in settings.pin if name not in library.tasks]:
        raise ServingError(f"there is no task {missing[0]!r} to pin; the store has {', '.join(library.tasks)}")
    return library


def prepare_graphs(settings: Settings, library: Library) -> None:
    """Export the backbone's graphs into the cache, in child processes that take their memory with them.

    Graphs that later tasks need are exported while the service runs.
    """
    structures = {(e.info["method"], e.preprocessing.size): e.task_id for e in library.tasks.values()}
    log.info("preparing onnxruntime graphs (at most %d): about 10 s for each that is not cached", len(structures))
    failures = [_failure_in_child(partial(task_session, library.net, t), ExportError) for t in structures.values()]
    for reason in dict.fromkeys(filter(None, failures)):
        if settings.engine == "onnxruntime":
            raise ServingError(f"the tasks cannot run on onnxruntime: {reason}")
        log.warning("tasks run on PyTorch: %s", reason)


def check_device(device: str) -> None:
    """Raise if the device does not work. A child tries it: a process that has used a GPU cannot be forked."""
    reason = _failure_in_child(lambda: torch.empty(1, device=device), RuntimeError, AssertionError, NotImplementedError)
    if reason is not None:
        raise ServingError(f"device {device} does not work here: {reason.partition(chr(10))[0].rstrip('.')}")


def _failure_in_child(step: Callable[[], Any], *expected: type[Exception]) -> str | None:
    """Run a step in a child process. Return the message of an expected error, else None."""
    reasons = FORK.SimpleQueue()

    def run() -> None:
        try:
            step()
        except expected as problem:
            reasons.put(str(problem))

    _fork(run).join()
    return None if reasons.empty() else str(reasons.get())


def _fork(target: Callable[..., None], *args: Any) -> ForkProcess:
    child = FORK.Process(target=target, args=args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has no threads of Python or torch yet
        child.start()
    return child


def listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=1024)
    except (OSError, OverflowError) as cause:
        reason = re.sub(r"^\[Errno .*?\] | \(while .*", "", str(cause))
        raise ServingError(f"cannot listen on {settings.host} port {settings.port}: {reason}") from cause
    listener.setblocking(False)
    # asyncio sets this only on sockets that it binds itself. Without it each response waits 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _Supervisor:
    def __init__(self, settings: Settings, library: Library, listener: socket.socket) -> None:
        self._settings, self._library, self._listener = settings, library, listener
        self._workers: dict[ForkProcess, float] = {}  # and their start times
        self._is_stopping = False

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        gc.collect()
        gc.freeze()  # a collection in a worker would write to every object and so copy the shared memory
        for _ in range(self._settings.workers):
            self._start_worker()
        host, port = self._listener.getsockname()[:2]
        where = f"[{host}]" if ":" in host else host
        print(f"serving {len(self._library.tasks)} tasks on http://{where}:{port}/", flush=True)
        while self._workers:
            wait([worker.sentinel for worker in self._workers])
            for worker in [worker for worker in self._workers if not worker.is_alive()]:
                started = self._workers.pop(worker)
                multiprocess.mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]  # drops its gauges
                if self._is_stopping:
                    continue
                log.error("worker %d exited with %d: starting another", worker.pid, worker.exitcode)
                if time.monotonic() - started < EARLY_EXIT:
                    time.sleep(RESTART_DELAY)
                if not self._is_stopping:
                    self._start_worker()
        gc.unfreeze()  # otherwise nanobind reports the frozen objects as leaks at exit

    def _start_worker(self) -> None:
        worker = _fork(_run_worker, self._settings, self._library, self._listener)
        self._workers[worker] = time.monotonic()
        if self._is_stopping:
            worker.terminate()

    def _stop(self, number: int, frame: Any) -> None:
        """Accept no new connections; workers finish the requests that they have."""
        self._is_stopping = True
        self._listener.close()
        for worker in self._workers:
            worker.terminate()


def _run_worker(settings: Settings, library: Library, listener: socket.socket) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    torch.set_num_threads(settings.threads_per_turn)
    asyncio.run(_serve(settings, library, listener))


async def _serve(settings: Settings, library: Library, listener: socket.socket) -> None:
    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            engine.scheduler.drain()
            super().handle_exit(signal.SIGTERM, frame)  # Ctrl-C sends SIGINT as well, which would cut requests off

    engine = Engine(library, settings)
    engine.start()
    config = uvicorn.Config(
        make_app(engine),
        http=HeaderTimeoutProtocol,
        timeout_keep_alive=settings.patience,  # type: ignore[arg-type]  # a float works
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=int(settings.grace),
    )
    await Server(config).serve(sockets=[listener])
    engine.tracing.close()


class HeaderTimeoutProtocol(H11Protocol):
    """Apply `timeout_keep_alive` to the headers of every request, where uvicorn stops the clock at the first byte.

    It runs from the start of the connection, or from the last response, until the headers are complete.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        self.conn.receive_data(data)
        self.handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._unset_keepalive_if_required()
