"""The service on Ray Serve: any number of front ends and replicas, on any number of machines.

A front end reads requests and sends each with its task as the model id (Ray's model multiplexing). It reaches a replica
where the task's weights are already computed, if one has room. Every machine must see the store.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from ray import serve as ray_serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import DeploymentStatus
from torch import Tensor

from bitgraft.errors import BitgraftError, ServingError
from bitgraft.serving.app import make_app
from bitgraft.serving.engine import Engine, Inferred, Service
from bitgraft.serving.metrics import Metrics
from bitgraft.serving.settings import Settings
from bitgraft.serving.supervisor import open_library
from bitgraft.serving.tracing import Tracing
from bitgraft.store import Store

APPLICATION, REPLICAS, FRONT = "bitgraft", "tasks", "front"


def serve(settings: Settings) -> None:
    """Deploy and wait for SIGTERM or SIGINT."""
    Store(settings.store)  # report a bad store here, not in a replica's log
    ray.init(ignore_reinit_error=True)
    try:
        deploy(settings)
        stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: stopped.set())
        print(f"serving on http://{settings.host}:{settings.port}/", flush=True)
        stopped.wait()
        ray_serve.shutdown()
    finally:
        ray.shutdown()


def deploy(settings: Settings) -> None:
    """Start the service on the Ray cluster that this process is connected to. Return when it answers."""
    options = replica_resources(settings, ray.cluster_resources())
    ray_serve.start(http_options=HTTPOptions(host=settings.host, port=settings.port))
    ray_serve.run(application(settings, options), name=APPLICATION, route_prefix="/")


def replica_resources(settings: Settings, cluster: Mapping[str, float]) -> dict[str, float]:
    """Return Ray's resource options per replica: one CPU, and with `--device cuda` its share of the GPUs, at most one.

    Raise a `ServingError` if the cluster has too few: Ray would wait forever.
    """
    cpus, gpus = (int(cluster.get(kind, 0)) for kind in ("CPU", "GPU"))
    if settings.workers > cpus:
        raise ServingError(f"{settings.workers} replicas need one CPU each, but Ray has {cpus}: give fewer --workers")
    if not settings.device.startswith("cuda"):
        return {"num_cpus": 1}
    if not gpus:
        raise ServingError("Ray has no GPU: leave out --device, or add a machine with a GPU")
    return {"num_cpus": 1, "num_gpus": min(1.0, gpus / settings.workers)}


def application(settings: Settings, resources: Mapping[str, float]) -> Any:
    """Return the two deployments, bound, for `ray_serve.run`."""
    settings = settings.model_copy(update={"store": settings.store.absolute()})  # replicas have other working folders
    limits: dict[str, Any] = {"max_ongoing_requests": settings.max_waiting, "ray_actor_options": dict(resources)}
    tasks = ray_serve.deployment(name=REPLICAS, num_replicas=settings.workers, **limits)(_replica(settings))
    limits["ray_actor_options"] = {"num_cpus": 0}  # the front end mostly waits: leave the CPUs to the replicas
    ingress = ray_serve.ingress(lambda: make_app(Remote(settings)))(Front)
    return ray_serve.deployment(name=FRONT, **limits)(ingress).bind(tasks.bind())


def _replica(settings: Settings) -> type:
    weights = Store(settings.store).size.weights
    models = max(1, settings.memory_budget // max(1, 4 * weights))  # tasks whose computed weights fit

    class Replica:
        """Holds the bits of all tasks, and the computed weights of as many as fit into the budget."""

        async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
            torch.set_num_threads(settings.threads_per_turn)
            library = await asyncio.to_thread(open_library, settings)
            self._engine = Engine(library, settings)
            self._engine.start()

        @ray_serve.multiplexed(max_num_models_per_replica=models)  # type: ignore[untyped-decorator]
        async def warm(self, name: str) -> str:
            """Tell Ray's router that this replica has the task's weights, which the network itself keeps."""
            return name

        async def call(self, method: str, *args: Any) -> Any:
            """Call a method of the engine. Return an error instead of raising it, or Ray would log a failure."""
            try:
                result = await getattr(self._engine, method)(*args)
            except BitgraftError as error:
                return error
            await self.home()
            return result

        async def home(self) -> str:
            """Mark the request's task, if it has one, as warm here and return this replica's id."""
            if name := ray_serve.get_multiplexed_model_id():
                await self.warm(name)
            return str(ray_serve.get_replica_context().replica_id)

        async def check_health(self) -> None:
            if not self._engine.healthy():
                raise RuntimeError("a thread of the service has died")

    return Replica


class Front:
    def __init__(self, tasks: Any) -> None:
        """Binding `tasks` makes Ray start the replicas."""


class Remote(Service):
    """The service as a front end: replicas do the work."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.metrics, self._healthy = settings, Metrics(), True
        self.tracing = Tracing.to_collector(settings.otlp)
        threading.Thread(target=self._watch, name="bitgraft-health", daemon=True).start()

    def healthy(self) -> bool:
        """Whether Ray considers the replicas healthy."""
        return self._healthy

    def _watch(self) -> None:
        while True:
            time.sleep(self.settings.poll)
            try:
                found = ray_serve.status().applications[APPLICATION].deployments[REPLICAS].status
                self._healthy = found not in (DeploymentStatus.UNHEALTHY, DeploymentStatus.DEPLOY_FAILED)
            except Exception:  # Ray's controller does not answer
                self._healthy = False

    async def infer(self, names: Sequence[str], inputs: Sequence[bytes] | Tensor) -> list[Inferred]:
        calls = [_call("infer", [name], inputs, task=name) for name in dict.fromkeys(names)]
        return [inferred for (inferred,) in await asyncio.gather(*calls)]

    async def change(self, action: str, name: str, *args: Any) -> dict[str, Any]:
        return dict(await _call("change", action, name, *args))

    async def tasks(self) -> dict[str, Any]:
        return dict(await _call("tasks"))

    async def task(self, name: str) -> dict[str, Any]:
        return dict(await _call("task", name))


async def _call(method: str, *args: Any, task: str = "") -> Any:
    """Call a method of an engine, in a replica where the task is warm if there is one."""
    replicas = ray_serve.get_deployment_handle(REPLICAS, APPLICATION).options(multiplexed_model_id=task)
    result = await replicas.call.remote(method, *args)
    if isinstance(result, BitgraftError):
        raise result
    return result
