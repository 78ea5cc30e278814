"""Baseline for `bitgraft serve`: FastAPI and onnxruntime with one exported model.

python -m benchmarks.bare_server task.onnx THREADS
"""

import io
import json
import socket
import sys

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image


class Model:
    """An exported task: preprocessing, inference, and the top five classes as JSON."""

    def __init__(self, path: str, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.preprocessing = json.loads(self.session.get_modelmeta().custom_metadata_map["preprocessing"])
        self.mean, self.std = (np.array(self.preprocessing[key], np.float32) for key in ("mean", "std"))

    def pixels(self, file: object) -> np.ndarray:
        (height, width), shorter = self.preprocessing["size"], self.preprocessing["resize"]
        image = Image.open(file).convert("RGB")
        scale, method = shorter / min(image.size), Image.Resampling[self.preprocessing["interpolation"].upper()]
        image = image.resize((round(image.width * scale), round(image.height * scale)), method)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        cut = np.asarray(image.crop((left, top, left + width, top + height)), np.float32)
        return ((cut / 255 - self.mean) / self.std).transpose(2, 0, 1)

    def scores(self, batch: list[np.ndarray]) -> np.ndarray:
        return self.session.run(None, {"images": np.stack(batch).astype(np.float32)})[0]

    def best(self, scores: np.ndarray) -> list[dict[str, object]]:
        exponentials = np.exp(scores - scores.max())
        best = exponentials.argsort()[::-1][:5]
        return [{"class": str(i), "probability": float(exponentials[i] / exponentials.sum())} for i in best]


def main() -> None:
    app, model = FastAPI(), Model(sys.argv[1], int(sys.argv[2]))

    def answer(data: bytes) -> list[dict[str, object]]:
        return model.best(model.scores([model.pixels(io.BytesIO(data))])[0])

    @app.post("/v1/predict/{task}")
    async def predict(task: str, request: Request) -> dict[str, object]:
        return {"task": task, "answers": [await run_in_threadpool(answer, await request.body())]}

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as when uvicorn binds the socket
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main()
