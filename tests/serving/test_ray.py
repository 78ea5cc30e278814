"""The service on a local Ray: the same answers and errors, and requests routed by task."""

import base64
import hashlib
import itertools
import os
import socket
import time
from typing import Any

import httpx
import pytest
from services import PATIENCE, new_store, offline, picture, until

NAMES = ("birds", "cars", "dogs")


@pytest.fixture
def address(tmp_path, monkeypatch):
    for patience in ("MULTIPLEXED_MODEL_ID_MATCHING", "PROXY_READY_CHECK", "PROXY_HEALTH_CHECK"):  # on a busy machine
        monkeypatch.setenv(f"RAY_SERVE_{patience}_TIMEOUT_S", "60")
    import ray
    from ray import serve

    from bitgraft.errors import ServingError
    from bitgraft.serving import ray_app
    from bitgraft.serving.settings import Settings

    store, net = new_store(tmp_path, NAMES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_worker_niceness", "0")  # otherwise they starve on a busy machine
    variables = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    try:
        with pytest.raises(ServingError, match="3 replicas need one CPU each, but Ray has 2: give fewer --workers"):
            ray_app.deploy(Settings(store=store.folder, port=port, workers=3, threads=1))
        keys = (hashlib.sha256(b"an-admin-secret").digest(),)
        settings = Settings(store=store.folder, port=port, workers=2, threads=1, exact=True, poll=0.1, admin_keys=keys)
        ray_app.deploy(settings)
        yield f"http://127.0.0.1:{port}", net
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.filterwarnings("ignore")  # from Ray and its dependencies
def test_replicas_give_the_offline_answers_and_the_same_errors(address):
    url, net = address
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
        for name in (*NAMES, "original") * 2:
            said = client.post(f"/v1/predict/{name}", content=picture()).json()
            assert said["answers"] == [offline(net, name, picture())]
        both = client.post("/v1/predict", params={"task": NAMES[:2]}, content=picture(2)).json()
        assert [task["answers"][0] for task in both["tasks"]] == [offline(net, name, picture(2)) for name in NAMES[:2]]
        missing = client.post("/v1/predict/zebras", content=picture())
        assert (missing.status_code, "known tasks are birds" in missing.json()["error"]) == (404, True)
        assert client.post("/v1/predict/birds", content=b"hello").status_code == 415
        assert {row["name"] for row in client.get("/v1/tasks").json()["tasks"]} == {*NAMES, "original"}
        assert client.get("/").status_code == 200
        image = {"name": "images", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(picture()).decode()]}
        inferred = client.post("/v2/models/birds/infer", json={"inputs": [image]}).json()["outputs"][1]
        assert inferred["data"] == [offline(net, "birds", picture())[0]["class"]]
        admin = {"X-API-Key": "an-admin-secret"}
        assert client.delete("/v1/tasks/dogs").status_code == 401
        assert client.delete("/v1/tasks/dogs", headers=admin).json()["previous"]
        assert client.post("/v1/tasks/dogs/rollback", headers=admin).json()["classes"] == 4
        until(lambda: client.get("/healthz").status_code == 200, "it is not healthy")
    handle = ray_serve().get_deployment_handle("tasks", "bitgraft")
    fresh = itertools.count(1)
    until(lambda: stays_at_home(handle, next(fresh)), "no task has a home")


@pytest.mark.filterwarnings("ignore")
def test_replicas_request_resources_that_the_cluster_has():
    from bitgraft.errors import ServingError
    from bitgraft.serving.ray_app import replica_resources
    from bitgraft.serving.settings import Settings

    on_gpus = Settings(store=".", workers=4, device="cuda")
    assert replica_resources(Settings(store=".", workers=4), {"CPU": 4, "GPU": 2}) == {"num_cpus": 1}
    assert replica_resources(on_gpus, {"CPU": 4, "GPU": 2}) == {"num_cpus": 1, "num_gpus": 0.5}
    assert replica_resources(on_gpus, {"CPU": 8, "GPU": 8}) == {"num_cpus": 1, "num_gpus": 1}
    with pytest.raises(ServingError, match="Ray has no GPU: leave out --device"):
        replica_resources(on_gpus, {"CPU": 8})


def stays_at_home(handle: Any, attempt: int) -> bool:
    """Whether 16 requests for a new task all reach the replica of the first one.

    The router learns of it after a while. Earlier requests may warm the other replica too, so each attempt takes a new
    task and waits longer than the last. By chance 16 requests would hardly land in one replica of two.
    """
    at = handle.options(multiplexed_model_id=f"new-{attempt}")
    first = at.home.remote().result(timeout_s=PATIENCE)
    time.sleep(0.2 * attempt)
    return {at.home.remote().result(timeout_s=PATIENCE) for _ in range(16)} == {first}


def ray_serve() -> Any:
    from ray import serve

    return serve
