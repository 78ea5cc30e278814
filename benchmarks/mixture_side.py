"""One side of a comparison of mixed batches: `python -m benchmarks.mixture_side FOLDER PIXELS KEPT`.

A network that keeps so many tasks at work runs a batch of 32 images over the tasks whose files are in the folder; with
0, as many plain models take their parts of it instead.
"""

import sys
from pathlib import Path

import torch

import bitgraft
from benchmarks.measure import answer
from benchmarks.serving import backbone


def main(folder: str, pixels: str, kept: str) -> None:
    net = bitgraft.Network(backbone(), active=max(1, int(kept))).eval()
    names = [net.load_task(path).name for path in sorted(Path(folder).iterdir())]
    images = torch.randn(32, 3, int(pixels), int(pixels))
    models = [net.export(name) for name in names] if kept == "0" else []
    tasks = [names[i % len(names)] for i in range(len(images))]

    def run() -> None:
        with torch.inference_mode():
            for i, model in enumerate(models):
                model(images[i :: len(names)])
            if not models:
                net(images, task=tasks)

    answer(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
