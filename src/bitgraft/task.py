"""A task: its name, method and classes, and the tensors that replace the backbone's own."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.backbone.files import check_name as check_name
from bitgraft.errors import TaskError
from bitgraft.transforms.base import Prunable, Transform, widened
from bitgraft.transforms.levels import Levels, fit_cells_to_file
from bitgraft.transforms.masked import Masked, transformed
from bitgraft.transforms.shared_masks import own_mask

if TYPE_CHECKING:
    from bitgraft.format.description import Description
    from bitgraft.format.metadata import Metadata


class Task(nn.Module):
    """Everything in the paper's Ω_i: weight transforms, and tensors owned outright (norm layers, the head)."""

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
        self.preset = "default"  # what `fit` takes its settings from
        self.holds_statistics = False  # norm layers normalise by running statistics in training, too, and leave them
        self.description: Description | None = None  # of its inputs, for finding the task of an image
        self._others: float | None = None  # bits that a file takes besides its levels, once that is known
        self.is_compact = False  # rounded to what a small file holds (`bitgraft.compact`)
        self.revision = 0  # counts the times that tensors were exchanged for others, not merely written to
        self.train_forwards = 0  # runs with gradients: an optimiser may have written since
        self.shared: frozenset[str] = frozenset()  # tensors of the backbone that learn along with it (joint training)
        self._transforms = nn.ModuleDict({dotless(name): transform for name, transform in transforms.items()})
        self._owned, self._input_means = _holder(owned), _holder({})
        self.head = head

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self.metadata.classes

    @property
    def transforms(self) -> dict[str, Transform]:
        """The transforms by the backbone's names of the weights they take."""
        return {dotted(key): transform for key, transform in self._transforms.items()}  # type: ignore[misc]

    @property
    def owned(self) -> dict[str, Tensor]:
        """The tensors stored outright, parameters and statistics, by the backbone's names."""
        return _held(self._owned)

    @property
    def input_means(self) -> dict[str, Tensor]:
        """The mean of what weights take in, by their names (`correct_mean_shift`)."""
        return _held(self._input_means)

    def tensors(self, out: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The replacement tensors, by the backbone's own names, in the backbone's dtypes.

        Computed weights of a frozen task may be written to the tensors in `out`, and are those then.
        """
        held = self._tensors_as_held(out)
        held.update((name, bias.to(held[name].dtype)) for name, bias in self._corrected_biases(held).items())
        return held

    def stored(self) -> dict[str, Tensor]:
        """`owned` as a file holds it: biases are what mean-shift correction makes of them."""
        corrected = self._corrected_biases(self._tensors_as_held()) if self.input_means else {}
        return {**self.owned, **corrected}

    def _tensors_as_held(self, out: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        replaced = {name: self.anatomy.tensor(name) for name in self.shared}
        transforms = self.transforms
        weights = {name: self.anatomy.tensor(name) for name in transforms}
        with self._own_precision():
            given = {name: w if name in self.shared else w.detach() for name, w in weights.items()}
            replaced.update(transformed(transforms, given, out))
        for name, tensor in self.owned.items():
            replaced[name] = tensor.to(self.anatomy.tensor(name).dtype)
        return replaced

    def _corrected_biases(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Biases of norm layers, less what changed weights add to the mean of what the layers take in."""
        biases: dict[str, Tensor] = {}
        for name, mean in self.input_means.items():
            layer = str(self.anatomy.weights[name].feeds)
            norm: Any = self.anatomy.backbone.get_submodule(layer)
            change = widened(tensors[name]) - widened(self.anatomy.tensor(name).detach())
            scale, variance = (widened(tensors[f"{layer}.{part}"]) for part in ("weight", "running_var"))
            added = (change * mean).flatten(1).sum(1) * scale * torch.rsqrt(variance + norm.eps)
            biases[f"{layer}.bias"] = widened(tensors[f"{layer}.bias"]) - added
        return biases

    def _own_precision(self) -> contextlib.AbstractContextManager[Any]:
        """Without autocast: weights are kept, so they must be the same whoever asks for them first."""
        device = self.anatomy.device.type
        return torch.autocast(device, enabled=False) if is_autocast_available(device) else contextlib.nullcontext()

    def learns(self) -> bool:
        """Something in the task asks for a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters())

    def sources(self) -> list[Tensor]:
        """The tensors that `tensors` is computed from, the backbone's apart: a write to one makes it stale."""
        held = [tensor for transform in self._transforms.values() for tensor in transform.buffers()]
        other = [t for n, t in self.owned.items() if t.dtype != self.anatomy.tensor(n).dtype]
        return [*self.parameters(), *held, *other]

    def roles(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is learned, each with its role (scores, k, k1, weights, norms, head), so that each has its rate."""
        head = set(self.anatomy.head_names())
        norms = {name for names in self.anatomy.norms.values() for name in names}
        held = [(t.role(name), p) for t in self.transforms.values() for name, p in t.named_parameters()]
        for name, tensor in self.owned.items():
            if isinstance(tensor, nn.Parameter):
                held.append(("head" if name in head else "norms" if name in norms else "weights", tensor))
        if self.head is not None:
            held += [("head", parameter) for parameter in self.head.parameters()]
        return ((role, parameter) for role, parameter in held if parameter.requires_grad)

    def bits(self, *, statistics: bool = True) -> int:
        """What the task costs, head apart. The paper's "# Params" leaves out running statistics."""
        head = set(self.anatomy.head_names())
        kept = [
            tensor.numel()
            for name, tensor in self.owned.items()
            if name not in head and (isinstance(tensor, nn.Parameter) or (statistics and tensor.is_floating_point()))
        ]
        return 32 * sum(kept) + sum(t.bits(statistics=statistics) for t in self.transforms.values())

    def scale_k2_by_r(self, reach: float, seed: int) -> None:
        """Scale k2 by R in masks that have learned nothing yet (`Masked.scale_k2_by_r`)."""
        rng = torch.Generator().manual_seed(seed)
        for module in self._transforms.modules():
            if isinstance(module, Masked):
                module.scale_k2_by_r(reach, rng)
        self.revision += 1

    def set_hardness(self, hardness: float) -> None:
        """How far masks that learn are on their way from W + R to bits (`Masked.hardness`), and what they may cost."""
        for module in self._transforms.modules():
            if isinstance(module, Masked | Levels):
                module.hardness = hardness
        self.spend()

    def learned_levels(self) -> list[Levels]:
        return [one for one in self.transforms.values() if isinstance(one, Levels) and one.scores is not None]

    def spend(self, others: float | None = None) -> None:
        """Let levels that learn take the bits that the task may cost, less those that others take in its file."""
        self._others = others if others is not None else self._others
        if levels := self.learned_levels():
            vectors = [p for n, p in self.owned.items() if n in self.anatomy.norm_of and isinstance(p, nn.Parameter)]
            fit_cells_to_file(levels, self.metadata.options["bits"], vectors, self._others)

    def exchange(self, gone: Iterable[str], transforms: Mapping[str, Transform]) -> None:
        """Have transforms in the place of tensors owned outright."""
        self._owned = _holder({name: tensor for name, tensor in self.owned.items() if name not in set(gone)})
        self._transforms.update({dotless(name): transform for name, transform in transforms.items()})
        self.revision += 1

    def correct_mean_shift(self, means: Mapping[str, Tensor]) -> None:
        """Let what changes in a weight act on its inputs less their means, which are given by the weight's name.

        A bit that flips, or a weight that learns, moves its layer's output on every image alike by the mean of what it
        takes in. The bias of the norm layer behind it makes up for that from here on, as long as the task learns.
        """
        self._input_means = _holder(means)
        self.revision += 1

    @torch.no_grad()
    def _fold_mean_shift(self, last: bool = False) -> None:
        """Let the biases be what they have come to. The task's tensors stay the same to the last bit. Where cells of
        levels may still change, biases follow them until the last."""
        if self.input_means and (last or not self.learned_levels()):
            for name, bias in self._corrected_biases(self._tensors_as_held()).items():
                self.owned[name].copy_(bias)
            self.correct_mean_shift({})

    def start_from(self, earlier: "Task") -> None:
        """Begin where another task is, head apart: with its masks, its k and its norm layers."""
        theirs, held, head = earlier.transforms, earlier.stored(), set(self.anatomy.head_names())
        for name, transform in self.transforms.items():
            mine, other = own_mask(transform), theirs.get(name)
            if mine is None or not isinstance(other, Masked):
                raise TaskError(
                    f"a task cannot begin as {earlier.name!r}: its {name!r} is no mask that stands by itself"
                )
            mine.start_as(other, self.anatomy.tensor(name))
        with torch.no_grad():
            for name, tensor in self.owned.items():
                if name in held and name not in head:
                    tensor.copy_(held[name])
        self.revision += 1

    def _share(self, names: Iterable[str]) -> None:
        """Let gradients reach these tensors of the backbone, and no others."""
        self.shared = frozenset(names)
        self.revision += 1

    def freeze(self) -> "Task":
        """End of learning: masks become bits, nothing asks for a gradient. Outputs stay the same to the last bit."""
        self._fold_mean_shift(last=True)
        for transform in self.transforms.values():
            transform.freeze()
        self.revision += 1
        return self.requires_grad_(False)

    def prune(self, share: float) -> "Task":
        """Give up the smallest `share` of the weights that this task owns in each layer (PackNet)."""
        prunable = [t for t in self.transforms.values() if isinstance(t, Prunable)]
        if not prunable:
            raise TaskError(f"task {self.name!r} is of method {self.metadata.method!r}, which has nothing to prune")
        if not 0 <= share < 1:
            raise TaskError(f"prune takes the share of weights to give up, at least 0 and below 1, not {share}")
        for transform in prunable:
            transform.prune(share)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Task":
        """Move to a device or a memory format; what is learned stays in float32 whatever dtype the network takes."""

        def keep(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else torch.empty_like(moved, dtype=tensor.dtype).copy_(tensor)

        self.revision += 1
        super()._apply(keep, recurse)  # type: ignore[no-untyped-call]
        return self

    def match_statistics(self) -> None:
        """Put running statistics in the dtype of the backbone's, since layers that learn update them in place."""
        for key, tensor in list(self._owned.named_buffers(remove_duplicate=False)):
            if tensor.dtype != (dtype := self.anatomy.tensor(dotted(key)).dtype):
                setattr(self._owned, key, tensor.to(dtype))
                self.revision += 1

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Expect the input means that the state has: a fresh task has none, and a task that learns may have others."""
        start = f"{prefix}_input_means."
        given = {dotted(key.removeprefix(start)): mean for key, mean in state_dict.items() if key.startswith(start)}
        if given or any(key.startswith(f"{prefix}_owned.") for key in state_dict):
            known = {name: self.anatomy.tensor(name).device for name in given if name in self.anatomy.weights}
            self.correct_mean_shift({n: torch.empty_like(given[n], device=device) for n, device in known.items()})
        self.revision += 1  # load_state_dict(assign=True) puts other tensors in place
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        count = len(self.classes) if self.classes is not None else "no"
        return f"{self.name!r}, method={self.metadata.method!r}, {count} classes, {self.bits() / 8000:.0f} kB"


@functools.lru_cache(maxsize=1 << 16)
def dotless(name: str) -> str:
    """A name as modules can hold it: without dots, and unlike any attribute ("items", "train"). One for all tasks."""
    return "·" + name.replace(".", "·")


@functools.lru_cache(maxsize=1 << 16)
def dotted(key: str) -> str:
    return key[1:].replace("·", ".")


def _holder(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module that holds tensors by the backbone's names."""
    holder = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(dotless(name), tensor)
        else:
            holder.register_buffer(dotless(name), tensor)
    return holder


def _held(holder: nn.Module) -> dict[str, Tensor]:
    return {dotted(key): tensor for key, tensor in (holder._parameters | holder._buffers).items()}  # type: ignore[misc]
