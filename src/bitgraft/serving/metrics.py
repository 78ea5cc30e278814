"""Prometheus metrics. With several workers each writes to files in a shared folder, and any of them can sum up all."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess, values

from bitgraft.serving.http_error import HttpError
from bitgraft.serving.library import Entry

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TASK = ("task", "version")  # the version is stable or canary
COARSE = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0)  # seconds, per task: with 1,000 tasks each bucket is 1,000 lines
SIZES = (1, 2, 4, 8, 16, 32, 64)


def share_folder() -> "tempfile.TemporaryDirectory[str]":
    """Create the workers' shared folder. Call it before any worker starts."""
    folder = tempfile.TemporaryDirectory(prefix="bitgraft-metrics-")
    os.environ[FOLDER] = folder.name
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]  # it was chosen at import
    return folder


class Metrics:
    """The metrics of one worker."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def gauge(name: str, text: str, mode: str = "livesum", labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(name, text, labels, registry=registry, multiprocess_mode=mode)  # type: ignore[arg-type]

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=COARSE if "task" in labels else SECONDS)

        self.requests = counter("bitgraft_requests", "Responses", "route", "status")
        self.seconds = seconds("bitgraft_request_seconds", "Response time", "route")
        self.task_requests = counter("bitgraft_task_requests", "Requests, failed ones included", *TASK, "status")
        self.images = counter("bitgraft_images", "Images answered", *TASK)
        self.queue_seconds = seconds("bitgraft_queue_seconds", "Time that an image waits for its batch", "task")
        self.compute_seconds = seconds("bitgraft_compute_seconds", "Time of a batch in the network", *TASK, "engine")
        self.batch = Histogram("bitgraft_batch_images", "Images per batch", registry=registry, buckets=SIZES)
        self.switches = counter("bitgraft_switches", "Batches for which a task's weights had to be computed")
        self.session_events = counter("bitgraft_session_events", "Sessions made and dropped", "task", "event")
        self.decoding = gauge("bitgraft_decoding_images", "Images being decoded or waiting for it")
        self.waiting = gauge("bitgraft_waiting_images", "Images in queues")
        self.queued = gauge("bitgraft_queue_images", "Images accepted and not yet answered", labels=("task",))
        self.resident = gauge("bitgraft_resident_tasks", "Tasks with computed weights in PyTorch")
        self.sessions = gauge("bitgraft_sessions", "Tasks with an onnxruntime session")
        self.session_bytes = gauge("bitgraft_session_bytes", "Memory of onnxruntime sessions")
        self.task_bytes = gauge(
            "bitgraft_task_bytes", "Memory per task and tier, largest over workers", "livemax", ("task", "tier")
        )
        self.tasks = gauge("bitgraft_tasks", "Tasks served", "livemax")
        self.broken = gauge("bitgraft_broken_files", "Task files that cannot be served", "livemax")
        self._task_bytes: Mapping[tuple[str, str], int] = {}

    @contextmanager
    def track(self, entries: Sequence[Entry], images: int) -> Iterator[None]:
        """Count a request to these tasks, and its images as queued until the block ends."""
        status = 500
        for entry in entries:
            self.queued.labels(entry.name).inc(images)
        try:
            yield
            status = 200
        except HttpError as error:
            status = error.status
            raise
        finally:
            for entry in entries:
                self.queued.labels(entry.name).dec(images)
                self.task_requests.labels(entry.name, entry.role, str(status)).inc()

    def set_task_bytes(self, sizes: Mapping[tuple[str, str], int]) -> None:
        """Set the bytes by task and tier; pairs that are missing become 0."""
        gone = dict.fromkeys(self._task_bytes.keys() - sizes.keys(), 0)
        for labels, size in {**gone, **sizes}.items():
            if self._task_bytes.get(labels) != size:
                self.task_bytes.labels(*labels).set(size)
        self._task_bytes = sizes

    def render(self) -> bytes:
        if FOLDER not in os.environ or not Path(os.environ[FOLDER]).is_dir():
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
