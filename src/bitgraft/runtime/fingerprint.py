"""The backbone's fingerprint, computed when it is asked for and kept until the weights change."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from bitgraft.backbone.anatomy import Anatomy
from bitgraft.runtime.snapshot import Snapshot


class Fingerprint:
    """A hash over everything but the head, which holds for the tensors that it was computed from, as they were then."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy = anatomy
        self._known: tuple[str, Snapshot] | None = None
        self._rounded = False

    def value(self) -> str:
        """The fingerprint of the weights as they are now."""
        known = self._current()
        if known is None:
            self.forget()
            self._keep(known := self._anatomy.fingerprint())
        return known

    def forget(self) -> None:
        self._known, self._rounded = None, False

    @contextmanager
    def carried(self, *, rounds: bool) -> Iterator[None]:
        """Keep the fingerprint while the weights are rounded, and moved after that: they still take their tasks."""
        known = self.value() if rounds and not self._is_meta() else self._current() if self._rounded else None
        yield
        self.forget()
        if known is not None and not self._is_meta():
            self._keep(known)
            self._rounded = True

    def _current(self) -> str | None:
        if self._known is None or not self._known[1].matches(self._covered()):
            return None
        return self._known[0]

    def _keep(self, known: str) -> None:
        self._known = known, Snapshot(self._covered(), probe=True)

    def _covered(self) -> list[Tensor]:
        """The tensors that count. Writing to others changes nothing."""
        return [self._anatomy.tensor(name) for name in self._anatomy.fingerprinted]

    def _is_meta(self) -> bool:
        return any(tensor.is_meta for tensor in self._covered())

    def __getstate__(self) -> dict[str, Any]:
        return {"_anatomy": self._anatomy, "_known": self._current(), "_rounded": self._rounded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._anatomy, self._known, self._rounded = state["_anatomy"], None, state["_rounded"]
        if state["_known"] is not None:
            self._keep(state["_known"])  # for the copied tensors
