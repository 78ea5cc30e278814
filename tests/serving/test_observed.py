"""Observability: request ids, the access log, metrics per task, traces."""

import asyncio
import json
import subprocess
import sys

import httpx
import pytest
import torch
from images import bitgraft
from services import PATIENCE, Served, new_store, picture, served, until

from bitgraft.serving.app import make_app
from bitgraft.serving.engine import Engine
from bitgraft.serving.library import Library
from bitgraft.serving.logs import valid_or_new_id
from bitgraft.serving.settings import Settings
from bitgraft.serving.tracing import Tracing
from bitgraft.store import Backbone
from bitgraft.workflows.prediction import imagenet_names


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observed")
    new_store(folder)
    with served(folder, "--log-format", "json") as running:
        yield running


def test_a_request_id_is_returned_and_a_bad_one_replaced(service: Served):
    assert service.http.get("/healthz", headers={"X-Request-ID": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = {service.http.get("/healthz").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert service.http.get("/nothing", headers={"X-Request-ID": "x" * 200}).headers["x-request-id"] != "x" * 200
    assert valid_or_new_id("a\nb") != "a\nb"


def test_the_log_is_json_with_one_line_for_each_request(service: Served):
    response = service.http.post("/v1/predict/birds", content=picture(), headers={"X-Request-ID": "logged-1"})
    assert response.status_code == 200
    service.http.post("/v1/predict/zebras?key=secret", content=picture(), headers={"X-Request-ID": "logged-2"})
    until(lambda: "logged-2" in service.said, "it was not logged")  # which happens after the response
    lines = [json.loads(line) for line in service.said.splitlines() if not line.startswith("serving ")]
    first, second = (next(line for line in lines if line.get("request_id") == f"logged-{i}") for i in (1, 2))
    assert (first["logger"], first["method"], first["route"]) == ("bitgraft.access", "POST", "/v1/predict/{task:path}")
    assert (first["task"], first["status"], first["client"]) == ("birds", 200, "127.0.0.1")
    assert first["milliseconds"] > 0
    assert (second["status"], second["path"]) == (404, "/v1/predict/zebras")
    assert "secret" not in service.said


def test_other_libraries_log_warnings_only():
    said = """import logging
from bitgraft.serving.logs import set_up_logging
set_up_logging("text")
names = ("bitgraft.serving", "uvicorn.error", "onnxscript")
print([name for name in names if logging.getLogger(name).isEnabledFor(logging.INFO)])"""
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert done.stdout == "['bitgraft.serving', 'uvicorn.error']\n"  # ONNX's exporter logs pages of details


def test_metrics_are_per_task(service: Served):
    for data in (picture(), picture(), b"no picture"):
        service.predict("cars", data)
    numbers = service.http.get("/metrics").text
    for line in (
        'bitgraft_task_requests_total{status="200",task="cars",version="stable"} 2.0',
        'bitgraft_task_requests_total{status="415",task="cars",version="stable"} 1.0',
        'bitgraft_images_total{task="cars",version="stable"} 2.0',
        'bitgraft_queue_images{task="cars"} 0.0',
        'bitgraft_queue_seconds_count{task="cars"} 2.0',
        'bitgraft_compute_seconds_count{engine="torch",task="cars",version="stable"} 2.0',
        'bitgraft_task_bytes{task="cars",tier="bits"}',
        'bitgraft_task_bytes{task="cars",tier="torch"}',
    ):
        assert line in numbers, line
    assert "zebras" not in numbers


def test_a_pretrained_timm_backbone_has_imagenet_class_names():
    network = torch.nn.Identity()
    assert imagenet_names(network, Backbone("x")) is None
    network.pretrained_cfg, network.num_classes = {}, 1000
    assert imagenet_names(network, Backbone("x"))[:2] == ("tench", "goldfish")
    assert imagenet_names(network, Backbone("x", pretrained=False)) is None
    network.num_classes = 10
    assert imagenet_names(network, Backbone("x")) is None


def test_a_request_is_a_span_in_the_clients_trace_with_child_spans():
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    with tracing.request("POST", {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}) as attributes:
        tracing.step("decode", 1.0, 1.5)
        tracing.step("compute", 1.5, 3.5, task="birds")
        attributes |= {"http.route": "/v1/predict/{task}", "http.response.status_code": 503}
    with pytest.raises(ValueError, match="lost"), tracing.request("GET", {}):
        raise ValueError("lost")
    tracing.close()
    decode, compute, whole, failed = exporter.get_finished_spans()
    assert (whole.name, whole.status.is_ok, f"{whole.context.trace_id:032x}") == (
        "POST /v1/predict/{task}",
        False,
        "a" * 32,
    )
    assert {decode.parent.span_id, compute.parent.span_id} == {whole.context.span_id}
    assert (compute.end_time - compute.start_time, compute.attributes["task"]) == (2 * 10**9, "birds")
    assert not failed.status.is_ok


def test_a_prediction_has_decode_queue_and_compute_spans(tmp_path):
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    store, net = new_store(tmp_path)
    library, exporter = Library(store, net.joint_copy()), InMemorySpanExporter()
    engine = Engine(library, Settings(store=store.folder, exact=True, threads=1))
    engine.tracing = Tracing(exporter)
    engine.scheduler.start()

    async def ask() -> int:
        transport = httpx.ASGITransport(make_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=PATIENCE) as client:
            return (await client.post("/v1/predict/birds", content=picture())).status_code

    assert asyncio.run(ask()) == 200
    engine.tracing.close()
    *steps, whole = exporter.get_finished_spans()
    assert [step.name for step in steps] == ["decode", "queue", "compute"]
    assert {step.parent.span_id for step in steps} == {whole.context.span_id}
    assert whole.attributes["http.response.status_code"] == 200


def test_without_an_address_opentelemetry_is_not_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    tracing = Tracing()
    with tracing.request("GET", {}) as attributes:
        tracing.step("decode", 0.0, 1.0)
    tracing.close()
    assert attributes == {"http.request.method": "GET"}


def test_traces_without_opentelemetry_are_a_one_line_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    code, _, err = bitgraft(capsys, monkeypatch, "serve", "--store", str(tmp_path), "--otlp", "http://localhost:4318")
    assert (code, "pip install '.[otel]'" in err, "Traceback" in err) == (2, True, False)
