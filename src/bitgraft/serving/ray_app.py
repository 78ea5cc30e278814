"""The service on Ray Serve: any number of front ends and of replicas, on any number of machines.

A front end reads requests and sends each to the task's model id (Ray's model multiplexing), so that it lands on a
replica where the task's weights are computed already, if there is one with room. Every machine must see the store.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve.config import HTTPOptions

from bitgraft.errors import ServingError
from bitgraft.serving.app import make_app
from bitgraft.serving.engine import Engine, Said
from bitgraft.serving.metrics import Metrics
from bitgraft.serving.refusals import Refusal
from bitgraft.serving.settings import Settings
from bitgraft.serving.supervisor import open_library
from bitgraft.store import Store

APPLICATION, REPLICAS, FRONT = "bitgraft", "tasks", "front"
log = logging.getLogger("bitgraft.serving")


def serve(settings: Settings) -> int:
    """Deploy, and wait for SIGTERM or SIGINT."""
    Store(settings.store)  # what is wrong with it is said here, not in some replica's log
    ray.init(ignore_reinit_error=True)
    try:
        deploy(settings)
    except BaseException:
        ray.shutdown()
        raise
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: ended.set())
    print(f"serving on http://{settings.host}:{settings.port}/", flush=True)
    ended.wait()
    ray_serve.shutdown()
    ray.shutdown()
    return 0


def deploy(settings: Settings) -> None:
    """Start the service on the Ray cluster that this process is connected to, and return when it answers."""
    has = int(ray.cluster_resources().get("CPU", 0))
    if settings.workers > has:  # Ray would wait for a machine to be added, without end
        raise ServingError(f"{settings.workers} replicas need a CPU each, and Ray has {has}: give fewer --workers")
    ray_serve.start(http_options=HTTPOptions(host=settings.host, port=settings.port))
    ray_serve.run(application(settings), name=APPLICATION, route_prefix="/")


def application(settings: Settings) -> Any:
    """The two deployments, bound: `ray_serve.run` takes it, and a configuration file of Ray's can name it."""
    settings = replace(settings, store=settings.store.absolute())  # found whatever folder a replica starts in
    limits: dict[str, Any] = {"max_ongoing_requests": settings.max_waiting, "ray_actor_options": {"num_cpus": 1}}
    tasks = ray_serve.deployment(name=REPLICAS, num_replicas=settings.workers, **limits)(_replica(settings))
    limits["ray_actor_options"] = {"num_cpus": 0}  # it waits for replicas most of the time, whose CPUs these are
    front = ray_serve.deployment(name=FRONT, **limits)(_front(settings))
    return front.bind(tasks.bind())


def from_environment(arguments: dict[str, str]) -> Any:
    """For `serve run` and its configuration files: `bitgraft.serving.ray_app:from_environment store=DIR`."""
    if "store" not in arguments:
        raise ServingError("say which store, as in store=DIR")
    return application(Settings(store=Path(arguments["store"]), workers=int(arguments.get("replicas", "1"))))


def _replica(settings: Settings) -> type:
    class Replica:
        """All tasks' bits, and the computed weights of as many as fit into the budget."""

        async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
            library = await asyncio.to_thread(open_library, settings)
            self._engine = Engine(library, settings)
            await self._engine.start()

        @ray_serve.multiplexed(max_num_models_per_replica=_how_many(settings))  # type: ignore[untyped-decorator]
        async def warm(self, name: str) -> str:
            """Tells Ray's router that this task is at home here now; the network itself keeps the weights."""
            return name

        async def predict(self, name: str, pictures: Sequence[bytes], top: int) -> Any:
            """The answers, or what a client is to be told instead."""
            try:
                said = await self._engine.predict([name], pictures, top)
            except Refusal as problem:
                return {"status": problem.status, "sentence": problem.sentence, "retry_after": problem.retry_after}
            await self.warm(ray_serve.get_multiplexed_model_id())
            return said

        async def home(self) -> str:
            """Which replica this is, for whoever wants to know where a task is warm."""
            await self.warm(ray_serve.get_multiplexed_model_id())
            return str(ray_serve.get_replica_context().replica_id)

        async def tasks(self) -> dict[str, Any]:
            return await self._engine.tasks()

        async def task(self, name: str) -> Any:
            try:
                return await self._engine.task(name)
            except Refusal as problem:
                return {"status": problem.status, "sentence": problem.sentence, "retry_after": problem.retry_after}

        async def check_health(self) -> None:
            if not await self._engine.healthy():
                raise RuntimeError("the scheduler has ended")

    return Replica


def _front(settings: Settings) -> type:
    def build() -> Any:
        return make_app(Remote(settings))

    @ray_serve.ingress(build)
    class Front:
        def __init__(self, tasks: Any) -> None:
            pass

    return Front


class Remote:
    """A `Service` whose work is done by replicas."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.metrics = settings, Metrics()

    def _handle(self) -> Any:
        return ray_serve.get_deployment_handle(REPLICAS, APPLICATION)

    async def predict(self, names: Sequence[str], pictures: Sequence[bytes], top: int) -> Said:
        handle = self._handle()
        asked = [
            handle.options(multiplexed_model_id=name).predict.remote(name, list(pictures), top)
            for name in dict.fromkeys(names)
        ]
        return [said for reply in asked for said in _accepted(await reply)]

    async def tasks(self) -> dict[str, Any]:
        found: dict[str, Any] = await self._handle().tasks.remote()
        return found

    async def task(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = _accepted(await self._handle().task.remote(name))
        return found

    async def healthy(self) -> bool:
        return True

    async def ready(self) -> bool:
        return True

    async def start(self) -> None:
        """Replicas start themselves."""

    async def stop(self) -> None:
        """Replicas end themselves."""

    def note(self) -> None:
        """What waits is counted by replicas."""


def _accepted(reply: Any) -> Any:
    if isinstance(reply, dict) and "sentence" in reply:
        raise Refusal(**reply)
    return reply


def _how_many(settings: Settings) -> int:
    """Tasks whose computed weights fit into the budget, by the size that a mask method's are."""
    store = Store(settings.store)
    return max(1, settings.memory_budget // max(1, 4 * store.size.weights))
