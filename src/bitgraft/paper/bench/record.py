"""What a run leaves behind: where it lies, whether it is there already, and what is in it."""

import datetime
import json
import os
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bitgraft import __version__
from bitgraft.backbone.anatomy import Anatomy
from bitgraft.backbone.files import write_atomically
from bitgraft.errors import SuiteError
from bitgraft.methods import registry
from bitgraft.paper.bench.suite import SPLITS, Cell, Dataset, Suite, settings
from bitgraft.paper.report.records import FORMAT, ORIGINAL, RECORD
from bitgraft.training.callbacks import Clock
from bitgraft.training.checkpoint import of_task
from bitgraft.training.config import Config
from bitgraft.workflows.train_task import TrainData, TrainResult


def store_folder(runs: Path, cell: Cell) -> Path:
    return runs / cell.row / f"seed-{cell.seed}"


def backbone_file(runs: Path) -> Path:
    """The weights of a backbone that the suite trains first."""
    return runs / ORIGINAL / "backbone.safetensors"


def record_path(runs: Path, cell: Cell, dataset: str) -> Path:
    return store_folder(runs, cell) / "runs" / dataset / RECORD


def finished(suite: Suite, runs: Path, cell: Cell) -> list[str]:
    """The data sets of a run that have their record already."""
    row = suite.row(cell.row)
    if suite.leads(cell) and not backbone_file(runs).exists():
        return []
    return [
        name
        for name in cell.datasets
        if _is_record_of(
            record_path(runs, cell, name),
            settings(suite, row, suite.dataset(name)),
            asdict(suite.config_of(row, suite.dataset(name), cell.seed)),
        )
    ]


def _is_record_of(path: Path, said: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    try:
        held = json.loads(path.read_text())
        was = {**held["settings"], **asdict(Config()), **held["config"]}  # a setting that came later had its default
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise SuiteError(f"the record {path} is damaged ({fault}): remove it to have the run made again") from fault
    wanted = json.loads(json.dumps({**said, **config}))
    if other := [name for name, value in wanted.items() if was.get(name) != value]:
        raise SuiteError(
            f"the record {path} was made with other settings ({', '.join(other)}): give another --runs folder, or "
            "remove it"
        )
    return True


def write_run(
    suite: Suite, cell: Cell, runs: Path, data: TrainData, outcome: TrainResult, clock: Clock, bits: int | None = None
) -> None:
    """The record of a task that was trained; it counts its own bits unless told otherwise."""
    name, last = outcome.task.name, outcome.history[-1]
    measured = {
        "last": figures(of_task(last, name), outcome.test),
        "selected": figures(of_task(outcome.best or last, name), outcome.best_test),
        "bits": outcome.task.bits(statistics=False) if bits is None else bits,
        "backbone_bits": backbone_bits(outcome.task.anatomy),
        "file_bytes": outcome.path.stat().st_size,
        "seconds": round(clock.seconds, 2),
        "processor_seconds": round(clock.processor_seconds, 2),
        "train_images_seen": clock.images,
    }
    write(suite, cell, runs, name, data, measured)


def backbone_bits(anatomy: Anatomy) -> int:
    """Its parameters without its head, as the paper counts."""
    head = set(anatomy.head_names())
    return 32 * sum(p.numel() for name, p in anatomy.backbone.named_parameters() if name not in head)


def write(suite: Suite, cell: Cell, runs: Path, name: str, data: TrainData, measured: Mapping[str, Any]) -> None:
    path = record_path(runs, cell, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**_about(suite, cell, suite.dataset(name), data), **measured, **_circumstances()}
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())


def _about(suite: Suite, cell: Cell, dataset: Dataset, data: TrainData) -> dict[str, Any]:
    row = suite.row(cell.row)
    parts = {part: getattr(data.splits, part) for part in SPLITS}
    return {
        "format": FORMAT,
        "suite": suite.name,
        "row": row.row,
        "title": row.title or row.row,
        "method": row.method,
        "joint": registry.get(row.method).joint,
        "options": dict(row.options),
        "dataset": dataset.name,
        "seed": cell.seed,
        "backbone": suite.backbone.name,
        "config": asdict(suite.config_of(row, dataset, cell.seed)),
        "settings": settings(suite, row, dataset),
        "classes": len(data.splits.classes),
        "images": {part: len(images) if images else 0 for part, images in parts.items()},
    }


def _circumstances() -> dict[str, Any]:
    return {
        "peak_memory": _peak_memory(),
        "versions": {
            "bitgraft": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "torchvision", "timm")},
        },
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def figures(record: Mapping[str, Any], tested: Mapping[str, float] | None) -> dict[str, Any]:
    return {
        "epoch": record["epoch"],
        "train_accuracy": record.get("train_accuracy"),
        "val_accuracy": record.get("val_accuracy"),
        "test_accuracy": tested["accuracy"] if tested else None,
    }


def _peak_memory() -> int:
    """Bytes that this process had at most, the libraries' own included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
