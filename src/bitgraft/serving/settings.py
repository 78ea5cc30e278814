"""The settings of a service."""

import os
from pathlib import Path

from pydantic import BaseModel, ByteSize, Field


class Settings(BaseModel, frozen=True):
    """Limits hold for each worker. Sizes may be given as text: 2GB, 500MB, 1GiB."""

    store: Path
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    threads: int = 0
    """PyTorch's threads in each worker; 0 divides the cores among workers."""
    memory_budget: ByteSize = ByteSize(2 * 10**9)
    """Bytes that computed weights may take."""
    max_batch: int = 32
    max_wait_ms: float = 5.0
    """How long an image may wait for others of its task."""
    max_queue: int = 64
    """Images waiting for one task; four times as many for all tasks together."""
    max_upload: ByteSize = ByteSize(20 * 10**6)
    """Bytes of one request; eight times as many for all requests that are being read."""
    max_pixels: int = 32 * 10**6
    patience: float = 20.0
    """Seconds for a client to send its headers, and again to send its body."""
    grace: float = 30.0
    """Seconds to finish what was accepted after the signal to stop."""
    poll: float = 1.0
    """Seconds between checks for changed task files."""
    exact: bool = True
    """Run the images of a batch one by one, so that no answer depends on the rest of the batch."""
    device: str = "cpu"
    keys: tuple[bytes, ...] = Field(default=(), repr=False)
    """Hashes of the API keys; empty: no key is needed."""

    @property
    def max_waiting(self) -> int:
        return 4 * self.max_queue

    @property
    def max_reading(self) -> int:
        return 8 * self.max_upload

    @property
    def threads_each(self) -> int:
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.workers)
