"""bitgraft: new tasks for one pretrained network, about one bit per weight each, with no forgetting.

Names load when they are first used, so `import bitgraft` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitgraft.backbone.anatomy import Anatomy as Anatomy
    from bitgraft.backbone.anatomy import read_anatomy as read_anatomy
    from bitgraft.backbone.models import resnet26 as resnet26
    from bitgraft.backbone.models import wide_resnet as wide_resnet
    from bitgraft.compression.compress import compress as compress
    from bitgraft.errors import ArchiveError as ArchiveError
    from bitgraft.errors import BackboneError as BackboneError
    from bitgraft.errors import BitgraftError as BitgraftError
    from bitgraft.errors import TaskError as TaskError
    from bitgraft.format.archive import Archive as Archive
    from bitgraft.format.archive import read_archive as read_archive
    from bitgraft.methods.registry import Method as Method
    from bitgraft.methods.registry import method_names as method_names
    from bitgraft.methods.registry import register_method as register_method
    from bitgraft.network import Network as Network
    from bitgraft.task import Task as Task
    from bitgraft.training.config import Config as Config
    from bitgraft.training.loop import fit as fit

__version__ = "0.1.0"

_MODULES = {
    "backbone.anatomy": ("Anatomy", "read_anatomy"),
    "backbone.models": ("resnet26", "wide_resnet"),
    "compression.compress": ("compress",),
    "errors": ("ArchiveError", "BackboneError", "BitgraftError", "TaskError"),
    "format.archive": ("Archive", "read_archive"),
    "methods.registry": ("Method", "method_names", "register_method"),
    "network": ("Network",),
    "task": ("Task",),
    "training.config": ("Config",),
    "training.loop": ("fit",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'bitgraft' has no attribute {name!r}")
    return getattr(import_module(f"bitgraft.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
