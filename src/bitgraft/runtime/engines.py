"""Tasks in onnxruntime, on a CPU.

A session combines the backbone's graph (`onnx_graph`), which all tasks share, with one task's weights. It is used only
if its scores agree with PyTorch's.
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
from bitgraft.runtime.onnx_graph import FOLDS, IMAGES, LOGITS, Fold, GraphCache, folded, need, reason, scores_module
from bitgraft.runtime.onnx_layout import Place, arrange

EngineName = Literal["auto", "torch", "onnxruntime"]
TOLERANCE = 1e-3  # relative to the largest score
TRACED = 2  # batch size of the traced example
MAX_BATCH = 8  # images per run: on a CPU larger batches are no faster, and take more memory
MAX_THREADS = 8  # per session: each has its own thread pool, idle between runs


class Graph:
    """A backbone's graph in onnxruntime, whose inputs are a batch and a task's weights. It is thread-safe."""

    def __init__(self, data: bytes, threads: int) -> None:
        onnx, self._runtime = need("onnx"), need("onnxruntime")
        try:
            model = onnx.load_from_string(data)
            (folds,) = (json.loads(entry.value) for entry in model.metadata_props if entry.key == FOLDS)
            self._folds = [Fold(*fold) for fold in folds]
            self._options = _options(self._runtime, threads)
            model, places = self._arranged(model)
            self._places: defaultdict[str, list[Place]] = defaultdict(list)
            for place in places:
                self._places[place.weight].append(place)
            self._plain = self._places.keys() - {name for fold in self._folds for name in fold.names}
            self._model = model.SerializeToString()
            self._idle = [self._session()]
        except Exception as cause:  # the only common base of protobuf's and onnxruntime's exceptions
            raise ExportError(f"onnxruntime cannot make a session ({reason(cause)})") from cause

    def weights(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return copies of a task's weights as the graph expects them."""
        try:
            given = chain(folded(state, self._folds), ((name, state[name]) for name in self._plain))
            return {place.input: place.layout(t.detach()).numpy() for name, t in given for place in self._places[name]}
        except KeyError as missing:
            raise ExportError(f"the graph needs a tensor {missing}, and the task has no tensor {missing}") from missing

    def __call__(self, images: Tensor, weights: Mapping[str, Any]) -> Tensor:
        """Return scores (N, classes) for images (N, C, H, W) on the CPU."""
        try:
            session = self._idle.pop()
        except IndexError:  # one session per calling thread, since callers of one session would share its threads
            session = self._session()
        try:
            parts = [
                session.run([LOGITS], {IMAGES: part.numpy(), **weights})[0] for part in torch.split(images, MAX_BATCH)
            ]
        except Exception as cause:  # onnxruntime's exceptions have no base class of their own
            raise ExportError(f"onnxruntime cannot run these weights ({reason(cause)})") from cause
        finally:
            self._idle.append(session)
        return torch.cat([torch.from_numpy(scores) for scores in parts])

    def _arranged(self, model: Any) -> tuple[Any, list[Place]]:
        """Return the graph in onnxruntime's own weight layout, or as exported if no layout suits all tasks."""
        inputs = {value.name: value.type.tensor_type for value in model.graph.input if value.name != IMAGES}
        sizes = {name: torch.Size(d.dim_value for d in kind.shape.dim) for name, kind in inputs.items()}
        try:
            found = arrange(model, sizes)
        except Exception:  # for example no memory or no temporary folder: the exported graph runs, too
            found = None
        if found is not None:
            self._options.graph_optimization_level = self._runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
            return found
        for kind in inputs.values():
            kind.ClearField("shape")
        return model, [Place(name, name, torch.clone) for name in inputs]

    def _session(self) -> Any:
        return self._runtime.InferenceSession(self._model, self._options, providers=["CPUExecutionProvider"])


shared_graph = lru_cache(maxsize=8)(Graph)


class Session:
    """One task in onnxruntime: the backbone's graph, and a copy of the task's weights."""

    def __init__(self, graph: Graph, state: Mapping[str, Tensor]) -> None:
        self.graph, self._weights = graph, graph.weights(state)
        self.nbytes = sum(array.nbytes for array in self._weights.values())

    def __call__(self, images: Tensor) -> Tensor:
        return self.graph(images, self._weights)


def make_session(
    plain: nn.Module,
    images: Tensor,
    expected: Tensor,
    graphs: GraphCache,
    head: Collection[str],
    threads: int | None = None,
) -> Session:
    """Return a session for a task's plain module, or raise an `ExportError`.

    `expected` are PyTorch's scores for `images`. The graph may come from a task whose `head` tensors have other sizes.
    If that fails, the task gets its own graph.
    """
    need("onnxruntime")  # before anything slow
    module = scores_module(plain, images[:1])

    def attempt(free: Collection[str]) -> Session:
        graph = shared_graph(graphs.get(module, images[:TRACED], free), threads or torch.get_num_threads())
        session = Session(graph, module.state_dict())
        check_agreement(session(images), expected)
        return session

    try:
        return attempt([*head, *(f"inner.{name}" for name in head)])
    except ExportError:
        return attempt([])


def check_agreement(given: Tensor, expected: Tensor) -> None:
    """Raise if scores differ from PyTorch's by more than `TOLERANCE` times the largest, or in the best class."""
    if given.shape != expected.shape:
        raise ExportError(f"onnxruntime's scores have shape {[*given.shape]}, PyTorch's have {[*expected.shape]}")
    limit = TOLERANCE * expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    difference = (given - expected).abs().max()
    if not difference <= limit:  # true for NaN as well
        raise ExportError(
            f"onnxruntime's scores differ from PyTorch's by {TOLERANCE * float(difference / limit):.1e} of the largest "
            f"(the limit is {TOLERANCE:g})"
        )
    chosen = expected.gather(1, given.argmax(1, keepdim=True))
    if (expected.amax(1, keepdim=True) - chosen > TOLERANCE * limit).any():  # equal to six digits is a tie
        raise ExportError("onnxruntime and PyTorch disagree on the best class")


def _options(runtime: Any, threads: int) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors only
    if _has_arena(runtime):
        options.add_session_config_entry("session.use_env_allocators", "1")
    options.intra_op_num_threads = min(threads, MAX_THREADS)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads would occupy cores
    return options


@cache
def _has_arena(runtime: Any) -> bool:
    """Return whether all sessions share one arena for their activations. Otherwise each keeps its own."""
    kind, place = runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, runtime.OrtMemType.DEFAULT
    try:
        runtime.create_and_register_allocator(runtime.OrtMemoryInfo("Cpu", kind, 0, place), None)
    except Exception:  # the process has already registered one
        return False
    return True
