"""The backbone's fingerprint, computed on demand and cached until the weights change."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.runtime.snapshot import Snapshot


class Fingerprint:
    """A cached hash of all of the backbone's tensors except the head's."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy = anatomy
        self._cached: tuple[str, Snapshot] | None = None
        self._rounded = False

    def value(self) -> str:
        """Return the fingerprint of the current weights."""
        return self._current() or self._keep(self._anatomy.fingerprint())

    def forget(self) -> None:
        self._cached, self._rounded = None, False

    @contextmanager
    def carried(self, *, rounds: bool) -> Iterator[None]:
        """Keep the fingerprint while the weights are rounded, or moved after that: tasks still fit them."""
        value = self.value() if rounds and not self._is_meta() else self._current() if self._rounded else None
        yield
        self.forget()
        if value is not None and not self._is_meta():
            self._keep(value, rounded=True)

    def _current(self) -> str | None:
        if self._cached is None or not self._cached[1].matches(self._tensors()):
            return None
        return self._cached[0]

    def _keep(self, value: str, *, rounded: bool = False) -> str:
        self._cached, self._rounded = (value, Snapshot(self._tensors(), probe=True)), rounded
        return value

    def _tensors(self) -> list[Tensor]:
        self._anatomy.check_layers()
        return [self._anatomy.tensor(name) for name in self._anatomy.fingerprinted]

    def _is_meta(self) -> bool:
        return any(tensor.is_meta for tensor in self._tensors())

    def __getstate__(self) -> dict[str, Any]:
        return {"_anatomy": self._anatomy, "_known": self._current(), "_rounded": self._rounded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._anatomy, self._cached, self._rounded = state["_anatomy"], None, state["_rounded"]
        if state["_known"] is not None:
            self._keep(state["_known"], rounded=self._rounded)  # with a snapshot of the copied tensors
