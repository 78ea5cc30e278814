"""Count the size of tasks from a network's shapes: the paper's "# Params" rows, and the size of task files.

Everything is counted on the meta device, where tensors have shapes but no memory.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.backbone.head_layers import unknown_head
from bitgraft.backbone.loading import read_backbone
from bitgraft.format.compact import NORM_PARTS
from bitgraft.format.metadata import Metadata
from bitgraft.methods import packnet, registry
from bitgraft.paper.report.results import published
from bitgraft.task import Task
from bitgraft.transforms.base import COUNTER
from bitgraft.transforms.baselines import LowRank
from bitgraft.transforms.bits import packed_size
from bitgraft.transforms.masked import Masked


@dataclass(frozen=True)
class Row:
    """All tasks of one method."""

    method: str
    bits: float
    """Mean size of an added task as the paper counts it, without classifier and running statistics."""
    file_bytes: float
    """Mean size of its file as `bitgraft train` writes it, without the classifier."""
    relative: float
    """1 + bits · (tasks - 1) / (32 N), where N is the number of backbone parameters without the classifier."""
    relative_files: float
    """The same ratio from file sizes: (backbone + all task files) / backbone."""
    printed: str | None = None
    """The number in the paper."""


@dataclass(frozen=True)
class Account:
    """Task sizes on one backbone, one row per method; `tasks` includes the backbone's own."""

    backbone: str
    tasks: int
    parameters: int
    rows: tuple[Row, ...]


def paper_accounts() -> list[Account]:
    """Count the rows of the paper."""
    stated = published()["params"]
    return [account(read_backbone(one["backbone"]), one["tasks"], one["backbone"], one["printed"]) for one in stated]


def account(anatomy: Anatomy, tasks: int, name: str = "backbone", printed: Mapping[str, str] | None = None) -> Account:
    """Count each method: those printed in the paper, or all. `tasks` includes the backbone's own."""
    if not anatomy.head_known:
        raise unknown_head(anatomy.backbone)
    rows, parameters = [], headless_parameters(anatomy)
    for method in map(registry.get, printed or registry.method_names()):
        bits, size = _packed_cost(anatomy, method, tasks) if method.depends_on_previous else _cost(anatomy, method)
        relative, files = (1 + amount * (tasks - 1) / (32 * parameters) for amount in (bits, 8 * size))
        rows.append(Row(method.name, bits, size, relative, files, (printed or {}).get(method.name)))
    if printed is None:
        rows.sort(key=lambda row: row.relative)
    return Account(name, tasks, parameters, tuple(rows))


def headless_parameters(anatomy: Anatomy) -> int:
    """Return the number of backbone parameters without the classifier, as the paper counts them."""
    head = set(anatomy.head_names())
    return sum(p.numel() for name, p in anatomy.backbone.named_parameters() if name not in head)


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of a task file with these tensors and their header entries. Metadata adds about 1 kB."""
    start, header = 0, {}
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    return 8 + len(json.dumps(header, separators=(",", ":"))) + start


def _cost(anatomy: Anatomy, method: registry.Method) -> tuple[int, int]:
    """Return the bits of one task without a head as the paper counts them, and the size of its file."""
    trained = _task(anatomy, method, replace(method.options, **registry.preset_options("default", method.name)))
    return _task(anatomy, method, method.options).bits(statistics=False), _compact_bytes(trained)


def _task(anatomy: Anatomy, method: registry.Method, options: Any) -> Task:
    transforms = registry.transforms(method, anatomy, options, torch.Generator())
    owned = registry.owned(method, anatomy, options)
    return Task(Metadata(method.name, method.name, {}, "keep"), anatomy, transforms, owned, None)


def _compact_bytes(task: Task) -> int:
    """Return the size of a compact task's file without a head (docs/format.md); metadata adds about 1 kB."""
    left = {key: tensor for key, tensor in task.owned.items() if not key.endswith(COUNTER)}
    for name, transform in task.transforms.items():
        left |= {f"{name}:{part}": tensor for part, tensor in transform.parts().items()}
    if registry.get(task.metadata.method).owns_everything:
        return file_bytes(left)
    size = 0
    for key in list(left):
        if key.endswith(":mask"):
            size += left.pop(key).nbytes
        elif key.endswith(":k"):  # per row, the least value and the unit, and one byte per learned value
            k, transform = left.pop(key), task.transforms[key.removesuffix(":k")]
            assert isinstance(transform, Masked)
            size += 4 * 2 * 4 + (len(transform.rule.learned) * k.shape[1] if k.dim() > 1 else 0)
    norms = [[f"{layer}.{part}" for part in NORM_PARTS] for layer in task.anatomy.norms]
    for keys in norms:  # two of these vectors in half precision, so a byte for each of their values
        if all(key in left for key in keys):
            size += sum(left.pop(key).numel() for key in keys)
    factors = {f"{name}:{part}" for name, t in task.transforms.items() if isinstance(t, LowRank) for part in t.parts()}
    return size + file_bytes({key: tensor.half() if key in factors else tensor for key, tensor in left.items()})


def _packed_cost(anatomy: Anatomy, method: registry.Method, tasks: int) -> tuple[float, float]:
    """Compute PackNet's cost by definition, because building a task would need the values of the weights.

    The paper counts all tasks together: each weight belongs to one task, and a few bits say which. A file also holds
    the values that its task owns; together the files hold every weight that the backbone gave up once.
    """
    options = method.options
    assert isinstance(options, packnet.PacknetOptions)
    added, sizes = max(1, tasks - 1), {name: weight.shape.numel() for name, weight in anatomy.weights.items()}
    bits = sum(sizes.values()) * (tasks - 1).bit_length()  # 3 for up to 8 tasks
    held = {}
    for name, size in sizes.items():
        given_up = size - round(size * options.keep)
        held[f"{name}:mask"] = torch.empty(packed_size(size), dtype=torch.uint8, device="meta")
        held[f"{name}:values"] = torch.empty(given_up // added, device="meta")
    first = sum(map(packed_size, sizes.values()))  # the first file also stores which weights were free
    return bits / added, file_bytes(held) + first / added
