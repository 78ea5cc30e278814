"""Engines run a task's weights: PyTorch on any device, or onnxruntime on a CPU.

A session is the backbone's graph (`onnx_graph`), which all tasks share, and one task's weights. It is given out only if
its scores agree with PyTorch's.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import cache, lru_cache
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitgraft.errors import ExportError
from bitgraft.runtime.onnx_graph import FOLDS, IMAGES, LOGITS, Fold, GraphCache, folded, need, scores_module
from bitgraft.runtime.onnx_layout import Place, arrange

EngineName = Literal["auto", "torch", "onnxruntime"]
TOLERANCE = 1e-3  # of the largest score
TRACED = 2  # the batch size that tracing sees
LARGEST = 8  # images in one run: on a CPU more are no faster, and take more memory
MOST_THREADS = 8  # of one session, each of which has threads of its own, asleep between runs


class Graph:
    """A backbone's graph in onnxruntime, which gets a task's weights with each batch. Threads may share it."""

    def __init__(self, data: bytes, threads: int) -> None:
        onnx, self._runtime = need("onnx"), need("onnxruntime")
        try:
            model = onnx.load_from_string(data)
            (folds,) = (json.loads(entry.value) for entry in model.metadata_props if entry.key == FOLDS)
            self._folds = [Fold(weight, bias, tuple(norm), epsilon) for weight, bias, norm, epsilon in folds]
            self._options = _options(self._runtime, threads)
            model, places = self._laid_out(model)
            self._places: defaultdict[str, list[Place]] = defaultdict(list)
            for place in places:
                self._places[place.weight].append(place)
            self._plain = self._places.keys() - {name for fold in self._folds for name in fold.names}
            self._model = model.SerializeToString()
            self._idle = [self._session()]
        except Exception as cause:  # those of protobuf and onnxruntime have no other root in common
            raise _refusal("make a session", cause) from cause

    def weights(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """A task's weights as the graph takes them: arrays of their own, whatever becomes of the state."""
        try:
            given = chain(folded(state, self._folds), ((name, state[name]) for name in self._plain))
            return {place.input: place.layout(t.detach()).numpy() for name, t in given for place in self._places[name]}
        except KeyError as missing:
            raise ExportError(f"there is no tensor {missing} to give to the graph") from missing

    def __call__(self, images: Tensor, weights: Mapping[str, Any]) -> Tensor:
        """Images (N, C, H, W) on the CPU to scores (N, classes)."""
        try:
            session = self._idle.pop()
        except IndexError:  # one for each thread that is in here, since sessions divide no threads among callers
            session = self._session()
        try:
            made = [
                session.run([LOGITS], {IMAGES: part.numpy(), **weights})[0] for part in torch.split(images, LARGEST)
            ]
        except Exception as cause:  # of onnxruntime's own kinds
            raise _refusal("run these weights", cause) from cause
        finally:
            self._idle.append(session)
        return torch.cat([torch.from_numpy(scores) for scores in made])

    def _laid_out(self, model: Any) -> tuple[Any, list[Place]]:
        """The graph in onnxruntime's layout; as it was exported, if there is none that all tasks have in common."""
        inputs = {value.name: value.type.tensor_type for value in model.graph.input if value.name != IMAGES}
        sizes = {name: torch.Size(d.dim_value for d in kind.shape.dim) for name, kind in inputs.items()}
        try:
            found = arrange(model, sizes)
        except Exception:  # there is no room for the numbers, or no folder to write to: it runs all the same
            found = None
        if found is not None:
            self._options.graph_optimization_level = self._runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
            return found
        for kind in inputs.values():
            kind.ClearField("shape")
        return model, [Place(name, name, torch.clone) for name in inputs]

    def _session(self) -> Any:
        return self._runtime.InferenceSession(self._model, self._options, providers=["CPUExecutionProvider"])


@lru_cache(maxsize=8)
def shared_graph(data: bytes, threads: int) -> Graph:
    return Graph(data, threads)


class Session:
    """One task in onnxruntime: the backbone's graph, and the task's weights in memory of their own."""

    def __init__(self, graph: Graph, state: Mapping[str, Tensor]) -> None:
        self.graph, self._weights = graph, graph.weights(state)
        self.nbytes = sum(array.nbytes for array in self._weights.values())

    def __call__(self, images: Tensor) -> Tensor:
        return self.graph(images, self._weights)


def _refusal(action: str, cause: Exception) -> ExportError:
    reason = str(cause).strip().partition("\n")[0]
    return ExportError(f"onnxruntime cannot {action} ({type(cause).__name__}: {reason})")


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
            graph = shared_graph(graphs.get(module, images[:TRACED], free), threads or torch.get_num_threads())
            session = Session(graph, module.state_dict())
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
