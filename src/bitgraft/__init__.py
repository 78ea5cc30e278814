"""bitgraft: new tasks for one pretrained network, about one bit per weight each, with no forgetting.

Names load when they are first used, so that `import bitgraft` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitgraft.backbone.anatomy import Anatomy, read_anatomy
    from bitgraft.backbone.models import resnet26, wide_resnet
    from bitgraft.compression.compress import compress
    from bitgraft.errors import ArchiveError, BackboneError, BitgraftError, TaskError
    from bitgraft.format.archive import Archive, read_archive
    from bitgraft.methods.registry import Method, method_names, register_method
    from bitgraft.network import Network
    from bitgraft.task import Task
    from bitgraft.training.config import Config
    from bitgraft.training.loop import fit

__version__ = "0.1.0"

_HOMES = {
    "Anatomy": "bitgraft.backbone.anatomy",
    "Archive": "bitgraft.format.archive",
    "ArchiveError": "bitgraft.errors",
    "BackboneError": "bitgraft.errors",
    "BitgraftError": "bitgraft.errors",
    "Config": "bitgraft.training.config",
    "Method": "bitgraft.methods.registry",
    "Network": "bitgraft.network",
    "Task": "bitgraft.task",
    "TaskError": "bitgraft.errors",
    "compress": "bitgraft.compression.compress",
    "fit": "bitgraft.training.loop",
    "method_names": "bitgraft.methods.registry",
    "read_anatomy": "bitgraft.backbone.anatomy",
    "read_archive": "bitgraft.format.archive",
    "register_method": "bitgraft.methods.registry",
    "resnet26": "bitgraft.backbone.models",
    "wide_resnet": "bitgraft.backbone.models",
}

__all__ = [
    "Anatomy",
    "Archive",
    "ArchiveError",
    "BackboneError",
    "BitgraftError",
    "Config",
    "Method",
    "Network",
    "Task",
    "TaskError",
    "compress",
    "fit",
    "method_names",
    "read_anatomy",
    "read_archive",
    "register_method",
    "resnet26",
    "wide_resnet",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bitgraft' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
