"""The responses of /v1/predict, for /openapi.json."""

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

Answer = TypedDict("Answer", {"class": str, "probability": float})


class Prediction(TypedDict):
    """One task's answers: a list per image, the likeliest class first. `milliseconds` is the time in the network."""

    task: str
    version: str
    milliseconds: float
    answers: list[list[Answer]]


class Predictions(TypedDict):
    """The answers of several tasks to the same images."""

    milliseconds: float
    tasks: list[Prediction]


class Guess(TypedDict):
    """A task and the probability that the image belongs to it."""

    task: str
    score: float


class Found(TypedDict):
    """An image's task (null if unknown), the likeliest tasks, and the answers of the first."""

    task: str | None
    route: list[Guess]
    answers: list[Answer]


class FoundPredictions(TypedDict):
    """The identified task and its answers, per image."""

    milliseconds: float
    images: list[Found]
