"""Reads weights from a file or an installed package, and checks that they fit the network."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from bitgraft.backbone.files import PACKAGE, write_atomically
from bitgraft.errors import BackboneError
from bitgraft.transforms.base import COUNTER

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
WRAPPERS = ("state_dict", "model_state_dict", "model", "net")  # keys under which training scripts store a state dict
PREFIXES = ("module.", "_orig_mod.", "model.")  # added to names by DataParallel, torch.compile and Lightning


def read_weights(source: str) -> dict[str, Tensor]:
    """Return the tensors in a safetensors or torch file, or in the file of an installed package ("package:NAME")."""
    path = _package_file(source) if source.startswith(PACKAGE) else Path(source)
    try:
        with path.open("rb") as file:
            is_safetensors = file.read(9)[8:] == b"{"
        held = safetensors.torch.load_file(path) if is_safetensors else torch.load(path, "cpu", weights_only=True)
    except OSError as cause:
        raise BackboneError(f"cannot read the weights {path}: {cause.strerror or cause}") from cause
    except Exception as cause:  # a damaged file can raise anything
        raise BackboneError(
            f"cannot load the weights {path}: the file is damaged, or contains code, which is never run; save a "
            "state dict with safetensors or torch.save"
        ) from cause
    return _tensors(held, path)


def prepare(state: Mapping[str, Tensor], model: nn.Module, source: str) -> dict[str, Tensor]:
    """Rename tensors to match the network: strip wrappers' prefixes, and match a package's tensors by order."""
    expected = model.state_dict()
    names = dict(state)
    for prefix in PREFIXES:
        taken = any(name.startswith(prefix) for name in expected)
        if names and not taken and all(name.startswith(prefix) for name in names):
            names = {name.removeprefix(prefix): tensor for name, tensor in names.items()}
    if source.startswith(PACKAGE) and not set(names) & set(expected):
        return _in_order(names, expected, source)
    return names


def classes_in(state: Mapping[str, Tensor], model: nn.Module) -> int | None:
    """Return the number of classes to build the network with so that these tensors fit, or None to leave it.

    This works if only the number of outputs differs, in one layer or in all classifiers that timm states.
    """
    expected = model.state_dict()
    stated = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or "fc"
    heads = (stated,) if isinstance(stated, str) else tuple(stated)
    differing = {n: state[n] for n in expected if n in state and state[n].shape != expected[n].shape}
    layers = {name.rpartition(".")[0] for name in differing}
    outputs = {tensor.shape[0] for tensor in differing.values() if tensor.dim()}
    if len(outputs) == 1 and (len(layers) == 1 or layers == set(heads)):
        same = all(tensor.shape[1:] == expected[name].shape[1:] for name, tensor in differing.items())
        return outputs.pop() if same else None
    missing = _missing(state, expected)
    headless = missing and all(name.startswith(tuple(f"{head}." for head in heads)) for name in missing)
    return 0 if headless and hasattr(model, "num_classes") else None


def check(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], network: str, source: str) -> None:
    """Raise if names or shapes differ from those that a network expects, listing all differences."""
    misshapen = [
        f"{name!r} is {tuple(state[name].shape)} but {tuple(expected[name].shape)} in the network"
        for name in expected
        if name in state and state[name].shape != expected[name].shape
    ]
    faults = {
        "tensors of the network are missing": [repr(name) for name in _missing(state, expected)],
        "tensors are not in the network": [repr(name) for name in state if name not in expected],
        "have a different shape": misshapen,
    }
    listed = [f"{len(n)} {what} ({', '.join(n[:3])}{', ...' * (len(n) > 3)})" for what, n in faults.items() if n]
    if listed:
        raise BackboneError(f"{source} does not fit {network}: {'; '.join(listed)}. Is it for another network?")


def _missing(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    return [name for name in expected if name not in state and not name.endswith(COUNTER)]


def write_weights(model: nn.Module, path: str | Path) -> None:
    """Write a network's weights to a safetensors file, atomically."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    write_atomically(Path(path), safetensors.torch.save(state))


def _tensors(held: Any, path: Path) -> dict[str, Tensor]:
    for _ in range(3):
        wrapped = next((held[key] for key in WRAPPERS if isinstance(held, Mapping) and key in held), None)
        if not isinstance(wrapped, Mapping):
            break
        held = wrapped
    if not isinstance(held, Mapping) or not held or not all(isinstance(t, Tensor) for t in held.values()):
        raise BackboneError(f"{path} contains no state dict (names and tensors): save model.state_dict()")
    if any(name.endswith(":mask") for name in held):
        raise BackboneError(f"{path} is a bitgraft task file, not the weights of a backbone: pass the backbone's")
    return dict(held)


def _in_order(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Match tensors by order. Each must have the shape and the last part of the name that the network expects."""
    ours = [(name.rpartition(".")[2], tuple(tensor.shape)) for name, tensor in expected.items()]
    theirs = [(name.rpartition(".")[2], tuple(tensor.shape)) for name, tensor in state.items()]
    if ours != theirs:
        at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        where = "" if at is None else f"; the first difference is {list(state)[at]!r} against {list(expected)[at]!r}"
        raise BackboneError(
            f"{source} does not fit the network: it has {len(theirs)} tensors, the network {len(ours)}{where}"
        )
    return dict(zip(expected, state.values(), strict=True))


def _package_file(source: str) -> Path:
    """Find the file of weights in an installed package without running the package's code."""
    name, _, inner = source.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise BackboneError(f"the package {name!r} is not installed: pip install {name}")
    if inner:
        return Path(folders[0], inner)
    files = sorted(file for file in Path(folders[0]).rglob("*") if file.suffix in SUFFIXES)
    if len(files) != 1:
        found = ", ".join(str(file.relative_to(folders[0])) for file in files[:5]) or "none"
        raise BackboneError(f"package {name!r} must hold one file of weights, not {found}: pass {PACKAGE}{name}/FILE")
    return files[0]
