"""Triton's own client against the service, and malformed requests."""

import base64
import json

import numpy as np
import pytest
import tritonclient.http as triton
from services import Served, new_store, offline, picture, served
from tritonclient.utils import InferenceServerException

from bitgraft.data.preprocessing import Preprocessing, evaluation_tensor

KEY = "a-long-secret"
SHAPE = (3, 32, 32)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("protocol")
    _, net = new_store(folder, ("birds", "cars"))
    (folder / "keys").write_text(KEY)
    return folder, net


@pytest.fixture(scope="module")
def service(place):
    with served(place[0], "--api-key-file", "keys", "--max-queue", "4") as running:
        running.http.headers["X-API-Key"] = KEY
        yield running


@pytest.fixture
def client(service: Served):
    made = triton.InferenceServerClient(f"127.0.0.1:{service.port}", connection_timeout=120, network_timeout=120)
    yield made
    made.close()


def offline_probabilities(net, name: str, data: bytes) -> list[float]:
    """Return the offline probabilities in the order of the classes."""
    said = {one["class"]: one["probability"] for one in offline(net, name, data)}
    return [said[name] for name in sorted(said)]


def as_images(pictures: list[bytes], *, binary: bool = True):
    made = triton.InferInput("images", [len(pictures)], "BYTES")
    data = pictures if binary else [base64.b64encode(one).decode() for one in pictures]
    made.set_data_from_numpy(np.array(data, object), binary_data=binary)
    return made


def test_triton_reads_server_and_model_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    headers = {"X-API-Key": KEY}
    assert client.get_server_metadata(headers=headers)["name"] == "bitgraft"
    assert client.is_model_ready("birds", headers=headers)
    assert not client.is_model_ready("zebras", headers=headers)
    about = client.get_model_metadata("birds", headers=headers)
    assert about["inputs"][1] == {"name": "tensor", "datatype": "FP32", "shape": [-1, *SHAPE]}
    assert about["outputs"][0] == {"name": "probabilities", "datatype": "FP32", "shape": [-1, 4]}
    assert about["classes"] == [f"birds 0.{i}" for i in range(4)]
    with pytest.raises(InferenceServerException, match="API key"):
        client.get_server_metadata()


@pytest.mark.parametrize("binary", [True, False])
def test_triton_gets_the_offline_answers_for_images(client, place, binary):
    net, pictures = place[1], [picture(1), picture(2)]
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("probabilities", "class")]
    said = client.infer("birds", [as_images(pictures, binary=binary)], outputs=wanted, headers={"X-API-Key": KEY})
    assert said.as_numpy("probabilities").tolist() == [offline_probabilities(net, "birds", data) for data in pictures]
    best = [offline(net, "birds", data, 1)[0]["class"] for data in pictures]
    assert [_text(name) for name in said.as_numpy("class")] == best


@pytest.mark.parametrize("binary", [True, False])
def test_triton_gets_the_offline_answers_for_tensors(client, place, binary):
    net = place[1]
    preprocessing = Preprocessing.from_dict(net.tasks["cars"].metadata.preprocessing)
    tensor = evaluation_tensor(picture(3), preprocessing)[None].numpy()
    made = triton.InferInput("tensor", [1, *SHAPE], "FP32")
    made.set_data_from_numpy(tensor, binary_data=binary)
    said = client.infer("cars", [made], request_id="mine", headers={"X-API-Key": KEY})
    assert said.as_numpy("probabilities").tolist() == [offline_probabilities(net, "cars", picture(3))]
    assert said.get_response()["id"] == "mine"
    top = triton.InferRequestedOutput("probabilities", class_count=2)
    ranked = client.infer("cars", [made], outputs=[top], headers={"X-API-Key": KEY}).as_numpy("probabilities")
    names = [_text(one).split(":")[2] for one in ranked[0]]
    assert names == [one["class"] for one in offline(net, "cars", picture(3), 2)]


def _text(value) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def body(**changes) -> dict:
    data = [base64.b64encode(picture()).decode()]
    return {"inputs": [{"name": "images", "datatype": "BYTES", "shape": [1], "data": data} | changes]}


@pytest.mark.parametrize(
    ("sent", "status", "sentence"),
    [
        (b"hello", 400, "the request: Invalid JSON"),
        ({}, 400, "inputs: Field required"),
        ({"inputs": []}, 400, "send one input"),
        ({"inputs": body()["inputs"] * 2}, 400, "not 2"),
        (body(datatype="INT8"), 400, "is INT8: send images as BYTES"),
        (body(shape=[2]), 400, "has shape [2], but 1 values"),
        (body(shape=[-1]), 400, "has shape [-1]"),
        (body(data=["%"]), 400, "base64"),
        (body(data=[7]), 400, "base64"),
        (body(data=None), 400, "needs data"),
        (body(parameters={"binary_data_size": 9}), 400, "needs data"),
        (body(data=["aGVsbG8="]), 415, "not an image"),
        (body(datatype="FP32", data=["x"]), 400, "not 32-bit numbers"),
        (body(datatype="FP32", data=[[1], [1, 2]]), 400, "not 32-bit numbers"),
        (body(datatype="FP32", data=[10**400]), 400, "not 32-bit numbers"),
        (body(datatype="FP32", data=[1.5]), 422, "the tensor has shape [1]: this task takes [n, 3, 32, 32]"),
        (body(datatype="FP32", shape=[1, *SHAPE], data=[1e39] * 3072), 422, "NaN or infinite"),
        (body(shape=[5], data=body()["inputs"][0]["data"] * 5), 413, "5 images for 1 tasks are too many"),
        (body() | {"outputs": [{"name": "logits"}]}, 400, "there is no output 'logits'"),
        (body() | {"outputs": [{"name": "class", "parameters": {"classification": "x"}}]}, 400, "a number of classes"),
    ],
)
def test_bad_requests_get_a_message(service: Served, sent, status, sentence):
    data = sent if isinstance(sent, bytes) else json.dumps(sent)
    response = service.http.post("/v2/models/birds/infer", content=data)
    assert (response.status_code, sentence in response.json()["error"]) == (status, True), response.text


def test_bad_bytes_after_the_json_get_a_message(service: Served):
    for raw, length, sentence in [
        (b"\x09\0\0\0cut", None, "are cut off"),
        (b"\x09\0", None, "are cut off"),
        (b"", "99999", "the body has"),
        (b"", "x", "the body has"),
        (b"", "9" * 5000, "the body has"),
    ]:
        head = json.dumps(body(data=None, parameters={"binary_data_size": len(raw)})).encode()
        headers = {"Inference-Header-Content-Length": length or str(len(head))}
        response = service.http.post("/v2/models/birds/infer", content=head + raw, headers=headers)
        assert (response.status_code, sentence in response.json()["error"]) == (400, True), response.text
    compressed = service.http.post("/v2/models/birds/infer", content=b"x", headers={"Content-Encoding": "gzip"})
    assert compressed.status_code == 415
    assert service.http.post("/v2/models/zebras/infer", content=json.dumps(body())).status_code == 404
    assert service.http.get("/v2/models/..%2Fstore").status_code == 404
