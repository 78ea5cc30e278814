"""Write a row's predictions on the test images in the Visual Decathlon's submission format."""

import json
from pathlib import Path

import torch

from bitgraft.backbone.files import write_atomically
from bitgraft.data.dataset import ImageDataset
from bitgraft.data.devkit import submission
from bitgraft.data.images import Images
from bitgraft.data.preprocessing import Preprocessing
from bitgraft.data.splits import open_data
from bitgraft.errors import SuiteError
from bitgraft.network import Network
from bitgraft.paper.bench.record import store_folder
from bitgraft.paper.bench.suite import Cell, Suite
from bitgraft.paper.report.records import ORIGINAL
from bitgraft.store import Store
from bitgraft.workflows.prediction import torch_scores
from bitgraft.workflows.train_task import preprocessing_for


def write_submission(suite: Suite, root: Path, runs: Path, path: Path) -> int:
    """Write the predictions of a suite's only row, with its first seed; return their number."""
    (row,) = suite.rows
    seed = suite.seeds_of(row)[0]
    store = Store(store_folder(runs, Cell(row.row, seed, ())))
    net, answers = store.network(), []
    for dataset in suite.datasets:
        splits = open_data(dataset.data, root=root, seed=seed)
        if splits.test is None:
            raise SuiteError(f"data set {dataset.name} has no test images to predict")
        if dataset.original and dataset.name not in store.names():
            task, config = net.original, suite.config_of(suite.row(ORIGINAL), dataset, 0)
            preprocessing = preprocessing_for(net, config)
        else:
            task = dataset.name
            held = net.tasks[task] if task in net.tasks else store.load(net, task)
            preprocessing = Preprocessing.from_dict(held.metadata.preprocessing)
        labels = predicted(net, task, splits.test, preprocessing)
        if max(labels, default=0) >= len(splits.classes):
            raise SuiteError(
                f"the backbone predicts more classes than the {len(splits.classes)} of {dataset.name}: it was trained "
                "on other data"
            )
        answers.append((splits, labels))
    rows = submission(answers)
    write_atomically(path, json.dumps(rows).encode())
    return len(rows)


def predicted(net: Network, task: str, images: Images, preprocessing: Preprocessing, workers: int = 0) -> list[int]:
    """Return the predicted class of each image."""
    data = ImageDataset(images, preprocessing)
    loader = torch.utils.data.DataLoader(data, batch_size=128, num_workers=workers)
    net.eval()
    return [label for part, _ in loader for label in torch_scores(net, task, part).argmax(1).tolist()]
