"""What a client is told in place of an answer."""

import math

from bitgraft.errors import ServingError


class Refusal(ServingError):  # noqa: N818  # the client's fault or a full queue, not an error of ours
    """Becomes the response {"error": sentence} with this status."""

    def __init__(self, status: int, sentence: str, seconds: float | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence
        self.retry_after = None if seconds is None else max(1, min(60, math.ceil(seconds)))

    def __reduce__(self) -> tuple[type["Refusal"], tuple[int, str, int | None]]:  # replicas on Ray send it
        return Refusal, (self.status, self.sentence, self.retry_after)
