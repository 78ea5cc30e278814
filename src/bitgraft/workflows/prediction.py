"""Classify images with a task: shared by Python, the command line and HTTP."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from bitgraft.backbone.tracing import logits
from bitgraft.data.decode import Picture
from bitgraft.data.preprocessing import Preprocessing, evaluation_tensor
from bitgraft.errors import ExportError
from bitgraft.network import Network
from bitgraft.runtime.engines import EngineName, Graph, Session, make_session
from bitgraft.runtime.heads import stated_preprocessing
from bitgraft.runtime.module_cache import differs_in_tensors_only
from bitgraft.runtime.onnx_graph import GraphCache
from bitgraft.store import Backbone
from bitgraft.task import evaluating

Answers = list[dict[str, Any]]
"""The likeliest classes first, as {"class": name, "probability": number}."""
ONE = (str, Path, bytes, Image, np.ndarray, Tensor)
"""The types of one image; several are in a list or another iterable."""
PROBES = 2  # images on which a session must agree with PyTorch
MANY = 64  # images; for fewer, creating a session takes longer than it saves


def predict(
    net: Network, task: str, images: Picture | Iterable[Picture], *, top: int = 5, batch: int = 32
) -> Answers | list[Answers]:
    """Return a task's likeliest classes for one image, or for each of several.

        predict(net, "flowers", "rose.jpg")       # [{"class": "rose", "probability": 0.98}, ...]
        predict(net, "flowers", [first, second])  # a list of those

    Args:
        images: files, bytes of files, PIL images or arrays (H, W, C); they are resized and normalised as in training.
        top: number of classes.
        batch: images per forward pass.
    """
    preprocessing, found, answers = preprocessing_of(net, task), net._find(task), list[Answers]()
    pictures: list[Picture] = [images] if isinstance(images, ONE) else list(images)
    with evaluating(found):
        for start in range(0, len(pictures), batch):
            tensors = [evaluation_tensor(picture, preprocessing) for picture in pictures[start : start + batch]]
            scores = torch_scores(net, task, torch.stack(tensors))
            answers += [best(row, found.classes, top) for row in probabilities(net, scores)]
    return answers[0] if isinstance(images, ONE) else answers


def preprocessing_of(net: Network, task: str) -> Preprocessing:
    own = task == net.original
    stated = stated_preprocessing(net.backbone) if own else net._added(task).metadata.preprocessing
    return Preprocessing.from_dict(stated)


def class_names(net: Network, task: str, backbone: Backbone) -> Sequence[str] | None:
    """Return a task's class names; the backbone's own are ImageNet's, if it was trained on that."""
    return imagenet_names(net.backbone, backbone) if task == net.original else net._added(task).classes


def imagenet_names(network: nn.Module, backbone: Backbone) -> tuple[str, ...] | None:
    """Return ImageNet's class names for a pretrained timm network with an ImageNet head, else None."""
    if not hasattr(network, "pretrained_cfg") or not (backbone.pretrained or backbone.weights):
        return None
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    if (subset := infer_imagenet_subset(network)) is None:
        return None
    info = ImageNetInfo(subset)
    return tuple(info.index_to_description(i).partition(",")[0] for i in range(info.num_classes()))  # type: ignore[no-untyped-call]


@torch.no_grad()
def torch_scores(net: Network, task: str, images: Tensor) -> Tensor:
    """Return the task's scores, (N, classes), on the CPU."""
    return logits(net(images.to(net.anatomy.device, net.anatomy.dtype), task=task)).cpu()


@torch.no_grad()
def passing_scores(net: Network, task: str, images: Tensor) -> Tensor:
    """Return the same scores without caching the task's module if there is no room for it."""
    return torch.stack(net(images.to(net.anatomy.device, net.anatomy.dtype), task=[task] * len(images))).cpu()


def graph_session(net: Network, task: str, graph: Graph) -> Session:
    """Return a session with the task's weights in another task's graph, without a check against PyTorch.

    Raises an `ExportError` if the two tasks differ in more than tensors.
    """
    found = net._find(task)
    if not differs_in_tensors_only(found):
        raise ExportError("the task has modules of its own")
    with torch.no_grad():
        return Session(graph, {**net.anatomy.tensors(), **found.tensors()})


def probabilities(net: Network, scores: Tensor) -> Tensor:
    return net.anatomy.as_logits(scores).softmax(1)


def task_session(net: Network, task: str, threads: int | None = None, *, export: bool = True) -> Session:
    """Return the task as an onnxruntime session, checked against PyTorch, or raise an `ExportError`.

    Args:
        threads: torch's number of threads by default.
        export: export the graph if it is not cached; not while other threads run networks.
    """
    device, dtype = net.anatomy.device, net.anatomy.dtype
    if device.type != "cpu" or dtype != torch.float32:
        raise ExportError(f"onnxruntime needs float32 on a CPU here, but this network is {dtype} on {device}")
    wanted, own = preprocessing_of(net, task), task == net.original
    images = torch.randn((PROBES, wanted.channels, *wanted.size), generator=torch.Generator().manual_seed(0))
    head = [] if own or net.tasks[task].metadata.head != "classes" else net.anatomy.head_names()
    expected, graphs = torch_scores(net, task, images), GraphCache(net.fingerprint, export=export)
    return make_session(net.export(task), images, expected, graphs, head, threads)


def choose_engine(
    net: Network, task: str, engine: EngineName, images: int, threads: int | None = None
) -> tuple[Callable[[Tensor], Tensor], str]:
    """Return the function that computes a task's scores, and why `auto` fell back to PyTorch for this many images."""
    reason = ""
    if engine == "onnxruntime" or (engine == "auto" and images >= MANY):
        try:
            return task_session(net, task, threads), ""
        except ExportError as error:
            if engine == "onnxruntime":
                raise
            reason = str(error)
    return partial(torch_scores, net, task), reason


def best(scores: Tensor, classes: Sequence[str] | None, top: int) -> Answers:
    """Return the `top` likeliest classes of an image."""
    values, indices = scores.topk(min(top, len(scores)))
    return [
        {"class": classes[index] if classes else str(index), "probability": value}
        for value, index in zip(values.tolist(), indices.tolist(), strict=True)
    ]
