"""Loads a backbone by name, with weights from timm, a file or an installed package.

    resnet50, vit_base_patch16_224.augreg_in21k    any model of timm
    wrn-28-4, resnet26                             the paper's small networks, from `bitgraft.backbone.models`
    mypackage.nets:build                           your own function that returns a module

Code in a file of weights is never run: files are safetensors, or torch files with nothing but tensors.
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
from bitgraft.backbone.weight_files import check, classes_in, prepare, read_weights
from bitgraft.errors import BackboneError, UnknownBackboneError

REMEDY = "pass a file of weights (--weights FILE), or --no-pretrained to start from random ones"
HUBS = ("hf-hub:", "hf_hub:", "local-dir:")  # prefixes of names that timm resolves itself


def load_backbone(name: str, *, weights: str | Path | None = None, pretrained: bool = True) -> nn.Module:
    """Build a backbone and load its weights.

    Args:
        name: a model of timm; wrn-DEPTH-WIDTH or resnet26, the paper's; or package.module:function, your own.
        weights: a safetensors or torch file, or "package:NAME" for the file in an installed package. The classifier
            is built with as many outputs as the file has.
        pretrained: load timm's published weights if `weights` is not given.
    """
    if weights is None:
        return _build(name, pretrained)
    source, shapes = str(weights), skeleton(name)
    state = prepare(read_weights(source), shapes, source)
    model = _build(name, False, classes_in(state, shapes))
    check(state, model.state_dict(), type(model).__name__, source)
    model.load_state_dict(state, strict=False)  # step counters may be missing
    return model


def skeleton(name: str) -> nn.Module:
    """Build the network without values (on the meta device) if possible: no memory, no download."""
    try:
        with torch.device("meta"):
            return _build(name, False)
    except UnknownBackboneError:
        raise
    except Exception:  # some networks compute with values while they are built
        return _build(name, False)


def read_backbone(name: str, *, weights: str | Path | None = None, **reading: Any) -> Anatomy:
    """Read the anatomy of a backbone by name, from shapes alone unless weights are given."""
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
    """Build the network, with published or random weights, and with this many classes if given."""
    kwargs = {} if classes is None else {"num_classes": classes}
    if ":" in name and not name.startswith(HUBS):
        return _own(name, kwargs)
    if name == "resnet26" or re.fullmatch(r"wrn-\d+-\d+", name):
        return _small(name, pretrained, kwargs)
    return _timm(name, pretrained, kwargs)


def _small(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    if pretrained:
        raise BackboneError(f"{name} has no published weights: {REMEDY}")
    if name == "resnet26":
        return resnet26(**kwargs)
    depth, width = map(int, name.split("-")[1:])
    try:
        return wide_resnet(depth, width, **kwargs)
    except ValueError as cause:
        raise UnknownBackboneError(f"{name!r}: {cause}") from cause


def _own(name: str, kwargs: dict[str, Any]) -> nn.Module:
    """Call the user's function, which loads its own weights."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # like `python`, find modules in the working directory
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as cause:
        raise UnknownBackboneError(f"{name!r}: expected package.module:function, but {cause}") from cause
    if kwargs and "num_classes" not in inspect.signature(make).parameters:
        raise BackboneError(
            f"the file of weights has a classifier of {kwargs['num_classes']} outputs, which {name} cannot build: "
            "give it a parameter num_classes"
        )
    try:
        model = make(**kwargs)
    except Exception as cause:  # the user's function can raise anything
        raise BackboneError(f"{name} failed ({type(cause).__name__}: {cause})") from cause
    if not isinstance(model, nn.Module):
        raise BackboneError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _timm(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    import timm  # takes two seconds

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
        return _from_hub(name, pretrained, kwargs)
    model: nn.Module = timm.create_model(name, pretrained=False, **kwargs)
    return model


def _from_hub(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    import timm

    stated = timm.models.get_pretrained_cfg(name, allow_unregistered=True) if ":" not in name else None
    if stated is not None and not stated.has_weights:
        raise BackboneError(f"timm publishes no weights for {name}: {REMEDY}")
    repository = getattr(stated, "hf_hub_id", None)
    try:
        if repository and not _cached(repository):
            _resolve_hub()
        model: nn.Module = timm.create_model(name, pretrained=pretrained, **kwargs)
        return model
    except Exception as cause:  # the hub, the network and the file have many kinds of errors
        why = str(cause).partition("\n")[0].rstrip(".")
        raise BackboneError(f"the published weights of {name} could not be downloaded ({why}): {REMEDY}") from cause


def _cached(repository: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = ("model.safetensors", "pytorch_model.bin")
    return any(isinstance(try_to_load_from_cache(repository, file), str) for file in files)


def _resolve_hub() -> None:
    """Fail at once if the hub's address cannot be resolved; its own client retries for more than a minute."""
    from huggingface_hub import constants

    if any(os.environ.get(variable) for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    host = urlsplit(constants.ENDPOINT).hostname or "huggingface.co"
    try:
        socket.getaddrinfo(host, 443)
    except OSError as cause:
        raise OSError(f"{host} cannot be reached") from cause
