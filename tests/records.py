"""Records of benchmark runs, made up."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def record(
    row: str = "full", dataset: str = "gtsrb", seed: int = 0, test: float | None = 0.8, **other: Any
) -> dict[str, Any]:
    made = {
        "format": 1,
        "suite": "mini",
        "row": row,
        "title": row.capitalize(),
        "method": row,
        "joint": row == "adapters-joint",
        "options": {},
        "dataset": dataset,
        "seed": seed,
        "backbone": "net",
        "config": {"epochs": 3, "seed": seed},
        "last": {"epoch": 3, "val_accuracy": 0.5, "test_accuracy": test},
        "selected": {"epoch": 2, "val_accuracy": 0.6, "test_accuracy": 0.25},
        "bits": 100,
        "backbone_bits": 1000,
        "seconds": 10.0,
        "train_images_seen": 500,
        "peak_memory": 2_000_000,
        "machine": {"cpu": "one"},
    }
    return made | other


def write(folder: Path, *records: Mapping[str, Any], suite: Mapping[str, Any] | None = None) -> Path:
    for number, one in enumerate(records):
        place = folder / "deep" / str(number)
        place.mkdir(parents=True)
        (place / "record.json").write_text(json.dumps(one))
    if suite is not None:
        (folder / "suite.json").write_text(json.dumps(suite))
    return folder
