"""The settings of a service; `bitgraft serve --help` explains each."""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, Field, ValidationError

from bitgraft.errors import ServingError
from bitgraft.runtime.engines import EngineName

MAX_TURNS = 4  # by default


class Settings(BaseModel, frozen=True):
    """Limits are per worker. Sizes are in bytes, or text such as 2GB, 500MB or 1GiB."""

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
    """Hashes of the API keys. Without any, requests need no key."""
    admin_keys: tuple[bytes, ...] = Field(default=(), repr=False)
    """Hashes of the keys that may change tasks. Without any, tasks cannot be changed over HTTP."""
    max_task: ByteSize = Field(ByteSize(500 * 10**6), ge=1)
    log_format: Literal["text", "json"] = "text"
    otlp: str = ""
    """The address of a trace collector, or "" for no traces."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as problem:
            error = problem.errors()[0]
            is_size = error["type"].startswith("byte_size")
            expected = "give a size such as 2GB, 500MB or 1GiB" if is_size else error["msg"].replace("Input", "it", 1)
            raise ServingError(f"{error['loc'][0]} {error['input']}: {expected}") from problem
        if self.exact and self.engine == "onnxruntime":
            raise ServingError("exact answers need PyTorch: leave out --engine, or give --engine torch")

    @property
    def max_waiting(self) -> int:
        """Images that may wait for all tasks together."""
        return 4 * self.max_queue

    @property
    def max_reading(self) -> int:
        """Bytes that all open requests may take together."""
        return 8 * self.max_upload

    @property
    def use_sessions(self) -> bool:
        """Whether busy tasks get onnxruntime sessions."""
        return self.engine != "torch" and not self.exact and self.device == "cpu"

    @property
    def threads_per_worker(self) -> int:
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.workers)

    @property
    def turns_per_worker(self) -> int:
        """Batches that run at the same time."""
        return self.turns or min(self.threads_per_worker, MAX_TURNS)

    @property
    def threads_per_turn(self) -> int:
        return max(1, self.threads_per_worker // self.turns_per_worker)
