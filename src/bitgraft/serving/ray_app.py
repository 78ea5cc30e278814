"""The service on Ray Serve: any number of front ends and replicas, on any number of machines.

A front end reads requests and sends each to its task's model id (Ray's model multiplexing), so it reaches a replica
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

from bitgraft.errors import ServingError
from bitgraft.serving.app import make_app
from bitgraft.serving.engine import Engine, Inferred, Predictions, Service
from bitgraft.serving.metrics import Metrics
from bitgraft.serving.refusals import Refusal
from bitgraft.serving.settings import Settings
from bitgraft.serving.supervisor import open_library
from bitgraft.serving.tracing import Tracing, otlp_exporter
from bitgraft.store import Store

APPLICATION, REPLICAS, FRONT = "bitgraft", "tasks", "front"


def serve(settings: Settings) -> int:
    """Deploy, and wait for SIGTERM or SIGINT; returns the exit code."""
    Store(settings.store)  # a bad store is reported here, not in some replica's log
    ray.init(ignore_reinit_error=True)
    try:
        deploy(settings)
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: ended.set())
        print(f"serving on http://{settings.host}:{settings.port}/", flush=True)
        ended.wait()
        ray_serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def deploy(settings: Settings) -> None:
    """Start the service on the Ray cluster that this process is connected to, and return when it answers."""
    asks = resources(settings, ray.cluster_resources())
    ray_serve.start(http_options=HTTPOptions(host=settings.host, port=settings.port))
    ray_serve.run(application(settings, asks), name=APPLICATION, route_prefix="/")


def resources(settings: Settings, cluster: Mapping[str, float]) -> dict[str, float]:
    """What each replica asks Ray for: a CPU, and with `--device cuda` its share of the GPUs, at most a whole one.

    Ray would wait without end for what the cluster lacks.
    """
    processors, gpus = (int(cluster.get(kind, 0)) for kind in ("CPU", "GPU"))
    if settings.workers > processors:
        told = f"{settings.workers} replicas need a CPU each, and Ray has {processors}: give fewer --workers"
        raise ServingError(told)
    if not settings.device.startswith("cuda"):
        return {"num_cpus": 1}
    if not gpus:
        raise ServingError("Ray has no GPU: leave out --device, or add a machine that has one")
    return {"num_cpus": 1, "num_gpus": min(1.0, gpus / settings.workers)}


def application(settings: Settings, asks: Mapping[str, float]) -> Any:
    """The two deployments, bound, as `ray_serve.run` takes them."""
    settings = settings.model_copy(update={"store": settings.store.absolute()})  # replicas start in other folders
    limits: dict[str, Any] = {"max_ongoing_requests": settings.max_waiting, "ray_actor_options": dict(asks)}
    tasks = ray_serve.deployment(name=REPLICAS, num_replicas=settings.workers, **limits)(_replica(settings))
    limits["ray_actor_options"] = {"num_cpus": 0}  # it mostly waits for replicas: the CPUs are theirs
    ingress = ray_serve.ingress(lambda: make_app(Remote(settings)))(Front)
    return ray_serve.deployment(name=FRONT, **limits)(ingress).bind(tasks.bind())


def _replica(settings: Settings) -> type:
    weights = Store(settings.store).size.weights
    models = max(1, settings.memory_budget // max(1, 4 * weights))  # tasks whose computed weights fit

    class Replica:
        """All tasks' bits, and the computed weights of as many tasks as fit into the budget."""

        async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
            torch.set_num_threads(settings.threads_per_turn)
            library = await asyncio.to_thread(open_library, settings)
            self._engine = Engine(library, settings)
            self._engine.start()

        @ray_serve.multiplexed(max_num_models_per_replica=models)  # type: ignore[untyped-decorator]
        async def warm(self, name: str) -> str:
            """Tells Ray's router that this replica has the task's weights; the network itself keeps them."""
            return name

        async def call(self, method: str, *args: Any) -> Any:
            """What a method of the engine gives, or its refusal: raised here, Ray would log that as a failure."""
            try:
                return await getattr(self._engine, method)(*args)
            except Refusal as refusal:
                return refusal

        async def predict(self, name: str, images: Sequence[bytes], top: int) -> Predictions | Refusal:
            answers = await self.call("predict", [name], images, top)
            if not isinstance(answers, Refusal):
                await self.home()
            return answers  # type: ignore[no-any-return]

        async def home(self) -> str:
            """Which replica this is, for whoever wants to know where a task is warm."""
            await self.warm(ray_serve.get_multiplexed_model_id())
            return str(ray_serve.get_replica_context().replica_id)

        async def check_health(self) -> None:
            if not self._engine.healthy():
                raise RuntimeError("a thread of the service has ended")

    return Replica


class Front:
    def __init__(self, tasks: Any) -> None:
        """Ray starts the replicas since they are bound to this."""


class Remote(Service):
    """The service whose work is done by replicas."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.metrics, self._healthy = settings, Metrics(), True
        self.tracing = Tracing(otlp_exporter(settings.otlp) if settings.otlp else None)
        threading.Thread(target=self._watch, name="bitgraft-health", daemon=True).start()

    def healthy(self) -> bool:
        """What Ray says of the replicas."""
        return self._healthy

    def _watch(self) -> None:
        while True:
            time.sleep(self.settings.poll)
            try:
                found = ray_serve.status().applications[APPLICATION].deployments[REPLICAS].status
                self._healthy = found not in (DeploymentStatus.UNHEALTHY, DeploymentStatus.DEPLOY_FAILED)
            except Exception:  # nobody there to ask
                self._healthy = False

    async def predict(self, names: Sequence[str], images: Sequence[bytes], top: int) -> Predictions:
        asked = [
            _replicas().options(multiplexed_model_id=name).predict.remote(name, list(images), top)
            for name in dict.fromkeys(names)
        ]
        return [prediction for reply in asked for prediction in await _accepted(reply)]

    async def infer(self, name: str, inputs: Sequence[bytes] | Tensor) -> Inferred:
        near = _replicas().options(multiplexed_model_id=name)
        return Inferred(*await _accepted(near.call.remote("infer", name, inputs)))

    async def change(self, action: str, name: str, *args: Any) -> dict[str, Any]:
        return dict(await _accepted(_replicas().call.remote("change", action, name, *args)))

    async def tasks(self) -> dict[str, Any]:
        return dict(await _accepted(_replicas().call.remote("tasks")))

    async def task(self, name: str) -> dict[str, Any]:
        return dict(await _accepted(_replicas().call.remote("task", name)))


def _replicas() -> Any:
    return ray_serve.get_deployment_handle(REPLICAS, APPLICATION)


async def _accepted(reply: Any) -> Any:
    answer = await reply
    if isinstance(answer, Refusal):
        raise answer
    return answer
