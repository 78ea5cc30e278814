"""A graph in onnxruntime's own layout whose weights are still inputs: one session then runs every task at full speed.

onnxruntime keeps the weights of convolutions in blocks of channels, but only if they are constants when a session is
made. So we give it numbers for constants once; where each number ends up tells how to arrange a task's weights.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from bitgraft.runtime.onnx_graph import IMAGES, need

Layout = Callable[[Tensor], Tensor]
BLOCKS = (16, 8, 4)  # channels in a block, by what a processor's registers hold
FIRST, NUMBERS = 1 << 20, 65_521  # the least number, and how many: float32 holds all of them
COMPUTING = ("ConvAddFusion", "ConvBNFusion", "ConvMulFusion", "MatMulBNFusion")  # optimisers that merge two weights


@dataclass(frozen=True)
class Place:
    """An input of the graph, and the weight that goes there."""

    input: str
    weight: str
    layout: Layout


def arrange(model: Any, shapes: Mapping[str, torch.Size]) -> tuple[Any, list[Place]] | None:
    """The graph as onnxruntime has it, and where weights of these shapes go; None if it computes something from them.

    What comes back is for this processor only.
    """
    numbered = _numbered(shapes)
    made, firsts = _optimised(model, numbered), {float(t.max()): name for name, t in numbered.items()}
    places = []
    for name, found in _constants(made).items():
        if (first := float(found.max())) < FIRST:
            continue  # no weight has to do with it
        weight = firsts.get(first, "")
        layout = _layout(numbered[weight], found) if weight else None
        if layout is None:
            return None
        places.append(Place(name, weight, layout))
    return _with_inputs(made, [place.input for place in places]), places


def _numbered(shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Tensors of these shapes, each with its own largest number. None is smaller than `FIRST`."""
    numbers = -torch.arange(max(shape.numel() for shape in shapes.values())).remainder_(NUMBERS).float()
    return {
        name: (numbers[: shape.numel()] + (FIRST + NUMBERS + number)).view(shape)
        for number, (name, shape) in enumerate(shapes.items())
    }


def _optimised(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """What onnxruntime makes of the graph with these weights for constants."""
    onnx, runtime = need("onnx"), need("onnxruntime")
    given = onnx.ModelProto()
    given.CopyFrom(model)
    images = [value for value in given.graph.input if value.name == IMAGES]
    del given.graph.input[:]
    given.graph.input.extend(images)
    for name, tensor in weights.items():
        held = given.graph.initializer.add(name=name, data_type=onnx.TensorProto.FLOAT, dims=tensor.shape)
        held.data_location = onnx.TensorProto.EXTERNAL
        held.external_data.add(key="location", value="memory")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # it remarks that the file is for this processor only
    arrays = [runtime.OrtValue.ortvalue_from_numpy(tensor.numpy()) for tensor in weights.values()]
    options.add_external_initializers(list(weights), arrays)
    with TemporaryDirectory(prefix="bitgraft-") as folder:
        options.optimized_model_filepath = str(path := Path(folder) / "graph.onnx")
        data, providers = given.SerializeToString(), ["CPUExecutionProvider"]
        runtime.InferenceSession(data, options, providers, disabled_optimizers=[*COMPUTING])
        return onnx.load(path)


def _with_inputs(model: Any, names: list[str]) -> Any:
    """The graph with these constants as inputs, of any size: tasks differ in their numbers of classes."""
    onnx, wanted = need("onnx"), set(names)
    kept = [constant for constant in model.graph.initializer if constant.name not in wanted]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.graph.input.extend(onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in names)
    del model.graph.value_info[:]
    return model


def _constants(model: Any) -> dict[str, Tensor]:
    onnx = need("onnx")
    floats = [constant for constant in model.graph.initializer if constant.data_type == onnx.TensorProto.FLOAT]
    return {one.name: torch.from_numpy(onnx.numpy_helper.to_array(one).copy()) for one in floats}


def _layout(numbered: Tensor, found: Tensor) -> Layout | None:
    for layout in _layouts(numbered.ndim):
        made = layout(numbered)
        if made.shape == found.shape and torch.equal(made, found):
            return layout
    return None


def _layouts(dimensions: int) -> Iterator[Layout]:
    """Those that onnxruntime is known to use."""
    yield torch.clone
    for block in BLOCKS:
        if dimensions == 1:
            yield partial(_padded, block=block)
            yield partial(_scales, block=block)
        if dimensions == 4:
            yield partial(_blocks_of_outputs, block=block)
            yield partial(_blocks, block=block)
    if dimensions == 2:
        yield lambda weight: weight.T.contiguous()


def _padded(bias: Tensor, block: int) -> Tensor:
    return pad(bias, (0, -len(bias) % block))


def _scales(factor: Tensor, block: int) -> Tensor:
    """A factor for each channel, as a convolution of each by itself."""
    return pad(factor, (0, -len(factor) % block), value=1.0).view(-1, 1, 1, 1)


def _blocks_of_outputs(weight: Tensor, block: int) -> Tensor:
    """(O, I, H, W) in the order (O / block, I, H, W, block)."""
    if more := -len(weight) % block:
        weight = pad(weight, (0, 0, 0, 0, 0, 0, 0, more))
    blocks = weight.reshape(-1, block, *weight.shape[1:])
    return blocks.movedim(1, -1).reshape(weight.shape)


def _blocks(weight: Tensor, block: int) -> Tensor:
    """(O, I, H, W) in the order (O / block, I / block, H, W, block of I, block of O)."""
    outputs, inputs = -len(weight) % block, -weight.shape[1] % block
    if outputs or inputs:
        weight = pad(weight, (0, 0, 0, 0, 0, inputs, 0, outputs))
    blocks = weight.reshape(-1, block, weight.shape[1] // block, block, *weight.shape[2:])
    return blocks.permute(0, 2, 4, 5, 3, 1).reshape(weight.shape)
