"""Metrics in Prometheus' format. With several workers each writes a file, and any of them can add them up."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess, values

from bitgraft.serving.library import Entry
from bitgraft.serving.refusals import Refusal

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TASK = ("task", "version")  # the version is stable or canary
COARSE = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0)  # seconds, by task: with 1,000 tasks each bucket is 1,000 lines
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

        def gauge(name: str, text: str, mode: str = "livesum", labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(name, text, labels, registry=own, multiprocess_mode=mode)  # type: ignore[arg-type]

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=own)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(name, text, labels, registry=own, buckets=COARSE if "task" in labels else SECONDS)

        self.requests = counter("bitgraft_requests", "Responses", "route", "status")
        self.seconds = seconds("bitgraft_request_seconds", "Time to respond", "route")
        self.task_requests = counter(
            "bitgraft_task_requests", "Requests for a task; refused ones have another status than 200", *TASK, "status"
        )
        self.images = counter("bitgraft_images", "Images answered", *TASK)
        self.queue_seconds = seconds("bitgraft_queue_seconds", "Time that an image waits for its batch", "task")
        self.compute_seconds = seconds("bitgraft_compute_seconds", "Time of a batch in the network", *TASK, "engine")
        self.batch = Histogram("bitgraft_batch_images", "Images in a batch", registry=own, buckets=SIZES)
        self.switches = counter("bitgraft_switches", "Times that a task's weights were computed")
        self.session_events = counter("bitgraft_session_events", "Sessions made and dropped", "task", "event")
        self.decoding = gauge("bitgraft_decoding_images", "Images being decoded or waiting for it")
        self.waiting = gauge("bitgraft_waiting_images", "Images in queues")
        self.queued = gauge(
            "bitgraft_queue_images", "Images of a task, accepted and not answered yet", labels=("task",)
        )
        self.resident = gauge("bitgraft_resident_tasks", "Tasks whose weights are computed")
        self.sessions = gauge("bitgraft_sessions", "Tasks that run in onnxruntime")
        self.session_bytes = gauge("bitgraft_session_bytes", "Memory of their sessions")
        self.task_bytes = gauge(
            "bitgraft_task_bytes", "Memory of a task by tier, in the worker with most", "livemax", ("task", "tier")
        )
        self.tasks = gauge("bitgraft_tasks", "Tasks served", "livemax")
        self.broken = gauge("bitgraft_broken_files", "Files not served", "livemax")
        self._sized: Mapping[tuple[str, str], int] = {}

    @contextmanager
    def asked(self, entries: Sequence[Entry], images: int) -> Iterator[None]:
        """Count a request for these tasks, and while it lasts the images in their queues."""
        status = 500
        for entry in entries:
            self.queued.labels(entry.name).inc(images)
        try:
            yield
            status = 200
        except Refusal as refusal:
            status = refusal.status
            raise
        finally:
            for entry in entries:
                self.queued.labels(entry.name).dec(images)
                self.task_requests.labels(entry.name, entry.role, str(status)).inc()

    def set_task_bytes(self, sizes: Mapping[tuple[str, str], int]) -> None:
        """Bytes by task and tier; what is not named any more has none."""
        gone = dict.fromkeys(self._sized.keys() - sizes.keys(), 0)
        for labels, size in {**gone, **sizes}.items():
            if self._sized.get(labels) != size:
                self.task_bytes.labels(*labels).set(size)
        self._sized = sizes

    def text(self) -> bytes:
        if FOLDER not in os.environ or not Path(os.environ[FOLDER]).is_dir():
            return generate_latest(self._own)
        every = CollectorRegistry()
        multiprocess.MultiProcessCollector(every)  # type: ignore[no-untyped-call]
        return generate_latest(every)
