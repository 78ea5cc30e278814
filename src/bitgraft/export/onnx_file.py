"""Export one task or many as an ONNX file, checked in onnxruntime.

A file of many tasks holds the weights once and every task's packed masks; the task's index is an input:

    images (batch, C, H, W), task (1,) -> logits (batch, maximum number of classes)

The graph unpacks the requested task's bits and computes W~ = k0 W + k1 1 + k2 M + k3 W∘M. Scores after a task's last
class are -1e30. The metadata `tasks` lists the tasks by index.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from bitgraft import __version__
from bitgraft.backbone.tracing import logits, private_copy
from bitgraft.errors import ExportError
from bitgraft.export.plain import TRACED, Subject
from bitgraft.network import Network
from bitgraft.runtime.onnx_graph import IMAGES, LOGITS, need, program, reason, to_onnx
from bitgraft.task import Task, dotless, dotted
from bitgraft.transforms.base import COUNTER, Weight
from bitgraft.transforms.bits import pack, packed_size
from bitgraft.transforms.masked import START, Masked

TASK = "task"
PADDING = -1e30  # score of the classes that a task does not have; finite
TOLERANCE = 1e-4  # relative to the largest score
ROUNDINGS = 8  # in half precision, whose scores are rounded after each layer
LARGEST = 2**31 - 1  # bytes in one protobuf file


def onnx_bytes(subject: Subject) -> bytes:
    """Return a file of one task, after checking its scores in onnxruntime."""
    traced = program(subject.module(), subject.images(TRACED))
    return _checked(convert(traced, [IMAGES], subject.header()), [(subject, {})])


def bundle_bytes(net: Network, names: Sequence[str]) -> bytes:
    """Return a file of many tasks, after checking every task's scores in onnxruntime."""
    subjects = [Subject(net, name) for name in names]
    _check(subjects)
    module = Bundle(net, [net.tasks[name] for name in names]).eval()
    traced = program(module, subjects[0].images(TRACED), torch.tensor([len(names) - 1]))
    tasks = json.dumps([subject.about() for subject in subjects], ensure_ascii=False)
    header = {"bitgraft": __version__, "backbone": net.fingerprint, "tasks": tasks}
    cases = [(subject, {TASK: torch.tensor([number])}) for number, subject in enumerate(subjects)]
    return _checked(convert(traced, [IMAGES, TASK], header), cases)


def _checked(data: bytes, cases: Iterable[tuple[Subject, Mapping[str, Tensor]]]) -> bytes:
    """Return the file if it gives the scores of all tasks; each comes with the file's inputs besides the images."""
    session = open_session(data)
    for subject, inputs in cases:
        for label, images, expected in subject.cases():
            check_scores(session, {IMAGES: images, **inputs}, expected, label)
    return data


def convert(traced: ExportedProgram, inputs: Iterable[str], header: Mapping[str, str]) -> bytes:
    """Convert a traced network to one ONNX file that includes its weights."""
    model = to_onnx(traced, inputs).model_proto
    _tidy(model.graph)
    need("onnx").helper.set_model_props(model, dict(header))
    if (size := model.ByteSize()) > LARGEST:
        raise ExportError(f"the ONNX file would take {size / 1e9:.1f} GB, the limit is 2 GB: use --format torch-export")
    return bytes(model.SerializeToString())


def _tidy(graph: Any) -> None:
    """Name the batch dimension, and remove the local file names that the exporter adds to each node."""
    batch = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in [*graph.input, *graph.output, *graph.value_info]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = "batch" if dim.dim_param == batch else dim.dim_param.replace(batch, "batch")
        del value.metadata_props[:]
    for node in [*graph.node, *graph.initializer]:
        del node.metadata_props[:]
        node.doc_string = ""
    del graph.metadata_props[:]


def open_session(data: bytes) -> Any:
    runtime = need("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        return runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as cause:  # onnxruntime's exceptions have no base class of their own
        raise ExportError(
            f"onnxruntime cannot run this network's ONNX file ({reason(cause)}), so none was written; try --format "
            "torch-export"
        ) from cause


def check_scores(session: Any, inputs: Mapping[str, Tensor], expected: Tensor, label: str) -> float:
    """Return the largest difference of onnxruntime's scores, relative to the largest; raise if it is too large."""
    (given,) = session.run([LOGITS], {name: tensor.cpu().numpy() for name, tensor in inputs.items()})
    given, wanted = given[:, : expected.shape[1]], expected.cpu().numpy()
    largest = max(np.abs(wanted).max(), np.finfo(wanted.dtype).tiny)
    difference = float(np.abs(given - wanted).max() / largest) if given.shape == wanted.shape else float("inf")
    tolerance = max(TOLERANCE, ROUNDINGS * torch.finfo(expected.dtype).eps)
    if not difference <= tolerance:  # also if it is NaN
        raise ExportError(
            f"onnxruntime's scores for {label} differ by {difference:.1e} of the largest, more than {tolerance:g}, "
            "so no file was written; try --format torch-export, which is exact"
        )
    return difference


def _check(subjects: Sequence[Subject]) -> None:
    """Check that all tasks are made of masks on the same weights, have classes and take images of one size."""
    tasks = {subject.name: subject.net.tasks[subject.name] for subject in subjects}
    masked = {weight: name for name, task in tasks.items() for weight in task.transforms}
    for name, task in tasks.items():
        if task.metadata.head != "classes" or not all(type(t) is Masked for t in task.transforms.values()):
            raise ExportError(
                f"task {name!r} (method {task.metadata.method!r}, head {task.metadata.head!r}) cannot share a file: "
                "only tasks made of masks and classes can; export it separately"
            )
        if both := sorted(masked.keys() & task.owned.keys()):
            raise ExportError(
                f"tasks {name!r} and {masked[both[0]]!r} cannot share a file: one replaces {both[0]!r}, the other "
                "masks it; export them separately"
            )
    sizes = {subject.preprocessing.size: subject.name for subject in subjects}
    if len(sizes) > 1:
        (first, one), (second, other), *_ = sizes.items()
        raise ExportError(
            f"task {one!r} takes images of {first[0]} x {first[1]} pixels and {other!r} of {second[0]} x {second[1]}, "
            "but a file has one input size: export them separately"
        )


class Bundle(nn.Module):
    """A backbone, and all tasks' versions of each replaced tensor, stacked by task index."""

    classes: Tensor
    columns: Tensor

    def __init__(self, net: Network, tasks: Sequence[Task]) -> None:
        super().__init__()
        anatomy, head = net.anatomy, set(net.anatomy.head_names())
        self.backbone = private_copy(anatomy.backbone)
        counts = [len(task.classes or ()) for task in tasks]
        self.register_buffer("classes", torch.tensor(counts))
        self.register_buffer("columns", torch.arange(max(counts)))
        self.masks = nn.ModuleDict()
        self.owned: dict[str, torch.dtype] = {}  # learned tensors are float32 whatever the network's dtype
        for name in anatomy.places:
            base, transforms = anatomy.tensor(name).detach(), [task.transforms.get(name) for task in tasks]
            if any(transform is not None for transform in transforms):
                self.masks[dotless(name)] = _Masks(base, transforms)
            elif not name.endswith(COUNTER) and any(name in task.owned for task in tasks):
                tensors = [task.owned.get(name, base).detach() for task in tasks]
                stack = pad_sequence(tensors, batch_first=True) if name in head else torch.stack(tensors)
                self.register_buffer(f"owned:{dotless(name)}", stack)
                self.owned[name] = base.dtype

    def forward(self, images: Tensor, task: Tensor) -> Tensor:
        tensors = {dotted(key): masks(task) for key, masks in self.masks.items()}
        for name, dtype in self.owned.items():
            tensors[name] = self.get_buffer(f"owned:{dotless(name)}").index_select(0, task).squeeze(0).to(dtype)
        scores = logits(functional_call(self.backbone, tensors, (images,))).float()  # half precision has no -1e30
        return torch.where(self.columns < self.classes.index_select(0, task), scores, PADDING)


class _Masks(nn.Module):
    """One weight of the backbone with each task's bits and k; k = (1, 0, 0, 0) for a task without a mask."""

    base: Tensor
    bits: Tensor
    k: Tensor
    places: Tensor

    def __init__(self, base: Tensor, transforms: Sequence[nn.Module | None]) -> None:
        super().__init__()
        masks = {number: transform for number, transform in enumerate(transforms) if isinstance(transform, Masked)}
        self.weight: Weight = next(iter(masks.values())).weight
        self.shape = self.weight.grouped_shape
        per_channel = any(mask.rule.per_channel for mask in masks.values())
        self.channel = self.weight.channel_shape if per_channel else (1,) * len(self.shape)
        bits = torch.zeros(len(transforms), packed_size(base.numel()), dtype=torch.uint8)
        k = torch.tensor(START)[:, None].repeat(len(transforms), 1, self.weight.outputs if per_channel else 1)
        for number, mask in masks.items():
            bits[number] = pack(mask.mask()).cpu()
            k[number] = mask.values().detach().cpu().view(4, -1)
        self.register_buffer("base", base.reshape(self.shape))
        self.register_buffer("bits", bits)
        self.register_buffer("k", k)
        self.register_buffer("places", torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8))

    def forward(self, task: Tensor) -> Tensor:
        packed = self.bits.index_select(0, task).reshape(-1, 1)
        bits = (packed & self.places).to(torch.bool).reshape(-1)[: self.base.numel()]
        mask = bits.reshape(self.shape).to(self.base.dtype)
        k0, k1, k2, k3 = (k.reshape(self.channel) for k in self.k.index_select(0, task).squeeze(0).unbind(0))
        changed = k0 * self.base + k1 + k2 * mask + k3 * self.base * mask  # float32 at least
        return changed.to(self.base.dtype).reshape(self.weight.shape)
