"""What a client is told when it does not get an answer: a status, a sentence, and when to come back."""

from bitgraft.errors import ServingError


class Refusal(ServingError):  # noqa: N818  # it is what a client is told, not a fault
    """Becomes the response {"error": sentence} with this status."""

    def __init__(self, status: int, sentence: str, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.retry_after = status, sentence, retry_after

    def __reduce__(self) -> tuple[type["Refusal"], tuple[int, str, int | None]]:
        return Refusal, (self.status, self.sentence, self.retry_after)


def busy(sentence: str, seconds: float) -> Refusal:
    """The whole service has more to do than it takes on."""
    return Refusal(503, sentence, _wait(seconds))


def crowded(sentence: str, seconds: float) -> Refusal:
    """One task has more to do than it takes on; others may have room."""
    return Refusal(429, sentence, _wait(seconds))


def _wait(seconds: float) -> int:
    return max(1, min(60, round(seconds + 0.5)))
