"""A row's answers on the test images, as the Visual Decathlon takes them."""

import json
from pathlib import Path

import torch

from bitgraft.bench.suite import Cell, Suite
from bitgraft.bench.worker import store_folder
from bitgraft.data.dataset import ImageDataset
from bitgraft.data.devkit import submission
from bitgraft.data.images import Splits
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.data.splits import open_data
from bitgraft.errors import SuiteError
from bitgraft.files import write_atomically
from bitgraft.network import Network
from bitgraft.store import Store


def write_submission(suite: Suite, root: Path, runs: Path, path: Path) -> int:
    """Ask the tasks of a suite's one row, of its first seed, for all test images; how many answers there are."""
    (row,) = suite.rows
    seed = (row.seeds if row.seeds is not None else suite.seeds)[0]
    store = Store(store_folder(runs, Cell(row.row, seed, ())))
    net = store.network()
    answers: list[tuple[Splits, list[int]]] = []
    for dataset in suite.datasets:
        splits = open_data(dataset.data, root=root, seed=seed)
        if splits.test is None:
            raise SuiteError(f"data set {dataset.name} has no test images to answer for")
        store.load(net, dataset.name)
        answers.append((splits, predicted(net, dataset.name, splits)))
    rows = submission(answers)
    write_atomically(path, json.dumps(rows).encode())
    return len(rows)


@torch.no_grad()
def predicted(net: Network, task: str, splits: Splits, batch: int = 128) -> list[int]:
    """The class that a task sees in each test image."""
    assert splits.test is not None
    images = ImageDataset(splits.test, Preprocessing.from_dict(net.tasks[task].card.preprocessing))
    loader = torch.utils.data.DataLoader(images, batch_size=batch)
    net.eval()
    return [label for part, _ in loader for label in net(part, task=task).argmax(1).tolist()]
