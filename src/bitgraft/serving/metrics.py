"""Metrics in Prometheus' format. With several workers each writes a file, and any of them can add them up."""

import os
import tempfile
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess, values

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


def share_folder() -> "tempfile.TemporaryDirectory[str]":
    """Where workers put their numbers; to be called before any of them starts."""
    folder = tempfile.TemporaryDirectory(prefix="bitgraft-metrics-")
    os.environ[FOLDER] = folder.name
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]  # chosen at import, without the folder
    return folder


def forget_worker(process: int) -> None:
    """Drop the gauges of a worker that has ended; its counters stay."""
    multiprocess.mark_process_dead(process)  # type: ignore[no-untyped-call]


class Metrics:
    """The numbers of one worker."""

    def __init__(self) -> None:
        own = self._own = CollectorRegistry()

        def gauge(name: str, text: str, mode: str = "livesum") -> Gauge:
            return Gauge(name, text, registry=own, multiprocess_mode=mode)  # type: ignore[arg-type]

        self.requests = Counter("bitgraft_requests", "Responses", ["route", "status"], registry=own)
        self.seconds = Histogram(
            "bitgraft_request_seconds", "Time to respond", ["route"], registry=own, buckets=SECONDS
        )
        self.images = Counter("bitgraft_images", "Images answered", ["task"], registry=own)
        self.batch = Histogram("bitgraft_batch_images", "Images in a batch", registry=own, buckets=SIZES)
        self.computing = Counter("bitgraft_compute_seconds", "Time in the network", ["task"], registry=own)
        self.switches = Counter("bitgraft_switches", "Times that a task's weights were computed", registry=own)
        self.decoding = gauge("bitgraft_decoding_images", "Images being decoded or waiting for it")
        self.waiting = gauge("bitgraft_waiting_images", "Images in queues")
        self.resident = gauge("bitgraft_resident_tasks", "Tasks whose weights are computed")
        self.sessions = gauge("bitgraft_sessions", "Tasks that run in onnxruntime")
        self.session_bytes = gauge("bitgraft_session_bytes", "Memory of their sessions")
        self.tasks = gauge("bitgraft_tasks", "Tasks served", "livemax")
        self.broken = gauge("bitgraft_broken_files", "Files not served", "livemax")

    def text(self) -> bytes:
        if FOLDER not in os.environ or not Path(os.environ[FOLDER]).is_dir():
            return generate_latest(self._own)
        every = CollectorRegistry()
        multiprocess.MultiProcessCollector(every)  # type: ignore[no-untyped-call]
        return generate_latest(every)
