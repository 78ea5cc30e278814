"""The exception that becomes an HTTP error response."""

import math

from bitgraft.errors import ServingError


class HttpError(ServingError):
    """Sent to the client as {"error": message} with this status. `retry_after` is in seconds."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.retry_after = None if retry_after is None else max(1, min(60, math.ceil(retry_after)))

    def __reduce__(self) -> tuple[type["HttpError"], tuple[int, str, int | None]]:  # Ray pickles it
        return HttpError, (self.status, self.message, self.retry_after)
