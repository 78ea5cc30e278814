"""Request bodies and example responses, for /docs and /openapi.json."""

from typing import Any

from bitgraft.serving.schemas import Answer, FoundPredictions, Prediction, Predictions


def _body(description: str, content: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's `openapi_extra` for a body that the route reads itself."""
    return {"requestBody": {"required": True, "description": description, "content": content}}


_FILE = {"type": "string", "format": "binary"}
_FORM = {"type": "object", "properties": {"image": {"type": "array", "items": _FILE}}}
IMAGES = _body(
    "An image, or a form with one file per image.",
    {"image/*": {"schema": _FILE}, "multipart/form-data": {"schema": _FORM}},
)
TASK_FILE = _body("A task file for the store's backbone.", {"application/octet-stream": {"schema": _FILE}})
_INPUT = {"name": "images", "datatype": "BYTES", "shape": [1], "data": ["/9j/4AAQ…"]}
INFER_REQUEST = _body(
    "One input as JSON (images in base64), or with Triton's binary extension.",
    {"application/json": {"example": {"inputs": [_INPUT]}}},
)
_BEST: list[Answer] = [{"class": "rose", "probability": 0.93}, {"class": "tulip", "probability": 0.05}]
PREDICTION: Prediction = {"task": "flowers", "version": "9c4b1f6a02d7e385", "milliseconds": 11.4, "answers": [_BEST]}
PREDICTIONS: Predictions = {
    "milliseconds": 31.2,
    "tasks": [PREDICTION, {**PREDICTION, "task": "cars", "answers": [[{"class": "van", "probability": 0.41}]]}],
}
FOUND: FoundPredictions = {
    "milliseconds": 58.3,
    "images": [{"task": "flowers", "route": [{"task": "flowers", "score": 0.98}], "answers": _BEST}],
}
_ROW = {
    "name": "flowers",
    "method": "full",
    "classes": 102,
    "accuracy": 0.941,
    "measured_on": "test",
    "bytes": 1155456,
    "bits_per_weight": 1.37,
    "version": "9c4b1f6a02d7e385",
    "density": 0.5,
    "copy_bytes": 14175136,
    "described": True,
}
_ORIGINAL = {
    "name": "original",
    "method": "backbone",
    "bytes": 18608032,
    "version": "20fee2f1366bb2f5",
    "classes": 1000,
}
TASKS = {
    "backbone": "tf_efficientnet_lite0",
    "original": "original",
    "tasks": [
        {**_ROW, "resident": True, "engine": "onnxruntime"},
        {**_ORIGINAL, "resident": True, "engine": "torch"},
    ],
    "broken": [],
    "bytes": 19763488,
    "separate_bytes": 32783168,
}
TASK = {
    **_ROW,
    "input": [3, 224, 224],
    "class_names": ["rose", "tulip", "…"],
    "layers": [{"name": "conv_stem.weight", "density": 0.51, "k": [1.0, -0.02, 0.04, 0.01]}],
}
CHANGED = {**_ROW, "previous": True}
CANARY = {**_ROW, "canary": {"share": 0.1, "version": "5d0e77c1b2a94f36", "accuracy": 0.947}, "previous": True}
REMOVED = {"name": "flowers", "previous": True}  # and "version": null, which FastAPI would drop
STATUS = {"status": "ok"}
METRICS = 'bitgraft_task_requests_total{status="200",task="flowers",version="stable"} 42.0'
SERVER = {"name": "bitgraft", "version": "0.1.0", "extensions": ["binary_tensor_data", "classification"]}
INFERRED = {
    "model_name": "flowers",
    "model_version": "9c4b1f6a02d7e385",
    "id": "",
    "outputs": [
        {"name": "probabilities", "datatype": "FP32", "shape": [1, 2], "data": [0.95, 0.05]},
        {"name": "class", "datatype": "BYTES", "shape": [1], "data": ["rose"]},
    ],
}


def example(value: Any, kind: str = "application/json") -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` with an example of the 200 response."""
    return {200: {"content": {kind: {"example": value}}}}
