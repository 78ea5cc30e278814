"""A task: its metadata, and the tensors that replace the backbone's."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.errors import TaskError
from bitgraft.transforms.base import Transform, rms, widened
from bitgraft.transforms.levels import Levels, fit_cells_to_file
from bitgraft.transforms.masked import Masked, transformed
from bitgraft.transforms.packed import Packed

if TYPE_CHECKING:
    from bitgraft.format.description import Description
    from bitgraft.format.metadata import Metadata


class Task(nn.Module):
    """The paper's Ω_i: weight transforms W -> W~, and tensors owned outright (norm layers, the head)."""

    def __init__(
        self,
        metadata: "Metadata",
        anatomy: Anatomy,
        transforms: Mapping[str, Transform],
        owned: Mapping[str, Tensor],
        head: nn.Module | None,
    ) -> None:
        super().__init__()
        self.metadata, self.anatomy = metadata, anatomy
        self.metrics: dict[str, Any] = {}
        self.preset = "default"  # where `fit` takes its settings from
        self.holds_statistics = False  # norm layers use and keep their running statistics in training, too
        self.description: Description | None = None  # of the task's images, to identify them
        self.earlier: tuple[Task, ...] = ()  # those that this one builds on; a tuple, so they are not submodules
        self.is_compact = False  # rounded for a small file (`bitgraft.compact`)
        self.revision = 0  # incremented when tensors are replaced, rather than written to
        self.train_forwards = 0  # forward passes with gradients, after which an optimizer may have written
        self.shared: frozenset[str] = frozenset()  # the backbone's tensors that are trained, too (joint training)
        self._other_bits: float | None = None  # bits of the file besides its levels, once known
        self._transforms = nn.ModuleDict({dotless(name): transform for name, transform in transforms.items()})
        self._owned, self._input_means = _module_of(owned), _module_of({})
        self.head = head

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self.metadata.classes

    @property
    def transforms(self) -> dict[str, Transform]:
        """The transforms, by the backbone's name of the weight."""
        return {dotted(key): transform for key, transform in self._transforms.items()}  # type: ignore[misc]

    @property
    def owned(self) -> dict[str, Tensor]:
        """The parameters and statistics stored outright, by the backbone's names."""
        return _tensors_of(self._owned)

    @property
    def input_means(self) -> dict[str, Tensor]:
        """The mean input of each weight, by its name (`correct_mean_shift`)."""
        return _tensors_of(self._input_means)

    def tensors(self, out: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the replacement tensors by the backbone's names, in the backbone's dtypes.

        Computed weights of a frozen task are written to the tensors in `out`, if given.
        """
        replaced = self._uncorrected_tensors(out)
        biases = self._corrected_biases(replaced)
        return replaced | {name: bias.to(replaced[name].dtype) for name, bias in biases.items()}

    def stored(self) -> dict[str, Tensor]:
        """Return `owned` as a file stores it, with the biases after mean-shift correction."""
        corrected = self._corrected_biases(self._uncorrected_tensors()) if self.input_means else {}
        return {**self.owned, **corrected}

    def _uncorrected_tensors(self, out: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the replacement tensors before mean-shift correction."""
        transforms = self.transforms
        replaced = {name: self.anatomy.tensor(name) for name in self.shared}
        weights = {name: replaced.get(name, self.anatomy.tensor(name).detach()) for name in transforms}
        device = self.anatomy.device.type  # computed weights are cached, so the first caller's autocast must not matter
        with torch.autocast(device, enabled=False) if is_autocast_available(device) else nullcontext():
            replaced.update(transformed(transforms, weights, out))
        for name, tensor in self.owned.items():
            replaced[name] = tensor.to(self.anatomy.tensor(name).dtype)
        return replaced

    def _corrected_biases(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return each norm layer's bias minus the shift that the changed weights cause in the layer's mean output."""
        biases: dict[str, Tensor] = {}
        for name, mean in self.input_means.items():
            layer = str(self.anatomy.weights[name].feeds)
            norm: Any = self.anatomy.backbone.get_submodule(layer)
            change = widened(tensors[name]) - widened(self.anatomy.tensor(name).detach())
            scale, variance = (widened(tensors[f"{layer}.{part}"]) for part in ("weight", "running_var"))
            shift = (change * mean).flatten(1).sum(1) * scale * torch.rsqrt(variance + norm.eps)
            biases[f"{layer}.bias"] = widened(tensors[f"{layer}.bias"]) - shift
        return biases

    def learns(self) -> bool:
        """Return whether any of the task's parameters requires a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters())

    def sources(self) -> list[Tensor]:
        """Return the task's tensors that `tensors()` depends on. A write to one of them makes its result stale."""
        used = [t for n, t in self.owned.items() if self.input_means or t.dtype != self.anatomy.tensor(n).dtype]
        buffers = [buffer for task in (self, *self.earlier) for buffer in task._transforms.buffers()]
        return [*self.parameters(), *buffers, *used]

    def roles(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each trainable parameter with its role, which sets its learning rate.

        Roles are scores, k, k1, weights, norms and head.
        """
        head = set(self.anatomy.head_names())
        norms = {name for names in self.anatomy.norms.values() for name in names}
        pairs = [(t.role(name), p) for t in self.transforms.values() for name, p in t.named_parameters()]
        for name, tensor in self.owned.items():
            if isinstance(tensor, nn.Parameter):
                pairs.append(("head" if name in head else "norms" if name in norms else "weights", tensor))
        if self.head is not None:
            pairs += [("head", parameter) for parameter in self.head.parameters()]
        return ((role, parameter) for role, parameter in pairs if parameter.requires_grad)

    def bits(self, *, statistics: bool = True) -> int:
        """Return the task's size in bits without its head. The paper's "# Params" excludes running statistics."""
        head = set(self.anatomy.head_names())
        sizes = [
            tensor.numel()
            for name, tensor in self.owned.items()
            if name not in head and (isinstance(tensor, nn.Parameter) or (statistics and tensor.is_floating_point()))
        ]
        return 32 * sum(sizes) + sum(t.bits(statistics=statistics) for t in self.transforms.values())

    def scale_k2_by_r(self, reach: float, seed: int) -> None:
        """Tie k2 to the size of R in untrained masks (`Masked.scale_k2_by_r`), with R up to `reach` * RMS(W)."""
        rng = torch.Generator().manual_seed(seed)
        for module in self._transforms.modules():
            if isinstance(module, Masked):
                module.scale_k2_by_r(reach * rms(self.anatomy.tensor(module.weight.name)), rng)
        self.revision += 1

    def set_hardness(self, hardness: float) -> None:
        """Set how close training weights are to bits: 0 is W + R, 1 is bits (`Masked.hardness`)."""
        for module in self._transforms.modules():
            if isinstance(module, Masked | Levels):
                module.hardness = hardness
        self.spend()

    def learned_levels(self) -> list[Levels]:
        """Return the levels that are still trained."""
        return [one for one in self.transforms.values() if isinstance(one, Levels) and one.scores is not None]

    def spend(self, other_bits: float | None = None) -> None:
        """Fit levels that are trained to the task's bit budget, minus the bits of everything else in its file."""
        self._other_bits = other_bits if other_bits is not None else self._other_bits
        if levels := self.learned_levels():
            vectors = [p for n, p in self.owned.items() if n in self.anatomy.norm_of and isinstance(p, nn.Parameter)]
            fit_cells_to_file(levels, self.metadata.options["bits"], vectors, self._other_bits)

    def exchange(self, gone: Iterable[str], transforms: Mapping[str, Transform]) -> None:
        """Replace tensors owned outright by transforms."""
        self._owned = _module_of({name: tensor for name, tensor in self.owned.items() if name not in set(gone)})
        self._transforms.update({dotless(name): transform for name, transform in transforms.items()})
        self.revision += 1

    def correct_mean_shift(self, means: Mapping[str, Tensor]) -> None:
        """Compensate the mean shift of changed weights, given each weight's mean input by the weight's name.

        A changed weight shifts its layer's output on every image by the change times the mean input. While the task
        learns, the bias of the following norm layer cancels that shift.
        """
        self._input_means = _module_of(means)
        self.revision += 1

    @torch.no_grad()
    def _fold_mean_shift(self, last: bool = False) -> None:
        """Store the corrected biases as the biases. The task's tensors stay the same to the last bit.

        Levels that are still trained keep the correction until `last`.
        """
        if self.input_means and (last or not self.learned_levels()):
            for name, bias in self._corrected_biases(self._uncorrected_tensors()).items():
                self.owned[name].copy_(bias)
            self.correct_mean_shift({})

    def _share(self, names: Iterable[str]) -> None:
        """Train these tensors of the backbone along with the task, and no others."""
        self.shared = frozenset(names)
        self.revision += 1

    def freeze(self) -> "Task":
        """End training: masks become bits, and nothing requires a gradient. Outputs stay the same to the last bit."""
        self._fold_mean_shift(last=True)
        for transform in self.transforms.values():
            transform.freeze()
        self.revision += 1
        return self.requires_grad_(False)

    def prune(self, share: float) -> "Task":
        """Release the smallest `share` of the weights that this task owns in each layer (PackNet)."""
        if not 0 <= share < 1:
            raise TaskError(f"prune({share}): the share must be at least 0 and below 1")
        if not (packed := [t for t in self.transforms.values() if isinstance(t, Packed)]):
            raise TaskError(f"task {self.name!r} has method {self.metadata.method!r}, which has nothing to prune")
        for transform in packed:
            transform.prune(share)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Task":
        """Change the device or memory format. Dtypes stay: learned tensors are float32 in any network."""

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else torch.empty_like(moved, dtype=tensor.dtype).copy_(tensor)

        self.revision += 1
        super()._apply(keep, recurse)  # type: ignore[no-untyped-call]
        return self

    def match_statistics(self) -> None:
        """Convert running statistics to the backbone's dtypes, since norm layers update them in place in training."""
        for key, tensor in list(self._owned.named_buffers(remove_duplicate=False)):
            if tensor.dtype != (dtype := self.anatomy.tensor(dotted(key)).dtype):
                setattr(self._owned, key, tensor.to(dtype))
                self.revision += 1

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Allocate the input means that the state holds, since this task may have none, or others."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        start = f"{prefix}_input_means."
        means = {dotted(key.removeprefix(start)): mean for key, mean in state_dict.items() if key.startswith(start)}
        if means or any(key.startswith(f"{prefix}_owned.") for key in state_dict):
            known = {name: self.anatomy.tensor(name).device for name in means if name in self.anatomy.weights}
            self.correct_mean_shift({n: torch.empty_like(means[n], device=device) for n, device in known.items()})
        self.revision += 1  # load_state_dict(assign=True) replaces tensors

    def get_extra_state(self) -> Tensor:
        """Store the method and its options, which change what the same tensors mean, as JSON in a tensor."""
        stated = {**self.metadata.options, "method": self.metadata.method}
        return torch.frombuffer(bytearray(json.dumps(stated, default=str).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        ours, theirs = (json.loads(bytes(stated.tolist())) for stated in (self.get_extra_state(), state))
        for name, value in ours.items():
            if (there := theirs.get(name)) != value:
                raise TaskError(f"task {self.name!r} has {name}={value!r}, but in this state dict it is {there!r}")

    def extra_repr(self) -> str:
        count = "no" if self.classes is None else len(self.classes)
        return f"{self.name!r}, method={self.metadata.method!r}, {count} class{'' if count == 1 else 'es'}"


@contextmanager
def evaluating(*tasks: Task) -> Iterator[None]:
    """Put tasks into evaluation mode, until the end."""
    with ExitStack() as stack:
        for task in [task for task in tasks if task.training]:
            stack.callback(task.eval().train)
        yield


@functools.lru_cache(maxsize=1 << 16)
def dotless(name: str) -> str:
    """Return a tensor's name as a valid attribute of a module: without dots, and unlike any method ("items")."""
    return "·" + name.replace(".", "·")


@functools.lru_cache(maxsize=1 << 16)
def dotted(key: str) -> str:
    """Invert `dotless`."""
    return key[1:].replace("·", ".")


def _module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a module that holds these tensors, so that they are moved and saved with the task."""
    holder = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(dotless(name), tensor)
        else:
            holder.register_buffer(dotless(name), tensor)
    return holder


def _tensors_of(holder: nn.Module) -> dict[str, Tensor]:
    return {dotted(key): tensor for key, tensor in (holder._parameters | holder._buffers).items()}  # type: ignore[misc]
