"""What a service is told when it starts."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from bitgraft.errors import ServingError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits are for each worker."""

    store: Path
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    threads: int = 0
    """PyTorch's threads in each worker; 0 shares the cores out."""
    memory_budget: int = 2 * 10**9
    """Bytes that computed weights may take."""
    max_batch: int = 32
    max_wait: float = 0.005
    """Seconds that an image may wait for others of its task."""
    max_queue: int = 64
    """Images waiting for one task; four times as many for all tasks together."""
    max_upload: int = 20 * 10**6
    """Bytes of one request; eight times as many for all requests that are being read."""
    max_pixels: int = 32 * 10**6
    patience: float = 20.0
    """Seconds for a client to send its headers, and again to send its body."""
    grace: float = 30.0
    """Seconds to finish what was accepted when the service is told to end."""
    poll: float = 1.0
    """Seconds between two looks at the store's folder."""
    exact: bool = True
    """Images of a batch run one by one, so that no answer depends on what else was in the batch."""
    device: str = "cpu"
    keys: tuple[bytes, ...] = field(default=(), repr=False)
    """API keys, hashed."""

    def __post_init__(self) -> None:
        least = {"workers": 1, "threads": 0, "max_batch": 1, "max_queue": 1, "max_upload": 1, "max_pixels": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ServingError(f"{name} is {getattr(self, name)}: it must be at least {bound}")

    @property
    def max_waiting(self) -> int:
        return 4 * self.max_queue

    @property
    def max_reading(self) -> int:
        return 8 * self.max_upload

    @property
    def threads_each(self) -> int:
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.workers)


def size(text: str) -> int:
    """Bytes from "2GB", "500 MB", "1GiB" or a plain number."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = found and UNITS.get(found[2].upper().removesuffix("B") + "B" if found[2] else "")
    if not found or not unit:
        raise ServingError(f"{text!r} is no size: write 2GB, 500MB, 1GiB or a number of bytes")
    return int(float(found[1]) * unit)
