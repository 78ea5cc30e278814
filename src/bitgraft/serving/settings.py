"""The settings of a service; `bitgraft serve --help` explains each."""

import os
from pathlib import Path

from pydantic import BaseModel, ByteSize, Field


class Settings(BaseModel, frozen=True):
    """Limits hold for each worker. Sizes are in bytes, or text: 2GB, 500MB, 1GiB."""

    store: Path
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    threads: int = 0
    memory_budget: ByteSize = ByteSize(2 * 10**9)
    max_batch: int = 32
    max_wait_ms: float = 5.0
    max_queue: int = 64
    max_upload: ByteSize = ByteSize(20 * 10**6)
    max_pixels: int = 32 * 10**6
    patience: float = 20.0
    grace: float = 30.0
    poll: float = 1.0
    exact: bool = True
    device: str = "cpu"
    keys: tuple[bytes, ...] = Field(default=(), repr=False)
    """Hashes of the API keys; empty: no key is needed."""

    @property
    def max_waiting(self) -> int:
        """Images waiting for all tasks together."""
        return 4 * self.max_queue

    @property
    def max_reading(self) -> int:
        """Bytes of all requests that are being read."""
        return 8 * self.max_upload

    @property
    def threads_each(self) -> int:
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.workers)
