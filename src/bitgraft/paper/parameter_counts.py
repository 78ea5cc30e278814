"""What tasks cost, from a network's shapes alone: the paper's "# Params" rows, and beside them the size of the files.

Everything is counted on the meta device, where tensors have shapes but take no memory.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitgraft.backbone.anatomy import Anatomy, unknown_head
from bitgraft.backbone.loading import read_backbone
from bitgraft.format.archive import COUNTER
from bitgraft.methods import packnet, registry
from bitgraft.task import Metadata, Task
from bitgraft.transforms.bits import packed_size


@dataclass(frozen=True)
class Row:
    """What all tasks of one method cost together."""

    method: str
    bits: float
    """What one added task costs as the paper counts: no classifier, no running statistics (mean over the tasks)."""
    file_bytes: float
    """The size of its file, classifier apart, running statistics and header included (mean over the tasks)."""
    relative: float
    """1 + bits · (tasks - 1) / (32 N), N the backbone's parameters without its classifier."""
    relative_files: float
    """The same from the files: the backbone's parameters and all task files against the backbone alone."""
    printed: str | None = None
    """What the paper prints."""


@dataclass(frozen=True)
class Account:
    """One backbone, so many tasks (its own among them), and a row for each method."""

    backbone: str
    tasks: int
    parameters: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Printed:
    """A "# Params" row of the paper."""

    backbone: str
    tasks: int
    relative: Mapping[str, str] = field(default_factory=dict)


SKETCH = {"classifier": "1", "packnet": "1.10", "piggyback": "1.16", "piggyback-bn": "1.17"}
PAPER = (
    Printed("resnet50", 6, {**SKETCH, "simple": "1.17", "full": "1.17", "finetune": "6"}),
    Printed(
        "densenet121",
        6,
        {
            **SKETCH,
            "packnet": "1.11",
            "piggyback": "1.15",
            "piggyback-bn": "1.21",
            "simple": "1.21",
            "full": "1.21",
            "finetune": "6",
        },
    ),
    Printed(
        "wrn-28-4",
        10,
        {"classifier": "1", "piggyback": "1.28", "simple": "1.29", "full": "1.29", "dan": "2.17", "finetune": "10"},
    ),
    Printed("resnet26", 10, {"adapters-series": "2", "adapters-joint": "2", "adapters-parallel": "2"}),
)
"""Its ImageNet-to-Sketch and decathlon tables; the authors of residual adapters count theirs on their own network."""


def paper_accounts() -> list[Account]:
    """The paper's rows, counted."""
    return [account(read_backbone(p.backbone), p.tasks, p.backbone, p.relative, list(p.relative)) for p in PAPER]


def account(
    anatomy: Anatomy,
    tasks: int,
    name: str = "backbone",
    printed: Mapping[str, str] | None = None,
    methods: list[str] | None = None,
) -> Account:
    """Count each method (by default all) on a backbone that does so many tasks in the end, its own among them."""
    if not anatomy.head_known:
        raise unknown_head(anatomy.backbone)
    head = set(anatomy.head_names())
    parameters = sum(p.numel() for key, p in anatomy.backbone.named_parameters() if key not in head)
    rows = []
    for method in map(registry.get, methods or registry.method_names()):
        bits, size = _packed_cost(anatomy, method, tasks) if method.depends_on_previous else _cost(anatomy, method)
        rows.append(
            Row(
                method=method.name,
                bits=bits,
                file_bytes=size,
                relative=1 + bits * (tasks - 1) / (32 * parameters),
                relative_files=1 + size * (tasks - 1) / (4 * parameters),
                printed=(printed or {}).get(method.name),
            )
        )
    if methods is None:
        rows.sort(key=lambda row: row.relative)
    return Account(name, tasks, parameters, tuple(rows))


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """A task file with these tensors: their bytes and their entries in the header; metadata adds about 1 kB."""
    start, header = 0, {}
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    return 8 + len(json.dumps(header, separators=(",", ":"))) + start


def _cost(anatomy: Anatomy, method: registry.Method) -> tuple[int, int]:
    transforms = registry.transforms(method, anatomy, method.options, None)
    owned = registry.owned(method, anatomy, method.options)
    task = Task(Metadata(method.name, method.name, {}, "keep"), anatomy, transforms, owned, None)
    return task.bits(statistics=False), file_bytes(_filed(task))


def _filed(task: Task) -> dict[str, Tensor]:
    """What the file of a task without a head holds, as `bitgraft.format.archive` fills it, but on any device."""
    held = dict(task.owned)
    for name, transform in task.transforms.items():
        held |= {f"{name}:{part}": tensor for part, tensor in transform.parts().items()}
    return {key: tensor for key, tensor in held.items() if not key.endswith(COUNTER)}


def _packed_cost(anatomy: Anatomy, method: registry.Method, tasks: int) -> tuple[float, float]:
    """PackNet, which needs values to be built, counted by its definition.

    The paper counts all its tasks together: each weight belongs to one of them, and so many bits say to which. A file
    also holds the values that its task owns; together the files own what the backbone gave up, each weight once.
    """
    if tasks < 2:
        return 0.0, 0.0
    options = method.options
    assert isinstance(options, packnet.PacknetOptions)
    added, sizes = tasks - 1, {name: weight.shape.numel() for name, weight in anatomy.weights.items()}
    bits = sum(sizes.values()) * (tasks - 1).bit_length()  # 3 for up to 8 tasks
    held = {}
    for name, size in sizes.items():
        given_up = size - round(size * options.keep)
        held[f"{name}:mask"] = torch.empty(packed_size(size), dtype=torch.uint8, device="meta")
        held[f"{name}:values"] = torch.empty(given_up // added, device="meta")
    first = sum(map(packed_size, sizes.values()))  # the first file also says which weights it found free
    return bits / added, file_bytes(held) + first / added
