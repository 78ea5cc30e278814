"""A graph in onnxruntime's own weight layout whose weights are still inputs, so one session runs every task fast.

onnxruntime arranges convolution weights in blocks of channels, but only if they are constants when a session is
created. So we create one with numbered constants, and read the layout off the places where the numbers end up.
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
BLOCKS = (16, 8, 4)  # channels per block, depending on the processor's registers
FIRST, NUMBERS = 1 << 20, 65_521  # the smallest number and their count: all are exact in float32
FUSIONS = ("ConvAddFusion", "ConvBNFusion", "ConvMulFusion", "MatMulBNFusion")  # optimisers that merge two weights


@dataclass(frozen=True)
class Place:
    """An input of the graph, the weight to pass, and how to arrange it."""

    input: str
    weight: str
    layout: Layout


def arrange(model: Any, shapes: Mapping[str, torch.Size]) -> tuple[Any, list[Place]] | None:
    """Return the graph as onnxruntime optimises it, and its weight inputs, for this processor only.

    Return None if onnxruntime computes new constants from the weights, or uses a layout that we do not know.
    """
    onnx, numbered = need("onnx"), _numbered(shapes)
    optimised, weight_of = _optimised(model, numbered), {float(t.max()): name for name, t in numbered.items()}
    places = []
    for constant in optimised.graph.initializer:
        if constant.data_type != onnx.TensorProto.FLOAT:
            continue
        found = torch.from_numpy(onnx.numpy_helper.to_array(constant).copy())
        if (largest := float(found.max())) < FIRST:
            continue  # not a weight
        weight = weight_of.get(largest, "")
        layout = _layout(numbered[weight], found) if weight else None
        if layout is None:
            return None
        places.append(Place(constant.name, weight, layout))
    if {place.weight for place in places} != shapes.keys():
        return None  # some are only in constants that were computed from them
    return _with_inputs(optimised, [place.input for place in places]), places


def _numbered(shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return numbered tensors of these shapes. Each has a different maximum, and all numbers are at least `FIRST`."""
    numbers = -torch.arange(max(shape.numel() for shape in shapes.values())).remainder_(NUMBERS).float()
    return {
        name: (numbers[: shape.numel()] + (FIRST + NUMBERS + i)).view(shape)
        for i, (name, shape) in enumerate(shapes.items())
    }


def _optimised(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """Return the graph as onnxruntime optimises it with these weights as constants."""
    onnx, runtime = need("onnx"), need("onnxruntime")
    constant = onnx.ModelProto()
    constant.CopyFrom(model)
    images = [value for value in constant.graph.input if value.name == IMAGES]
    del constant.graph.input[:]
    constant.graph.input.extend(images)
    for name, tensor in weights.items():
        entry = constant.graph.initializer.add(name=name, data_type=onnx.TensorProto.FLOAT, dims=tensor.shape)
        entry.data_location = onnx.TensorProto.EXTERNAL
        entry.external_data.add(key="location", value="memory")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # no warning that the file is for this processor only
    arrays = [runtime.OrtValue.ortvalue_from_numpy(tensor.numpy()) for tensor in weights.values()]
    options.add_external_initializers(list(weights), arrays)
    with TemporaryDirectory(prefix="bitgraft-") as folder:
        options.optimized_model_filepath = str(path := Path(folder) / "graph.onnx")
        data, providers = constant.SerializeToString(), ["CPUExecutionProvider"]
        runtime.InferenceSession(data, options, providers, disabled_optimizers=[*FUSIONS])
        return onnx.load(path)


def _with_inputs(model: Any, names: list[str]) -> Any:
    """Turn these constants into inputs of any size, since tasks differ in their number of classes."""
    onnx, wanted = need("onnx"), set(names)
    kept = [constant for constant in model.graph.initializer if constant.name not in wanted]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.graph.input.extend(onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in names)
    del model.graph.value_info[:]
    return model


def _layout(numbered: Tensor, found: Tensor) -> Layout | None:
    return next((layout for layout in _layouts(numbered.ndim) if torch.equal(layout(numbered), found)), None)


def _layouts(dimensions: int) -> Iterator[Layout]:
    """Yield the layouts that onnxruntime is known to use."""
    yield torch.clone
    for block in BLOCKS:
        if dimensions == 1:
            yield partial(_padded, block=block)
            yield partial(_scales, block=block)
        if dimensions == 4:
            yield partial(_blocks, outputs=block, inputs=1)
            yield partial(_blocks, outputs=block, inputs=block)
    if dimensions == 2:
        yield lambda weight: weight.T.contiguous()


def _padded(bias: Tensor, block: int) -> Tensor:
    return pad(bias, (0, -len(bias) % block))


def _scales(factor: Tensor, block: int) -> Tensor:
    """A factor per channel as the weight of a depthwise convolution."""
    return pad(factor, (0, -len(factor) % block), value=1.0).view(-1, 1, 1, 1)


def _blocks(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    """(O, I, H, W) in the order (O / outputs, I / inputs, H, W, block of I, block of O)."""
    o, i = -len(weight) % outputs, -weight.shape[1] % inputs
    if o or i:
        weight = pad(weight, (0, 0, 0, 0, 0, i, 0, o))
    blocks = weight.reshape(-1, outputs, weight.shape[1] // inputs, inputs, *weight.shape[2:])
    return blocks.permute(0, 2, 4, 5, 3, 1).reshape(weight.shape)
