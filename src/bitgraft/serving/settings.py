"""The settings of a service; `bitgraft serve --help` explains each."""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, Field, ValidationError

from bitgraft.errors import ServingError
from bitgraft.runtime.engines import EngineName

TURNS = 4  # at most, unless told


class Settings(BaseModel, frozen=True):
    """Limits hold for each worker. Sizes are in bytes, or text: 2GB, 500MB, 1GiB."""

    store: Path
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    workers: int = Field(1, ge=1)
    threads: int = Field(0, ge=0)
    turns: int = Field(0, ge=0)
    memory_budget: ByteSize = Field(ByteSize(2 * 10**9), ge=0)
    max_batch: int = Field(32, ge=1)
    max_wait_ms: float = Field(0.0, ge=0)
    max_queue: int = Field(64, ge=1)
    max_upload: ByteSize = Field(ByteSize(20 * 10**6), ge=1)
    max_pixels: int = Field(32 * 10**6, ge=1)
    patience: float = Field(20.0, ge=0.1)
    grace: float = Field(30.0, ge=0)
    poll: float = Field(1.0, ge=0.05)
    exact: bool = False
    engine: EngineName = "auto"
    pin: tuple[str, ...] = ()
    device: str = "cpu"
    keys: tuple[bytes, ...] = Field(default=(), repr=False)
    """Hashes of the API keys; empty: no key is needed."""
    admin_keys: tuple[bytes, ...] = Field(default=(), repr=False)
    """Hashes of the keys that may change tasks; empty: nobody may."""
    max_task: ByteSize = Field(ByteSize(500 * 10**6), ge=1)
    log_format: Literal["text", "json"] = "text"
    otlp: str = ""
    """Where traces go: a collector's address; empty: nowhere."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as problem:
            fault = problem.errors()[0]
            sized = fault["type"].startswith("byte_size")
            expected = "give a size, as in 2GB, 500MB or 1GiB" if sized else fault["msg"].replace("Input", "it", 1)
            raise ServingError(f"{fault['loc'][0]} {fault['input']}: {expected}") from problem
        if self.exact and self.engine == "onnxruntime":
            raise ServingError("exact answers are PyTorch's: leave out --engine, or give --engine torch")

    @property
    def max_waiting(self) -> int:
        """Images waiting for all tasks together."""
        return 4 * self.max_queue

    @property
    def max_reading(self) -> int:
        """Bytes of all requests that are being read."""
        return 8 * self.max_upload

    @property
    def sessions(self) -> bool:
        """Busy tasks go over to onnxruntime."""
        return self.engine != "torch" and not self.exact and self.device == "cpu"

    @property
    def threads_each(self) -> int:
        """Of a worker."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.workers)

    @property
    def turns_each(self) -> int:
        """Batches that run at once in a worker."""
        return self.turns or min(self.threads_each, TURNS)

    @property
    def threads_per_turn(self) -> int:
        return max(1, self.threads_each // self.turns_each)
