"""FastAPI and onnxruntime with one exported model and nothing else: what `bitgraft serve` is measured against.

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

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = int(sys.argv[2])
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
stated = json.loads(session.get_modelmeta().custom_metadata_map["preprocessing"])
(height, width), resize = stated["size"], stated["resize"]
mean, std = (np.array(stated[key], np.float32) for key in ("mean", "std"))
app = FastAPI()


def answers(data: bytes) -> list[dict[str, object]]:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = resize / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), np.float32)
    batch = ((pixels / 255 - mean) / std).transpose(2, 0, 1)[None]
    (scores,) = session.run(None, {"images": np.ascontiguousarray(batch, np.float32)})[0]
    exponentials = np.exp(scores - scores.max())
    best = exponentials.argsort()[::-1][:5]
    return [{"class": str(i), "probability": float(exponentials[i] / exponentials.sum())} for i in best]


@app.post("/v1/predict/{task}")
async def predict(task: str, request: Request) -> dict[str, object]:
    return {"task": task, "answers": [await run_in_threadpool(answers, await request.body())]}


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
