"""Engines run a task's weights: PyTorch on any device, or onnxruntime on a CPU.

A session of onnxruntime is the backbone's graph (`onnx_graph`) with one task's weights. It is given out only if its
scores agree with PyTorch's. All sessions of a process share the memory for activations.
"""

import json
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitgraft.errors import ExportError
from bitgraft.runtime.onnx_graph import FOLDS, IMAGES, LOGITS, Fold, GraphCache, folded, need, scores_module

EngineName = Literal["auto", "torch", "onnxruntime"]
TOLERANCE = 1e-3  # of the largest score
TRACED = 2  # the batch size that tracing sees
LARGEST = 8  # images in one run: on a CPU more are no faster, and take more memory
MOST_THREADS = 8  # of one session, each of which has threads of its own, asleep between runs
LAYOUT = 1.1  # onnxruntime pads channels in its own layout of the weights: 14.0 MB for 12.9 in EfficientNet-Lite0


class Session:
    """One task in onnxruntime: images (N, C, H, W) on the CPU to scores (N, classes)."""

    def __init__(self, graph: bytes, state: Mapping[str, Tensor], threads: int | None = None) -> None:
        onnx, runtime = need("onnx"), need("onnxruntime")
        try:
            model = onnx.load_from_string(graph)
            weights = _give_weights(onnx, model, state)
            options = _options(runtime, threads or torch.get_num_threads())
            given = [runtime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
            options.add_external_initializers(list(weights), given)  # copied: ours are not needed any more
            data = model.SerializeToString()
            self._session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as cause:  # those of protobuf and onnxruntime have no other root in common
            reason = str(cause).strip().partition("\n")[0]
            raise ExportError(f"onnxruntime cannot make a session ({type(cause).__name__}: {reason})") from cause
        self.nbytes = len(data) + int(LAYOUT * sum(array.nbytes for array in weights.values()))

    def __call__(self, images: Tensor) -> Tensor:
        made = [self._session.run([LOGITS], {IMAGES: part.numpy()})[0] for part in torch.split(images, LARGEST)]
        return torch.cat([torch.from_numpy(scores) for scores in made])


def _give_weights(onnx: Any, model: Any, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Turn the graph's weight inputs into initialisers. Returns those that onnxruntime takes from memory."""
    (folds,) = (json.loads(entry.value) for entry in model.metadata_props if entry.key == FOLDS)
    weights = folded(state, [Fold(weight, bias, tuple(norm), epsilon) for weight, bias, norm, epsilon in folds])
    names = [value.name for value in model.graph.input if value.name != IMAGES]
    images = [value for value in model.graph.input if value.name == IMAGES]
    del model.graph.input[:]
    model.graph.input.extend(images)
    arrays = {name: weights[name].detach().cpu().contiguous().numpy() for name in names}
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
            continue
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        held = model.graph.initializer.add(
            name=name, data_type=kind, dims=array.shape, data_location=onnx.TensorProto.EXTERNAL
        )
        held.external_data.add(key="location", value="memory")
    return {name: array for name, array in arrays.items() if array.dtype.kind == "f"}


def make_session(
    plain: nn.Module,
    images: Tensor,
    expected: Tensor,
    graphs: GraphCache,
    head: Collection[str],
    threads: int | None = None,
) -> Session:
    """A session for a task's plain module, or an `ExportError` that says why there is none.

    `expected` are PyTorch's scores for `images`. Tensors of the `head` may have other sizes in a graph from the cache;
    where that does not work, the task gets a graph of its own.
    """
    need("onnxruntime")  # before anything that takes long
    module = scores_module(plain, images[:1])
    problem: ExportError | None = None
    for free in ([*head, *(f"inner.{name}" for name in head)], []):
        try:
            session = Session(graphs.get(module, images[:TRACED], free), module.state_dict(), threads)
            check_agreement(session(images), expected)
            return session
        except ExportError as found:
            problem = found
    assert problem is not None
    raise problem


def check_agreement(given: Tensor, expected: Tensor) -> None:
    """Refuse scores that differ from PyTorch's by more than `TOLERANCE` of the largest, or have another best class."""
    if given.shape != expected.shape:
        raise ExportError(f"onnxruntime gives scores of shape {[*given.shape]} where PyTorch gives {[*expected.shape]}")
    room = TOLERANCE * expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    difference = (given - expected).abs().max()
    if not difference <= room:  # also where it is not a number
        raise ExportError(
            f"onnxruntime's scores differ from PyTorch's by {TOLERANCE * float(difference / room):.1e} of the largest, "
            f"more than {TOLERANCE:g}"
        )
    chosen = expected.gather(1, given.argmax(1, keepdim=True))
    if (expected.amax(1, keepdim=True) - chosen > TOLERANCE * room).any():  # a tie to six digits is no other class
        raise ExportError("onnxruntime and PyTorch disagree on the best class")


def _options(runtime: Any, threads: int) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors alone, no remarks on weights that it moves
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")  # given back with a session
    if _has_arena(runtime):
        options.add_session_config_entry("session.use_env_allocators", "1")
    options.intra_op_num_threads = min(threads, MOST_THREADS)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # else idle threads take others' cores
    return options


@cache
def _has_arena(runtime: Any) -> bool:
    """One arena holds the activations of all sessions; otherwise each session keeps its own."""
    kind, place = runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, runtime.OrtMemType.DEFAULT
    try:
        runtime.create_and_register_allocator(runtime.OrtMemoryInfo("Cpu", kind, 0, place), None)
    except Exception:  # whatever onnxruntime raises where the process has registered one itself
        return False
    return True
