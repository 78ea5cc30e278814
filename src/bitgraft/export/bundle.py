"""Many tasks in one ONNX file: the weights once, every task's masks packed to bits, and the task's number as an input.

    images (batch, C, H, W), task (1,) -> logits (batch, the most classes that any task has)

The graph unpacks the bits of the task that is asked for and computes W~ = k0 W + k1 1 + k2 M + k3 W∘M from them.
Scores behind a task's last class are -1e30; metadata `tasks` lists the tasks in the order of their numbers.
"""

import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bitgraft import __version__
from bitgraft.backbone.tracing import logits, private_copy
from bitgraft.errors import ExportError
from bitgraft.export.onnx_file import IMAGES, agree, convert, opened
from bitgraft.export.plain import program
from bitgraft.export.subject import CHECKED, TRACED, Subject, described
from bitgraft.network import Network
from bitgraft.task import Task, dotless
from bitgraft.transforms.base import Weight
from bitgraft.transforms.bits import pack, packed_size
from bitgraft.transforms.masked import Masked

TASK = "task"
NOTHING = -1e30  # the score of a class that a task does not have: below any other, and finite
COUNTER = "num_batches_tracked"


def bundle_bytes(net: Network, names: Sequence[str]) -> bytes:
    """The file's bytes, every task checked against its own scores in onnxruntime."""
    subjects = [Subject(net, name) for name in names]
    _check(subjects)
    examples = (subjects[0].images(TRACED), torch.tensor([len(names) - 1]))
    module = Bundle(net, [net.tasks[name] for name in names]).eval()
    tasks = [_plain(described(subject.metadata)) for subject in subjects]
    about = {"bitgraft": __version__, "backbone": net.fingerprint, "tasks": json.dumps(tasks, ensure_ascii=False)}
    data = convert(program(module, *examples), [IMAGES, TASK], about)
    session = opened(data)
    for number, subject in enumerate(subjects):
        for count in CHECKED:
            inputs = {IMAGES: subject.images(count), TASK: torch.tensor([number])}
            agree(session, inputs, subject.answer(inputs[IMAGES]), f"task {subject.name!r} on a batch of {count}")
    return data


def _plain(fields: dict[str, str]) -> dict[str, object]:
    return {key: json.loads(text) if key in ("classes", "preprocessing") else text for key, text in fields.items()}


def _check(subjects: Sequence[Subject]) -> None:
    """Every task is made of masks on the same weights, with classes, for images of one size."""
    for subject in subjects:
        task = subject.net.tasks[subject.name]
        if task.metadata.head != "classes" or not all(isinstance(t, Masked) for t in task.transforms.values()):
            raise ExportError(
                f"task {subject.name!r} (method {subject.metadata.method!r}, head {subject.metadata.head!r}) is not "
                "made of masks and classes alone, so it cannot share a file with others: export it by itself"
            )
    masked = {name: subject.name for subject in subjects for name in subject.net.tasks[subject.name].transforms}
    for subject in subjects:
        if both := sorted(masked.keys() & subject.net.tasks[subject.name].owned.keys()):
            raise ExportError(
                f"task {subject.name!r} has {both[0]!r} outright, where {masked[both[0]]!r} has a mask for it: they "
                "cannot share a file, so export them apart"
            )
    sizes = {subject.preprocessing.size: subject.name for subject in subjects}
    if len(sizes) > 1:
        (first, one), (second, other), *_ = sizes.items()
        raise ExportError(
            f"task {one!r} sees images of {first[0]} x {first[1]} pixels and {other!r} of {second[0]} x {second[1]}: "
            "one file takes one size, so export them apart"
        )


class Bundle(nn.Module):
    """A backbone, and what all tasks put into its place, stacked, the task's number first."""

    classes: Tensor
    columns: Tensor

    def __init__(self, net: Network, tasks: Sequence[Task]) -> None:
        super().__init__()
        anatomy, head = net.anatomy, set(net.anatomy.head_names())
        self.backbone = private_copy(anatomy.backbone)
        counts = [len(task.classes or ()) for task in tasks]
        self.register_buffer("classes", torch.tensor(counts))
        self.register_buffer("columns", torch.arange(max(counts)))
        self.names = [name for name in anatomy.places if _differs(tasks, name)]
        self.stacks = nn.ModuleDict()
        for name in self.names:
            base = anatomy.tensor(name).detach()
            transforms = [task.transforms.get(name) for task in tasks]
            owned = [task.owned.get(name, base).detach() for task in tasks]
            masked = any(transform is not None for transform in transforms)
            padded = [_padded(tensor, max(counts)) for tensor in owned] if name in head else owned
            self.stacks[dotless(name)] = _Masks(base, transforms) if masked else _Choice(padded)

    def forward(self, images: Tensor, task: Tensor) -> Tensor:
        tensors = {name: self.stacks[dotless(name)](task) for name in self.names}
        scores = logits(functional_call(self.backbone, tensors, (images,)))
        return torch.where(self.columns < self.classes.index_select(0, task), scores, NOTHING)


def _differs(tasks: Sequence[Task], name: str) -> bool:
    return not name.endswith(COUNTER) and any(name in task.owned or name in task.transforms for task in tasks)


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """A head's tensor with empty rows for classes that the task does not have."""
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


class _Choice(nn.Module):
    """Tensors that tasks own outright."""

    stack: Tensor

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.register_buffer("stack", torch.stack(list(tensors)))

    def forward(self, task: Tensor) -> Tensor:
        return self.stack.index_select(0, task).squeeze(0)


class _Masks(nn.Module):
    """One weight of the backbone, and each task's bits and k for it."""

    base: Tensor
    bits: Tensor
    k: Tensor
    places: Tensor

    def __init__(self, base: Tensor, transforms: Sequence[nn.Module | None]) -> None:
        super().__init__()
        known = [transform for transform in transforms if isinstance(transform, Masked)]
        self.about: Weight = known[0].weight
        wide = any(transform.rule.per_channel for transform in known)
        self.shape = self.about.grouped_shape
        self.channel = self.about.channel_shape if wide else tuple(1 for _ in self.shape)
        k = [_k(t, self.about.outputs if wide else 1) if isinstance(t, Masked) else None for t in transforms]
        neutral = torch.tensor([1.0, 0.0, 0.0, 0.0])[:, None].expand(4, self.about.outputs if wide else 1)
        empty = torch.zeros(packed_size(base.numel()), dtype=torch.uint8)
        bits = [pack(t.mask()).cpu() if isinstance(t, Masked) else empty for t in transforms]
        self.register_buffer("base", base.reshape(self.shape))
        self.register_buffer("bits", torch.stack(bits))
        self.register_buffer("k", torch.stack([neutral if values is None else values for values in k]))
        self.register_buffer("places", torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8))

    def forward(self, task: Tensor) -> Tensor:
        base = self.base
        packed = self.bits.index_select(0, task).reshape(-1, 1)
        bits = (packed & self.places).to(torch.bool).reshape(-1)[: base.numel()]
        mask = bits.reshape(self.shape).to(base.dtype)
        k0, k1, k2, k3 = (k.reshape(self.channel) for k in self.k.index_select(0, task).squeeze(0).unbind(0))
        return (k0 * base + k1 + k2 * mask + k3 * base * mask).reshape(self.about.shape)


def _k(transform: Masked, channels: int) -> Tensor:
    return transform.values().detach().float().cpu().reshape(4, -1).expand(4, channels)
