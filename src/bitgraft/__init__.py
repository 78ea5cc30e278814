"""bitgraft: new tasks for one pretrained network, about one bit per weight each, with no forgetting.

Names are imported on first use, so `import bitgraft` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bitgraft.errors import ArchiveError as ArchiveError
from bitgraft.errors import BackboneError as BackboneError
from bitgraft.errors import BackboneWarning as BackboneWarning
from bitgraft.errors import BitgraftError as BitgraftError
from bitgraft.errors import ClassesError as ClassesError
from bitgraft.errors import CorruptError as CorruptError
from bitgraft.errors import DataError as DataError
from bitgraft.errors import DataWarning as DataWarning
from bitgraft.errors import ExportError as ExportError
from bitgraft.errors import FigureError as FigureError
from bitgraft.errors import MissingTaskError as MissingTaskError
from bitgraft.errors import NewerFormatError as NewerFormatError
from bitgraft.errors import NoFreeWeightsError as NoFreeWeightsError
from bitgraft.errors import ServingError as ServingError
from bitgraft.errors import SharingError as SharingError
from bitgraft.errors import StoppedError as StoppedError
from bitgraft.errors import StoreError as StoreError
from bitgraft.errors import SuiteError as SuiteError
from bitgraft.errors import TaskError as TaskError
from bitgraft.errors import TrainingError as TrainingError
from bitgraft.errors import UnknownBackboneError as UnknownBackboneError
from bitgraft.errors import UnknownTaskError as UnknownTaskError
from bitgraft.errors import UnsafeNameError as UnsafeNameError
from bitgraft.errors import WrongBackboneError as WrongBackboneError

if TYPE_CHECKING:
    from bitgraft.backbone.anatomy import Anatomy as Anatomy
    from bitgraft.backbone.anatomy import read_anatomy as read_anatomy
    from bitgraft.backbone.loading import load_backbone as load_backbone
    from bitgraft.backbone.models import resnet26 as resnet26
    from bitgraft.backbone.models import wide_resnet as wide_resnet
    from bitgraft.compression.compress import compress as compress
    from bitgraft.data.splits import open_data as open_data
    from bitgraft.format.archive import Archive as Archive
    from bitgraft.format.archive import read_archive as read_archive
    from bitgraft.format.rounding import compact as compact
    from bitgraft.methods.registry import Method as Method
    from bitgraft.methods.registry import method_names as method_names
    from bitgraft.methods.registry import register_method as register_method
    from bitgraft.network import Network as Network
    from bitgraft.store import Store as Store
    from bitgraft.task import Task as Task
    from bitgraft.training.config import Config as Config
    from bitgraft.training.evaluation import evaluate as evaluate
    from bitgraft.training.loop import fit as fit
    from bitgraft.training.presets import preset as preset
    from bitgraft.training.task_model import TaskModel as TaskModel
    from bitgraft.workflows.identification import describe as describe
    from bitgraft.workflows.identification import identify as identify
    from bitgraft.workflows.prediction import predict as predict

__version__ = "0.1.0"

_MODULES = {
    "backbone.anatomy": ("Anatomy", "read_anatomy"),
    "backbone.loading": ("load_backbone",),
    "backbone.models": ("resnet26", "wide_resnet"),
    "compression.compress": ("compress",),
    "data.splits": ("open_data",),
    "format.archive": ("Archive", "read_archive"),
    "format.rounding": ("compact",),
    "methods.registry": ("Method", "method_names", "register_method"),
    "network": ("Network",),
    "workflows.identification": ("describe", "identify"),
    "workflows.prediction": ("predict",),
    "store": ("Store",),
    "task": ("Task",),
    "training.config": ("Config",),
    "training.evaluation": ("evaluate",),
    "training.loop": ("fit",),
    "training.presets": ("preset",),
    "training.task_model": ("TaskModel",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted([*_MODULE_OF, *(name for name in globals() if name.endswith(("Error", "Warning")))])


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'bitgraft' has no attribute {name!r}")
    return getattr(import_module(f"bitgraft.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
