"""A backbone by what a user types, with weights from timm's hub, a file or an installed package.

    resnet50, vit_base_patch16_224.augreg_in21k    whatever timm knows
    wrn-28-4, resnet26                             the paper's small networks, from `bitgraft.backbone.models`
    mypackage.nets:build                           a function of the user's own that returns a module

No code from a file of weights is ever run: safetensors, or torch files of nothing but tensors.
"""

import contextlib
import difflib
import importlib
import inspect
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from bitgraft.backbone.anatomy import Anatomy, read_anatomy
from bitgraft.backbone.models import resnet26, wide_resnet
from bitgraft.backbone.weight_files import classes_in, fit, prepare, read_weights
from bitgraft.errors import BackboneError, UnknownBackboneError

REMEDY = "pass a file of weights (--weights FILE), or --no-pretrained to begin with random ones"

Build = Callable[[bool, int | None], nn.Module]
"""(with its published weights, the number of classes or None for its own) -> the network."""


def load_backbone(name: str, *, weights: str | Path | None = None, pretrained: bool = True) -> nn.Module:
    """Build a backbone and give it its weights.

    Args:
        name: as at the top of this module.
        weights: a safetensors or torch file, or "package:NAME" for the one that an installed package brings along.
            A classifier of another size than usual is built to fit the file.
        pretrained: the weights that timm publishes, where no others are given.
    """
    build = _builder(name)
    if weights is None:
        return build(pretrained, None)
    source, shapes = str(weights), _shapes_of(build)
    state = prepare(read_weights(source), shapes, source)
    model = build(False, classes_in(state, shapes))
    fit(state, model, source)
    return model


def skeleton(name: str) -> nn.Module:
    """The network without values where it can be built so (the meta device): no memory, no download."""
    return _shapes_of(_builder(name))


def read_backbone(name: str, *, weights: str | Path | None = None, **reading: Any) -> Anatomy:
    """The anatomy of a backbone by name, from its shapes alone unless weights are given."""
    if weights is not None:
        return read_anatomy(load_backbone(name, weights=weights), **reading)
    model = skeleton(name)
    try:
        return read_anatomy(model, **reading)
    except BackboneError:
        if not any(parameter.is_meta for parameter in model.parameters()):
            raise
    return read_anatomy(load_backbone(name, pretrained=False), **reading)  # its forward may need values


def _shapes_of(build: Build) -> nn.Module:
    try:
        with torch.device("meta"):
            return build(False, None)
    except UnknownBackboneError:
        raise
    except Exception:  # some networks compute with values while they are built
        return build(False, None)


def _builder(name: str) -> Build:
    if name == "resnet26":
        return _unpublished(name, lambda classes: resnet26(classes))
    if size := re.fullmatch(r"wrn-(\d+)-(\d+)", name):
        depth, width = map(int, size.groups())
        if (depth - 4) % 6 or depth < 10 or width < 1:
            raise UnknownBackboneError(f"{name!r}: a wide ResNet's depth is 10, 16, 22, 28, ..., its width 1 or more")
        return _unpublished(name, lambda classes: wide_resnet(depth, width, classes))
    if ":" in name and not name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
        return _own(name)
    return _timm(name)


def _unpublished(name: str, make: Callable[[int], nn.Module]) -> Build:
    def build(pretrained: bool, classes: int | None) -> nn.Module:
        if pretrained:
            raise BackboneError(f"{name} has no published weights: {REMEDY}")
        return make(1000 if classes is None else classes)

    return build


def _own(name: str) -> Build:
    """The user's function; it brings its own weights, so `pretrained` says nothing to it."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python` does, so that a file beside the user is found
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as cause:
        raise UnknownBackboneError(f"{name!r}: expected package.module:function, but {cause}") from cause

    def build(pretrained: bool, classes: int | None) -> nn.Module:
        if classes is not None and "num_classes" not in inspect.signature(make).parameters:
            raise BackboneError(
                f"the file of weights has a classifier of {classes} outputs, which {name} cannot be asked for: "
                "let it take num_classes"
            )
        try:
            model = make() if classes is None else make(num_classes=classes)
        except Exception as cause:  # whatever the user's function raises
            raise BackboneError(f"{name} failed ({type(cause).__name__}: {cause})") from cause
        if not isinstance(model, nn.Module):
            raise BackboneError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module")
        return model

    return build


def _timm(name: str) -> Build:
    import timm  # two seconds, which only those who use it should wait for

    base, _, tag = name.partition(".")
    if not name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
        if not timm.is_model(base):
            raise UnknownBackboneError(_no_such_model(name, [*timm.list_models(), "wrn-28-4", "resnet26"]))
        tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{base}.*")]
        if tag and tag not in tags:
            close = difflib.get_close_matches(tag, tags, 5, 0) or tags
            known = ", ".join(f"{base}.{t}" for t in close) or f"{base} alone, without published weights"
            raise UnknownBackboneError(f"timm has no {name!r}; it has {known}")

    def build(pretrained: bool, classes: int | None) -> nn.Module:
        wanted: dict[str, Any] = {} if classes is None else {"num_classes": classes}
        if pretrained or ":" in name:
            return _from_hub(name, pretrained, wanted)
        model: nn.Module = timm.create_model(name, pretrained=False, **wanted)
        return model

    return build


def _no_such_model(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 4, 0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else "`timm.list_models()` lists timm's names."
    return f"there is no backbone {name!r}; {hint} Your own is package.module:function"


def _from_hub(name: str, pretrained: bool, wanted: dict[str, Any]) -> nn.Module:
    import timm

    stated = timm.models.get_pretrained_cfg(name, allow_unregistered=True) if ":" not in name else None
    if stated is not None and not stated.has_weights:
        raise BackboneError(f"timm publishes no weights for {name}: {REMEDY}")
    repository = getattr(stated, "hf_hub_id", None)
    try:
        if repository and not _cached(repository):
            _resolve_hub()
        with _no_retry_chatter():
            model: nn.Module = timm.create_model(name, pretrained=pretrained, **wanted)
            return model
    except Exception as cause:  # the hub, the network below it and the file that came all have errors of their own
        why = str(cause).partition("\n")[0].rstrip(".")
        raise BackboneError(f"the published weights of {name} could not be fetched ({why}): {REMEDY}") from cause


def _cached(repository: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = ("model.safetensors", "pytorch_model.bin")
    return any(isinstance(try_to_load_from_cache(repository, file), str) for file in files)


def _resolve_hub() -> None:
    """Fail at once where the hub's address means nothing; its own client tries for most of a minute."""
    from huggingface_hub import constants

    if any(os.environ.get(variable) for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    host = urlsplit(constants.ENDPOINT).hostname or "huggingface.co"
    try:
        socket.getaddrinfo(host, 443)
    except OSError as cause:
        raise OSError(f"{host} cannot be reached") from cause


@contextlib.contextmanager
def _no_retry_chatter() -> Iterator[None]:
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
