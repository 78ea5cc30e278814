"""Records of runs: their paths, their content, and whether a run already has one."""

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
from bitgraft.backbone.files import write_atomically
from bitgraft.data.images import Splits
from bitgraft.errors import SuiteError
from bitgraft.format.summary import read_summary
from bitgraft.methods import registry
from bitgraft.paper.bench.suite import SPLITS, Cell, Suite, settings
from bitgraft.paper.parameter_counts import headless_parameters
from bitgraft.paper.report.records import FORMAT, ORIGINAL, RECORD, current_names
from bitgraft.training.callbacks import Clock
from bitgraft.training.checkpoint import of_task
from bitgraft.training.presets import PAPER
from bitgraft.workflows.train_task import TrainResult


def store_folder(runs: Path, cell: Cell) -> Path:
    return runs / cell.row / f"seed-{cell.seed}"


def backbone_file(runs: Path) -> Path:
    """Return the path of the backbone weights that a suite with `trained_on` trains first."""
    return runs / ORIGINAL / "backbone.safetensors"


def record_path(runs: Path, cell: Cell, dataset: str) -> Path:
    return store_folder(runs, cell) / "runs" / dataset / RECORD


def finished(suite: Suite, runs: Path, cell: Cell) -> list[str]:
    """Return the data sets of a run that already have a record."""
    if suite.trains_backbone(cell) and not backbone_file(runs).exists():
        return []
    return [name for name in cell.datasets if _is_recorded(suite, cell, name, record_path(runs, cell, name))]


def _is_recorded(suite: Suite, cell: Cell, name: str, path: Path) -> bool:
    """Return whether there is a record; raise SuiteError if it was made with other settings."""
    try:
        differing = other_settings(suite, cell, name, json.loads(path.read_text()))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise SuiteError(f"the record {path} is damaged ({fault}); delete it to repeat the run") from fault
    if differing:
        raise SuiteError(
            f"the record {path} was made with other settings ({', '.join(differing)}); use another --runs folder or "
            "delete it"
        )
    return True


def other_settings(suite: Suite, cell: Cell, name: str, content: Mapping[str, Any]) -> list[str]:
    """Return the settings in which a record differs from the suite's run."""
    row, dataset = suite.row(cell.row), suite.dataset(name)
    held = asdict(PAPER) | content.get("settings", {}) | current_names(content["config"])  # newer settings were off
    wanted = settings(suite, row, dataset) | asdict(suite.config_of(row, dataset, cell.seed))
    return [key for key, value in json.loads(json.dumps(wanted)).items() if held.get(key) != value]


def of_run(result: TrainResult, clock: Clock) -> dict[str, Any]:
    """Return the measurements of a trained task."""
    name, last = result.task.name, result.history[-1]
    weights = sum(weight.shape.numel() for weight in result.task.anatomy.weights.values())
    return {
        "last": accuracies(of_task(last, name), result.test),
        "selected": accuracies(of_task(result.best or last, name), result.best_test),
        "bits": result.task.bits(statistics=False),
        "backbone_bits": 32 * headless_parameters(result.task.anatomy),
        "bits_per_weight": read_summary(result.path).bits_per(weights),
        "file_bytes": result.path.stat().st_size,
        "seconds": round(clock.seconds, 2),
        "processor_seconds": round(clock.processor_seconds, 2),
        "train_images_seen": clock.images,
    }


def accuracies(epoch: Mapping[str, Any], tested: Mapping[str, float] | None) -> dict[str, Any]:
    return {
        "epoch": epoch["epoch"],
        "train_accuracy": epoch.get("train_accuracy"),
        "val_accuracy": epoch.get("val_accuracy"),
        "test_accuracy": tested["accuracy"] if tested else None,
    }


def write_record(suite: Suite, cell: Cell, runs: Path, name: str, splits: Splits, measured: Mapping[str, Any]) -> None:
    row, dataset = suite.row(cell.row), suite.dataset(name)
    record = {
        "format": FORMAT,
        "suite": suite.name,
        "row": row.row,
        "title": row.title or row.row,
        "method": row.method,
        "joint": registry.get(row.method).joint,
        "options": dict(row.options),
        "dataset": name,
        "seed": cell.seed,
        "backbone": suite.backbone.name,
        "config": asdict(suite.config_of(row, dataset, cell.seed)),
        "settings": settings(suite, row, dataset),
        "classes": len(splits.classes),
        "images": {part: len(getattr(splits, part) or ()) for part in SPLITS},
        **measured,
        "peak_memory": _peak_memory(),
        "versions": {
            "bitgraft": __version__,
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in ("torch", "torchvision", "timm")},
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
    write_json(record_path(runs, cell, name), record)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def _peak_memory() -> int:
    """Return this process's peak resident memory in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
