"""uvicorn's HTTP, with an end to a client's time for sending its headers."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 20.0  # seconds


class PatientProtocol(H11Protocol):
    """Between two requests uvicorn waits a few seconds, but for a request that has begun, or never came, for ever."""

    patience = PATIENCE
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self.patience, self._give_up)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and self._between_requests():
            self._deadline = self.loop.call_later(self.patience, self._give_up)
        super().data_received(data)
        if not self._between_requests():
            self._forget_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _give_up(self) -> None:
        self._deadline = None
        if self._between_requests() and not self.transport.is_closing():
            self.transport.close()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def patient(seconds: float) -> type[PatientProtocol]:
    return type("Protocol", (PatientProtocol,), {"patience": seconds})
