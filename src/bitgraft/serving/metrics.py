"""What happened so far, in Prometheus' format. With several workers each writes a file, and any of them can add up."""

import os
import tempfile
from pathlib import Path

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


def share_folder() -> "tempfile.TemporaryDirectory[str]":
    """Where workers put their numbers; to be called before any of them starts."""
    folder = tempfile.TemporaryDirectory(prefix="bitgraft-metrics-")
    os.environ[FOLDER] = folder.name
    from prometheus_client import values

    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]  # it may have chosen at an earlier import
    return folder


def forget_worker(process: int) -> None:
    """What a worker that has ended says of the present counts no more; its counters go on counting."""
    from prometheus_client import multiprocess

    multiprocess.mark_process_dead(process)  # type: ignore[no-untyped-call]


class Metrics:
    """The numbers of one worker."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._own = own = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=own, multiprocess_mode="livesum")

        self.requests = Counter("bitgraft_requests", "Responses", ["route", "status"], registry=own)
        self.seconds = Histogram(
            "bitgraft_request_seconds", "Time to respond", ["route"], registry=own, buckets=SECONDS
        )
        self.images = Counter("bitgraft_images", "Images answered", ["task"], registry=own)
        self.batch = Histogram("bitgraft_batch_images", "Images in a batch", registry=own, buckets=SIZES)
        self.computing = Counter("bitgraft_compute_seconds", "Time in the network", ["task"], registry=own)
        self.switches = Counter("bitgraft_switches", "Times that a task's weights were computed", registry=own)
        self.decoding = gauge("bitgraft_decoding_images", "Images being decoded, or waiting for that")
        self.waiting = gauge("bitgraft_waiting_images", "Images in queues")
        self.resident = gauge("bitgraft_resident_tasks", "Tasks whose weights are computed")
        self.tasks = Gauge("bitgraft_tasks", "Tasks served", registry=own, multiprocess_mode="livemax")
        self.broken = Gauge("bitgraft_broken_files", "Files not served", registry=own, multiprocess_mode="livemax")

    def text(self) -> bytes:
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess

        if FOLDER not in os.environ or not Path(os.environ[FOLDER]).is_dir():
            return generate_latest(self._own)
        every = CollectorRegistry()
        multiprocess.MultiProcessCollector(every)  # type: ignore[no-untyped-call]
        return generate_latest(every)
