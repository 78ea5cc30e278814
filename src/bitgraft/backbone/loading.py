"""A backbone by what a user types, with weights from timm's hub, a file or an installed package.

    resnet50, vit_base_patch16_224.augreg_in21k    whatever timm knows
    wrn-28-4, resnet26                             the paper's small networks, from `bitgraft.backbone.models`
    mypackage.nets:build                           a function of the user's own that returns a module

No code from a file of weights is ever run: safetensors, or torch files of nothing but tensors.
"""

import difflib
import importlib
import inspect
import os
import re
import socket
import sys
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
HUBS = ("hf-hub:", "hf_hub:", "local-dir:")  # names that timm looks up elsewhere


def load_backbone(name: str, *, weights: str | Path | None = None, pretrained: bool = True) -> nn.Module:
    """Build a backbone and give it its weights.

    Args:
        name: as at the top of this module.
        weights: a safetensors or torch file, or "package:NAME" for the one that an installed package brings along.
            A classifier of another size than usual is built to fit the file.
        pretrained: the weights that timm publishes, where no others are given.
    """
    if weights is None:
        return _build(name, pretrained)
    source, shapes = str(weights), skeleton(name)
    state = prepare(read_weights(source), shapes, source)
    model = _build(name, False, classes_in(state, shapes))
    fit(state, model, source)
    return model


def skeleton(name: str) -> nn.Module:
    """The network without values where it can be built so (the meta device): no memory, no download."""
    try:
        with torch.device("meta"):
            return _build(name, False)
    except UnknownBackboneError:
        raise
    except Exception:  # some networks compute with values while they are built
        return _build(name, False)


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


def _build(name: str, pretrained: bool, classes: int | None = None) -> nn.Module:
    """The network, with its published weights or random ones, with this number of classes or its own."""
    wanted = {} if classes is None else {"num_classes": classes}
    if ":" in name and not name.startswith(HUBS):
        return _own(name, wanted)
    if name == "resnet26" or re.fullmatch(r"wrn-\d+-\d+", name):
        return _small(name, pretrained, wanted)
    return _timm(name, pretrained, wanted)


def _small(name: str, pretrained: bool, wanted: dict[str, Any]) -> nn.Module:
    if pretrained:
        raise BackboneError(f"{name} has no published weights: {REMEDY}")
    if name == "resnet26":
        return resnet26(**wanted)
    depth, width = map(int, name.split("-")[1:])
    try:
        return wide_resnet(depth, width, **wanted)
    except ValueError as cause:
        raise UnknownBackboneError(f"{name!r}: {cause}") from cause


def _own(name: str, wanted: dict[str, Any]) -> nn.Module:
    """What the user's function returns. It brings its own weights."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python` does, so that a file beside the user is found
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as cause:
        raise UnknownBackboneError(f"{name!r}: expected package.module:function, but {cause}") from cause
    if wanted and "num_classes" not in inspect.signature(make).parameters:
        raise BackboneError(
            f"the file of weights has a classifier of {wanted['num_classes']} outputs, which {name} cannot be asked "
            "for: let it take num_classes"
        )
    try:
        model = make(**wanted)
    except Exception as cause:  # whatever the user's function raises
        raise BackboneError(f"{name} failed ({type(cause).__name__}: {cause})") from cause
    if not isinstance(model, nn.Module):
        raise BackboneError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _timm(name: str, pretrained: bool, wanted: dict[str, Any]) -> nn.Module:
    import timm  # two seconds, which only those who use it should wait for

    base, _, tag = name.partition(".")
    if not name.startswith(HUBS):
        if not timm.is_model(base):
            close = difflib.get_close_matches(name, [*timm.list_models(), "wrn-28-4", "resnet26"], 4, 0.6)
            hint = f"did you mean {' or '.join(close)}?" if close else "`timm.list_models()` lists timm's names."
            raise UnknownBackboneError(f"there is no backbone {name!r}; {hint} Your own is package.module:function")
        published = timm.list_pretrained(f"{base}.*")
        if tag and name not in published:
            known = ", ".join(published[:5]) or f"{base} alone, without published weights"
            raise UnknownBackboneError(f"timm has no {name!r}; it has {known}")
    if pretrained or ":" in name:
        return _from_hub(name, pretrained, wanted)
    model: nn.Module = timm.create_model(name, pretrained=False, **wanted)
    return model


def _from_hub(name: str, pretrained: bool, wanted: dict[str, Any]) -> nn.Module:
    import timm

    stated = timm.models.get_pretrained_cfg(name, allow_unregistered=True) if ":" not in name else None
    if stated is not None and not stated.has_weights:
        raise BackboneError(f"timm publishes no weights for {name}: {REMEDY}")
    repository = getattr(stated, "hf_hub_id", None)
    try:
        if repository and not _cached(repository):
            _resolve_hub()
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
    """Fail at once where the hub's address means nothing; its own client tries for more than a minute."""
    from huggingface_hub import constants

    if any(os.environ.get(variable) for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    host = urlsplit(constants.ENDPOINT).hostname or "huggingface.co"
    try:
        socket.getaddrinfo(host, 443)
    except OSError as cause:
        raise OSError(f"{host} cannot be reached") from cause
