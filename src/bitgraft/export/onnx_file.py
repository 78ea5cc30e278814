"""Export a task as an ONNX file, checked in onnxruntime."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from bitgraft.errors import ExportError
from bitgraft.export.plain import TRACED, Subject
from bitgraft.runtime.onnx_graph import IMAGES, LOGITS, need, program, reason, to_onnx

TOLERANCE = 1e-4  # relative to the largest score
ROUNDINGS = 8  # in half precision, whose scores are rounded after each layer
LARGEST = 2**31 - 1  # bytes in one protobuf file


def onnx_bytes(subject: Subject) -> bytes:
    """Return the file, after checking that onnxruntime gives the task's scores within the tolerance."""
    data = convert(program(subject.module(), subject.images(TRACED)), [IMAGES], subject.header())
    session = open_session(data)
    for label, images, expected in subject.cases():
        check_scores(session, {IMAGES: images}, expected, label)
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
