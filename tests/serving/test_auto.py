"""`POST /v1/predict/auto`: identified tasks match the offline ones."""

import pytest
import torch
from fastapi.testclient import TestClient
from pydantic import TypeAdapter
from services import new_store, picture

from bitgraft.network import Network
from bitgraft.runtime.identify.fitting import calibrated, fit_description
from bitgraft.serving import schemas
from bitgraft.serving.app import make_app
from bitgraft.serving.engine import Engine, Service
from bitgraft.serving.http_error import HttpError
from bitgraft.serving.library import Library
from bitgraft.serving.metrics import Metrics
from bitgraft.serving.settings import Settings
from bitgraft.serving.tracing import Tracing
from bitgraft.workflows import identification

NAMES = ("birds", "cars")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Two tasks whose images are noise at two scales, and one without a description."""
    store, net = new_store(tmp_path_factory.mktemp("auto"), (*NAMES, "silent"))
    net.eval()
    for seed, name in enumerate(NAMES):
        images = (1 + 4 * seed) * torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        features = net.features(images)
        found = fit_description(features, torch.arange(40) % 4, 4, 4)
        with torch.no_grad():
            net.tasks[name].description = calibrated(found, features, net(images, task=name))
        net.save_task(name, store.path(name))
    held = Library(store, Network(net.backbone))
    return held, net


def test_tasks_are_identified_as_offline(library):
    held, net = library
    data = [picture(3), picture(4)]
    said = held.identify(data, 2, 1_000_000)
    offline = identification.find(net, [identification.prepare(net, one) for one in data], top=2)
    assert [one["task"] for one in said] == [one["task"] for one in offline]
    for one, other in zip(said, offline, strict=True):
        assert {guess["task"] for guess in one["route"]} == set(NAMES)
        assert [guess["score"] for guess in one["route"]] == pytest.approx(
            [g["score"] for g in other["route"]], abs=1e-4
        )
        assert len(one["answers"]) == (0 if one["task"] is None else 2)


def test_identification_over_http(library):
    held, _ = library

    class Silent(Service):
        settings, metrics, tracing = Settings(store=held.store.folder), Metrics(), Tracing(None)

    class Finding(Silent):
        async def identify(self, images, top):
            return held.identify(images, top, 1_000_000)

    said = TestClient(make_app(Finding())).post("/v1/predict/auto", content=picture(3)).json()
    assert said["images"][0]["route"][0]["task"] in NAMES
    assert TestClient(make_app(Silent())).post("/v1/predict/auto", content=picture(3)).status_code == 501


@pytest.mark.parametrize(
    ("path", "name", "fields"),
    [
        ("/v1/predict/auto", "FoundPredictions", {"milliseconds", "images"}),
        ("/v1/predict/{task}", "Prediction", {"task", "version", "milliseconds", "answers"}),
        ("/v1/predict", "Predictions", {"milliseconds", "tasks"}),
    ],
)
def test_predictions_have_a_response_schema_that_their_example_fits(library, path, name, fields):
    api = make_app(Engine(library[0], Settings(store=library[0].store.folder))).openapi()
    content = api["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]
    assert content["schema"] == {"$ref": f"#/components/schemas/{name}"}
    assert set(api["components"]["schemas"][name]["required"]) == fields
    TypeAdapter(getattr(schemas, name)).validate_python(content["example"])
    assert api["components"]["schemas"]["Answer"]["required"] == ["class", "probability"]
    assert {"type": "null"} in api["components"]["schemas"]["Found"]["properties"]["task"]["anyOf"]


def test_a_store_without_descriptions_is_a_conflict(tmp_path):
    store, net = new_store(tmp_path)
    held = Library(store, Network(net.backbone))
    with pytest.raises(HttpError) as refused:
        held.identify([picture(3)], 2, 1_000_000)
    assert refused.value.status == 409
    assert "bitgraft describe" in refused.value.message
