"""Servers in their own processes, and clients that send requests in a loop and check every answer."""

import http.client
import io
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PATIENCE = 120.0  # seconds for a server to start
BOUNDARY = b"----picture"
Asked = tuple[str, int]
"""A task, and a picture by number."""


@dataclass
class Side:
    """One set-up: its servers, the requests sent to them, and the results."""

    title: str
    ports: dict[str, int]
    """Port of each task."""
    processes: list[int]
    wanted: dict[Asked, Any]
    """The offline answers."""
    weights: Sequence[float] | None = None
    """Request frequency of each task; None means equal."""
    tolerance: float = 1e-5
    """Allowed difference of a probability from the offline one; 0 means bit-identical."""
    form: bool = False
    """Send pictures as multipart forms."""
    rates: list[float] = field(default_factory=list)
    """Requests per second in each round."""
    processor: list[float] = field(default_factory=list)
    """CPU seconds per request in each round."""
    seconds: list[float] = field(default_factory=list)
    """Latency of every request."""
    wrong: int = 0

    def plain(self) -> dict[str, Any]:
        ordered = sorted(self.seconds)
        return {
            "server": self.title,
            "requests_per_second": round(statistics.median(self.rates), 1),
            "cpu_ms_per_request": round(1000 * statistics.median(self.processor), 1),
            **{f"p{share}_ms": round(1000 * ordered[len(ordered) * share // 100]) for share in (50, 99)},
            "slowest_ms": round(1000 * ordered[-1]),
            "megabytes": round(self.megabytes()),
            "answers_checked": len(ordered),
            "answers_wrong": self.wrong,
            "rates": [round(rate, 2) for rate in self.rates],
        }

    def family(self) -> list[int]:
        return [process for parent in self.processes for process in _family(parent)]

    @contextmanager
    def alone(self, others: "Sequence[Side]") -> Iterator[None]:
        """Suspend the other sides: LitServe keeps a core busy while it waits for requests."""
        idle = [process for side in others if side is not self for process in side.family()]
        _signal(idle, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(idle, signal.SIGCONT)

    def megabytes(self) -> float:
        """Return private memory plus the largest process's file-backed memory, mostly libraries."""
        anonymous, files = zip(*map(_memory, self.family()), strict=True)
        return (sum(anonymous) + max(files)) / 1e6


@contextmanager
def running(command: Sequence[str], threads: int) -> Iterator[tuple[int, int]]:
    """Start a server that prints its address first; yield its process id and port once it answers."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)/", process.stdout.readline())
        if found is None or not _answers(int(found[1])):
            raise SystemExit(f"the server did not start; run it by hand: `python {' '.join(command)}`")
        yield process.pid, int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # remaining children
        process.wait()


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _answers(port: int) -> bool:
    """Return whether the server becomes ready; servers without /readyz answer 404."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            line = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            line.request("GET", "/readyz")
            if line.getresponse().status in (200, 404):
                return True
        except OSError:
            pass
        time.sleep(0.1)
    return False


def picture(seed: int) -> bytes:
    """Return a JPEG with the size and texture of a photograph: noise at several scales."""
    rng = np.random.default_rng(seed)
    layers = [Image.fromarray(rng.integers(0, 256, (n, n, 3), dtype=np.uint8)).resize((320, 280)) for n in (4, 16, 64)]
    file = io.BytesIO()
    Image.fromarray(np.mean([np.asarray(layer) for layer in layers], 0).astype(np.uint8)).save(file, "JPEG")
    return file.getvalue()


def traffic(side: Side, pictures: Sequence[bytes], seconds: float, clients: int) -> None:
    """Run one round with concurrent clients; check their answers afterwards."""
    done: list[list[tuple[Asked, float, bytes]]] = [[] for _ in range(clients)]
    end, seed, before = time.perf_counter() + seconds, clients * len(side.rates), _processor(side.family())
    threads = [
        threading.Thread(target=_client, args=(side, pictures, end, seed + number, done[number]))
        for number in range(clients)
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, every = time.perf_counter() - began, [one for some in done for one in some]
    side.rates.append(len(every) / took)
    side.processor.append((_processor(side.family()) - before) / len(every))
    side.seconds += [seconds for _, seconds, _ in every]
    side.wrong += sum(not _right(said, side.wanted[asked], side.tolerance) for asked, _, said in every)


def _client(side: Side, pictures: Sequence[bytes], end: float, seed: int, done: list[Any]) -> None:
    rng, lines = random.Random(seed), {}
    names = list(side.ports)
    while time.perf_counter() < end:
        (name,), number = rng.choices(names, side.weights), rng.randrange(len(pictures))
        port = side.ports[name]
        line = lines.setdefault(port, http.client.HTTPConnection("127.0.0.1", port))
        path, body, kind = f"/v1/predict/{name}", pictures[number], "image/jpeg"
        if side.form:
            path, body, kind = "/v1/predict", *form([body])
        began = time.perf_counter()
        line.request("POST", path, body, {"Content-Type": kind})
        said = line.getresponse().read()
        done.append(((name, number), time.perf_counter() - began, said))
    for line in lines.values():
        line.close()


def form(pictures: Sequence[bytes]) -> tuple[bytes, str]:
    """Return the body and content type of a form with these files."""
    head = b'\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
    parts = [b"--" + BOUNDARY + head + data + b"\r\n" for data in pictures]
    return b"".join([*parts, b"--" + BOUNDARY + b"--\r\n"]), f"multipart/form-data; boundary={BOUNDARY.decode()}"


def post(port: int, path: str, body: bytes, kind: str) -> bytes:
    line = http.client.HTTPConnection("127.0.0.1", port)
    line.request("POST", path, body, {"Content-Type": kind})
    return line.getresponse().read()


def get(port: int, path: str) -> bytes:
    line = http.client.HTTPConnection("127.0.0.1", port)
    line.request("GET", path)
    return line.getresponse().read()


def _right(said: bytes, wanted: Any, tolerance: float) -> bool:
    given = json.loads(said).get("answers")
    if not given or not tolerance:
        return bool(given == [wanted])
    pairs = zip(given[0], wanted, strict=True)
    near = all(abs(one["probability"] - other["probability"]) <= tolerance for one, other in pairs)
    return near and (tolerance > 1e-3 or given[0][0]["class"] == wanted[0]["class"])  # baselines preprocess differently


def _family(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [parent, *(process for child in children for process in _family(int(child)))]


def _processor(processes: Sequence[int]) -> float:
    """Return the CPU seconds used by these processes."""
    fields = [Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split() for process in processes]
    return sum(int(user) + int(system) for user, system in (f[11:13] for f in fields)) / os.sysconf("SC_CLK_TCK")


def _memory(process: int) -> tuple[int, int]:
    """Return anonymous memory (shared pages split between processes) and file-backed memory, in bytes."""
    own = re.search(r"Pss_Anon:\s+(\d+)", Path(f"/proc/{process}/smaps_rollup").read_text())
    files = re.search(r"RssFile:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    assert own is not None
    assert files is not None
    return 1024 * int(own[1]), 1024 * int(files[1])
