"""A network as an ONNX graph without weights: traced once, cached in a folder, and run with each task's weights.

Weights are inputs of the graph, so no optimiser can bake in those of one task. Batch norms are folded into the
convolution before them: the graph's metadata lists the pairs under `FOLDS`, and `folded` applies them to a task.
"""

import hashlib
import importlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.utils import fuse_conv_bn_weights

from bitgraft import __version__
from bitgraft.backbone.files import write_atomically
from bitgraft.backbone.tracing import logits
from bitgraft.errors import ArchiveError, ExportError, how_to_install

IMAGES, LOGITS, FOLDS = "images", "logits", "bitgraft.folds"
CACHE = "BITGRAFT_CACHE"  # environment variable for the cache folder
VERSIONED = ("onnx", "onnxscript", "torch")
FORM = 2  # format version of cached graphs


class Scores(nn.Module):
    """Unwraps the tensor of scores from a module's output (transformers wrap it)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        return logits(self.inner(images))


def scores_module(plain: nn.Module, images: Tensor) -> nn.Module:
    """Return the module, wrapped so that it returns a tensor."""
    with torch.no_grad():
        return plain if isinstance(plain(images), Tensor) else Scores(plain).eval()


def program(module: nn.Module, *examples: Tensor) -> ExportedProgram:
    """Trace the module for batches of any size. The first example is the batch."""
    shapes = ({0: Dim("batch", min=1)}, *(None for _ in examples[1:]))
    try:
        with torch.no_grad():
            return torch.export.export(module, examples, dynamic_shapes=shapes, strict=False)
    except Exception as cause:  # tracing can raise almost anything
        raise ExportError(
            f"torch.export cannot follow {type(module).__name__} for batches of any size ({reason(cause)}); "
            "plain weights can still be exported"
        ) from cause


def to_onnx(traced: ExportedProgram, inputs: Iterable[str], *, optimize: bool = True) -> Any:
    """Convert a traced network with torch.onnx."""
    need("onnx"), need("onnxscript")
    try:
        return torch.onnx.export(
            traced,
            dynamo=True,
            input_names=list(inputs),
            output_names=[LOGITS],
            verbose=False,
            external_data=False,
            optimize=optimize,
        )
    except Exception as cause:  # the exporter can raise almost anything
        raise ExportError(
            f"torch.onnx cannot convert this network ({reason(cause)}); try --format torch-export"
        ) from cause


def reason(cause: Exception) -> str:
    """Return an exception's type and the first line of its message."""
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"


def need(module: str) -> Any:
    """Import an optional package."""
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise ExportError(
            f"ONNX needs {module}, which cannot be imported ({cause}): {how_to_install('onnx')}"
        ) from cause


@dataclass(frozen=True)
class Fold:
    """The tensor names of a convolution and the batch norm after it, or of a batch norm without a convolution."""

    weight: str | None
    bias: str | None
    norm: tuple[str, str, str, str]
    """Scale, shift, mean and variance."""
    epsilon: float

    @property
    def names(self) -> tuple[str, str]:
        """The names of the folded weight and bias."""
        name = self.weight or self.norm[0]
        return f"{name}:folded", f"{name}:folded_bias"


def folded(state: Mapping[str, Tensor], folds: Iterable[Fold]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weight and bias of each convolution with its norm folded into it.

    A norm without a convolution becomes a depthwise 1x1 convolution with W = 1.
    """
    for fold in folds:
        scale, shift, mean, variance = (state[name] for name in fold.norm)
        weight = scale.new_ones(len(scale), 1, 1, 1) if fold.weight is None else state[fold.weight]
        bias = None if fold.bias is None else state[fold.bias]
        yield from zip(
            fold.names, fuse_conv_bn_weights(weight, bias, mean, variance, fold.epsilon, scale, shift), strict=True
        )


def make_graph(module: nn.Module, images: Tensor) -> bytes:
    """Return the module as an ONNX file whose weights are inputs, named as in its state dict."""
    exported = to_onnx(program(module, images), [IMAGES], optimize=False)
    ir, optimizer = need("onnx_ir"), need("onnxscript.optimizer")
    state, graph = module.state_dict(), exported.model.graph
    for name in [name for name in graph.initializers if name in state and state[name].is_floating_point()]:
        graph.inputs.append(value := graph.initializers.pop(name))
        value.const_value = None
    optimizer.optimize(exported.model)
    folds = [fold for node in list(graph) if (fold := _fold(ir, graph, node, state)) is not None]
    for value in [value for value in graph.inputs[1:] if not value.uses()]:
        graph.inputs.remove(value)
    model = ir.to_proto(exported.model)
    for node in model.graph.node:
        del node.metadata_props[:]  # source paths of this machine
        node.doc_string = ""
    del model.graph.value_info[:]  # other tasks may have more classes
    del model.graph.output[0].type.tensor_type.shape.dim[1:]
    need("onnx").helper.set_model_props(model, {FOLDS: json.dumps([astuple(fold) for fold in folds])})
    return bytes(model.SerializeToString())


def _fold(ir: Any, graph: Any, node: Any, state: Mapping[str, Tensor]) -> Fold | None:
    """Fold a batch norm into the convolution before it, or turn it into a convolution if there is none."""
    if node.op_type != "BatchNormalization" or any(_others_use(value, state) for value in node.inputs[1:5]):
        return None
    norm = tuple(value.name for value in node.inputs[1:5])
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    conv = node.inputs[0].producer()
    fold, like = Fold(None, None, norm, epsilon), node.inputs[1]
    if conv is not None and conv.op_type == "Conv" and len(conv.outputs[0].uses()) == 1:
        bias = conv.inputs[2] if len(conv.inputs) > 2 and not _is_zero(conv.inputs[2], state) else None
        if not any(_others_use(value, state) for value in (conv.inputs[1], bias) if value is not None):
            fold, like = Fold(conv.inputs[1].name, bias and bias.name, norm, epsilon), conv.inputs[1]
    if fold.weight is None:
        if node.inputs[0].shape is None or len(node.inputs[0].shape) != 4:
            return None
        conv = ir.node("Conv", [node.inputs[0], node.inputs[1]], {"group": len(state[norm[0]])})
        graph.insert_before(node, conv)
    conv.resize_inputs(3)
    shape = like.shape if fold.weight else ir.Shape([len(state[norm[0]]), 1, 1, 1])
    for index, (name, size) in enumerate(zip(fold.names, (shape, node.inputs[1].shape), strict=True), start=1):
        value = ir.Value(name=name, shape=size, type=like.type)
        graph.inputs.append(value)
        conv.replace_input_with(index, value)
    conv.outputs[0].shape, conv.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
    ir.convenience.replace_all_uses_with(node.outputs[0], conv.outputs[0], replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return fold


def _others_use(value: Any, state: Mapping[str, Tensor]) -> bool:
    """Return whether a value is not a weight, or is used by more than one node."""
    return value.name not in state or len(value.uses()) > 1


def _is_zero(bias: Any, state: Mapping[str, Tensor]) -> bool:
    """Return whether a bias is the exporter's placeholder for a layer without one."""
    return bias.name not in state and bias.const_value is not None and not bias.const_value.numpy().any()


class MissingGraphError(ExportError):
    """A graph is not in the cache, and this process must not export it (`GraphCache`)."""


class GraphCache:
    """A folder of graphs, keyed by a hash of the backbone, the task's module structure and package versions.

    Failures are cached as well, so that the same export is not tried twice.

    Tracing affects every module call in the process. If other threads run networks, pass `export=False` and export in
    another process.
    """

    def __init__(self, fingerprint: str, folder: Path | None = None, *, export: bool = True) -> None:
        self._fingerprint, self.folder, self._export = fingerprint, folder or cache_folder(), export

    def get(self, module: nn.Module, images: Tensor, head: Iterable[str] = ()) -> bytes:
        """Return the module's graph, and export it if it is not cached. Tensors of the `head` may have any size."""
        path = self.folder / f"{self.key(module, images, head)}.onnx"
        refused = path.with_suffix(".txt")
        if path.exists():
            return path.read_bytes()
        if refused.exists():
            raise ExportError(refused.read_text())
        if not self._export:
            raise MissingGraphError(f"{path.name} is not in {self.folder}")
        need("onnx"), need("onnxscript")  # a missing package is not a failure to cache
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the network's code
                graph = make_graph(module, images)
        except ExportError as problem:
            self._write(refused, str(problem).encode())
            raise
        self._write(path, graph)
        return graph

    def key(self, module: nn.Module, images: Tensor, head: Iterable[str] = ()) -> str:
        layers = {name.rpartition(".")[0] for name in head}
        parts = [(p, type(m).__qualname__, "" if p in layers else m.extra_repr()) for p, m in module.named_modules()]
        shapes = [(n, str(t.dtype), None if n in set(head) else [*t.shape]) for n, t in module.state_dict().items()]
        versions = [FORM, __version__, *(_version(name) for name in VERSIONED)]
        text = json.dumps([self._fingerprint, parts, shapes, [*images.shape[1:]], str(images.dtype), versions])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _write(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
        except (OSError, ArchiveError):
            return  # without a cache it only takes longer


def _version(package: str) -> str:
    try:
        return metadata.version(package)  # faster than importing it
    except metadata.PackageNotFoundError:
        return str(need(package).__version__)


def cache_folder() -> Path:
    """Return `$BITGRAFT_CACHE`, or bitgraft's folder in the user's cache."""
    if given := os.environ.get(CACHE):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitgraft"
