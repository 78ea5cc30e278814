"""A row's answers on the test images, as the Visual Decathlon takes them."""

import json
from pathlib import Path

import torch

from bitgraft.backbone.files import write_atomically
from bitgraft.backbone.tracing import logits
from bitgraft.data.dataset import ImageDataset
from bitgraft.data.devkit import submission
from bitgraft.data.images import Splits
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.data.splits import open_data
from bitgraft.errors import SuiteError
from bitgraft.network import Network
from bitgraft.paper.bench.record import store_folder
from bitgraft.paper.bench.suite import Cell, Dataset, Suite
from bitgraft.paper.report.records import ORIGINAL
from bitgraft.store import Store
from bitgraft.workflows.train_task import preprocessing_for


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
        answers.append((splits, _answers(suite, store, net, dataset, splits)))
    rows = submission(answers)
    write_atomically(path, json.dumps(rows).encode())
    return len(rows)


def _answers(suite: Suite, store: Store, net: Network, dataset: Dataset, splits: Splits) -> list[int]:
    """Of the row's task; on the backbone's own data, where the row has none, of the backbone."""
    if dataset.original and dataset.name not in store.names():
        config = suite.config_of(suite.row(ORIGINAL), dataset, 0)
        labels = predicted(net, net.original, splits, preprocessing_for(net, config))
        if max(labels, default=0) >= len(splits.classes):
            raise SuiteError(
                f"the backbone answers with more classes than the {len(splits.classes)} of {dataset.name}: it was "
                "trained on other data"
            )
        return labels
    task = store.load(net, dataset.name) if dataset.name not in net.tasks else net.tasks[dataset.name]
    return predicted(net, dataset.name, splits, Preprocessing.from_dict(task.metadata.preprocessing))


@torch.no_grad()
def predicted(net: Network, task: str, splits: Splits, preprocessing: Preprocessing, batch: int = 128) -> list[int]:
    """The class that a task sees in each test image."""
    assert splits.test is not None
    loader = torch.utils.data.DataLoader(ImageDataset(splits.test, preprocessing), batch_size=batch)
    net.eval()
    return [label for part, _ in loader for label in logits(net(part, task=task)).argmax(1).tolist()]
