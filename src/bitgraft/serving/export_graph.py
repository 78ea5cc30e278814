"""`python -m bitgraft.serving.export_graph STORE TASK`: export a task's ONNX graph into the cache.

It runs in its own process because tracing patches every module call in the process.
"""

import sys

from bitgraft.store import Store
from bitgraft.workflows.prediction import task_session


def main(folder: str, task: str) -> None:
    store = Store(folder)
    net = store.network().eval()
    if task != net.original:
        store.load(net, task)
    task_session(net, task)


if __name__ == "__main__":
    main(*sys.argv[1:])
